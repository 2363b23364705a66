"""Makes files of the rows that the leaving driver leaves, in the task that it runs in.

A file travels as one row of the stage's intermediate, in the columns of `CARRIED_LAYOUT`, until the savepoint takes it.
Knows no Spark.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import pyarrow as pa

from dagster_unified.operators.drivers.report import Emitted
from dagster_unified.operators.layout import CARRIED_LAYOUT
from dagster_unified.state.tables import file_of

FILE_ROWS, FILE_BYTES = 2_000_000, 64 << 20
"""Rows, or their bytes in memory, that become one file."""


def in_files(emitting: Iterable[Emitted], output: int) -> Iterator[Emitted]:
    """What a driver emits, with files instead of the rows of one output."""
    waiting: list[pa.RecordBatch] = []
    rows = size = 0
    for emitted in emitting:
        if emitted.output != output:
            yield emitted
            continue
        waiting.append(emitted.batch)
        rows, size = rows + emitted.batch.num_rows, size + emitted.batch.nbytes
        if rows >= FILE_ROWS or size >= FILE_BYTES:
            yield Emitted(output, _row(waiting))
            waiting, rows, size = [], 0, 0
    if waiting:
        yield Emitted(output, _row(waiting))


def _row(rows: list[pa.RecordBatch]) -> pa.RecordBatch:
    values = zip((0, 0, file_of(rows)), CARRIED_LAYOUT.schema, strict=True)
    return pa.RecordBatch.from_arrays([pa.array([value], f.type) for value, f in values], schema=CARRIED_LAYOUT.schema)
