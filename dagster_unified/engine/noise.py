"""Keeps Spark's own chatter from the terminal.

That is its launcher's lines, and its Python workers' notes on each step.

Everything else goes on to standard error: what functions of a pipeline print in a local worker, and what Spark reports
as an error.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterable, Mapping
from threading import Thread

_NOISE = re.compile(
    rb"WARNING: Using incubator modules: |"
    rb"Setting default log level to |To adjust logging level use sc\.setLogLevel|Setting Spark log level to |Using"
    rb" Spark's default log4j profile|"
    rb"(Starting )?Streaming TransformWithState\w* Python worker"
)
_FAILURE = re.compile(rb"PySpark worker failed with exception:")
"""Comes before a traceback. What failed is raised as an error that says it in one sentence."""


def launch(settings: Mapping[str, str]) -> None:
    """Start the JVM of this process, with its standard error filtered. Nothing happens where one runs already."""
    from pyspark import SparkConf, SparkContext
    from pyspark.java_gateway import launch_gateway

    if SparkContext._gateway is not None:
        return
    conf = SparkConf(loadDefaults=False).setAll(list(settings.items()))
    reader, writer = os.pipe()
    Thread(target=_pass_on, args=(reader,), name="standard error of Spark", daemon=True).start()
    try:
        gateway = launch_gateway(conf, {"stderr": writer})  # type: ignore[no-untyped-call]
    finally:
        os.close(writer)
    SparkContext._ensure_initialized(gateway=gateway)


def _pass_on(reader: int) -> None:
    with open(reader, "rb", buffering=0) as lines:
        without_noise(iter(lines.readline, b""), lambda line: os.write(2, line))


def without_noise(lines: Iterable[bytes], write: Callable[[bytes], object]) -> None:
    """Write the lines that are of use to someone."""
    empty, failed = (
        False,
        False,
    )  # whether an empty line that follows a note, and the traceback of a worker, are left out
    for line in lines:
        if _NOISE.match(line):
            empty = True
        elif _FAILURE.match(line):
            failed = True
        elif failed:
            failed = bool(line.strip())
        elif empty and not line.strip():
            empty = False
        else:
            empty = False
            write(line)
