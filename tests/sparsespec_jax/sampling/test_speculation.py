"""Losslessness end to end: what a speculative loop emits is what plain decoding emits.

Coupled verification is compared token by token with plain decoding (k = 0), rejection verification
by chi-square with the exact distribution of whole continuations.
"""

import itertools

import numpy as np
import pytest
from sampling_toy import generate, random_tables
from scipy import stats

from sparsespec_jax.sampling import SamplingParams
from sparsespec_jax.sampling.verification import LENGTH, STOPPED

VOCAB = 24
UNLIKELY = 1e-4  # the statistical tests are seeded: they pass or fail for good
PROMPT = (3, 1, 4, 1, 5)
SEEDS = tuple(range(100, 116))
TARGET, DRAFT = random_tables(VOCAB)

FEATURES = {
    "plain sampling": {},
    "greedy": {"temperature": 0.0},
    "filters": {"temperature": 0.8, "top_k": 12, "top_p": 0.9, "min_p": 0.02},
    "frequency penalty": {"frequency_penalty": 2.0},
    "negative frequency penalty": {"frequency_penalty": -2.0},
    "greedy frequency penalty": {"temperature": 0.0, "frequency_penalty": 2.0},
    "repetition penalty": {"repetition_penalty": 1.05},
    "presence penalty": {"presence_penalty": 1.5, "temperature": 0.7},
    "bias": {"logit_bias": {2: 3.0, 7: -100.0}},
    "raw logprobs": {"logprobs": 0, "logprobs_mode": "raw", "temperature": 0.5},
    "everything": {
        "temperature": 0.9,
        "top_k": 15,
        "top_p": 0.95,
        "min_p": 0.01,
        "repetition_penalty": 1.2,
        "frequency_penalty": 0.3,
        "presence_penalty": 0.2,
        "min_tokens": 4,
        "logit_bias": {2: 3.0, 7: -100.0},
    },
}


def run(params, k, target=TARGET, draft=DRAFT, seeds=SEEDS, **options):
    return generate(target, draft, params, PROMPT, seeds, k=k, eos_ids=(0,), **options)


class TestCoupled:
    @pytest.mark.parametrize("feature", FEATURES)
    def test_tokens_reasons_and_logprobs_equal_those_of_plain_decoding(self, feature):
        params = SamplingParams(**FEATURES[feature])
        tokens, reasons, logprobs, _ = run(params, k=0)
        spec_tokens, spec_reasons, spec_logprobs, accepted = run(params, k=4)
        assert (spec_tokens, spec_reasons) == (tokens, reasons)
        for row, plain_row in zip(spec_logprobs, logprobs, strict=True):
            np.testing.assert_allclose(row, plain_row, rtol=1e-5, atol=1e-6)
        assert accepted.sum() > len(SEEDS)  # it did speculate

    @pytest.mark.parametrize("k", [1, 2, 7])
    def test_the_number_of_drafts_does_not_matter(self, k):
        params = SamplingParams(**FEATURES["everything"])
        assert run(params, k)[:2] == run(params, 0)[:2]

    def test_the_drafter_does_not_matter(self):
        params = SamplingParams(temperature=0.8)
        hopeless = -TARGET
        plain, with_hopeless, with_perfect = (
            run(params, 0)[0],
            run(params, 4, draft=hopeless)[0],
            run(params, 4, draft=TARGET)[0],
        )
        assert with_hopeless == with_perfect == plain

    def test_a_perfect_drafter_is_always_accepted(self):
        params = SamplingParams(**{**FEATURES["everything"], "ignore_eos": True, "min_tokens": 0})
        _, _, _, accepted = run(params, k=4, draft=TARGET, n_new=10)
        assert (accepted == 8).all()  # 2 cycles of 4 drafts and a bonus token

    def test_a_request_does_not_depend_on_its_neighbours(self):
        params = SamplingParams(temperature=1.1)
        together = run(params, k=4)[0]
        assert run(params, k=4, seeds=SEEDS[3:5])[0] == together[3:5]

    def test_penalties_change_the_text_they_are_meant_to_change(self):
        """A penalty that is silently ignored would also pass the equality above."""
        greedy = {"temperature": 0.0, "ignore_eos": True}
        plain = run(SamplingParams(**greedy), k=4, n_new=20)[0][0]
        for penalty in ("frequency_penalty", "presence_penalty"):
            text = run(SamplingParams(**greedy, **{penalty: 2.0}), k=4, n_new=20)[0][0]
            assert len(set(text)) > len(set(plain))

    @pytest.mark.parametrize("temperature", [0.0, 1.0])
    def test_a_banned_token_never_appears_however_likely_it_is(self, temperature):
        likely = TARGET.at[:, 7].set(12.0), DRAFT.at[:, 7].set(12.0)
        unbanned, banned = (
            run(SamplingParams(temperature=temperature, logit_bias=bias), 4, *likely)[0]
            for bias in (None, {7: -100.0})
        )
        assert any(7 in row for row in unbanned)
        assert not any(7 in row for row in banned)

    def test_logprobs_are_the_targets_whichever_way_a_token_came_out(self):
        tokens, _, logprobs, accepted = run(SamplingParams(temperature=0.5), k=4)
        assert 0 < accepted.sum() < sum(map(len, tokens))  # drafts and recovered tokens
        for row, values in zip(tokens, logprobs, strict=True):
            scaled = np.asarray(TARGET, np.float64)[[PROMPT[-1], *row[:-1]]] / 0.5
            expected = scaled[np.arange(len(row)), row] - np.log(np.exp(scaled).sum(-1))
            np.testing.assert_allclose(values, expected, rtol=1e-4, atol=1e-5)


