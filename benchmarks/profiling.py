"""What a trace of `jax.profiler` says about the device: which kernels took how long."""

from __future__ import annotations

import collections
import contextlib
import gzip
import json
import re
import statistics
from pathlib import Path

import jax


def traced_copies(directory: Path) -> contextlib.AbstractContextManager[None]:
    """A trace for `copy_rates`. Command buffers count as one kernel each: to see into them while an
    engine runs has ended in CUDA errors."""
    options = jax.profiler.ProfileOptions()
    options.python_tracer_level = options.host_tracer_level = 0
    options.advanced_configuration = {"gpu_enable_cupti_activity_graph_trace": True}
    return jax.profiler.trace(str(directory), profiler_options=options)


def copy_rates(directory: Path, least: int = 1 << 20) -> dict[str, float]:
    """GB/s of the copies of `least` bytes or more between host and device, by direction: medians.

    Of the one trace under `directory`.
    """
    rates = collections.defaultdict(list)
    for event in _events(directory):
        details = event.get("args", {}).get("memcpy_details", "")
        size = re.search(r"size:(\d+)", details)
        if event.get("ph") == "X" and size and int(size[1]) >= least and event["dur"]:
            rates[event["name"]].append(int(size[1]) / event["dur"] / 1e3)
    return {name: round(statistics.median(found), 1) for name, found in rates.items()}


def _events(directory: Path) -> list[dict]:
    (trace,) = directory.rglob("*.trace.json.gz")
    return json.loads(gzip.decompress(trace.read_bytes()))["traceEvents"]


def kernel_times(directory: Path, steps: int, most: int = 40) -> dict[str, float]:
    """Microseconds a step of the costliest kernels and, as `total`, of all of them.

    The one trace under `directory` covers `steps` steps. Kernels inside command buffers are not
    seen one by one, so trace with XLA_FLAGS=--xla_gpu_enable_command_buffer= (which makes the gaps
    between them larger than they are).
    """
    events = _events(directory)
    devices = {
        event["pid"]
        for event in events
        if event.get("name") == "process_name" and "GPU" in event["args"]["name"]
    }
    streams = {
        (event["pid"], event["tid"])
        for event in events
        if event.get("name") == "thread_name"
        and event["pid"] in devices
        and event["args"]["name"].startswith("Stream")
    }
    spent = collections.Counter()
    for event in events:
        if event.get("ph") == "X" and (event["pid"], event["tid"]) in streams:
            spent[re.sub(r"[_.]\d+$", "", event["name"])] += event["dur"] / steps
    table = {name: round(us, 1) for name, us in spent.most_common(most)}
    return table | {"total": round(spent.total(), 1)}
