"""Lets Spark write a file of a checkpoint in S3 by one request.

Spark writes such a file under another name and renames it. S3 has no rename, and Hadoop's takes a dozen requests, for
each of the five files and more of an epoch. An object is there whole or not at all anyway, and where there must be none
before, the store refuses a second one (`If-None-Match`). `BucketFiles.java` does this through Hadoop's connector;
spark-hadoop-cloud has a class that does nearly the same. Janino, with which Spark compiles its own code, compiles ours.
Files are the same either way, so that a job may go on with one what it began with the other. Knows Spark's JVM; not
what is written.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any

from dagster_unified.spark_internals.java_class import FOLDER, JavaClass
from dagster_unified.storage.paths import for_spark

if TYPE_CHECKING:
    from pyspark.sql import SparkSession
    from upath import UPath

CLASS = JavaClass("dagster_unified.BucketFiles", FOLDER / "BucketFiles.java")
_CONDITIONAL = "fs.option.create.conditional.overwrite"
"""The capability that a Hadoop file system names if the store compares and writes in one."""

_log = logging.getLogger(__name__)


def install(session: SparkSession, folder: UPath) -> str | None:
    """Give a classic session and its executors the class that writes checkpoints in S3, and return its name.

    Returns None where Spark has to rename: in another store, with an older Hadoop, and where the class cannot be made,
    which is logged. Everything works without, only slower.
    """
    from py4j.protocol import Py4JError

    try:
        if not _is_conditional(session, folder):
            return None
        CLASS.install(session)
        CLASS.ship(session)
    except Py4JError as error:
        _log.warning(
            "%s: each file of the checkpoint takes a dozen requests instead of one, because the class that writes it by"
            " one cannot be made in this Spark: %s",
            folder,
            " ".join(str(error).splitlines()[:2]),
        )
        return None
    return CLASS.name


def _is_conditional(session: SparkSession, folder: UPath) -> bool:
    """Return whether Spark's file system for a folder refuses to overwrite an object."""
    jvm: Any = session._jvm
    java_session: Any = session._jsparkSession
    path = jvm.org.apache.hadoop.fs.Path(for_spark(folder))
    files = path.getFileSystem(java_session.sessionState().newHadoopConf())
    return bool(files.hasPathCapability(path, _CONDITIONAL))
