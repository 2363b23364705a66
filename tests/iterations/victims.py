"""Processes to kill from within a function that Spark runs."""

import os
import signal
import time
from pathlib import Path


def kill(victim: str) -> None:
    """Kill the `worker` that this runs in, the `jvm` above it, or the `step` of Dagster's above that."""
    os.kill(_process(victim), signal.SIGKILL)
    time.sleep(20)  # this worker may outlive it


def _process(victim: str) -> int:
    found = os.getpid()
    if victim != "worker":
        while Path(f"/proc/{found}/comm").read_text().strip() != "java":
            found = _parent(found)
    return _parent(found) if victim == "step" else found


def _parent(process: int) -> int:
    return int(Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[1])
