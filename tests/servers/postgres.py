"""A PostgreSQL server of one test process, from Debian's package; `make postgres` starts one for people.

It listens on a free port of the loopback interface. As root it runs under the user `postgres`, since PostgreSQL refuses
to run as root.
"""

from __future__ import annotations

import ctypes
import itertools
import os
import pwd
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import psycopg
import pytest
from psycopg import sql

from tests.ports import free_port

_NAMES = itertools.count()
_START_SECONDS = 60
_SETTINGS = {
    "listen_addresses": "127.0.0.1",
    "unix_socket_directories": "",
    "shared_buffers": "128MB",
    "max_wal_size": "4GB",
    "max_connections": "60",
    "log_min_messages": "log",
    "fsync": "off",
}
"""A test may kill the server, and the operating system still has what it wrote; no test takes away its power."""


def folder_of_programs() -> Path | None:
    """Where the newest PostgreSQL server on this machine is, or None."""
    on_path = shutil.which("postgres")
    installed = sorted(Path("/usr/lib/postgresql").glob("*/bin/postgres"), key=lambda p: float(p.parents[1].name))
    found = installed[-1] if installed else on_path and Path(on_path).resolve()
    return found.parent if found else None


class PostgresServer:
    """A server with a folder of its own; `start` and `stop` may be repeated over the same data."""

    def __init__(self, programs: Path, port: int | None = None, initdb: Sequence[str] = ()) -> None:
        self._programs = programs
        self.port = port or free_port()
        self.folder = Path(tempfile.mkdtemp(prefix="postgres-"))
        self._user = "postgres" if os.getuid() == 0 else None
        if self._user is not None:
            owner = pwd.getpwnam(self._user)
            os.chown(self.folder, owner.pw_uid, owner.pw_gid)
        self._data = self.folder / "data"
        self._process: subprocess.Popen[bytes] | None = None
        # the kernel takes the end of the thread that has started a process for its parent's
        self._starter = ThreadPoolExecutor(1)
        made = ["-D", str(self._data), "-U", "postgres", "-A", "trust", "-E", "UTF8", "--locale=C.UTF-8", "--no-sync"]
        made += initdb
        subprocess.run([self._programs / "initdb", *made], **self._as_user(), check=True, stdout=subprocess.DEVNULL)
        # passwords count for all users but the superuser, so that tests can have wrong ones
        (self._data / "pg_hba.conf").write_text(
            "host all postgres 127.0.0.1/32 trust\nhost all all 127.0.0.1/32 scram-sha-256\n"
        )

    @property
    def log(self) -> Path:
        """What the server said."""
        return self.folder / "log"

    def url(self, database: str = "postgres", user: str = "postgres") -> str:
        return f"postgresql://{user}@127.0.0.1:{self.port}/{database}"

    def start(self) -> PostgresServer:
        """Start the server, and wait until it takes connections: after a crash, until it has recovered."""
        settings = [part for name, value in _SETTINGS.items() for part in ("-c", f"{name}={value}")]
        command = [self._programs / "postgres", "-D", str(self._data), "-p", str(self.port), *settings]
        deadline = time.monotonic() + _START_SECONDS
        while time.monotonic() < deadline:
            if self._process is None or self._process.poll() is not None:
                # backends of a killed server may live a moment longer, and keep the next one from starting
                self._process = self._starter.submit(self._started, command).result()
            try:
                psycopg.connect(self.url(), connect_timeout=2).close()
                return self
            except psycopg.OperationalError:
                time.sleep(0.05)
        raise TimeoutError(f"the server does not start: {self.log.read_text()[-2000:]}")

    def _started(self, command: Sequence[object]) -> subprocess.Popen[bytes]:
        with self.log.open("ab") as log:
            return subprocess.Popen(command, **self._as_user(), stdout=log, stderr=log, preexec_fn=dies_with_its_parent)

    def stop(self, how: signal.Signals = signal.SIGINT) -> None:
        """End the server: SIGINT is a fast shutdown, SIGQUIT an immediate one, SIGKILL a crash."""
        assert self._process is not None
        self._process.send_signal(how)
        self._process.wait(_START_SECONDS)

    def restart(self, how: signal.Signals = signal.SIGQUIT) -> None:
        """Crash the server, and start it over the same data."""
        self.stop(how)
        self.start()

    def remove(self) -> None:
        """End the server, and delete its data."""
        if self._process is not None and self._process.poll() is None:
            self.stop(signal.SIGQUIT)
        shutil.rmtree(self.folder, ignore_errors=True)

    def create_database(self, name: str) -> str:
        """Create an empty database, and return its URL."""
        with psycopg.connect(self.url(), autocommit=True) as connection:
            connection.execute(sql.SQL("CREATE DATABASE {}").format(sql.Identifier(name)))
        return self.url(name)

    def drop_database(self, name: str) -> None:
        with psycopg.connect(self.url(), autocommit=True) as connection:
            connection.execute(sql.SQL("DROP DATABASE IF EXISTS {} WITH (FORCE)").format(sql.Identifier(name)))

    def _as_user(self) -> dict[str, object]:
        if self._user is None:
            return {}
        return {"user": self._user, "group": pwd.getpwnam(self._user).pw_gid, "extra_groups": [], "cwd": self.folder}


def dies_with_its_parent() -> None:
    """Called in the new process: the kernel ends it, by an immediate shutdown, if this one is killed."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(1, signal.SIGQUIT)


@pytest.fixture(scope="session")
def postgres_programs() -> Path:
    """Where the newest PostgreSQL server on this machine is."""
    programs = folder_of_programs()
    if programs is None:
        pytest.skip("no PostgreSQL server (Debian: apt-get install postgresql)")
    return programs


@pytest.fixture(scope="session")
def postgres_server(postgres_programs: Path) -> Iterator[PostgresServer]:
    """The server of this test process."""
    server = PostgresServer(postgres_programs)
    try:
        yield server.start()
    finally:
        server.remove()


@pytest.fixture
def postgres(postgres_server: PostgresServer) -> Iterator[str]:
    """The URL of an empty database of the test's own."""
    name = f"test_{next(_NAMES)}"
    yield postgres_server.create_database(name)
    postgres_server.drop_database(name)


def main() -> None:
    programs = folder_of_programs()
    if programs is None:
        sys.exit("no PostgreSQL server here (Debian: apt-get install postgresql)")
    server = PostgresServer(programs)
    try:
        server.start()
        print(server.url(), "(until Ctrl-C; then its data is deleted)", flush=True)
        signal.pause()
    except KeyboardInterrupt:
        print()
    finally:
        server.remove()


if __name__ == "__main__":
    main()
