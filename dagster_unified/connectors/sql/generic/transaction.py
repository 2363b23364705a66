"""What a commit does in a database that SQLAlchemy reaches: raises marks, deletes what is replaced, and loads rows."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import pyarrow as pa

from dagster_unified.connectors.sql.generic.connection import Database
from dagster_unified.connectors.sql.generic.dialect import Dialect
from dagster_unified.connectors.sql.generic.replacing import check_same, remove_keys
from dagster_unified.connectors.sql.generic.staging import StagedRows
from dagster_unified.connectors.sql.generic.types import shortened
from dagster_unified.connectors.sql.marked_write import MarkedWrite
from dagster_unified.connectors.sql.table_sink import Mode

if TYPE_CHECKING:
    import sqlalchemy as sa

MARKS = "dagster_unified_commits"
"""The library's table, with the highest version of each writer."""


@dataclass(frozen=True)
class WritePlan:
    """What a sink commits, and how."""

    database: Database
    table: str
    db_schema: str | None
    rows: pa.Schema
    mode: Mode
    key: tuple[str, ...]
    partition_column: str | None
    exactly_once: bool
    """Whether a repeated write must not be there twice; upserts need no such promise."""

    where: str
    """How messages begin."""


class DatabaseWrite(MarkedWrite[StagedRows]):
    """The transaction of some commits, on a connection that has begun it.

    `scales` are the digits after the point that the table's columns of decimals have.
    """

    def __init__(
        self,
        plan: WritePlan,
        dialect: Dialect,
        connection: sa.Connection,
        marks: sa.Table,
        table: sa.Table,
        scales: Mapping[str, int],
    ) -> None:
        super().__init__(plan.mode, plan.partition_column, plan.where)
        self._plan, self._dialect, self._connection = plan, dialect, connection
        self._marks, self._table, self._scales = marks, table, scales

    def version(self, name: str) -> int | None:
        """The version of a mark; None where there is none."""
        import sqlalchemy as sa

        asked = sa.select(self._marks.c.writer, self._marks.c.version).where(self._marks.c.writer == name)
        found = self._connection.execute(asked).one_or_none()
        if found is None:
            return None
        check_same((found.writer,), {(name,)}, MARKS, self.where)
        return int(found.version)

    def raise_mark(self, name: str, version: int, again: bool) -> bool | None:
        held = self._locked(name)
        if held is not None and (held > version or (held == version and not again)):
            return None
        self._remember(name, held, version)
        return held is None

    def count_run(self, name: str) -> bool:
        before = self._locked(name)
        self._remember(name, before, 0 if before is None else before + 1)
        return before is not None

    def _locked(self, name: str) -> int | None:
        """The version of a mark, which nobody else changes until this transaction ends."""
        import sqlalchemy as sa

        mine = self._marks.c.writer == name
        self._connection.execute(sa.update(self._marks).where(mine).values(version=self._marks.c.version))
        return self.version(name)

    def _remember(self, name: str, held: int | None, version: int) -> None:
        import sqlalchemy as sa

        if held is None:
            self._connection.execute(sa.insert(self._marks).values(writer=name, version=version))
        else:
            mine = self._marks.c.writer == name
            self._connection.execute(sa.update(self._marks).where(mine).values(version=version))

    def delete_all(self) -> None:
        import sqlalchemy as sa

        self._connection.execute(sa.delete(self._table))

    def delete_partition(self, column: str, key: str) -> None:
        import sqlalchemy as sa

        if self._dialect.exactly_once:
            self._connection.execute(sa.delete(self._table).where(self._table.c[column] == key))
        else:
            remove_keys(self._connection, self._table, (column,), pa.table({column: [key]}), self.where)

    def load(self, number: int, committables: Sequence[StagedRows], partition: str | None) -> None:
        for staged in committables:
            self._load(staged.table(), partition)

    def _load(self, rows: pa.Table, partition: str | None) -> None:
        plan, dialect = self._plan, self._dialect
        if plan.key:
            rows = _last_of_each_key(rows, plan.key)
        rows = shortened(dialect.stored(rows, self.where), self._scales, self.where)
        if partition is not None and self.partition_column is not None:
            rows = rows.append_column(self.partition_column, pa.array([partition] * len(rows), pa.string()))
        dialect.check_rows(self._connection, plan.table, plan.db_schema, rows, self.where)
        statement = self._table.insert()
        if plan.key and dialect.exactly_once:
            further = [name for name in plan.rows.names if name not in plan.key]
            statement = dialect.upsert(self._table, plan.key, further)
        elif plan.key:
            remove_keys(self._connection, self._table, plan.key, rows, self.where)
        dialect.insert(self._connection, statement, rows)


def _last_of_each_key(rows: pa.Table, key: tuple[str, ...]) -> pa.Table:
    numbered = rows.select(list(key)).append_column("__row", pa.array(range(len(rows)), pa.int64()))
    import pyarrow.compute as pc

    for place, name in enumerate(key):
        if pa.types.is_floating(numbered.column(name).type):  # to a database -0.0 is the key 0.0
            numbered = numbered.set_column(place, name, pc.add(numbered.column(name), 0.0))
    return rows.take(numbered.group_by(list(key)).aggregate([("__row", "max")]).column("__row_max"))
