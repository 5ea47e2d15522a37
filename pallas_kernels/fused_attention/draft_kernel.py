"""Attention of draft rows: one program for each row and KV head walks its list of slots."""

from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
from jax import Array
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plt

from pallas_kernels.columns import Columns, load, store
from pallas_kernels.fused_attention.tiles import Tile
from pallas_kernels.fused_attention.triton_parts import DEAD, LOG2E, attend, dot, gather


def draft_kernel(
    i: Array,
    h: Array,
    layer_ref,
    slots_ref,
    length_ref,
    q_ref,
    k_ref,
    v_ref,
    out_ref,
    *_,
    group: int,
    head_dim: int,
    tile: Tile,
    scale: float,
    interpret: bool,
):
    layer, length = layer_ref[0], length_ref[i]
    _, _, n_lists, width = slots_ref.shape
    listed = h // (k_ref.shape[1] // n_lists)

    columns = Columns.of(head_dim)
    head = jnp.arange(tile.rows)
    in_group = columns.mask(head < group)
    q = load(q_ref, i, (h * group + head)[:, None], columns.at, mask=in_group)

    def keys(b, *, masked: bool):
        at = b * tile.block + jnp.arange(tile.block)
        entry = plt.load(slots_ref.at[layer, i, listed, jnp.minimum(at, width - 1)])
        slot = jnp.where(entry < 0, ~entry, entry)
        live = (entry >= 0) & (at < length)
        products = jnp.where(live[None], dot(q, gather(k_ref, slot, h, columns).T), DEAD)
        return products, slot

    attend_to_list(
        length,
        tile.block,
        keys,
        lambda slot: gather(v_ref, slot, h, columns),
        lambda out: store(
            out_ref, i, (h * group + head)[:, None], columns.at, value=out, mask=in_group
        ),
        shape=(tile.rows, columns.at.shape[1]),
        dtype=v_ref.dtype,
        factor=scale * LOG2E,
        interpret=interpret,
    )


def attend_to_list(
    length: Array,
    block: int,
    keys: Callable[..., tuple[Array, Array]],
    values: Callable[[Array], Array],
    write: Callable[[Array], None],
    **options: Any,
) -> None:
    """Writes what `attend` makes of a list of `length` keys, `block` of them at a time.

    `options` are those of `attend`, whose result is made and written again where it is no good.
    """

    def run(again):
        softmax, again = attend((0, 0, pl.cdiv(length, block)), keys, values, again, **options)
        out, _ = softmax.result()
        write(out)
        return again

    @pl.when(run(jnp.int32(0)) == 1)
    def _():
        run(jnp.int32(1))
