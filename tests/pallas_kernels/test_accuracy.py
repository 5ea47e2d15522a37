"""How far the kernels are from float64: the norm of the error over the norm of what is right.

On a CPU, in Pallas' interpreter, over random shapes; on a GPU compiled, at sizes of a real model.
The numbers are printed (`pytest -s`). What the tests of each op check anyway is left out: there
`rank_positions` is compared with float64 entry by entry, and `select_positions` with a sort.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from attention_cases import Shape, Step, oracle, probabilities, random_step
from hypothesis import given, settings
from hypothesis import strategies as st
from test_append_kv import EPS, jitted, make_inputs
from test_fused_attention import run
from test_rank_positions import make_coded, make_rows
from test_rank_positions import oracle as ranking64
from test_rank_positions import probabilities as coded_probabilities
from test_rank_positions import run as rank
from test_sample_tokens_kernel import random_args, spread

from pallas_kernels import sample, select_positions, token_logprobs
from pallas_kernels.fused_attention import CausalRows
from pallas_kernels.sample_tokens import noise
from pallas_kernels.shapes import Append

gpu = pytest.mark.skipif(jax.default_backend() != "gpu", reason="needs an NVIDIA GPU")
few = functools.partial(settings, deadline=None, derandomize=True)

# Half precision rounds what goes in and out of a product, and each of the steps of `append_kv`.
ATTENTION = {"float32": 1e-6, "float16": 8e-4, "bfloat16": 4e-3}
APPEND = {"float32": 3e-7, "float16": 8e-4, "bfloat16": 5e-3}
SCORES = 0.065  # a code is off by 6% at most


def check(name, actual, expected, tolerance):
    actual, expected = (np.asarray(x, np.float64) for x in (actual, expected))
    assert actual.shape == expected.shape
    assert np.isfinite(actual).all()
    size = np.linalg.norm(expected)
    error = np.linalg.norm(actual - expected) / (size or 1)
    print(f"{name}: {error:.2e}")
    assert error <= tolerance


def attention64(step: Step):
    """What `oracle` returns, with one product for all queries of a row."""
    s, q, table = step.shape, np.asarray(step.arrays["q"], np.float64), step.arrays["page_table"]
    pools = [np.asarray(step.arrays[name]) for name in ("k_pool", "v_pool")]
    table, out, live = np.asarray(table), np.zeros(q.shape), np.zeros(len(q), bool)

    def attend(first, row, head, positions, seen):
        """Of queries first .. to the positions they see, bool [queries, positions]."""
        tokens, heads = slice(first, first + len(seen)), slice(head * s.group, (head + 1) * s.group)
        k, v = (pool[table[row, positions], head].astype(np.float64) for pool in pools)
        logits = q[tokens, heads].reshape(-1, s.head_dim) @ k.T * step.statics["scale"]
        logits = np.where(np.repeat(seen, s.group, 0), logits, -np.inf)
        weights = np.exp(logits - logits.max(1, keepdims=True))
        weights /= weights.sum(1, keepdims=True)
        out[tokens, heads] = (weights @ v).reshape(len(seen), s.group, s.head_dim)
        live[tokens] = True
        return weights.reshape(len(seen), s.group, -1).mean(1)

    def causal(rows: CausalRows, n: int, first: int):
        given = np.zeros((len(rows.row), s.n_kv_heads, n, s.context))
        for r, (row, start, count) in enumerate(zip(*map(np.asarray, rows), strict=True)):
            positions = np.arange(start + count)
            seen = positions <= start + np.arange(count)[:, None]
            for head in range(s.n_kv_heads if count else 0):
                weights = attend(first + r * n, row, head, positions, seen)
                given[r, head, :count, : len(positions)] = weights
        return given

    if s.n_drafts:
        row, position, selected, count, recent = map(np.asarray, step.arrays["drafts"])
        for r, p in enumerate(position):
            newest = np.arange(recent[r], p + 1)
            for head in range(s.n_kv_heads if count[r] + len(newest) else 0):
                positions = np.append(
                    selected[s.layer, r, head // (s.n_kv_heads // s.lists), : count[r]], newest
                )
                attend(r, row[r], head, positions, np.ones((1, len(positions)), bool))
    scores, first = [], s.n_drafts
    if s.n_verify:
        scores.append(causal(step.arrays["verify"], s.n_queries, first))
        first += s.n_verify * s.n_queries
    if s.n_prefill:
        given, count = causal(step.arrays["prefill"], s.chunk, first), step.arrays["prefill"].count
        last = np.zeros((s.n_scored, s.n_kv_heads, s.score_queries, s.context))
        for f, r in enumerate(np.asarray(step.arrays["scored"]) if s.n_scored else ()):
            n = min(int(count[r]), s.score_queries) if r >= 0 else 0
            last[f, :, :n] = given[r, :, int(count[r]) - n : int(count[r])]
        scores.append(last)
    return out, live, np.concatenate(scores) if s.score_queries else None


KINDS = ("mixed", "unselected", "shortest", "padding")


def make_step(shape: Shape, kind: str, dtype: str) -> Step:
    """As `random_step`, and of one more kind: drafts that see nothing but what is recent."""
    rng = np.random.default_rng(0)
    step = random_step(shape, rng, kind="mixed" if kind == "unselected" else kind)
    drafts = step.arrays["drafts"]
    if kind == "unselected" and drafts is not None:
        step.arrays["drafts"] = drafts._replace(count=0 * drafts.count)
    return step.cast(dtype)


def verify_attention(name: str, step: Step, out, scores):
    assert np.isfinite(np.asarray(out, np.float32)).all()  # of padding queries, too
    expected, live, expected_scores = attention64(step)
    check(name, np.asarray(out)[live], expected[live], ATTENTION[str(out.dtype)])
    if expected_scores is not None:
        check(f"{name}, scores", probabilities(step, scores), expected_scores, SCORES)


def check_attention(shape: Shape, kind: str, dtype: str):
    step = make_step(shape, kind, dtype)
    verify_attention(f"fused_attention, {kind}, {dtype}", step, *run(step, "pallas"))


@st.composite
def shapes(draw):
    integers = st.integers
    context, n_prefill = draw(integers(30, 300)), draw(integers(0, 2))
    n_verify, n_queries = draw(integers(0, 2)), draw(integers(1, 9))
    n_scored = draw(integers(0, n_prefill))
    scored = n_verify + n_scored > 0 and draw(st.booleans())
    return Shape(
        n_kv_heads=draw(integers(1, 2)),
        group=draw(integers(1, 8)),
        head_dim=draw(st.sampled_from([16, 80, 128])),
        context=context,
        n_drafts=draw(integers(0 if n_verify + n_prefill else 1, 3)),
        n_selected=draw(st.sampled_from([1, 20, context])),
        max_recent=draw(integers(1, 8)),
        n_verify=n_verify,
        n_queries=n_queries,
        n_prefill=n_prefill,
        chunk=draw(integers(1, 30)),
        n_scored=n_scored if scored else 0,
        score_queries=n_queries if scored else 0,
        layer=draw(integers(0, 1)),
    )


@few(max_examples=5)
@given(shape=shapes(), dtype=st.sampled_from(list(ATTENTION)))
def test_fused_attention(shape, dtype):
    for kind in KINDS:
        check_attention(shape, kind, dtype)


@pytest.mark.parametrize("score_queries", [0, 9])
def test_queries_that_see_nothing_of_a_program_s_share(score_queries):
    """A share of 256 keys ends at position 255; the next one is seen from query 4 on."""
    shape = Shape(
        n_kv_heads=1, group=4, head_dim=64, context=261, n_drafts=0, n_verify=1, n_queries=9,
        n_prefill=0, score_queries=score_queries,
    )  # fmt: skip
    check_attention(shape, "mixed", "bfloat16")


@few(max_examples=20)
@given(shape=shapes(), kind=st.sampled_from(KINDS))
def test_attention64_is_the_oracle(shape, kind):
    step = make_step(shape, kind, "float32")
    for one, other in zip(attention64(step), oracle(step), strict=True):
        assert (one is None) == (other is None)
        if one is not None:
            np.testing.assert_allclose(one, other, rtol=1e-9, atol=1e-12)


def append64(qkv, cos, sin, bias, q_norm, k_norm):
    """Queries [T, Hkv * group, D], keys and values [T, Hkv, D]."""
    x = qkv.sum(axis=0)
    x = x if bias is None else x + bias
    group, half = x.shape[2] - 2, x.shape[3] // 2
    turned = x[:, :, : group + 1]
    if q_norm is not None:
        scale = np.stack([q_norm] * group + [k_norm])
        turned = turned / np.sqrt((turned**2).mean(-1, keepdims=True) + EPS) * scale
    first, second = turned[..., :half], turned[..., half:]
    cos, sin = cos[:, None, None], sin[:, None, None]
    turned = np.concatenate([first * cos - second * sin, second * cos + first * sin], -1)
    return turned[:, :, :group].reshape(len(x), -1, 2 * half), turned[:, :, group], x[:, :, -1]


def verify_append(inputs, q, k_pool, v_pool):
    names = ("qkv", "cos", "sin", "bias", "q_norm", "k_norm")
    arrays = [None if inputs[x] is None else np.asarray(inputs[x], np.float64) for x in names]
    q_wanted, k_wanted, v_wanted = append64(*arrays)
    slots, dtype = inputs["slots"], str(q.dtype)
    kept = np.asarray(slots) > 0
    check(f"append_kv, {dtype}, queries", q, q_wanted, APPEND[dtype])
    for of, pool, wanted in (("keys", k_pool, k_wanted), ("values", v_pool, v_wanted)):
        new = np.asarray(pool[slots])
        check(f"append_kv, {dtype}, {of}", new[kept], wanted[kept], APPEND[dtype])


def check_append(case: Append):
    inputs = make_inputs(case)
    verify_append(inputs, *jitted("pallas")(**inputs))


appends = st.builds(
    Append,
    n_tokens=st.integers(1, 6),
    n_slots=st.just(16),
    n_kv_heads=st.integers(1, 4),
    group=st.integers(1, 8),
    head_dim=st.sampled_from([20, 96, 128]),
    bias=st.booleans(),
    norms=st.booleans(),
    parts=st.integers(1, 2),
    dtype=st.sampled_from(list(APPEND)),
)


@few(max_examples=4)
@given(case=appends)
def test_append_kv(case):
    check_append(case)


def tempered64(logits, args):
    """Float64 logits after bias and mask, over the temperature (1 in greedy rows)."""
    x, row = logits.astype(np.float64), np.arange(len(logits))[:, None]
    ids = np.asarray(args.bias_ids)
    padded = np.append(x, np.zeros((len(x), 1)), 1)  # padding, id -1, goes to the end
    np.add.at(padded, (row, ids), np.asarray(args.bias_values, np.float64))
    early = np.asarray(args.position < args.min_length)[:, None]
    padded[row, np.where(early, args.withheld_ids, -1)] = -np.inf
    temperature = np.asarray(args.temperature, np.float64)[:, None]
    return padded[:, :-1] / np.where(temperature > 0, temperature, 1)


def noise64(args, vocab):
    keys = noise.row_key(args.seed, args.position, noise.SAMPLE_STREAM)
    key0, key1 = (np.asarray(key)[:, None] for key in keys)
    bits = noise.mix(noise.mix(np.arange(vocab, dtype=np.uint32)[None] ^ key0) ^ key1)
    fraction = (bits.astype(np.float32) + np.float32(0.5)) * np.float32(2.0**-32)
    uniform = np.minimum(fraction, np.float32(1 - 2.0**-24)).astype(np.float64)
    return -np.log(-np.log1p(-uniform))


def kept64(x, args, slack):
    """Which tokens the filters keep, if they are `slack` more generous than asked."""
    order = np.argsort(-x, axis=1)
    ranked = np.take_along_axis(x, order, 1)
    weights = np.exp(ranked - ranked[:, :1])
    top_k, top_p, min_p = (np.asarray(v)[:, None] for v in (args.top_k, args.top_p, args.min_p))
    last = np.take_along_axis(ranked, np.where(top_k > 0, np.minimum(top_k, x.shape[1]), 1) - 1, 1)
    in_k = (top_k == 0) | (ranked >= last)
    weights = np.where(in_k, weights, 0)
    before = np.cumsum(weights, 1) - weights
    wanted = (top_p + slack) * weights.sum(1, keepdims=True)
    kept = in_k & ((top_p == 1) | (before < wanted)) & (weights >= min_p - slack)
    kept[:, 0] = True
    found = np.zeros(x.shape, bool)
    np.put_along_axis(found, order, kept, 1)
    return found


def verify_sample(logits, args, filters, token, finite):
    """A token that is kept, and whose score is the best but for the rounding of float32."""
    token = np.asarray(token)
    assert np.asarray(finite).all()
    x = tempered64(np.asarray(logits), args)
    greedy = np.asarray(args.temperature)[:, None] == 0
    scores = x + np.where(greedy, 0, noise64(args, x.shape[1]))
    surely = kept64(x, args, -1e-5) if filters else np.ones(x.shape, bool)
    maybe = kept64(x, args, 1e-5) if filters else surely
    own = np.take_along_axis(scores, token[:, None], 1)[:, 0]
    best = np.where(surely, scores, -np.inf).max(1)
    assert np.take_along_axis(maybe, token[:, None], 1).all()
    short = (best - own) / (8 + np.abs(best))
    print(f"sample_tokens, filters={filters}, short of the best: {max(short.max(), 0):.2e}")
    assert short.max() <= 1e-6


def check_sample(logits, args, filters):
    run = jax.jit(functools.partial(sample, filters=filters, implementation="pallas"))
    verify_sample(logits, args, filters, *run(logits, args))


def verify_logprobs(logits, args, rows, tokens, actual):
    chosen = np.asarray(logits)[np.asarray(rows)]
    x = np.where(np.asarray(args.raw_logprobs)[:, None] != 0, chosen, tempered64(chosen, args))
    high = x.max(1, keepdims=True)
    expected = x - high - np.log(np.exp(x - high).sum(1, keepdims=True))
    expected = np.take_along_axis(expected, np.asarray(tokens)[:, None], 1)[:, 0]
    likely = expected > -np.inf
    np.testing.assert_array_equal(np.asarray(actual) > -np.inf, likely)
    check("token_logprobs", np.asarray(actual)[likely], expected[likely], 1e-6)


def check_logprobs(logits, args, rows, tokens):
    run = jax.jit(functools.partial(token_logprobs, implementation="pallas"))
    verify_logprobs(logits, args, rows, tokens, run(logits, tokens, args, rows=rows)[0])


def sample_case(rng, rows, vocab):
    """Rows from nearly flat to nearly certain, with every parameter on in some of them."""
    args = random_args(rng, rows, vocab)
    raw = jnp.asarray(rng.integers(0, 2, rows), jnp.int32)
    return spread(rng, rows, vocab), args._replace(raw_logprobs=raw)


@few(max_examples=2)
@given(seed=st.integers(0, 2**32 - 1), vocab=st.integers(10, 6000))
def test_sample_tokens(seed, vocab):
    rng = np.random.default_rng(seed)
    logits, args = sample_case(rng, 8, vocab)
    for filters in (False, True):
        check_sample(logits, args, filters)
    rows = jnp.arange(8, dtype=jnp.int32)
    check_logprobs(logits, args, rows, jnp.asarray(rng.integers(0, vocab, 8), jnp.int32))


LAYER = Shape(  # of Qwen3-8B, at 8K
    n_kv_heads=8, group=4, head_dim=128, context=8192, n_drafts=5, n_selected=402, max_recent=17,
    n_verify=2, n_queries=9, n_prefill=1, chunk=256, n_scored=1, score_queries=9, layer=0,
)  # fmt: skip
ALL_SELECTED = Shape(
    n_kv_heads=2, lists=2, group=7, head_dim=64, context=416, n_drafts=6, n_selected=416,
    max_recent=16, n_verify=3, n_queries=8, n_prefill=2, chunk=100, n_scored=2, score_queries=8,
)  # fmt: skip
SMALL = Shape(
    n_kv_heads=2, group=4, head_dim=128, context=2000, n_drafts=4, n_selected=100, max_recent=9,
    n_verify=2, n_queries=5, n_prefill=0, score_queries=5,
)  # fmt: skip


@pytest.mark.gpu
@gpu
@pytest.mark.parametrize(
    ("shape", "dtype", "kinds"),
    [
        (LAYER, "bfloat16", KINDS[:2]),
        (ALL_SELECTED, "bfloat16", KINDS),
        (SMALL, "float16", KINDS),
        (SMALL, "float32", KINDS),
    ],
    ids=["8K", "the budget is the context", "float16", "float32"],
)
def test_compiled_fused_attention(shape, dtype, kinds):
    for kind in kinds:
        check_attention(shape, kind, dtype)


@pytest.mark.gpu
@gpu
@pytest.mark.parametrize(
    "case",
    [
        Append(248, n_slots=1 << 16),
        Append(2048, n_slots=1 << 16),
        Append(248, n_slots=1 << 16, n_kv_heads=2, group=7, head_dim=64, bias=True, norms=False),
        Append(248, n_slots=1 << 16, dtype="float32"),
    ],
    ids=["Qwen3", "prefill", "Qwen2", "float32"],
)
def test_compiled_append_kv(case):
    check_append(case)


@pytest.mark.gpu
@gpu
@pytest.mark.parametrize("lists", [1, 8])
@pytest.mark.parametrize("shifted", [True, False])
def test_compiled_rank_positions(shifted, lists):
    """All rows of a step, in one layer; one row is padding, and one has a single position."""
    rng, context = np.random.default_rng(0), 8192
    end, here, ahead, committed, live = make_rows(rng, n_rows=15, n_queries=9, context=context)
    end[1] = 1
    rows = end, here, ahead if shifted else None, committed
    scores = make_coded(rng, live, n_layers=1, n_heads=8, group=4, context=context)
    statics = {"lists": lists, "drafts": 8, "context": context}
    actual = rank(scores, *rows, group=4, **statics, implementation="pallas")
    expected = ranking64(coded_probabilities(scores, 4), *rows, **statics)
    check(f"rank_positions, shifted={shifted}", actual, expected, 1e-3)


def selected64(scores, candidates, count, k):
    """All lists at once: the newest first, so that a stable sort leaves ties as they should be."""
    size = scores.shape[-1]
    live = np.arange(size) < candidates[:, None, None]
    order = np.argsort(np.where(live, -scores, 1)[..., ::-1], axis=-1, kind="stable")[..., :k]
    taken = np.arange(k) < count[:, None, None]
    chosen = np.sort(np.where(taken, size - 1 - order, size), axis=-1)
    return np.where(chosen < size, chosen, 0)


@pytest.mark.parametrize(
    ("shape", "k"),
    [
        ((1, 5, 1, 60), 12),
        pytest.param((4, 15, 8, 8192), 410, marks=[pytest.mark.gpu, gpu]),
    ],
    ids=["interpreted", "compiled"],
)
@pytest.mark.parametrize("levels", [None, 9])
def test_select_positions(shape, k, levels):
    """Exactly, also nothing, all there is, and the only one."""
    rng = np.random.default_rng(0)
    scores = np.exp(rng.normal(size=shape) * 4 - 12)
    if levels:
        scores = rng.integers(0, levels, shape) / levels
    scores = scores.astype(np.float16)
    candidates = rng.integers(k, shape[3] + 1, shape[1]).astype(np.int32)
    candidates[:4] = 0, k, 1, shape[3]
    count = np.minimum(candidates, k)
    count[4] = 0
    run = functools.partial(select_positions, k=k, implementation="pallas")
    actual = jax.jit(run)(*map(jnp.asarray, (scores, candidates, count)))
    np.testing.assert_array_equal(actual, selected64(scores, candidates, count, k))


@pytest.mark.gpu
@gpu
def test_compiled_sample_tokens():
    rng = np.random.default_rng(0)
    logits, args = sample_case(rng, 96, 151_936)
    for filters in (False, True):
        check_sample(logits, args, filters)
    rows, tokens = (jnp.asarray(rng.integers(0, n, 96), jnp.int32) for n in (96, 151_936))
    check_logprobs(logits, args, rows, tokens)
