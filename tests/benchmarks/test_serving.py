"""What the serving benchmark makes up: lengths, progress, acceptance; what `auto` makes of that."""

import jax.numpy as jnp
import numpy as np
import pytest

from benchmarks.crossover import adapt, tokens_a_step
from benchmarks.workload import ACCEPTED, Workload, draw_acceptance
from sparsespec_jax.engine import emission, host_verification


def test_outputs_are_as_long_as_those_of_aime_problems():
    workload = Workload.aime(20_000, scale=1.0)
    assert workload.outputs.max() <= workload.longest == 32_768
    assert abs(workload.outputs.mean() - 13_000) < 300
    assert abs(workload.outputs.std() - 7_300) < 300  # 7,600 but for the longest
    assert not workload.done.any()


def test_requests_found_midway_are_the_longer_ones_and_anywhere_in_their_output():
    """A moment finds an output with a chance in proportion to its length."""
    workload = Workload.aime(6_000, scale=1.0, midway=5_000)
    running, done = workload.outputs[:5_000], workload.done[:5_000]
    lengths = Workload.aime(20_000, scale=1.0).outputs
    assert abs(running.mean() / ((lengths**2).mean() / lengths.mean()) - 1) < 0.03
    assert ((done >= 0) & (done < running)).all()
    assert abs((done / running).mean() - 0.5) < 0.02
    assert not workload.done[5_000:].any()


def test_drafts_are_accepted_at_the_rates_given_and_alike_on_host_and_device(monkeypatch):
    for module in (emission, host_verification):
        monkeypatch.setattr(module, "accept_coupled", module.accept_coupled)
    draw_acceptance(ACCEPTED)
    rng = np.random.default_rng(0)
    sampled = rng.integers(0, 150_000, (20_000, 9))
    drafts, n_drafts = sampled[:, :8], np.full(20_000, 8)
    on_host = host_verification.accept_coupled(drafts, n_drafts, sampled)
    shares = (on_host[:, None] > np.arange(8)).mean(0)
    np.testing.assert_allclose(shares, ACCEPTED, atol=0.01)
    arguments = (jnp.asarray(x, jnp.int32) for x in (drafts, n_drafts, sampled))
    on_device, tokens = emission.accept_coupled(*arguments)
    np.testing.assert_array_equal(on_device, on_host)
    np.testing.assert_array_equal(tokens, sampled)


@pytest.mark.parametrize(
    ("step_ms", "best"),
    [
        ({8: 9.6, 4: 11.0, 2: 13.8, 0: 22.4}, 4),
        ({8: 3.8, 4: 5.2, 2: 6.0, 0: 15.0}, 8),
        ({8: 16.3, 4: 16.7, 2: 15.8, 0: 12.7}, 0),
    ],
)
def test_auto_is_replayed_to_what_emits_most(step_ms, best):
    seconds = {k: [ms / 1e3] for k, ms in step_ms.items()}
    rates = {k: tokens_a_step(64, k, ACCEPTED) / times[0] for k, times in seconds.items()}
    assert max(rates, key=rates.get) == best
    k, rate = adapt(64, seconds, ACCEPTED, 2000)
    assert k == best
    assert 0.96 * rates[best] < rate <= rates[best], "but for the trials"
