"""Starts the Spark session of a run, and says in one sentence what is missing where it cannot."""

from __future__ import annotations

import atexit
import copy
import os
import re
import shutil
import socket
import subprocess
import sys
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from threading import RLock
from typing import TYPE_CHECKING, Any, cast
from urllib.parse import urlsplit
from weakref import WeakSet, ref

from dagster_unified import spark_internals
from dagster_unified.engine import launch
from dagster_unified.engine.environment import check_workers, shipping
from dagster_unified.engine.launch import without_zips
from dagster_unified.errors import ConfigurationError, MissingRequirementError, UnreachableError, nearest
from dagster_unified.spark_internals import local_disk
from dagster_unified.storage import object_store
from dagster_unified.storage.object_store import TOKENS, Store, is_connect

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

PATIENCE = 3.0
"""Seconds that a connection, and then the first answer, may take."""

BUSY_PATIENCE = 60.0
"""Seconds that the first answer may take of a server that is known to run on this machine, which may be busy."""

_MASTERS = ("local", "local[*]", "local-cluster[2,1,1024]", "spark://host:7077", "yarn", "k8s://https://host:443")
_MASTER = re.compile(
    r"local|local\[(\d+|\*)(\s*,\s*\d+)?\]|local-cluster\[\s*\d+\s*,\s*\d+\s*,\s*\d+\s*\]|spark://[^/\s]+:\d+|yarn|k8s://\S+"
)


def checked_master(master: str) -> str:
    """Return the master of a classic session; raises `ConfigurationError` where Spark knows none like it."""
    if not _MASTER.fullmatch(master):
        raise ConfigurationError(
            f"'{master}' is not a Spark master, such as {', '.join(_MASTERS)}{nearest(master, _MASTERS)}"
        )
    return master


def checked_remote(remote: str) -> str:
    """Return the address of a Spark Connect server; raises `ConfigurationError` where it is none."""
    try:
        parts = urlsplit(remote)
        named = parts.scheme == "sc" and bool(parts.hostname) and (parts.port is None or parts.port > 0)
    except ValueError:  # the port
        named = False
    if not named:
        raise ConfigurationError(f"'{remote}' is not the address of a Spark Connect server, such as sc://host:15002")
    return remote


def reach_master(master: str) -> None:
    """Raise `UnreachableError` where no master of a standalone cluster can be connected to."""
    if not checked_master(master).startswith("spark://"):
        return
    reason = master_away(master)
    if reason is not None:
        raise UnreachableError(
            f"no Spark master can be reached at {master}: {reason}; start one there, or give another address"
        )


def master_away(master: str) -> str | None:
    """Why none of the masters of a standalone cluster can be connected to; None where one can."""
    reasons = []
    for place in master.removeprefix("spark://").split(","):
        host, _, port = place.rpartition(":")
        reason = _unreachable(host.strip("[]"), int(port))
        if reason is None:
            return None
        reasons.append(reason)
    return "; ".join(reasons)


def reach_remote(remote: str, patience: float = PATIENCE) -> None:
    """Raise `UnreachableError` where no Spark Connect server answers at an address within `patience` seconds."""
    parts = urlsplit(checked_remote(remote))
    reason = _unreachable(parts.hostname or "", parts.port or 15002) or _silent(remote, patience)
    if reason is not None:
        raise UnreachableError(
            f"no Spark Connect server can be reached at {_shown(remote)}: {reason}; start one there, or give another"
            " address"
        )


def _unreachable(host: str, port: int) -> str | None:
    """Return why no connection is possible, or None."""
    try:
        socket.create_connection((host, port), timeout=PATIENCE).close()
    except TimeoutError:
        return f"no connection within {PATIENCE:.0f} s"
    except OSError as error:
        return error.strerror or str(error)
    return None


def _silent(remote: str, patience: float) -> str | None:
    """Return why the peer is no Spark Connect server, or None."""
    import grpc
    from pyspark.sql.connect.client import DefaultChannelBuilder

    channel = DefaultChannelBuilder(remote).toChannel()
    try:
        grpc.channel_ready_future(channel).result(timeout=patience)
    except grpc.FutureTimeoutError:
        return f"what listens there does not answer as one within {patience:.0f} s"
    finally:
        channel.close()
    return None


def _shown(remote: str) -> str:
    return remote.partition("/;")[0]


_HADOOP = "spark.hadoop."
_TOKEN = "fs.s3a.session.token"
_PROVIDERS = "fs.s3a.aws.credentials.provider"
"""Who says in its settings where a session's credentials come from has no use for others."""


