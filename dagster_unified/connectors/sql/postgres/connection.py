"""How to reach a PostgreSQL server, how names are quoted, what a user may do, and what errors mean."""

from __future__ import annotations

import functools
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal, Protocol, TypeAlias, runtime_checkable
from urllib.parse import parse_qsl, unquote, urlsplit

from dagster_unified.connectors.secrets import HasValue, ResourceKey, Value, check_is_no_url, deferred, resolved, shown
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
    import psycopg

    Client: TypeAlias = psycopg.Connection[tuple[Any, ...]]

_LONGEST = 63
"""Bytes of a name; PostgreSQL would cut off the rest without a word."""


def quoted(name: str) -> str:
    """A name quoted for SQL; raises `PipelineError` for what cannot be a name."""
    if not name or len(name.encode()) > _LONGEST or any(c in '"%\0' for c in name):
        raise PipelineError(
            f"{name!r} cannot be the name of something in PostgreSQL: expected 1 to {_LONGEST} bytes, without quotes,"
            " % and NUL"
        )
    return f'"{name}"'


@dataclass(frozen=True)
class TableName:
    """A table's name, and its schema's where it is given."""

    schema: str | None
    table: str

    @classmethod
    def of(cls, written: str) -> TableName:
        """`table` or `schema.table`, each in its own case; raises `PipelineError` for anything else."""
        check_is_no_url(written)
        parts = written.split(".") if isinstance(written, str) else []
        if len(parts) not in (1, 2):
            raise PipelineError(f"{written!r} is no table of PostgreSQL: write 'table' or 'schema.table'")
        for part in parts:
            quoted(part)
        return cls(parts[0] if len(parts) == 2 else None, parts[-1])

    @property
    def sql(self) -> str:
        """The name in SQL."""
        return quoted(self.table) if self.schema is None else f"{quoted(self.schema)}.{quoted(self.table)}"

    def __str__(self) -> str:
        return self.table if self.schema is None else f"{self.schema}.{self.table}"


_DENIED_TO = re.compile(r'permission denied for (materialized view|foreign table|\w+) "?([^"]+)')
_ON: dict[str, tuple[str, str]] = {
    "database": ("CONNECT", "DATABASE"), "schema": ("USAGE", "SCHEMA"), "sequence": ("USAGE", "SEQUENCE"),
    "type": ("USAGE", "TYPE"), "function": ("EXECUTE", "FUNCTION"), "table": ("SELECT", "TABLE"),
    "view": ("SELECT", "TABLE"), "materialized view": ("SELECT", "TABLE"), "foreign table": ("SELECT", "TABLE"),
}  # fmt: skip
"""The right that a source needs, and the word in GRANT, by the server's word for the object."""


def check_rights(
    client: Client, where: str, kind: Literal["database", "schema", "table"], oid: int, name: str, rights: Sequence[str]
) -> None:
    """Raise `ConfigurationError`, with the GRANT statement, for rights that the user lacks.

    `name` is quoted for SQL.
    """
    checks = ", ".join(f"has_{kind}_privilege(%s::oid, %s)" for _ in rights)
    parameters = [parameter for right in rights for parameter in (oid, right)]
    row = client.execute(f"SELECT current_user, {checks}".encode(), parameters).fetchone()
    assert row is not None
    missing = ", ".join(right for right, allowed in zip(rights, row[1:], strict=True) if not allowed)
    if missing:
        raise ConfigurationError(
            f"{where}: user '{row[0]}' has no right to {missing} on {kind} {name};"
            f" GRANT {missing} ON {kind.upper()} {name} TO {quoted(row[0])}"
        )


def grant_of(said: str, user: str | None) -> str:
    """The advice for a right that the server says a user lacks."""
    to = "the user that the job connects as" if user is None else f'"{user}"'
    denied = _DENIED_TO.search(said)
    right, kind = _ON.get(denied[1], ("", "")) if denied else ("", "")
    return f"GRANT {right} ON {kind} {denied[2]} TO {to}" if denied and right else f"grant it to {to}"


_DEFAULTS = {
    "connect_timeout": "8",
    "application_name": "dagster-unified",
    "keepalives_idle": "10",
    "keepalives_interval": "5",
    "keepalives_count": "3",
    "tcp_user_timeout": "30000",  # without it what was sent and not acknowledged is waited for a quarter of an hour
}
"""An error within ten seconds where nobody answers, and within half a minute where a server falls silent."""

_UNAVAILABLE = ("08", "53", "57", "58", "XX")
"""Classes of SQLSTATE: lost connections, lacking resources, an administrator's stop, the server's own trouble."""

