"""`fused_attention`: reference against the oracle, kernels against the reference, errors."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from attention_cases import Shape, Step, oracle, probabilities, random_step
from hypothesis import given, settings
from hypothesis import strategies as st

from pallas_kernels import fused_attention, gpus
from pallas_kernels.fused_attention import (
    CausalRows,
    CodedScores,
    draft_slots,
    pallas_triton,
    plan,
    sliding_window,
)
from pallas_kernels.fused_attention.tiles import Tile, Tiles, choose_tiles
from pallas_kernels.fused_attention.work_rows import Sizes

CODED = 0.065  # of a weight is what a code may be off, and some rounding
MIXED = Shape(n_scored=2, score_queries=4)
SHAPES = {
    "mixed": MIXED,
    "one head, group 1, budget is the context": Shape(
        n_kv_heads=1, group=1, head_dim=80, context=12, n_selected=12, max_recent=3, chunk=5
    ),
    "group 3, scores": Shape(group=3, head_dim=64, n_prefill=0, score_queries=4),
    "group 5, only drafts": Shape(group=5, head_dim=80, n_verify=0, n_prefill=0),
    "a list for each head": Shape(lists=2, n_verify=0, n_prefill=0),
    "a list for two heads": Shape(n_kv_heads=4, lists=2, n_verify=0, n_prefill=0),
    "only prefill, more score queries than the chunk": Shape(
        group=2, n_drafts=0, n_verify=0, chunk=6, n_scored=1, score_queries=8
    ),
    "plain decoding": Shape(n_drafts=0, n_prefill=0, n_queries=1, score_queries=1),
    "group 5, scores": Shape(
        n_kv_heads=1, group=5, head_dim=16, n_drafts=0, n_prefill=1, n_scored=1, score_queries=4
    ),
    "k = 15": Shape(n_drafts=1, n_verify=1, n_queries=16, n_scored=1, score_queries=16, chunk=20),
}
# Shapes that take other paths through the kernels: several splits, several tiles, both.
LONG = {
    "splits": Shape(n_verify=2, context=600, n_prefill=0, score_queries=4, n_drafts=0),
    "splits and tiles": Shape(
        n_kv_heads=1, group=3, head_dim=16, n_verify=1, context=520, n_prefill=1, chunk=50,
        n_scored=1, score_queries=4,
    ),
}  # fmt: skip


@functools.partial(jax.jit, static_argnames=("implementation", "statics"))
def _run(arrays, *, implementation, statics):
    return fused_attention(**arrays, **dict(statics), implementation=implementation)


def run(step: Step, implementation: str):
    arrays = {name: step.arguments[name] for name in step.arrays}
    statics = tuple(step.statics.items())
    return _run(arrays, implementation=implementation, statics=statics)


def assert_close(actual, expected, live, tolerance):
    """Relative error norm of the live queries; the padding queries must be finite."""
    actual = np.asarray(actual, np.float64)
    assert np.isfinite(actual).all()
    expected = np.asarray(expected, np.float64)[live]
    error = np.linalg.norm(actual[live] - expected)
    assert error <= tolerance * max(np.linalg.norm(expected), 1e-30)


def check_scores(step: Step, scores, expected, tolerance, coded=0.0):
    """Within `tolerance` of 1, and within the share `coded` of what is expected."""
    if expected is None:
        assert scores is None
        return
    actual = probabilities(step, scores)
    assert actual.shape == expected.shape
    np.testing.assert_allclose(actual, expected, atol=tolerance, rtol=coded)


@settings(deadline=None, max_examples=25)
@given(
    shape=st.sampled_from(list(SHAPES.values())),
    kind=st.sampled_from(["mixed", "mixed", "mixed", "padding", "shortest"]),
    seed=st.integers(0, 2**32 - 1),
)
def test_reference_is_the_oracle(shape, kind, seed):
    step = random_step(shape, np.random.default_rng(seed), kind=kind)
    out, scores = run(step, "xla")
    expected, live, expected_scores = oracle(step)
    assert out.dtype == jnp.float32
    assert_close(out, expected, live, 1e-5)
    check_scores(step, scores, expected_scores, 1e-6)


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
def test_reference_in_half_precision(dtype):
    step = random_step(MIXED, np.random.default_rng(0)).cast(dtype)
    out, scores = run(step, "xla")
    expected, live, expected_scores = oracle(step)
    assert out.dtype == dtype
    assert_close(out, expected, live, 1e-2)
    check_scores(step, scores, expected_scores, 1e-3)


@pytest.mark.parametrize("name", [*SHAPES, *LONG])
def test_kernels_are_the_reference(name):
    shape = (SHAPES | LONG)[name]
    for seed, kind in enumerate(["mixed", "mixed", "padding", "shortest"]):
        step = random_step(shape, np.random.default_rng(seed), kind=kind)
        out, scores = run(step, "pallas")
        expected, live, expected_scores = oracle(step)
        assert_close(out, expected, live, 1e-5)
        check_scores(step, scores, expected_scores, 1e-6, coded=CODED)


@pytest.mark.parametrize("n_scored", [0, 1])
def test_shares_of_one_block(n_scored):
    """Each block is a part of its own: some have no key that all queries see, or nothing at all."""
    shape = Shape(
        n_kv_heads=1, head_dim=16, context=99, n_drafts=0, n_queries=6, chunk=20,
        n_scored=n_scored, score_queries=6 * n_scored,
    )  # fmt: skip
    step = random_step(shape, np.random.default_rng(0))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(plan, "_LEAST_KEYS", 16)
        arguments = step.arguments | {"layer": jnp.int32(step.shape.layer), "scores": None}
        out, scores = pallas_triton.fused_attention(
            **arguments,
            gpu=gpus.current(),
            interpret=True,
            tiles=Tiles(Tile(16, 16, 4, 2), Tile(16, 16, 4, 2), 61),  # programs as nowhere else
        )
    expected, live, expected_scores = oracle(step)
    assert_close(out, expected, live, 1e-5)
    check_scores(step, scores, expected_scores, 1e-6, coded=CODED)


@settings(deadline=None, max_examples=25)
@given(
    rows=st.lists(st.tuples(st.integers(0, 700), st.integers(0, 20)), min_size=6, max_size=6),
    group=st.sampled_from([1, 5]),
    programs=st.sampled_from([3, 12]),
    start_keys=st.sampled_from([0, 96, 700]),
)
def test_plan_covers_each_block_once(rows, group, programs, start_keys):
    """Also where many short rows, or nothing but what their starts cost, are in one share."""
    start, count = np.array(rows).T
    tile, n = Tile(16, 32, 4, 2), 20
    n_tiles = -(-n * group // tile.rows)
    sizes = Sizes(n, 0, group, 64, tile, n_tiles, len(rows) * n_tiles, programs, 0, True)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(plan, "_LEAST_KEYS", 32)
        patch.setattr(plan, "_START_KEYS", start_keys)
        arrays = (jnp.asarray(x, jnp.int32) for x in (np.arange(len(rows)), start, count))
        made = plan.make_plan(CausalRows(*arrays), sizes)
    parts = [plan.Part(*part) for part in np.asarray(made.parts).tolist()]

    written = []
    for program in range(programs):
        at = program
        while at >= 0:
            written.append(at)
            at = parts[at].next
    assert len(written) == len(set(written))

    for w, entry in enumerate(np.asarray(made.merges).tolist()):
        merge, (r, t) = plan.Merge(*entry), divmod(w, n_tiles)
        first = t * tile.rows
        last_query = min((first + tile.rows - 1) // group, count[r] - 1)
        end = start[r] + last_query + 1 if first < count[r] * group else 0
        block = 0
        for j in range(merge.n_parts):
            at = merge.program + j if j else merge.part
            part = parts[at]
            assert at in written
            assert part[:6] == (r, first, r, start[r], count[r], block)
            assert part.high > part.low
            block = part.high
        assert block == -(-end // tile.block)


@pytest.mark.parametrize(
    ("n_packed", "head_dim", "rows"),
    [(4, 128, 16), (32, 128, 64), (45, 128, 64), (72, 128, 128), (72, 256, 64), (1024, 128, 64)],
)
def test_one_tile_where_two_would_read_the_keys_twice(n_packed, head_dim, rows):
    gpu = gpus.GPUS["NVIDIA H200"]
    tiles = choose_tiles(n_packed, 4, head_dim, jnp.dtype(jnp.bfloat16), gpu)
    assert tiles.causal.rows == rows


def test_kernels_of_72_packed_queries():
    shape = Shape(
        n_kv_heads=1, group=8, context=150, n_drafts=0, n_queries=9, n_prefill=0, score_queries=9
    )
    step = random_step(shape, np.random.default_rng(0)).cast(jnp.bfloat16)
    out, scores = run(step, "pallas")
    expected, live, expected_scores = oracle(step)
    assert_close(out, expected, live, 1e-2)
    check_scores(step, scores, expected_scores, 1e-3, coded=CODED)


def test_kernels_in_bfloat16():
    step = random_step(MIXED, np.random.default_rng(0)).cast(jnp.bfloat16)
    out, scores = run(step, "pallas")
    expected, live, expected_scores = oracle(step)
    assert_close(out, expected, live, 1e-2)
    check_scores(step, scores, expected_scores, 1e-3, coded=CODED)


@pytest.mark.parametrize("implementation", ["xla", "pallas"])
def test_selected_recent_positions_count_once(implementation):
    shape = Shape(n_verify=0, n_prefill=0, n_drafts=1)
    step = random_step(shape, np.random.default_rng(0))
    drafts = step.arrays["drafts"]
    position = drafts.position[0]
    recent_start = drafts.recent_start.at[0].set(position - 5)
    selected = drafts.selected.at[..., :3].set(jnp.array([1, 2, position - 5]))
    with_overlap = drafts._replace(
        recent_start=recent_start, selected=selected, count=drafts.count.at[0].set(3)
    )
    without = with_overlap._replace(count=drafts.count.at[0].set(2))
    results = []
    for rows in (with_overlap, without):
        step.arrays["drafts"] = rows
        results.append(run(step, implementation)[0])
    np.testing.assert_allclose(*results, rtol=1e-6)


def test_auto_is_the_reference_on_cpu():
    if jax.default_backend() != "cpu":
        pytest.skip("the default backend is no CPU")
    step = random_step(MIXED, np.random.default_rng(0))
    np.testing.assert_array_equal(run(step, "auto")[0], run(step, "xla")[0])


def test_reference_only_gathers_from_the_pool():
    step = random_step(MIXED, np.random.default_rng(0))
    pool = jax.ShapeDtypeStruct((1 << 17, 2, 64), jnp.float32)
    arrays = {name: step.arguments[name] for name in step.arrays}
    arrays["k_pool"] = arrays["v_pool"] = pool
    statics = tuple(step.statics.items())
    compiled = _run.lower(arrays, implementation="xla", statics=statics).compile()
    assert compiled.memory_analysis().temp_size_in_bytes < (1 << 17) * 2 * 64 * 4 / 2


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"implementation": "cuda"}, "implementation='cuda', but it must be"),
        ({"k_pool": jnp.zeros((8, 2))}, r"k_pool has shape \(8, 2\)"),
        ({"v_pool": jnp.zeros((8, 2, 64))}, r"v_pool is float32\[8, 2, 64\]"),
        ({"q": jnp.zeros((28, 4, 32))}, "D=64 and Hq a multiple of Hkv=2"),
        ({"q": jnp.zeros((28, 3, 64))}, "D=64 and Hq a multiple of Hkv=2"),
        ({"q": jnp.zeros((28, 4, 64), jnp.bfloat16)}, "q is bfloat16 and k_pool float32"),
        ({"q": jnp.zeros((27, 4, 64))}, "q has 27 queries, but 2 draft, 2 verify and 2 prefill"),
        ({"page_table": jnp.zeros((6, 43))}, r"page_table is float32\[6, 43\]"),
        ({"context": 44}, r"context=44, but must be in 1\.\.43"),
        ({"layer": 2}, r"layer=2, but must be in 0\.\.1"),
        ({"n_layers": 1}, r"layer=1, but must be in 0\.\.0, the n_layers=1 of scores"),
        ({"scores": CodedScores(0, 0)}, "scores is CodedScores, but this implementation makes"),
        ({"score_queries": 3}, "score_queries=3, but with verify rows it must be 0 or n_queries=4"),
        ({"score_queries": 0}, "scored is given, but score_queries is 0"),
        ({"scored": jnp.zeros(2)}, r"scored is float32\[2\]"),
        ({"prefill": None, "chunk": 9, "q": jnp.zeros((10, 4, 64))}, "there are no prefill rows"),
    ],
)
def test_errors_name_the_argument(changes, message):
    step = random_step(MIXED, np.random.default_rng(0))
    with pytest.raises(ValueError, match=message):
        fused_attention(**(step.arguments | changes))


def test_errors_of_row_arrays():
    step = random_step(MIXED, np.random.default_rng(0))
    drafts, verify = step.arrays["drafts"], step.arrays["verify"]
    page_table = step.arrays["page_table"]
    bad = drafts._replace(count=drafts.count[:-1])
    with pytest.raises(ValueError, match=r"drafts.count is int32\[5\], but must be int32\[6\]"):
        draft_slots(bad, page_table, max_recent=6)
    bad = drafts._replace(selected=drafts.selected[0])
    with pytest.raises(ValueError, match=r"drafts.selected is int32\[6, 1, 12\]"):
        draft_slots(bad, page_table, max_recent=6)
    with pytest.raises(ValueError, match="max_recent=0"):
        draft_slots(drafts, page_table, max_recent=0)
    slots = step.arguments["drafts"]
    bad = slots._replace(slots=slots.slots[:, :1])
    with pytest.raises(ValueError, match=r"drafts.slots is int32\[2, 1, 1, 18\]"):
        fused_attention(**(step.arguments | {"drafts": bad}))
    bad = slots._replace(slots=jnp.tile(slots.slots, (1, 1, 3, 1)))
    with pytest.raises(ValueError, match="lists a divisor of Hkv=2"):
        fused_attention(**(step.arguments | {"drafts": bad}))
    bad = verify._replace(start=verify.start[:1])
    with pytest.raises(ValueError, match=r"verify.start is int32\[1\]"):
        fused_attention(**(step.arguments | {"verify": bad}))


@pytest.mark.parametrize("implementation", ["xla", "pallas"])
@pytest.mark.parametrize("position", [0, 2, 5, 6, 30])
def test_sliding_window_drafts_see_sinks_and_window(implementation, position):
    """Each position once, also while the window still overlaps the sinks."""
    sinks, window = 3, 4
    shape = Shape(n_drafts=2, n_verify=0, n_prefill=0, layer=0)
    step = random_step(shape, np.random.default_rng(0))
    table = 1 + np.random.default_rng(1).permutation(2 * shape.context).reshape(2, -1)
    step.arrays["page_table"] = jnp.asarray(table, jnp.int32)
    rows = sliding_window(
        jnp.arange(2, dtype=jnp.int32),
        jnp.array([position, 17], jnp.int32),
        rows=2,
        n_layers=1,
        sinks=sinks,
        window=window,
    )
    slots = draft_slots(rows, step.arrays["page_table"], max_recent=window)
    for r, at in enumerate((position, 17)):
        newest = range(max(at - window + 1, 0), at + 1)
        expected = sorted({*range(min(sinks, at + 1)), *newest})
        used = np.asarray(slots.slots[0, r, :, : int(slots.length[r])])
        np.testing.assert_array_equal(used[used >= 0], table[r, expected])
    out, _ = fused_attention(**(step.arguments | {"drafts": slots}), implementation=implementation)
    assert np.isfinite(np.asarray(out)).all()


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.float16])
def test_logits_far_beyond_those_of_the_first_block(dtype):
    """Weights refer to one block's maximum; what leaves the range of floats is done again."""
    shape = Shape(context=300, n_drafts=2, n_selected=60, n_verify=2, n_prefill=0)
    step = random_step(shape, np.random.default_rng(0))
    far = np.concatenate(
        [
            np.asarray(step.arrays["page_table"])[:, 200:210].ravel(),
            step.arguments["drafts"].slots[1, :, 0, 40],
        ]
    )
    far = far[far > 0]
    step.arrays["k_pool"] = step.arrays["k_pool"].at[far].multiply(100)
    step = step.cast(dtype)
    out, _ = run(step, "pallas")
    expected, live, _ = oracle(step)
    assert_close(out, expected, live, 1e-5 if dtype == jnp.float32 else 1e-2)