def give(session: SparkSession, store: Store) -> None:
    """Give a running session's Hadoop connector and Python workers a store that they do not have yet."""
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
    has_credentials = any(settings.contains(f"{_HADOOP}{name}") for name in (*credentials, _PROVIDERS))
    if not knows and not has_credentials:
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
    """Close the S3 connections that Hadoop opened with other settings: it would reuse them for the same bucket."""
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


def _private(kind: Any, name: str, instance: Any) -> Any:
    field = kind.getDeclaredField(name)
    field.setAccessible(True)
    return field.get(instance)


JAVA = 17

LOCAL = "local[*]"
"""The master where nobody says one."""

LOGGING = Path(__file__).with_name("log4j2.properties")

DAEMON, SERVER_DAEMON = "dagster_unified.engine.daemon", "dagster_unified.engine.server_daemon"
"""The daemons that Python workers on this machine are forked from, of a session and of a Connect server."""

DEFAULTS: dict[str, str] = {
    "spark.ui.enabled": "false",
    "spark.ui.showConsoleProgress": "false",
    "spark.driver.host": "127.0.0.1",
    "spark.driver.bindAddress": "127.0.0.1",
    "spark.driver.memory": "2g",
    "spark.sql.session.timeZone": "UTC",
    "spark.sql.parquet.outputTimestampType": "TIMESTAMP_MICROS",
    "spark.sql.parquet.compression.codec": "zstd",
    "spark.log.level": "ERROR",
    "spark.python.sql.dataFrameDebugging.enabled": "false",
    # 15 seconds are not enough on a machine that is busy, and PySpark then fails with an error of its own.
    "spark.python.authenticate.socketTimeout": "120s",
}
"""The settings of a local session unless the configuration says otherwise: nothing listens beyond loopback."""

LOOPBACK = ("spark.driver.host", "spark.driver.bindAddress")

PARTITIONS = "spark.sql.shuffle.partitions"

JAVA_OPTIONS = "spark.driver.extraJavaOptions"

_JAVA_VARIABLES = ("SPARK_SUBMIT_OPTS", "JDK_JAVA_OPTIONS", "JAVA_TOOL_OPTIONS", "_JAVA_OPTIONS")
"""The variables of the environment from which Spark's JVM takes options."""

CHECKSUMS = "spark.sql.shuffle.orderIndependentChecksum.enabled"
"""Spark hashes every byte that is shuffled, to notice a map task that gives other rows when it runs again."""

_STARTING = RLock()

RETRIES, LONGEST_RETRY = 8, 15_000
"""How often a Connect server that does not answer is asked again, and the milliseconds between two times at most."""

SESSION_DEFAULTS: dict[str, str] = {k: v for k, v in DEFAULTS.items() if k.startswith("spark.sql.")}
"""The settings that results rely on, set in every session, also one that was started elsewhere."""


def check_java() -> None:
    """Raise `MissingRequirementError` where there is no Java, or one that is too old."""
    home = os.environ.get("JAVA_HOME")
    java = os.path.join(home, "bin", "java") if home else shutil.which("java")
    if java is not None and not os.path.exists(java):
        raise MissingRequirementError(
            f"Spark needs Java {JAVA} or newer, and JAVA_HOME, which is {home}, has no bin/java: set it to the folder"
            " of a JDK, or unset it where such a java is on the PATH"
        )
    if java is None:
        raise MissingRequirementError(
            f"Spark needs Java {JAVA} or newer, and there is none: install a JDK (Debian: apt-get install"
            f" openjdk-{JAVA}-jre-headless) or set JAVA_HOME"
        )
    output = subprocess.run([java, "-version"], capture_output=True, text=True, check=False)
    version = re.search(r'version "(\d+)(?:\.(\d+))?', output.stderr + output.stdout)
    major = 0 if version is None else int(version.group(2) or 0) if version.group(1) == "1" else int(version.group(1))
    if major < JAVA:
        raise MissingRequirementError(
            f"Spark needs Java {JAVA} or newer, and {java} is {major or 'of an unknown version'}: install a newer JDK"
            f" (Debian: apt-get install openjdk-{JAVA}-jre-headless) or set JAVA_HOME to one"
        )


def defaults(master: str) -> dict[str, str]:
    """Return the settings of a session on `master`, or of a server that runs there.

    On one machine an exchange has two partitions for each core, and not Spark's two hundred; and what was shuffled is
    lost with the driver only, so that no map task runs again for it, and nothing has to be hashed. The executors of a
    cluster reach the driver at the address that Spark finds.
    """
    if not master.startswith("local"):
        return {name: value for name, value in DEFAULTS.items() if name not in LOOPBACK}
    cores = re.fullmatch(r"local\[(\d+|\*)\]", master)
    if cores is None:
        return dict(DEFAULTS)
    count = os.cpu_count() or 1 if cores.group(1) == "*" else int(cores.group(1))
    return {**DEFAULTS, PARTITIONS: str(max(2 * count, 1)), CHECKSUMS: "false"}


