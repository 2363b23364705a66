"""A Spark Connect server on this machine, started when the first process needs it and shared by all that come after.

It outlives the process that started it, and listens on the loopback interface only.
"""

from __future__ import annotations

import fcntl
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path

from dagster_unified.engine.session import DEFAULTS, LOGGING, check_java
from dagster_unified.errors import ConfigurationError, StageError

STARTUP, SHUTDOWN = 90.0, 20.0
"""Seconds within which a server has to listen, and to have ended."""


def ensure(port: int, master: str, config: Mapping[str, str]) -> str:
    """The address of the server at `port`, which is started where there is none; raises `StageError` with what it said where it does not come up."""
    if not 1024 <= port <= 65535:
        raise ConfigurationError(f"a Spark Connect server's port is from 1024 to 65535, not {port}")
    address = f"sc://127.0.0.1:{port}"
    if _listens(port):
        return address
    with _files(port, ".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # of several processes that come at once, one starts it
        if not _listens(port):
            _start(port, master, config)
    return address


def stop(port: int) -> bool:
    """Ends the server that was started at `port`, and waits for it; False where none was."""
    mark = _files(port, ".pid")
    if not mark.exists():
        return False
    group = int(mark.read_text())
    mark.unlink()
    if not _is_ours(group):
        return False
    deadline = time.monotonic() + SHUTDOWN
    try:
        os.killpg(group, signal.SIGTERM)
        while _listens(port):
            if time.monotonic() > deadline:
                os.killpg(group, signal.SIGKILL)
            time.sleep(0.1)
    except ProcessLookupError:
        return False
    return True


def _start(port: int, master: str, config: Mapping[str, str]) -> None:
    import pyspark

    check_java()
    settings = {
        **DEFAULTS,
        "spark.driver.extraJavaOptions": f"-Dlog4j2.configurationFile={LOGGING.as_uri()}",
        **config,
        "spark.connect.grpc.binding.address": "127.0.0.1",
        "spark.connect.grpc.binding.port": str(port),
        "spark.port.maxRetries": "0",  # a port that is taken is an error, and not the next port
    }
    command = [str(Path(pyspark.__file__).parent / "bin" / "spark-submit"), "--class", "org.apache.spark.sql.connect.service.SparkConnectServer", "--master", master]
    for key, value in settings.items():
        command += ["--conf", f"{key}={value}"]
    environment = {**os.environ, "PYSPARK_PYTHON": os.environ.get("PYSPARK_PYTHON", sys.executable), "SPARK_LOCAL_IP": "127.0.0.1"}
    log = _files(port, ".log")
    with log.open("wb") as output:
        server = subprocess.Popen([*command, "spark-internal"], stdin=subprocess.DEVNULL, stdout=output, stderr=output, env=environment, start_new_session=True)
    _files(port, ".pid").write_text(str(server.pid))
    deadline = time.monotonic() + STARTUP
    while not _listens(port):
        if server.poll() is not None or time.monotonic() > deadline:
            stop(port)
            _files(port, ".pid").unlink(missing_ok=True)
            said = log.read_text(errors="replace").strip().splitlines()[-3:]
            raise StageError(f"the Spark Connect server at port {port} did not come up: {' '.join(said)[:500]} (its log is {log})")
        time.sleep(0.1)


def _is_ours(process: int) -> bool:
    """Whether a process is a Spark Connect server: a number may have gone to another since."""
    listed = subprocess.run(["ps", "-ww", "-o", "args=", "-p", str(process)], capture_output=True, text=True, check=False)
    return "SparkConnectServer" in listed.stdout


def _listens(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0


def _files(port: int, suffix: str) -> Path:
    """A file of the server's, of this user only."""
    folder = Path(tempfile.gettempdir()) / f"dagster-unified-{os.getuid()}"
    folder.mkdir(mode=0o700, exist_ok=True)
    if folder.stat().st_uid != os.getuid():
        raise ConfigurationError(f"{folder} belongs to another user; set TMPDIR to a folder of your own")
    return folder / f"connect-{port}{suffix}"
