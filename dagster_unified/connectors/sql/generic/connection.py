"""How to reach a database by a URL of SQLAlchemy, and what its errors mean. Knows neither sinks nor sources."""

from __future__ import annotations

import os
import re
import socket
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import PurePosixPath
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from dagster_unified.connectors.secrets import ResourceKey, Value, deferred, resolved, shown
from dagster_unified.connectors.sql.duckdb import DuckDb
from dagster_unified.connectors.sql.generic.dialect import LOCK_SECONDS, Dialect, Oracle, PostgreSql, SqlServer
from dagster_unified.connectors.sql.mariadb import MariaDb, MySql
from dagster_unified.connectors.sql.sqlite import Sqlite
from dagster_unified.errors import (
    ConfigurationError,
    MissingRequirementError,
    PipelineError,
    SinkError,
    UnavailableError,
    UnifiedError,
)
from dagster_unified.graph.connectors import Place

if TYPE_CHECKING:
    import sqlalchemy as sa

_KNOWN: dict[str, type[Dialect]] = {
    "sqlite": Sqlite,
    "duckdb": DuckDb,
    "mariadb": MariaDb,
    "mysql": MySql,
    "oracle": Oracle,
    "mssql": SqlServer,
    "postgresql": PostgreSql,
}
"""The known databases, by the name of their dialect in SQLAlchemy."""


def dialect_of(name: str) -> Dialect:
    """The dialect of this database; for an unknown one, the common dialect."""
    return _KNOWN.get(name, Dialect)(name)


def exactly_once() -> list[str]:
    """The databases to which a sink writes exactly once, for people."""
    return [dialect.title for dialect in _KNOWN.values() if dialect.exactly_once]


_PAUSE = 0.05
_LOCKED = re.compile(
    "database (table )?is locked|could not set lock|lock wait timeout|deadlock|write-write conflict|conflict on"
    "|different configuration than existing",
    re.IGNORECASE,
)
_URL = re.compile(r"([\w+]+)://(?:[^:/]*(?::[^@]*)?@)?([^/?@]*)(/[^?]*)?(?:\?.*)?", re.DOTALL)
"""A URL as SQLAlchemy splits it, with slashes allowed in passwords: its scheme, its host, its path."""


