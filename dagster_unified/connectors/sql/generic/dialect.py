"""How a database differs from what all that SQLAlchemy knows have in common.

A `Dialect` says for any database how it is reached, what its errors mean, which columns hold what, and how rows get in
and out; a file beside this folder has the subclass of each database that is known better. Knows neither sinks nor
sources.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import pyarrow as pa

from dagster_unified.connectors.nested import to_json
from dagster_unified.connectors.sql.reading import Column
from dagster_unified.errors import SinkError

if TYPE_CHECKING:
    import sqlalchemy as sa

_LASTING = re.compile(
    "no such |no column named|syntax error|readonly|unknown column|doesn't exist|access denied|unknown database"
    "|does not exist|not a valid duckdb|command denied|authentication failed|login failed",
    re.IGNORECASE,
)
"""What databases report as operational, and another attempt would meet again."""

LOCK_SECONDS = 20.0
"""How long to wait for what another connection has locked."""

_ROWS = 10_000
"""Rows of one call of a driver."""

_SINGLE = 24
"""Binary digits of a float of single precision."""


class Dialect:
    """Any database that SQLAlchemy has a dialect for."""

    title = ""
    """The database's name, for people."""

    package = ""
    """What has to be installed beside SQLAlchemy."""

    exactly_once = False
    """Whether its transactions and comparisons are known to keep what an exactly-once sink promises."""

    is_file = False
    """Whether it is a file, whose names are the same in upper and lower case, with its tables in the schema `main`."""

    session: str | None = None
    """A statement that sets up a session. By its zone some databases convert between times with a zone and without."""

    isolation: str | None = None
    """The level at which a transaction sees what the one it has waited for has written, if not by itself."""

    read_only: Mapping[str, Any] = {}
    """What the driver is given where several processes only read."""

    lossy_decimals: tuple[str, ...] = ("Float",)
    """SQLAlchemy's types of columns in which a decimal loses digits."""

    has_single_floats = True
    has_nan = True
    has_infinity = True
    has_zones = True

    def __init__(self, name: str) -> None:
        self.name = name

    # Errors

    def is_lasting(self, error: BaseException | None, said: str) -> bool:
        """Whether another attempt would meet again what the driver reports as operational."""
        return bool(_LASTING.search(said))

    def said(self, error: BaseException | None) -> object:
        """What the driver says."""
        return error

    # Columns

    def holds(self, kind: pa.DataType, held: Any) -> bool:
        """Whether a column of this type holds all values of an Arrow type; one of an unknown type may.

        A decimal loses digits in a column of floats, a float in one of single precision, and a time in one that has
        less than microseconds.
        """
        import sqlalchemy as sa

        if self.has_single_floats and _is_single(held):
            return False
        if pa.types.is_timestamp(kind) and self.is_coarse(held):
            return False
        if pa.types.is_decimal(kind) and isinstance(held, tuple(getattr(sa, name) for name in self.lossy_decimals)):
            return False
        return isinstance(held, (*_types(kind), sa.types.NullType))

    def reads(self, kind: pa.DataType, held: Any) -> bool:
        """Whether an Arrow type can be read from a column of this type; which values, the rows will say."""
        import sqlalchemy as sa

        types = (*_types(kind), sa.types.NullType)
        if kind == pa.float64() or pa.types.is_decimal(kind):
            types = (*types, sa.Numeric, sa.Float, sa.Integer)
        return isinstance(held, types)

    def is_coarse(self, held: Any) -> bool:
        """Whether a column of times has less than microseconds."""
        return False

    # Rows that are written

    def check_table(
        self,
        connection: sa.Connection,
        table: str,
        schema: str | None,
        key: Sequence[str],
        partition_column: str | None,
        where: str,
    ) -> None:
        """Raises `SinkError` where the database would do with a table's rows what a sink does not promise."""

    def check_rows(self, connection: sa.Connection, table: str, schema: str | None, rows: pa.Table, where: str) -> None:
        """Raises `SinkError` for rows that the database would change, or not take."""

    def stored(self, table: pa.Table, where: str) -> pa.Table:
        """Rows in the types in which the database holds them; raises `SinkError` for what it does not."""
        import pyarrow.compute as pc  # slow to load, and a pipeline is built without it

        lacking = []
        lacking += [] if self.has_nan else [("NaN", pc.is_nan)]
        lacking += [] if self.has_infinity else [("infinite", pc.is_inf)]
        for name, column in zip(table.column_names, table.columns, strict=True):
            for what, is_such in lacking if pa.types.is_floating(column.type) else ():
                if pc.any(is_such(column)).as_py():
                    raise SinkError(
                        f"{where}: field '{name}' is {what}, which {self.title} has no number for; write None where"
                        " that is meant"
                    )
        return pa.table({name: self.stored_column(table.column(name), name, where) for name in table.column_names})

    def stored_column(self, column: pa.ChunkedArray, name: str, where: str) -> pa.ChunkedArray:
        """One column of them."""
        kind = column.type
        if pa.types.is_nested(kind):
            return pa.chunked_array([to_json(chunk, name, where) for chunk in column.chunks], pa.string())
        if pa.types.is_duration(kind):
            return column.cast(pa.int64())
        if pa.types.is_timestamp(kind) and kind.tz is not None and not self.has_zones:
            return column.cast(pa.timestamp("us"))
        return column

    def upsert(self, table: sa.Table, key: Sequence[str], further: Sequence[str]) -> Any:
        """An INSERT that replaces the other columns of a row with the same key."""
        raise NotImplementedError

    def insert(self, connection: sa.Connection, statement: Any, rows: pa.Table) -> None:
        """Insert these rows."""
        for start in range(0, len(rows), _ROWS):
            connection.execute(statement, rows.slice(start, _ROWS).to_pylist())

    # Rows that are read

    def exact(self, connection: sa.Connection, asked: sa.Select[Any], schema: pa.Schema) -> sa.Select[Any]:
        """The same statement, where the server would send values cut off."""
        return asked

    def is_odd(self, column: sa.ColumnClause[Any], kind: Any) -> Any:
        """Whether a value is not of its column's type, so that the reader has to see it; None where none can be."""
        return None

    def fetched(self, connection: sa.Connection, asked: sa.Select[Any]) -> Iterator[Sequence[Column]]:
        """The columns of some rows after the other."""
        if connection.dialect.supports_server_side_cursors:  # else the driver holds all rows, and SQLAlchemy reads on
            parts: Any = connection.execution_options(stream_results=True).execute(asked).partitions(_ROWS)
        else:
            cursor: Any = connection.execute(asked).cursor  # rows of SQLAlchemy's own take twice the time
            parts = iter(lambda: cursor.fetchmany(_ROWS) or None, None)
        for rows in parts:
            yield list(zip(*rows, strict=True))


