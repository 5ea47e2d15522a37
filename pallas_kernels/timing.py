"""How long the ops take on the cases of `shapes`: seconds a call, several in one compiled function.

Each call has operands of its own, so that none can be shared and caches hold as little as in a
model; what is in place there is donated and passed on from call to call here.
"""

import functools
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels import (
    add_norm,
    append_kv,
    fused_attention,
    matmul,
    matmul_parts,
    pack_kv,
    rank_positions,
    select_positions,
    unpack_kv,
)
from pallas_kernels.sample_tokens import sample, token_logprobs
from pallas_kernels.shapes import (
    AddNorm,
    Append,
    Attention,
    Matmul,
    Pack,
    Rank,
    Sample,
    Select,
)

Case = Attention | Append | AddNorm | Matmul | Pack | Rank | Select | Sample


def seconds(run: Callable[..., Any], *args: Any, repeats: int) -> float:
    """Time of a call: the best of three rounds of `repeats` calls in flight at once, so that the
    host's work hides behind the device's."""
    jax.block_until_ready(run(*args))
    rounds = []
    for _ in range(3):
        begin = time.perf_counter()
        for _ in range(repeats):
            done = run(*args)
        jax.block_until_ready(done)
        rounds.append((time.perf_counter() - begin) / repeats)
    return min(rounds)


def seconds_in_place(run: Callable[..., Any], state: Any, *args: Any, repeats: int) -> float:
    """`seconds` of a `run` that donates its first argument, and whose first result is the next."""
    held = [state]

    def step():
        new, result = run(held.pop(), *args)
        held.append(new)
        return new, result

    return seconds(step, repeats=repeats)


