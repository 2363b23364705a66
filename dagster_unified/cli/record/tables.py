"""The columns of a table or a query of PostgreSQL, as a record has them."""

from __future__ import annotations

from contextlib import closing
from typing import TYPE_CHECKING, Any

import pyarrow as pa

from dagster_unified.cli.record.classes import unread
from dagster_unified.errors import SourceError

if TYPE_CHECKING:
    from psycopg import Connection

    from dagster_unified.connectors.sql.postgres import PostgresConnection

_OF_TABLE = """
SELECT a.attname, a.attnotnull, a.attndims, col_description(a.attrelid, a.attnum)
FROM pg_attribute a WHERE a.attrelid = to_regclass(%s) AND a.attnum > 0 AND NOT a.attisdropped
"""
_TYPE = """
SELECT t.typtype::text, t.typname, t.typbasetype, t.typcategory = 'A', t.typelem, t.typrelid, format_type(t.oid, NULL)
FROM pg_type t WHERE t.oid = %s
"""
_OF_COMPOSITE = """
SELECT a.attname, a.atttypid, a.attndims FROM pg_attribute a
WHERE a.attrelid = %s AND a.attnum > 0 AND NOT a.attisdropped ORDER BY a.attnum
"""

_PLAIN = (
    pa.bool_(),
    pa.int64(),
    pa.decimal128(38, 18),
    pa.float64(),
    pa.timestamp("us", "UTC"),
    pa.date32(),
    pa.duration("us"),
    pa.binary(),
    pa.string(),
)
"""The types of fields that are not nested; a column has the first that is read from it."""


def of_table(table: str, connection: PostgresConnection) -> pa.Schema:
    """The columns of a table, with their comments, or of a query, whose columns may be null."""
    from dagster_unified.connectors.sql.postgres import PostgresSource
    from dagster_unified.connectors.sql.postgres.connection import errors_of

    source: PostgresSource[str] = PostgresSource(table, str, connection)
    relation = f"({source.query}\n) AS asked" if source.table is None else source.table.sql
    with (
        closing(connection.connect("record", autocommit=True)) as client,
        errors_of(connection, "record", SourceError),
    ):
        described = client.execute(f"SELECT * FROM {relation} LIMIT 0".encode()).description or []
        rows = client.execute(_OF_TABLE, (source.table.sql,)).fetchall() if source.table is not None else []
        known = {column: (required, dimensions, comment) for column, required, dimensions, comment in rows}
        fields = []
        for column in described:
            required, dimensions, comment = known.get(column.name, (False, 0, None))
            field = _field(client, column.name, column.type_code, dimensions).with_nullable(not required)
            fields.append(field.with_metadata({**(field.metadata or {}), b"comment": (comment or "").encode()}))
    return pa.schema(fields)


def _field(client: Connection[Any], name: str, oid: int, dimensions: int) -> pa.Field:
    """A field that reads a column, an attribute or an element of a type."""
    from dagster_unified.connectors.sql.postgres.types import AskedField

    typtype, base, below, is_array, element, relation, shown = _type(client, oid)
    if typtype == "d":
        return _field(client, name, below, dimensions)
    kind: pa.DataType | None
    if typtype == "e":
        return pa.field(name, pa.string())
    if typtype == "c":
        base = "record"
        kind = pa.struct([_field(client, *each) for each in client.execute(_OF_COMPOSITE, (relation,)).fetchall()])
    elif is_array:
        base = "_enum" if _type(client, element)[0] == "e" else base
        item = _field(client, "element", element, 0)
        for _ in range(max(1, dimensions)):
            item = pa.field("element", pa.list_(item))
        kind = item.type
    else:
        kind = next((plain for plain in _PLAIN if AskedField(name, plain).reads(base)), None)
    return pa.field(name, kind) if kind is not None and AskedField(name, kind).reads(base) else unread(name, shown)


def _type(client: Connection[Any], oid: int) -> tuple[Any, ...]:
    """What the catalog says of a type."""
    row: tuple[Any, ...] | None = client.execute(_TYPE, (oid,)).fetchone()
    assert row is not None
    return row
