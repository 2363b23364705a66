"""Replaces rows by what every database has, DELETE and then INSERT. Knows no single database and no commits.

What a database takes for the same key may be more than what is equal: to some `A` is `a`. That would remove a row of
another key, so it is an error.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import pyarrow as pa

from dagster_unified.errors import SinkError

if TYPE_CHECKING:
    import sqlalchemy as sa

_VALUES = 500
"""Values of one statement: databases have limits, from a thousand on."""


def remove_keys(connection: sa.Connection, table: sa.Table, key: Sequence[str], rows: pa.Table, where: str) -> None:
    """Deletes the rows that have the key of one of these; raises `SinkError` where a text only resembles one."""
    import sqlalchemy as sa

    columns = [table.c[name] for name in key]
    texts = [place for place, name in enumerate(key) if pa.types.is_string(rows.schema.field(name).type)]
    step = max(_VALUES // len(key), 1)
    for start in range(0, len(rows), step):
        keys = [tuple(row.values()) for row in rows.select(list(key)).slice(start, step).to_pylist()]
        meant: sa.ColumnElement[bool]
        if len(columns) == 1:
            meant = columns[0].in_([one for (one,) in keys])
        else:
            meant = sa.or_(*[sa.and_(*[c == v for c, v in zip(columns, one, strict=True)]) for one in keys])
        if texts:
            given = {tuple(one[place] for place in texts) for one in keys}
            found = connection.execute(sa.select(*[columns[place] for place in texts]).where(meant).distinct())
            for held in found:
                check_same(tuple(held), given, table.name, where)
        connection.execute(sa.delete(table).where(meant))


def check_same(held: tuple[str, ...], given: set[tuple[str, ...]], table: str, where: str) -> None:
    """Raises `SinkError` where a database finds a text that was not asked for."""
    if held not in given:
        raise SinkError(
            f"{where}: to the database the text {', '.join(map(repr, held))}, which table {table} has, is the same as"
            " another one that is written, and their rows would replace each other; give the column a collation that"
            " compares texts as they are"
        )
