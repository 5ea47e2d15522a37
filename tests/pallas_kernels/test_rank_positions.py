"""`rank_positions` against its formula, in float64, one term at a time."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pallas_kernels import rank_positions
from pallas_kernels.fused_attention.scores import SMALLEST, CodedScores, DenseScores, dense, encode
from pallas_kernels.gpus import GPUS
from pallas_kernels.lowering import lower_for_cuda
from pallas_kernels.rank_positions import pallas_triton
from pallas_kernels.rank_positions.pallas_triton import Tile

AGES = 4


def decoded(codes):
    """The middle of what a code stands for: 5 bits of exponent and 3 of mantissa, from SMALLEST on,
    which is added to all weights."""
    smallest = round(np.log2(SMALLEST))
    steps = (codes.astype(np.int64) - (127 + smallest) * 8) % 256
    weights = (1 + (steps % 8 + 0.5) / 8) * 2.0 ** (steps // 8 + smallest) - SMALLEST
    return np.where(steps == 0, 0, weights)


def probabilities(scores, group):
    """[L, R, Hkv, Q, n] float64."""
    codes, factor = np.asarray(scores.codes), np.asarray(scores.factor, np.float64)
    weights = decoded(codes) * np.where(factor < 2.0**8, factor, 0)[..., None]
    weights = weights.reshape(*factor.shape[:3], -1, group, codes.shape[4])
    return weights.mean(axis=-2)


def oracle(p, end, here, ahead, committed, *, lists, drafts, context):
    p = p.reshape(*p.shape[:2], lists, -1, *p.shape[3:]).mean(axis=3)
    n_layers, n_rows, _, n_queries, _ = p.shape
    ranking = np.zeros((n_layers, n_rows, lists, context))
    for row, query in np.ndindex(n_rows, n_queries):
        seen = np.zeros((n_layers, lists, context))
        seen[..., : end[row]] = p[:, row, :, query, : end[row]]
        if here[row, query]:
            ranking[:, row] += here[row, query] * seen
        age = committed[row] - 1 - query
        if ahead is not None and 0 <= age < AGES and ahead[row, query]:
            for by in range(age + 1, age + 1 + drafts):
                moved = seen[..., : max(context - by, 0)] * ahead[row, query] / drafts
                ranking[:, row, :, by:] += moved
    for row in range(n_rows):
        ranking[:, row, :, end[row] :] = 0
    return ranking


def make_rows(rng, *, n_rows, n_queries, context):
    """Row 0 is full; the last is padding; the rest have rejected queries and dead ones."""
    end = rng.integers(1, context + 1, n_rows)
    queries = rng.integers(1, n_queries + 1, n_rows)
    end[0], queries[0] = context, n_queries
    committed = rng.integers(1, queries + 1)
    end[-1] = 0
    live = np.arange(n_queries) < queries[:, None]
    live[-1] = False
    final = np.arange(n_queries) < committed[:, None]
    here = rng.random((n_rows, n_queries)) * live
    ahead = rng.random((n_rows, n_queries)) * (live & final)
    here[0, 0] = 0  # looked at for what it says of the positions ahead only
    arrays = (end.astype(np.int32), here.astype(np.float32), ahead.astype(np.float32))
    return *arrays, committed.astype(np.int32), live


def make_coded(rng, live, *, n_layers, n_heads, group, context):
    """Random codes; what belongs to dead queries or blocks past the end is no number."""
    n_rows, n_queries = live.shape
    lead = (n_layers, n_rows, n_heads, n_queries * group)
    weights = np.exp2(rng.uniform(-20, 8, (*lead, -(-context // 32) * 32)))
    codes = np.array(encode(jnp.asarray(weights, jnp.float32)))
    factor = np.exp2(rng.uniform(-21, -6, lead))
    dead = np.broadcast_to(np.repeat(~live, group, axis=1)[None, :, None], lead)
    codes = np.where(dead[..., None], rng.integers(0, 256, codes.shape), codes)
    factor = np.where(dead, rng.choice([np.nan, np.inf, 6e4, 0], lead), factor)
    return CodedScores(jnp.asarray(codes, jnp.uint8), jnp.asarray(factor, jnp.float32))


def make_dense(rng, live, *, n_layers, n_heads, context):
    n_rows, n_queries = live.shape
    p = rng.random((n_layers, n_rows, n_heads, n_queries, context)) ** 8
    p = np.where(live[None, :, None, :, None], p, np.nan)
    return DenseScores(jnp.asarray(p, jnp.float32))


def run(scores, end, here, ahead, committed, tile=None, **arguments):
    """With a tile: that kernel, interpreted."""
    arrays = tuple(x if x is None else jnp.asarray(x) for x in (end, here, ahead, committed))
    if tile is None:
        return np.asarray(rank_positions(scores, *arrays, **({"ages": AGES} | arguments)))
    return np.asarray(
        pallas_triton.rank_positions(
            scores, *arrays, **arguments, ages=AGES, interpret=True, tile=tile
        )
    )


@st.composite
def shapes(draw, max_group=16, max_queries=16):
    n_queries = draw(st.integers(2, max_queries))
    n_heads, lists = draw(st.sampled_from([(1, 1), (2, 1), (2, 2), (3, 1), (4, 2)]))
    return {
        "seed": draw(st.integers(0, 2**32 - 1)),
        "n_layers": draw(st.integers(1, 2)),
        "n_heads": n_heads,
        "lists": lists,
        "n_rows": draw(st.integers(2, 4)),
        "n_queries": n_queries,
        "group": draw(st.integers(1, max_group)),
        "drafts": draw(st.sampled_from([n_queries - 1, 1, 15])),
        "context": draw(st.integers(1, 200)),
        "shifted": draw(st.booleans()),
    }


def check_coded(shape, **how):
    shape = dict(shape)
    rng, drafts = np.random.default_rng(shape.pop("seed")), shape.pop("drafts")
    shifted, context, group = shape.pop("shifted"), shape["context"], shape["group"]
    lists = shape.pop("lists")
    rows = {name: shape.pop(name) for name in ("n_rows", "n_queries")}
    end, here, ahead, committed, live = make_rows(rng, **rows, context=context)
    scores = make_coded(rng, live, **shape)
    ahead = ahead if shifted else None
    arguments = {"lists": lists, "drafts": drafts, "context": context}
    actual = run(scores, end, here, ahead, committed, group=group, **arguments, **how)
    p = probabilities(scores, group)
    expected = oracle(p, end, here, ahead, committed, **arguments)
    assert actual.dtype == np.float16
    np.testing.assert_allclose(actual, expected, rtol=8e-3, atol=4e-6)


@settings(deadline=None, max_examples=15)
@given(shape=shapes())
def test_reference_of_coded_scores_is_the_formula(shape):
    check_coded(shape, implementation="xla")


@settings(deadline=None, max_examples=10)
@given(shape=shapes(max_group=3, max_queries=7), blocks=st.sampled_from([4, 8]))
def test_kernel_is_the_formula(shape, blocks):
    check_coded(shape, tile=Tile(blocks, 1))


@pytest.mark.parametrize(
    ("n_queries", "group"),
    [(9, 4), (16, 1), (2, 16), (9, 11)],
    ids=["Qwen3", "many drafts", "heads in a loop", "older queries in a loop"],
)
@pytest.mark.parametrize("shifted", [True, False])
@pytest.mark.parametrize("lists", [1, 2])
def test_kernel_as_it_is_launched(n_queries, group, shifted, lists):
    shape = {
        "seed": 0, "n_layers": 1, "n_heads": 2, "lists": lists, "n_rows": 3, "n_queries": n_queries,
        "group": group, "drafts": n_queries - 1, "context": 1100,
        "shifted": shifted,
    }  # fmt: skip
    check_coded(shape, implementation="pallas")


@settings(deadline=None, max_examples=15)
@given(shape=shapes())
def test_dense_scores(shape):
    rng = np.random.default_rng(shape["seed"])
    context, drafts = shape["context"], shape["drafts"]
    end, here, ahead, committed, live = make_rows(
        rng, n_rows=shape["n_rows"], n_queries=shape["n_queries"], context=context
    )
    scores = make_dense(
        rng, live, n_layers=shape["n_layers"], n_heads=shape["n_heads"], context=context
    )
    ahead = ahead if shape["shifted"] else None
    arguments = {"lists": shape["lists"], "drafts": drafts, "context": context}
    for implementation in ("xla", "auto", "pallas"):  # there is no kernel for them
        actual = run(
            scores, end, here, ahead, committed, group=shape["group"], **arguments,
            implementation=implementation,
        )  # fmt: skip
        p = np.asarray(scores.probabilities, np.float64)
        expected = oracle(p, end, here, ahead, committed, **arguments)
        assert actual.dtype == np.float32
        np.testing.assert_allclose(actual, expected, rtol=1e-5, atol=1e-7)


STATICS = {"group": 2, "lists": 1, "drafts": 3, "context": 100}


def small_case(seed=0, n_rows=3, n_queries=6):
    rng = np.random.default_rng(seed)
    *rows, live = make_rows(rng, n_rows=n_rows, n_queries=n_queries, context=100)
    scores = make_coded(rng, live, n_layers=2, n_heads=1, group=2, context=100)
    return scores, *rows


@pytest.mark.parametrize("tile", [None, Tile(4, 1)])
def test_ahead_reaches_back_a_few_queries_only(tile):
    scores, end, _, ahead, _ = small_case()
    here, committed = np.zeros_like(ahead), np.full(3, 6, np.int32)
    ahead[:] = 0
    ahead[:, :2] = 1  # of ages 4 and 5
    assert not run(scores, end, here, ahead, committed, tile, **STATICS).any()
    ahead[:, 2] = 1
    assert run(scores, end, here, ahead, committed, tile, **STATICS).any()


@pytest.mark.parametrize("tile", [None, Tile(4, 1)])
def test_rejected_queries_are_never_ahead(tile):
    scores, end, here, ahead, committed = small_case()
    committed[0] = 2
    wild = np.where(np.arange(6) < committed[:, None], ahead, 7).astype(np.float32)
    rankings = [run(scores, end, here, x, committed, tile, **STATICS) for x in (ahead, wild)]
    np.testing.assert_array_equal(*rankings)


@pytest.mark.parametrize("tile", [None, Tile(4, 1)])
def test_a_live_query_of_no_number_counts_as_nothing(tile):
    scores, end, here, ahead, committed = small_case()
    broken = scores._replace(factor=scores.factor.at[:, 0].set(jnp.nan))
    ranking = run(broken, end, here, ahead, committed, tile, **STATICS)
    assert not ranking[:, 0].any()
    np.testing.assert_array_equal(
        ranking[:, 1:], run(scores, end, here, ahead, committed, tile, **STATICS)[:, 1:]
    )


@pytest.mark.parametrize("tile", [None, Tile(4, 1)])
def test_what_lies_past_the_end_does_not_matter(tile):
    scores, end, here, ahead, committed = small_case()
    end[:] = 33, 50, 64
    codes = np.array(scores.codes)
    for row, stop in enumerate(end):
        codes[:, row, ..., stop:] = 255
    other = scores._replace(codes=jnp.asarray(codes))
    rankings = [run(x, end, here, ahead, committed, tile, **STATICS) for x in (scores, other)]
    np.testing.assert_array_equal(*rankings)
    for row, stop in enumerate(end):
        assert not rankings[0][:, row, :, stop:].any()


@pytest.mark.parametrize("tile", [None, Tile(4, 1)])
def test_spare_layers_of_the_codes_are_ignored(tile):
    scores, *rows = small_case()
    spare = scores._replace(factor=scores.factor[:1])
    ranking = run(spare, *rows, tile, **STATICS)
    assert ranking.shape[0] == 1
    np.testing.assert_array_equal(ranking, run(scores, *rows, tile, **STATICS)[:1])


def test_dense_and_coded_agree():
    scores, end, here, ahead, committed = small_case()
    live = dense(scores, jnp.asarray(end), 2).probabilities[..., :100]
    one, other = (
        run(x, end, here, ahead, committed, **STATICS) for x in (scores, DenseScores(live))
    )
    np.testing.assert_allclose(one, other, rtol=1e-3, atol=1e-7)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"codes": jnp.zeros((2, 3, 1, 12, 128), jnp.int8)}, "codes is int8"),
        ({"codes": jnp.zeros((2, 3, 1, 12, 96), jnp.uint8)}, "at least context=100"),
        ({"codes": jnp.zeros((2, 3, 1, 12, 130), jnp.uint8)}, "with C a multiple of 32"),
        ({"factor": jnp.zeros((3, 3, 1, 12))}, r"factor is float32\[3, 3, 1, 12\]"),
        ({"end": jnp.zeros(3)}, r"end is float32\[3\], but must be int32\[R\] = int32\[3\]"),
        ({"committed": jnp.zeros(2, jnp.int32)}, r"committed is int32\[2\]"),
        ({"here": jnp.zeros((3, 5))}, r"here is float32\[3, 5\], but must be float32\[R, Q\]"),
        ({"ahead": jnp.zeros((3, 6), jnp.int32)}, r"ahead is int32\[3, 6\]"),
        ({"group": 5}, "group=5, but must divide P=12"),
        ({"lists": 2}, "lists=2, but must divide Hkv=1"),
        ({"lists": 0}, "lists=0, but must divide Hkv=1"),
        ({"drafts": 0}, "drafts=0, but must be at least 1"),
        ({"ages": 0}, "ages=0, but must be at least 1"),
    ],
)
def test_errors_name_the_argument(changes, message):
    scores, *rows = small_case()
    names = ("end", "here", "ahead", "committed")
    arguments = dict(zip(names, map(jnp.asarray, rows), strict=True)) | STATICS | changes
    fields = {name: arguments.pop(name) for name in scores._fields if name in arguments}
    with pytest.raises(ValueError, match=message):
        rank_positions(scores._replace(**fields), **arguments)


def test_errors_of_dense_scores():
    _, *rows = small_case()
    scores = DenseScores(jnp.zeros((2, 3, 1, 6, 99)))
    with pytest.raises(ValueError, match="with C=context=100"):
        rank_positions(scores, *map(jnp.asarray, rows), **STATICS)


@pytest.mark.parametrize("shifted", [True, False])
@pytest.mark.parametrize(("n_queries", "group"), [(9, 4), (16, 11), (2, 1)])
@pytest.mark.parametrize("lists", [1, 2])
@pytest.mark.parametrize("device_kind", GPUS)
def test_it_lowers_for_cuda(n_queries, group, shifted, lists, device_kind):
    lead = (2, 3, 2, n_queries * group)
    shaped = jax.ShapeDtypeStruct
    scores = CodedScores(shaped((*lead, 1024), jnp.uint8), shaped(lead, jnp.float32))
    rows, weights = shaped((3,), jnp.int32), shaped((3, n_queries), jnp.float32)
    call = functools.partial(
        rank_positions, group=group, lists=lists, drafts=n_queries - 1, context=1000,
        implementation="pallas", interpret=False,
    )  # fmt: skip
    ahead = weights if shifted else None
    arguments = scores, rows, weights, ahead, rows
    text = lower_for_cuda(call, *arguments, device_kind=device_kind).as_text()
    assert "__gpu$xla.gpu.triton" in text


@pytest.mark.gpu
@pytest.mark.skipif(jax.default_backend() != "gpu", reason="needs an NVIDIA GPU")
@pytest.mark.parametrize("shifted", [True, False])
@pytest.mark.parametrize(
    ("n_queries", "group"),
    [(9, 4), (16, 11), (16, 16), (2, 1)],
)
@pytest.mark.parametrize("context", [992, 1001, 8192])
@pytest.mark.parametrize("lists", [1, 2])
def test_compiled_kernel(n_queries, group, shifted, context, lists):
    shape = {
        "seed": 0, "n_layers": 2, "n_heads": 2, "lists": lists, "n_rows": 5, "n_queries": n_queries,
        "group": group, "drafts": n_queries - 1, "context": context,
        "shifted": shifted,
    }  # fmt: skip
    check_coded(shape, implementation="pallas")