def java_options(master: str) -> str:
    """Return the driver's options for Java: its log, and on one machine the parallel collector.

    That takes less of the processor than Java's default, by a tenth in a stream on two cores. A collector that the
    environment chooses stays: Java starts with no two.
    """
    options = " ".join(os.environ.get(name, "") for name in _JAVA_VARIABLES)
    chosen = re.search(r"-XX:\+Use\w+GC\b", options)
    collector = ["-XX:+UseParallelGC"] if master.startswith("local") and not chosen else []
    return " ".join([f"-Dlog4j2.configurationFile={LOGGING.as_uri()}", *collector])


def forking(master: str, daemon: str, config: Mapping[str, str]) -> dict[str, str]:
    """Return the settings that make Spark fork Python workers from our daemon, where they run this interpreter."""
    is_this = master.startswith("local") and os.environ.get("PYSPARK_PYTHON") == sys.executable
    return {"spark.python.daemon.module": daemon} if is_this and "spark.pyspark.python" not in config else {}


def start(
    master: str = LOCAL,
    remote: str | None = None,
    config: Mapping[str, str] | None = None,
    app_name: str = "dagster-unified",
    session_id: str | None = None,
    environment: str | None = None,
    patience: float = PATIENCE,
) -> SparkSession:
    """The running session, or a new one: classic on `master`, or Connect where `remote` (`sc://host:port`) is given.

    Where neither is given, the environment's SPARK_REMOTE is the address, as it is to PySpark.

    Raises within ten seconds where nothing answers there; `patience` is the seconds that a server has to answer which
    listens. Processes that give one `session_id`, a UUID, share the
    server's session, and with it the Python workers that are warm; none may stop it. `environment` is a packed one for
    the workers of a cluster (`environment.py`).
    """
    if remote is None and "SPARK_REMOTE" in os.environ:
        if master != LOCAL:
            raise ConfigurationError(
                f"Spark is to run on {master}, and the environment has SPARK_REMOTE, with which PySpark starts no"
                " classic session; unset it, or leave the master out"
            )
        remote = os.environ["SPARK_REMOTE"]
    shipped = {} if environment is None else shipping(environment, master, remote, config or {})
    from pyspark.sql import SparkSession

    if remote:
        reach_remote(remote, patience)
        address = remote if session_id is None else f"{remote}/;session_id={session_id}"
        session = SparkSession.builder.remote(address).appName(app_name).getOrCreate()
        _give_up_sooner(session)
        for key, value in (config or {}).items():
            session.conf.set(key, value)
        return prepared(session)
    with _STARTING:
        return _start_classic(master, config or {}, app_name, shipped)


def _start_classic(master: str, config: Mapping[str, str], app_name: str, shipped: Mapping[str, str]) -> SparkSession:
    """Return the process's session; several threads would otherwise start a JVM each."""
    from pyspark import SparkContext
    from pyspark.sql import SparkSession

    _forget_what_died()
    reach_master(master)
    is_first = SparkContext._active_spark_context is None
    if is_first:
        check_java()
    if master.startswith("local"):
        os.environ.setdefault("PYSPARK_PYTHON", sys.executable)
        os.environ.setdefault("PYSPARK_DRIVER_PYTHON", sys.executable)
        os.environ.setdefault("SPARK_LOCAL_IP", "127.0.0.1")
    builder = SparkSession.builder.master(master).appName(app_name)
    settings = {**defaults(master), JAVA_OPTIONS: java_options(master)}
    store = object_store.in_use()
    if store is not None:
        settings.update(store.settings())
    settings.update({**forking(master, DAEMON, config), **config, **shipped})
    with without_zips(master, config):
        launch.start_jvm({**settings, "spark.master": master, "spark.app.name": app_name})
    if store is not None and not master.startswith("local"):  # not before: a JVM's command line is for all to see
        settings.update({**store.executor_environment(), **config, **shipped})
    for key, value in settings.items():
        builder = builder.config(key, value)
    session = builder.getOrCreate()
    if shipped:
        # else the driver's own Python workers, which have no such folder, would take their interpreter by it
        session.sparkContext.environment.pop("PATH", None)
    if is_first:
        launch.ignore_closed(session.sparkContext._accumulatorServer)
        local_disk.install(session)
    return prepared(session)


