"""Buckets: whatever a step needs there is a shape for, and there are few shapes."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sparsespec_jax.engine.buckets import Buckets, Features
from sparsespec_jax.engine.plan import Bucket
from sparsespec_jax.sampling.params import SamplingParams


def make_buckets(**changes) -> Buckets:
    arguments = {"max_batch": 64, "max_context": 4000, "k": 8, "chunk": 128, "prefill_rows": 4}
    return Buckets(**arguments | changes)


@st.composite
def buckets(draw) -> Buckets:
    sizes = st.none() | st.lists(st.integers(1, 300), min_size=1, max_size=4, unique=True).map(
        lambda values: tuple(sorted(values))
    )
    return make_buckets(
        max_batch=draw(st.integers(1, 200)),
        max_context=draw(st.integers(2, 20_000)),
        k=draw(st.sampled_from([0, 1, 4, 8, 15])),
        prefill_rows=draw(st.integers(1, 4)),
        batch_buckets=draw(sizes),
        context_buckets=draw(sizes),
    )


@st.composite
def needs(draw, made: Buckets) -> dict:
    rows = draw(st.integers(0, made.max_batch))
    verifies = rows if made.k == 0 else draw(st.integers(0, rows))
    return {
        "drafts": rows - verifies,
        "verifies": verifies,
        "chunks": draw(st.integers(int(rows == 0), 6)),
        "context": draw(st.integers(1, made.width)),
        "features": draw(st.builds(Features, st.booleans(), st.booleans(), st.integers(-1, 20))),
    }


def chunk_rows(made: Buckets, need: dict) -> int:
    few = need["chunks"] <= made.prefill_rows // 2
    return min(need["chunks"], 1) if few else made.prefill_rows


@settings(max_examples=200, deadline=None)
@given(st.data())
def test_the_smallest_bucket_has_room_for_what_was_asked(data):
    made = data.draw(buckets())
    need = data.draw(needs(made))
    bucket = made.smallest(**need)
    assert bucket.drafts >= min(need["drafts"], 1)
    assert bucket.verifies >= min(need["verifies"], 1)
    if made.k == 0:
        assert bucket.verifies >= need["verifies"]
    assert bucket.verifies <= made.most_verifies(made.max_batch)
    assert bucket.chunks == chunk_rows(made, need)
    assert need["context"] <= bucket.context <= made.width
    assert bucket.filters >= need["features"].filters
    assert bucket.penalties >= need["features"].penalties
    if bucket.verifies or bucket.chunks:
        assert bucket.logprobs >= need["features"].logprobs


@settings(max_examples=200, deadline=None)
@given(st.data())
def test_ordinary_traffic_meets_only_main_buckets(data):
    made = data.draw(buckets())
    need = data.draw(needs(made)) | {"features": Features()}
    assert made.smallest(**need) in made.main()


@settings(max_examples=100, deadline=None)
@given(buckets())
def test_a_full_cycle_of_verifications_has_room_for_every_row(made):
    """So nobody waits for its verification forever."""
    for rows in {1, made.max_batch // 2 or 1, made.max_batch}:
        assert made.most_verifies(rows) * (made.k + 1) >= rows
    assert made.most_verifies(0) == 0


@settings(max_examples=100, deadline=None)
@given(buckets())
def test_rows_that_are_spread_evenly_over_the_phases_all_find_a_place(made):
    for rows in range(1, made.max_batch + 1):
        for step in range(made.k + 1):
            phases = (np.arange(rows) + step) % (made.k + 1)
            verifies = int((phases == made.k).sum())
            bucket = made.smallest(rows - verifies, verifies, 0, 1, Features())
            assert bucket.verifies >= verifies
            assert bucket.drafts >= rows - verifies


@settings(max_examples=100, deadline=None)
@given(buckets())
def test_the_queries_of_a_large_batch_are_a_multiple_of_eight(made):
    for bucket in made.main():
        if bucket.drafts and bucket.verifies and bucket.drafts > made.k + 1:
            assert (bucket.drafts + bucket.verifies * (made.k + 1)) % 8 == 0


@settings(max_examples=100, deadline=None)
@given(buckets())
def test_a_full_row_and_its_drafts_fit_the_page_table(made):
    assert made.width % 128 == 0
    assert made.width >= 2 + made.k + 1


def test_the_page_table_is_as_wide_as_the_context_and_the_drafts_behind_it():
    assert make_buckets(max_context=128 - 9).width == 128
    assert make_buckets(max_context=128 - 8).width == 256


def test_there_are_few_buckets_by_default():
    """Batches of 1, 4, 16, 24, 32, 48 and 64 (1 and 4 with a bucket more), 2 contexts; 1, 16, 32
    and 64, and none, beside a chunk; all or none beside many."""
    made = make_buckets()
    assert made.main() == sorted(set(made.main()))
    assert len(made.main()) == 2 * (9 + 6 + 2)
    assert len(make_buckets(max_batch=1, max_context=500).main()) == 2 + 3 + 2
    assert len(make_buckets(max_batch=4, max_context=500, batch_buckets=(4,)).main()) == 2 + 3 + 2


def test_a_lone_row_drafts_or_verifies_but_has_no_room_for_both():
    made = make_buckets()
    assert made.smallest(1, 0, 0, 10, Features()) == Bucket(1, 0, 0, 1024)
    assert made.smallest(0, 1, 0, 10, Features()) == Bucket(0, 1, 0, 1024)


def test_a_batch_of_up_to_k_rows_need_not_have_room_to_verify():
    made = make_buckets()
    assert made.smallest(3, 0, 0, 10, Features()) == Bucket(4, 0, 0, 1024)
    assert Bucket(4, 0, 0, 1024) in made.main()


def test_a_batch_has_room_for_its_share_to_draft_and_to_verify():
    made = make_buckets(max_batch=128, batch_buckets=(4, 16, 64))
    assert made.smallest(3, 1, 0, 10, Features()) == Bucket(4, 1, 0, 1024)
    assert made.smallest(5, 0, 0, 10, Features()) == Bucket(22, 2, 0, 1024)  # 15 due
    assert made.smallest(50, 7, 0, 1025, Features()) == Bucket(64, 8, 0, 4096)  # 57 due
    assert made.smallest(99, 9, 0, 1025, Features()) == Bucket(121, 15, 0, 4096)  # 114 due


def test_without_drafts_every_row_verifies_in_every_step():
    made = make_buckets(k=0)
    assert made.smallest(0, 1, 0, 10, Features()) == Bucket(0, 1, 0, 1024)
    assert made.smallest(0, 5, 0, 10, Features()) == Bucket(0, 16, 0, 1024)
    assert all(bucket.drafts == 0 for bucket in made.main())


def test_a_step_has_one_chunk_or_room_for_many_and_then_for_all_rows_that_may_decode():
    made = make_buckets(prefill_rows=8)
    found = [made.smallest(17, 1, chunks, 10, Features()) for chunks in (0, 1, 4, 5, 40)]
    few, many = Bucket(36, 4, 1, 1024), Bucket(64, 8, 8, 1024)
    assert found == [Bucket(29, 3, 0, 1024), few, few, many, many]
    assert made.smallest(0, 0, 8, 10, Features()) == Bucket(0, 0, 8, 1024)


def test_own_sizes_replace_the_default_ones_and_the_largest_is_always_there():
    made = make_buckets(max_batch=10, batch_buckets=(2, 8, 32), context_buckets=(256, 100_000))
    batches = {bucket.drafts for bucket in made.main() if bucket.drafts}
    assert batches == {2, 8, made.most_drafts(10, 2, made.k)}
    assert {bucket.context for bucket in made.main()} == {256, made.width}


def test_features_are_the_union_of_what_requests_ask_for():
    plain, filters = SamplingParams(), SamplingParams(top_k=5)
    penalties = SamplingParams(frequency_penalty=0.5)
    assert Features().including(plain) == Features(False, False, -1)
    assert Features().including(filters).including(plain).filters
    assert Features().including(filters).including(penalties) == Features(True, True, -1)


@pytest.mark.parametrize(("asked", "reported"), [(None, -1), (0, 0), (1, 5), (5, 5), (6, 20)])
def test_logprobs_come_in_a_few_widths(asked, reported):
    features = Features().including(SamplingParams(logprobs=asked))
    assert make_buckets().smallest(3, 1, 0, 10, features).logprobs == reported
    assert features.including(SamplingParams(logprobs=20)).logprobs == 20


def test_a_step_that_only_drafts_reports_no_logprobs():
    features = Features(logprobs=5)
    assert make_buckets().smallest(1, 0, 0, 10, features).logprobs == -1
    assert make_buckets().smallest(0, 0, 1, 10, features).logprobs == 5


PHASES = ("random", "lockstep")


@settings(max_examples=200, deadline=None)
@given(st.data(), st.sampled_from(PHASES))
def test_where_phases_are_not_balanced_there_is_room_for_whatever_is_due(data, phases):
    made = data.draw(buckets())
    need = data.draw(needs(made))
    made.phases = phases
    bucket = made.smallest(**need)
    assert bucket.drafts >= need["drafts"]
    assert bucket.verifies >= need["verifies"]
    assert bucket.chunks == chunk_rows(made, need)
    if not bucket.chunks == made.prefill_rows > 1:
        assert bool(bucket.drafts) == bool(need["drafts"])
        assert bool(bucket.verifies) == bool(need["verifies"])


@settings(max_examples=100, deadline=None)
@given(st.data())
def test_lockstep_meets_only_main_buckets(data):
    made = data.draw(buckets())
    need = data.draw(needs(made)) | {"features": Features()}
    made.phases = "lockstep"
    assert made.smallest(**need) in made.main()


def test_in_lockstep_all_rows_draft_or_all_verify():
    made = make_buckets(max_batch=128, batch_buckets=(4, 16, 64), phases="lockstep")
    assert made.smallest(50, 0, 0, 10, Features()) == Bucket(64, 0, 0, 1024)
    assert made.smallest(0, 50, 0, 10, Features()) == Bucket(0, 64, 0, 1024)
    assert made.smallest(99, 1, 0, 10, Features()) == Bucket(128, 128, 0, 1024)


def test_random_phases_verify_their_share_or_twice_or_four_times_as_many():
    made = make_buckets(max_batch=128, phases="random")
    sizes = {made.smallest(128 - n, n, 0, 10, Features()).verifies for n in range(1, 128)}
    assert sizes == {15, 30, 60, 120, 128}
    assert made.smallest(120, 8, 0, 10, Features()) == Bucket(128, 15, 0, 1024)
    assert made.smallest(100, 28, 0, 10, Features()) == Bucket(128, 30, 0, 1024)
    assert made.smallest(128, 0, 0, 10, Features()) == Bucket(128, 0, 0, 1024)