def scripted(script):
    """Tables that make the greedy continuation of PROMPT[-1] follow `script`."""
    logits = np.zeros((VOCAB, VOCAB), np.float32)
    for before, after in itertools.pairwise((PROMPT[-1], *script)):
        logits[before, after] = 50.0
    return logits


class TestEnds:
    WORDS = tuple(range(8, 20))

    @pytest.mark.parametrize("slot", range(6))
    def test_eos_ends_the_text_wherever_in_a_cycle_it_falls(self, slot):
        """From the very first token, over every draft slot, to the bonus token and beyond."""
        target = scripted((*self.WORDS[:slot], 0, *self.WORDS[slot:]))
        tokens, reasons, _, accepted = run(SamplingParams(temperature=0), 4, target, target)
        assert tokens == [[*self.WORDS[:slot], 0]] * len(SEEDS)
        assert set(reasons) == {STOPPED}
        assert (accepted <= slot + 1).all()  # nothing behind the EOS is counted

    @pytest.mark.parametrize("slot", range(4))
    def test_an_eos_the_target_rejects_does_not_end_the_text(self, slot):
        target = scripted(self.WORDS)
        draft = scripted((*self.WORDS[:slot], 0, *self.WORDS[slot:]))
        tokens, reasons, _, _ = run(SamplingParams(temperature=0), 4, target, draft, n_new=8)
        assert tokens == [list(self.WORDS[:8])] * len(SEEDS)
        assert set(reasons) == {LENGTH}

    @pytest.mark.parametrize("n_new", range(1, 8))
    def test_the_maximum_is_exact(self, n_new):
        tokens, reasons, _, _ = run(SamplingParams(ignore_eos=True), 4, draft=TARGET, n_new=n_new)
        assert [len(row) for row in tokens] == [n_new] * len(SEEDS)
        assert set(reasons) == {LENGTH}

    @pytest.mark.parametrize("m", range(1, 7))
    @pytest.mark.parametrize("temperature", [0.0, 1.0])
    def test_min_tokens_holds_back_an_eos_that_is_always_most_likely(self, m, temperature):
        """m up to k + 2: the mask must hold in every slot of a cycle, not one row off."""
        target, draft = TARGET.at[:, 0].set(40.0), DRAFT.at[:, 0].set(40.0)
        params = SamplingParams(min_tokens=m, temperature=temperature)
        tokens, reasons, _, _ = run(params, 4, target, draft)
        assert [len(row) for row in tokens] == [m + 1] * len(SEEDS)
        assert all(0 not in row[:m] and row[m] == 0 for row in tokens)
        assert set(reasons) == {STOPPED}

    def test_an_ignored_eos_is_text_like_any_other(self):
        target = TARGET.at[:, 0].set(4.0)
        tokens, reasons, _, _ = run(SamplingParams(ignore_eos=True), 4, target)
        assert any(0 in row[:-1] for row in tokens)
        assert set(reasons) == {LENGTH}


