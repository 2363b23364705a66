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
from pathlib import Path
from threading import Lock
from typing import TYPE_CHECKING, Any
from zipfile import ZipFile

from dagster_unified.connectors.paths import for_spark

if TYPE_CHECKING:
    from pyspark.sql import SparkSession
    from upath import UPath

CLASS = "dagster_unified.BucketFiles"
_CONDITIONAL = "fs.option.create.conditional.overwrite"
"""What a Hadoop file system says that it is capable of if the store compares and writes in one."""

SOURCE = Path(__file__).with_name("BucketFiles.java")
"""The class's source, which a process compiles once."""

_installing = Lock()

_bytecodes: dict[str, bytes] = {}
"""The compiled class, and those within it, by name."""

_shipped: set[str] = set()
"""The applications whose executors have the class; the JVM has it for as long as it runs."""

_log = logging.getLogger(__name__)


def install(session: SparkSession, folder: UPath) -> str | None:
    """Give a classic session and its executors the class that writes checkpoints in S3, and return its name.

    Returns None where Spark has to rename: in another store, with an older Hadoop, and where the class cannot be made,
    which is logged. Everything works without, only slower.
    """
    from py4j.protocol import Py4JError

    jvm: Any = session._jvm
    java_context: Any = session.sparkContext._jsc
    try:
        if not _is_conditional(session, folder):
            return None
        with _installing:
            if not _is_there(jvm):
                _define(session, _compiled(jvm))
            if not java_context.sc().isLocal() and session.sparkContext.applicationId not in _shipped:
                _ship(session, _compiled(jvm))
                _shipped.add(session.sparkContext.applicationId)
    except Py4JError as error:
        _log.warning(
            "%s: each file of the checkpoint takes a dozen requests instead of one, because the class that writes it by"
            " one cannot be made in this Spark: %s",
            folder,
            " ".join(str(error).splitlines()[:2]),
        )
        return None
    return CLASS


def _is_conditional(session: SparkSession, folder: UPath) -> bool:
    """Whether the file system that Spark has for a folder refuses an object that is there before."""
    jvm: Any = session._jvm
    java_session: Any = session._jsparkSession
    path = jvm.org.apache.hadoop.fs.Path(for_spark(folder))
    files = path.getFileSystem(java_session.sessionState().newHadoopConf())
    return bool(files.hasPathCapability(path, _CONDITIONAL))


def _is_there(jvm: Any) -> bool:
    from py4j.protocol import Py4JJavaError

    try:
        jvm.org.apache.spark.util.Utils.getContextOrSparkClassLoader().loadClass(CLASS)
    except Py4JJavaError:
        return False
    return True


def _compiled(jvm: Any) -> dict[str, bytes]:
    if not _bytecodes:
        compiler = jvm.org.codehaus.janino.SimpleCompiler()
        compiler.setParentClassLoader(jvm.org.apache.spark.util.Utils.getSparkClassLoader())
        compiler.cook(SOURCE.read_text())
        _bytecodes.update((str(name), bytes(code)) for name, code in compiler.getBytecodes().items())
    return _bytecodes


def _define(session: SparkSession, classes: dict[str, bytes]) -> None:
    """Add classes to the loader that has Spark's: streams and tasks look there by name."""
    jvm: Any = session._jvm
    gateway = session.sparkContext._gateway
    assert gateway is not None
    kinds = gateway.new_array(jvm.java.lang.Class, 4)
    kinds[0], kinds[1] = jvm.java.lang.Class.forName("java.lang.String"), jvm.java.lang.Class.forName("[B")
    kinds[2] = kinds[3] = jvm.java.lang.Integer.TYPE
    define = jvm.java.lang.Class.forName("java.lang.ClassLoader").getDeclaredMethod("defineClass", kinds)
    define.setAccessible(True)
    for name, code in sorted(classes.items(), reverse=True):  # those within the class before it
        given = gateway.new_array(jvm.java.lang.Object, 4)
        given[0], given[1], given[2], given[3] = name, bytearray(code), 0, len(code)
        define.invoke(jvm.org.apache.spark.util.Utils.getSparkClassLoader(), given)


def _ship(session: SparkSession, classes: dict[str, bytes]) -> None:
    """Let executors load classes."""
    jvm: Any = session._jvm
    folder = jvm.org.apache.spark.util.Utils.createTempDir()  # which goes with the JVM
    jar = Path(str(folder), "bucket-files.jar")
    with ZipFile(jar, "w") as archive:
        for name, code in classes.items():
            archive.writestr(f"{name.replace('.', '/')}.class", code)
    jsc: Any = session.sparkContext._jsc
    jsc.addJar(str(jar))
