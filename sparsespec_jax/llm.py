"""What users call: a model with its tokenizer and engine, text or token ids in, text out."""

from __future__ import annotations

import queue
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import jax

from sparsespec_jax.config import EngineConfig, SpeculationConfig
from sparsespec_jax.engine.engine import Engine
from sparsespec_jax.engine.events import TokenEvent
from sparsespec_jax.engine.request import Request
from sparsespec_jax.models.bundled import bundled_model
from sparsespec_jax.models.loading import load_model
from sparsespec_jax.models.tokenizer import Tokenizer
from sparsespec_jax.outputs import Completion, RequestOutput, StreamOutput
from sparsespec_jax.parallel.sharding import Placement, placement_of
from sparsespec_jax.sampling.params import SamplingParams, sample_seed
from sparsespec_jax.text import TextAssembler

Prompt = str | Sequence[int]
Message = Mapping[str, Any]


class LLM:
    """A language model ready to generate.

    Thread-safe: concurrent calls share one running batch. Close it, or use it in a `with` block, to
    stop its thread and free its memory.

    Args:
      model: a Hugging Face directory or hub id, an Orbax directory of `sparsespec_jax.convert`, or
        a `.gguf` file; None is the bundled Countdown model.
      engine: sizes and modes.
      speculation: how tokens are drafted; it changes the speed, never the output.
      placement: the devices that share the model, where `engine.tensor_parallel_size` does not say
        enough: a mesh that exists already, and which of its axes to use.
      progress: show a progress bar while weights load.
    """

    def __init__(
        self,
        model: str | Path | None = None,
        *,
        engine: EngineConfig = EngineConfig(),
        speculation: SpeculationConfig = SpeculationConfig(),
        placement: Placement | None = None,
        progress: bool = False,
    ):
        source = bundled_model() if model is None else model
        placement = placement_of(engine, placement)
        if engine.compilation_cache_dir is not None:
            _cache_compilations(engine.compilation_cache_dir)
        self.tokenizer = Tokenizer.load(source)
        loaded = load_model(source, dtype=_dtype(engine), placement=placement, progress=progress)
        self.default_params = SamplingParams(**loaded.generation_defaults)
        self.engine = Engine(loaded.config, loaded.params, engine, speculation, placement)

    def __enter__(self) -> LLM:
        return self

    def __exit__(self, *exc) -> None:
        self.close()

    def close(self) -> None:
        """Cancel what runs and stop the engine."""
        self.engine.close()

    def warmup(self, progress=None) -> None:
        """Compile the steps of ordinary traffic ahead of the first request."""
        self.engine.warmup(progress)

    def chat_prompt(
        self, messages: str | Sequence[Message], **template_arguments: Any
    ) -> list[int]:
        """Token ids of a conversation in the model's chat template, ready for an answer.

        `messages`: a user's message, or a list of {"role": ..., "content": ...}.
        """
        if isinstance(messages, str):
            messages = [{"role": "user", "content": messages}]
        text = self.tokenizer.apply_chat_template(messages, **template_arguments)
        return self.tokenizer.encode(text, add_special_tokens=False)

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
    ) -> list[RequestOutput]:
        """Complete each prompt: text as it is (see `chat_prompt` for templates) or token ids.

        `params`: for all prompts, or one for each; None is what the checkpoint recommends.
        Raises ValueError for a prompt or parameters that can never run, naming the prompt.
        A request that fails later has finish_reason `error`; the others are not affected.
        """
        prompts, params = self._normalise(prompts, params)
        completions = [[] for _ in prompts]
        for news in self.stream(prompts, params):
            if news.completion is not None:
                completions[news.prompt_index].append(news.completion)
        return [
            RequestOutput(
                prompt=prompt if isinstance(prompt, str) else None,
                prompt_token_ids=tuple(self._encode(prompt)),
                outputs=tuple(sorted(done, key=lambda completion: completion.index)),
            )
            for prompt, done in zip(prompts, completions, strict=True)
        ]

    def stream(
        self,
        prompts: Prompt | Sequence[Prompt],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        errors: Literal["raise", "report"] = "raise",
    ) -> Iterator[StreamOutput]:
        """`generate`, with news of every completion as it comes; closing the iterator cancels.

        With `errors="report"` a prompt that can never run becomes a completion with finish_reason
        `error`, instead of a ValueError before anything runs.
        """
        prompts, params = self._normalise(prompts, params)
        return _Stream(self, prompts, params, errors).news()

    def _normalise(self, prompts, params) -> tuple[list[Prompt], list[SamplingParams]]:
        if isinstance(prompts, str) or (prompts and isinstance(prompts[0], int)):
            prompts = [prompts]
        if params is None or isinstance(params, SamplingParams):
            params = [params or self.default_params] * len(prompts)
        if len(params) != len(prompts):
            raise ValueError(f"{len(prompts)} prompts, but params for {len(params)}")
        return list(prompts), list(params)

    def _encode(self, prompt: Prompt) -> Sequence[int]:
        return self.tokenizer.encode(prompt) if isinstance(prompt, str) else prompt


