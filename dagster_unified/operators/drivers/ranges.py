"""The BATCH driver over several partitions of the pipeline.

Each partition runs as if it were alone, or starts from the state of the one before. A column of its own has the index
of each row's partition, and rows come sorted by it. Knows programs and batches; no engine.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace

import pyarrow as pa

from dagster_unified.operators.drivers.batch import run_batch
from dagster_unified.operators.drivers.carried import carried
from dagster_unified.operators.drivers.report import Emitting, Run
from dagster_unified.operators.functions.base import FIRST, Subtask
from dagster_unified.operators.keys import grouped_stretches
from dagster_unified.operators.layout import PARTITION_INDEX
from dagster_unified.operators.program.spec import Program
from dagster_unified.operators.time import wall_clock


def run_range(
    fresh: Callable[[], Program],
    batches: Iterable[pa.RecordBatch],
    clock: Callable[[], int] = wall_clock,
    subtask: Subtask = FIRST,
) -> Run:
    """Runs partitions one after another.

    `fresh` gives the program with functions that nobody has used: of what a function keeps outside of Flink's state,
    the next partition is to see nothing, as if it ran in a process of its own. With carried state the functions stay as
    well.
    """
    program = fresh()
    if program.carry:
        return Run(carried(program, batches, clock, subtask))
    return Run(_each(program.last_event_times, fresh, batches, clock, subtask))


def _each(
    last_event_times: Sequence[int | None],
    fresh: Callable[[], Program],
    batches: Iterable[pa.RecordBatch],
    clock: Callable[[], int],
    subtask: Subtask,
) -> Emitting:
    metrics = {}
    for partition, own in grouped_stretches(batches, PARTITION_INDEX):
        program = fresh()
        options = replace(program.options, last_event_time=last_event_times[partition])
        alone = replace(program, last_event_times=(), options=options)
        run = run_batch(alone, own, clock, subtask)
        for emitted in run:
            yield emitted._replace(partition=partition)
        metrics[partition] = run.metrics[0]
    return metrics
