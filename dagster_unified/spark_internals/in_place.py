"""Lets Spark's workers write Parquet files into an object store where they stay, without renaming them.

Hadoop's committer has each task write into a folder of its own, which is renamed when the task commits, and once more
when the job does. An object store has no rename: each file is copied twice, and asked for some twenty times. With the
class of `InPlace.java` the folder of each attempt stays, with a mark where the attempt was committed; who lists the
files leaves out those without. Knows Spark's JVM; not what is written.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Mapping
from typing import TYPE_CHECKING

from dagster_unified.spark_internals.java_class import FOLDER, JavaClass
from dagster_unified.storage.object_store import is_connect
from dagster_unified.storage.paths import is_data, is_in_object_store, sizes

if TYPE_CHECKING:
    from pyspark.sql import SparkSession
    from upath import UPath

CLASS = JavaClass("dagster_unified.InPlace", FOLDER / "InPlace.java")
COMMITTED = "_committed"

_COMMITTER = "spark.sql.parquet.output.committer.class"
_DEFAULTS = {
    _COMMITTER: "org.apache.parquet.hadoop.ParquetOutputCommitter",
    "spark.sql.sources.commitProtocolClass": (
        "org.apache.spark.sql.execution.datasources.SQLHadoopMapReduceCommitProtocol"
    ),
}
"""How Spark commits where nobody has chosen."""

_ATTEMPT = re.compile(r"\d+-\d+")
"""The folder of an attempt of a task."""

_log = logging.getLogger(__name__)


def options(session: SparkSession, folder: UPath) -> dict[str, str]:
    """Return a Parquet writer's options that leave files where they are written; empty where they are renamed.

    Files are renamed on a disk, through Connect, where somebody has chosen how Spark commits, and where the class
    cannot be made, which is logged.
    """
    if not is_in_object_store(folder) or is_connect(session):
        return {}
    if any(session.conf.get(name, default) != default for name, default in _DEFAULTS.items()):
        return {}
    from py4j.protocol import Py4JError

    try:
        CLASS.install(session)
        CLASS.ship(session)
    except Py4JError as error:
        _log.warning(
            "%s: each file is copied twice, because the class that has it stay cannot be made in this Spark: %s",
            folder,
            " ".join(str(error).splitlines()[:2]),
        )
        return {}
    return {_COMMITTER: CLASS.name, "partitionOverwriteMode": "static"}


def take(folder: UPath) -> dict[str, int]:
    """Return the data files that tasks have written into a folder, in either way, with their bytes.

    The marks are removed.
    """
    files = sizes(folder)
    marks = [f"{folder.path.rstrip('/')}/{path}" for path in files if path.rpartition("/")[2] == COMMITTED]
    if marks:
        folder.fs.rm(marks)
    return committed(files)


def committed(files: Mapping[str, int]) -> dict[str, int]:
    """Of all files in a folder, the data files of tasks that were committed.

    An attempt that was given up may commit as well, where it wakes up late: of two of a task the first counts. Files
    that are in no attempt's folder were put there by another committer, for good.
    """
    attempts: dict[str, str] = {}
    for path in sorted(files):
        attempt, _, name = path.partition("/")
        if name == COMMITTED:
            attempts.setdefault(attempt.partition("-")[0], attempt)
    chosen = set(attempts.values())

    def counts(folder: str) -> bool:
        return folder in chosen or _ATTEMPT.fullmatch(folder) is None

    return {path: size for path, size in files.items() if is_data(path) and counts(path.partition("/")[0])}
