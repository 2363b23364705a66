"""Which columns of a database hold which Arrow types, and how values get there. Knows no single database.

What a database has no type for is stored as one that all have: nested values as texts of JSON, durations as
microseconds, and in SQLite decimals as texts.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import pyarrow as pa

from dagster_unified.connectors.nested import to_json
from dagster_unified.connectors.sql.generic.connection import OF_MYSQL
from dagster_unified.errors import SinkError

if TYPE_CHECKING:
    import sqlalchemy as sa

EXACT = "_nopad_bin"
"""How collations of MariaDB end that compare texts as they are."""

_NAMES = {"sqlite": "SQLite", "mariadb": "MariaDB", "mysql": "MySQL"}
"""Dialects that have no number for NaN."""

_SINGLE = 24
"""Binary digits of a float of single precision."""


def column_type(kind: pa.DataType, indexed: bool = False) -> Any:
    """The type of a column that is made for an Arrow type; `indexed` if it is a key."""
    import sqlalchemy as sa
    from sqlalchemy.dialects import mysql

    if pa.types.is_decimal(kind):
        return sa.Numeric(kind.precision, kind.scale).with_variant(sa.Text(), "sqlite")
    if pa.types.is_timestamp(kind):  # one without a precision rounds to seconds, as Oracle's DATE
        has_zone = kind.tz is not None
        of_mysql = sa.DateTime(timezone=has_zone).with_variant(mysql.DATETIME(fsp=6), *OF_MYSQL)
        return of_mysql.with_variant(sa.TIMESTAMP(timezone=has_zone), "oracle")
    if kind == pa.binary():
        return sa.LargeBinary().with_variant(mysql.VARBINARY(255) if indexed else mysql.LONGBLOB(), *OF_MYSQL)
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
    return sa.Text().with_variant(mysql.LONGTEXT(), *OF_MYSQL).with_variant(sa.UnicodeText(), "mssql")


def compared_text(characters: int, elsewhere: Any = None) -> Any:
    """The type of a column of texts that are compared as they are, in MySQL but for blanks at their end.

    Else MariaDB takes 'A', 'a' and 'a ' for the same.
    """
    import sqlalchemy as sa
    from sqlalchemy.dialects import mysql

    exact = mysql.VARCHAR(characters, charset="utf8mb4", collation=f"utf8mb4{EXACT}")
    binary = mysql.VARCHAR(characters, charset="utf8mb4", collation="utf8mb4_bin")
    plain = elsewhere or sa.String(characters).with_variant(sa.Unicode(characters), "mssql")
    return plain.with_variant(exact, "mariadb").with_variant(binary, "mysql")


def fits(kind: pa.DataType, held: Any, dialect: str, reading: bool = False) -> bool:
    """Whether a column of the database holds an Arrow type, or can be read as one.

    One whose type SQLAlchemy does not know may. A decimal loses digits in a column of floats, as all numbers of SQLite
    are, a float in one of single precision, and a time in one that has less than microseconds.
    """
    import sqlalchemy as sa
    from sqlalchemy.dialects import postgresql

    accepted: dict[pa.DataType, tuple[Any, ...]] = {
        pa.bool_(): (sa.Boolean, sa.Integer),
        pa.int64(): (sa.Integer,),
        pa.float64(): (sa.Float,),
        pa.string(): (sa.String, sa.Uuid, sa.JSON),
        pa.binary(): (sa.LargeBinary, sa.types._Binary),
        pa.date32(): (sa.Date,),
        pa.duration("us"): (sa.Integer,),
    }
    if not reading and dialect != "sqlite" and _is_single(held):
        return False
    if not reading and pa.types.is_timestamp(kind) and _is_coarse(held, dialect):
        return False
    if pa.types.is_decimal(kind):
        if not reading and isinstance(held, (sa.Float, sa.Numeric) if dialect == "sqlite" else sa.Float):
            return False
        types: tuple[Any, ...] = (sa.Numeric, sa.String)
    elif pa.types.is_timestamp(kind):
        types = (sa.DateTime,)
    else:
        types = accepted.get(kind, (sa.String, sa.JSON))
    if reading and (kind == pa.float64() or pa.types.is_decimal(kind)):
        types = (*types, sa.Numeric, sa.Float, sa.Integer)
    if reading and dialect == "duckdb":
        if pa.types.is_duration(kind):
            types = (*types, sa.Interval, postgresql.INTERVAL)
        if pa.types.is_nested(kind) and _is_nested(held):
            return True
    return isinstance(held, (*types, sa.types.NullType))


def _is_nested(held: Any) -> bool:
    """Whether a column of DuckDB holds lists, records or maps; of which values, the rows will say."""
    import sqlalchemy as sa

    return isinstance(held, sa.ARRAY) or type(held).__name__ in ("FixedArray", "Struct", "Map")


def spelled(held: Any) -> str:
    """A column's type, for messages; SQLAlchemy has no text for some."""
    import sqlalchemy as sa

    try:
        return str(held)
    except sa.exc.CompileError:
        return type(held).__name__


