"""The BATCH drivers: batches of a partition, or of several, through one program; state is carried or exported."""

from __future__ import annotations

import functools
import gc
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import pyarrow as pa

from dagster_unified.operators.drivers.group import MemoryStore
from dagster_unified.operators.drivers.key_groups import GroupInput, KeyGroups, MicroBatch, decode_event
from dagster_unified.operators.failures import placed
from dagster_unified.operators.functions.base import FIRST, Subtask
from dagster_unified.operators.keys import grouped_stretches, last_run, runs, stretches
from dagster_unified.operators.layout import CARRIED_LAYOUT, PARTITION_INDEX, TIMESTAMP
from dagster_unified.operators.metrics import Metrics
from dagster_unified.operators.operator import BROADCAST, INDEX
from dagster_unified.operators.program.run import FLUSH, RunningProgram
from dagster_unified.operators.program.step import CarryOver, Program
from dagster_unified.operators.routing import decode
from dagster_unified.operators.state.pages import Page, decode_index
from dagster_unified.operators.time import wall_clock

GROUP, PAGE, STATE = "__group", "__page", "__state"
"""The columns next to a record's own: its group; or, in a row of state, which page of the group it is, and the page.

A group of carried state is chosen by Spark's hash of the key, a key group of STREAMING by that of `operators/keys.py`;
the two never meet.
"""

MOST_WAITING = 100_000
"""Records of a group that wait at once, more or less, before they are processed."""


ROWS_BYTES = 64 << 20
"""Bytes of pages that become rows together."""


class Emitted(NamedTuple):
    """A batch of one of a program's outputs, and the index of the partition that it belongs to."""

    output: int
    batch: pa.RecordBatch
    partition: int = 0


Emitting = Generator[Emitted, None, dict[int, Metrics]]
"""A driver at work; it returns the metrics of each partition."""


class Run:
    """A driver's run, which goes on while it is iterated."""

    def __init__(self, emitting: Emitting) -> None:
        self._emitting = emitting
        self.metrics: dict[int, Metrics] = {}
        """The metrics of each partition by its index, at the end of the run."""

    def __iter__(self) -> Iterator[Emitted]:
        self.metrics = yield from self._emitting


class _Group:
    """A group whose rows are being read, and its current partition."""

    def __init__(self, number: int) -> None:
        self.number = number
        self.partition = 0
        self.begun = False
        self.store = MemoryStore()
        self.waiting: list[pa.RecordBatch] = []


def carried(
    program: Program, batches: Iterable[pa.RecordBatch], clock: Callable[[], int], subtask: Subtask
) -> Emitting:
    """Run the partitions of groups, one group after another."""
    out: list[Emitted] = []
    state = program.carried
    events = [decode_event(carry.end) for carry in program.carry]
    metrics = [Metrics() for _ in events]
    current = _Group(-1)

    def emit(number: int, batch: pa.RecordBatch) -> None:
        out.append(Emitted(number, batch, current.partition))

    driver = KeyGroups(program, emit, clock, subtask)

    broadcast = program.broadcast
    broadcast_batches = [decode(data, broadcast.layout.schema) for data in broadcast.data] if broadcast else []

    def begin(group: _Group) -> None:
        """Process the broadcast records, which come before a group's others."""
        if broadcast_batches and not group.begun and group.number >= 0:
            micro_batch = MicroBatch(GroupInput(broadcast=broadcast_batches), leads=group.number == 0)
            driver.run(group.store, micro_batch, program.carry[0].watermark)
        group.begun = True

    def finish(group: _Group, until: int) -> None:
        """End the partitions of a group that come before `until`."""
        if until > group.partition:
            begin(group)
        for partition in range(group.partition, until):
            group.partition = partition
            if group.waiting or group.store.pages:
                micro_batch = MicroBatch(GroupInput(group.waiting), events[partition], sorted_by_key=True)
                driver.run(group.store, micro_batch, program.carry[partition].watermark)
                driver.count_waiting()
                if _holds_something(group.store):
                    out.extend(Emitted(state, rows, partition) for rows in rows_of(group.number, group.store))
                else:
                    group.store = MemoryStore()
                group.waiting = []
                metrics[partition].add(driver.running.report())
        group.partition = until

    with driver:
        for batch in batches:
            for number, rows in stretches(batch, GROUP):
                if current.number != number:
                    finish(current, len(events))
                    current = _Group(number)
                    driver.running.enter(number)
                for partition, partition_rows in (
                    stretches(rows, PARTITION_INDEX) if program.last_event_times else [(0, rows)]
                ):
                    finish(current, partition)
                    _take(current, partition_rows, program)
                    watermark = program.carry[partition].watermark
                    while sum(b.num_rows for b in current.waiting) >= MOST_WAITING:
                        begin(current)
                        whole = _whole_keys(driver, current.waiting, current.store, watermark)
                        if whole is not None:
                            driver.run(current.store, MicroBatch(GroupInput([whole]), sorted_by_key=True), watermark)
                yield from out
                out.clear()
        finish(current, len(events))
        yield from out
    metrics[-1].add(driver.running.metrics)  # what opening and closing have counted
    return dict(enumerate(metrics))


def _holds_something(store: MemoryStore) -> bool:
    index = store.read_page(INDEX)
    if BROADCAST in store.pages:
        return True
    return index is not None and any(page != Page() for page in decode_index(index).pages)


