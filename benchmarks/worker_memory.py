"""How much memory Spark's Python workers of this process have, from /proc."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from threading import Event, Thread

EVERY = 0.1
"""Seconds between two looks."""


@dataclass
class Peak:
    """The most that one worker had, in megabytes: what it shares with others counts in part (PSS)."""

    megabytes: float = 0.0


@contextmanager
def peak_of_workers() -> Iterator[Peak]:
    """Looks at the workers meanwhile."""
    peak, ended = Peak(), Event()

    def look() -> None:
        while not ended.wait(EVERY):
            peak.megabytes = max([peak.megabytes, *map(_megabytes, _workers())])

    thread = Thread(target=look, daemon=True, name="memory of workers")
    thread.start()
    try:
        yield peak
    finally:
        ended.set()
        thread.join()


def largest_worker() -> float:
    """The megabytes of the worker that has most just now."""
    return max(map(_megabytes, _workers()), default=0.0)


def _workers() -> list[int]:
    """Python processes among the descendants of this one, which are below its JVM: their daemon, and workers."""
    parents: dict[int, int] = {}
    for folder in Path("/proc").iterdir():
        if folder.name.isdigit():
            with suppress(OSError):
                parents[int(folder.name)] = int((folder / "stat").read_text().rpartition(")")[2].split()[1])
    found = {os.getpid()}
    while more := {child for child, parent in parents.items() if parent in found} - found:
        found |= more
    return [one for one in found - {os.getpid()} if _is_worker(one)]


def _is_worker(process: int) -> bool:
    with suppress(OSError):
        program, *arguments = Path(f"/proc/{process}/cmdline").read_bytes().split(b"\0")
        return b"python" in program and any(b"pyspark" in one for one in arguments[1:3])  # the JVM names it as well
    return False


def _megabytes(process: int) -> float:
    with suppress(OSError):
        for line in Path(f"/proc/{process}/smaps_rollup").read_text().splitlines():
            if line.startswith("Pss:"):
                return int(line.split()[1]) / 1024
    return 0.0
