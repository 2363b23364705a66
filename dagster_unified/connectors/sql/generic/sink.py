"""A sink into a table of a database: workers stage rows with `staging.py`, the driver commits with `committer.py`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pyarrow as pa

from dagster_unified.connectors.protocol.commits import DeliveryGuarantee, WriterTask
from dagster_unified.connectors.secrets import Value, check_is_no_url
from dagster_unified.connectors.sql.generic.committer import MARKS, DatabaseCommitter, WritePlan, not_exact
from dagster_unified.connectors.sql.generic.connection import Database
from dagster_unified.connectors.sql.generic.source import DatabaseSource
from dagster_unified.connectors.sql.generic.staging import RowsWriter, StagedRows
from dagster_unified.connectors.sql.table_sink import Mode, TableSink
from dagster_unified.errors import PipelineError
from dagster_unified.operators.functions.type_variables import In


class DatabaseSink(TableSink[In, StagedRows]):
    """Writes to a table of DuckDB, SQLite or MariaDB, exactly-once, or of another database that SQLAlchemy knows.

    In BATCH each stage is one transaction, in STREAMING each epoch. The same transaction marks who wrote, in the table
    `dagster_unified_commits`, so that nothing is written twice; readers see all of a write or nothing of it. For other
    databases that is not promised: `append` and `overwrite` need `delivery_guarantee=AT_LEAST_ONCE` there. `mode` is

    - `append`: rows are added. A run of a partition replaces what an earlier run of it wrote, if `partition_column`
      names a column of text that the sink fills with the partition's key; without it, a second run is refused.
    - `upsert`: the last record of each `key` replaces the row with that key.
    - `overwrite`: in BATCH the rows of a run replace the whole table, or, with `partition_column`, those of its
      partition; in STREAMING the first epoch of a deployment replaces what was there, and later ones add.

    A deployment that goes back to a savepoint does not take back what it appended since; its upserts come again.

    `connection` is a URL of SQLAlchemy, or an `EnvVar` that has one. Workers stage rows as files, and the driver loads
    them, so only the driver needs the database. `table` is taken as it is written, in the schema `schema`. A missing
    table is made, with the key as its primary key. Raises `PipelineError` for a promise that is not known to hold;
    when it runs, `SinkError` where the records do not fit the table, before rows are written, and `UnavailableError`,
    which is tried again, where the database is locked or away.

    Examples:
        >>> sink = DatabaseSink("sales", "duckdb:////data/shop.duckdb", mode="upsert", key="id")
        >>> sink.describe()
        'table sales at duckdb:////data/shop.duckdb (upsert by id)'
        >>> at_least_once = DeliveryGuarantee.AT_LEAST_ONCE
        >>> DatabaseSink("sales", "oracle://db/shop", delivery_guarantee=at_least_once).guarantee.value
        'at-least-once'
    """

    kind = "database"
    committable = StagedRows

    def __init__(
        self,
        table: str,
        connection: Value,
        mode: Mode = "append",
        key: str | Sequence[str] = (),
        partition_column: str | None = None,
        name: str | None = None,
        schema: str | None = None,
        delivery_guarantee: DeliveryGuarantee = DeliveryGuarantee.EXACTLY_ONCE,
    ) -> None:
        check_is_no_url(table)
        super().__init__(name or table, mode, key, partition_column)
        exactly_once = delivery_guarantee is DeliveryGuarantee.EXACTLY_ONCE
        self.capabilities = replace(self.capabilities, transactional=exactly_once)
        self._exactly_once = exactly_once and not self.upserts
        self.table, self.schema = table, schema
        self.database = Database.of(connection, f"sink '{self.name}'")
        if not table or table == MARKS or "\0" in table:
            raise PipelineError(f"sink '{self.name}': {table!r} cannot be the name of a table; choose another")
        dialect = self.database.dialect
        if self._exactly_once and dialect is not None and not dialect.exactly_once:
            raise PipelineError(not_exact(self._where, dialect))

    def place(self) -> tuple[str, str]:
        table = self.table if self.schema is None else f"{self.schema}.{self.table}"
        return table, self.database.describe()

    def target_place(self) -> str:
        database, dialect, (table, _) = self.database.place(), self.database.dialect, self.place()
        if dialect is not None and dialect.is_file:
            table = (self.table if self.schema == "main" else table).lower()
        return f"{database}/{table}"

    def committer(self, schema: pa.Schema) -> DatabaseCommitter:
        return DatabaseCommitter(
            WritePlan(
                self.database, self.table, self.schema, self.records.schema, self.mode, self.key,
                self.partition_column, self._exactly_once, self._where,
            )
        )  # fmt: skip

    def writer(self, task: WriterTask) -> RowsWriter:
        return RowsWriter(task.attempt)

    def exists(self) -> bool:
        if self.database.is_missing(self._where):
            return False
        with self.database.transaction(self._where, read_only=True) as connection:
            import sqlalchemy as sa

            return sa.inspect(connection).has_table(self.table, self.schema)

    def written(self) -> DatabaseSource[In]:
        return DatabaseSource(self.table, self.records, self.database.url, name=self.name, schema=self.schema)

    @property
    def _where(self) -> str:
        return f"sink '{self.name}'"
