"""What runs a sink's writers in Spark's tasks. Imports little: workers load it.

Each task gives the committables that its writers have prepared, as msgpack. Of a task that Spark runs twice, the driver
sees those of one attempt.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, closing
from typing import TYPE_CHECKING, Generic, Protocol

import msgspec
import pyarrow as pa

from dagster_unified.connectors.protocol.commits import C, WriteAttempt, Writer, WriterTask
from dagster_unified.operators.layout import EMITTED, PARTITION_INDEX

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

Batches = Iterable[pa.RecordBatch]
Ship = Callable[[Callable[..., Iterator[pa.RecordBatch]]], Callable[..., Iterator[pa.RecordBatch]]]
"""Makes a function one that reaches Spark's workers with its author's code."""


class MakesWriters(Protocol[C]):
    """A sink, as its tasks see it."""

    def writer(self, task: WriterTask) -> Writer[C]:
        """A writer for the rows of one task."""


def stage_by_writers(
    sink: MakesWriters[C], committable: type[C], frame: DataFrame, attempts: Sequence[WriteAttempt], ship: Ship
) -> list[list[C]]:
    """Writes all rows by the sink's writers, in one job; returns the committables of each attempt.

    With several attempts the column `PARTITION_INDEX` has the index of a row's attempt.
    """
    # what is shipped is the same for every epoch; the attempts are not
    run = functools.partial(_run, ship(_Task(sink)), tuple(attempts))
    rows = frame.mapInArrow(run, "attempt int, committable binary").collect()
    found: list[list[C]] = [[] for _ in attempts]
    decoder = msgspec.msgpack.Decoder(committable)
    for row in rows:
        found[row.attempt].append(decoder.decode(row.committable))
    return found


def _run(
    task: Callable[..., Iterator[pa.RecordBatch]], attempts: tuple[WriteAttempt, ...], batches: Batches
) -> Iterator[pa.RecordBatch]:
    return task(attempts, batches)


class _Task(Generic[C]):
    """The writers of one task, one for each attempt that it has rows of; at least one, also without rows."""

    def __init__(self, sink: MakesWriters[C]) -> None:
        self._sink = sink

    def __call__(self, attempts: Sequence[WriteAttempt], batches: Batches) -> Iterator[pa.RecordBatch]:
        from pyspark import TaskContext

        context = TaskContext.get()
        assert context is not None
        number, retry = context.partitionId(), context.attemptNumber()
        writers: dict[int, Writer[C]] = {}
        with ExitStack() as opened:

            def writer(index: int) -> Writer[C]:
                if index not in writers:
                    made = self._sink.writer(WriterTask(attempts[index], number, retry))
                    writers[index] = opened.enter_context(closing(made))
                return writers[index]

            if len(attempts) == 1:
                writer(0)
            for batch in batches:
                for index, rows in _by_attempt(batch, len(attempts)):
                    writer(index).write(rows)
            prepared = [
                (index, committable) for index, writer in writers.items() for committable in writer.prepare_commit()
            ]
        encoded = [msgspec.msgpack.encode(committable) for _, committable in prepared]
        indices = pa.array([index for index, _ in prepared], pa.int32())
        yield pa.RecordBatch.from_arrays([indices, pa.array(encoded, pa.binary())], ["attempt", "committable"])


def _by_attempt(batch: pa.RecordBatch, attempts: int) -> Iterator[tuple[int, pa.RecordBatch]]:
    """The rows of a batch, by the attempt that they belong to, in their order."""
    import pyarrow.compute as pc

    own = [name for name in batch.schema.names if name not in (PARTITION_INDEX, EMITTED)]
    if attempts == 1:
        yield 0, batch.select(own)
        return
    of_row = batch.column(PARTITION_INDEX)
    for index in pc.unique(of_row).to_pylist():
        yield index, batch.filter(pc.equal(of_row, index)).select(own)


def arrow_stream(batches: Sequence[pa.RecordBatch]) -> bytes:
    """Batches as an Arrow stream, compressed."""
    buffer = pa.BufferOutputStream()
    options = pa.ipc.IpcWriteOptions(compression="lz4")
    with pa.ipc.new_stream(buffer, batches[0].schema, options=options) as stream:
        for batch in batches:
            stream.write_batch(batch)
    return bytes(buffer.getvalue())
