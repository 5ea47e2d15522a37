"""`append_kv`: the arithmetic, rounding step by rounding step; the right slots; in place."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from pallas_kernels import append_kv
from pallas_kernels.append_kv import pallas_triton
from pallas_kernels.append_kv.pallas_triton import Tile, choose_tile
from pallas_kernels.lowering import lower_for_cuda
from pallas_kernels.shapes import H200, Append

gpu = pytest.mark.skipif(jax.default_backend() != "gpu", reason="needs an NVIDIA GPU")
DTYPES = ["float32", "bfloat16", "float16"]
EPS = 1e-5


def make_inputs(case: Append, *, padding: float = 0.3) -> dict:
    """Random arrays of the case's shapes, with a share of the tokens on the trash slot."""
    rng = np.random.default_rng(0)

    def fill(shape):
        return jnp.asarray(rng.uniform(-1, 1, shape.shape).astype(shape.dtype))

    inputs = jax.tree.map(fill, jax.eval_shape(case.inputs))
    slots = 1 + rng.permutation(case.n_slots - 1)[: case.n_tokens]
    slots[rng.random(case.n_tokens) < padding] = 0
    return inputs | {"slots": jnp.asarray(slots, jnp.int32)}


def tiny(**changes) -> Append:
    return Append(
        **({"n_tokens": 5, "n_slots": 32, "n_kv_heads": 3, "group": 2, "head_dim": 20} | changes)
    )


@functools.lru_cache
def jitted(implementation):
    """Without leave to skip a rounding between two fused operations."""
    return jax.jit(
        functools.partial(append_kv, eps=EPS, implementation=implementation),
        compiler_options={"xla_allow_excess_precision": False},
    )


def oracle(k_pool, v_pool, qkv, slots, cos, sin, *, bias, q_norm, k_norm):
    """In numpy, one token and head at a time."""
    dtype = qkv.dtype
    qkv = qkv[0] if len(qkv) == 1 else qkv.astype(np.float32).sum(axis=0).astype(dtype)
    n_tokens, n_kv_heads, members, _ = qkv.shape
    group = members - 2
    q = np.zeros((n_tokens, n_kv_heads * group, qkv.shape[3]), dtype)
    k_pool, v_pool = k_pool.copy(), v_pool.copy()
    for t, h, member in np.ndindex(qkv.shape[:3]):
        x = qkv[t, h, member]
        if bias is not None:
            x = x + bias[h, member]
        if member == group + 1:
            v_pool[slots[t], h] = x.astype(v_pool.dtype)
            continue
        if q_norm is not None:
            wide = x.astype(np.float32)
            wide = wide / np.sqrt(np.mean(wide**2, dtype=np.float64) + EPS).astype(np.float32)
            x = wide.astype(dtype) * (q_norm if member < group else k_norm)
        first, second = np.split(x.astype(np.float32), 2)
        turned = [first * cos[t] - second * sin[t], second * cos[t] + first * sin[t]]
        x = np.concatenate(turned).astype(dtype)
        if member < group:
            q[t, h * group + member] = x
        else:
            k_pool[slots[t], h] = x.astype(k_pool.dtype)
    return q, k_pool, v_pool


def assert_rounded_alike(actual, expected):
    """Up to the order of the norms' sums: a last digit here and there."""
    assert actual.dtype == expected.dtype
    precision = float(jnp.finfo(expected.dtype).eps)
    actual, expected = (np.asarray(x, np.float32) for x in (actual, expected))
    wide = precision < 1e-6
    allowed = 1e-6 if wide else precision
    np.testing.assert_allclose(actual, expected, rtol=2 * allowed, atol=4 * allowed)
    if not wide:
        assert np.mean(actual == expected) > 0.99


def check(inputs, results, expected):
    """Queries and pools; the trash slot holds anything. Values and slots in no use are exact."""
    for actual, wanted in zip(results, expected, strict=True):
        assert actual.shape == wanted.shape
        assert actual.dtype == wanted.dtype
    (q, k, v), (q_wanted, k_wanted, v_wanted) = results, expected
    assert_rounded_alike(q, q_wanted)
    assert_rounded_alike(k[1:], k_wanted[1:])
    np.testing.assert_array_equal(np.asarray(v)[1:], np.asarray(v_wanted)[1:])
    unused = np.setdiff1d(np.arange(1, len(k)), inputs["slots"])
    np.testing.assert_array_equal(np.asarray(k)[unused], np.asarray(inputs["k_pool"])[unused])


cases = st.builds(
    Append,
    n_tokens=st.integers(1, 6),
    n_slots=st.just(16),
    n_kv_heads=st.integers(1, 4),
    group=st.sampled_from([1, 2, 4, 5, 8, 16]),
    head_dim=st.sampled_from([2, 20, 64, 80, 96]),
    bias=st.booleans(),
    norms=st.booleans(),
    parts=st.integers(1, 3),
    dtype=st.sampled_from(DTYPES),
)


