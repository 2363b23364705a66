"""What MariaDB would do with rows that a sink does not promise: refused before it does. Knows no commits."""

from __future__ import annotations

from collections.abc import Sequence
from functools import reduce
from typing import TYPE_CHECKING

import pyarrow as pa

from dagster_unified.connectors.sql.generic.types import EXACT
from dagster_unified.errors import SinkError

if TYPE_CHECKING:
    import sqlalchemy as sa

_ESCAPED = "[\\x00\\n\\r\\x1a\"'\\\\]"
"""What the client writes as two bytes."""

_BESIDE = 1 << 16
"""Bytes of a statement for its beginning, the other columns and the quotes."""

_STATEMENT = 1 << 21
"""Bytes of a statement of many rows, at most: the client ends it soon after a million."""

_OF_TABLE = "table_schema = COALESCE(:schema, DATABASE()) AND table_name = :table"


def check_table(
    connection: sa.Connection,
    table: str,
    schema: str | None,
    key: Sequence[str],
    partition_column: str | None,
    where: str,
) -> None:
    """Raises `SinkError` where a table has no transactions, or compares keys in another way than a sink does."""
    import sqlalchemy as sa

    given = {"schema": schema, "table": table}
    asked = sa.text(f"SELECT engine FROM information_schema.tables WHERE {_OF_TABLE}")
    engine = connection.execute(asked, given).scalar()
    if engine != "InnoDB":
        raise SinkError(
            f"{where}: table {table} is in the engine {engine}, which has no transactions; change it by"
            " ALTER TABLE … ENGINE = InnoDB"
        )
    asked = sa.text(f"SELECT column_name, collation_name FROM information_schema.columns WHERE {_OF_TABLE}")
    for name, collation in connection.execute(asked, given):
        if (name in key or name == partition_column) and collation is not None and not collation.endswith(EXACT):
            raise SinkError(
                f"{where}: column '{name}' of {table} has the collation {collation}, by which texts that differ are one"
                f" key ('A' and 'a', or 'a' and 'a '); give it utf8mb4{EXACT}"
            )
    if key:
        _check_unique(sa.inspect(connection), table, schema, key, where)


def _check_unique(found: sa.Inspector, table: str, schema: str | None, key: Sequence[str], where: str) -> None:
    """An upsert replaces the row that any unique index finds."""
    unique = {str(one["name"]): one["column_names"] for one in found.get_indexes(table, schema) if one["unique"]}
    unique["the primary key"] = list(found.get_pk_constraint(table, schema)["constrained_columns"])
    others = [name for name, columns in unique.items() if columns and set(columns) != set(key)]
    if others:
        raise SinkError(
            f"{where}: table {table} has unique columns beside the key ({', '.join(others)}): MariaDB would replace a"
            " row of another key that has the same there; upsert by these, or drop them"
        )


def check_lengths(connection: sa.Connection, table: str, schema: str | None, rows: pa.Table, where: str) -> None:
    """Raises `SinkError` for blanks that a column would cut off, and for rows that are longer than the server takes.

    The latter would end the connection, as if the server were away.
    """
    long = [column for column in rows.columns if pa.types.is_string(column.type) or pa.types.is_binary(column.type)]
    if long and rows.num_rows:
        _check_blanks(connection, table, schema, rows, where)
        _check_sizes(connection, long, where)


def _check_blanks(connection: sa.Connection, table: str, schema: str | None, rows: pa.Table, where: str) -> None:
    """Strict sessions refuse texts that are too long, but for blanks at their end."""
    import pyarrow.compute as pc
    import sqlalchemy as sa

    texts = [name for name in rows.column_names if pa.types.is_string(rows.schema.field(name).type)]
    suspects = [name for name in texts if pc.any(pc.ends_with(rows[name], " ")).as_py()]
    if not suspects:  # else each commit would ask
        return
    asked = sa.text(
        "SELECT column_name, column_type, character_maximum_length FROM information_schema.columns"
        f" WHERE {_OF_TABLE} AND data_type = 'varchar'"
    )
    for name, kind, most in connection.execute(asked, {"schema": schema, "table": table}):
        if name in suspects:
            long = rows[name].filter(pc.greater(pc.utf8_length(rows[name]), most))
            if pc.any(pc.less_equal(pc.utf8_length(pc.ascii_rtrim(long, " ")), most)).as_py():
                raise SinkError(
                    f"{where}: field '{name}' has longer texts than its column holds, which is {kind}, if only by"
                    " blanks at their end; cut them, or change the column"
                )


def _check_sizes(connection: sa.Connection, long: Sequence[pa.ChunkedArray], where: str) -> None:
    import pyarrow.compute as pc
    import sqlalchemy as sa

    most = connection.execute(sa.text("SELECT @@max_allowed_packet")).scalar_one()
    if most < _STATEMENT:
        raise SinkError(
            f"{where}: the server's max_allowed_packet is {most} bytes, and statements of many rows need {_STATEMENT};"
            " raise it"
        )
    sizes = [pc.fill_null(pc.binary_length(column), 0).cast(pa.int64()) for column in long]
    plain = reduce(pc.add, sizes)
    suspects = pc.greater(plain, (most - _BESIDE) // 2)  # the others fit, whatever has to be escaped in them
    if not pc.any(suspects).as_py():
        return
    escaped = [
        pc.fill_null(pc.count_substring_regex(column.filter(suspects), _ESCAPED), 0).cast(pa.int64()) for column in long
    ]
    longest = pc.max(reduce(pc.add, escaped, plain.filter(suspects))).as_py()
    if longest > most - _BESIDE:
        raise SinkError(
            f"{where}: a row of {longest} bytes, as it is sent, is more than the server's max_allowed_packet of {most}"
            " has room for; raise that, or write shorter values"
        )
