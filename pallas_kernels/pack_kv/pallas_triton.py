"""`pack_kv` and `unpack_kv` in Pallas (Triton lowering): one launch for the pools of all layers.

A program copies the rows of a few tokens of one pool, whose number is a program id. A kernel cannot
index its arrays by a number, so a tree of branches leads to the pool: 7 of them for 72 pools. The
branches differ in nothing but the pool, so the compiler lets them choose its address, and all that
is done with it follows once: for 72 pools a kernel has 300 instructions and compiles in half a
second, for 240 in four. One launch a layer would need no tree, but 36 times the start and the tail
of a kernel that moves 0.5 MB.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plt

from pallas_kernels.columns import Columns, load, store
from pallas_kernels.pack_kv.reference import Pools

_BLOCK_BYTES = 16 << 10  # of a program, at most
_PROGRAMS = 528  # enough to fill a large GPU (132 SMs, four programs each)
_MAX_WARPS = 8
# Of one launch: pointers have 4 KB, and an array that is written in place comes as two.
MAX_POOLS = 240


class Tile(NamedTuple):
    """Tokens of a program, and its warps."""

    tokens: int
    warps: int


def choose_tile(n_pools: int, chunk: int, row: int, dtype: jnp.dtype) -> Tile:
    """Eight accesses of 16 bytes per thread, all under way at once; more tokens as long as they
    divide the chunk and the programs fill the GPU.
    """
    row_bytes = pl.next_power_of_2(row) * dtype.itemsize
    tokens = 1
    while (
        chunk % (2 * tokens) == 0
        and 2 * tokens * row_bytes <= _BLOCK_BYTES
        and n_pools * chunk >= 2 * tokens * _PROGRAMS
    ):
        tokens *= 2
    return Tile(tokens, min(max(1, tokens * row_bytes // (32 * 8 * 16)), _MAX_WARPS))


def _choose(number: Array, branches: Sequence[Callable[[], Any]]) -> Any:
    """What the branch of that number returns; it is found by halving."""
    if len(branches) == 1:
        return branches[0]()
    half = len(branches) // 2
    return lax.cond(
        number < half,
        lambda: _choose(number, branches[:half]),
        lambda: _choose(number - half, branches[half:]),
    )


def _place(chunk: int, tokens: int) -> tuple[Array, Array, Array]:
    """The program's chunk, and its tokens' places in the chunk and among all slots [tokens, 1]."""
    block = pl.program_id(0)
    number = block // (chunk // tokens)
    place = block * tokens + lax.broadcasted_iota(jnp.int32, (tokens, 1), 0)
    return number, place - number * chunk, place


def _pack_kernel(slots_ref, *refs, n_packed: int, n_pools: int, first: int, tokens: int):
    pool_refs, packed_refs = refs[:n_pools], refs[-n_packed:]
    _, chunk, row = packed_refs[0].shape
    number, token, place = _place(chunk, tokens)
    pool = pl.program_id(1)
    columns = Columns.of(row)
    slot = plt.load(slots_ref.at[place])
    read = functools.partial(load, mask=columns.live)
    values = _choose(pool, [functools.partial(read, ref, slot, columns.at) for ref in pool_refs])
    at = first + pool, token, columns.at
    write = functools.partial(store, value=values, mask=columns.live)
    _choose(number, [functools.partial(write, ref, *at) for ref in packed_refs])


def _unpack_kernel(slots_ref, *refs, n_packed: int, n_pools: int, first: int, tokens: int):
    packed_refs, pool_refs = refs[:n_packed], refs[-n_pools:]
    _, chunk, row = packed_refs[0].shape
    number, token, place = _place(chunk, tokens)
    pool = pl.program_id(1)
    columns = Columns.of(row)
    slot = plt.load(slots_ref.at[place])
    read = functools.partial(load, mask=columns.live)
    at = first + pool, token, columns.at
    values = _choose(number, [functools.partial(read, ref, *at) for ref in packed_refs])
    write = functools.partial(store, value=values, mask=columns.live)
    _choose(pool, [functools.partial(write, ref, slot, columns.at) for ref in pool_refs])


def _rows(pools: Pools) -> list[Array]:
    """Keys and values of each layer in turn, [slots, Hkv * D]."""
    return [pool.reshape(len(pool), -1) for layer in pools for pool in layer]


def _launches(pools: list[Array], max_pools: int) -> list[tuple[int, list[Array]]]:
    """The pools of each launch, and the number of its first."""
    return [(i, pools[i : i + max_pools]) for i in range(0, len(pools), max_pools)]


@functools.partial(jax.jit, static_argnames=("chunks", "interpret", "max_pools"))
def pack_kv(
    pools: Pools, slots: Array, *, chunks: int, interpret: bool, max_pools: int = MAX_POOLS
) -> tuple[Array, ...]:
    rows = _rows(pools)
    chunk = len(slots) // chunks
    shape = jax.ShapeDtypeStruct((len(rows), chunk, rows[0].shape[1]), rows[0].dtype)
    tile = choose_tile(*shape.shape, shape.dtype)
    packed = []  # by the launches before, in place
    for first, group in _launches(rows, max_pools):
        packed = pl.pallas_call(
            functools.partial(
                _pack_kernel,
                n_packed=chunks,
                n_pools=len(group),
                first=first,
                tokens=tile.tokens,
            ),
            out_shape=[shape] * chunks,
            grid=(len(slots) // tile.tokens, len(group)),
            input_output_aliases={1 + len(group) + i: i for i in range(len(packed))},
            name="pack_kv",
            compiler_params=plt.CompilerParams(num_warps=tile.warps, num_stages=1),
            interpret=interpret,
        )(slots, *group, *packed)
    return tuple(x.reshape(len(pools), 2, chunk, *pools[0][0].shape[1:]) for x in packed)


@functools.partial(jax.jit, static_argnames=("interpret", "max_pools"))
def unpack_kv(
    pools: Pools,
    packed: tuple[Array, ...],
    slots: Array,
    *,
    interpret: bool,
    max_pools: int = MAX_POOLS,
) -> Pools:
    rows = _rows(pools)
    chunk = len(slots) // len(packed)
    inputs = slots, *(x.reshape(len(rows), chunk, -1) for x in packed)
    tile = choose_tile(len(rows), chunk, rows[0].shape[1], rows[0].dtype)
    done = []
    for first, group in _launches(rows, max_pools):
        done += pl.pallas_call(
            functools.partial(
                _unpack_kernel,
                n_packed=len(packed),
                n_pools=len(group),
                first=first,
                tokens=tile.tokens,
            ),
            out_shape=[jax.ShapeDtypeStruct(pool.shape, pool.dtype) for pool in group],
            grid=(len(slots) // tile.tokens, len(group)),
            input_output_aliases={len(inputs) + i: i for i in range(len(group))},
            name="unpack_kv",
            compiler_params=plt.CompilerParams(num_warps=tile.warps, num_stages=1),
            interpret=interpret,
        )(*inputs, *group)
    pools_of_layers = iter(pool.reshape(pools[0][0].shape) for pool in done)
    return tuple(zip(pools_of_layers, pools_of_layers, strict=True))