@settings(deadline=None, max_examples=12)
@given(case=cases)
def test_reference(case):
    inputs = make_inputs(case)
    arrays = {name: None if x is None else np.asarray(x) for name, x in inputs.items()}
    check(inputs, jitted("xla")(**inputs), oracle(**arrays))


@settings(deadline=None, max_examples=6)
@given(case=cases)
@example(case=tiny(group=4, n_kv_heads=8, head_dim=128, dtype="bfloat16"))
@example(case=tiny(group=1, n_kv_heads=2, head_dim=80, bias=True, norms=False, dtype="bfloat16"))
@example(case=tiny(group=5, n_kv_heads=1, head_dim=96, bias=True, parts=2, dtype="float32"))
@example(case=tiny(group=16, n_kv_heads=2, head_dim=256, norms=False, dtype="float16"))
def test_kernel(case):
    inputs = make_inputs(case)
    check(inputs, jitted("pallas")(**inputs), jitted("xla")(**inputs))


@pytest.mark.parametrize("heads", [1, 2, 4])
def test_heads_of_a_program(heads):
    inputs = make_inputs(tiny(n_kv_heads=4, group=5, bias=True, dtype="float32"))
    run = functools.partial(pallas_triton.append_kv, eps=EPS, interpret=True, tile=Tile(heads, 1))
    check(inputs, run(**inputs), jitted("xla")(**inputs))


@pytest.mark.parametrize("implementation", ["xla", "pallas"])
def test_padding_shares_the_trash_slot(implementation):
    inputs = make_inputs(tiny(dtype="float32"), padding=1)
    _, k, v = jitted(implementation)(**inputs)
    np.testing.assert_array_equal(k[1:], inputs["k_pool"][1:])
    np.testing.assert_array_equal(v[1:], inputs["v_pool"][1:])


@pytest.mark.parametrize("implementation", ["xla", "pallas"])
def test_casts_to_the_pool(implementation):
    inputs = make_inputs(tiny(dtype="float32"), padding=0)
    _, *wide = jitted(implementation)(**inputs)
    for name in ("k_pool", "v_pool"):
        inputs[name] = inputs[name].astype(jnp.bfloat16)
    q, *narrow = jitted(implementation)(**inputs)
    assert q.dtype == jnp.float32
    for one, other in zip(wide, narrow, strict=True):
        np.testing.assert_array_equal(one.astype(jnp.bfloat16), other)


