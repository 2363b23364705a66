"""How a database differs from the others that SQLAlchemy knows, and the column types for it.

Types that a database lacks are stored as types that all have: nested values as JSON texts, durations as microseconds,
and in SQLite decimals as texts.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import pyarrow as pa

from dagster_unified.connectors.plain_values import to_json
from dagster_unified.connectors.sql.table_source import Column
from dagster_unified.errors import SinkError

if TYPE_CHECKING:
    import sqlalchemy as sa

_LASTING = re.compile(
    "no such |no column named|syntax error|readonly|unknown column|doesn't exist|access denied|unknown database"
    "|does not exist|not a valid duckdb|command denied|authentication failed|login failed",
    re.IGNORECASE,
)
"""Errors that databases report as operational, but that another attempt would meet again."""

LOCK_SECONDS = 20.0
"""Seconds to wait for a lock of another connection."""

_ROWS = 10_000
"""Rows in one call of a driver."""

_SINGLE = 24
"""Binary digits of a float of single precision."""


class Dialect:
    """Any database that SQLAlchemy has a dialect for."""

    title = ""
    """The database's name, for people."""

    package = ""
    """The package that is needed besides SQLAlchemy."""

    exactly_once = False
    """Whether its transactions and comparisons are known to keep what an exactly-once sink promises."""

    is_file = False
    """Whether it is a file, whose names are the same in upper and lower case, with its tables in the schema `main`."""

    session: str | None = None
    """A statement that sets up a session. By its zone some databases convert between times with a zone and without."""

    isolation: str | None = None
    """The level at which a transaction sees the writes of another that it waited for, if not by default."""

    read_only: Mapping[str, Any] = {}
    """Arguments of the driver where several processes only read."""

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
        """Whether another attempt would meet an error again that the driver reports as operational."""
        return bool(_LASTING.search(said))

    def said(self, error: BaseException | None) -> object:
        """The driver's message."""
        return error

    # Columns

    def holds(self, kind: pa.DataType, stored_type: Any) -> bool:
        """Whether a column of this type holds all values of an Arrow type; a column of an unknown type may.

        A decimal loses digits in a column of floats, a float in one of single precision, and a time in one that is
        coarser than microseconds.
        """
        import sqlalchemy as sa

        if self.has_single_floats and _is_single(stored_type):
            return False
        if pa.types.is_timestamp(kind) and self.is_coarse(stored_type):
            return False
        if pa.types.is_decimal(kind) and isinstance(
            stored_type, tuple(getattr(sa, name) for name in self.lossy_decimals)
        ):
            return False
        return isinstance(stored_type, (*_types(kind), sa.types.NullType))

    def reads(self, kind: pa.DataType, stored_type: Any) -> bool:
        """Whether an Arrow type can be read from a column of this type; single values may still not fit."""
        import sqlalchemy as sa

        types = (*_types(kind), sa.types.NullType)
        if kind == pa.float64() or pa.types.is_decimal(kind):
            types = (*types, sa.Numeric, sa.Float, sa.Integer)
        return isinstance(stored_type, types)

    def is_coarse(self, stored_type: Any) -> bool:
        """Whether a column of times is coarser than microseconds."""
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
        """Raise `SinkError` where the database would treat a table's rows in a way that a sink does not promise."""

    def check_rows(self, connection: sa.Connection, table: str, schema: str | None, rows: pa.Table, where: str) -> None:
        """Raise `SinkError` for rows that the database would change or reject."""

    def stored(self, table: pa.Table, where: str) -> pa.Table:
        """Rows in the database's types; raises `SinkError` for values that it cannot hold."""
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
        """One column in the database's type."""
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

    def exact(self, connection: sa.Connection, statement: sa.Select[Any], schema: pa.Schema) -> sa.Select[Any]:
        """The same statement, changed where the server would send rounded values."""
        return statement

    def is_odd(self, column: sa.ColumnClause[Any], kind: Any) -> Any:
        """A condition that a value is not of its column's type, for the reader to refuse; None where none can be."""
        return None

    def fetched(self, connection: sa.Connection, statement: sa.Select[Any]) -> Iterator[Sequence[Column]]:
        """The columns of some rows after another."""
        if connection.dialect.supports_server_side_cursors:  # else the driver holds all rows, and SQLAlchemy reads on
            parts: Any = connection.execution_options(stream_results=True).execute(statement).partitions(_ROWS)
        else:
            cursor: Any = connection.execute(statement).cursor  # rows of SQLAlchemy's own take twice the time
            parts = iter(lambda: cursor.fetchmany(_ROWS) or None, None)
        for rows in parts:
            yield list(zip(*rows, strict=True))


class Oracle(Dialect):
    """Oracle."""

    def is_coarse(self, stored_type: Any) -> bool:
        import sqlalchemy as sa

        return not isinstance(stored_type, sa.TIMESTAMP)


