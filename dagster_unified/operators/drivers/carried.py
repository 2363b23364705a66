"""The carrying BATCH driver: partitions through key groups, which start from the state of the partition before.

It is the STREAMING driver with a whole partition of the input as its micro-batch; what lies between a partition and the
next are rows of state instead of a checkpoint. Rows come sorted: a group's state, then its records by partition, key
and event time. Broadcast records come with the program, and before all others of a group.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping

import pyarrow as pa

from dagster_unified.operators.drivers.group import MemoryStore
from dagster_unified.operators.drivers.key_groups import Arrived, KeyGroups, MicroBatch, decode_event
from dagster_unified.operators.drivers.report import Emitted, Emitting
from dagster_unified.operators.functions.base import Subtask
from dagster_unified.operators.keys import last_run, stretches
from dagster_unified.operators.layout import CARRIED_LAYOUT, PARTITION_INDEX
from dagster_unified.operators.metrics import Metrics
from dagster_unified.operators.numbers import BROADCAST
from dagster_unified.operators.packing import decode
from dagster_unified.operators.program.spec import Program
from dagster_unified.operators.state.pages import Page, decode_index

GROUP, PAGE, STATE = "__group", "__page", "__state"
"""The columns next to a record's own: its group; or, in a row of state, which page of the group it is, and the page.

A group of carried state is chosen by Spark's hash of the key, a key group of STREAMING by that of `operators/keys.py`;
the two never meet.
"""

MOST_WAITING = 100_000
"""Records of a group that wait at once, more or less, before they are processed."""


ROWS_BYTES = 64 << 20
"""Bytes of pages that become rows together."""


class _Group:
    """A group whose rows are coming in, and the partition that it is at."""

    def __init__(self, number: int) -> None:
        self.number = number
        self.partition = 0
        self.begun = False
        self.store = MemoryStore()
        self.waiting: list[pa.RecordBatch] = []


def carried(
    program: Program, batches: Iterable[pa.RecordBatch], clock: Callable[[], int], subtask: Subtask
) -> Emitting:
    """Runs the partitions of groups, one group after another."""
    out: list[Emitted] = []
    state = program.carried
    events = [decode_event(carry.end) for carry in program.carry]
    metrics = [Metrics() for _ in events]
    current = _Group(-1)

    def emit(number: int, batch: pa.RecordBatch) -> None:
        out.append(Emitted(number, batch, current.partition))

    driver = KeyGroups(program, emit, clock, subtask)

    given = program.broadcast
    told = [decode(data, given.layout.schema) for data in given.data] if given is not None else []

    def begin(group: _Group) -> None:
        """Takes the broadcast records, which come before all others, into a group."""
        if told and not group.begun and group.number >= 0:
            leads = group.number == 0
            driver.run(group.store, MicroBatch(Arrived(broadcast=told), leads=leads), program.carry[0].watermark)
        group.begun = True

    def finish(group: _Group, until: int) -> None:
        """Ends the partitions of a group that come before `until`."""
        if until > group.partition:
            begin(group)
        for partition in range(group.partition, until):
            group.partition = partition
            if group.waiting or group.store.pages:
                given = MicroBatch(Arrived(group.waiting), events[partition], sorted_by_key=True)
                driver.run(group.store, given, program.carry[partition].watermark)
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
                for partition, own in stretches(rows, PARTITION_INDEX) if program.last_event_times else [(0, rows)]:
                    finish(current, partition)
                    _take(current, own, program)
                    while sum(b.num_rows for b in current.waiting) >= MOST_WAITING:
                        begin(current)
                        _run_some(driver, current, program, program.carry[partition].watermark)
                yield from out
                out.clear()
        finish(current, len(events))
        yield from out
    metrics[-1].add(driver.running.metrics)  # what opening and closing have counted
    return dict(enumerate(metrics))


def _holds_something(store: MemoryStore) -> bool:
    index = store.read_index()
    if BROADCAST in store.pages:
        return True
    return index is not None and any(page != Page() for page in decode_index(index).pages)


def rows_of(group: int, store: MemoryStore) -> Iterator[pa.RecordBatch]:
    """A group's pages as rows of state, in the columns of `CARRIED_LAYOUT`: at least one batch of them.

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
    """Takes rows of state into the group's store, and records to those that wait."""
    stored = rows.num_rows - rows.column(PAGE).null_count
    for page, data in zip(rows.column(PAGE)[:stored].to_pylist(), rows.column(STATE)[:stored].to_pylist(), strict=True):
        if data is not None:  # no page, where the row only says that there is such a group
            group.store.pages[page] = data
    if stored < rows.num_rows:
        group.waiting.append(rows.slice(stored).select(program.input.schema.names))


def _run_some(driver: KeyGroups, group: _Group, program: Program, watermark: int) -> None:
    """Processes the waiting records, except those of the last key, which may go on.

    If there is no other key, it processes all but the last record.
    """
    (batch,) = pa.Table.from_batches(group.waiting).combine_chunks().to_batches()
    last = last_run(batch, driver.keyed, program.input, driver.operator.where)
    if last == 0:
        last = batch.num_rows - 1
        driver.run_unfinished(group.store, batch.slice(0, last), watermark)
    else:
        driver.run(group.store, MicroBatch(Arrived([batch.slice(0, last)]), sorted_by_key=True), watermark)
    group.waiting = [batch.slice(last)]
