"""A Spark Connect server on this machine, shared by all processes of this user.

The first process that needs it starts it.

The server is Spark's own persistent local one: it outlives the process that started it, listens on the loopback
interface only, and takes nobody who does not know its token, which lies in a file of this user's.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

from dagster_unified.engine.environment import shipping
from dagster_unified.engine.launch import without_pandas_warnings, without_zips
from dagster_unified.engine.session import JAVA_OPTIONS, SERVER_DAEMON, check_java, defaults, forking, java_options
from dagster_unified.errors import ConfigurationError, StageError
from dagster_unified.storage import object_store

_SHUTDOWN = 20.0
"""Seconds within which a server has to have ended."""

_STARTUP = 600
"""Seconds within which a server has to listen. One that ends before is noticed at once; PySpark would end it at 120."""

_SESSION_TIMEOUT = "4h"
"""How long the server keeps a session that nobody uses.

A step of a run may wait long for others that are no stages.
"""


def ensure(port: int, master: str, config: Mapping[str, str], environment: str | None = None) -> str:
    """Return the address of the server of `port`, which is started where there is none.

    `environment` is a packed one for the workers of a cluster (`environment.py`).

    Raises `StageError` with the server's own words where it does not come up.

    Where the port is taken by something else, the server has another. `config` is what it starts with: one that runs
    already keeps its own.
    """
    shipped = {} if environment is None else shipping(environment, master, None, config)
    from pyspark.errors import PySparkException
    from pyspark.sql.connect.local_server import ServerLauncher, reuse_or_start_local_connect_server

    _choose(port)
    if not _discovery(port).exists():
        check_java()
    os.environ.setdefault("PYSPARK_PYTHON", sys.executable)
    os.environ.setdefault("SPARK_LOCAL_IP", "127.0.0.1")
    store = object_store.in_use()
    ours = {
        "spark.connect.session.manager.defaultSessionTimeout": _SESSION_TIMEOUT,
        # It keeps analysed plans with their lists of files, by ids that begin anew in each process of a session.
        "spark.connect.session.planCache.maxSize": "0",
        JAVA_OPTIONS: java_options(master),
        "spark.local.connect.server.port": str(port),
        **forking(master, SERVER_DAEMON, config),
        **({} if store is None else store.settings()),  # its credentials are in the server's environment
    }
    ServerLauncher._READY_TIMEOUT = _STARTUP
    try:
        with without_zips(master, config), without_pandas_warnings():
            return reuse_or_start_local_connect_server(master, {**defaults(master), **ours, **config, **shipped})
    except (PySparkException, subprocess.TimeoutExpired) as error:
        raise StageError(
            f"the Spark Connect server of port {port} on {master} did not come up: {error} (its log is in"
            f" {_folder(port) / 'logs'})"
        ) from error


def stop(port: int) -> bool:
    """End the server of `port`, and wait for it; False where none was started."""
    from pyspark.sql.connect.local_server import stop_local_connect_server

    _choose(port)
    with suppress(OSError, ValueError, KeyError):
        process = int(json.loads(_discovery(port).read_text())["pid"])
        if stop_local_connect_server():
            _wait_for(process)
            return True
    return False


def _wait_for(process: int) -> None:
    """Wait until a process has ended, so that its port is free; kill one that takes too long."""
    deadline = time.monotonic() + _SHUTDOWN
    with suppress(ProcessLookupError):
        while True:
            os.kill(process, 0 if time.monotonic() < deadline else signal.SIGKILL)
            if "Z" in _state(process):
                return
            time.sleep(0.1)


def _state(process: int) -> str:
    """Return a process's state from `ps`; it is a zombie (Z) until its parent has asked for it."""
    return subprocess.run(
        ["ps", "-o", "state=", "-p", str(process)], capture_output=True, text=True, check=False
    ).stdout


def _choose(port: int) -> None:
    """Tell Spark's environment which of the servers is meant."""
    if not 1024 <= port <= 65535:
        raise ConfigurationError(f"a Spark Connect server's port is from 1024 to 65535, not {port}")
    os.environ["SPARK_LOCAL_CONNECT_DISCOVERY"] = str(_discovery(port))


def _discovery(port: int) -> Path:
    return _folder(port) / "server.json"


def _folder(port: int) -> Path:
    """Return the folder for a server's files, which only this user may read."""
    folder = Path(tempfile.gettempdir()) / f"dagster-unified-{os.getuid()}" / f"connect-{port}"
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    if folder.parent.stat().st_uid != os.getuid():
        raise ConfigurationError(f"{folder.parent} belongs to another user; set TMPDIR to a folder of your own")
    folder.parent.chmod(0o700)
    return folder
