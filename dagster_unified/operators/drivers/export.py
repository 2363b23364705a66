"""The exporting BATCH driver: a partition by key, whose state goes to a savepoint and nowhere else.

It is the STREAMING driver with some thousands of whole keys as its micro-batch. As no record comes for them any more,
what they hold then becomes rows of the savepoint's table at once: no page is encoded, and no key group is needed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

import pyarrow as pa

from dagster_unified.operators.drivers.carried import MOST_WAITING
from dagster_unified.operators.drivers.group import MemoryStore
from dagster_unified.operators.drivers.key_groups import Arrived, KeyGroups, MicroBatch, decode_event
from dagster_unified.operators.drivers.report import Emitted, Emitting
from dagster_unified.operators.functions.base import Subtask
from dagster_unified.operators.keys import last_run
from dagster_unified.operators.program.spec import CarryOver, Program


def exported(
    program: Program,
    over: CarryOver,
    batches: Iterable[pa.RecordBatch],
    clock: Callable[[], int],
    subtask: Subtask,
) -> Emitting:
    """Runs records that come sorted by key; what their keys leave follows them as rows of the operator's table."""
    out: list[Emitted] = []
    state = program.carried
    event = decode_event(over.end)
    driver = KeyGroups(program, lambda number, batch: out.append(Emitted(number, batch)), clock, subtask)
    table = driver.table()
    store = MemoryStore()

    def run(batch: pa.RecordBatch) -> None:
        """Processes all records of some keys."""
        nonlocal store
        given = MicroBatch(Arrived([batch]), event, sorted_by_key=True)
        held = driver.run_and_leave(store, given, over.watermark)
        driver.count_waiting()
        out.extend(Emitted(state, rows) for rows in table.batches(held) if rows.num_rows)
        store = MemoryStore()

    waiting: list[pa.RecordBatch] = []
    with driver:
        for given in batches:
            if given.num_rows:
                waiting.append(given)
            while sum(batch.num_rows for batch in waiting) >= MOST_WAITING:
                batch = pa.concat_batches(waiting)
                last = last_run(batch, driver.keyed, program.input, driver.operator.where)
                if last:
                    run(batch.slice(0, last))
                else:
                    last = batch.num_rows - 1
                    driver.run_unfinished(store, batch.slice(0, last), over.watermark)
                waiting = [batch.slice(last)]
            yield from out
            out.clear()
        if waiting:
            run(pa.concat_batches(waiting))
        yield from out
        metrics = driver.running.report()
    metrics.add(driver.running.metrics)  # what closing has counted
    return {0: metrics}