class _Stream:
    """The requests of one call, and their events on the way to the caller's thread."""

    def __init__(
        self,
        llm: LLM,
        prompts: list[Prompt],
        params: list[SamplingParams],
        errors: Literal["raise", "report"],
    ):
        self._engine = llm.engine
        self._events: queue.SimpleQueue[TokenEvent] = queue.SimpleQueue()
        self._open: dict[int, tuple[int, int, Request, TextAssembler]] = {}
        self._refused: list[StreamOutput] = []
        try:
            for prompt_index, (prompt, wanted) in enumerate(zip(prompts, params, strict=True)):
                self._submit(llm, prompt_index, prompt, wanted, errors)
        except BaseException:
            self._cancel_all()
            raise

    def _submit(
        self,
        llm: LLM,
        prompt_index: int,
        prompt: Prompt,
        params: SamplingParams,
        errors: Literal["raise", "report"],
    ) -> None:
        try:
            ids = llm._encode(prompt)
            for index in range(params.n):
                seed = None if params.seed is None else sample_seed(params.seed, index)
                request = self._engine.submit(ids, params, self._events.put, seed=seed)
                assembler = TextAssembler(llm.tokenizer, params)
                self._open[request.request_id] = prompt_index, index, request, assembler
        except ValueError as error:
            if errors == "raise":
                raise ValueError(f"prompts[{prompt_index}]: {error}") from error
            refused = Completion(0, "", (), "error", error=error)
            self._refused.append(StreamOutput(prompt_index, 0, "", (), refused))

    def news(self) -> Iterator[StreamOutput]:
        try:
            yield from self._refused
            while self._open:
                event = self._events.get()
                if event.request_id in self._open:
                    yield self._advance(event)
        finally:
            self._cancel_all()

    def _advance(self, event: TokenEvent) -> StreamOutput:
        prompt_index, index, request, assembler = self._open[event.request_id]
        known = len(assembler.token_ids)
        text = assembler.push(event.tokens, event.logprobs, last=event.finish_reason is not None)
        completion = None
        if assembler.stop_string is not None or event.finish_reason is not None:
            del self._open[event.request_id]
            if event.finish_reason is None:
                self._engine.cancel(request)
            completion = self._complete(index, request, assembler, event)
        return StreamOutput(
            prompt_index, index, text, tuple(assembler.token_ids[known:]), completion
        )

    @staticmethod
    def _complete(
        index: int, request: Request, assembler: TextAssembler, event: TokenEvent
    ) -> Completion:
        stopped = assembler.stop_string is not None
        stop_reason = assembler.stop_string
        if not stopped and event.finish_reason == "stop":
            stop_reason = assembler.token_ids[-1]
        return Completion(
            index=index,
            text=assembler.text,
            token_ids=tuple(assembler.token_ids),
            finish_reason="stop" if stopped else event.finish_reason,
            stop_reason=stop_reason,
            logprobs=None if request.params.logprobs is None else tuple(assembler.logprobs),
            error=event.error,
            stats=request.stats,
        )

    def _cancel_all(self) -> None:
        for _, _, request, _ in self._open.values():
            self._engine.cancel(request)
        self._open.clear()


def _dtype(engine: EngineConfig) -> str:
    """Bfloat16 is slow and pointless on a CPU, where float32 is exact."""
    if engine.dtype == "auto" and jax.default_backend() == "cpu":
        return "float32"
    return engine.dtype


def _cache_compilations(directory: str) -> None:
    jax.config.update("jax_compilation_cache_dir", str(Path(directory).expanduser()))
    jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0)
