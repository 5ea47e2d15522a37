"""Reading prompts: what a line may hold, and what is said about lines that do not."""

import json

import pytest

from sparsespec_jax.cli.errors import CommandError
from sparsespec_jax.cli.jobs import prompt_job, read_jobs


def read(*lines, params=(), raw=False):
    encoded = [line if isinstance(line, bytes) else json.dumps(line).encode() for line in lines]
    return read_jobs(encoded, "in.jsonl", dict(params), raw)


def refusal(*lines, raw=False) -> str:
    with pytest.raises(CommandError) as error:
        read(*lines, raw=raw)
    assert error.value.exit_code == 2
    return str(error.value)


def test_a_prompt_is_text_messages_or_token_ids():
    messages = [{"role": "user", "content": "hi"}]
    jobs = read({"prompt": "hi"}, {"messages": messages}, {"prompt_token_ids": [1, 2]})
    assert [job.prompt for job in jobs] == ["hi", messages, [1, 2]]


def test_a_line_without_an_id_is_known_by_its_number_and_blank_lines_count():
    jobs = read({"prompt": "a"}, b"\n", {"prompt": "b", "id": "x"}, b"  ", {"prompt": "c"})
    assert [job.id for job in jobs] == [1, "x", 5]


def test_other_keys_are_metadata():
    [job] = read({"id": "aime24-60", "prompt": "a", "answer": "204", "level": {"n": 1}})
    assert job.metadata == {"answer": "204", "level": {"n": 1}}


def test_params_of_a_line_win_over_those_of_the_command():
    own = {"max_tokens": 3, "stop": ["x"], "logit_bias": {"7": 2}}
    jobs = read({"prompt": "a", "params": own}, {"prompt": "b"}, params={"max_tokens": 9, "n": 2})
    assert jobs[0].params == {"max_tokens": 3, "n": 2, "stop": ["x"], "logit_bias": {7: 2}}
    assert jobs[1].params == {"max_tokens": 9, "n": 2}


def test_a_byte_order_mark_is_not_part_of_the_line():
    assert read(b'\xef\xbb\xbf{"prompt": "a"}')[0].prompt == "a"


@pytest.mark.parametrize(
    ("line", "message"),
    [
        (b'{"prompt": "a"', "in.jsonl:2: malformed JSON at column 15: Expecting ',' delimiter"),
        (b"[" * 100_000, "in.jsonl:2: malformed JSON"),
        (b"[1]", "in.jsonl:2: expected a JSON object, got [1]"),
        (b'{"prompt": "\xff"}', "in.jsonl:2: invalid UTF-8 at byte 13: invalid start byte"),
        ({"prompt": "a\ud800"}, "in.jsonl:2: invalid UTF-8 at character 2 of the prompt"),
        ({"prompt": ""}, "in.jsonl:2: the prompt is empty"),
        ({"messages": []}, "in.jsonl:2: messages is empty"),
        ({"prompt_token_ids": []}, "in.jsonl:2: prompt_token_ids is empty"),
        ({"prompt_token_ids": [1, True]}, "in.jsonl:2: prompt_token_ids must hold integers"),
        ({"prompt": 5}, "in.jsonl:2: prompt must be a string, got 5"),
        ({"text": "a"}, "in.jsonl:2: expected one of prompt, messages, prompt_token_ids, got none"),
        ({"prompt": "a", "prompt_token_ids": [1]}, "got prompt and prompt_token_ids"),
        ({"messages": ["hi"]}, "in.jsonl:2: messages must be objects with a role"),
        ({"prompt": "a", "id": [1]}, "in.jsonl:2: id must be a string or an integer, got [1]"),
        ({"prompt": "a", "id": 1}, "in.jsonl:2: id 1 is already on line 1"),
        ({"prompt": "a", "params": 3}, "in.jsonl:2: params must be an object, got 3"),
        ({"prompt": "a", "params": {"topk": 3}}, "there is no sampling field 'topk'"),
        ({"prompt": "a", "params": {"n": 0}}, "in.jsonl:2: n=0 is not allowed"),
    ],
)
def test_a_bad_line_is_named_by_its_number(line, message):
    assert message in refusal({"prompt": "good"}, line)


def test_messages_need_the_chat_template():
    assert "drop --raw" in refusal({"messages": [{"role": "user", "content": "a"}]}, raw=True)


def test_all_bad_lines_are_named_up_to_a_limit():
    message = refusal(*[b"?"] * 25)
    assert message.count("malformed JSON") == 10
    assert message.endswith("and 15 more lines")


def test_no_prompts_at_all_is_an_error():
    assert refusal(b"\n") == "in.jsonl holds no prompts"


def test_the_prompt_of_the_command_line_is_checked_alike():
    with pytest.raises(CommandError, match="the prompt is empty"):
        prompt_job("", {})
    with pytest.raises(CommandError, match="invalid UTF-8 at character 1"):
        prompt_job("\udcff", {})  # what Python makes of a byte that is not UTF-8
