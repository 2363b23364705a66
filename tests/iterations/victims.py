"""Processes to kill from within a function that Spark runs."""

import os
import signal
import time
from contextlib import suppress
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


class Trap:
    """A file that has the first worker killed that meets it."""

    def __init__(self, file: Path) -> None:
        self.file = file
        self.is_set = False

    def set(self) -> None:
        """From now on it kills, once."""
        self.is_set = True
        self.file.touch()

    @property
    def has_killed(self) -> bool:
        return self.is_set and not self.file.exists()

    def meet(self) -> None:
        """For a function that a worker runs."""
        with suppress(FileNotFoundError):
            self.file.unlink()
            kill("worker")
