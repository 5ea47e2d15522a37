"""The scores of the rows that verify in one step, for one list or one a KV head."""

from dataclasses import dataclass

import jax.numpy as jnp
import numpy as np
from jax import Array

from pallas_kernels.shapes.arrays import ints, normal


@dataclass(frozen=True)
class Select:
    """Scores of all layers of the rows that verified in one step."""

    n_layers: int
    n_rows: int
    context: int
    n_selected: int
    lists: int = 1
    dtype: str = "float16"
    k: int | None = None

    def bytes(self) -> int:
        """Scores once, lists once."""
        itemsize = jnp.dtype(self.dtype).itemsize
        lists = self.n_layers * self.n_rows * self.lists
        return lists * (self.context * itemsize + self.n_selected * 4)

    def inputs(self) -> tuple[Array, Array, Array]:
        """Scores like those of attention: most are tiny, a few hold nearly all the mass."""
        shape = (self.n_layers, self.n_rows, self.lists, self.context)
        scores = jnp.exp(4 * normal(shape, "float32", 0) - 12).astype(self.dtype)
        rows = np.ones(self.n_rows)
        return scores, ints(rows * self.context), ints(rows * self.n_selected)


H200 = {
    "shared": Select(36, 15, context=8192, n_selected=410),
    "for each head": Select(36, 15, context=8192, n_selected=410, lists=8),
}

TINY = {"256": Select(2, 3, context=256, n_selected=12)}
