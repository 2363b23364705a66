"""The carrying BATCH driver: one partition of the input through key groups, whose state comes from the partition before and goes on to the next.

It is the STREAMING driver with a whole partition of the input as its micro-batch; what lies between a partition and the next
are rows of state instead of a checkpoint. Rows come sorted: a group's state, then its records by key and event time.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import NamedTuple

import pyarrow as pa
import pyarrow.compute as pc

from dagster_unified.operators.key_groups import KeyGroups, decode_event
from dagster_unified.operators.keys import runs
from dagster_unified.operators.layout import StreamLayout
from dagster_unified.operators.program import Program
from dagster_unified.operators.state_pages import Page, decode_index
from dagster_unified.records import record_type

CARRIED = "__carried"
"""The side output that state leaves a program by."""

GROUP, PAGE, STATE = "__group", "__page", "__state"
"""The columns beside a record's own: its key group; or, in a row of state, which page of the group it is, and the page."""

CHUNK = 100_000
"""Records of a group that are held at once, more or less."""

_INDEX = 2**31 - 2


class Carried(NamedTuple):
    """A row of state between two partitions."""

    group: int
    page: int
    state: bytes


CARRIED_LAYOUT = StreamLayout(record_type(Carried))


class _Pages:
    """The pages of one group, in memory."""

    def __init__(self) -> None:
        self.pages: dict[int, bytes] = {}

    def read_index(self) -> bytes | None:
        return self.pages.get(_INDEX)

    def write_index(self, data: bytes) -> None:
        self.pages[_INDEX] = data

    def read_page(self, number: int) -> bytes | None:
        return self.pages.get(number)

    def write_page(self, number: int, data: bytes) -> None:
        self.pages[number] = data

    def remove_page(self, number: int) -> None:
        self.pages.pop(number, None)

    def rows(self, group: int) -> pa.RecordBatch | None:
        """What goes on to the next partition; None where the group holds nothing."""
        index = self.read_index()
        if index is None or all(page == Page() for page in decode_index(index).pages):
            return None
        columns = [[group] * len(self.pages), list(self.pages), list(self.pages.values())]
        return pa.RecordBatch.from_arrays([pa.array(c, f.type) for c, f in zip(columns, CARRIED_LAYOUT.schema, strict=True)], schema=CARRIED_LAYOUT.schema)


class _Group:
    """A group whose rows are coming in."""

    def __init__(self, number: int) -> None:
        self.number = number
        self.store = _Pages()
        self.waiting: list[pa.RecordBatch] = []


def run_carried(program: Program, batches: Iterable[pa.RecordBatch], clock: Callable[[], int], subtask: int) -> Iterator[tuple[int, pa.RecordBatch] | str]:
    """Runs a partition of groups; yields (output number, batch), and last the partition's report as JSON."""
    assert program.carry is not None
    out: list[tuple[int, pa.RecordBatch]] = []
    state = next(i for i, output in enumerate(program.outputs) if output.tag == CARRIED)
    event, watermark = decode_event(program.carry.end), program.carry.watermark
    driver = KeyGroups(program, lambda number, batch: out.append((number, batch)), clock, subtask)

    def finish(group: _Group) -> None:
        driver.run(group.store, group.waiting, event, in_order=True, watermark=watermark)
        rows = group.store.rows(group.number)
        if rows is not None:
            out.append((state, rows))

    current: _Group | None = None
    try:
        for batch in batches:
            for number, part in _by_group(batch):
                if current is None or current.number != number:
                    if current is not None:
                        finish(current)
                    current = _Group(number)
                _take(current, part, program)
                while sum(b.num_rows for b in current.waiting) >= CHUNK:
                    _chunk(driver, current, program, watermark)
                yield from out
                out.clear()
        if current is not None:
            finish(current)
        driver.running.drain()
        yield from out
    finally:
        driver.close()
    yield driver.running.metrics.encode()


def _by_group(batch: pa.RecordBatch) -> Iterator[tuple[int, pa.RecordBatch]]:
    """The parts of a batch that belong to one group each."""
    groups = batch.column(GROUP)
    changes = pc.indices_nonzero(pc.not_equal(groups.slice(1), groups.slice(0, batch.num_rows - 1))).to_pylist() if batch.num_rows else []
    starts = [0, *(c + 1 for c in changes)] if batch.num_rows else []
    for start, end in zip(starts, [*starts[1:], batch.num_rows], strict=True):
        yield groups[start].as_py(), batch.slice(start, end - start)


def _take(group: _Group, part: pa.RecordBatch, program: Program) -> None:
    """Takes rows of state into the group's store, and records to those that wait."""
    stored = part.num_rows - part.column(PAGE).null_count
    for page, data in zip(part.column(PAGE)[:stored].to_pylist(), part.column(STATE)[:stored].to_pylist(), strict=True):
        group.store.pages[page] = data
    if stored < part.num_rows:
        group.waiting.append(part.slice(stored).select(program.input.schema.names))


def _chunk(driver: KeyGroups, group: _Group, program: Program, watermark: int) -> None:
    """Processes what waits, but for the last key's records, which may go on; where there is no other, all but the last of them."""
    (batch,) = pa.Table.from_batches(group.waiting).combine_chunks().to_batches()
    _, starts = runs(batch, driver.keyed, program.input, driver.operator.where)
    cut = starts[-1] or batch.num_rows - 1
    driver.run(group.store, [batch.slice(0, cut)], None, in_order=True, unfinished=starts[-1] == 0, watermark=watermark)
    group.waiting = [batch.slice(cut)]
