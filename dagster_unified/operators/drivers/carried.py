"""The carrying BATCH driver: partitions of the input through key groups, whose state comes from the partition before
and goes on to the next.

It is the STREAMING driver with a whole partition of the input as its micro-batch; what lies between a partition and the
next are rows of state instead of a checkpoint. Rows come sorted: a group's state, then its records by partition, key
and event time.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator

import pyarrow as pa

from dagster_unified.operators.drivers.key_groups import Arrived, KeyGroups, decode_event
from dagster_unified.operators.keys import runs, stretches
from dagster_unified.operators.layout import CARRIED, CARRIED_LAYOUT, PART
from dagster_unified.operators.metrics import Metrics, merge
from dagster_unified.operators.program.spec import Program
from dagster_unified.operators.state.pages import Page, decode_index

GROUP, PAGE, STATE = "__group", "__page", "__state"
"""The columns beside a record's own: its key group; or, in a row of state, which page of the group it is, and the page.
"""

CHUNK = 100_000
"""Records of a group that are held at once, more or less."""

_INDEX = 2**31 - 2


class Pages:
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
        return pa.RecordBatch.from_arrays(
            [pa.array(c, f.type) for c, f in zip(columns, CARRIED_LAYOUT.schema, strict=True)],
            schema=CARRIED_LAYOUT.schema,
        )


class _Group:
    """A group whose rows are coming in, and the partition that it is at."""

    def __init__(self, number: int) -> None:
        self.number = number
        self.part = 0
        self.store = Pages()
        self.waiting: list[pa.RecordBatch] = []


def run_carried(
    program: Program, batches: Iterable[pa.RecordBatch], clock: Callable[[], int], subtask: int
) -> Iterator[tuple[int, tuple[int, pa.RecordBatch] | str]]:
    """Runs partitions of groups; yields (partition, (output number, batch)), and last each partition's report as
    JSON.
    """
    out: list[tuple[int, tuple[int, pa.RecordBatch]]] = []
    state = next(i for i, output in enumerate(program.outputs) if output.tag == CARRIED)
    events = [decode_event(carry.end) for carry in program.carry]
    reports = [Metrics() for _ in events]
    current = _Group(-1)
    driver = KeyGroups(program, lambda number, batch: out.append((current.part, (number, batch))), clock, subtask)

    def finish(group: _Group, until: int) -> None:
        """Ends the partitions of a group that come before `until`."""
        for part in range(group.part, until):
            group.part = part
            if group.waiting or group.store.pages:
                driver.run(
                    group.store,
                    Arrived(group.waiting),
                    events[part],
                    in_order=True,
                    watermark=program.carry[part].watermark,
                )
                rows = group.store.rows(group.number)
                if rows is not None:
                    out.append((part, (state, rows)))
                else:
                    group.store = Pages()
                group.waiting = []
                reports[part] = merge([reports[part], driver.running.metrics])
                driver.running.metrics.clear()
        group.part = until

    try:
        for batch in batches:
            for number, rows in stretches(batch, GROUP):
                if current.number != number:
                    finish(current, len(events))
                    current = _Group(number)
                for part, own in stretches(rows, PART) if program.parts else [(0, rows)]:
                    finish(current, part)
                    _take(current, own, program)
                    while sum(b.num_rows for b in current.waiting) >= CHUNK:
                        _chunk(driver, current, program, program.carry[part].watermark)
                yield from out
                out.clear()
        finish(current, len(events))
        yield from out
    finally:
        driver.close()
    reports[-1] = merge([reports[-1], driver.running.metrics])  # what opening and closing have counted
    yield from ((part, report.encode()) for part, report in enumerate(reports))


def _take(group: _Group, part: pa.RecordBatch, program: Program) -> None:
    """Takes rows of state into the group's store, and records to those that wait."""
    stored = part.num_rows - part.column(PAGE).null_count
    for page, data in zip(part.column(PAGE)[:stored].to_pylist(), part.column(STATE)[:stored].to_pylist(), strict=True):
        group.store.pages[page] = data
    if stored < part.num_rows:
        group.waiting.append(part.slice(stored).select(program.input.schema.names))


def _chunk(driver: KeyGroups, group: _Group, program: Program, watermark: int) -> None:
    """Processes what waits, but for the last key's records, which may go on; where there is no other, all but the last
    of them.
    """
    (batch,) = pa.Table.from_batches(group.waiting).combine_chunks().to_batches()
    _, starts = runs(batch, driver.keyed, program.input, driver.operator.where)
    cut = starts[-1] or batch.num_rows - 1
    driver.run(
        group.store, Arrived([batch.slice(0, cut)]), in_order=True, unfinished=starts[-1] == 0, watermark=watermark
    )
    group.waiting = [batch.slice(cut)]
