"""What a request counts: one definition of acceptance, on scripted patterns."""

from __future__ import annotations

import numpy as np
import pytest

from sparsespec_jax.engine.request import Request, RequestStats
from sparsespec_jax.sampling.params import SamplingParams


def count(k: int, *cycles: tuple[int, int]) -> RequestStats:
    """The stats after cycles of (drafts, accepted)."""
    stats = RequestStats()
    for n_drafts, accepted in cycles:
        stats.count_cycle(k, n_drafts, accepted, accepted + 1)
    return stats


def test_mean_accepted_is_of_full_cycles_and_without_the_verifications_own_token():
    stats = count(4, (4, 4), (4, 0), (4, 2))
    assert stats.mean_accepted == (4 + 0 + 2) / 3
    assert stats.cycles == stats.full_cycles == 3


def test_a_short_first_cycle_does_not_count_in_the_mean():
    """It could not have accepted k, whatever the drafts were like."""
    stats = count(4, (2, 2), (4, 3))
    assert stats.mean_accepted == 3
    assert (stats.cycles, stats.full_cycles) == (2, 1)


def test_acceptance_is_also_known_by_place_in_the_cycle():
    stats = count(4, (2, 2), (4, 1), (4, 3), (4, 4))
    np.testing.assert_array_equal(stats.drafted_at, [4, 4, 3, 3])
    np.testing.assert_array_equal(stats.accepted_at, [4, 3, 2, 1])


def test_a_cycle_that_ends_the_request_counts_by_place_up_to_the_end_but_not_in_the_mean():
    """Where the text ends says nothing about the drafts behind it."""
    stats = count(4, (4, 3))
    stats.count_cycle(4, 4, 2, 2, last=True)
    assert stats.mean_accepted == 3
    np.testing.assert_array_equal(stats.drafted_at, [2, 2, 1, 1])
    np.testing.assert_array_equal(stats.accepted_at, [2, 2, 1, 0])


@pytest.mark.parametrize("stats", [RequestStats(), count(4, (2, 1)), count(0, (0, 0), (0, 0))])
def test_without_a_full_cycle_of_drafts_there_is_no_mean(stats):
    assert stats.mean_accepted is None


def test_a_request_knows_its_prompt():
    prompt = np.array([3, 4, 5], np.int32)
    first, second = (Request(i, prompt, SamplingParams(), np.zeros(1), 9, print) for i in range(2))
    assert first.stats.prompt_tokens == 3
    assert first.prefix_key == second.prefix_key
    assert first.stats.submitted <= second.stats.submitted
    assert first != second
