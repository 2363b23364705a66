"""DuckDB: rows come and go as Arrow.

DuckDB makes Arrow batches while it runs a query. Only with columns of which Arrow has less than Python's driver, such
as nested ones, rows come by the driver, and then times as texts: it would cut them off, and has no infinite ones.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import pyarrow as pa

from dagster_unified.connectors.sql.generic.dialect import Dialect
from dagster_unified.connectors.sql.sqlite import on_conflict
from dagster_unified.connectors.sql.table_source import Column

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
"""Types whose values Arrow can all hold."""


class DuckDb(Dialect):
    """DuckDB."""

    title = "DuckDB"
    package = "duckdb-sqlalchemy"
    exactly_once = True
    is_file = True
    session = "SET TimeZone = 'UTC'"
    read_only = {"read_only": True}

    def reads(self, kind: pa.DataType, stored_type: Any) -> bool:
        import sqlalchemy as sa
        from sqlalchemy.dialects import postgresql

        if pa.types.is_duration(kind) and isinstance(stored_type, (sa.Interval, postgresql.INTERVAL)):
            return True
        is_nested = isinstance(stored_type, sa.ARRAY) or type(stored_type).__name__ in ("FixedArray", "Struct", "Map")
        return (pa.types.is_nested(kind) and is_nested) or super().reads(kind, stored_type)

    def is_coarse(self, stored_type: Any) -> bool:
        import sqlalchemy as sa

        # so SQLAlchemy has TIMESTAMP_S and TIMESTAMP_MS, and no other
        return type(stored_type) is sa.TIMESTAMP and not stored_type.timezone

    def upsert(self, table: sa.Table, key: Sequence[str], further: Sequence[str]) -> Any:
        from sqlalchemy.dialects import postgresql

        return on_conflict(postgresql.insert(table), table, key, further)

    def insert(self, connection: sa.Connection, statement: Any, rows: pa.Table) -> None:
        """Insert all at once: row by row takes ten times as long."""
        import sqlalchemy as sa

        names = rows.column_names
        connection.execute(sa.text("register(:name, :rows)"), {"name": "staged_rows", "rows": rows})
        staged = sa.table("staged_rows", *[sa.column(name) for name in names])
        connection.execute(statement.from_select(names, sa.select(*staged.c)))

    def fetched(self, connection: sa.Connection, statement: sa.Select[Any]) -> Iterator[Sequence[Column]]:
        duckdb: Any = connection.connection.driver_connection
        text = str(statement.compile(connection, compile_kwargs={"literal_binds": True}))
        relation = duckdb.sql(text)  # it has not run yet
        if all(str(kind).partition("(")[0] in _ALIKE for kind in relation.types):
            reader = getattr(relation, "to_arrow_reader", None) or relation.fetch_arrow_reader  # before DuckDB 2
            for batch in reader(_ROWS):
                yield batch.columns
            return
        quoted = connection.dialect.identifier_preparer.quote_identifier
        result = duckdb.execute(f"SELECT {_with_texts(relation, quoted)} FROM ({text}) AS asked")
        while rows := result.fetchmany(_ROWS):
            yield list(zip(*rows, strict=True))


def _with_texts(relation: Any, quoted: Callable[[str], str]) -> str:
    """The columns of a DuckDB relation, with texts for times and dates, and microseconds for intervals."""
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
