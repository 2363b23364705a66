"""What a Spark worker runs in BATCH: a program over the batches of one partition.

Its outputs are combined into one stream of batches.

Knows the operators; no session.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Iterable, Iterator

import pyarrow as pa

from dagster_unified.by_value import by_value_bytes, from_bytes, sent
from dagster_unified.operators.drivers.batch import Emitted, run_batch, run_range, spare_the_garbage_collector
from dagster_unified.operators.functions.base import FIRST, Subtask
from dagster_unified.operators.layout import (
    CARRIED_LAYOUT,
    PARTITION_INDEX_FIELD,
    SUBTASK,
    combine,
    combined_schema,
    metrics_row,
)
from dagster_unified.operators.program.run import FLUSH
from dagster_unified.operators.program.step import Program
from dagster_unified.state.tables import file_of

MapInArrow = Callable[[Iterable[pa.RecordBatch]], Iterator[pa.RecordBatch]]


def this_subtask() -> Subtask:
    """Return the partition that this task works on, and its attempt; the first of both outside of a task."""
    from pyspark import TaskContext

    context = TaskContext.get()
    return Subtask(context.partitionId(), context.attemptNumber()) if context is not None else FIRST


EPOCH = "streaming.sql.batchId"
"""Spark's property for the number of a micro-batch, which all jobs of its query know."""


def committed_epoch(log: str) -> int | None:
    """Return the latest committed epoch before the one that this task works on; None in the first."""
    epoch = this_epoch(log)
    return epoch - 1 if epoch > 0 else None


def this_epoch(log: str) -> int:
    """Return the epoch that this task works on, or -1 before the first; `log` is Spark's log of the query's offsets.

    Through Connect Spark tells no task, since an epoch's jobs are not started by the query's thread. It logs an epoch
    before it runs, and runs one after another: the epoch is the last one in the log.
    """
    from pyspark import TaskContext

    from dagster_unified.storage.paths import children, worker_path  # BATCH needs neither

    context = TaskContext.get()
    number = context.getLocalProperty(EPOCH) if context is not None else None
    if number is not None:
        return int(number)
    logged = children(worker_path(log, "checkpoint directory"))
    return max((int(name) for name in logged if name.isdigit()), default=-1)


CONTROL = "dagster_unified.control"
"""The control stream's property for the event of a micro-batch, for all jobs of its query."""


def control_event() -> str | None:
    """The control event of the micro-batch that this task works on, as JSON, or that before it; None where none was."""
    from pyspark import TaskContext

    context = TaskContext.get()
    return context.getLocalProperty(CONTROL) if context is not None else None


def run_partition(payload: bytes, log: str | None, batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    """Run the program in `payload` over a partition; in STREAMING `log` is Spark's log of the query's offsets."""
    program: Program = from_bytes(payload)
    spare_the_garbage_collector()
    schema = combined_schema(tuple(o.layout for o in program.outputs))
    subtask = this_subtask()
    if program.in_subtasks:
        # The number of the task counts the partitions of all streams that its job unites.
        batches = iter(batches)
        first = next((batch for batch in batches if batch.num_rows), None)
        if first is not None:
            subtask = subtask._replace(number=first.column(SUBTASK)[0].as_py())
            batches = itertools.chain([first], batches)

    if not program.last_event_times:
        committed = committed_epoch(log) if log is not None and program.counts_epochs else None
        run = run_batch(program, batches, subtask=subtask, committed=committed)
        for emitted in run if program.export is None else in_files(run, program.carried):
            yield combine(schema, emitted.output, emitted.batch)
        yield metrics_row(schema, run.metrics[0].encode())
        return
    waiting: dict[tuple[int, int], list[pa.RecordBatch]] = {}
    size = 0

    def of(partition: int, batch: pa.RecordBatch) -> pa.RecordBatch:
        return batch.append_column(
            PARTITION_INDEX_FIELD, pa.repeat(pa.scalar(partition, PARTITION_INDEX_FIELD.type), batch.num_rows)
        )

    def gathered() -> pa.RecordBatch:
        """Combine the few rows each of many key groups and partitions into one batch."""
        rows = pa.concat_batches(
            [
                of(partition, combine(schema, output, pa.concat_batches(some)))
                for (partition, output), some in waiting.items()
            ]
        )
        waiting.clear()
        return rows

    run = run_range(lambda: from_bytes(payload), batches, subtask=subtask)
    for emitted in run:
        waiting.setdefault((emitted.partition, emitted.output), []).append(emitted.batch)
        size += emitted.batch.num_rows
        if size >= FLUSH:
            yield gathered()
            size = 0
    if waiting:
        yield gathered()
    for partition, metrics in run.metrics.items():
        yield of(partition, metrics_row(schema, metrics.encode()))


def shipped(program: Program, log: str | None = None) -> MapInArrow:
    """Return the program as a function for `mapInArrow`; in STREAMING `log` is Spark's log of the query's offsets.

    Raises `PipelineError` naming the operator that cannot be sent to workers.
    """
    where = f"{program.pipeline}: stage '{program.stage}'"
    return functools.partial(run_partition, sent([program], lambda: by_value_bytes(program), where), log)


FILE_ROWS, FILE_BYTES = 2_000_000, 64 << 20
"""Rows, or their bytes in memory, that become one file."""


def in_files(emitting: Iterable[Emitted], output: int) -> Iterator[Emitted]:
    """Yield a driver's output, with files instead of the rows of one output."""
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
