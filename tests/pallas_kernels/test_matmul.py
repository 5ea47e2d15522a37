"""`matmul`: XLA's product to the bit, or parts of it by a kernel whose blocks all run at once."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pallas_kernels import matmul, matmul_parts
from pallas_kernels.gpus import GPUS
from pallas_kernels.matmul import mosaic_gpu, reference
from pallas_kernels.matmul.tiles import K_STEP, MAX_PARTS, Tile, choose_parts, choose_tile

gpu = pytest.mark.skipif(jax.default_backend() != "gpu", reason="needs an NVIDIA GPU")
H200 = GPUS["NVIDIA H200"]
TOLERANCE = {"bfloat16": 4e-3, "float16": 8e-4}
# The projections of Qwen3-8B, [K, N] and in how many parts they may be.
GATE_UP, OUT, DOWN = (4096, 24576, 1), (4096, 4096, MAX_PARTS), (12288, 4096, MAX_PARTS)
TILES = {
    GATE_UP: Tile(128, 192, stages=3),
    OUT: Tile(128, 64, stages=6, beside=True, parts=2),
    DOWN: Tile(128, 128, stages=4, pairs=True, parts=4),
}


def operands(n_rows, k, n_columns, dtype):
    rng = np.random.default_rng(0)
    x, weight = rng.normal(size=(n_rows, k)), rng.normal(size=(k, n_columns))
    return jnp.asarray(x, dtype), jnp.asarray(weight, dtype)


def check(parts, x, weight):
    """Parts, summed as their consumer does, against float64."""
    assert parts.dtype == x.dtype
    actual = np.asarray(parts, np.float32).sum(0)
    expected = np.asarray(x, np.float64) @ np.asarray(weight, np.float64)
    assert actual.shape == expected.shape
    assert np.isfinite(actual).all()
    error = np.linalg.norm(actual - expected) / np.linalg.norm(expected)
    print(f"{x.shape} x {weight.shape}, {len(parts)} parts: {error:.2e}")
    assert error <= TOLERANCE[str(x.dtype)]


@pytest.mark.parametrize("implementation", ["xla", "pallas"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_on_a_cpu_it_is_the_product_of_xla(dtype, implementation):
    x = jax.random.normal(jax.random.key(0), (2, 3, 4, 5), dtype)
    weight = jax.random.normal(jax.random.key(1), (4, 5, 2, 7), dtype)
    wide = jax.lax.Precision.HIGHEST if dtype == "float32" else None
    expected = jax.lax.dot_general(x, weight, (((2, 3), (0, 1)), ((), ())), precision=wide)
    parts = matmul_parts(x, weight, contracted=2, implementation=implementation)
    assert parts.shape == (1, 2, 3, 2, 7)
    np.testing.assert_array_equal(parts[0], expected)
    whole = matmul(x, weight, contracted=2, implementation=implementation)
    np.testing.assert_array_equal(whole, expected)


def test_the_measured_tiles_are_chosen():
    for shape, tile in TILES.items():
        for n_rows in (248, 256):
            k, n_columns, max_parts = shape
            assert choose_tile(n_rows, k, n_columns, H200, max_parts) == tile


@pytest.mark.parametrize("shape", TILES)
@pytest.mark.parametrize("n_rows", [0, 1, 128, 136, 200, 250, 264, 2048])
def test_other_numbers_of_rows_are_left_to_xla(n_rows, shape):
    k, n_columns, max_parts = shape
    assert choose_tile(n_rows, k, n_columns, H200, max_parts) is None


@pytest.mark.parametrize("shape", [(2048, 4096, 1), (6144, 2048, 4), (4096, 24577, 4)])
def test_products_that_leave_multiprocessors_idle_are_left_to_xla(shape):
    k, n_columns, max_parts = shape
    assert choose_tile(256, k, n_columns, H200, max_parts) is None


@settings(deadline=None, max_examples=300)
@given(
    n_rows=st.integers(1, 40).map(lambda n: 8 * n),
    k=st.integers(1, 400).map(lambda n: 64 * n),
    n_columns=st.integers(1, 800).map(lambda n: 32 * n),
    max_parts=st.integers(1, MAX_PARTS),
    device=st.sampled_from(sorted(GPUS)),
)
def test_a_tile_divides_the_product_and_fits_the_gpu(n_rows, k, n_columns, max_parts, device):
    target = GPUS[device]
    tile = choose_tile(n_rows, k, n_columns, target, max_parts)
    if tile is None:
        return
    assert target.capability == (9, 0)
    assert tile.parts <= max_parts
    assert k % (tile.parts * K_STEP) == 0
    assert n_columns % (tile.block_columns * (2 if tile.pairs else 1)) == 0
    assert tile.blocks(n_rows, n_columns) <= target.multiprocessors
    operands = tile.stages * K_STEP * (tile.block_rows + tile.block_columns) * 2
    assert operands + 2 * 2 * 64 * 64 * 2 < target.shared_memory


@pytest.mark.skipif(jax.__version_info__ < (0, 11), reason="this jax has no interpreter of it")
@pytest.mark.skipif(jax.default_backend() == "gpu", reason="the compiled kernel is tested there")
@pytest.mark.parametrize(
    "tile",
    [Tile(64, 64, 2, parts=2), Tile(64, 64, 2, beside=True), Tile(64, 64, 3, pairs=True, parts=2)],
)
def test_kernel_of_rows_that_fill_no_block(tile):
    from jax.experimental.pallas import mosaic_gpu as plgpu

    x, weight = operands(136, 256, 256, "bfloat16")
    run = functools.partial(mosaic_gpu.matmul_parts, tile=tile, multiprocessors=2)
    parts = run(x, weight, interpret=plgpu.InterpretGPUParams())
    assert len(parts) == tile.parts
    check(parts, x, weight)


@pytest.mark.parametrize(
    ("argument", "value", "message"),
    [
        ("x", jnp.zeros((5, 20), int), "x is int32, but must be float16, bfloat16 or float32"),
        (
            "weight",
            jnp.zeros((19, 7)),
            r"weight is float32\[19, 7\], but must be float32\[\*K, \*N",
        ),
        ("weight", jnp.zeros((20, 7), "bfloat16"), r"weight is bfloat16\[20, 7\], but must be fl"),
        ("contracted", 0, "the last 0 axes of x"),
        ("contracted", 3, "the last 3 axes of x"),
        ("implementation", "cuda", "implementation='cuda', but it must be"),
    ],
)
def test_errors_name_the_argument(argument, value, message):
    inputs = {"x": jnp.zeros((5, 20)), "weight": jnp.zeros((20, 7))}
    for op in (matmul, matmul_parts):
        with pytest.raises(ValueError, match=message):
            op(**(inputs | {argument: value}))


@pytest.mark.gpu
@gpu
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("n_rows", [136, 200, 248, 256])
@pytest.mark.parametrize("shape", TILES)
def test_compiled_kernel(shape, n_rows, dtype):
    """Every tile, also at rows that the table leaves to XLA; what follows a part is its own."""
    if jax.devices()[0].compute_capability != "9.0":
        pytest.skip("a kernel for Hopper")
    x, weight = operands(n_rows, *shape[:2], dtype)
    for tile in (TILES[shape], TILES[shape]._replace(parts=1)):
        run = functools.partial(mosaic_gpu.matmul_parts, tile=tile, multiprocessors=132)
        check(run(x, weight), x, weight)


@pytest.mark.gpu
@gpu
@pytest.mark.parametrize("shape", TILES)
def test_compiled_op(shape):
    x, weight = operands(256, *shape[:2], "bfloat16")
    op = matmul_parts if shape[2] > 1 else lambda *args: matmul(*args)[None]
    check(op(x, weight), x, weight)


@pytest.mark.parametrize(
    ("n_rows", "k", "n_columns", "parts"),
    [
        (136, 2048, 2048, 4),
        (136, 6144, 2048, 4),
        (136, 2048, 4096, 2),
        (136, 4096, 4096, 2),
        (64, 12288, 4096, 4),
        (136, 4096, 6144, 1),
        (2048, 6144, 2048, 1),
        (136, 2048, 12288, 1),
        (136, 576, 576, 1),
        (16, 4096, 4096, 1),
    ],
)
def test_xla_splits_products_of_few_blocks(n_rows, k, n_columns, parts):
    assert choose_parts(n_rows, k, n_columns, H200, MAX_PARTS) == parts
    assert choose_parts(n_rows, k, n_columns, H200, 1) == 1


@pytest.mark.parametrize("parts", [2, 4])
def test_parts_of_xla(parts):
    x, weight = operands(24, 1024, 96, jnp.bfloat16)
    check(jax.jit(reference.split_matmul, static_argnums=2)(x, weight, parts), x, weight)
