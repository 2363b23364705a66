"""What the workers of a cluster run in: the environment that is shipped to them, compared with the driver's."""

from __future__ import annotations

import contextlib
import functools
import os
import re
import socket
import sys
from collections.abc import Mapping
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from dagster_unified.by_value import install_for_workers
from dagster_unified.errors import ConfigurationError, MissingRequirementError, UnifiedError

if TYPE_CHECKING:
    from pyspark import SparkContext
    from pyspark.sql import SparkSession

FOLDER = "environment"
"""Where an executor has it, in its own folder."""

INTERPRETER = "python3"

_PACKED = (".tar.gz", ".tgz")
"""Of other archives Spark loses who may run a file, and it refuses links that lead out of them."""

_PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"


def shipping(path: str, master: str, remote: str | None, config: Mapping[str, str]) -> dict[str, str]:
    """Return the settings by which the executors of a session, or of a Connect server, that is about to start use it.

    Raises `ConfigurationError` for what is no archive, and for a session whose workers Spark does not start on a
    cluster.
    """
    if remote is not None or master.startswith("local"):
        whose = (
            f"the Spark Connect server's at {remote}" if remote is not None else f"those of {master} on this machine"
        )
        raise ConfigurationError(
            f"environment={path!r} is for workers that Spark starts on a cluster for this resource, and its workers are"
            f" {whose}; leave it out, or give a master such as spark://host:7077, by itself or with connect"
        )
    if not path.endswith(_PACKED):
        raise ConfigurationError(
            f"environment={path!r} is no .tar.gz file; pack the folder of a virtual environment with"
            " tar -C FOLDER -czf environment.tar.gz ."
        )
    if "://" not in path and not Path(path).is_file():
        raise ConfigurationError(f"environment={path!r}: there is no such file in {Path.cwd()}")
    os.environ["PYSPARK_PYTHON"] = INTERPRETER
    driver_folder, others = os.path.dirname(sys.executable), os.environ.get("PATH", "")
    if not others.startswith(driver_folder):
        os.environ["PATH"] = (
            f"{driver_folder}:{others}"  # the JVM that is about to start runs the driver's Python workers by it
        )
    path_before = config.get("spark.executorEnv.PATH", _PATH)
    # of a Connect session, workers start in a folder of its own within the executor's
    archive_path = f"./{FOLDER}/bin:../{FOLDER}/bin"
    return {
        "spark.archives": ",".join(filter(None, (config.get("spark.archives"), f"{path}#{FOLDER}"))),
        "spark.executorEnv.PATH": f"{archive_path}:{path_before}",
    }


PACKAGES = ("pyspark", "pyarrow", "msgspec", "dagster-unified")
PYTHON = "Python"

PROBE = f"""
import glob, json, os, socket, sys
home = os.environ.get("SPARK_HOME", "")
sys.path += [home + "/python", *glob.glob(home + "/python/lib/*.zip")]
versions = {{"{PYTHON}": "%d.%d" % sys.version_info[:2]}}
for name in {PACKAGES!r}:
    try:
        from importlib import metadata
        versions[name] = metadata.version(name)
    except Exception:
        pass
if "pyspark" not in versions:
    try:
        from pyspark.version import __version__
        versions["pyspark"] = __version__
    except ImportError:
        pass
print(json.dumps({{"host": socket.gethostname(), "versions": versions}}))
"""

_checked: dict[str, set[str]] = {}
"""The executors that have been probed, by application."""


class Answer(msgspec.Struct, frozen=True):
    """The versions that one executor's interpreter has."""

    host: str
    versions: dict[str, str]


def check_workers(spark: SparkSession) -> None:
    """Raise `MissingRequirementError` where a worker lacks what the driver has; asks each executor once.

    Where the session ships Python files or archives nobody is asked: what tasks then have, only a task knows.
    """
    context = spark.sparkContext
    if (context.master or "").startswith("local"):
        return
    if _ships_python(context):
        return
    known = _checked.setdefault(context.applicationId, set())
    while not (executors := _executors(spark)) <= known:  # others come while the first are asked
        wrong = {answer.host: differences(dict(here()), answer.versions) for answer in _answers(spark)}
        reports = [_report(host, lacking) for host, lacking in sorted(wrong.items()) if lacking]
        if reports:
            raise MissingRequirementError(f"{'; '.join(reports)}: {install_for_workers(context.pythonExec)}")
        known |= executors


def _ships_python(context: SparkContext) -> bool:
    """Return whether tasks have what the session ships; Spark counts spark.jars.packages as Python files too."""
    conf = context.getConf()
    files = [*(context._python_includes or []), *conf.get("spark.submit.pyFiles", "").split(",")]
    return any(conf.get(name, "") for name in ("spark.archives", "spark.yarn.dist.archives")) or any(
        file and not file.endswith(".jar") for file in files
    )


Versions = tuple[tuple[str, str], ...]


@functools.cache
def here() -> Versions:
    """Return the versions of this process. Packages without metadata, such as in a zip file, are left out."""
    versions = {PYTHON: f"{sys.version_info.major}.{sys.version_info.minor}"}
    for name in PACKAGES:
        with contextlib.suppress(PackageNotFoundError):
            versions[name] = version(name)
    return tuple(versions.items())


def check_here(wanted: Versions) -> None:
    """Raise `MissingRequirementError` where this process has other versions than code was made with."""
    if wanted == here():
        return
    versions = dict(here())
    wrong = differences({name: wanted_version for name, wanted_version in wanted if name in versions}, versions)
    if wrong:
        raise MissingRequirementError(f"{_report(socket.gethostname(), wrong)}: {install_for_workers(sys.executable)}")


def _report(host: str, wrong: list[str]) -> str:
    return f"host {host} has {', '.join(wrong)}"


def differences(wanted: Mapping[str, str], versions: Mapping[str, str]) -> list[str]:
    """Describe what is missing or different."""
    return [
        f"{name} {versions[name]} and not {wanted_version}" if name in versions else f"no {name} ({wanted_version})"
        for name, wanted_version in wanted.items()
        if versions.get(name) != wanted_version
    ]


def _executors(spark: SparkSession) -> set[str]:
    """Return the present executors, and the driver."""
    tracker = spark.sparkContext._jsc.sc().statusTracker()
    return {f"{executor.host()}:{executor.port()}" for executor in tracker.getExecutorInfos()}


def _answers(spark: SparkSession) -> list[Answer]:
    """Ask every executor: there are tasks enough for each to get one."""
    from py4j.protocol import Py4JJavaError

    context = spark.sparkContext
    tasks = max(2 * context.defaultParallelism, 4 * len(_executors(spark)))
    command = [context.pythonExec, "-c", PROBE]
    try:
        lines = context._jsc.parallelize([0] * tasks, tasks).pipe(command).collect()
    except Py4JJavaError as error:
        text = str(error.java_exception)
        lost = re.search(r"\((\S+) executor \S+\): (.*)", text)
        if lost is None or "Cannot run program" not in text:
            raise UnifiedError(f"the workers could not be asked what they have: {text.splitlines()[0]}") from error
        raise MissingRequirementError(
            f"host {lost.group(1)} has no interpreter {context.pythonExec}: install it there, or name another one in"
            " PYSPARK_PYTHON"
        ) from error
    answers = []
    for line in lines:
        with contextlib.suppress(msgspec.DecodeError):  # something that the interpreter says when it starts
            answers.append(msgspec.json.decode(line, type=Answer))
    if not answers:
        raise UnifiedError(f"the workers' interpreter, {context.pythonExec}, does not say what it has: {lines[:1]}")
    return answers
