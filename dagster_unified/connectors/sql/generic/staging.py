"""Rows on their way from Spark's workers to the driver, which loads them in one transaction.

A few rows travel within their committable; more are files in the staging folder of their attempt, and the driver reads
one file at a time. Knows no client.
"""

from __future__ import annotations

from collections.abc import Sequence
from uuid import uuid4

import pyarrow as pa

from dagster_unified.connectors.paths import put, storage_path
from dagster_unified.connectors.protocol.commits import Committable, WriteAttempt, Writer, arrow_stream, staged_content

_INLINE = 256 << 10
"""Bytes of a task's rows that travel within their committable."""

_CHUNK = 32 << 20
"""Bytes of rows that a worker holds before it writes them to a file."""


class StagedRows(Committable, frozen=True, kw_only=True):
    """Rows of one task as an Arrow stream: in here, or in a file."""

    content: bytes = b""
    file: str = ""

    def table(self) -> pa.Table:
        """The rows, in their order."""
        content = staged_content(self.file, "staged rows") if self.file else self.content
        return pa.ipc.open_stream(content).read_all()


class StagingWriter(Writer[StagedRows]):
    """Stages the rows of one task."""

    def __init__(self, attempt: WriteAttempt) -> None:
        self._folder = attempt.staging
        self._batches: list[pa.RecordBatch] = []
        self._bytes = 0
        self._staged: list[StagedRows] = []

    def write(self, batch: pa.RecordBatch) -> None:
        self._batches.append(batch)
        self._bytes += batch.nbytes
        if self._bytes > _CHUNK:
            self._stage()

    def prepare_commit(self) -> Sequence[StagedRows]:
        if any(batch.num_rows for batch in self._batches):
            self._stage(inline=not self._staged and self._bytes <= _INLINE)
        return self._staged

    def _stage(self, inline: bool = False) -> None:
        rows, content, file = sum(batch.num_rows for batch in self._batches), arrow_stream(self._batches), ""
        if not inline and self._folder is not None:
            path = storage_path(self._folder, "staging folder") / f"{uuid4().hex}.arrows"
            put(path, content)
            file, content = str(path), b""
        self._staged.append(StagedRows(rows=rows, bytes=self._bytes, content=content, file=file))
        self._batches, self._bytes = [], 0
