"""A sink into a table of PostgreSQL: workers stage rows with `staging.py`, the driver commits with `committer.py`."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from contextlib import closing
from typing import Self

import pyarrow as pa

from dagster_unified.connectors.protocol.commits import WriterTask
from dagster_unified.connectors.secrets import Value
from dagster_unified.connectors.sql.postgres.committer import PostgresCommitter, WritePlan
from dagster_unified.connectors.sql.postgres.connection import GivesConnection, PostgresConnection, TableName, quoted
from dagster_unified.connectors.sql.postgres.source import PostgresSource
from dagster_unified.connectors.sql.postgres.staging import PostgresCommittable, Staging, StagingWriter
from dagster_unified.connectors.sql.postgres.tables import Wanted
from dagster_unified.connectors.sql.postgres.types import staged_column
from dagster_unified.connectors.sql.table_sink import Mode, TableSink
from dagster_unified.graph.connectors import AssetName, Place
from dagster_unified.operators.functions.type_variables import In
from dagster_unified.records import RecordType

_PRIVILEGES = {
    "append": ("INSERT",),
    "upsert": ("INSERT", "SELECT", "UPDATE"),
    "overwrite": ("INSERT", "SELECT", "DELETE"),
}


class PostgresSink(TableSink[In, PostgresCommittable]):
    """Writes to a table of PostgreSQL, in one transaction per stage in BATCH and per epoch in STREAMING.

    The same transaction marks who wrote, in a table of the library, so that nothing is written twice; readers see all
    of a write or nothing of it. `mode` is

    - `append`: rows are added. A run of a partition replaces what an earlier run of it wrote, if `partition_column`
      names a column of text that the sink fills with the partition's key; without it, a second run is refused.
    - `upsert`: the last record of each `key` replaces the row with that key.
    - `overwrite`: in BATCH the rows of a run replace the whole table, or, with `partition_column`, those of its
      partition; in STREAMING the first epoch of a deployment replaces what was there, and later ones add.

    A deployment that goes back to a savepoint does not take back what it appended since; its upserts come again.

    `table` is `table` or `schema.table`, in its case. A missing table is made, with the key as its primary key. In a
    table that is there a column may be of any type that holds the field's values: of text also `uuid`, `json` and
    enums; of nested fields `json` or `jsonb`. Raises `SinkError` where the records do not fit, before rows are written.

    `connection` is a `PostgresConnection`, a `PostgresResource` or a URL. `library_schema` is where the library keeps
    its marks and stages rows; it is made if it is missing.

    Examples:
        >>> sink = PostgresSink("public.sales", "postgresql://etl@db.example/shop", mode="upsert", key="id")
        >>> sink.describe()
        'table public.sales at postgresql://db.example:5432/shop (upsert by id)'
    """

    kind = "postgres"
    committable = PostgresCommittable

    def __init__(
        self,
        table: str,
        connection: PostgresConnection | GivesConnection | Value,
        mode: Mode = "append",
        key: str | Sequence[str] = (),
        partition_column: str | None = None,
        name: str | None = None,
        library_schema: str = "dagster_unified",
        asset: AssetName | None = None,
    ) -> None:
        self.table = TableName.of(table)
        super().__init__(name or self.table.table, mode, key, partition_column, asset)
        self.connection = PostgresConnection.of(connection)
        self.resource_keys = self.connection.resource_keys
        self.library_schema = library_schema
        quoted(library_schema)
        if partition_column is not None:
            quoted(partition_column)

    def connected(self, resources: Mapping[str, object]) -> Self:
        changed = copy.copy(self)
        changed.connection = self.connection.connected(resources)
        return changed

    def place(self) -> tuple[str, str]:
        return str(self.table), self.connection.describe()

    def identity(self) -> Place:
        return self.connection.place(self.table)

    def check(self, records: RecordType) -> None:
        super().check(records)
        for name in records.names:
            quoted(name)

    def is_json(self, field: pa.Field) -> bool:
        return staged_column(field).json

    def committer(self, schema: pa.Schema) -> PostgresCommitter:
        staging = self._staging()
        privileges = _PRIVILEGES["overwrite" if self.partition_column else self.mode]
        wanted = Wanted(self.name, self.table, staging.columns, self.key, self.partition_column, privileges)
        return PostgresCommitter(WritePlan(staging, wanted, self.mode, self.where))

    def writer(self, task: WriterTask) -> StagingWriter:
        return self._staging().writer(task, self.where)

    def exists(self) -> bool:
        with closing(self.connection.connect(self.where)) as client:
            return client.execute("SELECT to_regclass(%s)", (self.table.sql,)).fetchone() != (None,)

    def written(self) -> PostgresSource[In]:
        return PostgresSource(str(self.table), self.records, self.connection, name=self.name)

    def _staging(self) -> Staging:
        columns = [staged_column(field) for field in self.records.schema]
        return Staging(self.connection, self.library_schema, columns, self.upserts)
