"""What the attention kernels are made of: padded loads and stores, softmax, launches."""

import functools
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plt

from pallas_kernels.columns import Columns, load
from pallas_kernels.fused_attention.tiles import Tile

LOG2E = math.log2(math.e)
DEAD = -1e30  # logit of a masked key; finite, so that fully masked rows stay free of NaN
# A weight where the reference is the true maximum is 2^headroom at most: codes (`scores.py`) reach
# from 2^-19 to 2^13 of it. The sum may grow up to `largest`: float32 and bfloat16 hold far larger
# numbers than ever come, float16 does not.
_HEADROOM = {jnp.dtype(jnp.float16): 0}
_LARGEST = {jnp.dtype(jnp.float16): 2.0**15}
# Of queries that see nothing: far below all logits and far above the masked ones, whose distance to
# a reference of their own size would be nothing but rounding.
_LEAST_REFERENCE = -1e18


def dot(a: Array, b: Array) -> Array:
    return jnp.dot(a, b, precision=lax.Precision.HIGHEST, preferred_element_type=jnp.float32)


def _exp2(products: Array, factor: float, reference: Array, *, interpret: bool) -> Array:
    """exp2(products * factor - reference) of [rows, keys] and [rows], to 2 ulp.

    In two instructions: XLA neither fuses the product with the sum nor drops the denormals.
    """
    reference = jnp.broadcast_to(reference[:, None], products.shape)
    if interpret:
        return jnp.exp2(products * factor - reference)
    constant = np.float32(factor).view(np.uint32)
    [weights] = plt.elementwise_inline_asm(
        f"fma.rn.f32 $0, $1, 0f{constant:08X}, $2; ex2.approx.ftz.f32 $0, $0;",
        args=[products, -reference],
        constraints="=f,f,f",
        pack=1,
        result_shape_dtypes=[jax.ShapeDtypeStruct(products.shape, jnp.float32)],
    )
    return weights


class Softmax(NamedTuple):
    """Attention of a tile of queries: unnormalised output, its reference, normaliser."""

    out: Array
    reference: Array
    """Base-2 logit of weight 1."""
    norm: Array

    @classmethod
    def empty(cls, rows: int, columns: int) -> "Softmax":
        return cls(
            jnp.zeros((rows, columns), jnp.float32),
            jnp.full((rows,), DEAD, jnp.float32),
            jnp.zeros((rows,), jnp.float32),
        )

    def merge(self, lse: Array, out: Array) -> "Softmax":
        """Adds a normalised part whose base-2 log-sum-exp is `lse`."""
        reference = jnp.maximum(self.reference, lse)
        decay, weight = jnp.exp2(self.reference - reference), jnp.exp2(lse - reference)
        merged = self.out * decay[:, None] + out * weight[:, None]
        return Softmax(merged, reference, self.norm * decay + weight)

    def result(self) -> tuple[Array, Array]:
        """Output and base-2 log-sum-exp; 0 and a very negative number if nothing was attended."""
        some = self.norm != 0  # else the reference is that of keys which are not in this part
        norm = jnp.where(some, self.norm, 1)
        lse = jnp.where(some, self.reference + jnp.log2(norm), DEAD)
        return self.out * (1 / norm)[:, None], lse


def attend(
    blocks: tuple[Array, Array, Array],
    keys: Callable[..., tuple[Array, Array]],
    values: Callable[[Array], Array],
    again: Array,
    *,
    shape: tuple[int, int],
    dtype: jnp.dtype,
    factor: float,
    interpret: bool,
    guess_at: int | None = None,
    dump: Callable[[Array, Array], None] | None = None,
) -> tuple["Softmax", Array]:
    """Softmax attention over a range of blocks of keys, without a running maximum.

    The reference of the weights is the maximum over one block: floats hold weights far above 1 as
    exactly as others, so nothing needs rescaling as larger logits come. Should they come so large
    that the sum leaves the range, the caller must do it again, with the true maximum.

    Args:
        blocks: the first block, the first that needs masks, one past the last.
        keys: `keys(b, masked=...)`, a block's products and slots.
        values: values [keys, columns] of slots.
        again: 0, or 1 to do it again.
        shape: rows and columns of the output.
        dtype: of the values.
        factor: of the products, makes them base-2 logits.
        interpret: in Pallas' interpreter.
        guess_at: the block that the reference is taken from; None: the first of the range, at no
            cost.
        dump: called with each block's number and weights [rows, keys].

    Returns:
        The result, and 1 if it is no good and must be done again, else 0.
    """
    low, unmasked, high = blocks

    def reference_of(peak):
        return jnp.maximum(jnp.ceil(peak * factor) - _HEADROOM.get(dtype, 4), _LEAST_REFERENCE)

    def peak_of(b, peak):
        return jnp.maximum(peak, keys(b, masked=True)[0].max(1))

    start, stop = low, jnp.where(again == 0, low, high)
    if guess_at is not None:
        start = jnp.where(again == 0, guess_at, low)
        stop = jnp.where(again == 0, jnp.minimum(guess_at + 1, high), high)
    peak = lax.fori_loop(start, stop, peak_of, jnp.full(shape[:1], DEAD, jnp.float32))

    def add(b, softmax, *, masked: bool):
        products, slot = keys(b, masked=masked)
        reference = softmax.reference
        if guess_at is None:
            reference = lax.cond(
                (b == low) & (again == 0),
                lambda: reference_of(products.max(1)),
                lambda: softmax.reference,
            )
        weights = _exp2(products, factor, reference, interpret=interpret)
        if dump is not None:
            dump(b, weights)
        v = values(slot)
        out = softmax.out + dot(weights.astype(v.dtype), v)
        return Softmax(out, reference, softmax.norm + weights.sum(1))

    softmax = Softmax.empty(*shape)._replace(reference=reference_of(peak))
    softmax = lax.fori_loop(low, unmasked, functools.partial(add, masked=False), softmax)
    softmax = lax.fori_loop(unmasked, high, functools.partial(add, masked=True), softmax)
    out_of_range = jnp.max(jnp.where(softmax.norm < _LARGEST.get(dtype, 2.0**100), 0, 1))
    return softmax, jnp.where(again == 0, out_of_range, 0)


def gather(pool_ref: Any, slot: Array, head: Array, columns: Columns) -> Array:
    """The [keys, lanes] rows of one head of the pool.

    Keys to be masked name the slot of some live key: that costs no bandwidth and no registers, and
    keeps whatever the trash slot holds out of the products.
    """
    return load(pool_ref, slot[:, None], head, columns.at, mask=columns.live)


def launch(
    kernel: Callable[..., None],
    inputs: tuple[Array, ...],
    outputs: list[tuple[jax.ShapeDtypeStruct, Array | None]],
    *,
    grid: tuple[int, ...],
    name: str,
    tile: Tile,
    interpret: bool,
) -> list[Array]:
    """Runs `kernel(*program ids, *refs)` on whole arrays.

    An output that comes with an array is that array, in place.
    """
    into = [(i, array) for i, (_, array) in enumerate(outputs) if array is not None]
    n = len(inputs)

    def body(*refs):
        ids = (pl.program_id(axis) for axis in range(len(grid)))
        kernel(*ids, *refs[:n], *refs[n + len(into) :])

    return pl.pallas_call(
        body,
        out_shape=[shape for shape, _ in outputs],
        grid=grid,
        name=name,
        input_output_aliases={n + i: output for i, (output, _) in enumerate(into)},
        compiler_params=plt.CompilerParams(num_warps=tile.warps, num_stages=tile.stages),
        interpret=interpret,
    )(*inputs, *(array for _, array in into))
