"""`pack_kv` and `unpack_kv`: every byte in its place, of every layer, and nothing else touched."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from pallas_kernels import pack_kv, unpack_kv
from pallas_kernels.lowering import lower_for_cuda
from pallas_kernels.pack_kv import pallas_triton
from pallas_kernels.pack_kv.pallas_triton import Tile, choose_tile
from pallas_kernels.shapes import H200, Pack

gpu = pytest.mark.skipif(jax.default_backend() != "gpu", reason="needs an NVIDIA GPU")
both = pytest.mark.parametrize("implementation", ["xla", "pallas"])
DTYPES = ["float32", "bfloat16", "float16"]
TRITON_CALL = "__gpu$xla.gpu.triton"


def make_inputs(case: Pack, *, padding: float = 0.3) -> tuple:
    """Pools, chunks and slots in numpy, a share of the slots the trash slot."""
    rng = np.random.default_rng(0)

    def fill(shape):
        return rng.uniform(-2, 2, shape.shape).astype(shape.dtype)

    shapes = jax.eval_shape(dataclasses.replace(case, back=True).inputs)
    pools, packed = jax.tree.map(fill, (shapes["pools"], shapes["packed"]))
    slots = 1 + rng.permutation(case.n_slots - 1)[: case.chunks * case.chunk].astype(np.int32)
    slots[rng.random(len(slots)) < padding] = 0
    return pools, packed, slots


@functools.lru_cache
def jitted(op, implementation, **static):
    return jax.jit(functools.partial(op, implementation=implementation, **static))


def assert_packed(packed, pools, slots):
    for actual, part in zip(packed, np.split(slots, len(packed)), strict=True):
        expected = np.stack([np.stack([pool[part] for pool in layer]) for layer in pools])
        assert (actual.dtype, actual.shape) == (expected.dtype, expected.shape)
        assert np.asarray(actual).tobytes() == expected.tobytes()


def unpacked_by_numpy(pools, packed, slots):
    pools = jax.tree.map(np.copy, pools)
    for place, slot in enumerate(slots):
        number, token = divmod(place, len(slots) // len(packed))
        for layer, pair in enumerate(pools):
            for which, pool in enumerate(pair):
                pool[slot] = packed[number][layer, which, token]
    return pools


def assert_unpacked(results, expected):
    """But for the trash slot, which still holds numbers."""
    assert jax.tree.structure(results) == jax.tree.structure(expected)
    for actual, wanted in zip(jax.tree.leaves(results), jax.tree.leaves(expected), strict=True):
        assert actual.dtype == wanted.dtype
        actual = np.asarray(actual)
        assert actual[1:].tobytes() == wanted[1:].tobytes()
        assert np.isfinite(actual[0].astype(np.float32)).all()


def check_both_ways(case, implementation, *, padding=0.3):
    pools, packed, slots = make_inputs(case, padding=padding)
    assert_packed(jitted(pack_kv, implementation, chunks=case.chunks)(pools, slots), pools, slots)
    results = jitted(unpack_kv, implementation)(pools, packed, slots)
    assert_unpacked(results, unpacked_by_numpy(pools, packed, slots))


cases = st.builds(
    Pack,
    n_layers=st.integers(1, 5),
    chunk=st.sampled_from([1, 3, 8, 12, 16]),
    n_slots=st.just(90),
    n_kv_heads=st.integers(1, 4),
    head_dim=st.sampled_from([1, 20, 64, 80]),
    chunks=st.integers(1, 5),
    dtype=st.sampled_from(DTYPES),
)


@settings(deadline=None, max_examples=15)
@given(case=cases, padding=st.sampled_from([0, 0.3, 1]))
def test_reference(case, padding):
    check_both_ways(case, "xla", padding=padding)


@settings(deadline=None, max_examples=15)
@given(case=cases, padding=st.sampled_from([0, 0.3, 1]))
@example(case=Pack(2, 16, 90, n_kv_heads=8, head_dim=128, chunks=4), padding=0.3)
@example(case=Pack(2, 16, 90, n_kv_heads=3, head_dim=64, chunks=1), padding=0.3)
@example(case=Pack(1, 8, 90, n_kv_heads=1, head_dim=80, chunks=2, dtype="float32"), padding=0.3)
def test_kernel(case, padding):
    check_both_ways(case, "pallas", padding=padding)


def test_programs_of_several_tokens():
    case = Pack(9, 64, 200, n_kv_heads=1, head_dim=6, chunks=2)
    assert choose_tile(18, 64, 6, jnp.dtype("bfloat16")).tokens == 2
    check_both_ways(case, "pallas")


@pytest.mark.parametrize("layers", [1, 2, 3, 7, 36])
def test_every_pool_is_found_in_the_tree(layers):
    check_both_ways(Pack(layers, 2, 16, n_kv_heads=1, head_dim=4, chunks=3), "pallas", padding=0)


@pytest.mark.parametrize("max_pools", [2, 4, 6, 10])
def test_pools_that_do_not_fit_one_launch(max_pools):
    pools, packed, slots = make_inputs(Pack(5, 4, 32, n_kv_heads=2, head_dim=4, chunks=2))
    how = {"interpret": jax.default_backend() == "cpu", "max_pools": max_pools}
    assert_packed(pallas_triton.pack_kv(pools, slots, chunks=2, **how), pools, slots)
    results = pallas_triton.unpack_kv(pools, packed, slots, **how)
    assert_unpacked(results, unpacked_by_numpy(pools, packed, slots))


def test_launches_have_room_for_their_pointers():
    """4 KB, for the pools of 126 layers twice, what else there is, and two of Triton's own."""
    pool = jax.ShapeDtypeStruct((16, 1, 8), jnp.bfloat16)
    pools, slots = ((pool, pool),) * 126, jax.ShapeDtypeStruct((8,), jnp.int32)
    kernel = {"implementation": "pallas", "interpret": False}
    pack = functools.partial(pack_kv, chunks=4, **kernel)
    text = lower_for_cuda(pack, pools, slots).as_text()
    assert text.count(TRITON_CALL) == 2
    assert text.count("output_operand_alias<") == 4, "the second adds to what the first made"
    packed = (jax.ShapeDtypeStruct((126, 2, 2, 1, 8), jnp.bfloat16),) * 4
    unpack = functools.partial(unpack_kv, **kernel)
    text = lower_for_cuda(unpack, pools, packed, slots).as_text()
    assert text.count(TRITON_CALL) == 2
    assert text.count("output_operand_alias<") == 252
    assert 8 * (2 * pallas_triton.MAX_POOLS + 1 + 2 * len(packed) + 2) <= 4096


