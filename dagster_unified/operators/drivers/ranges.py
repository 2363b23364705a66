"""The BATCH driver over several partitions of the pipeline: each as if it were alone, or each going on from the one
before.

Rows tell their partition in a column of their own, by which they come sorted. Knows programs and batches; no engine.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from itertools import groupby
from operator import itemgetter

import pyarrow as pa

from dagster_unified.operators.drivers.batch import Emitted, run_batch
from dagster_unified.operators.drivers.carried import run_carried
from dagster_unified.operators.keys import stretches
from dagster_unified.operators.layout import PART
from dagster_unified.operators.program.spec import Program
from dagster_unified.operators.time import wall_clock


def run_range(
    fresh: Callable[[], Program],
    batches: Iterable[pa.RecordBatch],
    clock: Callable[[], int] = wall_clock,
    subtask: int = 0,
) -> Iterator[tuple[int, Emitted | str]]:
    """Runs partitions one after another; yields (partition, what `run_batch` yields for it).

    `fresh` gives the program with functions that nobody has used: of what a function keeps outside of Flink's state,
    the next partition is to see nothing, as if it ran in a process of its own. With carried state the functions stay as
    well.
    """
    program = fresh()
    if program.carry:
        yield from run_carried(program, batches, clock, subtask)
        return
    rows = (stretch for batch in batches for stretch in stretches(batch, PART))
    for part, own in groupby(rows, key=itemgetter(0)):
        options = replace(program.options, last_event_time=program.parts[part])
        for emitted in run_batch(
            replace(fresh(), parts=(), options=options), (stretch for _, stretch in own), clock, subtask
        ):
            yield part, emitted
