"""A plan and a result survive being packed, and what is not used in a plan is harmless."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sparsespec_jax.engine.plan import (
    ADMISSION_WORDS,
    COMMIT_WORDS,
    UPDATES_PER_CHUNK,
    Bucket,
    Plan,
    PlanLayout,
    ResultLayout,
)
from sparsespec_jax.sampling.rows import NEUTRAL_ROW, RowSampling, unpack_rows

TRASH_ROW = 7


@st.composite
def layouts(draw) -> PlanLayout:
    drafts, verifies, chunks = (draw(st.integers(0, 5)) for _ in range(3))
    bucket = Bucket(drafts, verifies, chunks, context=128)
    queries, chunk, commits = draw(
        st.tuples(st.integers(1, 9), st.integers(1, 20), st.sampled_from([0, TRASH_ROW]))
    )
    return PlanLayout(bucket, queries, chunk, TRASH_ROW, commits)


@settings(max_examples=40, deadline=None)
@given(layouts())
def test_what_is_packed_comes_out_again(layout):
    packed, plan = layout.empty()
    for number, section in enumerate(plan, start=1):
        section[:] = number * 10_000 + np.arange(section.size).reshape(section.shape)
    for put, got in zip(plan, layout.unpack(packed.copy()), strict=True):
        np.testing.assert_array_equal(put, got)


def test_the_device_unpacks_what_the_host_packs():
    layout = PlanLayout(Bucket(3, 2, 2, context=128), 5, 8, TRASH_ROW)
    packed = np.arange(layout.size, dtype=np.int32)
    for host, device in zip(layout.unpack(packed), jax.jit(layout.unpack)(packed), strict=True):
        np.testing.assert_array_equal(host, device)


@settings(max_examples=40, deadline=None)
@given(layouts())
def test_the_sections_share_the_packed_array_without_gap_or_overlap(layout):
    packed, plan = layout.empty()
    assert packed.dtype == np.int32
    assert packed.shape == (layout.size,)
    packed[:] = 0
    for section in plan:
        section += 1
    np.testing.assert_array_equal(packed, 1)


@settings(max_examples=40, deadline=None)
@given(layouts())
def test_padding_names_the_trash_row_and_asks_for_nothing(layout):
    _, plan = layout.empty()
    for section in plan._replace(sparsity=plan.drafts):
        np.testing.assert_array_equal(section[:, 0], TRASH_ROW)
    assert plan.sparsity.item() == 0
    for name in ("drafts", "verifies", "chunks", "commits"):
        np.testing.assert_array_equal(getattr(plan, name)[:, 1:], 0)
    np.testing.assert_array_equal(plan.updates[:, 1:3], 0)  # the trash row maps to the trash slot
    np.testing.assert_array_equal(plan.updates[:, 3], -1)
    np.testing.assert_array_equal(plan.admissions[:, 1:3], 0)
    for words in plan.admissions[:, 3:]:
        np.testing.assert_array_equal(words, NEUTRAL_ROW)


def test_a_neutral_row_samples_as_an_empty_one_does():
    neutral = unpack_rows(jnp.asarray(NEUTRAL_ROW)[None])
    jax.tree.map(np.testing.assert_array_equal, neutral, RowSampling.zeros(1))


def test_every_decoding_row_can_grow_by_a_cycle_and_every_chunk_by_itself():
    bucket = Bucket(drafts=3, verifies=2, chunks=2, context=128)
    assert PlanLayout(bucket, 5, 8, TRASH_ROW).max_updates == 5 * 5 + 2 * UPDATES_PER_CHUNK
    chunk = UPDATES_PER_CHUNK + 1
    assert PlanLayout(bucket, 5, chunk, TRASH_ROW).max_updates == 5 * 5 + 2 * chunk


def test_the_shapes_are_those_of_the_bucket():
    layout = PlanLayout(Bucket(drafts=3, verifies=2, chunks=4, context=128), 5, 8, TRASH_ROW)
    assert layout.shapes == Plan(
        updates=(layout.max_updates, 4),
        admissions=(4, ADMISSION_WORDS),
        drafts=(3, 2),
        verifies=(2, 2),
        chunks=(4, 4),
        commits=(0, COMMIT_WORDS),
        sparsity=(1, 1),
    )
    assert not layout.delayed


@pytest.mark.parametrize("logprobs", [-1, 0, 1, 5])
@pytest.mark.parametrize("n_queries", [1, 4])
@pytest.mark.parametrize("delayed", [False, True])
def test_a_result_survives_being_packed(logprobs, n_queries, delayed):
    rows, top = 3, max(logprobs, 0)
    rng = np.random.default_rng(0)
    counts = rng.integers(0, 100, (rows, 3), dtype=np.int32)
    tokens = rng.integers(0, 100, (rows, n_queries), dtype=np.int32)
    chosen = rng.normal(size=(rows, n_queries)).astype(np.float32)
    ids = rng.integers(0, 100, (rows, n_queries, top), dtype=np.int32)
    values = rng.normal(size=(rows, n_queries, top)).astype(np.float32)
    chosen[0, 0] = -np.inf
    values[:1, :1, :1] = np.nan
    words = [counts, tokens]
    if logprobs >= 0:
        words += [chosen.view(np.int32), ids.reshape(rows, -1)]
        words += [values.view(np.int32).reshape(rows, -1)]
    drafts = rng.integers(0, 100, (rows, delayed * (n_queries - 1)), dtype=np.int32)
    packed = np.concatenate([*words, drafts], axis=1)

    layout = ResultLayout(n_queries, logprobs, drafts.shape[1])
    assert packed.shape[1] == layout.words
    result = layout.unpack(packed)
    for column, name in enumerate(("emitted", "accepted", "finish")):
        np.testing.assert_array_equal(getattr(result, name), counts[:, column])
    np.testing.assert_array_equal(result.tokens, tokens)
    np.testing.assert_array_equal(result.drafts, drafts)
    if logprobs >= 0:
        assert result.logprobs.dtype == result.top_logprobs.dtype == np.float32
        np.testing.assert_array_equal(result.logprobs, chosen)
        np.testing.assert_array_equal(result.top_ids, ids)
        np.testing.assert_array_equal(result.top_logprobs, values)
    else:
        assert result.logprobs.shape == (rows, 0)
        assert result.top_ids.shape == (rows, n_queries, 0)


def test_a_result_of_no_rows_unpacks():
    layout = ResultLayout(4, 5)
    result = layout.unpack(np.zeros((0, layout.words), np.int32))
    assert result.tokens.shape == (0, 4)
    assert result.top_logprobs.shape == (0, 4, 5)


def test_a_bucket_says_what_it_is_for():
    text = str(Bucket(8, 2, 4, 1024, filters=True, penalties=False, logprobs=5))
    for part in ("8 draft", "2 verify", "4 prefill", "context 1024", "filters", "logprobs=5"):
        assert part in text
    assert "penalties" not in text
