"""Gives the process's object store to a classic session that was started before the store was known.

A session that starts afterwards has it by the environment of its JVM and by its settings, neither of which can be
changed once it runs. Hadoop's configuration can: Spark sends it to executors with each job. What the session's own
settings say stays. Python workers get the environment with the functions that they run. Knows Spark's JVM.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from dagster_unified.connectors.object_store import TOKENS, Store

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

_HADOOP = "spark.hadoop."
_TOKEN = "fs.s3a.session.token"
_PROVIDERS = "fs.s3a.aws.credentials.provider"
"""Who says in its settings where a session's credentials come from has no use for others."""


def give(session: SparkSession, store: Store) -> None:
    """Let Hadoop's connector and the Python workers of a running session use a store, where they do not yet."""
    context = session.sparkContext
    jvm: Any = session._jvm
    java_context: Any = context._jsc
    configuration, settings = java_context.hadoopConfiguration(), java_context.sc().conf()
    wanted = {name.removeprefix(_HADOOP): value for name, value in store.settings().items()}
    credentials = {
        name: (value, variable)
        for name, value, variable in (
            ("fs.s3a.access.key", store.key, "AWS_ACCESS_KEY_ID"),
            ("fs.s3a.secret.key", store.secret, "AWS_SECRET_ACCESS_KEY"),
            (_TOKEN, store.token, "AWS_SESSION_TOKEN"),
        )
        if value is not None
    }
    knows = all(jvm.java.lang.System.getenv(variable) == value for value, variable in credentials.values())
    own = any(settings.contains(f"{_HADOOP}{name}") for name in (*credentials, _PROVIDERS))
    if not knows and not own:
        wanted |= {name: value for name, (value, _) in credentials.items()}
    lacking = {
        name: value
        for name, value in wanted.items()
        if not settings.contains(f"{_HADOOP}{name}") and configuration.get(name) != value
    }
    # what the session found in its environment belongs to another key
    foreign = store.key is not None and store.token is None and not settings.contains(f"{_HADOOP}{_TOKEN}")
    foreign = foreign and configuration.get(_TOKEN) is not None
    if not lacking and not foreign:
        return
    for name, value in lacking.items():
        configuration.set(name, value)
    if foreign:
        configuration.unset(_TOKEN)
    context.environment.update(store.environment())
    for name in TOKENS if foreign else ():
        context.environment.setdefault(name, "")  # Python workers inherit the JVM's
    _forget_connections(jvm)


def _forget_connections(jvm: Any) -> None:
    """Close what Hadoop has opened of S3 with other settings: it would give that to whoever asks for the bucket."""
    from py4j.protocol import Py4JJavaError

    kind = jvm.java.lang.Class.forName("org.apache.hadoop.fs.FileSystem")
    try:
        cache = _private(kind, "CACHE", None)
        opened = list(_private(cache.getClass(), "map", cache).values())
    except Py4JJavaError:  # another Hadoop: it has them under other names
        return
    for file_system in opened:
        if file_system.getUri().getScheme() == "s3a":
            file_system.close()


def _private(kind: Any, name: str, of: Any) -> Any:
    field = kind.getDeclaredField(name)
    field.setAccessible(True)
    return field.get(of)
