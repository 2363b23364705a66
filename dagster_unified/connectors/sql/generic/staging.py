"""Rows on their way from Spark's workers to the driver, which loads them in one transaction. Knows no client."""

from __future__ import annotations

from collections.abc import Sequence

import pyarrow as pa

from dagster_unified.connectors.protocol.commits import arrow_stream
from dagster_unified.connectors.protocol.staging import StagedContent, StagingWriter


class StagedRows(StagedContent, frozen=True, kw_only=True):
    """Rows of one task as an Arrow stream."""

    def table(self) -> pa.Table:
        """The rows, in their order."""
        return pa.ipc.open_stream(self.read("staged rows")).read_all()


class RowsWriter(StagingWriter[pa.RecordBatch, StagedRows]):
    """Stages the rows of one task."""

    committable = StagedRows
    suffix = "arrows"
    chunk_bytes = 32 << 20

    def part(self, batch: pa.RecordBatch) -> tuple[pa.RecordBatch, int]:
        return batch, batch.nbytes

    def encode(self, parts: Sequence[pa.RecordBatch]) -> tuple[bytes, int]:
        return arrow_stream(parts), sum(map(len, parts))
