"""The BATCH driver: one partition's Arrow batches through one program.

A keyed program's batches come sorted by key, then event time. State is that of one key at a time (FLIP-140): a key's
timers fire and its state goes when the next key begins, so that a key with 50 million records needs no more memory than
one with ten. Broadcast records come before all others. The watermark is `MIN` while a key's records come and `MAX` at
its end (FLIP-134).
"""

from __future__ import annotations

import functools
import gc
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import pyarrow as pa

from dagster_unified.operators.drivers.carried import carried
from dagster_unified.operators.drivers.export import exported
from dagster_unified.operators.drivers.report import Emitted, Emitting, Run
from dagster_unified.operators.failures import placed
from dagster_unified.operators.functions.base import FIRST, Subtask
from dagster_unified.operators.keys import runs
from dagster_unified.operators.layout import TIMESTAMP
from dagster_unified.operators.packing import decode
from dagster_unified.operators.program.run import FLUSH, RunningProgram
from dagster_unified.operators.program.spec import Program
from dagster_unified.operators.time import wall_clock


def run_batch(
    program: Program,
    batches: Iterable[pa.RecordBatch],
    clock: Callable[[], int] = wall_clock,
    subtask: Subtask = FIRST,
    committed: int | None = None,
) -> Run:
    """Runs one partition of the pipeline.

    In STREAMING that is what one epoch gives the operators behind the last one with state, and `committed` is the epoch
    before it.
    """
    if program.carry:
        return Run(carried(program, batches, clock, subtask))
    if program.export is not None:
        return Run(exported(program, program.export, batches, clock, subtask))
    return Run(_batch(program, batches, clock, subtask, committed))


def _batch(
    program: Program,
    batches: Iterable[pa.RecordBatch],
    clock: Callable[[], int],
    subtask: Subtask,
    committed: int | None,
) -> Emitting:
    out: list[Emitted] = []
    running = RunningProgram(program, lambda number, batch: out.append(Emitted(number, batch)), clock, subtask)
    with running:
        if committed is not None:
            running.notify(committed)
        feed = _keyed(running, batches) if program.keyed is not None else _stateless(running, batches)
        for _ in feed:
            yield from out
            out.clear()
        running.flush()
        yield from out
        running.read_gauges()
    return {0: running.metrics}


@functools.cache
def spare_the_garbage_collector() -> None:
    """Once per process, since what is frozen is never freed: a worker is used for many tasks.

    Records are many, short-lived and without cycles: collecting them at Python's default pace costs a third of the
    time.
    """
    gc.freeze()
    gc.set_threshold(200_000, 20, 50)


def _stateless(running: RunningProgram, batches: Iterable[pa.RecordBatch]) -> Iterator[None]:
    for batch in batches:
        if batch.num_rows:
            running.push(batch)
            yield


_NO_KEY = object()


def _keyed(running: RunningProgram, batches: Iterable[pa.RecordBatch]) -> Iterator[None]:
    operator = running.keyed
    assert operator is not None
    current: Any = _NO_KEY
    layout, keyed = running.program.input, running.program.keyed
    assert keyed is not None
    where = running.program.where(running.program.steps[0])
    given = running.program.broadcast
    if given is not None:
        for data in given.data:
            running.broadcast(decode(data, given.layout.schema), given.leads)
            running.drain(FLUSH)
            yield
    for batch in batches if given is None or not given.alone else ():
        size = batch.num_rows
        if not size:
            continue
        keys, starts = runs(batch, keyed, layout, where)
        with placed(where):
            records = operator.read(batch, layout)
        timestamps = batch.column(TIMESTAMP).to_pylist() if layout.timestamped else [None] * size
        for key, start, end in zip(keys, starts, [*starts[1:], size], strict=True):
            if key != current:
                if current is not _NO_KEY:
                    _end_of_key(running, current)
                    running.drain(FLUSH)
                current = key
            running.run_of(key, records[start:end], timestamps[start:end])
        running.drain(FLUSH)
        yield
    if current is not _NO_KEY:
        _end_of_key(running, current)
    running.drain()
    yield


def _end_of_key(running: RunningProgram, key: Any) -> None:
    operator = running.keyed
    assert operator is not None
    operator.select(key)
    operator.end_of_input()
    operator.finish_bundle()
    operator.forget(key)
