"""Spark's home for the processes of a session: the installed pyspark, without the zipped copies of it.

Spark has its Python processes import pyspark from `python/lib/pyspark.zip` before all else. Python keeps no bytecode of
what is in a zip, so each process compiles pyspark anew: two seconds of CPU, of which Spark waits ten for one that
belongs to a stream. So the JVM is started with a home of links that has all but these zips, and its Python processes
import pyspark from the environment that it is installed in.
"""

from __future__ import annotations

import importlib.util
import os
import shutil
import site
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from hashlib import sha256
from pathlib import Path

VARIABLE = "SPARK_HOME"

_ZIPPED = "python"
"""The folder of the installed pyspark with the zips."""


@contextmanager
def without_zips(master: str, config: Mapping[str, str]) -> Iterator[None]:
    """Start the JVM of a session, or of a Connect server, in this context, and it has a home without the zips.

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
    """Whether Spark's Python processes on this machine run the interpreter of this one's environment."""
    named = config.get("spark.pyspark.python") or os.environ.get("PYSPARK_PYTHON", "python3")
    program = shutil.which(named)
    return program is not None and Path(program).parent == Path(sys.executable).parent


def _home() -> Path | None:
    """The home, made where there is none yet; None where pyspark is not installed in this environment."""
    spec = importlib.util.find_spec("pyspark")
    if spec is None or spec.origin is None:
        return None
    package = Path(spec.origin).parent
    own = os.environ.get(VARIABLE)
    is_own = own is not None and os.path.realpath(own) != os.path.realpath(package)
    if is_own or str(package.parent) not in site.getsitepackages() or not (package / _ZIPPED / "lib").is_dir():
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
    """This user's folder for what can be made again."""
    return Path(os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")) / "dagster-unified"
