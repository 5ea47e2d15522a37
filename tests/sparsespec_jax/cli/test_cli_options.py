"""The command line: every field of the configurations, with their own help and their own checks."""

import contextlib
import dataclasses
import io
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from sparsespec_jax import EngineConfig, SamplingParams, SpeculationConfig
from sparsespec_jax.cli.errors import CommandError
from sparsespec_jax.cli.fields import attribute_docs
from sparsespec_jax.cli.options import parse
from sparsespec_jax.generate import main

CONFIGS = SamplingParams, SpeculationConfig, EngineConfig


@pytest.fixture(scope="module")
def help_text() -> str:
    with contextlib.redirect_stdout(io.StringIO()) as out, pytest.raises(SystemExit) as exit:
        main(["--help"])
    assert exit.value.code == 0
    return out.getvalue()


@pytest.mark.parametrize("config", CONFIGS)
def test_every_field_has_an_option_and_its_docstring_is_the_help(config, help_text):
    docs = attribute_docs(config)
    assert set(docs) == {field.name for field in dataclasses.fields(config)}
    for name, text in docs.items():
        option = name.replace("_", "-")
        assert re.search(rf"^  --(engine-)?{option}[ ,]", help_text, re.MULTILINE), name
        # Words are compared without spaces: the help breaks lines at hyphens.
        assert text.replace(" ", "") in "".join(help_text.split()), name


def test_help_groups_the_options_and_documents_the_exit_codes(help_text):
    for title in ("prompts", "output", "sampling", "speculation", "engine", "exit codes"):
        assert f"\n{title}:\n" in help_text
    for code in ("0", "1", "2", "130"):
        assert f"\n  {code} " in help_text


def test_values_of_every_kind_arrive():
    command = """
        --temperature 0.5 --top-k 7 --stop a 'b c' --stop-token-ids 1 2 --ignore-eos
        --no-skip-special-tokens --logit-bias '{"5": -1.5}' --method none --sparsity 0.1 --k 4
        --kv-cache-memory 0.5 --max-context 64 --batch-buckets 2 8 --compilation-cache-dir cache
        --dtype bfloat16
    """
    options = parse(shlex.split(command))
    assert SamplingParams(**options.sampling) == SamplingParams(
        temperature=0.5,
        top_k=7,
        stop=("a", "b c"),
        stop_token_ids=(1, 2),
        ignore_eos=True,
        skip_special_tokens=False,
        logit_bias={5: -1.5},
    )
    assert options.speculation == SpeculationConfig(method="none", sparsity=0.1, k=4)
    assert options.engine_config() == EngineConfig(
        kv_cache_memory=0.5,
        max_context=64,
        batch_buckets=(2, 8),
        compilation_cache_dir="cache",
        dtype="bfloat16",
    )


def test_a_number_of_bytes_is_not_a_fraction():
    assert parse(["--kv-cache-memory", "1000000"]).engine["kv_cache_memory"] == 1_000_000
    assert parse(["--k", "auto"]).speculation.ks == (8, 4, 2, 0)
    assert parse(["--k", "3"]).speculation.ks == (3,)
    assert parse(["--sparsity", "auto"]).speculation.sparsities == (0.05, 0.025, 0.1)
    assert parse(["--sparsity", "0.2"]).speculation.sparsities == (0.2,)


def test_seed_is_that_of_sampling_and_the_engines_has_its_name_in_front():
    options = parse(["--seed", "1", "--engine-seed", "2"])
    assert options.sampling == {"seed": 1}
    assert options.engine["seed"] == 2


def test_only_what_is_given_overrides_the_defaults():
    assert parse([]).sampling == {}
    assert parse([]).engine_config(max_batch=3).max_batch == 3
    assert parse(["--max-batch", "5"]).engine_config(max_batch=3).max_batch == 5


def test_none_unsets_an_optional_field():
    options = parse(["--max-tokens", "none", "--batch-buckets", "none", "--stop", "none"])
    assert options.sampling == {"max_tokens": None, "stop": ("none",)}
    assert options.engine["batch_buckets"] is None


def test_compiled_steps_are_kept_in_the_users_cache_directory(monkeypatch):
    monkeypatch.delenv("JAX_COMPILATION_CACHE_DIR", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", "/caches")
    assert parse([]).engine["compilation_cache_dir"] == str(Path("/caches/sparsespec-jax/xla"))
    monkeypatch.delenv("XDG_CACHE_HOME")
    home = Path.home() / ".cache"
    assert parse([]).engine["compilation_cache_dir"] == str(home / "sparsespec-jax" / "xla")
    monkeypatch.setenv("JAX_COMPILATION_CACHE_DIR", "elsewhere")
    assert parse([]).engine["compilation_cache_dir"] is None


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--k", "16"], "k must be an integer from 1 to 15 or `auto`, got 16"),
        (["--sparsity", "2"], "sparsity must be a number in (0.0, 1.0] or `auto`, got 2"),
        (["--sparsity", "all"], "argument --sparsity: invalid number value: 'all'"),
        (["--temperature", "-1"], "temperature=-1 is not allowed"),
        (["--max-batch", "0"], "max_batch must be an integer from 1"),
        (["--batch-buckets", "8", "2"], "batch_buckets must be increasing"),
        (["--k", "four"], "argument --k: invalid int value: 'four'"),
        (["--logit-bias", "{"], "argument --logit-bias: invalid bias value"),
        (["--method", "magic"], "argument --method: invalid choice: 'magic'"),
        (["--template-args", "[]"], "expected a JSON object"),
        (["--prompt", "a", "--input", "b"], "not allowed with argument"),
        (["--overwrite", "--resume", "--output", "o"], "not allowed with argument"),
        (["--resume", "--prompt", "a"], "--resume and --overwrite need an --output file"),
        (["--raw", "--system", "a", "--prompt", "b"], "drop --raw"),
        (["--temp", "1"], "unrecognized arguments: --temp"),
    ],
)
def test_a_bad_command_line_is_one_line_of_error_and_exit_code_2(arguments, message, capsys):
    assert main(arguments) == 2
    output = capsys.readouterr()
    assert output.err.startswith("error: ")
    assert message in output.err
    assert output.err.count("\n") == 1
    assert output.out == ""


@pytest.mark.parametrize("named", ["--model", "--output"])
def test_without_prompts_standard_input_is_read_unless_it_is_a_terminal(named, monkeypatch):
    stdin = io.StringIO()
    monkeypatch.setattr("sys.stdin", stdin)
    assert parse([named, "a"]).input == "-"
    stdin.isatty = lambda: True
    with pytest.raises(CommandError, match="nothing to generate: give --prompt TEXT or --input"):
        parse([named, "a"])


def test_without_arguments_there_is_nothing_to_read():
    assert parse([]).demo


def test_help_does_not_wait_for_the_engine():
    script = """if True:
        import contextlib, sys
        from sparsespec_jax.generate import main
        with contextlib.suppress(SystemExit):
            main(["--help"])
        assert "sparsespec_jax.llm" not in sys.modules
    """
    subprocess.run([sys.executable, "-c", script], check=True, stdout=subprocess.DEVNULL)