_LACKING = {
    "53100": "make room on its disk; then another attempt goes on",
    "53200": "give it more memory, or let others use less",
    "53300": "let others use fewer connections, or raise its max_connections",
}
"""The advice where the server lacks something, by SQLSTATE."""

_SERVER_SAID = re.compile(r"(?:ERROR|FATAL|PANIC):\s*(.*)")
_TIMED_OUT = ("25P03", "25P04")
"""The server has ended a transaction, and the connection: it was idle, or took, for too long."""

_READING = "[libpq] "
"""The start of Arrow's errors of libpq while rows are read: an OSError or an ArrowInvalid, without an SQLSTATE."""

_READING_STATES = {
    "canceling statement": "57014",
    "lost connection to parallel worker": "57P02",
    "due to administrator command": "57P01",
    "No space left on device": "53100",
    "out of memory": "53200",
}
"""SQLSTATEs of errors while rows were read that another attempt may not meet, by what the server says."""

_GONE = re.compile(
    r"FATAL:|PANIC:|server closed the connection|could not (?:receive|send) data|connection (?:not open|to server)"
    r"|SSL (?:connection|SYSCALL)|no connection to the server",
)
"""Messages of libpq where the server ended the connection, or did not answer."""

_LOGIN = re.compile(
    r'authentication failed|no password supplied|pg_hba\.conf|not permitted to log in|role "[^"]*" does not exist'
)
_DENIED = re.compile(r"permission denied (?:for database|to set)")
_SETTING = re.compile(
    r"not currently accepting connections|unrecognized configuration parameter|(?:for|of) parameter \""
    r"|invalid (?:connection option|port|integer|URI|\w+ value)|SSL was required|certificate|private key file"
)
"""Messages for a login that is refused for good: libpq gives no SQLSTATE before a connection stands."""

CONFLICTS = ("40001", "40P01", "55P03")
"""Serialization failure, deadlock, and a lock that was not free in time."""


@runtime_checkable
class GivesConnection(Protocol):
    """Something that knows how to reach a server, such as `PostgresResource`."""

    def connection(self) -> PostgresConnection:
        """How to reach it."""


