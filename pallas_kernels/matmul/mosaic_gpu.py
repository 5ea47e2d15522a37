"""`matmul_parts` in Pallas (Mosaic GPU lowering) for Hopper: TMA, wgmma and warp specialisation.

After jax/experimental/pallas/ops/gpu/hopper_matmul_mgpu.py (Apache-2.0, The JAX Authors). Rows past
the last are no case of their own: TMA loads them as zeros and does not store them.
"""

import functools

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.matmul.tiles import K_STEP, Tile

_EPILOGUE = 64  # rows and columns that a warpgroup stores at once
_LOADER_REGISTERS = 40


def _transforms(columns: int, dtype: jnp.dtype) -> tuple:
    """How wgmma wants rows of `columns` to lie in shared memory."""
    swizzle = plgpu.find_swizzle(columns * dtype.itemsize * 8)
    return plgpu.TilingTransform((8, swizzle // dtype.itemsize)), plgpu.SwizzleTransform(swizzle)


def _kernel(x_gmem, weight_gmem, out_gmem, *, tile: Tile):
    (n_rows, k), n_columns, dtype = x_gmem.shape, weight_gmem.shape[1], x_gmem.dtype
    rows, columns = tile.block_rows, tile.block_columns
    members = 2 if tile.pairs else 1
    row_blocks = pl.cdiv(n_rows, rows)
    k_part = k // tile.parts
    slots = min(2, (tile.rows // _EPILOGUE) * (tile.columns // _EPILOGUE))

    def pipeline(body, context):
        def spec(shape, index_map, axes=()):
            return plgpu.BlockSpec(
                shape,
                index_map,
                transforms=_transforms(shape[1], dtype),
                memory_space=plgpu.SMEM,
                collective_axes=axes,
            )

        return plgpu.emit_pipeline_warp_specialized(
            body,
            grid=(k_part // K_STEP,),
            memory_registers=_LOADER_REGISTERS,
            in_specs=[
                spec((rows, K_STEP), lambda k: (0, k), ("cluster",) if tile.pairs else ()),
                spec((K_STEP, columns), lambda k: (k, 0)),
            ],
            wg_axis="wg",
            num_compute_wgs=2,
            max_concurrent_steps=min(tile.stages, k_part // K_STEP),
            compute_context=context,
        )

    def ignore(*_, **__):
        return None

    @functools.partial(
        pl.run_scoped,
        allocations=pipeline(ignore, ignore).get_allocations(x_gmem, weight_gmem),
        out_smem=plgpu.SMEM(
            (2, slots, _EPILOGUE, _EPILOGUE), dtype, transforms=_transforms(_EPILOGUE, dtype)
        ),
        collective_axes="wg",
    )
    def _scope(allocations, out_smem):
        wg, member = lax.axis_index("wg"), lax.axis_index("cluster")

        @plgpu.nd_loop((tile.blocks(n_rows, n_columns) // members,), collective_axes="cluster_grid")
        def _loop(info):
            # The blocks of a column, which read the same weights, run next to each other.
            (index,) = info.index
            index, part = lax.div(index, tile.parts), lax.rem(index, tile.parts)
            column_block = lax.div(index, row_blocks) * members + member
            block_rows = pl.ds(lax.rem(index, row_blocks) * rows, rows)
            block_columns = pl.ds(column_block * columns, columns)
            block_k = pl.ds(part * k_part, k_part)
            own_rows = slice(None) if tile.beside else pl.ds(wg * tile.rows, tile.rows)
            own_columns = pl.ds(wg * tile.columns, tile.columns) if tile.beside else slice(None)

            def store(acc):
                acc = acc.astype(dtype)
                out = out_gmem.at[part].at[block_rows, block_columns].at[own_rows, own_columns]
                plgpu.wait_smem_to_gmem(0, wait_read_only=True)
                for row in range(0, tile.rows, _EPILOGUE):
                    for column in range(0, tile.columns, _EPILOGUE):
                        piece = slice(row, row + _EPILOGUE), slice(column, column + _EPILOGUE)
                        slot = (row * tile.columns // _EPILOGUE + column) // _EPILOGUE % slots
                        plgpu.wait_smem_to_gmem(slots - 1, wait_read_only=True)
                        out_smem[wg, slot] = acc[piece]
                        plgpu.commit_smem()
                        plgpu.copy_smem_to_gmem(out_smem.at[wg, slot], out.at[piece])

            def context(run):
                def accumulate(acc):
                    run(acc)
                    store(acc[...])

                pl.run_scoped(accumulate, plgpu.ACC((tile.rows, tile.columns), jnp.float32))

            def body(_, x, weight, acc):
                plgpu.wgmma(acc, x.at[own_rows], weight.at[:, own_columns])
                plgpu.wgmma_wait(0)
                return acc

            pipeline(body, context)(
                x_gmem.at[block_rows, block_k],
                weight_gmem.at[block_k, block_columns],
                allocations=allocations,
            )

    plgpu.wait_smem_to_gmem(0, wait_read_only=True)


@functools.partial(jax.jit, static_argnames=("tile", "multiprocessors", "interpret"))
def matmul_parts(
    x: Array, weight: Array, *, tile: Tile, multiprocessors: int, interpret: object = None
) -> Array:
    """[T, K] x [K, N] to [parts, T, N]."""
    n_rows, n_columns = x.shape[0], weight.shape[1]
    members = 2 if tile.pairs else 1
    return plgpu.kernel(
        functools.partial(_kernel, tile=tile),
        out_type=jax.ShapeDtypeStruct((tile.parts, n_rows, n_columns), x.dtype),
        grid=(min(multiprocessors, tile.blocks(n_rows, n_columns)) // members,),
        grid_names=("cluster_grid",),
        cluster=(members,),
        cluster_names=("cluster",),
        num_threads=3,
        thread_name="wg",
        kernel_name="matmul",
        interpret=interpret,
        compiler_params=plgpu.CompilerParams(lowering_semantics=plgpu.LoweringSemantics.Warpgroup),
    )(x, weight)
