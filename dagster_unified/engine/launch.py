"""What Spark's JVM and Python processes start with: the installed pyspark, without zipped copies or chatter."""

from __future__ import annotations

import importlib.util
import os
import re
import shutil
import site
import sys
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from hashlib import sha256
from pathlib import Path
from socketserver import BaseServer
from threading import Thread
from typing import Any

VARIABLE = "SPARK_HOME"

_ZIPPED = "python"
"""The folder of the installed pyspark with the zips."""


@contextmanager
def without_zips(master: str, config: Mapping[str, str]) -> Iterator[None]:
    """Let the JVM of a session, or of a Connect server, that starts in this context have a home without the zips.

    Nothing changes where the zips are needed: on YARN, which ships them, with a Spark of one's own in SPARK_HOME, and
    where Spark's Python processes may have another interpreter than this one.
    """
    home = None if master.startswith("yarn") or not _is_interpreter_of(config) else _home()
    if home is None:
        yield
        return
    with inherited(VARIABLE, str(home)):
        yield


@contextmanager
def inherited(name: str, value: str) -> Iterator[None]:
    """Give a variable of the environment to the processes that are started in this context."""
    before = os.environ.get(name)
    os.environ[name] = value
    try:
        yield
    finally:
        if before is None:
            del os.environ[name]
        else:
            os.environ[name] = before


def _is_interpreter_of(config: Mapping[str, str]) -> bool:
    """Return whether Spark's local Python processes run the interpreter of this environment."""
    named = config.get("spark.pyspark.python") or os.environ.get("PYSPARK_PYTHON", "python3")
    program = shutil.which(named)
    return program is not None and Path(program).parent == Path(sys.executable).parent


def _home() -> Path | None:
    """Return Spark's home, made if needed; None where pyspark is not installed in this environment."""
    spec = importlib.util.find_spec("pyspark")
    if spec is None or spec.origin is None:
        return None
    package = Path(spec.origin).parent
    configured = os.environ.get(VARIABLE)
    is_configured = configured is not None and os.path.realpath(configured) != os.path.realpath(package)
    if is_configured or str(package.parent) not in site.getsitepackages() or not (package / _ZIPPED / "lib").is_dir():
        return None
    home = _cache() / f"spark-{sha256(os.fsencode(package)).hexdigest()[:16]}"
    with suppress(OSError):  # of a home folder that nobody may write to: the zips are slower, and do as well
        home.mkdir(parents=True, exist_ok=True)
        for entry in package.iterdir():
            if entry.is_dir() and entry.name not in (_ZIPPED, "__pycache__") and not (entry / "__init__.py").exists():
                with suppress(FileExistsError):
                    (home / entry.name).symlink_to(entry)
        return home
    return None


def _cache() -> Path:
    """Return this user's folder for files that can be made again."""
    return Path(os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")) / "dagster-unified"


_NOISE = re.compile(
    rb"WARNING: Using incubator modules: |"
    rb"Setting default log level to |To adjust logging level use sc\.setLogLevel|Setting Spark log level to |Using"
    rb" Spark's default log4j profile|"
    rb"(Starting )?Streaming TransformWithState\w* Python worker"
)
_FAILURE = re.compile(rb"PySpark worker failed with exception:")
"""Comes before a traceback. What failed is raised as an error that says it in one sentence."""

_TRACEBACK = b"Traceback (most recent call last):"
_CHAINED = b"During handling of the above exception"
_FRAME = re.compile(rb'  File "')
_SPARKS = re.compile(rb'  File "[^"]*([/\\]pyspark[/\\]|python_streaming_source_runner\.py)')
"""A frame of Spark's own Python, such as that of its process for a Python source."""

_CLOSED = re.compile(rb"(ConnectionResetError|BrokenPipeError): |EOFError(: |$)")
"""How a Python process of Spark's ends, now and then, where the query is over that it was for."""


_PANDAS = "PySpark does not yet fully support pandas"
"""How PySpark warns of a new pandas, at every look at it; nothing here gives it to Spark."""

_WARNINGS = "PYTHONWARNINGS"


@contextmanager
def without_pandas_warnings() -> Iterator[None]:
    """Start the JVM of a session, or of a Connect server, in this context: its Python processes do not warn of pandas.

    This one does not from now on.
    """
    warnings.filterwarnings("ignore", message=_PANDAS)
    with inherited(_WARNINGS, ",".join(filter(None, (os.environ.get(_WARNINGS), f"ignore:{_PANDAS}")))):
        yield


def start_jvm(settings: Mapping[str, str]) -> None:
    """Start the JVM of this process, with its standard error filtered. Nothing happens where one runs already."""
    from pyspark import SparkConf, SparkContext
    from pyspark.java_gateway import launch_gateway

    if SparkContext._gateway is not None:
        return
    conf = SparkConf(loadDefaults=False).setAll(list(settings.items()))
    reader, writer = os.pipe()
    Thread(target=_pass_on, args=(reader,), name="standard error of Spark", daemon=True).start()
    try:
        with without_pandas_warnings():
            gateway = launch_gateway(conf, {"stderr": writer})  # type: ignore[no-untyped-call]
    finally:
        os.close(writer)
    SparkContext._ensure_initialized(gateway=gateway)


def ignore_closed(server: BaseServer) -> None:
    """Print no traceback where the ending JVM closes the connection by which it tells of accumulators."""
    print_error = server.handle_error

    def handle_error(request: Any, client_address: Any) -> None:
        if not isinstance(sys.exc_info()[1], (EOFError, ConnectionError)):
            print_error(request, client_address)

    server.handle_error = handle_error  # type: ignore[method-assign]


def _pass_on(reader: int) -> None:
    with open(reader, "rb", buffering=0) as lines:
        without_noise(iter(lines.readline, b""), lambda line: os.write(2, line))


def without_noise(lines: Iterable[bytes], write: Callable[[bytes], object]) -> None:
    """Write the lines that are useful to a person."""
    empty = failed = False  # whether an empty line that follows a note, and the traceback of a worker, are left out
    for line in _without_closed_sources(lines):
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


def _without_closed_sources(lines: Iterable[bytes]) -> Iterator[bytes]:
    """Yield the lines without tracebacks of Spark's processes whose sockets were closed.

    A traceback is held back until it is complete.
    """
    traceback: list[bytes] = []
    dropped = False
    for line in lines:
        if not traceback and not line.startswith(_TRACEBACK):
            if not dropped or (line.strip() and not line.startswith(_CHAINED)):
                dropped = False
                yield line
            continue
        traceback.append(line)
        if line.startswith((_TRACEBACK, b" ", b"\n")):
            continue
        frames = [line_held for line_held in traceback if _FRAME.match(line_held)]
        dropped = bool(_CLOSED.match(line)) and bool(frames) and bool(_SPARKS.match(frames[-1]))
        if not dropped:
            yield from traceback
        traceback = []
    yield from traceback
