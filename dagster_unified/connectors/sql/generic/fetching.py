"""Fetches what a statement asks for, by column: from DuckDB as Arrow, from other databases as Python's values.

DuckDB makes Arrow batches while it runs a query. Only with columns of which Arrow has less than Python's driver, such
as nested ones, rows come by the driver, and then times as texts: it would cut them off, and has no infinite ones. Knows
no record types.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any

from dagster_unified.connectors.sql.generic.reading import Column

if TYPE_CHECKING:
    import sqlalchemy as sa

_ROWS = 10_000
"""Rows of a batch."""

_ALIKE = {
    *("BOOLEAN", "TINYINT", "SMALLINT", "INTEGER", "BIGINT", "UTINYINT", "USMALLINT", "UINTEGER", "UBIGINT"),
    *("FLOAT", "DOUBLE", "DECIMAL", "VARCHAR", "JSON", "UUID", "ENUM", "BLOB"),
    *("HUGEINT", "DATE", "INTERVAL", "TIMESTAMP", "TIMESTAMP WITH TIME ZONE"),
    *("TIMESTAMP_S", "TIMESTAMP_MS", "TIMESTAMP_NS"),
}
"""DuckDB's types of whose values Arrow has all."""


def fetched(connection: sa.Connection, asked: sa.Select[Any]) -> Iterator[Sequence[Column]]:
    """The columns of some rows after the other; raises SQLAlchemy's errors."""
    with _driver_errors(connection):
        if connection.dialect.name == "duckdb":
            yield from _of_duckdb(connection, asked)
            return
        for rows in _rows(connection, asked):
            yield list(zip(*rows, strict=True))


def _rows(connection: sa.Connection, asked: sa.Select[Any]) -> Iterator[Sequence[Any]]:
    """Rows as the driver gives them, in batches."""
    if connection.dialect.supports_server_side_cursors:  # else the driver holds all rows, and SQLAlchemy reads ahead
        yield from connection.execution_options(stream_results=True).execute(asked).partitions(_ROWS)
        return
    if connection.dialect.name == "sqlite":  # a text that is none is for the reader to refuse
        driver: Any = connection.connection.driver_connection
        driver.text_factory = partial(str, encoding="utf-8", errors="surrogateescape")
    cursor: Any = connection.execute(asked).cursor  # rows of SQLAlchemy's own take twice the time
    while rows := cursor.fetchmany(_ROWS):
        yield rows


def _of_duckdb(connection: sa.Connection, asked: sa.Select[Any]) -> Iterator[Sequence[Column]]:
    duckdb: Any = connection.connection.driver_connection
    statement = str(asked.compile(connection, compile_kwargs={"literal_binds": True}))
    relation = duckdb.sql(statement)  # it has not run yet
    if all(str(kind).partition("(")[0] in _ALIKE for kind in relation.types):
        reader = getattr(relation, "to_arrow_reader", None) or relation.fetch_arrow_reader  # before DuckDB 2
        for batch in reader(_ROWS):
            yield batch.columns
        return
    quoted = connection.dialect.identifier_preparer.quote_identifier
    result = duckdb.execute(f"SELECT {_with_texts(relation, quoted)} FROM ({statement}) AS asked")
    while rows := result.fetchmany(_ROWS):
        yield list(zip(*rows, strict=True))


def _with_texts(relation: Any, quoted: Callable[[str], str]) -> str:
    """The columns of what DuckDB is asked, with texts for times and dates, and for intervals their microseconds."""
    texts = []
    for column, kind in zip(relation.columns, map(str, relation.types), strict=True):
        name = quoted(column)
        if kind.startswith(("DATE", "TIMESTAMP")):
            texts.append(f"CAST({name} AS VARCHAR) AS {name}")
        elif kind == "INTERVAL":  # one with months has no length
            months = f"datepart('year', {name}) <> 0 OR datepart('month', {name}) <> 0"
            length = f"CASE WHEN {months} THEN CAST({name} AS VARCHAR) ELSE CAST(epoch_us({name}) AS VARCHAR) END"
            texts.append(f"{length} AS {name}")
        elif "TIMESTAMP_NS" in kind:
            texts.append(f"CAST({name} AS JSON) AS {name}")
    return f"* REPLACE ({', '.join(texts)})" if texts else "*"


@contextmanager
def _driver_errors(connection: sa.Connection) -> Iterator[None]:
    """Raises a driver's error as SQLAlchemy does; an `OSError` is what Arrow makes of it."""
    import sqlalchemy as sa

    base = connection.dialect.loaded_dbapi.Error
    try:
        yield
    except (base, OSError) as error:
        raise sa.exc.DBAPIError.instance(None, None, error, base) from None
