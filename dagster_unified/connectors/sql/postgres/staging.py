"""Stages rows in Spark's workers: a few travel to the driver in the committable, more go into a table by COPY.

A staging table belongs to one attempt at one task, and is created in the transaction that fills it: so a killed task
leaves nothing, and of a task that runs twice each run has its own. The table is unlogged, which is fast, but a server
that crashes empties it; so a committable says how many rows there have to be.

Imports neither psycopg nor ADBC before it stages in a table.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass
from hashlib import blake2s
from typing import Any

import pyarrow as pa

from dagster_unified.connectors.plain_values import to_json
from dagster_unified.connectors.protocol.commits import (
    Committable,
    WriteAttempt,
    WriteIdentity,
    Writer,
    WriterTask,
    arrow_stream,
)
from dagster_unified.connectors.sql.postgres.connection import PostgresConnection, errors_of, quoted
from dagster_unified.connectors.sql.postgres.types import StagedColumn

ORDER = "__order"
"""A staged column that orders rows of one key, for upserts."""

_INLINE_BYTES = 256 * 1024
"""Rows of one task that travel to the driver. A staging table costs a connection and a file, about 100 ms."""

_CHUNK_BYTES = 16 * 1024 * 1024
"""Rows that are kept in a worker's memory before they are sent."""

_STAGED = re.compile(r"staged_([0-9a-f]{8})_([0-9a-f]{14})_")


class PostgresCommittable(Committable, frozen=True, kw_only=True):
    """Staged rows: those of a table, or the rows themselves as an Arrow stream."""

    table: str = ""
    arrow: bytes = b""

    def batches(self) -> Iterator[pa.RecordBatch]:
        """The rows that travelled in the committable."""
        if self.arrow:
            yield from pa.ipc.open_stream(self.arrow)


def writer_tag(identity: WriteIdentity) -> str:
    """The part that the names of all staging tables of one writer share."""
    return blake2s(identity.origin.encode(), digest_size=4).hexdigest()


def attempt_tag(attempt: WriteAttempt) -> str:
    """The part that the names of all staging tables of one attempt share."""
    return blake2s(attempt.id.encode(), digest_size=7).hexdigest()


def lock_of(attempt: str) -> int:
    """The advisory lock that the driver of an attempt holds as long as it lives."""
    return int(attempt, 16)


def tags_of(table: str) -> tuple[str, str] | None:
    """The tags of writer and attempt in the name of a staging table; None for another table."""
    match = _STAGED.match(table)
    return None if match is None else (match[1], match[2])


@dataclass(frozen=True)
class Staging:
    """How a sink stages: the columns, and where tables are made."""

    connection: PostgresConnection
    schema: str
    columns: Sequence[StagedColumn]
    ordered: bool
    """Whether rows are numbered, for upserts."""

    @property
    def fields(self) -> list[tuple[str, str]]:
        """Name and type of each staged column."""
        fields = [(column.name, column.type) for column in self.columns]
        return [*fields, (ORDER, "int8")] if self.ordered else fields

    def writer(self, task: WriterTask, where: str) -> StagingWriter:
        """A writer for one attempt at a task."""
        tags = f"{writer_tag(task.attempt.identity)}_{attempt_tag(task.attempt)}"
        return StagingWriter(self, f"staged_{tags}_{task.number}_{task.retry}", task.number << 40, where)


class StagingWriter(Writer[PostgresCommittable]):
    """Stages the rows of one task."""

    def __init__(self, staging: Staging, table: str, first: int, where: str) -> None:
        self._staging, self._table, self._next, self._where = staging, table, first, where
        self._batches: list[pa.RecordBatch] = []
        self._waiting_bytes = self._rows = self._bytes = 0
        self._connected: Any = None

    def write(self, batch: pa.RecordBatch) -> None:
        staged = self._staged(batch)
        self._batches.append(staged)
        self._waiting_bytes += staged.nbytes
        self._rows += staged.num_rows
        self._bytes += staged.nbytes
        if self._waiting_bytes > (_INLINE_BYTES if self._connected is None else _CHUNK_BYTES):
            self._send()

    def prepare_commit(self) -> Iterable[PostgresCommittable]:
        if not self._rows:
            return []
        if self._connected is None:
            return [PostgresCommittable(rows=self._rows, bytes=self._bytes, arrow=arrow_stream(self._batches))]
        self._send()
        with errors_of(self._staging.connection, self._where):
            self._connected.commit()
        return [PostgresCommittable(rows=self._rows, bytes=self._bytes, table=self._table)]

    def close(self) -> None:
        if self._connected is not None:
            self._connected.close()

    def _staged(self, batch: pa.RecordBatch) -> pa.RecordBatch:
        columns = {}
        for column in self._staging.columns:
            values = batch.column(column.name)
            columns[column.name] = to_json(values, column.name, self._where) if column.json else values
        if self._staging.ordered:
            columns[ORDER] = pa.array(range(self._next, self._next + batch.num_rows), pa.int64())
            self._next += batch.num_rows
        return pa.RecordBatch.from_pydict(columns)

    def _send(self) -> None:
        if not self._batches:
            return
        staging = self._staging
        if self._connected is None:
            self._connected = staging.connection.connect_bulk(self._where)
            self._create()
        rows = pa.RecordBatchReader.from_batches(self._batches[0].schema, self._batches)
        with errors_of(staging.connection, self._where), closing(self._connected.cursor()) as cursor:
            cursor.adbc_ingest(self._table, rows, mode="append", db_schema_name=staging.schema)
        self._batches, self._waiting_bytes = [], 0

    def _create(self) -> None:
        staging = self._staging
        columns = ", ".join(f"{quoted(name)} {kind}" for name, kind in staging.fields)
        table = f"{quoted(staging.schema)}.{quoted(self._table)}"
        with errors_of(staging.connection, self._where), closing(self._connected.cursor()) as cursor:
            cursor.execute(f"CREATE UNLOGGED TABLE {table} ({columns}) WITH (autovacuum_enabled = false)")
