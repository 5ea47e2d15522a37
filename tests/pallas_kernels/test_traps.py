"""What no kernel may use, since some supported version of jax gets it wrong or lacks it."""

import functools
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

import pallas_kernels
from pallas_kernels.lowering import lower_for_cuda

SOURCES = sorted(Path(pallas_kernels.__file__).parent.rglob("*.py"))


@pytest.mark.parametrize(
    ("name", "why"),
    [
        ("num_programs", "stale when a kernel is reused with another grid (jax 0.11)"),
        ("pallas.ops.gpu", "removed from newer versions of jax"),
        ("pl.load", "removed; plt.load"),
        ("pl.store", "removed; plt.store"),
        ("io_callback", "stalls the step and cannot be captured in a command buffer"),
    ],
)
def test_it_is_not_used(name, why):
    users = [source.name for source in SOURCES if f"{name}(" in source.read_text()]
    users += [source.name for source in SOURCES if f"import {name}" in source.read_text()]
    assert not users, why


def test_mosaic_gpu_gathers_no_single_rows_for_wgmma():
    """Why attention over single-token slots is a Triton kernel: bulk copies can fill an operand of
    wgmma from 8 rows of a pool that lie next to each other, not from rows anywhere."""
    swizzled = plgpu.TilingTransform((8, 64)), plgpu.SwizzleTransform(128)

    def copy_rows(rows, pool_gmem, slots_gmem, out_gmem, operand_smem, barrier):
        for row in range(0, 64, rows):
            slot = pl.multiple_of(slots_gmem[row], rows)
            source, target = pool_gmem.at[pl.ds(slot, rows)], operand_smem.at[pl.ds(row, rows)]
            plgpu.copy_gmem_to_smem(source, target, barrier)
        plgpu.barrier_wait(barrier)
        plgpu.copy_smem_to_gmem(operand_smem, out_gmem)
        plgpu.wait_smem_to_gmem(0)

    def lower(rows):
        run = plgpu.kernel(
            functools.partial(copy_rows, rows),
            out_type=jax.ShapeDtypeStruct((64, 128), jnp.bfloat16),
            scratch_types=[
                plgpu.SMEM((64, 128), jnp.bfloat16, transforms=swizzled),
                plgpu.Barrier(num_arrivals=64 // rows),
            ],
        )
        pool = jax.ShapeDtypeStruct((4096, 128), jnp.bfloat16)
        return lower_for_cuda(run, pool, jax.ShapeDtypeStruct((64,), jnp.int32))

    lower(8)
    with pytest.raises(ValueError, match="divisible by the tile size"):
        lower(1)
