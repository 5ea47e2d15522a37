"""Where there is no GPU, tests spend most of their time compiling: without LLVM's optimisations.

The CPU counts as eight devices there, for tests of tensor parallelism; the others use the first.
"""

import os
from pathlib import Path

if not Path("/proc/driver/nvidia").exists():
    flags = "--xla_backend_optimization_level=0", "--xla_force_host_platform_device_count=8"
    os.environ["XLA_FLAGS"] = " ".join([os.environ.get("XLA_FLAGS", ""), *flags]).strip()
