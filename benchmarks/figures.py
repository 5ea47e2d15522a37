"""The figures of the documents, drawn from `benchmarks/results`.

pip install -e '.[notebooks]'
python -m benchmarks.figures
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import matplotlib

matplotlib.use("svg")
matplotlib.rcParams["svg.hashsalt"] = "sparsespec"  # the same file every time
import matplotlib.pyplot as plt  # noqa: E402
import numpy as np  # noqa: E402

RESULTS = Path(__file__).parent / "results"
FIGURES = Path(__file__).parents[1] / "docs" / "figures"


def rows(name: str) -> Iterator[dict]:
    with (RESULTS / name).open() as file:
        yield from map(json.loads, file)


def crossover() -> plt.Figure:
    """Speedup over plain decoding by batch and context: the best number of drafts, and `auto`."""
    cells = list(rows("crossover_h200.jsonl"))
    shapes = sorted({cell["shape"] for cell in cells})
    figure, axes = plt.subplots(
        len(shapes), 2, figsize=(9, 3.2 * len(shapes)), squeeze=False, layout="constrained"
    )
    for shape, (fixed, auto) in zip(shapes, axes, strict=True):
        here = [cell for cell in cells if cell["shape"] == shape]
        _heat_map(fixed, here, f"{shape}: 8 drafts / plain", lambda cell: ("8", _rate(cell, "8")))
        _heat_map(
            auto,
            here,
            f"{shape}: auto / plain (drafts)",
            lambda cell: (cell["auto"]["k"], cell["auto"]["tokens_per_second"]),
        )
    return figure


def _rate(cell: dict, k: str) -> float:
    return cell["tokens_per_second"][k]


def _heat_map(axis: plt.Axes, cells: list[dict], title: str, of) -> None:
    batches = sorted({cell["batch"] for cell in cells})
    contexts = sorted({cell["context"] for cell in cells})
    speedup = np.full((len(contexts), len(batches)), np.nan)
    for cell in cells:
        k, rate = of(cell)
        at = contexts.index(cell["context"]), batches.index(cell["batch"])
        speedup[at] = rate / _rate(cell, "0")
        axis.text(*reversed(at), f"{speedup[at]:.2f}\n({k})", ha="center", va="center", size=8)
    axis.imshow(np.log2(speedup), cmap="PiYG", vmin=-1.5, vmax=1.5, origin="lower", aspect="auto")
    axis.set_xticks(range(len(batches)), batches)
    axis.set_yticks(range(len(contexts)), contexts)
    axis.set(title=title, xlabel="batch", ylabel="context")


def pool_use() -> plt.Figure:
    """What the KV pool holds over time, under each policy."""
    runs = {
        row["setting"]: row
        for row in rows("serving_h200.jsonl")
        if not row.get("window") and row["setting"] in ("balanced", "conservative", "recompute")
    }
    figure, axes = plt.subplots(1, 2, figsize=(9, 3.2), layout="constrained")
    names = {"balanced": "aggressive", "conservative": "conservative", "recompute": "recompute"}
    for setting, row in runs.items():
        seconds, used, away, running, _ = np.array(row["pool_use"]).T
        (line,) = axes[0].plot(seconds, used / row["pool_tokens"], label=names[setting])
        if away.any():
            axes[0].plot(seconds, away / row["pool_tokens"], ":", color=line.get_color())
        axes[1].plot(seconds, running, label=names[setting])
    axes[0].set(xlabel="seconds", ylabel="share of the pool\n(dotted: in host memory)")
    axes[1].set(xlabel="seconds", ylabel="requests that run")
    axes[1].legend()
    return figure


def main() -> None:
    FIGURES.mkdir(exist_ok=True)
    for draw in (crossover, pool_use):
        draw().savefig(FIGURES / f"{draw.__name__}.svg", metadata={"Date": None})


if __name__ == "__main__":
    main()
