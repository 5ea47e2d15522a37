"""Two processes with two devices each run one engine; what tells them apart ends both."""

import json
import os
import socket
import subprocess
import sys

import pytest

from tests.conftest import COMPILE_FAST
from tests.sparsespec_jax.parallel.process import DEVICES

# In this order: after the last one, the first process' devices wait for those of the second.
SCENARIOS = ("tokens", "diverged", "missing", "stopped", "failing")


@pytest.fixture(scope="module")
def seen() -> list[dict]:
    """What each process saw, by scenario."""
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = free.getsockname()[1]
    env = os.environ | {
        "JAX_PLATFORMS": "cpu",
        "JAX_CPU_COLLECTIVES_IMPLEMENTATION": "gloo",
        "XLA_FLAGS": " ".join(
            [*COMPILE_FAST, f"--xla_force_host_platform_device_count={DEVICES // 2}"]
        ),
        "PYTHONPATH": os.pathsep.join([".", os.environ.get("PYTHONPATH", "")]),
    }
    command = [sys.executable, "-m", "tests.sparsespec_jax.parallel.process"]
    processes = [
        subprocess.Popen(
            [*command, str(number), "2", str(port), ",".join(SCENARIOS)],
            env=env,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for number in range(2)
    ]
    try:
        ended = [process.communicate(timeout=300) for process in processes]
    finally:
        for process in processes:
            process.kill()
    lines = [[line for line in out.splitlines() if line.startswith("{")] for out, _ in ended]
    assert all(lines), "\n".join(err[-3000:] for _, err in ended)
    return [json.loads(found[-1]) for found in lines]


def test_two_processes_emit_what_one_device_emits(seen, expected):
    first, second = (process["tokens"] for process in seen)
    assert first == second
    assert first["tokens"] == [entry["tokens"] for entry in expected]
    assert first["evicted"], "KV must have moved"
    assert first["drawn"][0] != first["drawn"][1], "requests without seeds draw their own"


def test_different_calls_end_both_with_the_step_named(seen):
    for process in seen:
        found = process["diverged"]
        assert found["reason"] == "error"
        assert found["error"].startswith("step 0: processes ")
        assert "have diverged" in found["error"]
        assert found["closed"] == "the engine is closed"


def test_a_call_that_one_process_does_not_make_ends_both(seen):
    for process in seen:
        assert process["missing"]["reason"] == "error"
        assert (
            "1 requests were submitted to the first process, but not to this"
            in (process["missing"]["error"])
        )


def test_closing_one_closes_both(seen):
    for process in seen:
        assert process["stopped"]["reason"] == "cancelled"
        assert process["stopped"]["closed"] == "the engine is closed"


def test_a_failure_of_one_ends_both(seen):
    first, second = (process["failing"] for process in seen)
    assert first["reason"] == second["reason"] == "error"
    assert second["error"] == "no memory left"
    assert first["error"] == (
        "another process has failed: process 1, step 6: MemoryError: no memory left"
    )
