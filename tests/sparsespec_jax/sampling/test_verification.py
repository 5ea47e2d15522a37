"""Which drafts a verify keeps, and where a request ends: the rules one by one."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy import stats

from pallas_kernels.lowering import lower_for_cuda
from sparsespec_jax.sampling import accept_coupled, accept_rejection, truncate
from sparsespec_jax.sampling.verification import LENGTH, RUNNING, STOPPED

UNLIKELY = 1e-4  # the statistical tests are seeded: they pass or fail for good
coupled = jax.jit(accept_coupled)
rejection = jax.jit(accept_rejection)
cut = jax.jit(truncate)


def seeds_of(count):
    return jnp.stack([jnp.arange(count), jnp.full(count, 9)], 1).astype(jnp.uint32)


def log(probs):
    return jnp.log(jnp.asarray(probs, jnp.float32))


class TestCoupled:
    drafts = jnp.asarray([[5, 6, 7]] * 6)
    sampled = jnp.asarray(
        [[5, 6, 7, 8], [5, 6, 0, 8], [5, 0, 7, 8], [0, 6, 7, 8], [5, 6, 7, 8], [5, 6, 7, 8]]
    )
    n_drafts = jnp.asarray([3, 3, 3, 3, 2, 0])

    def test_drafts_are_kept_up_to_the_first_that_differs(self):
        accepted, _ = coupled(self.drafts, self.n_drafts, self.sampled)
        assert accepted.tolist() == [3, 2, 1, 0, 2, 0]

    def test_what_is_emitted_is_the_targets_own(self):
        _, tokens = coupled(self.drafts, self.n_drafts, self.sampled)
        np.testing.assert_array_equal(tokens, self.sampled)

    def test_a_cycle_without_drafts_emits_one_token(self):
        accepted, tokens = coupled(
            jnp.zeros((2, 0), int), jnp.zeros(2, int), jnp.asarray([[4], [5]])
        )
        assert (accepted.tolist(), tokens.tolist()) == ([0, 0], [[4], [5]])


class TestRejection:
    def run(self, p, q, drafts, n_drafts=None, rows=20_000):
        """The same p [k + 1, V], q [k, V] and, if given, drafts [k] for many seeds."""
        k = len(p) - 1
        if drafts is None:  # drawn from q
            drafts = jnp.stack(
                [
                    jax.random.categorical(jax.random.key(i), log(q[i]), shape=(rows,))
                    for i in range(k)
                ],
                1,
            )
        else:
            drafts = jnp.broadcast_to(jnp.asarray(drafts), (rows, k))
        tile = lambda x: jnp.broadcast_to(log(x), (rows, *np.shape(x)))  # noqa: E731
        n_drafts = jnp.full(rows, k if n_drafts is None else n_drafts)
        logq = None if q is None else tile(q)
        accepted, tokens = rejection(
            drafts, n_drafts, tile(p), logq, seeds_of(rows), jnp.full(rows, 7)
        )
        return np.asarray(accepted), np.asarray(tokens), np.asarray(drafts)

    p = np.asarray([[0.5, 0.3, 0.2, 0.0], [0.1, 0.1, 0.4, 0.4], [0.25] * 4])
    q = np.asarray([[0.2, 0.2, 0.3, 0.3], [0.4, 0.4, 0.1, 0.1]])

    def test_the_first_token_is_distributed_as_the_target(self):
        _, tokens, _ = self.run(self.p, self.q, None)
        counts = np.bincount(tokens[:, 0], minlength=4)
        assert counts[3] == 0
        assert stats.chisquare(counts[:3], self.p[0, :3] * len(tokens)).pvalue > UNLIKELY

    def test_so_is_every_later_token_given_that_it_was_reached(self):
        accepted, tokens, _ = self.run(self.p, self.q, None, rows=40_000)
        for i in (1, 2):
            reached = tokens[accepted >= i, i]
            counts = np.bincount(reached, minlength=4)
            assert stats.chisquare(counts, self.p[i] * len(reached)).pvalue > UNLIKELY

    def test_acceptance_is_the_overlap_of_the_distributions(self):
        accepted, _, _ = self.run(self.p, self.q, None)
        overlap = np.minimum(self.p[0], self.q[0]).sum()
        assert stats.binomtest(int((accepted > 0).sum()), len(accepted), overlap).pvalue > UNLIKELY

    @pytest.mark.parametrize("draft", [0, 1, 2, 3])
    def test_one_hot_proposals_are_lossless_too(self, draft):
        accepted, tokens, _ = self.run(self.p, None, [draft, draft])
        counts = np.bincount(tokens[:, 0], minlength=4)
        assert counts[3] == 0
        assert stats.chisquare(counts[:3], self.p[0, :3] * len(tokens)).pvalue > UNLIKELY
        kept = int((accepted > 0).sum())
        assert stats.binomtest(kept, len(accepted), self.p[0, draft]).pvalue > UNLIKELY

    def test_claiming_another_proposal_than_the_one_drawn_from_is_caught_by_these_tests(self):
        """Drafts come from a filtered q, the rule is given the unfiltered one."""
        rows, filtered = 20_000, np.asarray([0.0, 0.0, 0.5, 0.5])
        drafts = jax.random.categorical(jax.random.key(0), log(filtered), shape=(rows, 1))
        tile = lambda x: jnp.broadcast_to(log(x), (rows, *x.shape))  # noqa: E731
        _, tokens = rejection(
            drafts,
            jnp.ones(rows),
            tile(self.p[:2]),
            tile(self.q[:1]),
            seeds_of(rows),
            jnp.ones(rows, int),
        )
        counts = np.bincount(tokens[:, 0], minlength=4)[:3]
        assert stats.chisquare(counts, self.p[0, :3] * counts.sum()).pvalue < 1e-12

    def test_equal_distributions_accept_everything(self):
        accepted, tokens, drafts = self.run(self.p, self.p[:2], None)
        assert (accepted == 2).all()
        np.testing.assert_array_equal(tokens[:, :2], drafts)

    def test_only_the_drafts_that_exist_count(self):
        accepted, tokens, _ = self.run(self.p, self.p[:2], None, n_drafts=1)
        assert (accepted == 1).all()  # the bonus token follows draft 0
        counts = np.bincount(tokens[:, 1], minlength=4)
        assert stats.chisquare(counts, self.p[1] * len(tokens)).pvalue > UNLIKELY

    def test_greedy_rows_are_exact_matches(self):
        p = np.eye(4)[[2, 1, 3]]
        for drafts, expected in [([2, 1], 2), ([2, 0], 1), ([0, 1], 0)]:
            accepted, tokens, _ = self.run(p, np.eye(4)[drafts], drafts, rows=50)
            assert (accepted == expected).all()
            assert (tokens[:, : expected + 1] == [2, 1, 3][: expected + 1]).all()

    def test_a_draft_the_target_cannot_emit_is_never_kept(self):
        accepted, tokens, _ = self.run(self.p, self.q, [3, 0])
        assert (accepted == 0).all()
        assert (tokens[:, 0] != 3).all()

    def test_a_draft_its_own_distribution_cannot_emit_is_never_kept(self):
        accepted, _, _ = self.run(self.p, np.asarray([[0, 0.5, 0.5, 0], [0.25] * 4]), [0, 0])
        assert (accepted == 0).all()

    def test_a_residual_that_rounds_to_nothing_falls_back_to_the_target(self):
        """p below q everywhere, by rounding: nothing is left to draw the recovered token from."""
        q = np.asarray([[0.5, 0.5, 0.0, 0.0]])
        p = np.asarray([[0.4, 0.4, 0.0, 0.0], [0.25] * 4])
        accepted, tokens, _ = self.run(p, q, [0])
        recovered = tokens[accepted == 0, 0]
        assert len(recovered) > 1000
        assert set(recovered.tolist()) == {0, 1}

    def test_rows_do_not_depend_on_their_neighbours(self):
        accepted, tokens, _ = self.run(self.p, self.q, [2, 1], rows=32)
        few_accepted, few_tokens, _ = self.run(self.p, self.q, [2, 1], rows=5)
        np.testing.assert_array_equal(few_accepted, accepted[:5])
        np.testing.assert_array_equal(few_tokens, tokens[:5])


class TestTruncate:
    def run(self, tokens, emitted, *, stop=(9,), length=10, max_length=100, min_length=0):
        stop_ids = jnp.asarray([[*stop, -1, -1]])
        one = lambda value: jnp.asarray([value])  # noqa: E731
        out = cut(
            jnp.asarray([tokens]),
            one(emitted),
            stop_ids,
            one(length),
            one(max_length),
            one(min_length),
        )
        emitted, finished, reason = (x[0].item() for x in out)
        assert finished == (reason != RUNNING)
        return emitted, reason

    @pytest.mark.parametrize("slot", range(4))
    def test_it_cuts_after_a_stop_id_wherever_it_is(self, slot):
        tokens = [1, 2, 3, 4]
        tokens[slot] = 9
        assert self.run(tokens, 4) == (slot + 1, STOPPED)

    def test_the_first_of_several_stop_ids_counts(self):
        assert self.run([1, 8, 9, 8], 4, stop=(9, 8)) == (2, STOPPED)

    def test_a_stop_id_that_was_not_emitted_does_not_count(self):
        assert self.run([1, 2, 9, 9], 2) == (2, RUNNING)

    def test_padding_is_no_stop_id(self):
        assert self.run([1, -1, 2, 3], 4) == (4, RUNNING)

    def test_it_cuts_to_the_maximum_length(self):
        assert self.run([1, 2, 3, 4], 4, max_length=12) == (2, LENGTH)
        assert self.run([1, 2, 3, 4], 4, max_length=14) == (4, LENGTH)
        assert self.run([1, 2, 3, 4], 4, max_length=15) == (4, RUNNING)

    def test_stop_wins_at_the_maximum_length(self):
        assert self.run([1, 9, 3, 4], 4, max_length=12) == (2, STOPPED)

    def test_a_stop_id_beyond_the_maximum_length_does_not_count(self):
        assert self.run([1, 2, 9, 4], 4, max_length=12) == (2, LENGTH)

    def test_stop_ids_count_from_the_minimum_length_on(self):
        assert self.run([9, 9, 9, 4], 4, min_length=12) == (3, STOPPED)
        assert self.run([9, 9, 1, 4], 4, min_length=12) == (4, RUNNING)

    def test_a_request_that_is_already_full_emits_nothing(self):
        assert self.run([9, 2, 3, 4], 4, max_length=10) == (0, LENGTH)
        assert self.run([9, 2, 3, 4], 4, max_length=8) == (0, LENGTH)

    def test_nothing_emitted_changes_nothing(self):
        assert self.run([9, 2, 3, 4], 0) == (0, RUNNING)


def test_everything_lowers_for_cuda():
    def everything(drafts, n_drafts, logp, seeds, starts, stop_ids):
        sampled = jnp.argmax(logp, -1)
        coupled_result = accept_coupled(drafts, n_drafts, sampled)
        accepted, tokens = accept_rejection(drafts, n_drafts, logp, logp[:, 1:], seeds, starts)
        ends = truncate(tokens, accepted + 1, stop_ids, starts, starts + 9, starts)
        return coupled_result, ends

    ints = jnp.ones((2, 3), jnp.int32)
    inputs = ints, ints[:, 0], jnp.zeros((2, 4, 50)), seeds_of(2), ints[:, 0], ints
    assert "stablehlo" in lower_for_cuda(everything, *inputs).as_text()
