"""The types of columns that are made for Arrow types.

What a database has no type for is stored as one that all have: nested values as texts of JSON, durations as
microseconds, and in SQLite decimals as texts.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import pyarrow as pa

from dagster_unified.connectors.sql.mariadb import EXACT
from dagster_unified.errors import SinkError

if TYPE_CHECKING:
    import sqlalchemy as sa

_OF_MYSQL = ("mariadb", "mysql")


def column_type(kind: pa.DataType, indexed: bool = False) -> Any:
    """The type of a column that is made for an Arrow type; `indexed` if it is a key."""
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
    """The type of a column of texts that are compared as they are, in MySQL but for blanks at their end.

    Else MariaDB takes 'A', 'a' and 'a ' for the same.
    """
    import sqlalchemy as sa
    from sqlalchemy.dialects import mysql

    exact = mysql.VARCHAR(characters, charset="utf8mb4", collation=f"utf8mb4{EXACT}")
    binary = mysql.VARCHAR(characters, charset="utf8mb4", collation="utf8mb4_bin")
    plain = elsewhere or sa.String(characters).with_variant(sa.Unicode(characters), "mssql")
    return plain.with_variant(exact, "mariadb").with_variant(binary, "mysql")


def spelled(held: Any) -> str:
    """A column's type, for messages; SQLAlchemy has no text for some."""
    import sqlalchemy as sa

    try:
        return str(held)
    except sa.exc.CompileError:
        return type(held).__name__


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
