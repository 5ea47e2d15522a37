"""The command as a whole, on a tiny random model."""

import io
import json
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from sparsespec_jax import LLM, SamplingParams
from sparsespec_jax.generate import main

on_linux = pytest.mark.skipif(not Path("/dev/full").exists(), reason="/dev/full is Linux's")
GREETINGS = [{"id": name, "prompt": name} for name in ("one", "two", "three")]


def results(text: str) -> list[dict]:
    return [json.loads(line) for line in text.splitlines()]


def keys(path: Path) -> list[tuple]:
    return [(entry["id"], entry["index"]) for entry in results(path.read_text())]


def set_stdin(monkeypatch: pytest.MonkeyPatch, content: bytes) -> None:
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(content)))


def expected(llm: LLM, prompt: str, **params) -> str:
    params = SamplingParams(**{"temperature": 0.65, "max_tokens": 8, "seed": 0, **params})
    return llm.generate([llm.chat_prompt(prompt)], params)[0].outputs[0].text


# One prompt: its text and nothing else on standard output.


def test_one_prompt_prints_what_the_chat_answers(generate, llm, capsys):
    assert generate("--prompt", "hello") == 0
    output = capsys.readouterr()
    assert output.out.removesuffix("\n") == expected(llm, "hello")
    assert "requests       1 of 1\n" in output.err


def test_text_is_streamed_as_it_comes(generate, llm, capsys, monkeypatch):
    pieces = []
    monkeypatch.setattr("sparsespec_jax.cli.terminal.write", pieces.append)
    assert generate("--prompt", "hello") == 0
    assert len(pieces) > 2
    assert "".join(pieces).removesuffix("\n") == expected(llm, "hello")


def test_raw_prompts_go_to_the_model_as_they_are(generate, llm, capsys):
    assert generate("--prompt", "hello", "--raw") == 0
    params = SamplingParams(temperature=0.65, max_tokens=8, seed=0)
    [output] = llm.generate(["hello"], params)
    assert capsys.readouterr().out.removesuffix("\n") == output.outputs[0].text


def test_a_system_message_comes_first(generate, llm, capsys):
    assert generate("--prompt", "hello", "--system", "be brief") == 0
    messages = [
        {"role": "system", "content": "be brief"},
        {"role": "user", "content": "hello"},
    ]
    params = SamplingParams(temperature=0.65, max_tokens=8, seed=0)
    [output] = llm.generate([llm.chat_prompt(messages)], params)
    assert capsys.readouterr().out.removesuffix("\n") == output.outputs[0].text


def test_the_checkpoints_sampling_defaults_hold_unless_overridden(generate, llm, capsys):
    generate("--prompt", "hello", "--temperature", "0")
    assert capsys.readouterr().out.removesuffix("\n") == expected(llm, "hello", temperature=0)


def test_a_prompt_comes_from_standard_input_as_text(generate, llm, capsys, monkeypatch):
    set_stdin(monkeypatch, b"hello\n")
    assert generate("--prompt", "-") == 0
    assert capsys.readouterr().out.removesuffix("\n") == expected(llm, "hello")


def test_one_prompt_can_have_an_output_file_too(generate, capsys, tmp_path):
    assert generate("--prompt", "hello", "--output", tmp_path / "o") == 0
    [entry] = results((tmp_path / "o").read_text())
    assert entry["id"] == "prompt"
    assert capsys.readouterr().out.removesuffix("\n") == entry["text"]


def test_quiet_leaves_standard_error_empty(generate, capsys):
    assert generate("--prompt", "hello", "--quiet") == 0
    assert capsys.readouterr().err == ""


# Many prompts: JSON lines.