def read_bandwidth(size: int, repeats: int) -> float:
    """Bytes per second of large reductions by rows, which keep every multiprocessor reading."""
    arrays = tuple(jnp.full((size // 2**14, 2**12), i, jnp.float32) for i in range(4))
    total = jax.jit(lambda arrays: [a.sum(axis=1) for a in arrays])
    return len(arrays) * size / seconds(total, arrays, repeats=repeats)


@functools.singledispatch
def case_time(case: Case, implementation: str, n_calls: int, repeats: int) -> float:
    """Seconds of a call of the op that the case is of."""
    raise TypeError(f"no op has cases like {case!r}")


def attention_time(
    inputs: tuple[dict, dict], n_calls: int, repeats: int, attend: Callable[..., Any]
) -> float:
    """Seconds per call. Calls are layers: they have their own queries, and pass the scores on."""
    arrays, statics = inputs
    queries = tuple(arrays["q"] * (1 + i / 16) for i in range(n_calls))
    rest = {name: value for name, value in arrays.items() if name not in ("q", "drafts")}
    drafts = arrays["drafts"]
    if drafts is not None:
        drafts = drafts._replace(slots=jnp.tile(drafts.slots, (n_calls, 1, 1, 1)))

    @jax.jit
    def run(queries, drafts, rest):
        outs, scores = [], None
        for layer, q in enumerate(queries):
            out, scores = attend(
                q, **rest, **statics, drafts=drafts, scores=scores, layer=layer, n_layers=n_calls
            )
            outs.append(out)
        return outs, scores

    return seconds(run, queries, drafts, rest, repeats=repeats) / n_calls


@case_time.register
def _(case: Attention, implementation: str, n_calls: int, repeats: int) -> float:
    attend = functools.partial(fused_attention, implementation=implementation)
    return attention_time(case.inputs(), n_calls, repeats, attend)


@case_time.register
def _(case: Append, implementation: str, n_calls: int, repeats: int) -> float:
    """Seconds per call. The pools are donated and passed on from call to call."""
    arrays = case.inputs()
    pools = arrays.pop("k_pool"), arrays.pop("v_pool")
    qkv = arrays.pop("qkv")
    projections = tuple(qkv * (1 + i / 16) for i in range(n_calls))

    @functools.partial(jax.jit, donate_argnums=0)
    def run(pools, projections, arrays):
        queries = []
        for qkv in projections:
            q, *pools = append_kv(*pools, qkv=qkv, **arrays, implementation=implementation)
            queries.append(q)
        return pools, queries

    return seconds_in_place(run, pools, projections, arrays, repeats=repeats) / n_calls


@case_time.register
def _(case: AddNorm, implementation: str, n_calls: int, repeats: int) -> float:
    """Seconds per call. The sum is passed on from call to call, like a residual stream."""
    x, delta, scale = case.inputs()
    deltas = tuple(delta * (1 + i / 16) for i in range(n_calls))

    @jax.jit
    def run(x, deltas, scale):
        outs = []
        for delta in deltas:
            x, normed = add_norm(x, delta, scale, implementation=implementation)
            outs.append(normed)
        return x, outs

    return seconds(run, x, deltas, scale, repeats=repeats) / n_calls


@case_time.register
def _(case: Matmul, implementation: str, n_calls: int, repeats: int) -> float:
    """Seconds per call, without adding parts. All calls have their own operands, like layers."""
    x, weight = case.inputs()
    calls = tuple((x * (1 + i / 16), weight * (1 + i / 16)) for i in range(n_calls))
    multiply = matmul_parts if case.in_parts else matmul

    @jax.jit
    def run(calls):
        return [multiply(*call, implementation=implementation) for call in calls]

    return seconds(run, calls, repeats=repeats) / n_calls


@case_time.register
def _(case: Rank, implementation: str, n_calls: int, repeats: int) -> float:
    """Seconds per call. All calls have their own weights, so that none can be shared."""
    scores, end, here, ahead, committed = case.inputs()
    calls = tuple(here * (1 + i / 16) for i in range(n_calls))

    @jax.jit
    def run(scores, end, calls, ahead, committed):
        rank = functools.partial(
            rank_positions,
            group=case.group,
            lists=case.lists,
            drafts=case.k,
            context=case.context,
            implementation=implementation,
        )
        return [rank(scores, end, here, ahead, committed) for here in calls]

    return seconds(run, scores, end, calls, ahead, committed, repeats=repeats) / n_calls


@case_time.register
def _(case: Select, implementation: str, n_calls: int, repeats: int) -> float:
    """Seconds per call. All calls have their own counts, so that none can be shared."""
    scores, candidates, count = case.inputs()
    counts = tuple(jnp.maximum(count - i, 1) for i in range(n_calls))

    @jax.jit
    def run(scores, candidates, counts):
        select = functools.partial(
            select_positions, k=case.n_selected, implementation=implementation
        )
        return [select(scores, candidates, count) for count in counts]

    return seconds(run, scores, candidates, counts, repeats=repeats) / n_calls


@case_time.register
def _(case: Sample, implementation: str, n_calls: int, repeats: int) -> float:
    """Seconds per call. All calls have their own positions and temperatures: none can be shared."""
    logits, args = case.inputs()
    calls = tuple(
        args._replace(
            position=args.position + i * case.n_rows, temperature=args.temperature * (1 + i / 64)
        )
        for i in range(n_calls)
    )

    @jax.jit
    def run(logits, calls):
        if case.logprobs:
            report = functools.partial(token_logprobs, implementation=implementation)
            return [report(logits, call.position % case.vocab, call)[0] for call in calls]
        draw = functools.partial(sample, filters=case.filters, implementation=implementation)
        return [draw(logits, call) for call in calls]

    return seconds(run, logits, calls, repeats=repeats) / n_calls


@case_time.register
def _(case: Pack, implementation: str, n_calls: int, repeats: int) -> float:
    """Seconds per call. All calls have their own slots and chunks, so that no cache has them.

    Pools that chunks come back to are donated and passed on from call to call.
    """
    arrays = case.inputs()
    pools, slots = arrays.pop("pools"), arrays["slots"]
    calls = [1 + (slots - 1 + i * len(slots)) % (case.n_slots - 1) for i in range(n_calls)]
    if not case.back:
        pack = functools.partial(pack_kv, chunks=case.chunks, implementation=implementation)

        @jax.jit
        def run(pools, calls):
            return [pack(pools, slots) for slots in calls]

        return seconds(run, pools, calls, repeats=repeats) / n_calls
    chunks = [tuple(x * (1 + i / 16) for x in arrays["packed"]) for i in range(n_calls)]

    @functools.partial(jax.jit, donate_argnums=0)
    def run_back(pools, chunks, calls):
        for packed, slots in zip(chunks, calls, strict=True):
            pools = unpack_kv(pools, packed, slots, implementation=implementation)
        return pools, None

    return seconds_in_place(run_back, pools, chunks, calls, repeats=repeats) / n_calls
