"""`sample_tokens` in Pallas (Triton lowering): one pass over the logits, no [S, V] temporary.

- scan: one program per row and part of the vocabulary bounds the part's noisy scores from above.
- collect, with filters: one program per row lists the ids of the largest logits.
- pick: one program per row scores exactly the tokens that can win.

Exact scores are computed by the very operations of the reference, from the same device functions,
and so are the tokens. Only sums of probabilities, on which top_p depends, have their own order.
Nothing depends on the number of rows.
"""

import functools

import jax
import jax.numpy as jnp
from jax import Array
from jax.experimental import pallas as pl

from pallas_kernels.sample_tokens.args import Best, SampleArgs
from pallas_kernels.sample_tokens.changes import Changes
from pallas_kernels.sample_tokens.collect_kernel import collect_kernel
from pallas_kernels.sample_tokens.noise import SAMPLE_STREAM, row_key
from pallas_kernels.sample_tokens.normaliser_kernel import normaliser_kernel
from pallas_kernels.sample_tokens.pick_kernel import pick_kernel
from pallas_kernels.sample_tokens.scan_kernel import scan_kernel, scan_with_filters_kernel
from pallas_kernels.sample_tokens.tiles import Tiles, fit_tiles
from pallas_kernels.sample_tokens.triton_parts import launch


@functools.partial(jax.jit, static_argnames=("filters", "interpret", "tiles"))
def best_tokens(
    logits: Array,
    args: SampleArgs,
    changes: Changes,
    vocab_start: Array,
    *,
    filters: bool,
    interpret: bool,
    tiles: Tiles = Tiles(),  # noqa: B008
) -> Best:
    """The best of `logits` [S, V], whose first id is `vocab_start`; filters need all of them.

    Rows at a negative position are skipped: token 0, and a peak of -inf.
    """
    n_rows, vocab = logits.shape
    tiles = fit_tiles(tiles, vocab)
    n_groups = pl.cdiv(vocab, tiles.group)
    sizes = {"vocab": vocab, "tiles": tiles, "interpret": interpret}
    f32, i32, u32 = jnp.float32, jnp.int32, jnp.uint32
    key0, key1 = row_key(args.seed, args.position, SAMPLE_STREAM)
    row_inputs = args.position, args.temperature, key0, key1, jnp.asarray(vocab_start, i32)[None]
    inputs = (*row_inputs, *changes, logits)

    if filters:
        part, warps = tiles.chunk, tiles.warps
        scan, scan_inputs = scan_with_filters_kernel, inputs
    else:
        part, warps = tiles.part, tiles.scan_warps
        scan, scan_inputs = scan_kernel, (*row_inputs, logits)
    n_parts = pl.cdiv(vocab, part)
    parts = [((n_rows, n_parts), f32)] * 2
    if filters:
        groups = (n_rows, n_parts * part // tiles.group)
        parts += [(groups, f32), *parts]
    bound, peak, *filter_parts = launch(
        functools.partial(scan, **sizes),
        parts,
        scan_inputs,
        grid=(n_parts, n_rows),
        name="sample_scan",
        warps=warps,
        interpret=interpret,
    )
    inputs += (bound, peak)
    if filters:
        group_maxima, high, norm = filter_parts
        active = (args.top_k > 0) | (args.top_p < 1) | (args.min_p > 0)
        filtered = (active & (args.temperature > 0)).astype(i32)
        lists = launch(
            functools.partial(collect_kernel, n_groups=n_groups, listed=tiles.listed),
            [((n_rows, tiles.listed), i32), ((n_rows,), i32), ((n_rows,), u32)],
            (args.position, filtered, group_maxima),
            grid=(n_rows,),
            name="sample_collect",
            warps=tiles.collect_warps,
            interpret=interpret,
        )
        inputs += (args.top_k, args.top_p, args.min_p, filtered, high, norm, *lists)
    token, score, peak = launch(
        functools.partial(pick_kernel, part=part, **sizes),
        [((n_rows,), i32), ((n_rows,), f32), ((n_rows,), f32)],
        inputs,
        grid=(n_rows,),
        name="sample_pick",
        warps=tiles.filter_warps if filters else tiles.pick_warps,
        interpret=interpret,
    )
    live = args.position >= 0
    least = jnp.float32(-jnp.inf)
    return Best(
        jnp.where(live, token, 0), jnp.where(live, score, least), jnp.where(live, peak, least)
    )


@functools.partial(jax.jit, static_argnames=("interpret", "tiles"))
def log_normalisers(
    logits: Array,
    rows: Array,
    divisor: Array,
    changes: Changes,
    *,
    interpret: bool,
    tiles: Tiles = Tiles(),  # noqa: B008
) -> Array:
    """log(sum(exp(patched logits[rows] / divisor))): float32 [E], for rows and divisor of [E]."""
    n_rows, vocab = rows.shape[0], logits.shape[1]
    tiles = fit_tiles(tiles, vocab)
    n_chunks = pl.cdiv(vocab, tiles.chunk)
    high, norm = launch(
        functools.partial(normaliser_kernel, vocab=vocab, tiles=tiles, interpret=interpret),
        [((n_rows, n_chunks), jnp.float32)] * 2,
        (rows, divisor, *changes, logits),
        grid=(n_chunks, n_rows),
        name="sample_normaliser",
        warps=tiles.warps,
        interpret=interpret,
    )
    high = high / divisor[:, None]
    return jax.nn.logsumexp(high, axis=-1, b=norm)
