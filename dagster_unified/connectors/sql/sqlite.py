"""SQLite: any column holds anything, decimals are texts, and times have no zone."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import pyarrow as pa

from dagster_unified.connectors.sql.generic.dialect import Dialect
from dagster_unified.connectors.sql.table_source import Column

if TYPE_CHECKING:
    import sqlalchemy as sa

_LASTING = (1, 3, 8, 14, 23)
"""SQLite's codes of errors that another attempt would meet again: ERROR, PERM, READONLY, CANTOPEN, AUTH."""


class Sqlite(Dialect):
    """SQLite."""

    title = "SQLite"
    exactly_once = True
    is_file = True
    lossy_decimals = ("Float", "Numeric")
    has_single_floats = False
    has_nan = False
    has_zones = False

    def is_lasting(self, error: BaseException | None, said: str) -> bool:
        code = getattr(error, "sqlite_errorcode", None)
        return (code is not None and code & 0xFF in _LASTING) or super().is_lasting(error, said)

    def stored_column(self, column: pa.ChunkedArray, name: str, where: str) -> pa.ChunkedArray:
        if pa.types.is_decimal(column.type):
            return column.cast(pa.string())
        return super().stored_column(column, name, where)

    def upsert(self, table: sa.Table, key: Sequence[str], further: Sequence[str]) -> Any:
        from sqlalchemy.dialects import sqlite

        return on_conflict(sqlite.insert(table), table, key, further)

    def is_odd(self, column: sa.ColumnClause[Any], kind: Any) -> Any:
        """A condition for a value of another type than its column's, or a text that is no time."""
        import sqlalchemy as sa

        if isinstance(kind, (sa.DateTime, sa.Date)):
            return sa.not_(column.op("GLOB")("[0-9][0-9][0-9][0-9]-[0-9][0-9]-[0-9][0-9]*"))
        return sa.func.typeof(column) != ("integer" if isinstance(kind, sa.Integer) else "text")

    def fetched(self, connection: sa.Connection, statement: sa.Select[Any]) -> Iterator[Sequence[Column]]:
        driver: Any = connection.connection.driver_connection
        driver.text_factory = partial(str, encoding="utf-8", errors="surrogateescape")  # the reader refuses such a text
        return super().fetched(connection, statement)


def on_conflict(insert: Any, table: sa.Table, key: Sequence[str], further: Sequence[str]) -> Any:
    """An INSERT … ON CONFLICT, as SQLite and DuckDB have it from PostgreSQL."""
    keys = [table.c[name] for name in key]
    if not further:
        return insert.on_conflict_do_nothing(index_elements=keys)
    replaced = {table.c[name]: insert.excluded[name] for name in further}
    return insert.on_conflict_do_update(index_elements=keys, set_=replaced)