class Oracle(Dialect):
    """Oracle."""

    def is_coarse(self, held: Any) -> bool:
        import sqlalchemy as sa

        return not isinstance(held, sa.TIMESTAMP)


class SqlServer(Dialect):
    """Microsoft SQL Server."""

    def is_coarse(self, held: Any) -> bool:
        from sqlalchemy.dialects import mssql

        return not isinstance(held, (mssql.DATETIMEOFFSET, mssql.DATETIME2))


class PostgreSql(Dialect):
    """PostgreSQL through SQLAlchemy; `sql/postgres/` speaks to it with its own clients."""

    session = "SET TIME ZONE 'UTC'"


def _types(kind: pa.DataType) -> tuple[Any, ...]:
    """SQLAlchemy's types of columns that are for an Arrow type."""
    import sqlalchemy as sa

    if pa.types.is_decimal(kind):
        return (sa.Numeric, sa.String)
    if pa.types.is_timestamp(kind):
        return (sa.DateTime,)
    accepted: dict[pa.DataType, tuple[Any, ...]] = {
        pa.bool_(): (sa.Boolean, sa.Integer),
        pa.int64(): (sa.Integer,),
        pa.float64(): (sa.Float,),
        pa.string(): (sa.String, sa.Uuid, sa.JSON),
        pa.binary(): (sa.LargeBinary, sa.types._Binary),
        pa.date32(): (sa.Date,),
        pa.duration("us"): (sa.Integer,),
    }
    return accepted.get(kind, (sa.String, sa.JSON))


def _is_single(held: Any) -> bool:
    """Whether a column of floats has single precision, as REAL, or FLOAT unless its digits say otherwise."""
    import sqlalchemy as sa

    return isinstance(held, sa.REAL) or (isinstance(held, sa.FLOAT) and (held.precision or 0) <= _SINGLE)
