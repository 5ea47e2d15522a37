"""Convert a model to an Orbax or Hugging Face checkpoint.

    python -m sparsespec_jax.convert SOURCE DEST [--to orbax|hf] [--dtype bfloat16]

SOURCE is whatever `load_model` takes: a checkpoint directory of either kind, a GGUF file, a hub id.
"""

from __future__ import annotations

import argparse
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Literal

import jax

from sparsespec_jax.models.hub import CONFIG_FILES, TOKENIZER_FILES, WEIGHT_FILES
from sparsespec_jax.models.huggingface import copy_tokenizer, save_hf
from sparsespec_jax.models.loading import Dtype, open_checkpoint, read_params, resolve_dtype
from sparsespec_jax.models.orbax import save_orbax
from sparsespec_jax.models.tokenizer import Tokenizer
from sparsespec_jax.parallel.sharding import Placement


def convert(
    source: str | Path,
    destination: str | Path,
    *,
    to: Literal["orbax", "hf"] = "orbax",
    dtype: Dtype = "auto",
    overwrite: bool = False,
    progress: bool = True,
) -> None:
    """Write the model at `source`, with its tokenizer, to the directory `destination`.

    With `overwrite`, a checkpoint that is already there is replaced; other files are left alone.
    """
    destination = Path(destination)
    if destination.exists() and not destination.is_dir():
        raise ValueError(f"{destination} is a file; the destination must be a directory")
    if destination.exists() and any(destination.iterdir()) and not overwrite:
        raise ValueError(f"{destination} is not empty; pass --overwrite to replace what is there")
    checkpoint = open_checkpoint(source)
    if destination.exists() and destination.samefile(checkpoint.path):
        raise ValueError("source and destination are the same directory")
    checkpoint.open()
    host = Placement.single_device(jax.local_devices(backend="cpu")[0])
    params = read_params(
        checkpoint, resolve_dtype(dtype, checkpoint), placement=host, progress=progress
    )
    _remove_checkpoint(destination)
    configs = checkpoint.config, destination
    if to == "orbax":
        save_orbax(params, *configs, generation_config=checkpoint.generation_config)
    else:
        save_hf(params, *configs, generation_config=checkpoint.generation_config, progress=progress)
    if checkpoint.path.is_dir():
        copy_tokenizer(checkpoint.path, destination)
    else:
        Tokenizer.load(checkpoint.path).save(destination)


def _remove_checkpoint(directory: Path) -> None:
    shutil.rmtree(directory / "params", ignore_errors=True)
    for pattern in (*CONFIG_FILES, *TOKENIZER_FILES, *WEIGHT_FILES):
        for path in directory.glob(pattern):
            path.unlink()


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        prog="python -m sparsespec_jax.convert",
        description="Convert a model to an Orbax or Hugging Face checkpoint.",
    )
    parser.add_argument("source", help="checkpoint directory, GGUF file or Hugging Face hub id")
    parser.add_argument("destination", help="directory to write")
    parser.add_argument("--to", choices=("orbax", "hf"), default="orbax", help="default: orbax")
    parser.add_argument(
        "--dtype",
        choices=Dtype.__args__,
        default="auto",
        help="of the parameters; auto (the default) keeps the source's",
    )
    parser.add_argument(
        "--overwrite", action="store_true", help="replace a checkpoint that is already there"
    )
    parser.add_argument("--quiet", action="store_true", help="no progress bars")
    options = parser.parse_args(arguments)
    try:
        convert(
            options.source,
            options.destination,
            to=options.to,
            dtype=options.dtype,
            overwrite=options.overwrite,
            progress=not options.quiet,
        )
    except (ValueError, OSError, ImportError) as error:
        sys.exit(f"error: {error}")


if __name__ == "__main__":
    main()
