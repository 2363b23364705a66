"""The known databases, by the name of their dialect in SQLAlchemy. A new one is a file here, and an entry."""

from __future__ import annotations

from dagster_unified.connectors.sql.duckdb import DuckDb
from dagster_unified.connectors.sql.generic.dialect import Dialect, Oracle, PostgreSql, SqlServer
from dagster_unified.connectors.sql.mariadb import MariaDb, MySql
from dagster_unified.connectors.sql.sqlite import Sqlite

_KNOWN: dict[str, type[Dialect]] = {
    "sqlite": Sqlite,
    "duckdb": DuckDb,
    "mariadb": MariaDb,
    "mysql": MySql,
    "oracle": Oracle,
    "mssql": SqlServer,
    "postgresql": PostgreSql,
}


def dialect_of(name: str) -> Dialect:
    """The dialect of this database; for an unknown one, the common dialect."""
    return _KNOWN.get(name, Dialect)(name)


def exactly_once() -> list[str]:
    """The databases to which a sink writes exactly once, for people."""
    return [dialect.title for dialect in _KNOWN.values() if dialect.exactly_once]