def test_a_result_says_all_there_is_to_say(generate, llm, write_lines, capsys):
    lines = write_lines({"id": "x", "prompt": "hello", "answer": 42, "params": {"logprobs": 2}})
    assert generate("--input", lines) == 0
    [entry] = results(capsys.readouterr().out)
    assert (entry["id"], entry["index"], entry["metadata"]) == ("x", 0, {"answer": 42})
    assert entry["text"] == expected(llm, "hello") == llm.tokenizer.decode(entry["token_ids"])
    assert (entry["finish_reason"], entry["stop_reason"]) == ("length", None)
    prompt_tokens = len(llm.chat_prompt("hello"))
    assert entry["usage"] == {"prompt_tokens": prompt_tokens, "completion_tokens": 8}
    assert [len(token["top"]) for token in entry["logprobs"]] == [2] * 8
    stats = entry["stats"]
    assert 0 < stats["queue_time"] <= stats["ttft"] <= stats["time"]
    assert stats["cycles"] > 0
    assert sum(stats["accepted_at"]) <= sum(stats["drafted_at"])
    assert "error" not in entry


def test_prompts_come_from_standard_input_as_json_lines(generate, capsys, monkeypatch):
    set_stdin(monkeypatch, b'{"id": 7, "prompt": "hello"}\n')
    assert generate() == 0
    assert [entry["id"] for entry in results(capsys.readouterr().out)] == [7]


def test_samples_are_those_of_the_library(generate, llm, write_lines, capsys):
    assert generate("--input", write_lines(GREETINGS[0]), "--n", 3, "--ordered") == 0
    entries = results(capsys.readouterr().out)
    assert [entry["index"] for entry in entries] == [0, 1, 2]
    params = SamplingParams(temperature=0.65, max_tokens=8, seed=0, n=3)
    [output] = llm.generate([llm.chat_prompt("one")], params)
    assert [entry["text"] for entry in entries] == [sample.text for sample in output.outputs]


def test_results_come_as_they_finish_or_in_order(generate, write_lines, tmp_path):
    slow_first = {**GREETINGS[0], "params": {"max_tokens": 60, "ignore_eos": True}}
    lines = write_lines(slow_first, *GREETINGS[1:])
    assert generate("--input", lines, "--output", tmp_path / "unordered") == 0
    assert generate("--input", lines, "--output", tmp_path / "ordered", "--ordered") == 0
    assert keys(tmp_path / "unordered")[-1] == ("one", 0)
    assert keys(tmp_path / "ordered") == [("one", 0), ("two", 0), ("three", 0)]


def test_progress_is_plain_lines_without_a_terminal(generate, write_lines, capsys, monkeypatch):
    monkeypatch.setattr("sparsespec_jax.cli.progress._PLAIN_REFRESH", 0.002)
    long = {"max_tokens": 80, "ignore_eos": True}
    assert generate("--input", write_lines(*({**g, "params": long} for g in GREETINGS))) == 0
    error = capsys.readouterr().err
    number = r"[\d,.]+"
    assert re.search(
        rf"^\d/3 requests, {number} tok/s, {number} accepted per verify, KV \d+%$",
        error,
        re.MULTILINE,
    )
    assert "\r" not in error


def test_the_summary_adds_everything_up(generate, write_lines, capsys):
    assert generate("--input", write_lines(*GREETINGS)) == 0
    output = capsys.readouterr()
    rows = dict(re.findall(r"^  (\w[\w ]*?)  +(.*)$", output.err, re.MULTILINE))
    entries = results(output.out)
    assert rows["requests"] == "3 of 3"
    usage = [entry["usage"] for entry in entries]
    assert int(rows["prompt tokens"]) == sum(entry["prompt_tokens"] for entry in usage)
    assert int(rows["output tokens"]) == sum(entry["completion_tokens"] for entry in usage)
    assert int(rows["cycles"]) == sum(entry["stats"]["cycles"] for entry in entries)
    assert re.fullmatch(r"\d\.\d\d of 3 drafts a cycle", rows["accepted"])
    assert re.fullmatch(r"\d+% \d+% \d+%", rows["by position"])
    assert {"time", "throughput", "first token"} <= rows.keys()


# What goes wrong.


def test_a_missing_model_is_exit_code_2(capsys, tmp_path):
    assert main(["--model", "./nowhere", "--prompt", "a"]) == 2
    assert "error: cannot load the model: no model at nowhere" in capsys.readouterr().err