def _is_single(held: Any) -> bool:
    """Whether a column of floats has single precision, as REAL, or FLOAT unless its digits say otherwise."""
    import sqlalchemy as sa

    return isinstance(held, sa.REAL) or (isinstance(held, sa.FLOAT) and (held.precision or 0) <= _SINGLE)


def _is_coarse(held: Any, dialect: str) -> bool:
    """Whether a column of times has less than microseconds."""
    import sqlalchemy as sa
    from sqlalchemy.dialects import mssql

    if dialect in OF_MYSQL:
        return getattr(held, "fsp", None) != 6
    if dialect == "oracle":
        return not isinstance(held, sa.TIMESTAMP)
    if dialect == "mssql":
        return not isinstance(held, (mssql.DATETIMEOFFSET, mssql.DATETIME2))
    # so SQLAlchemy has DuckDB's TIMESTAMP_S and TIMESTAMP_MS, and no other
    return dialect == "duckdb" and type(held) is sa.TIMESTAMP and not held.timezone


def stored(table: pa.Table, dialect: str, where: str) -> pa.Table:
    """Rows in the types in which a database of this dialect holds them; raises `SinkError` for what it does not."""
    import pyarrow.compute as pc  # slow to load, and a pipeline is built without it

    for name in table.column_names if dialect in _NAMES else ():
        column = table.column(name)
        if pa.types.is_floating(column.type) and pc.any(pc.is_nan(column)).as_py():
            raise SinkError(
                f"{where}: field '{name}' is NaN, which {_NAMES[dialect]} has no number for; write None where that is"
                " meant"
            )
        if dialect in OF_MYSQL and pa.types.is_floating(column.type) and pc.any(pc.is_inf(column)).as_py():
            raise SinkError(
                f"{where}: field '{name}' is infinite, which {_NAMES[dialect]} has no number for; write None where that"
                " is meant"
            )
    return pa.table({name: _stored(table.column(name), name, dialect, where) for name in table.column_names})


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


def _stored(column: pa.ChunkedArray, name: str, dialect: str, where: str) -> Any:
    kind = column.type
    if pa.types.is_nested(kind):
        return pa.chunked_array([to_json(chunk, name, where) for chunk in column.chunks], pa.string())
    if pa.types.is_duration(kind):
        return column.cast(pa.int64())
    if pa.types.is_timestamp(kind) and kind.tz is not None and dialect in _NAMES:  # no zones: UTC
        return column.cast(pa.timestamp("us"))
    return column.cast(pa.string()) if pa.types.is_decimal(kind) and dialect == "sqlite" else column


def statement_columns(schema: pa.Schema, key: tuple[str, ...] = ()) -> list[sa.Column[Any]]:
    """The columns of a table for rows of this schema, with the names as they are written."""
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
