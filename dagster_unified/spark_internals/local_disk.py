"""Lets Spark create files on a local disk without starting a process for each.

Without its native library, which pyspark does not bring along, Hadoop runs `chmod` for every file and folder that it
creates: 5 ms, some twenty times in a micro-batch. `LocalDisk.java` does the same by a system call. Hadoop keeps one
file system per scheme in a JVM, and from then on it is this one. Knows Spark's JVM; not what is written.
"""

from __future__ import annotations

import logging
import os
from typing import TYPE_CHECKING, Any

from dagster_unified.spark_internals.java_class import FOLDER, JavaClass

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

_CLASS = JavaClass("dagster_unified.LocalDisk", FOLDER / "LocalDisk.java")

_IMPLEMENTATION = "fs.file.impl"
"""By which Hadoop finds the class of a file system that it has none of yet."""

_log = logging.getLogger(__name__)


def install(session: SparkSession) -> None:
    """Make the JVM of a classic session, and the executors that its application has elsewhere, use it for local files.

    Where that is not possible, as with another Hadoop, everything works as before, only slower; a class that the
    application's settings name stays.
    """
    if os.name != "posix":
        return
    from py4j.protocol import Py4JError

    jvm: Any = session._jvm
    hadoop: Any = session.sparkContext._jsc.hadoopConfiguration()
    if hadoop.get(_IMPLEMENTATION) is not None:
        return
    try:
        uri, file_systems = jvm.java.net.URI("file:///"), jvm.org.apache.hadoop.fs.FileSystem
        before = file_systems.get(uri, hadoop)
        if before.getClass().getName() != _CLASS.name:
            _CLASS.install(session)
            configuration = jvm.org.apache.hadoop.conf.Configuration(hadoop)
            configuration.set(_IMPLEMENTATION, _CLASS.name)
            before.close()  # which is how it leaves the place where Hadoop keeps it
            file_systems.get(uri, configuration)
        if _can_ship(session):
            _CLASS.ship(session)
            hadoop.set(_IMPLEMENTATION, _CLASS.name)  # Spark sends this to tasks, which load the class from the jar
    except Py4JError as error:
        _log.debug("Hadoop's own local file system stays: %s", error)


def _can_ship(session: SparkSession) -> bool:
    """Return whether executors elsewhere have the jars of the application, and not of a session alone."""
    is_local = session.sparkContext._jsc.sc().isLocal()
    return not is_local and session.conf.get("spark.sql.artifact.isolation.enabled", "false") == "false"