def test_malformed_input_stops_before_anything_is_loaded(
    generate, load, write_lines, capsys, tmp_path
):
    lines = write_lines(GREETINGS[0], "{", b'{"prompt": "\xff"}')
    assert generate("--input", lines, "--output", tmp_path / "o") == 2
    error = capsys.readouterr().err
    assert "prompts.jsonl:2: malformed JSON" in error
    assert "prompts.jsonl:3: invalid UTF-8" in error
    assert load == []
    assert not (tmp_path / "o").exists()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--prompt", ""], "error: --prompt: the prompt is empty\n"),
        (["--prompt", "\udcff"], "error: --prompt: invalid UTF-8 at character 1 of the prompt\n"),
        (["--input", "./nowhere"], "error: cannot read ./nowhere: No such file or directory\n"),
        (["--input", "."], "error: cannot read .: Is a directory\n"),
        (["--prompt", "a", "--output", "no/where"], "error: --output: there is no directory no\n"),
    ],
)
def test_input_that_cannot_be_used_is_exit_code_2(generate, arguments, message, capsys):
    assert generate(*arguments) == 2
    assert capsys.readouterr().err == message


def test_standard_input_that_is_not_utf8_is_exit_code_2(generate, capsys, monkeypatch):
    set_stdin(monkeypatch, b"a\xff")
    assert generate("--prompt", "-") == 2
    assert capsys.readouterr().err == "error: standard input: invalid UTF-8 at byte 2\n"


def test_one_bad_request_does_not_take_the_others_down(generate, write_lines, capsys):
    too_long = {"id": "long", "prompt": "a" * 200}
    unknown = {"id": "token", "prompt_token_ids": [10**6]}
    chat = {"id": "chat", "messages": [{"role": "user"}]}
    lines = write_lines(GREETINGS[0], too_long, unknown, chat, GREETINGS[1])
    assert generate("--input", lines) == 1
    output = capsys.readouterr()
    entries = {entry["id"]: entry for entry in results(output.out)}
    assert entries["one"]["finish_reason"] == entries["two"]["finish_reason"] == "length"
    assert "leaves no room in the context of 120" in entries["long"]["error"]
    assert "token id 1000000" in entries["token"]["error"]
    assert "chat template" in entries["chat"]["error"]
    assert all(entries[name]["finish_reason"] == "error" for name in ("long", "token", "chat"))
    assert "error: 3 of 5 requests failed; the first, " in output.err


def test_a_prompt_longer_than_the_context_fails(generate, capsys):
    assert generate("--prompt", "a" * 200) == 1
    assert "leaves no room in the context of 120" in capsys.readouterr().err


@on_linux
def test_a_full_disk_is_exit_code_1(generate, write_lines, capsys):
    assert generate("--input", write_lines(*GREETINGS), "--output", "/dev/full") == 1
    error = capsys.readouterr().err
    assert error.endswith("error: cannot write /dev/full: No space left on device\n")


def test_an_output_file_is_not_overwritten_by_accident(generate, load, capsys, tmp_path):
    out = tmp_path / "o"
    assert generate("--prompt", "a", "--output", out) == 0
    before = out.read_text()
    load.clear()
    assert generate("--prompt", "a", "--output", out) == 2
    assert "is not empty: pass --resume or --overwrite" in capsys.readouterr().err
    assert (load, out.read_text()) == ([], before)
    assert generate("--prompt", "b", "--output", out, "--overwrite") == 0
    assert len(results(out.read_text())) == 1


def test_input_and_output_must_differ(generate, write_lines, capsys):
    lines = write_lines(*GREETINGS)
    assert generate("--input", lines, "--output", lines, "--overwrite") == 2
    assert "--input and --output are the same file" in capsys.readouterr().err
    assert len(lines.read_text().splitlines()) == 3


# Interrupted and resumed.