def rows_of(group: int, store: MemoryStore) -> Iterator[pa.RecordBatch]:
    """A group's pages as rows of state, in the columns of `CARRIED_LAYOUT`: at least one batch.

    A batch has pages of `ROWS_BYTES`, or one page: Arrow counts the bytes of a column with 31 bits.
    """
    waiting: dict[int, bytes] = {}
    size = 0
    for number, data in store.pages.items():
        if waiting and size + len(data) > ROWS_BYTES:
            yield _rows(group, waiting)
            waiting, size = {}, 0
        waiting[number] = data
        size += len(data)
    yield _rows(group, waiting)


def _rows(group: int, pages: Mapping[int, bytes]) -> pa.RecordBatch:
    columns = [[group] * len(pages), list(pages), list(pages.values())]
    return pa.RecordBatch.from_arrays(
        [pa.array(c, f.type) for c, f in zip(columns, CARRIED_LAYOUT.schema, strict=True)],
        schema=CARRIED_LAYOUT.schema,
    )


def _take(group: _Group, rows: pa.RecordBatch, program: Program) -> None:
    """Add rows of state to the group's store, and records to the waiting ones."""
    stored = rows.num_rows - rows.column(PAGE).null_count
    for page, data in zip(rows.column(PAGE)[:stored].to_pylist(), rows.column(STATE)[:stored].to_pylist(), strict=True):
        if data is not None:  # no page, where the row only says that there is such a group
            group.store.pages[page] = data
    if stored < rows.num_rows:
        group.waiting.append(rows.slice(stored).select(program.input.schema.names))


def _whole_keys(
    driver: KeyGroups, waiting: list[pa.RecordBatch], store: MemoryStore, watermark: int
) -> pa.RecordBatch | None:
    """Take the waiting records, except those of the last key, which may go on.

    If there is no other key, process all but the last record, and return None.
    """
    (batch,) = pa.Table.from_batches(waiting).combine_chunks().to_batches()
    end = last_run(batch, driver.keyed, driver.program.input, driver.operator.where)
    whole = batch.slice(0, end) if end else None
    if whole is None:
        end = batch.num_rows - 1
        driver.run_unfinished(store, batch.slice(0, end), watermark)
    waiting[:] = [batch.slice(end)]
    return whole


def exported(
    program: Program,
    over: CarryOver,
    batches: Iterable[pa.RecordBatch],
    clock: Callable[[], int],
    subtask: Subtask,
) -> Emitting:
    """Run records sorted by key; the state that their keys leave follows as rows of the operator's table."""
    out: list[Emitted] = []
    state = program.carried
    event = decode_event(over.end)
    driver = KeyGroups(program, lambda number, batch: out.append(Emitted(number, batch)), clock, subtask)
    table = driver.table()
    store = MemoryStore()

    def run(batch: pa.RecordBatch) -> None:
        """Process all records of some keys."""
        nonlocal store
        micro_batch = MicroBatch(GroupInput([batch]), event, sorted_by_key=True)
        content = driver.run_and_leave(store, micro_batch, over.watermark)
        driver.count_waiting()
        out.extend(Emitted(state, rows) for rows in table.batches(content) if rows.num_rows)
        store = MemoryStore()

    waiting: list[pa.RecordBatch] = []
    with driver:
        for received in batches:
            if received.num_rows:
                waiting.append(received)
            while sum(batch.num_rows for batch in waiting) >= MOST_WAITING:
                whole = _whole_keys(driver, waiting, store, over.watermark)
                if whole is not None:
                    run(whole)
            yield from out
            out.clear()
        if waiting:
            run(pa.concat_batches(waiting))
        yield from out
        metrics = driver.running.report()
    metrics.add(driver.running.metrics)  # what closing has counted
    return {0: metrics}


def run_batch(
    program: Program,
    batches: Iterable[pa.RecordBatch],
    clock: Callable[[], int] = wall_clock,
    subtask: Subtask = FIRST,
    committed: int | None = None,
) -> Run:
    """Run one partition of the pipeline.

    In STREAMING that is what one epoch passes to the operators after the last one with state; `committed` is the epoch
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
    batches = map(program.input.whole, batches)
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
    """Collect garbage less often; once per process, since a worker runs many tasks.

    Records are many, short-lived and without cycles: collecting them at Python's default pace costs a third of the
    time. Frozen objects are never freed.
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
    broadcast = running.program.broadcast
    if broadcast is not None:
        for data in broadcast.data:
            running.broadcast(decode(data, broadcast.layout.schema), broadcast.leads)
            running.drain(FLUSH)
            yield
    for batch in batches if broadcast is None or not broadcast.alone else ():
        size = batch.num_rows
        if not size:
            continue
        keys, starts = runs(batch, keyed, layout, where)
        combined = operator.combined(batch, layout, starts, keys[0] == current)
        with placed(where):
            records = operator.read(batch, layout) if combined is None else combined
        timestamps = batch.column(TIMESTAMP).to_pylist() if layout.timestamped else [None] * size
        if combined is not None:
            timestamps = [timestamps[end - 1] for end in [*starts[1:], size]]
            starts, size = list(range(len(keys))), len(keys)
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


def run_range(
    fresh: Callable[[], Program],
    batches: Iterable[pa.RecordBatch],
    clock: Callable[[], int] = wall_clock,
    subtask: Subtask = FIRST,
) -> Run:
    """Run partitions one after another.

    `fresh` returns the program with unused functions: the next partition must not see what a function keeps outside of
    Flink's state, as if it ran in a process of its own. With carried state the functions stay as well.
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
    for partition, partition_batches in grouped_stretches(batches, PARTITION_INDEX):
        program = fresh()
        options = replace(program.options, last_event_time=last_event_times[partition])
        alone = replace(program, last_event_times=(), options=options)
        run = run_batch(alone, partition_batches, clock, subtask)
        for emitted in run:
            yield emitted._replace(partition=partition)
        metrics[partition] = run.metrics[0]
    return metrics