def test_scores_are_completed_layer_by_layer():
    """Each call writes its layer and leaves the others alone."""
    step = random_step(MIXED, np.random.default_rng(0))
    for implementation in ("xla", "pallas"):
        alone = [
            fused_attention(**(step.arguments | {"layer": i}), implementation=implementation)[1]
            for i in range(2)
        ]
        both = fused_attention(
            **(step.arguments | {"layer": 1, "scores": alone[0]}), implementation=implementation
        )[1]
        for layer in range(2):
            step.shape = dataclasses.replace(step.shape, layer=layer)
            np.testing.assert_array_equal(
                probabilities(step, both), probabilities(step, alone[layer])
            )
        step.shape = MIXED


@pytest.mark.parametrize("implementation", ["xla", "pallas"])
def test_keys_that_are_no_numbers_reach_no_query_before_them(implementation):
    """A rejected draft may have any keys: earlier queries must not notice."""
    shape = Shape(n_drafts=0, n_prefill=0, n_verify=2)
    step = random_step(shape, np.random.default_rng(0))
    rows = step.arrays["verify"]
    clean, _ = run(step, implementation)
    slot = step.arrays["page_table"][rows.row[0], rows.start[0] + 2]
    step.arrays["k_pool"] = step.arrays["k_pool"].at[slot].set(jnp.nan)
    out, _ = run(step, implementation)
    seen = np.zeros(len(out), bool)
    seen[2:4] = True  # queries 2 and 3 of the first row; it has four
    assert np.isnan(np.asarray(out)[seen]).all()
    np.testing.assert_allclose(
        np.asarray(out)[~seen], np.asarray(clean)[~seen], rtol=1e-5, atol=1e-6
    )