@pytest.mark.parametrize("implementation", ["xla", "pallas"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_parts_are_added_before_anything_is_rounded(implementation, dtype):
    """In bfloat16, 1 swallows what is left when it is taken away again."""
    inputs = make_inputs(tiny(dtype=dtype))
    small = inputs["qkv"] / 4096
    parts = jnp.concatenate([jnp.ones_like(small), small, -jnp.ones_like(small)])
    in_parts, whole = (
        jitted(implementation)(**(inputs | {"qkv": qkv}))
        for qkv in (parts, ((parts[:1].astype("float32") + small) - 1).astype(dtype))
    )
    check(inputs, in_parts, whole)


@pytest.mark.parametrize("implementation", ["xla", "pallas"])
def test_no_tokens(implementation):
    inputs = tiny(n_tokens=0).inputs()
    q, k, v = append_kv(**inputs, implementation=implementation)
    assert q.shape == (0, 6, 20)
    np.testing.assert_array_equal(k, inputs["k_pool"])
    np.testing.assert_array_equal(v, inputs["v_pool"])


def test_tiles_fill_a_gpu_with_wide_accesses():
    assert choose_tile((1, 248, 8, 6, 128), jnp.dtype("bfloat16")) == Tile(heads=2, warps=4)
    assert choose_tile((1, 2048, 8, 6, 128), jnp.dtype("bfloat16")) == Tile(heads=4, warps=8)
    assert choose_tile((1, 8, 8, 6, 128), jnp.dtype("bfloat16")) == Tile(heads=1, warps=2)
    assert choose_tile((1, 248, 2, 9, 64), jnp.dtype("bfloat16")) == Tile(heads=1, warps=2)
    assert choose_tile((1, 248, 5, 18, 256), jnp.dtype("float32")) == Tile(heads=1, warps=8)


def temporary_share(implementation) -> float:
    """Temporary memory of a donated append, as a share of one pool."""
    case = Append(4, n_slots=1 << 15, n_kv_heads=2, head_dim=64, dtype="float32")
    arrays = jax.eval_shape(case.inputs)
    run = jax.jit(
        functools.partial(append_kv, implementation=implementation),
        donate_argnames=("k_pool", "v_pool"),
    )
    memory = run.lower(**arrays).compile().memory_analysis()
    return memory.temp_size_in_bytes / ((1 << 15) * 2 * 64 * 4)


def test_reference_is_in_place():
    assert temporary_share("xla") < 0.5


@pytest.mark.parametrize("case", H200["append_kv"].values(), ids=H200["append_kv"])
def test_kernel_aliases_both_pools(case):
    run = functools.partial(append_kv, implementation="pallas", interpret=False)
    text = lower_for_cuda(run, **jax.eval_shape(case.inputs)).as_text()
    assert text.count("output_operand_alias<") == 2


@pytest.mark.parametrize(
    ("argument", "value", "message"),
    [
        ("k_pool", jnp.zeros((3, 4)), r"k_pool has shape \(3, 4\)"),
        ("k_pool", jnp.zeros((32, 3, 21)), r"k_pool has .* 21\), but .*, D, must be even"),
        ("v_pool", jnp.zeros((32, 3, 22)), r"v_pool is float32\[32, 3, 22\], but must be like"),
        ("slots", jnp.zeros((5,)), r"slots is float32\[5\], but must be int32\[T\]"),
        (
            "qkv",
            jnp.zeros((1, 5, 3, 2, 20)),
            r"qkv has shape \(1, 5, 3, 2, 20\), but must be \[S, T, Hkv, group \+ 2, D\] with",
        ),
        ("qkv", jnp.zeros((5, 3, 4, 20)), r"qkv has shape \(5, 3, 4, 20\)"),
        ("qkv", jnp.zeros((0, 5, 3, 4, 20)), r"qkv has shape \(0, 5, 3, 4, 20\)"),
        ("qkv", jnp.zeros((1, 5, 3, 4, 20), int), "qkv is int32, but must be float16, bfloat16"),
        ("cos", jnp.zeros((5, 20)), r"cos is float32\[5, 20\], but must be .* = float32\[5, 10\]"),
        ("sin", jnp.zeros((5, 10), "bfloat16"), r"sin is bfloat16\[5, 10\], but must be float32"),
        ("bias", jnp.zeros((3, 4)), r"bias is float32\[3, 4\], but .* float32\[3, 4, 20\], or"),
        ("q_norm", jnp.zeros((19,)), r"q_norm is float32\[19\], but must be float32\[20\]"),
        ("k_norm", jnp.zeros((20,), "float16"), r"k_norm is float16\[20\], but must be float32"),
        ("k_norm", None, "q_norm is given, but q_norm and k_norm must be given both or neither"),
        ("q_norm", None, "k_norm is given, but q_norm and k_norm must be given both or neither"),
        ("eps", -1.0, r"eps=-1.0, but must not be negative"),
    ],
)
def test_errors_name_the_argument(argument, value, message):
    inputs = tiny(bias=True, dtype="float32").inputs()
    with pytest.raises(ValueError, match=message):
        append_kv(**(inputs | {argument: value}))


@pytest.mark.gpu
@gpu
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("n_kv_heads", "group", "head_dim"), [(8, 4, 128), (3, 5, 80), (2, 7, 96), (1, 16, 256)]
)
@pytest.mark.parametrize("norms", [True, False])
@pytest.mark.parametrize("parts", [1, 2])
def test_compiled_kernel(n_kv_heads, group, head_dim, norms, parts, dtype):
    case = Append(
        300, n_slots=1 << 14, n_kv_heads=n_kv_heads, group=group, head_dim=head_dim,
        bias=not norms, norms=norms, parts=parts, dtype=dtype,
    )  # fmt: skip
    inputs = make_inputs(case)
    arrays = {name: None if x is None else np.asarray(x) for name, x in inputs.items()}
    check(inputs, jitted("pallas")(**inputs), oracle(**arrays))


@pytest.mark.gpu
@gpu
@pytest.mark.parametrize("implementation", ["xla", "pallas"])
def test_in_place_on_gpu(implementation):
    assert temporary_share(implementation) < 0.5


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("implementation", ["xla", "pallas"])
def test_values_that_are_no_numbers_are_kept_out_of_the_pool(implementation, bias):
    """They become 0, and the key of their token and head NaN; no other key changes."""
    inputs = make_inputs(tiny(bias=bias), padding=0)
    clean = jitted(implementation)(**inputs)
    group = inputs["qkv"].shape[3] - 2
    places = [(1, 0, 3, jnp.nan), (2, 2, 0, jnp.inf), (4, 1, 19, -jnp.inf)]
    qkv, slots = inputs["qkv"], np.asarray(inputs["slots"])
    for token, head, column, value in places:
        qkv = qkv.at[0, token, head, group + 1, column].set(value)
    results = jitted(implementation)(**(inputs | {"qkv": qkv}))
    q, k, v = (np.array(x, np.float32) for x in results)
    assert np.isfinite(v).all()
    np.testing.assert_array_equal(q, np.asarray(clean[0], np.float32))
    expected = np.array(clean[1], np.float32)
    for token, head, column, _ in places:
        assert v[slots[token], head, column] == 0
        expected[slots[token], head] = np.nan
    np.testing.assert_array_equal(k, expected)
