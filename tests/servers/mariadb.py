"""A MariaDB server of one test process, from Debian's package; it listens on a free port of the loopback interface."""

from __future__ import annotations

import itertools
import os
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path
from typing import Any

import pymysql
import pytest
from sqlalchemy import make_url

from tests.ports import free_port
from tests.servers.postgres import dies_with_its_parent

_NAMES = itertools.count()
_START_SECONDS = 60
_SETTINGS = (
    "innodb_buffer_pool_size=64M",
    "innodb_log_file_size=64M",
    "innodb_flush_method=nosync",  # what a killed server wrote, the operating system still has
    "max_connections=60",
    "skip_name_resolve=1",
)


class MariaServer:
    """A server with a folder of its own; `start` and `stop` may be repeated over the same data."""

    def __init__(self) -> None:
        self.port = free_port()
        self.folder = Path(tempfile.mkdtemp(prefix="mariadb-"))
        self._process: subprocess.Popen[bytes] | None = None
        # the kernel takes the end of the thread that has started a process for its parent's
        self._starter = ThreadPoolExecutor(1)
        made = ["mariadb-install-db", *self._where(), "--auth-root-authentication-method=normal", "--skip-test-db"]
        subprocess.run(made, check=True, capture_output=True)

    def url(self, database: str = "") -> str:
        return f"mariadb+pymysql://root@127.0.0.1:{self.port}/{database}"

    def start(self) -> MariaServer:
        """Start the server, and wait until it takes connections: after a crash, until it has recovered."""
        assert self._process is None or self._process.poll() is not None
        settings = [f"--{setting}" for setting in _SETTINGS]
        command = [_program(), *self._where(), f"--port={self.port}", "--bind-address=127.0.0.1", *settings]
        command += [f"--socket={self.folder}/socket", f"--pid-file={self.folder}/pid"]
        self._process = self._starter.submit(self._started, command).result()
        deadline = time.monotonic() + _START_SECONDS
        while time.monotonic() < deadline:
            try:
                self.execute("SELECT 1")
                return self
            except pymysql.err.OperationalError:
                time.sleep(0.05)
        raise TimeoutError(f"the server does not start: {(self.folder / 'log').read_text()[-2000:]}")

    def restart(self) -> None:
        """Crash the server, and start it over the same data."""
        self._end(signal.SIGKILL)
        self.start()

    def remove(self) -> None:
        """End the server, and delete its data."""
        self._end(signal.SIGKILL)
        shutil.rmtree(self.folder, ignore_errors=True)

    def execute(self, statement: str) -> None:
        """Run a statement, in no database."""
        with closing(connected(self.url())) as connection, connection.cursor() as cursor:
            cursor.execute(statement)

    def _where(self) -> list[str]:
        # as root it refuses to run, unless it is told to
        return ["--no-defaults", f"--datadir={self.folder}/data", *(["--user=root"] if os.getuid() == 0 else [])]

    def _started(self, command: Sequence[str]) -> subprocess.Popen[bytes]:
        with (self.folder / "log").open("ab") as log:
            return subprocess.Popen(command, stdout=log, stderr=log, preexec_fn=dies_with_its_parent)

    def _end(self, how: signal.Signals) -> None:
        if self._process is not None:
            self._process.send_signal(how)
            self._process.wait(_START_SECONDS)


def connected(url: str) -> pymysql.Connection[Any]:
    """A connection whose statements have names in double quotes, as those of other databases."""
    place = make_url(url)
    return pymysql.connect(
        host=place.host,
        port=place.port,
        user=place.username,
        database=place.database or None,
        init_command="SET sql_mode = CONCAT(@@sql_mode, ',ANSI_QUOTES'), time_zone = '+00:00'",
    )


def _program() -> str | None:
    return shutil.which("mariadbd", path=f"{os.environ.get('PATH', '')}:/usr/sbin")


@pytest.fixture(scope="session")
def mariadb_server() -> Iterator[MariaServer]:
    """The server of this test process."""
    if _program() is None:
        pytest.skip("no MariaDB server (Debian: apt-get install mariadb-server-core mariadb-client-core)")
    server = MariaServer()
    try:
        yield server.start()
    finally:
        server.remove()


@pytest.fixture
def mariadb(mariadb_server: MariaServer) -> Iterator[str]:
    """The URL of an empty database of the test's own."""
    name = f"test_{next(_NAMES)}"
    mariadb_server.execute(f"CREATE DATABASE {name}")
    yield mariadb_server.url(name)
    mariadb_server.execute(f"DROP DATABASE {name}")
