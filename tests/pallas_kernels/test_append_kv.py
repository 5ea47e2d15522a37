"""`append_kv`: the right slots, and in place."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pallas_kernels import append_kv
from pallas_kernels.lowering import lower_for_cuda

gpu = pytest.mark.skipif(jax.default_backend() != "gpu", reason="needs an NVIDIA GPU")


def make_inputs(seed, *, n_slots=32, n_heads=3, head_dim=20, n_tokens=5, dtype=jnp.float32):
    rng = np.random.default_rng(seed)
    normal = lambda *shape: jnp.asarray(rng.normal(size=shape), dtype)  # noqa: E731
    pool = lambda: normal(n_slots, n_heads, head_dim)  # noqa: E731
    new = lambda: normal(n_tokens, n_heads, head_dim)  # noqa: E731
    slots = 1 + rng.permutation(n_slots - 1)[:n_tokens]
    slots[rng.random(n_tokens) < 0.3] = 0  # padding
    return pool(), pool(), new(), new(), jnp.asarray(slots, jnp.int32)


@functools.lru_cache
def jitted(implementation):
    return jax.jit(functools.partial(append_kv, implementation=implementation))


def check(inputs, implementation):
    *pools, k_new, v_new, slots = inputs
    results = jitted(implementation)(*inputs)
    for pool, new, result in zip(pools, (k_new, v_new), results, strict=True):
        expected = np.array(pool)
        expected[np.asarray(slots)] = np.asarray(new)
        assert result.dtype == pool.dtype
        np.testing.assert_array_equal(np.asarray(result)[1:], expected[1:])  # 0 is the trash slot


@settings(deadline=None, max_examples=20)
@given(seed=st.integers(0, 2**32 - 1), dtype=st.sampled_from(["float32", "bfloat16"]))
def test_reference(seed, dtype):
    check(make_inputs(seed, dtype=dtype), "xla")


@pytest.mark.parametrize(("n_heads", "head_dim"), [(3, 20), (2, 64), (1, 80)])
def test_kernel(n_heads, head_dim):
    for seed in range(3):
        check(make_inputs(seed, n_heads=n_heads, head_dim=head_dim), "pallas")


def test_casts_to_the_pool():
    k_pool, v_pool, *new, slots = make_inputs(0, dtype=jnp.bfloat16)
    k, v = append_kv(k_pool, v_pool, *(x.astype(jnp.float32) for x in new), slots)
    assert k.dtype == v.dtype == jnp.bfloat16


def test_no_tokens():
    k_pool, v_pool, *_ = make_inputs(0)
    empty = jnp.zeros((0, 3, 20)), jnp.zeros((0, 3, 20)), jnp.zeros((0,), jnp.int32)
    k, v = append_kv(k_pool, v_pool, *empty, implementation="pallas")
    np.testing.assert_array_equal(k, k_pool)
    np.testing.assert_array_equal(v, v_pool)


def temporary_share(implementation) -> float:
    """Temporary memory of a donated append, as a share of one pool."""
    pool = jax.ShapeDtypeStruct((1 << 15, 2, 64), jnp.float32)
    new = jax.ShapeDtypeStruct((4, 2, 64), jnp.float32)
    slots = jax.ShapeDtypeStruct((4,), jnp.int32)
    run = jax.jit(
        functools.partial(append_kv, implementation=implementation), donate_argnums=(0, 1)
    )
    memory = run.lower(pool, pool, new, new, slots).compile().memory_analysis()
    return memory.temp_size_in_bytes / ((1 << 15) * 2 * 64 * 4)


def test_reference_is_in_place():
    assert temporary_share("xla") < 0.5


def test_kernel_aliases_both_pools():
    pool = jax.ShapeDtypeStruct((1 << 15, 2, 64), jnp.bfloat16)
    new = jax.ShapeDtypeStruct((4, 2, 64), jnp.bfloat16)
    slots = jax.ShapeDtypeStruct((4,), jnp.int32)
    run = functools.partial(append_kv, implementation="pallas", interpret=False)
    text = lower_for_cuda(run, pool, pool, new, new, slots).as_text()
    assert text.count("output_operand_alias<") == 2


@pytest.mark.parametrize(
    ("argument", "value", "message"),
    [
        (0, jnp.zeros((3, 4)), r"k_pool has shape \(3, 4\)"),
        (1, jnp.zeros((32, 3, 21)), r"v_pool is float32\[32, 3, 21\], but must be like k_pool"),
        (2, jnp.zeros((5, 3, 21)), r"k_new has shape \(5, 3, 21\), but must be \[T, Hkv, D\]"),
        (3, jnp.zeros((4, 3, 20)), r"v_new has shape \(4, 3, 20\)"),
        (4, jnp.zeros((5,)), r"slots is float32\[5\], but must be int32\[T\]"),
    ],
)
def test_errors_name_the_argument(argument, value, message):
    inputs = list(make_inputs(0))
    inputs[argument] = value
    with pytest.raises(ValueError, match=message):
        append_kv(*inputs)


@pytest.mark.gpu
@gpu
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize(("n_heads", "head_dim"), [(8, 128), (3, 80)])
def test_compiled_kernel(n_heads, head_dim, dtype):
    check(
        make_inputs(
            0, n_slots=1 << 14, n_heads=n_heads, head_dim=head_dim, n_tokens=300, dtype=dtype
        ),
        "pallas",
    )


@pytest.mark.gpu
@gpu
@pytest.mark.parametrize("implementation", ["xla", "pallas"])
def test_in_place_on_gpu(implementation):
    assert temporary_share(implementation) < 0.5
