"""Machine code for an NVIDIA H200 on a machine without a GPU: XLA's CUDA plugin, unpacked.

The plugin's wheel (125 MB, of the version of jax that runs the tests) is downloaded once, and so is
that with the runtime of Mosaic GPU's kernels (8 MB); a test that asks for one is skipped offline.
Compilation runs in a process of its own: jax looks for plugins once, when it starts.
"""

from __future__ import annotations

import json
import os
import platform
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

import jax
import pytest

_PLUGIN = "jax-cuda13-pjrt", "jax_plugins/xla_cuda13/xla_cuda_plugin.so"
_MOSAIC = "jax-cuda13-plugin", "jax_cuda13_plugin/libmosaic_gpu_runtime.so"
_H200 = """
gpu_device_info {
  threads_per_block_limit: 1024 threads_per_warp: 32 shared_memory_per_block: 49152
  shared_memory_per_core: 233472 threads_per_core_limit: 2048 core_count: 132 fpus_per_core: 128
  block_dim_limit_x: 2147483647 block_dim_limit_y: 65535 block_dim_limit_z: 65535
  memory_bandwidth: 4800000000000 l2_cache_size: 62914560 clock_rate_ghz: 1.98
  device_memory_size: 150000000000 shared_memory_per_block_optin: 232448
  cuda_compute_capability { major: 9 }
  registers_per_core_limit: 65536 registers_per_block_limit: 65536
}
platform_name: "CUDA" dnn_version_info { major: 9 minor: 10 } runtime_version { major: 13 }
device_description_str: "NVIDIA H200"
"""
_PROLOGUE = """
import json, sys, warnings
warnings.filterwarnings("ignore", "The Pallas Triton backend is deprecated")
import jax
from jax.experimental import topologies
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from pallas_kernels import gpus
from pallas_kernels.lowering import lower_for_cuda

target = {"topology": f"1x1x{sys.argv[2]}", "target_config": sys.argv[1]}
topology = topologies.get_topology_desc("h200", "cuda", **target)
replicated = NamedSharding(Mesh(topology.devices, ("x",)), PartitionSpec())

def temp_bytes(f, *args, **kwargs):
    \"\"\"Temporary memory of `f`, compiled; raises where it needs more than the GPU has.\"\"\"
    def on_gpu(x):
        return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=replicated)
    args, kwargs = jax.tree.map(on_gpu, (args, kwargs))
    compiled = lower_for_cuda(f, *args, **kwargs).compile()
    return compiled.memory_analysis().temp_size_in_bytes
"""


def compile_for_h200(program: str, *, mosaic: bool = False, devices: int = 1) -> dict:
    """What a program says that calls `temp_bytes` and leaves a dictionary named `result`.

    `mosaic` says that it compiles kernels of Mosaic GPU, as `matmul`'s. `topology` has `devices`;
    `temp_bytes` is for one.
    """
    plugin = _library(*_PLUGIN)
    env = {name: value for name, value in os.environ.items() if name != "XLA_FLAGS"} | {
        "JAX_PLATFORMS": "cpu",
        "PJRT_NAMES_AND_LIBRARY_PATHS": f"cuda:{plugin}",
        "PYTHONPATH": os.pathsep.join([".", "tests/pallas_kernels"]),
    }
    if mosaic:
        env["LD_PRELOAD"] = str(_library(*_MOSAIC))
    code = f"{_PROLOGUE}\n{program}\nprint(json.dumps(result))"
    command = [sys.executable, "-c", code, _H200, str(devices)]
    done = subprocess.run(command, env=env, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-4000:]
    return json.loads(done.stdout.splitlines()[-1])


def _library(package: str, member: str) -> Path:
    """`member` of the wheel of `package`, which has the version of jax."""
    if (platform.system(), platform.machine()) != ("Linux", "x86_64"):
        pytest.skip("XLA's CUDA plugin is for Linux on x86-64")
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "sparsespec-jax"
    name = Path(member)
    target = cache / f"{name.stem}-{jax.__version__}{name.suffix}"
    if not target.exists():
        cache.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=cache) as directory:
            _download(Path(directory), package, member).replace(target)
    return target


def _download(directory: Path, package: str, member: str) -> Path:
    wheel = f"{package}=={jax.__version__}"
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps"]
    command += ["--only-binary", ":all:", "--dest", str(directory), wheel]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        reason = (done.stderr.strip().splitlines() or ["no message"])[-1]
        pytest.skip(f"{wheel} cannot be downloaded: {reason}")
    (path,) = directory.glob("*.whl")
    with zipfile.ZipFile(path) as archive:
        return Path(archive.extract(member, directory))