@both
def test_what_was_packed_comes_back_to_other_slots(implementation):
    pools, _, slots = make_inputs(Pack(3, 12, 40, n_kv_heads=3, head_dim=20, chunks=2), padding=0)
    moved = np.roll(slots, 5)
    packed = jitted(pack_kv, implementation, chunks=2)(pools, slots)
    results = jitted(unpack_kv, implementation)(pools, packed, moved)
    expected = jax.tree.map(np.copy, pools)
    for pool in jax.tree.leaves(expected):
        pool[moved] = pool[slots]
    assert_unpacked(results, expected)


@both
def test_no_slots(implementation):
    pools, packed, slots = make_inputs(Pack(2, 0, 8, n_kv_heads=1, head_dim=4, chunks=3))
    assert_packed(pack_kv(pools, slots, chunks=3, implementation=implementation), pools, slots)
    results = unpack_kv(pools, packed, slots, implementation=implementation)
    assert_unpacked(results, pools)


def test_tiles_fill_a_gpu_with_wide_accesses():
    """72 pools and 128 tokens of 1024 values: 1152 programs, each copies 16 KiB."""
    bfloat16, float32 = jnp.dtype("bfloat16"), jnp.dtype("float32")
    assert choose_tile(72, 128, 1024, bfloat16) == Tile(tokens=8, warps=4)
    assert choose_tile(72, 128, 1024, float32) == Tile(tokens=4, warps=4)
    assert choose_tile(72, 256, 128, bfloat16) == Tile(tokens=32, warps=2)
    assert choose_tile(72, 128, 128, bfloat16) == Tile(tokens=16, warps=1)
    assert choose_tile(56, 16, 192, bfloat16) == Tile(tokens=1, warps=1)
    assert choose_tile(72, 15, 1024, bfloat16) == Tile(tokens=1, warps=1)
    assert choose_tile(2, 256, 64 * 256, float32) == Tile(tokens=1, warps=8)


def temporary_share(implementation) -> float:
    """Temporary memory of a donated `unpack_kv`, as a share of one pool."""
    case = Pack(3, 8, 1 << 15, n_kv_heads=2, head_dim=64, chunks=2, back=True, dtype="float32")
    arrays = jax.eval_shape(case.inputs)
    run = functools.partial(unpack_kv, implementation=implementation)
    compiled = jax.jit(run, donate_argnames="pools").lower(**arrays).compile()
    memory = compiled.memory_analysis()
    return memory.temp_size_in_bytes / ((1 << 15) * 2 * 64 * 4)


def test_reference_is_in_place():
    assert temporary_share("xla") < 0.5


POOL = np.zeros((9, 3, 20), "float32")
LAYER = POOL, POOL
CHUNK = np.zeros((2, 2, 4, 3, 20), "float32")