def test_scores_need_a_scored_row():
    step = random_step(SHAPES["group 5, only drafts"], np.random.default_rng(0))
    with pytest.raises(ValueError, match="neither verify rows nor scored prefill rows"):
        fused_attention(**(step.arguments | {"score_queries": 4}))


@pytest.mark.gpu
@pytest.mark.skipif(jax.default_backend() != "gpu", reason="needs an NVIDIA GPU")
@pytest.mark.parametrize(("dtype", "tolerance"), [("float32", 1e-5), ("bfloat16", 1e-2)])
@pytest.mark.parametrize(
    ("n_kv_heads", "group", "head_dim"),
    [(8, 4, 128), (2, 7, 64), (3, 5, 80), (4, 1, 96), (2, 16, 128), (2, 3, 256)],
)
def test_compiled_kernels(n_kv_heads, group, head_dim, dtype, tolerance):
    shape = Shape(
        n_kv_heads=n_kv_heads, group=group, head_dim=head_dim, context=3000, n_drafts=9,
        n_selected=150, max_recent=20, n_verify=4, n_queries=9, n_prefill=2, chunk=200,
        n_scored=2, score_queries=9,
    )  # fmt: skip
    for shape_ in (shape, dataclasses.replace(shape, n_queries=8, score_queries=8)):
        step = random_step(shape_, np.random.default_rng(0)).cast(dtype)
        out, scores = run(step, "pallas")
        expected, expected_scores = run(step, "xla")
        live = np.ones(len(out), bool)
        assert_close(out, expected, live, tolerance)
        check_scores(
            step, scores, probabilities(step, expected_scores),
            1e-6 if dtype == "float32" else 2e-3, coded=CODED,
        )  # fmt: skip
