"""Fetches what a statement asks for, by column: from DuckDB as Arrow, from other databases as Python's values.

DuckDB makes Arrow batches while it runs a query. What it has columns of for which Arrow and Python's driver give
different values, such as intervals, comes by the driver. Knows no record types.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from dagster_unified.connectors.database.reading import Column

if TYPE_CHECKING:
    import sqlalchemy as sa

_ROWS = 10_000
"""Rows of a batch."""

_ALIKE = {
    *("BOOLEAN", "TINYINT", "SMALLINT", "INTEGER", "BIGINT", "UTINYINT", "USMALLINT", "UINTEGER", "UBIGINT"),
    *("FLOAT", "DOUBLE", "DECIMAL", "VARCHAR", "JSON", "UUID", "ENUM", "BLOB"),
    *("DATE", "TIMESTAMP", "TIMESTAMP WITH TIME ZONE"),
}
"""DuckDB's types whose values Arrow has as Python has them."""


def fetched(connection: sa.Connection, asked: sa.Select[Any]) -> Iterator[Sequence[Column]]:
    """The columns of some rows after the other; raises SQLAlchemy's errors."""
    with _driver_errors(connection):
        if connection.dialect.name == "duckdb":
            relation = _relation(connection, asked)
            if all(str(kind).partition("(")[0] in _ALIKE for kind in relation.types):
                reader = getattr(relation, "to_arrow_reader", None) or relation.fetch_arrow_reader  # before DuckDB 2
                for batch in reader(_ROWS):
                    yield batch.columns
                return
        for rows in _rows(connection, asked):
            yield list(zip(*rows, strict=True))


def _rows(connection: sa.Connection, asked: sa.Select[Any]) -> Iterator[Sequence[Any]]:
    """Rows as the driver gives them, in batches."""
    if connection.dialect.supports_server_side_cursors:  # else the driver holds all rows, and SQLAlchemy reads ahead
        yield from connection.execution_options(stream_results=True).execute(asked).partitions(_ROWS)
        return
    cursor: Any = connection.execute(asked).cursor  # rows of SQLAlchemy's own take twice the time
    while rows := cursor.fetchmany(_ROWS):
        yield rows


def _relation(connection: sa.Connection, asked: sa.Select[Any]) -> Any:
    """What DuckDB is asked, which has not run yet."""
    duckdb: Any = connection.connection.driver_connection
    return duckdb.sql(str(asked.compile(connection, compile_kwargs={"literal_binds": True})))


@contextmanager
def _driver_errors(connection: sa.Connection) -> Iterator[None]:
    """Raises a driver's error as SQLAlchemy does; an `OSError` is what Arrow makes of it."""
    import sqlalchemy as sa

    base = connection.dialect.loaded_dbapi.Error
    try:
        yield
    except (base, OSError) as error:
        raise sa.exc.DBAPIError.instance(None, None, error, base) from None