def has_died() -> bool:
    """Return whether the JVM that this process itself started has ended."""
    from pyspark import SparkContext

    process = getattr(SparkContext._gateway, "proc", None)
    return process is not None and process.poll() is not None


def _forget_what_died() -> None:
    """Drop this process's JVM where it has ended, so that a repeated step gets another one."""
    from py4j.protocol import Py4JError
    from pyspark import SparkContext
    from pyspark.sql import SparkSession, SQLContext

    gateway = SparkContext._gateway
    if gateway is None or not has_died():
        return
    context = SparkContext._active_spark_context
    if context is not None:
        context._jsc = None  # else it asks the JVM to stop it
        context.stop()
    SparkSession._instantiatedSession = SQLContext._instantiatedContext = None
    SparkContext._gateway = SparkContext._jvm = None
    with suppress(Py4JError, OSError):
        gateway.shutdown()


def _give_up_sooner(session: SparkSession) -> None:
    """Retry calls to a silent server for about a minute, and not for Spark's ten.

    A server that comes back has lost what it knew, and a job that ends is started again.
    """
    from pyspark.sql.connect.client.retries import DefaultPolicy

    session.client.set_retry_policies([DefaultPolicy(max_retries=RETRIES, max_backoff=LONGEST_RETRY)])


def give_up(session: SparkSession) -> None:
    """Ask a silent Connect server no more: each further call would wait as long."""
    session.client.set_retry_policies([])


def in_session(session: SparkSession, session_id: str) -> SparkSession:
    """Return the session with this id on the Connect server of another one, for the same user."""
    from pyspark.sql.connect.session import SparkSession as ConnectSession

    connection: Any = copy.deepcopy(session.client._builder)  # as PySpark's `cloneSession` does
    connection.set("session_id", session_id)
    joined: Any = ConnectSession(connection, session.client._user_id)
    _give_up_sooner(joined)
    _close_at_exit(joined)
    return cast("SparkSession", joined)


_closed_at_exit: WeakSet[Any] = WeakSet()
"""The clients of Connect servers that are closed where the process exits."""


def _close_at_exit(session: SparkSession) -> None:
    """Close the session's client where the process exits; the queries on the server go on.

    PySpark asks the server for something more there. A process that ends before the whole answer has come hangs: what
    would read it is gone, and the client's end waits for it.
    """
    client = session.client
    if client not in _closed_at_exit:
        _closed_at_exit.add(client)
        atexit.register(_close, ref(client))  # after the client's own: what was registered last is called first


def _close(client: ref[Any]) -> None:
    client_alive = client()
    if client_alive is not None and not (
        client_alive.is_closed or client_alive._release_session_on_exit
    ):  # else it ends the session there
        client_alive.close()


def server_of(session: SparkSession) -> tuple[str, str]:
    """Return the address of a session's Connect server, and the session's user there."""
    connection = session.client._builder  # that of a service's own client may name no address
    return str(getattr(connection, "endpoint", "")), session.client._user_id or ""


def prepared(session: SparkSession) -> SparkSession:
    """Set what results rely on in a session that may have been started elsewhere, and ask its workers what they have.

    Where nobody has said into how many partitions an exchange goes, two for each core, and not Spark's two hundred. A
    classic session that was started before this process's object store was known can use it from now on.

    Raises `MissingRequirementError` where a worker's packages are not the driver's.
    """
    spark_internals.check_version(session.version)
    for key, value in SESSION_DEFAULTS.items():
        session.conf.set(key, value)
    if is_connect(session):
        _close_at_exit(session)
    else:
        store = object_store.in_use()
        if store is not None:
            give(session, store)
        check_workers(session)
    if session.conf.get(PARTITIONS, None) is None and (count := _cores_at_most(session)) is not None:
        session.conf.set(PARTITIONS, str(2 * count))
    return session


def cores(session: SparkSession) -> int:
    """Return how many tasks run at once: as many as Spark makes partitions of a range."""
    from pyspark.sql import functions as F

    return session.range(1 << 12).select(F.spark_partition_id().alias("partition")).distinct().count()


def partitions(session: SparkSession) -> int:
    """Return how many tasks are behind an exchange where no number is given."""
    return int(session.conf.get(PARTITIONS) or 200)


def _cores_at_most(session: SparkSession) -> int | None:
    """Return how many tasks may run at once; None with dynamic allocation without a bound on executors."""
    if session.conf.get("spark.dynamicAllocation.enabled", "false") != "true":
        return cores(session)
    most = session.conf.get("spark.dynamicAllocation.maxExecutors", "") or ""
    return int(most) * int(session.conf.get("spark.executor.cores", "1") or 1) if most.isdecimal() else None