class TestRejection:
    """Joint distribution of the first 3 tokens: several cycles, each with several drafts."""

    V, N_NEW, ROWS = 4, 3, 12_000
    tables = random_tables(V, seed=5, scale=1.0, draft_error=2.0)
    SETTINGS = (
        {},
        {"temperature": 0.6},
        {"top_k": 3},
        {"top_p": 0.8},
        {"min_p": 0.2},
        {"temperature": 1.3, "top_k": 3, "top_p": 0.9, "min_p": 0.05},
        {"logit_bias": {1: 1.0}, "temperature": 0.8},
    )

    def continuations(self, params, **options):
        tokens, *_, accepted = generate(
            *self.tables, params, (2, 1), range(self.ROWS), n_new=self.N_NEW, **options
        )
        flat = np.ravel_multi_index(np.asarray(tokens).T, (self.V,) * self.N_NEW)
        return np.bincount(flat, minlength=self.V**self.N_NEW), accepted

    def exact(self, params):
        """The joint distribution by enumeration, from an independent sort-based pipeline."""
        rows = np.asarray(self.tables[0], np.float64)
        step = np.stack([distribution(row, params) for row in rows])
        joint = np.ones((self.V,) * self.N_NEW)
        for ids in itertools.product(range(self.V), repeat=self.N_NEW):
            joint[ids] = np.prod([step[a, b] for a, b in itertools.pairwise((1, *ids))])
        return joint.reshape(-1)

    def follows(self, counts, probs):
        """Chi-square; cells too rare for its approximation are pooled."""
        assert not counts[probs == 0].any()
        expected = probs * counts.sum()
        rare = expected < 5
        observed = [*counts[~rare], counts[rare].sum()]
        expected = [*expected[~rare], expected[rare].sum()]
        if expected[-1] == 0:
            observed, expected = observed[:-1], expected[:-1]
        return stats.chisquare(observed, expected).pvalue > UNLIKELY

    @pytest.mark.parametrize("setting", SETTINGS)
    @pytest.mark.parametrize("proposals", ["sampled", "deterministic"])
    def test_continuations_follow_the_target(self, setting, proposals):
        params = SamplingParams(**setting)
        options = {"k": 2, "verification": "rejection", "proposals": proposals}
        counts, accepted = self.continuations(params, **options)
        assert self.follows(counts, self.exact(params))
        assert 0.5 < accepted.mean() < 1.9  # of 2: both outcomes are exercised

    @pytest.mark.parametrize("setting", SETTINGS[::5])
    def test_so_do_those_of_coupled_verification(self, setting):
        params = SamplingParams(**setting)
        counts, _ = self.continuations(params, k=2)
        assert self.follows(counts, self.exact(params))

    @pytest.mark.parametrize("proposals", ["sampled", "deterministic"])
    def test_greedy_text_equals_plain_decoding(self, proposals):
        params = SamplingParams(temperature=0.0)
        options = {"k": 3, "verification": "rejection", "proposals": proposals}
        assert run(params, **options)[:2] == run(params, 0)[:2]

    @pytest.mark.parametrize("m", range(1, 6))
    def test_min_tokens_holds(self, m):
        target, draft = TARGET.at[:, 0].set(40.0), DRAFT.at[:, 0].set(40.0)
        params = SamplingParams(min_tokens=m)
        tokens, *_ = run(params, 3, target, draft, verification="rejection")
        assert [len(row) for row in tokens] == [m + 1] * len(SEEDS)

    def test_coupling_costs_little_acceptance(self):
        """Gumbel coupling is close to, and never above, the optimum that rejection reaches."""
        params = SamplingParams(ignore_eos=True)
        options = {"k": 4, "seeds": range(400), "n_new": 24}
        coupled, optimal = (
            run(params, **options, verification=rule)[3].mean() for rule in ("coupled", "rejection")
        )
        assert 0.85 * optimal < coupled < 1.02 * optimal


def distribution(logits, params):
    """The distribution one token is drawn from, by sorting, in float64."""
    logits = logits.copy()
    for token, value in params.logit_bias:
        logits[token] += value
    probs = np.exp(logits / params.temperature)
    order = np.argsort(-probs)
    keep = order[: params.top_k or len(order)]
    share = np.cumsum(probs[keep]) / probs[keep].sum()
    keep = keep[: np.searchsorted(share, params.top_p) + 1]
    keep = keep[probs[keep] >= params.min_p * probs.max()]
    out = np.zeros_like(probs)
    out[keep] = probs[keep] / probs[keep].sum()
    return out
