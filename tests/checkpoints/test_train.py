import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from checkpoints import train_countdown
from checkpoints.countdown_traces import MAX_LENGTH, PAD, Encoder, vocabulary
from checkpoints.dense_sampler import CHUNK, sample
from checkpoints.train_countdown import BUNDLED, SMOKE, batches, learning_rate, loss_fn, rows_of
from sparsespec_jax.models.decoder import Decoder, forward
from sparsespec_jax.models.loading import load_model
from sparsespec_jax.models.parameters import check_params, describe, map_specs

PAD_ID = vocabulary().index(PAD)


@pytest.fixture(scope="module")
def params():
    return Decoder(SMOKE.model, rngs=nnx.Rngs(0)).raw()


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """A training run of seconds: its figures, its printed lines, and the directory it wrote."""
    directory = tmp_path_factory.mktemp("run") / "out"
    arguments = ["--cpu-smoke", "--workers", "0", "--steps", "30", "--minutes", "10"]
    with pytest.MonkeyPatch.context() as patch:
        lines = []
        patch.setattr("builtins.print", lambda text, **_: lines.append(text))
        figures = train_countdown.main([*arguments, "--out", str(directory)])
    return figures, lines, directory


def test_loss_falls(run):
    first, last = next(
        map(float, line.removeprefix("loss ").split(" -> ")) for line in run[1] if " -> " in line
    )
    assert last < first - 0.5


def test_evaluation_reports_its_figures(run):
    figures = run[0]
    assert figures["problems"] == SMOKE.problems
    assert 0 <= figures["solve_rate"] <= 1
    assert 0 < figures["length_quantiles"]["0.5"] <= SMOKE.lengths[-1]


def test_checkpoint_is_what_the_loader_reads(run):
    directory = run[2]
    assert {path.name for path in directory.iterdir()} >= {
        "config.json", "generation_config.json", "model.safetensors", "tokenizer.json",
        "tokenizer_config.json",
    }  # fmt: skip
    loaded = load_model(directory, progress=False)
    assert loaded.config == SMOKE.model
    assert loaded.generation_defaults == {"temperature": 0.65}
    assert {leaf.dtype for leaf in jax.tree.leaves(loaded.params)} == {jnp.dtype(jnp.bfloat16)}
    check_params(loaded.params, SMOKE.model)


def test_training_resumes_from_a_checkpoint(run, tmp_path, monkeypatch):
    lines = []
    monkeypatch.setattr("builtins.print", lambda text, **_: lines.append(text))
    arguments = ["--cpu-smoke", "--workers", "0", "--steps", "1", "--eval-seconds", "0"]
    train_countdown.main([*arguments, "--out", str(tmp_path), "--resume", str(run[2])])
    first = next(line for line in lines if " -> " in line).removeprefix("loss ").split(" -> ")[0]
    assert float(first) < np.log(SMOKE.model.vocab_size) - 0.5


def test_bundled_model_fits():
    """4 to 8 million parameters, at most 16 MB of bfloat16."""
    shapes = jax.tree.leaves(map_specs(lambda s: np.prod(s.shape), describe(BUNDLED.model)))
    assert 4e6 < sum(shapes) < 8e6
    assert len(vocabulary()) <= BUNDLED.model.vocab_size
    assert BUNDLED.lengths[-1] == MAX_LENGTH == BUNDLED.model.max_position_embeddings


def test_batches_hold_one_trace_a_row():
    feed, ids = batches(SMOKE, seed=0), Encoder()
    end = SMOKE.model.eos_token_ids[0]
    for _ in range(3):
        tokens, starts = next(feed)
        rows, length = tokens.shape
        assert rows == rows_of(SMOKE, length)
        for row, start in zip(tokens.tolist(), starts, strict=True):
            assert ids.texts()[row[start]] == "<think>"
            used = row.index(PAD_ID) if PAD_ID in row else length
            assert row[used - 1] == end
            assert row[:used].count(end) == 2  # of the user's message, and of the trace
            assert set(row[used:]) <= {PAD_ID}


def test_loss_counts_the_trace_and_nothing_else(params):
    tokens = np.array([[1, 9, 9, 7, 8, 2, PAD_ID, PAD_ID], [1, 5, 6, 7, 8, 9, 9, 2]], np.uint16)
    starts = np.array([3, 1], np.int32)
    loss = loss_fn(params, jnp.asarray(tokens), jnp.asarray(starts), SMOKE.model, "xla")
    logits = forward(params, jnp.asarray(tokens, jnp.int32), SMOKE.model)
    logp = jax.nn.log_softmax(logits)
    counted = [(0, 3), (0, 4), (0, 5), *((1, t) for t in range(1, 8))]
    expected = -np.mean([logp[row, t - 1, tokens[row, t]] for row, t in counted])
    np.testing.assert_allclose(loss, expected, rtol=1e-5)


def test_learning_rate_warms_up_and_falls_to_zero():
    rates = [learning_rate(SMOKE, x) for x in np.linspace(0, 1, 101)]
    assert rates[0] == 0
    assert max(rates) == pytest.approx(SMOKE.peak)
    assert rates[-1] == pytest.approx(0, abs=1e-9)
    assert rates[2:] == sorted(rates[2:], reverse=True)


def test_sampler_follows_the_model(params):
    """At temperature near zero: the argmax continuation of each prompt, whatever its length."""
    prompts = [[1, 9, 9], [1, 5, 6, 7, 8]]
    generated = sample(params, SMOKE.model, prompts, length=CHUNK, temperature=1e-6)
    for prompt, continuation in zip(prompts, generated, strict=True):
        assert len(prompt) + len(continuation) <= CHUNK
        text = jnp.array([prompt + continuation])
        expected = forward(params, text, SMOKE.model)[0].argmax(-1)
        assert continuation == expected[len(prompt) - 1 : -1].tolist()