def test_ctrl_c_keeps_what_is_complete_and_resume_adds_the_rest(
    generate, llm, write_lines, capsys, monkeypatch, tmp_path
):
    lines, out, whole = write_lines(*GREETINGS), tmp_path / "o", tmp_path / "whole"
    assert generate("--input", lines, "--n", 2, "--output", whole) == 0

    stream = llm.stream

    def interrupted(*arguments, **keywords):
        done = 0
        for news in stream(*arguments, **keywords):
            yield news
            done += news.completion is not None
            if done == 3:
                raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(llm, "stream", interrupted)
        assert generate("--input", lines, "--n", 2, "--output", out) == 130
    assert "interrupted: 3 of 6 requests are complete" in capsys.readouterr().err
    assert len(results(out.read_text())) == 3

    with out.open("a") as file:
        file.write('{"id": "tw')  # as a crash would leave it
    assert generate("--input", lines, "--n", 2, "--output", out, "--resume") == 0

    def texts(path):
        return sorted((e["id"], e["index"], e["text"]) for e in results(path.read_text()))

    assert texts(out) == texts(whole)


def test_resuming_what_is_complete_does_not_load_the_model(
    generate, load, write_lines, capsys, tmp_path
):
    command = "--input", write_lines(*GREETINGS), "--output", tmp_path / "o", "--resume"
    assert generate(*command) == 0
    load.clear()
    assert generate(*command) == 0
    assert load == []
    assert "there is nothing left to generate" in capsys.readouterr().err


def test_an_ordered_run_that_is_interrupted_keeps_what_waited(
    generate, llm, write_lines, monkeypatch, tmp_path
):
    slow_first = {**GREETINGS[0], "params": {"max_tokens": 100, "ignore_eos": True}}
    lines = write_lines(slow_first, *GREETINGS[1:])
    stream = llm.stream

    def interrupted(*arguments, **keywords):
        for news in stream(*arguments, **keywords):
            yield news
            if news.completion is not None:
                raise KeyboardInterrupt

    monkeypatch.setattr(llm, "stream", interrupted)
    assert generate("--input", lines, "--output", tmp_path / "o", "--ordered") == 130
    [(done, _)] = keys(tmp_path / "o")
    assert done in ("two", "three")


def test_a_real_ctrl_c_ends_the_process_with_130(model, llm, xla_cache, write_lines, tmp_path):
    """As a whole process, with its own model: also what no other test here runs."""
    lines, out = write_lines(*({"prompt": "hello"} for _ in range(3000))), tmp_path / "o"
    command = [sys.executable, "-m", "sparsespec_jax.generate", "--model", model, "--input", lines]
    command += ["--output", out, "--compilation-cache-dir", xla_cache, "--ignore-eos"]
    command += ["--max-batch", "4", "--batch-buckets", "4", "--prefill-rows", "2"]
    command += ["--prefill-chunk", "64", "--k", "3"]
    process = subprocess.Popen(list(map(str, command)), stderr=subprocess.PIPE, text=True)
    deadline = time.monotonic() + 200
    while not (out.exists() and out.stat().st_size) and process.poll() is None:
        assert time.monotonic() < deadline
        time.sleep(0.05)
    process.send_signal(signal.SIGINT)
    _, error = process.communicate(timeout=60)
    assert process.returncode == 130, error
    assert "interrupted" in error
    assert "Traceback" not in error
    assert out.read_bytes().endswith(b"\n")
    assert 0 < len(results(out.read_text())) < 3000


@on_linux
def test_standard_output_that_cannot_be_written_is_one_line_of_error():
    script = """if True:
        import sparsespec_jax.generate as command
        command.generate = lambda options: command.terminal.write("text")
        command._leave(command.main(["--prompt", "a"]))
    """
    with open("/dev/full", "wb") as full:
        process = subprocess.run(
            [sys.executable, "-c", script], stdout=full, stderr=subprocess.PIPE, text=True
        )
    assert process.stderr == "error: cannot write standard output: No space left on device\n"
    assert process.returncode == 1
