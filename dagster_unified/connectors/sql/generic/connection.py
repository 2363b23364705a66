"""How to reach a database by a URL of SQLAlchemy, and what its errors mean. Knows neither sinks nor sources."""

from __future__ import annotations

import os
import re
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from dagster_unified.connectors.secrets import Value, deferred, resolved, shown
from dagster_unified.errors import (
    ConfigurationError,
    MissingRequirementError,
    PipelineError,
    SinkError,
    UnavailableError,
    UnifiedError,
)

if TYPE_CHECKING:
    import sqlalchemy as sa

_LOCK_SECONDS = 20.0
"""How long to wait for a file that another process has locked, as DuckDB locks its own."""

_PAUSE = 0.05
_DIALECTS = {"duckdb": "duckdb-sqlalchemy"}
"""Packages of dialects that are not SQLAlchemy's own."""

_LOCKED = re.compile(
    "database (table )?is locked|could not set lock|lock wait timeout|deadlock|write-write conflict|conflict on"
    "|different configuration than existing",
    re.IGNORECASE,
)
_LASTING = re.compile(
    "no such |no column named|syntax error|readonly|unknown column|doesn't exist|access denied|unknown database"
    "|does not exist|not a valid duckdb|command denied|authentication failed|login failed",
    re.IGNORECASE,
)
"""What databases report as operational, and another attempt would meet again."""

_SQLITE_LASTING = (1, 3, 8, 14, 23)
"""SQLite's codes of what another attempt would meet again: ERROR, PERM, READONLY, CANTOPEN, AUTH."""

_MYSQL_PASSING = {1021, 1026, 1030, 1040, 1053, 1114, 1152, *range(1158, 1162), 1203, 1226, 1290, 1836, 1927, 4031}
"""MariaDB's numbers of what another attempt may not meet: no room, no connection free, a server that ends or only
reads. Those from 2000 to 2999 are of a client that does not reach it."""

_URL = re.compile(r"([\w+]+)://(?:[^:/]*(?::[^@]*)?@)?([^/?@]*)(/[^?]*)?(?:\?.*)?", re.DOTALL)
"""A URL as SQLAlchemy takes it apart, whose passwords may hold a slash: its scheme, its host, its path."""

IN_FILES = ("sqlite", "duckdb")
"""Databases that are files. They tell no upper from lower case in names, and tables are in the schema `main`."""

OF_MYSQL = ("mariadb", "mysql")
"""Dialects of MySQL's kind."""

_STRICT = (
    "SET time_zone = '+00:00', sql_mode = CONCAT(@@sql_mode, ',STRICT_ALL_TABLES'),"
    f" innodb_lock_wait_timeout = {_LOCK_SECONDS:.0f}"
)
_SESSION = {
    "duckdb": "SET TimeZone = 'UTC'",
    "postgresql": "SET TIME ZONE 'UTC'",
    **dict.fromkeys(OF_MYSQL, _STRICT),
}
"""How a session is set up. By its zone these databases convert between times with a zone and without; MariaDB and MySQL
cut off what is too long for a column unless they are strict."""

_ISOLATION = dict.fromkeys(OF_MYSQL, "READ COMMITTED")
"""Where a transaction would not see what the one it has waited for has written."""


