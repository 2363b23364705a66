"""What Spark's workers run to turn pages of key groups into rows of a typed table, and rows into pages.

The types are the operator's own: it is opened, as it is for records, and says which states it has. Knows the operators
and how they get to a worker; no session.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager

import pyarrow as pa
import pyarrow.compute as pc

from dagster_unified.engine.shipping import Payload
from dagster_unified.engine.worker import this_subtask
from dagster_unified.operators.broadcast import BroadcastOperator
from dagster_unified.operators.drivers.batch import spare_the_garbage_collector
from dagster_unified.operators.drivers.carried import rows_of
from dagster_unified.operators.drivers.group import MemoryStore
from dagster_unified.operators.drivers.key_groups import KeyGroups
from dagster_unified.operators.keys import grouped_stretches, key_hash
from dagster_unified.operators.numbers import BROADCAST
from dagster_unified.operators.program.spec import Program
from dagster_unified.operators.state.pages import Content
from dagster_unified.operators.state.table import KeyShape, StateTable
from dagster_unified.operators.time import wall_clock

Mapped = Callable[[Iterable[pa.RecordBatch]], Iterator[pa.RecordBatch]]

GROUP, MARKER = "__group", "__marker"
"""Beside a table's own columns: the key group of a row, and whether the row only says that there is such a group."""

ROWS = 32_768
"""Keys that become rows, or that are read as rows, together."""

DESCRIBED = pa.schema([("operator", pa.int64()), ("schema", pa.binary())])


def payload_of(program: Program) -> Payload:
    """What ships one keyed operator."""
    return Payload.of(program, [step.function for step in program.steps])


def describe(payloads: list[Payload], stored: list[bytes | None]) -> Mapped:
    """For rows of operators' numbers, the columns of each one's table.

    `stored` are the columns that a savepoint has; `StateError` is raised where they do not fit.
    """
    return functools.partial(_describe, payloads, stored)


def to_rows(payload: Payload) -> Mapped:
    """Pages, sorted by group, as rows of the operator's table."""
    return functools.partial(_to_rows, payload)


def to_groups(payload: Payload, groups: int) -> Mapped:
    """Rows with the key group of each; the row of broadcast state goes to every group."""
    return functools.partial(_to_groups, payload, groups)


def to_pages(payload: Payload, watermark: int) -> Mapped:
    """Rows, sorted by group, as pages of groups that have seen `watermark`."""
    return functools.partial(_to_pages, payload, watermark)


def stored_columns(schema: pa.Schema) -> pa.Schema:
    """The columns of a table beside those of which group a row is in."""
    return pa.schema([*schema, pa.field(GROUP, pa.int32()), pa.field(MARKER, pa.bool_())], metadata=schema.metadata)


@contextmanager
def _opened(payload: Payload) -> Iterator[tuple[KeyGroups, StateTable]]:
    spare_the_garbage_collector()
    program: Program = payload.load()
    driver = KeyGroups(program, _nowhere, wall_clock, this_subtask())
    try:
        yield driver, _table(driver)
    finally:
        driver.close()


def _nowhere(_: int, __: pa.RecordBatch) -> None:
    """No records go through an operator that is only asked what its state is."""


def _table(driver: KeyGroups) -> StateTable:
    operator, program = driver.operator, driver.program
    keyed = driver.keyed
    named = len(keyed.columns) > 0 and not keyed.columns[0].startswith("__")
    broadcast = dict(operator.descriptors) if isinstance(operator, BroadcastOperator) else {}
    shape = KeyShape(keyed.columns if named else ("key",), keyed.python)
    where = f"{program.pipeline}: operator '{program.steps[0].name}'"
    return StateTable(where, shape, program.input.records.python, dict(operator.state.descriptors), broadcast)


def _describe(
    payloads: list[Payload], stored: list[bytes | None], batches: Iterable[pa.RecordBatch]
) -> Iterator[pa.RecordBatch]:
    for batch in batches:
        for number in batch.column(0).to_pylist():
            with _opened(payloads[number]) as (_, table):
                held = stored[number]
                if held is not None:
                    table.check(pa.ipc.read_schema(pa.py_buffer(held)))
                schema = table.schema.serialize().to_pybytes()
            yield pa.RecordBatch.from_pylist([{"operator": number, "schema": schema}], DESCRIBED)


def _to_rows(payload: Payload, batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    with _opened(payload) as (driver, table):
        for group, store in _stores(batches):
            if driver.broadcast is not None and group == 0:
                data = store.read_page(BROADCAST)
                if data is not None:
                    yield table.broadcast_row(driver.broadcast.decode(data))
            waiting = Content()
            for content in driver.contents(store):
                waiting.keys.update(content.keys)
                waiting.event_timers += content.event_timers
                waiting.processing_timers += content.processing_timers
                waiting.held += content.held
                if len(waiting.keys) >= ROWS:
                    yield table.rows(waiting)
                    waiting = Content()
            found = table.rows(waiting)
            if found.num_rows:
                yield found


def _stores(batches: Iterable[pa.RecordBatch]) -> Iterator[tuple[int, MemoryStore]]:
    """The pages of one group after another."""
    for group, own in grouped_stretches(batches, "group"):
        store = MemoryStore()
        for rows in own:
            pages, states = rows.column("page").to_pylist(), rows.column("state").to_pylist()
            store.pages.update(zip(pages, states, strict=True))
        yield group, store


def _to_groups(payload: Payload, groups: int, batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    with _opened(payload) as (_, table):
        for batch in batches:
            keys = table.keys_of(batch)
            keyed = [i for i, key in enumerate(keys) if not table.is_none(key)]
            chosen = [key_hash(keys[i]) % groups for i in keyed]
            yield _with_group(batch if len(keyed) == len(keys) else batch.take(pa.array(keyed, pa.int64())), chosen)
            for i in set(range(len(keys))) - set(keyed):
                copies = batch.take(pa.array([i] * groups, pa.int64()))
                yield _with_group(copies, list(range(groups)))


def _with_group(batch: pa.RecordBatch, chosen: list[int]) -> pa.RecordBatch:
    own = batch.append_column(pa.field(GROUP, pa.int32()), pa.array(chosen, pa.int32()))
    return own.append_column(pa.field(MARKER, pa.bool_()), pa.repeat(pa.scalar(False), batch.num_rows))


def _to_pages(payload: Payload, watermark: int, batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    with _opened(payload) as (driver, table):
        for group, rows in grouped_stretches(batches, GROUP):
            store = MemoryStore()
            _fill(driver, table, store, rows, watermark)
            yield rows_of(group, store)


def _fill(
    driver: KeyGroups, table: StateTable, store: MemoryStore, batches: Iterable[pa.RecordBatch], watermark: int
) -> None:
    """Writes the pages of one group."""
    with driver.grouped.opened(store, watermark) as group:
        for batch in batches:
            rows = batch.filter(pc.invert(batch.column(MARKER)))
            broadcast = table.broadcast_of(rows)
            if broadcast is not None and driver.broadcast is not None:
                store.write_page(BROADCAST, driver.broadcast.encode(broadcast))
            driver.grouped.put(group, table.content(rows))
        driver.grouped.save(group)
