"""A tiny random checkpoint with the tokenizer and the chat template of the bundled model."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax
import pytest
from jax.experimental.compilation_cache import compilation_cache

from checkpoints.countdown_traces import END, vocabulary, write_tokenizer
from sparsespec_jax import LLM, EngineConfig, SpeculationConfig
from sparsespec_jax.generate import main
from sparsespec_jax.models.config import ModelConfig
from sparsespec_jax.models.huggingface import save_hf
from sparsespec_jax.models.parameters import init_params

CONTEXT = 120

# Few shapes of steps: compiling one takes seconds, whatever the size of the model.
ENGINE = {"max_batch": 4, "batch_buckets": (4,), "prefill_rows": 2, "prefill_chunk": 64}
SPECULATION = {"k": 3}


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("model")
    config = ModelConfig(
        architecture="Qwen3ForCausalLM",
        vocab_size=len(vocabulary()),
        hidden_size=16,
        intermediate_size=16,
        num_layers=1,
        num_heads=2,
        num_kv_heads=1,
        head_dim=8,
        max_position_embeddings=CONTEXT,
        qk_norm=True,
        tie_word_embeddings=True,
        eos_token_ids=(vocabulary().index(END),),
    )
    save_hf(init_params(config, jax.random.key(0)), config, directory)
    write_tokenizer(directory)
    return directory


@pytest.fixture(scope="session")
def xla_cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Keeps what the steps of the tiny model compiled to."""
    return tmp_path_factory.mktemp("xla")


@pytest.fixture(scope="module", autouse=True)
def no_other_test_writes_to_the_cache(xla_cache: Path) -> Iterator[None]:
    """`EngineConfig.compilation_cache_dir` is for the whole process."""
    jax.config.update("jax_compilation_cache_dir", str(xla_cache))
    yield
    jax.config.update("jax_compilation_cache_dir", None)
    compilation_cache.reset_cache()


@pytest.fixture(scope="session")
def llm(model: Path, xla_cache: Path) -> Iterator[LLM]:
    engine = EngineConfig(compilation_cache_dir=str(xla_cache), **ENGINE)
    with LLM(model, engine=engine, speculation=SpeculationConfig(**SPECULATION)) as llm:
        yield llm


@pytest.fixture
def load(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """Commands get `llm` instead of loading a model; the list says what they asked for."""
    asked = []

    def shared(model: str | None, **arguments: Any) -> LLM:
        asked.append({"model": model, **arguments})
        return llm

    monkeypatch.setattr(llm, "close", lambda: None)
    monkeypatch.setattr("sparsespec_jax.llm.LLM", shared)
    return asked


@pytest.fixture
def generate(load: list) -> Callable[..., int]:
    """The command, in this process, with the tiny model, a fixed seed and 8 tokens a completion."""

    def run(*arguments: object) -> int:
        fixed = "--model", "tiny", "--max-tokens", 8, "--seed", 0
        return main([str(argument) for argument in (*fixed, *arguments)])

    return run


@pytest.fixture
def write_lines(tmp_path: Path) -> Callable[..., Path]:
    """A JSONL file of the given objects; text and bytes are lines as they are."""

    def write(*lines: object) -> Path:
        path = tmp_path / "prompts.jsonl"
        path.write_bytes(b"".join(_line(line) + b"\n" for line in lines))
        return path

    return write


def _line(line: object) -> bytes:
    if isinstance(line, bytes):
        return line
    return (line if isinstance(line, str) else json.dumps(line)).encode()
