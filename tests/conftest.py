"""Where there is no GPU, tests spend most of their time compiling: without LLVM's optimisations.

Nor with XLA's newer emitters of fused operations where it has others, which take half the time.
The CPU counts as eight devices there, for tests of tensor parallelism; the others use the first.
"""

import os
from importlib.metadata import version
from pathlib import Path

COMPILE_FAST = ["--xla_backend_optimization_level=0"]
if version("jaxlib").startswith("0.10."):  # later ones end at a flag that they do not know
    COMPILE_FAST.append("--xla_cpu_use_fusion_emitters=false")

if not Path("/proc/driver/nvidia").exists():
    flags = *COMPILE_FAST, "--xla_force_host_platform_device_count=8"
    os.environ["XLA_FLAGS"] = " ".join([os.environ.get("XLA_FLAGS", ""), *flags]).strip()