class SqlServer(Dialect):
    """Microsoft SQL Server."""

    def is_coarse(self, stored_type: Any) -> bool:
        from sqlalchemy.dialects import mssql

        return not isinstance(stored_type, (mssql.DATETIMEOFFSET, mssql.DATETIME2))


class PostgreSql(Dialect):
    """PostgreSQL through SQLAlchemy; `sql/postgres/` speaks to it with its own clients."""

    session = "SET TIME ZONE 'UTC'"


def _types(kind: pa.DataType) -> tuple[Any, ...]:
    """SQLAlchemy's column types for an Arrow type."""
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


def _is_single(stored_type: Any) -> bool:
    """Whether a column of floats has single precision, as REAL, or FLOAT unless its digits say otherwise."""
    import sqlalchemy as sa

    return isinstance(stored_type, sa.REAL) or (
        isinstance(stored_type, sa.FLOAT) and (stored_type.precision or 0) <= _SINGLE
    )


_OF_MYSQL = ("mariadb", "mysql")

EXACT = "_nopad_bin"
"""The end of the names of MariaDB's collations that compare texts as they are."""


def column_type(kind: pa.DataType, indexed: bool = False) -> Any:
    """The type of a new column for an Arrow type; `indexed` if it is a key."""
    import sqlalchemy as sa
    from sqlalchemy.dialects import mysql

    if pa.types.is_decimal(kind):
        return sa.Numeric(kind.precision, kind.scale).with_variant(sa.Text(), "sqlite")
    if pa.types.is_timestamp(kind):  # one without a precision rounds to seconds, as Oracle's DATE
        has_zone = kind.tz is not None
        of_mysql = sa.DateTime(timezone=has_zone).with_variant(mysql.DATETIME(fsp=6), *_OF_MYSQL)
        return of_mysql.with_variant(sa.TIMESTAMP(timezone=has_zone), "oracle")
    if kind == pa.binary():
        return sa.LargeBinary().with_variant(mysql.VARBINARY(255) if indexed else mysql.LONGBLOB(), *_OF_MYSQL)
    simple = {
        pa.bool_(): sa.Boolean(),
        pa.int64(): sa.BigInteger(),
        pa.float64(): sa.Double(),
        pa.date32(): sa.Date(),
        pa.duration("us"): sa.BigInteger(),
    }
    if kind in simple:
        return simple[kind]
    if indexed:  # Oracle and SQL Server index no text without a length
        return compared_text(255, sa.Text().with_variant(sa.Unicode(255), "mssql", "oracle"))
    return sa.Text().with_variant(mysql.LONGTEXT(), *_OF_MYSQL).with_variant(sa.UnicodeText(), "mssql")


def compared_text(characters: int, elsewhere: Any = None) -> Any:
    """A column type for texts that are compared as they are; MySQL still ignores blanks at the end.

    Else MariaDB takes 'A', 'a' and 'a ' for the same.
    """
    import sqlalchemy as sa
    from sqlalchemy.dialects import mysql

    exact = mysql.VARCHAR(characters, charset="utf8mb4", collation=f"utf8mb4{EXACT}")
    binary = mysql.VARCHAR(characters, charset="utf8mb4", collation="utf8mb4_bin")
    plain = elsewhere or sa.String(characters).with_variant(sa.Unicode(characters), "mssql")
    return plain.with_variant(exact, "mariadb").with_variant(binary, "mysql")


def spelled(stored_type: Any) -> str:
    """A column's type, for messages; SQLAlchemy has no text for some."""
    import sqlalchemy as sa

    try:
        return str(stored_type)
    except sa.exc.CompileError:
        return type(stored_type).__name__


def shortened(table: pa.Table, scales: Mapping[str, int], where: str) -> pa.Table:
    """Decimals with as many digits after the point as their columns have; raises `SinkError` for those with more."""
    for name, scale in scales.items():
        position, kind = table.schema.get_field_index(name), table.schema.field(name).type
        try:
            column = table.column(name).cast(pa.decimal128(kind.precision, scale))
        except pa.ArrowInvalid:
            raise SinkError(
                f"{where}: field '{name}' has more than the {scale} digits after the point that its column has; round"
                " it, or change the column"
            ) from None
        table = table.set_column(position, name, column)
    return table


def statement_columns(schema: pa.Schema, key: tuple[str, ...] = ()) -> list[sa.Column[Any]]:
    """The columns of a table for rows of this schema, with their names as they are written."""
    import sqlalchemy as sa
    from sqlalchemy.sql.elements import quoted_name

    return [
        sa.Column(
            quoted_name(field.name, True),
            column_type(field.type, field.name in key),
            primary_key=field.name in key,
            autoincrement=False,
            nullable=field.nullable,
        )
        for field in schema
    ]
