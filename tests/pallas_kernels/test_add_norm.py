"""`add_norm`: the sum is rounded before the norm sees it; rows of any width keep to themselves."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from pallas_kernels import add_norm
from pallas_kernels.add_norm.pallas_triton import choose_warps
from pallas_kernels.append_kv.reference import rms_norm
from pallas_kernels.lowering import lower_for_cuda
from pallas_kernels.shapes import H200, AddNorm

gpu = pytest.mark.skipif(jax.default_backend() != "gpu", reason="needs an NVIDIA GPU")
both = pytest.mark.parametrize("implementation", ["xla", "pallas"])
DTYPES = ["float32", "bfloat16", "float16"]
EPS = 1e-5
TRITON_CALL = "__gpu$xla.gpu.triton"


def make_inputs(case: AddNorm) -> tuple:
    rng = np.random.default_rng(0)

    def fill(shape):
        return jnp.asarray(rng.uniform(-2, 2, shape.shape).astype(shape.dtype))

    return jax.tree.map(fill, jax.eval_shape(case.inputs))


@functools.lru_cache
def jitted(implementation):
    """Without leave to skip a rounding between two fused operations."""
    return jax.jit(
        functools.partial(add_norm, eps=EPS, implementation=implementation),
        compiler_options={"xla_allow_excess_precision": False},
    )


def oracle(x, delta, scale):
    """In numpy, with the norm's sum in float64."""
    x, scale = np.asarray(x), np.asarray(scale)
    if delta is not None and delta.ndim == x.ndim:
        x = x + np.asarray(delta)
    elif delta is not None:
        total = functools.reduce(np.add, np.asarray(delta).astype(np.float32))
        x = (x.astype(np.float32) + total).astype(x.dtype)
    wide = x.astype(np.float32)
    mean = np.mean(np.square(wide, dtype=np.float64), axis=-1, keepdims=True)
    wide = wide / np.sqrt(mean + EPS).astype(np.float32)
    return x, wide.astype(x.dtype) * scale


def check(results, expected):
    """The sum is exact, the norm up to the order of its own sum: a last digit here and there."""
    for actual, wanted in zip(results, expected, strict=True):
        assert actual.shape == wanted.shape
        assert actual.dtype == wanted.dtype
    np.testing.assert_array_equal(np.asarray(results[0]), np.asarray(expected[0]))
    precision = float(jnp.finfo(expected[1].dtype).eps)
    actual, wanted = (np.asarray(x[1], np.float32) for x in (results, expected))
    wide = precision < 1e-6
    allowed = 1e-6 if wide else precision
    np.testing.assert_allclose(actual, wanted, rtol=2 * allowed, atol=4 * allowed)
    if not wide:
        assert np.sum(actual != wanted) <= max(2, 0.01 * wanted.size)


cases = st.builds(
    AddNorm,
    n_tokens=st.integers(1, 6),
    hidden=st.one_of(st.integers(1, 70), st.sampled_from([96, 576, 1024, 2048])),
    dtype=st.sampled_from(DTYPES),
    parts=st.sampled_from([None, 1, 2, 3]),
)


@settings(deadline=None, max_examples=25)
@given(case=cases, first=st.booleans())
def test_reference(case, first):
    x, delta, scale = make_inputs(case)
    delta = None if first else delta
    check(jitted("xla")(x, delta, scale), oracle(x, delta, scale))


@settings(deadline=None, max_examples=20)
@given(case=cases, first=st.booleans())
@example(case=AddNorm(3, 3584, "bfloat16"), first=False)
@example(case=AddNorm(2, 5120, "bfloat16"), first=False)
@example(case=AddNorm(2, 16384, "float32"), first=True)
def test_kernel(case, first):
    x, delta, scale = make_inputs(case)
    delta = None if first else delta
    check(jitted("pallas")(x, delta, scale), jitted("xla")(x, delta, scale))


@both
def test_the_norm_sees_the_rounded_sum(implementation):
    """1 + 2^-9 is 1 in bfloat16; unrounded, the first norm would be another."""
    x = jnp.array([[1, 64]], jnp.bfloat16)
    delta = jnp.array([[2**-9, 0]], jnp.bfloat16)
    scale = jnp.array([1, 1], jnp.bfloat16)
    total, normed = jitted(implementation)(x, delta, scale)
    np.testing.assert_array_equal(total, x)
    np.testing.assert_array_equal(normed, jitted(implementation)(x, None, scale)[1])


@both
def test_parts_are_not_rounded_before_they_meet_the_stream(implementation):
    """Each part alone is lost in 1, in bfloat16; together they are not."""
    x, scale = jnp.ones((1, 2), jnp.bfloat16), jnp.ones(2, jnp.bfloat16)
    parts = jnp.full((4, 1, 2), 2**-9, jnp.bfloat16)
    total, normed = jitted(implementation)(x, parts, scale)
    np.testing.assert_array_equal(total, x + parts.sum(0))
    assert (total > x).all()
    np.testing.assert_array_equal(normed, jitted(implementation)(total, None, scale)[1])