@pytest.mark.parametrize(
    ("argument", "value", "message"),
    [
        ("pools", (), "pools is empty, but must have a layer or more"),
        ("pools", (LAYER, (POOL,)), r"pools\[1\] has 1 arrays, but must have two: keys and"),
        ("pools", ((POOL[0], POOL), LAYER), r"pools\[0\]\[0\] has shape \(3, 20\), but must be \["),
        ("pools", ((POOL[:0], POOL), LAYER), r"pools\[0\]\[0\] has shape \(0, 3, 20\), but must"),
        (
            "pools",
            ((POOL.astype("int32"), POOL), LAYER),
            r"pools\[0\]\[0\] is int32, but must be float16, bfloat16 or float32",
        ),
        (
            "pools",
            (LAYER, (POOL, POOL[:8])),
            r"pools\[1\]\[1\] is float32\[8, 3, 20\], but must be like .*, float32\[9, 3, 20\]",
        ),
        ("pools", (LAYER, (POOL.astype("float16"), POOL)), r"pools\[1\]\[0\] is float16\[9, 3, "),
        ("slots", jnp.zeros(8), r"slots is float32\[8\], but must be int32\[C\]"),
        ("slots", jnp.zeros((2, 4), int), r"slots is int32\[2, 4\], but must be int32\[C\]"),
        ("packed", (), "packed has 0 chunks, but must have one or more, of equal shares of 8"),
        ("packed", (CHUNK,) * 3, "packed has 3 chunks, but must have one or more"),
        (
            "packed",
            (CHUNK, CHUNK[:, :, :3]),
            r"packed\[1\] is float32\[2, 2, 3, 3, 20\], but must be .* float32\[2, 2, 4, 3, 20\]",
        ),
        ("packed", (CHUNK.astype("bfloat16"), CHUNK), r"packed\[0\] is bfloat16\[2, 2, 4, 3, 20\]"),
        ("implementation", "cuda", "implementation='cuda', but it must be"),
    ],
)
def test_errors_name_the_argument(argument, value, message):
    inputs = {"pools": (LAYER, LAYER), "packed": (CHUNK, CHUNK), "slots": jnp.zeros(8, int)}
    inputs |= {argument: value}
    with pytest.raises(ValueError, match=message):
        unpack_kv(**inputs)
    del inputs["packed"]
    if argument != "packed":
        with pytest.raises(ValueError, match=message):
            pack_kv(**inputs)


@pytest.mark.parametrize("chunks", [0, -1, 3])
def test_chunks_share_the_slots_equally(chunks):
    message = f"chunks is {chunks}, but must be one or more, of equal shares of 8 slots"
    with pytest.raises(ValueError, match=message):
        pack_kv((LAYER, LAYER), jnp.zeros(8, int), chunks=chunks)


@pytest.mark.gpu
@gpu
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("n_kv_heads", "head_dim"), [(8, 128), (3, 64), (1, 80), (1, 5), (4, 256), (40, 128)]
)
@pytest.mark.parametrize(("chunk", "chunks"), [(128, 1), (128, 4), (16, 2), (7, 3)])
def test_compiled_kernel(chunk, chunks, n_kv_heads, head_dim, dtype):
    case = Pack(9, chunk, 1 << 10, n_kv_heads, head_dim, chunks, dtype=dtype)
    check_both_ways(case, "pallas")


@pytest.mark.gpu
@gpu
@pytest.mark.parametrize("layers", [36, 120, 126])
def test_compiled_kernel_of_many_layers(layers):
    """As many as fit one launch, and more."""
    check_both_ways(Pack(layers, 16, 64, n_kv_heads=1, head_dim=128, chunks=2), "pallas")


@pytest.mark.gpu
@gpu
def test_pools_beyond_4_gib():
    """Slots whose offsets need more than 32 bits, and those they would wrap around to."""
    wrap = 2**21  # slots of 1024 values in 2**31
    slots = jnp.asarray([1, wrap - 1, wrap, wrap + 1, wrap + 7, wrap + 15], jnp.int32)
    rows = jax.random.normal(jax.random.key(0), (1, 2, len(slots), 8, 128), jnp.bfloat16)
    unpack = jax.jit(functools.partial(unpack_kv, implementation="pallas"), donate_argnums=0)
    pools = tuple(jnp.zeros((wrap + 16, 8, 128), jnp.bfloat16) for _ in range(2))
    pools = unpack((pools,), (rows,), slots)
    np.testing.assert_array_equal(jitted(pack_kv, "pallas")(pools, slots)[0], rows)
    for pool, values in zip(pools[0], rows[0], strict=True):
        np.testing.assert_array_equal(pool[slots], values)
        others = jnp.asarray([0, 2, 7, 15, 16, wrap - 2, wrap + 2, wrap + 14], jnp.int32)
        assert not pool[others].any()


@pytest.mark.gpu
@gpu
@both
def test_in_place_on_gpu(implementation):
    assert temporary_share(implementation) < 0.5


@pytest.mark.parametrize("case", H200["pack_kv"].values(), ids=H200["pack_kv"])
def test_cases_lower(case):
    arrays = jax.eval_shape(case.inputs)
    op = unpack_kv if case.back else functools.partial(pack_kv, chunks=case.chunks)
    run = functools.partial(op, implementation="pallas", interpret=False)
    assert lower_for_cuda(run, **arrays).as_text().count(TRITON_CALL) == 1


def test_floors():
    """36 layers, 128 tokens, keys and values of 8 heads of 128: 18 MiB, read and written."""
    assert H200["pack_kv"]["pack"].bytes() == 2 * 18 << 20
    assert H200["pack_kv"]["unpack, 4 chunks"].bytes() == 4 * 2 * 18 << 20
