"""Write the logits that `test_parity.py` compares with: transformers' own, in float32.

    python -m tests.sparsespec_jax.models.make_reference_logits

Needs torch and transformers. The checkpoints are not stored: they are made anew from
`tiny_models.py`, bit for bit.
"""

from __future__ import annotations

import tempfile
from pathlib import Path

import numpy as np

from tests.sparsespec_jax.models.tiny_models import CASES, REFERENCE, tokens, write_checkpoint


def transformers_logits(directory: Path, ids: np.ndarray) -> np.ndarray:
    """Float32 logits [batch, length, vocab] of a checkpoint directory."""
    import torch
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(
        directory, dtype=torch.float32, attn_implementation="eager"
    )
    with torch.no_grad():
        return model.eval()(torch.tensor(ids)).logits.numpy()


def main() -> None:
    logits = {}
    for name, config in CASES.items():
        with tempfile.TemporaryDirectory() as directory:
            path = write_checkpoint(Path(directory), config)
            logits[name] = transformers_logits(path, tokens(config))[:, 1::8].astype(np.float32)
    REFERENCE.parent.mkdir(exist_ok=True)
    np.savez_compressed(REFERENCE, **logits)
    print(f"{REFERENCE}: {len(logits)} models, {REFERENCE.stat().st_size:,} bytes")


if __name__ == "__main__":
    main()