@both
def test_leading_axes_and_no_delta(implementation):
    x, delta, scale = make_inputs(AddNorm(6, 20, "float32"))
    x, delta = x.reshape(2, 3, 20), delta.reshape(2, 3, 20)
    total, normed = jitted(implementation)(x, delta, scale)
    assert total.shape == normed.shape == (2, 3, 20)
    flat = jitted(implementation)(x.reshape(6, 20), delta.reshape(6, 20), scale)
    np.testing.assert_array_equal(total.reshape(6, 20), flat[0])
    np.testing.assert_array_equal(normed.reshape(6, 20), flat[1])
    total, normed = jitted(implementation)(total, None, scale)
    np.testing.assert_array_equal(total.reshape(6, 20), flat[0])
    np.testing.assert_array_equal(normed.reshape(6, 20), flat[1])


@both
def test_no_tokens(implementation):
    x = jnp.zeros((0, 20))
    total, normed = add_norm(x, x, jnp.zeros(20), implementation=implementation)
    assert total.shape == normed.shape == (0, 20)


@pytest.mark.parametrize("bad", [jnp.nan, jnp.inf])
@both
def test_rows_that_are_no_numbers_keep_to_themselves(implementation, bad):
    x, delta, scale = make_inputs(AddNorm(5, 20))
    clean = jitted(implementation)(x, delta, scale)
    broken = jitted(implementation)(x.at[2, 19].set(bad), delta.at[4, 0].set(bad), scale)
    for one, other in zip(clean, broken, strict=True):
        one, other = (np.asarray(a, np.float32) for a in (one, other))
        np.testing.assert_array_equal(one[[0, 1, 3]], other[[0, 1, 3]])
    assert np.isnan(np.asarray(broken[1], np.float32)[[2, 4], [19, 0]]).all()


def test_the_reference_has_the_gradient_of_its_parts():
    x, delta, scale = make_inputs(AddNorm(3, 20, "float32"))

    def loss(x, delta, scale):
        total, normed = add_norm(x, delta, scale, eps=EPS, implementation="xla")
        return (total * normed).sum()

    def parts(x, delta, scale):
        return ((x + delta) * rms_norm(x + delta, scale, EPS)).sum()

    for one, other in zip(
        jax.grad(loss, (0, 1, 2))(x, delta, scale),
        jax.grad(parts, (0, 1, 2))(x, delta, scale),
        strict=True,
    ):
        np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-6)


def test_two_wide_accesses_per_thread():
    assert choose_warps(4096, jnp.dtype("bfloat16")) == 8
    assert choose_warps(3584, jnp.dtype("bfloat16")) == 8
    assert choose_warps(16384, jnp.dtype("float32")) == 16
    assert choose_warps(20, jnp.dtype("bfloat16")) == 1


@pytest.mark.parametrize("device_kind", ["NVIDIA A100-SXM4-80GB", "NVIDIA H200", "NVIDIA B200"])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("hidden", [20, 576, 2048, 3584, 4096, 5120, 16384])
def test_lowers(hidden, dtype, device_kind):
    """For sm_80, 90 and 100; with and without something to add."""
    x, delta, scale = jax.eval_shape(AddNorm(256, hidden, dtype).inputs)
    parts = jax.ShapeDtypeStruct((4, *delta.shape), delta.dtype)
    run = functools.partial(add_norm, implementation="pallas", interpret=False)
    for addend in (delta, parts, None):
        text = lower_for_cuda(run, x, addend, scale, device_kind=device_kind).as_text()
        assert text.count(TRITON_CALL) == 1


def test_layers_share_their_kernel():
    x, delta, scale = jax.eval_shape(H200["add_norm"]["8B"].inputs)

    def run(x, delta, scale):
        norm = functools.partial(add_norm, implementation="pallas", interpret=False)
        return [norm(x, layer * delta, scale) for layer in range(3)]

    assert lower_for_cuda(run, x, delta, scale).as_text().count(TRITON_CALL) == 1


@pytest.mark.parametrize(
    ("argument", "value", "message"),
    [
        ("x", jnp.zeros(()), r"x is a scalar, but must be \[..., hidden\]"),
        ("x", jnp.zeros((5, 20), int), "x is int32, but must be float16, bfloat16 or float32"),
        ("delta", jnp.zeros((4, 20)), r"delta is float32\[4, 20\], but must be like x, float32\[5"),
        ("delta", jnp.zeros((5, 20), "bfloat16"), r"delta is bfloat16\[5, 20\], but must be like"),
        ("delta", jnp.zeros((0, 5, 20)), r"delta is float32\[0, 5, 20\], but must be like x"),
        ("scale", jnp.zeros((19,)), r"scale is float32\[19\], but must be float32\[20\]"),
        ("scale", jnp.zeros((20,), "float16"), r"scale is float16\[20\], but must be float32"),
        ("eps", -1.0, r"eps=-1.0, but must not be negative"),
        ("implementation", "cuda", "implementation='cuda', but it must be"),
    ],
)
def test_errors_name_the_argument(argument, value, message):
    names = "x", "delta", "scale"
    inputs = dict(zip(names, AddNorm(5, 20, "float32").inputs(), strict=True))
    with pytest.raises(ValueError, match=message):
        add_norm(**(inputs | {argument: value}))


@pytest.mark.gpu
@gpu
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("hidden", [20, 576, 2048, 3584, 4096, 5120, 16384])
@pytest.mark.parametrize("parts", [0, None, 4])
def test_compiled_kernel(hidden, parts, dtype):
    x, delta, scale = make_inputs(AddNorm(300, hidden, dtype, parts=parts))
    delta = None if parts == 0 else delta
    check(jitted("pallas")(x, delta, scale), oracle(x, delta, scale))
