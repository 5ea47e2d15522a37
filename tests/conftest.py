"""Where there is no GPU, tests spend most of their time compiling: without LLVM's optimisations."""

import os
from pathlib import Path

if not Path("/proc/driver/nvidia").exists():
    flags = os.environ.get("XLA_FLAGS", ""), "--xla_backend_optimization_level=0"
    os.environ["XLA_FLAGS"] = " ".join(flags).strip()