@dataclass(frozen=True, repr=False)
class Database:
    """A database, by its URL, which may be looked up where a client connects. Secrets never appear in its text."""

    url: Value

    @classmethod
    def of(cls, given: Value, where: str) -> Database:
        """A database from a URL or an `EnvVar`; raises `PipelineError` for anything else."""
        if isinstance(given, str) and not hasattr(given, "get_value"):
            if _URL.fullmatch(given):
                return cls(given)
        elif hasattr(given, "get_value"):
            return cls(deferred(given))
        # not shown: it may have a password in it
        raise PipelineError(
            f"{where}: the connection is no URL of SQLAlchemy; write duckdb:////data/shop.duckdb,"
            " sqlite:////data/shop.db, mysql+pymysql://user@host/database, or give an EnvVar that has such a URL; an @"
            " in a password is %40"
        )

    def describe(self) -> str:
        """Where it is, for people: no user, no password, no options."""
        if not isinstance(self.url, str):
            return f"database at {shown(self.url)}"
        parts = self._parts
        return f"{parts[1]}://{parts[2]}{parts[3] or ''}" if parts else "a database"

    @property
    def dialect(self) -> str | None:
        """The name of its dialect; None where only an environment variable tells."""
        return self._parts[1].partition("+")[0] if self._parts else None

    @property
    def _parts(self) -> re.Match[str] | None:
        return _URL.fullmatch(self.url) if isinstance(self.url, str) else None

    def place(self) -> str:
        """The one form of all URLs that lead to the database, as far as they tell."""
        parts = self._parts
        if parts is None:
            return self.describe()
        path = parts[3] or ""
        if self.dialect in IN_FILES and path:
            path = f"/{os.path.realpath(path.removeprefix('/'))}"
        return f"{self.dialect}://{parts[2]}{path}"

    def __repr__(self) -> str:
        return f"Database({self.describe()})"

    def engine(self, where: str, read_only: bool = False) -> sa.Engine:
        """An engine that keeps no connections: a file that is open is locked for others.

        Of DuckDB several processes may have a file open, if all only read it.
        """
        try:
            import sqlalchemy as sa
        except ImportError as error:
            raise _missing(where, "sqlalchemy", "dagster-unified[databases]") from error
        try:
            url = sa.make_url(resolved(self.url, f"{where}: connection"))
        except (sa.exc.ArgumentError, ValueError):
            raise ConfigurationError(f"{where}: what {self.describe()} holds is no URL of SQLAlchemy") from None
        if read_only and (file := _file(url)) is not None and not os.path.exists(file):
            raise ConfigurationError(f"{where}: there is no file {file}; check the path, and that all workers see it")
        try:
            shared = {"read_only": True} if read_only and url.get_backend_name() == "duckdb" else {}
            isolation = _ISOLATION.get(url.get_backend_name())
            return sa.create_engine(
                url,
                poolclass=sa.pool.NullPool,
                hide_parameters=True,
                connect_args=shared,
                **({} if isolation is None else {"isolation_level": isolation}),
            )
        except sa.exc.NoSuchModuleError:  # an ArgumentError as well
            name = url.get_backend_name()
            package = _DIALECTS.get(name, f"a dialect of SQLAlchemy for {name}")
            raise _missing(where, f"the dialect '{name}'", package) from None
        except sa.exc.ArgumentError as error:
            raise ConfigurationError(f"{where}: {self.describe()} is no URL of its dialect: {error}") from None
        except ImportError as error:
            raise _missing(where, f"the driver '{error.name}'", f"the package of {error.name}") from error

    @contextmanager
    def transaction(
        self, where: str, refused: type[UnifiedError] = SinkError, read_only: bool = False
    ) -> Iterator[sa.Connection]:
        """A connection whose transaction is committed at the end, or rolled back after an error."""
        engine = self.engine(where, read_only)
        import sqlalchemy as sa

        with self.errors(where, refused):
            connection = _connected(engine)
            try:
                with connection, connection.begin():
                    if (settings := _SESSION.get(connection.dialect.name)) is not None:
                        connection.execute(sa.text(settings))
                    yield connection
            finally:
                engine.dispose()

    @contextmanager
    def errors(self, where: str, refused: type[UnifiedError]) -> Iterator[None]:
        """Raises what a driver raises as an error of this library; `refused` is what the database refuses."""
        import sqlalchemy as sa

        try:
            yield
        except sa.exc.DBAPIError as error:
            said = _said(error.orig)
            if is_locked(error):
                raise UnavailableError(
                    f"{where}: {self.describe()} is locked by another connection ({said}); another attempt may succeed"
                ) from None
            away = isinstance(error, sa.exc.OperationalError) and not _is_lasting(error.orig, said)
            if away or error.connection_invalidated:
                raise UnavailableError(f"{where}: {self.describe()} cannot do it now ({said})") from None
            raise refused(f"{where}: {self.describe()} refuses it: {said}") from None

    def is_missing(self, where: str) -> bool:
        """Whether it is a file that is not there."""
        file = _file(self.engine(where).url)
        return file is not None and not os.path.exists(file)


def _file(url: sa.URL) -> str | None:
    """The file of a database that is one."""
    file = url.database
    is_file = url.get_backend_name() in ("duckdb", "sqlite") and file and not file.startswith(("file:", ":", "md:"))
    return file if is_file else None


def is_locked(error: Any) -> bool:
    """Whether another connection is in the way, so that it may be tried again."""
    return bool(_LOCKED.search(str(error.orig)))


def _is_lasting(error: BaseException | None, said: str) -> bool:
    """Whether another attempt would meet again what a driver reports as operational."""
    code = getattr(error, "sqlite_errorcode", None)
    if code is not None:
        return code & 0xFF in _SQLITE_LASTING or bool(_LASTING.search(said))
    if (number := _number(error)) is not None:  # PyMySQL calls everything operational that it does not know
        return not 2000 <= number < 3000 and number not in _MYSQL_PASSING
    return bool(_LASTING.search(said))


def _said(error: BaseException | None) -> str:
    """The first line of what a driver says."""
    given = error.args[1] if error is not None and _number(error) is not None else error
    return str(given).strip().split("\n")[0] or type(error).__name__


def _number(error: BaseException | None) -> int | None:
    """The number that PyMySQL gives before what the server says."""
    return error.args[0] if error is not None and len(error.args) == 2 and isinstance(error.args[0], int) else None


def _connected(engine: sa.Engine) -> sa.Connection:
    import sqlalchemy as sa

    deadline = time.monotonic() + _LOCK_SECONDS
    while True:
        try:
            return engine.connect()
        except sa.exc.DBAPIError as error:
            if not is_locked(error) or time.monotonic() > deadline:
                raise
            time.sleep(_PAUSE)


def _missing(where: str, what: str, package: str) -> MissingRequirementError:
    return MissingRequirementError(f"{where}: {what} is not installed; install {package} on the driver and the workers")
