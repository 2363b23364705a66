"""Spark's Python daemon, which imports this library once for all workers that it forks.

Spark starts it as `python -m dagster_unified.engine.daemon pyspark.worker`, with zips of pyspark and py4j ahead on the
path. Python compiles a zipped module in every process that imports it: half a second for each daemon, and more for each
worker. So where they are the copies that an installed pyspark carries of itself, what is installed is taken.
"""

from __future__ import annotations

import importlib
import os
import signal
import sys
import time
from pathlib import Path

_IMPORTED = (
    "dagster_unified.engine.streaming.processor",
    "dagster_unified.engine.streaming.worker",
    "dagster_unified.engine.worker",
)


def main(idle: float | None = None) -> None:
    """Fork workers until Spark ends this process, or until there was none for `idle` seconds."""
    sys.path[:] = without_zipped_copies(sys.path)
    for module in _IMPORTED:
        importlib.import_module(module)
    from pyspark import daemon

    if idle is not None:
        _end_after(idle)
    daemon.manager()


def without_zipped_copies(path: list[str]) -> list[str]:
    """Return a module search path without `<folder>/pyspark/python/lib/*.zip`, where `<folder>` is on it as well."""
    copies = {str(Path(folder) / "pyspark" / "python" / "lib") for folder in path}
    return [entry for entry in path if not (entry.endswith(".zip") and str(Path(entry).parent) in copies)]


def _end_after(idle: float) -> None:
    used = time.monotonic()

    def look(*_: object) -> None:
        nonlocal used
        if _has_children():
            used = time.monotonic()
        elif time.monotonic() - used >= idle:
            signal.raise_signal(signal.SIGTERM)  # which the daemon ends in good order at

    signal.signal(signal.SIGALRM, look)
    signal.setitimer(signal.ITIMER_REAL, idle / 4, idle / 4)  # workers do not inherit it


def _has_children() -> bool:
    try:
        os.waitpid(-1, os.WNOHANG)
    except ChildProcessError:
        return False
    return True


if __name__ == "__main__":
    main()