@dataclass(frozen=True, init=False, repr=False)
class PostgresConnection:
    """How to reach a PostgreSQL server: by its parts, or by a URL.

    Each value is a string or an object with `get_value()`, such as Dagster's `EnvVar`; it is looked up where a client
    connects, on the driver and in Spark's workers. `options` are further parameters of libpq, such as `sslmode`. What
    is not given, libpq takes from its own environment variables, such as `PGPASSWORD`. Secrets never appear in
    `explain`, logs or metadata. The same in both modes.

    Examples:
        >>> PostgresConnection(host="db.example", database="sales", user="etl", password="secret")
        PostgresConnection(postgresql://db.example:5432/sales)
        >>> PostgresConnection("postgresql://etl:secret@db.example/sales?sslmode=require")
        PostgresConnection(postgresql://db.example:5432/sales)
    """

    url: Value | None
    host: Value
    port: int | Value
    database: Value | None
    user: Value | None
    password: Value | None
    options: Mapping[str, Value] = field(hash=False)

    def __init__(
        self,
        url: Value | None = None,
        *,
        host: Value = "localhost",
        port: int | Value = 5432,
        database: Value | None = None,
        user: Value | None = None,
        password: Value | None = None,
        options: Mapping[str, Value] | None = None,
    ) -> None:
        parts: dict[str, Any] = {"host": host, "port": port, "database": database, "user": user, "password": password}
        further = dict(options or {})
        if isinstance(url, str) and not hasattr(url, "get_value"):
            in_url, options_in_url = _parsed(url)
            parts.update(in_url)
            further = {**options_in_url, **further}
            url = None
        object.__setattr__(self, "url", None if url is None else deferred(url))
        for name, value in parts.items():
            object.__setattr__(self, name, value if value is None else deferred(value))
        object.__setattr__(self, "options", {name: deferred(value) for name, value in further.items()})

    @classmethod
    def of(cls, connection: PostgresConnection | GivesConnection | Value) -> PostgresConnection:
        """A connection from whatever an author may write for one; raises `PipelineError` for anything else."""
        if isinstance(connection, PostgresConnection):
            return connection
        if isinstance(connection, ResourceKey):
            return _PostgresByKey(connection)
        if isinstance(connection, GivesConnection):
            return connection.connection()
        if isinstance(connection, str) or hasattr(connection, "get_value"):
            return cls(connection)
        raise PipelineError(
            f"expected a PostgresConnection, a PostgresResource or a URL, got a {type(connection).__name__}; write"
            " PostgresConnection(host=..., database=..., user=..., password=...)"
        )

    @property
    def resource_keys(self) -> frozenset[str]:
        """The key of the resource that it stands for, if it stands for one."""
        return frozenset()

    def connected(self, resources: Mapping[str, object]) -> PostgresConnection:
        """The same, with the resource that it stands for."""
        return self

    def describe(self) -> str:
        """Where the server is, for people: no user, no password, no options."""
        if self.url is not None:
            return f"postgresql at {shown(self.url)}"
        port = self.port if isinstance(self.port, int) else shown(self.port)
        database = "" if self.database is None else f"/{shown(self.database)}"
        return f"postgresql://{shown(self.host)}:{port}{database}"

    def place(self, table: TableName) -> Place:
        """The identity of a table."""
        schema = table.schema or "public"
        database = self.database if isinstance(self.database, str) else None
        return Place(
            f"{self.describe()}/{schema}.{table.table}", ".".join(filter(None, (database, schema, table.table)))
        )

    def __repr__(self) -> str:
        return f"PostgresConnection({self.describe()})"

    def parameters(self) -> dict[str, str]:
        """The parameters that libpq connects with, secrets included."""
        parts: dict[str, Any] = {}
        options: dict[str, Value] = {}
        if self.url is not None:
            parts, options = _parsed(resolved(self.url, "connection: url"))
        else:
            parts = {"host": self.host, "port": self.port, "database": self.database}
            parts |= {"user": self.user, "password": self.password}
        parameters = dict(_DEFAULTS)
        for name, value in {**parts, **options, **self.options}.items():
            if value is not None:
                parameters["dbname" if name == "database" else name] = resolved(value, f"connection: {name}")
        return parameters

    def connect(self, where: str, autocommit: bool = False) -> psycopg.Connection[tuple[Any, ...]]:
        """A connection for statements. `where` begins the message of an error.

        Raises `UnavailableError` where the server does not answer within ten seconds, `ConfigurationError` where it
        refuses the user, the password or the database.
        """
        client = _import("psycopg")
        with errors_of(self, where):
            connection: psycopg.Connection[tuple[Any, ...]] = client.connect(**self.parameters(), autocommit=autocommit)
        return connection

    def connect_bulk(self, where: str) -> Any:
        """An ADBC connection, for rows in bulk as Arrow; raises as `connect` does."""
        make_conninfo = _import("psycopg.conninfo").make_conninfo
        manager = _import("adbc_driver_manager")
        client = _import("adbc_driver_postgresql.dbapi")
        with errors_of(self, where):
            connected = manager.AdbcConnection(_database(make_conninfo("", **self.parameters())))
            try:
                return client.Connection(_SHARED, connected)
            except BaseException:
                connected.close()
                raise


class _PostgresByKey(PostgresConnection):
    """The server of a resource, by its key, which stands in the place of the URL."""

    def __init__(self, key: ResourceKey) -> None:
        super().__init__("postgresql://")
        object.__setattr__(self, "url", key)

    @property
    def resource_keys(self) -> frozenset[str]:
        return frozenset([self._key.key])

    def connected(self, resources: Mapping[str, object]) -> PostgresConnection:
        return _PostgresByKey(self._key.connected(resources))

    def parameters(self) -> dict[str, str]:
        resource = self._key.resource
        if not isinstance(resource, (PostgresConnection, str, HasValue)):
            raise self._key.unfit("PostgresResource")
        return PostgresConnection.of(resource).parameters()

    @property
    def _key(self) -> ResourceKey:
        assert isinstance(self.url, ResourceKey)
        return self.url


@functools.lru_cache(maxsize=8)
def _database(conninfo: str) -> Any:
    """ADBC's database object for a server, for this process's connections to it.

    Making one takes a connection of its own and three reads of the catalog of types, 60 ms in all. The rows have only
    PostgreSQL's own types, so that no type made later is missing.
    """
    return _import("adbc_driver_postgresql").connect(conninfo)


class _SharedDatabase:
    """Stands for the database that ADBC would close with a connection."""

    def close(self) -> None:
        """Close nothing: other connections use it."""


_SHARED = _SharedDatabase()


