"""What a trace of `jax.profiler` says about the device: which kernels took how long."""

from __future__ import annotations

import collections
import gzip
import json
import re
from pathlib import Path


def kernel_times(directory: Path, steps: int, most: int = 40) -> dict[str, float]:
    """Microseconds a step of the costliest kernels and, as `total`, of all of them.

    The one trace under `directory` covers `steps` steps. Kernels inside command buffers are not
    seen one by one, so trace with XLA_FLAGS=--xla_gpu_enable_command_buffer= (which makes the gaps
    between them larger than they are).
    """
    (trace,) = directory.rglob("*.trace.json.gz")
    events = json.loads(gzip.decompress(trace.read_bytes()))["traceEvents"]
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
