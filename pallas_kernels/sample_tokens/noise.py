"""Random numbers as a pure function of (seed, position, stream, token id).

Every number is a hash of its own coordinates: no state, no order, no shape. The same coordinates
give the same bits in any batch, for any slice or shard of the vocabulary, in XLA and inside a
kernel (only 32-bit add, multiply, xor and shift are used).

A row's 64-bit key is Threefry-2x32 with 20 rounds (Salmon et al., "Parallel random numbers: as easy
as 1, 2, 3", SC 2011) of (position, stream) under the seed. Threefry per vocabulary entry would cost
a hundred operations each, so entries mix their id with the two key words by two rounds of a 32-bit
finaliser (lowbias32: Wellons, "Prospecting for hash functions", 2018).
"""

import jax.numpy as jnp
import numpy as np
from jax import Array, lax

SAMPLE_STREAM = 0  # Gumbel noise that draft and target share
ACCEPT_STREAM = 1  # uniforms of rejection verification
RESIDUAL_STREAM = 2  # Gumbel noise of the token that rejection verification adds

_ROTATIONS = ((13, 15, 26, 6), (17, 29, 16, 24))
_PARITY = np.uint32(0x1BD11BDA)


def gumbel_noise(
    seed: Array,
    position: Array,
    vocab_size: int,
    *,
    vocab_start: int | Array = 0,
    stream: int = SAMPLE_STREAM,
) -> Array:
    """Standard Gumbel noise of token ids vocab_start .. vocab_start + vocab_size - 1.

    Args:
      seed: uint32 [S, 2].
      position: int32 [S]; position of the token being sampled.
      vocab_size: how many ids.
      vocab_start: first id, for a shard of the vocabulary.
      stream: which of the independent noises of this (seed, position).

    Returns:
      float32 [S, vocab_size], all finite.
    """
    key0, key1 = row_key(seed, position, stream)
    start = jnp.asarray(vocab_start).astype(jnp.uint32)
    ids = start + lax.broadcasted_iota(jnp.uint32, (1, vocab_size), 1)
    return gumbel(token_bits(ids, key0[:, None], key1[:, None]))


def uniform_noise(seed: Array, position: Array, stream: int = ACCEPT_STREAM) -> Array:
    """A uniform number in (0, 1) per row: seed uint32 [S, 2], position int32 [S] -> float32 [S]."""
    return unit(row_key(seed, position, stream)[0])


def row_key(seed: Array, position: Array, stream: int) -> tuple[Array, Array]:
    """The two key words of each row: seed uint32 [S, 2], position int32 [S] -> 2 x uint32 [S]."""
    counter = position.astype(jnp.uint32), jnp.full(position.shape, stream, jnp.uint32)
    return threefry2x32((seed[:, 0], seed[:, 1]), counter)


def threefry2x32(key: tuple[Array, Array], counter: tuple[Array, Array]) -> tuple[Array, Array]:
    """Threefry-2x32-20, elementwise over uint32 arrays of one shape."""
    keys = (*key, key[0] ^ key[1] ^ _PARITY)
    x0, x1 = counter[0] + keys[0], counter[1] + keys[1]
    for block in range(5):
        for rotation in _ROTATIONS[block % 2]:
            x0 = x0 + x1
            x1 = ((x1 << np.uint32(rotation)) | (x1 >> np.uint32(32 - rotation))) ^ x0
        x0 = x0 + keys[(block + 1) % 3]
        x1 = x1 + keys[(block + 2) % 3] + np.uint32(block + 1)
    return x0, x1


def token_bits(ids: Array, key0: Array, key1: Array) -> Array:
    """A hash of token ids uint32 under a row's two key words: mix(mix(ids ^ key0) ^ key1).

    The fold that ends the inner `mix` and the one that starts the outer undo each other.
    """
    return fold(unfolded_bits(fold(ids), fold(key0), fold(key1)))


def unfolded_bits(ids: Array, key0: Array, key1: Array) -> Array:
    """What `token_bits` folds, of folded arguments: they differ by less than 2**-16 of either."""
    return _scramble(_scramble(ids ^ key0) ^ key1)


def mix(bits: Array) -> Array:
    """lowbias32: a bijection of uint32 in which every input bit flips every output bit evenly."""
    return fold(_scramble(fold(bits)))


def fold(bits: Array) -> Array:
    """Its own inverse; fold(a ^ b) is fold(a) ^ fold(b)."""
    return bits ^ (bits >> np.uint32(16))


def _scramble(bits: Array) -> Array:
    bits = bits * np.uint32(0x7FEB352D)
    return (bits ^ (bits >> np.uint32(15))) * np.uint32(0x846CA68B)


def unit(bits: Array) -> Array:
    """uint32 -> float32 strictly inside (0, 1), all 32 bits resolved near 0."""
    fraction = (bits.astype(jnp.float32) + np.float32(0.5)) * np.float32(2.0**-32)
    return jnp.minimum(fraction, np.float32(1.0 - 2.0**-24))  # rounding may reach 1


def gumbel(bits: Array) -> Array:
    """uint32 -> standard Gumbel float32.

    The largest of V Gumbels decides, and it comes from the smallest exponential. `unit` resolves
    2**-32 there; -log(uniform) would resolve 2**-24 and flatten the tail of a large vocabulary.
    """
    exponential = -jnp.log1p(-unit(bits))
    return -jnp.log(exponential)