def _parsed(url: str) -> tuple[dict[str, Value], dict[str, Value]]:
    """The parts of a URL, and its options."""
    try:
        parts = urlsplit(url)
        port = parts.port
    except ValueError:
        parts, port = urlsplit(""), None
    if parts.scheme not in ("postgresql", "postgres"):
        # not shown: it may have a password in it
        raise ConfigurationError(
            "connection: the URL is none of PostgreSQL's; write postgresql://user:password@host:port/database"
        )
    in_url = {
        "host": parts.hostname,
        "port": None if port is None else str(port),
        "database": parts.path.lstrip("/"),
        "user": parts.username,
        "password": parts.password,
    }
    return {name: unquote(value) for name, value in in_url.items() if value}, dict(parse_qsl(parts.query))


def _import(module: str) -> Any:
    import importlib

    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise MissingRequirementError(
            f"PostgreSQL needs the package of {module.split('.')[0]}: install dagster-unified[postgres]"
        ) from error


@contextmanager
def errors_of(connection: PostgresConnection, where: str, refused: type[UnifiedError] = SinkError) -> Iterator[None]:
    """Raise errors of psycopg and ADBC inside as errors of this library; `refused` is the class for refusals."""
    try:
        yield
    except UnifiedError:
        raise
    except Exception as error:
        explained = translated(error, connection, where, refused)
        if explained is None:
            raise
        raise explained from error


def translated(
    error: Exception, connection: PostgresConnection, where: str, refused: type[UnifiedError] = SinkError
) -> UnifiedError | None:
    """The library's error for one of psycopg's, ADBC's or those of ADBC's rows; None for any other."""
    if type(error).__module__.split(".")[0] not in ("psycopg", "adbc_driver_manager") and not _was_reading(error):
        return None
    said, state = _said(error), sqlstate(error)
    server = connection.describe()
    connecting = not state and not _was_reading(error)
    if state in ("28P01", "28000") or (connecting and _LOGIN.search(said)):
        return ConfigurationError(f"{where}: {server} refuses the login ({said}); check user and password")
    if state == "3D000" or (connecting and 'database "' in said and "does not exist" in said):
        return ConfigurationError(f"{where}: {server}: {said}; check the name, or create it")
    if state == "42501" and "row-level security" in said:
        return refused(
            f"{where}: {server} refuses it: {said}; change the policy or the rows, or connect as a user with BYPASSRLS"
        )
    if state == "42501" or (connecting and _DENIED.search(said)):
        return ConfigurationError(f"{where}: {server}: {said}; {grant_of(said, connection.parameters().get('user'))}")
    if connecting and _SETTING.search(said):
        return ConfigurationError(f"{where}: {server}: {said}; correct the connection's options, or the server's")
    if lost(error) and state not in _TIMED_OUT and (state or not _SERVER_SAID.search(str(error))):
        return UnavailableError(f"{where}: {server} does not answer ({said}); is it up, and reachable?")
    if lost(error) or state[:2] in _UNAVAILABLE or state in CONFLICTS:
        advice = _LACKING.get(state, "another attempt may succeed")
        return UnavailableError(f"{where}: {server} cannot do it now ({said}); {advice}")
    if state in ("42P01", "3F000"):
        return refused(f"{where}: {server}: {said}; check the name, or create it")
    return refused(f"{where}: {server} refuses it: {said}")


def sqlstate(error: Exception) -> str:
    """The SQLSTATE of an error, or an empty string where the server gave none."""
    if _was_reading(error):
        return next((state for text, state in _READING_STATES.items() if text in str(error)), "")
    state = getattr(error, "sqlstate", None)
    return state.strip("\0") if isinstance(state, str) else ""


def lost(error: Exception) -> bool:
    """Whether the connection is gone, or never was: the server did not answer, or ended it."""
    state = sqlstate(error)
    if state:
        return state[:2] == "08" or state[:3] == "57P" or state in _TIMED_OUT
    if _was_reading(error):
        return _GONE.search(str(error)) is not None
    name = type(error).__name__
    return name in ("OperationalError", "ConnectionTimeout", "InterfaceError") or (
        name == "InternalError" and type(error).__module__.startswith("adbc")
    )


def _was_reading(error: Exception) -> bool:
    return str(error).startswith(_READING)


def _said(error: Exception) -> str:
    """The server's message, on one line."""
    diagnosis = getattr(error, "diag", None)
    detail = getattr(diagnosis, "message_detail", None)
    lines = [line.strip() for line in str(getattr(diagnosis, "message_primary", None) or error).splitlines()]
    lines = [line for line in lines if line] or [type(error).__name__]
    match = next((candidate for candidate in map(_SERVER_SAID.search, lines) if candidate), None)
    text = match[1] if match else lines[0].split("[libpq] ")[-1]
    return text.strip(" .") + (f": {detail.strip(' .')}" if detail else "")