@dataclass(frozen=True, repr=False)
class Database:
    """A database, by its URL, which may be looked up where a client connects. Secrets never appear in its text."""

    url: Value

    @classmethod
    def of(cls, url: Value, where: str) -> Database:
        """A database from a URL, an `EnvVar` or the key of a resource; raises `PipelineError` for anything else."""
        if isinstance(url, str) and not hasattr(url, "get_value"):
            if _URL.fullmatch(url):
                return cls(url)
        elif hasattr(url, "get_value"):
            return cls(url if isinstance(url, ResourceKey) else deferred(url))
        # not shown: it may have a password in it
        raise PipelineError(
            f"{where}: the connection is no URL of SQLAlchemy; write duckdb:////data/shop.duckdb,"
            " sqlite:////data/shop.db, mysql+pymysql://user@host/database, or give an EnvVar that has such a URL; an @"
            " in a password is %40"
        )

    @property
    def resource_keys(self) -> frozenset[str]:
        """The key of the resource that has its URL, if one has."""
        return frozenset([self.url.key] if isinstance(self.url, ResourceKey) else ())

    def connected(self, resources: Mapping[str, object]) -> Database:
        """The same, with the resource that has its URL."""
        return Database(self.url.connected(resources)) if isinstance(self.url, ResourceKey) else self

    def describe(self) -> str:
        """Where it is, for people: no user, no password, no options."""
        if not isinstance(self.url, str):
            return f"database at {shown(self.url)}"
        parts = self._parts
        return f"{parts[1]}://{parts[2]}{parts[3] or ''}" if parts else "a database"

    @property
    def dialect(self) -> Dialect | None:
        """The database's dialect; None where only an environment variable tells which database it is."""
        return dialect_of(self._parts[1].partition("+")[0]) if self._parts else None

    @property
    def _parts(self) -> re.Match[str] | None:
        return _URL.fullmatch(self.url) if isinstance(self.url, str) else None

    def place(self) -> str:
        """The one form of all URLs that lead to the database, as far as they tell."""
        parts, dialect = self._parts, self.dialect
        if parts is None or dialect is None:
            return self.describe()
        path = parts[3] or ""
        if dialect.is_file and path:
            path = f"/{os.path.realpath(path.removeprefix('/'))}"
        return f"{dialect.name}://{parts[2]}{path}"

    def place_of(self, table: str, schema: str | None) -> Place:
        """The identity of a table."""
        dialect = self.dialect
        in_file = dialect is not None and dialect.is_file
        if in_file:
            schema, table = (schema or "main").lower(), table.lower()
        database = PurePosixPath(urlsplit(self.place()).path).name
        name = f"{schema}.{table}" if schema else table
        known = PurePosixPath(database).stem if in_file else database
        return Place(f"{self.place()}/{name}", f"{known}.{name}" if known else name)

    def __repr__(self) -> str:
        return f"Database({self.describe()})"

    def engine(self, where: str, read_only: bool = False) -> sa.Engine:
        """An engine that keeps no connections: an open file is locked for others.

        Several processes may have a DuckDB file open, if all only read it.
        """
        try:
            import sqlalchemy as sa
        except ImportError as error:
            raise _missing(where, "sqlalchemy", "dagster-unified[databases]") from error
        try:
            url = sa.make_url(resolved(self.url, f"{where}: connection"))
        except (sa.exc.ArgumentError, ValueError):
            raise ConfigurationError(f"{where}: what {self.describe()} holds is no URL of SQLAlchemy") from None
        dialect = dialect_of(url.get_backend_name())
        if read_only and (file := _file(url)) is not None and not os.path.exists(file):
            raise ConfigurationError(f"{where}: there is no file {file}; check the path, and that all workers see it")
        try:
            return sa.create_engine(
                url,
                poolclass=sa.pool.NullPool,
                hide_parameters=True,
                connect_args=dict(dialect.read_only) if read_only else {},
                **({} if dialect.isolation is None else {"isolation_level": dialect.isolation}),
            )
        except sa.exc.NoSuchModuleError:  # an ArgumentError as well
            package = dialect.package or f"a dialect of SQLAlchemy for {dialect.name}"
            raise _missing(where, f"the dialect '{dialect.name}'", package) from None
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

        dialect = dialect_of(engine.dialect.name)
        with self._errors(dialect, where, refused, f"see that it runs, and that {socket.gethostname()} reaches it"):
            connection = _connected(engine)
        with self._errors(dialect, where, refused, "another attempt may succeed"):
            try:
                with connection, connection.begin():
                    if dialect.session is not None:
                        connection.execute(sa.text(dialect.session))
                    yield connection
            finally:
                engine.dispose()

    @contextmanager
    def _errors(self, dialect: Dialect, where: str, refused: type[UnifiedError], once_away: str) -> Iterator[None]:
        """Raise a driver's errors as errors of this library; `refused` is the class for refusals.

        `once_away` says what to do about a database that does not answer.
        """
        import sqlalchemy as sa

        try:
            yield
        except sa.exc.DBAPIError as error:
            said = str(dialect.said(error.orig)).strip().split("\n")[0] or type(error.orig).__name__
            if is_locked(error):
                raise UnavailableError(
                    f"{where}: {self.describe()} is locked by another connection ({said}); another attempt may succeed"
                ) from None
            away = isinstance(error, sa.exc.OperationalError) and not dialect.is_lasting(error.orig, said)
            if away or error.connection_invalidated:
                raise UnavailableError(f"{where}: {self.describe()} cannot do it now ({said}); {once_away}") from None
            raise refused(f"{where}: {self.describe()} refuses it: {said}") from None

    def is_missing(self, where: str) -> bool:
        """Whether it is a file that does not exist."""
        file = _file(self.engine(where).url)
        return file is not None and not os.path.exists(file)


def _file(url: sa.URL) -> str | None:
    """The file of a database that is one."""
    file = url.database
    is_file = dialect_of(url.get_backend_name()).is_file and file and not file.startswith(("file:", ":", "md:"))
    return file if is_file else None


def is_locked(error: Any) -> bool:
    """Whether another connection is in the way, so that it may be tried again."""
    return bool(_LOCKED.search(str(error.orig)))


@contextmanager
def driver_errors(connection: sa.Connection) -> Iterator[None]:
    """Raise a driver's error as SQLAlchemy does; Arrow makes an `OSError` of it."""
    import sqlalchemy as sa

    base = connection.dialect.loaded_dbapi.Error
    try:
        yield
    except (base, OSError) as error:
        raise sa.exc.DBAPIError.instance(None, None, error, base) from None


def _connected(engine: sa.Engine) -> sa.Connection:
    import sqlalchemy as sa

    deadline = time.monotonic() + LOCK_SECONDS
    while True:
        try:
            return engine.connect()
        except sa.exc.DBAPIError as error:
            if not is_locked(error) or time.monotonic() > deadline:
                raise
            time.sleep(_PAUSE)


def _missing(where: str, what: str, package: str) -> MissingRequirementError:
    return MissingRequirementError(f"{where}: {what} is not installed; install {package} on the driver and the workers")
