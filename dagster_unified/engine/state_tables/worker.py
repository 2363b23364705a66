"""Turns pages of key groups into rows of a typed table, and rows into pages, in Spark's workers.

Each public function maps a task's batches, its last argument; the driver binds the others with `partial`. The types are
the operator's own: it is opened, as it is for records, and says which states it has. Knows the operators and how they
get to a worker; no session.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from dagster_unified.engine.shipping import Payload
from dagster_unified.engine.worker import this_subtask
from dagster_unified.errors import StateError
from dagster_unified.operators.drivers.batch import rows_of, spare_the_garbage_collector
from dagster_unified.operators.drivers.group import Divided, MemoryStore, apart, in_order_of_blocks, pages_of_hashes
from dagster_unified.operators.drivers.key_groups import KeyGroups
from dagster_unified.operators.keys import grouped_stretches, key_hashes, stretches
from dagster_unified.operators.operator import BROADCAST, INDEX
from dagster_unified.operators.operator_state import KEY, LIST, CheckpointedOperator, redistributed
from dagster_unified.operators.program.step import Program
from dagster_unified.operators.routing import decode, encode
from dagster_unified.operators.state.pages import Block, Blocks, Columns, Content, decode_index
from dagster_unified.operators.state.table import LARGEST, StateTable
from dagster_unified.operators.time import MIN_TIMESTAMP, wall_clock
from dagster_unified.state.manifest import OperatorState, table_schema
from dagster_unified.state.tables import Split, open_output, read_split, write_file

Mapped = Callable[[Iterable[pa.RecordBatch]], Iterator[pa.RecordBatch]]

GROUP, HASH, PAGE, ORDER, SPLIT = "__group", "__hash", "__page", "__order", "__split"
"""Beside a table's own columns: a row's key group, its key's hash, its page in the group, what sorts it there, and the
split that it is of.
"""

GROUP_FIELD, HASH_FIELD = pa.field(GROUP, pa.int32()), pa.field(HASH, pa.int64())
SPLIT_FIELD = pa.field(SPLIT, pa.int64())

SLICES = pa.schema([("group", pa.int32()), ("rows", pa.binary())])
"""Rows of one key group, encoded; None in a row that only says that there is such a group.

So a table crosses the border between Python and Spark once as columns, and its exchange moves a few large rows.
"""

SLICED, SLICED_BYTES = 131_072, 64 << 20
"""Rows, or their bytes, that are collected before they are sliced."""

COMBINED_BYTES = 256 << 20
"""Bytes of slices of one group that are sorted together."""

ROWS, ROWS_BYTES = 32_768, 16 << 20
"""Keys, or bytes of their pages, that become rows together."""

WRITTEN = pa.schema([("name", pa.string()), ("rows", pa.int64())])
"""A file that a task has written, and how many rows are in it.

It counts where Spark takes the task's result: that is one attempt of each task, however many have run.
"""

DESCRIBED = pa.schema([("operator", pa.int64()), ("schema", pa.binary())])


def payload_of(program: Program) -> Payload:
    """Return the payload that ships one keyed operator."""
    return Payload.of(program, [step.function for step in program.steps])


@contextmanager
def _opened(payload: Payload) -> Iterator[tuple[KeyGroups, StateTable]]:
    spare_the_garbage_collector()
    program: Program = payload.load()
    with KeyGroups(program, _nowhere, wall_clock, this_subtask()) as driver:
        yield driver, driver.table()


def _nowhere(_: int, __: pa.RecordBatch) -> None:
    """Drop records: an operator that is only asked for its state gets none."""


def describe(
    payloads: Sequence[Payload], stored: Sequence[pa.Schema | None], batches: Iterable[pa.RecordBatch]
) -> Iterator[pa.RecordBatch]:
    """Describe the tables of the operators whose numbers come, in the columns of `DESCRIBED`.

    `stored` are the columns that a savepoint has of each; raises `StateError` where they do not fit.
    """
    for batch in batches:
        for number in batch.column(0).to_pylist():
            with _opened(payloads[number]) as (_, table):
                stored_schema = stored[number]
                if stored_schema is not None:
                    table.check(stored_schema)
                schema = table.schema.serialize().to_pybytes()
            yield pa.RecordBatch.from_pylist([{"operator": number, "schema": schema}], DESCRIBED)


def to_rows(payload: Payload, batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    """Turn pages, sorted by group, into rows of the operator's table."""
    with _opened(payload) as (driver, table):
        for group, store in _stores(batches, table.where):
            if driver.broadcast is not None and group == 0:
                data = store.read_page(BROADCAST)
                if data is not None:
                    yield table.broadcast_row(driver.broadcast.decode(data))
            contents = driver.contents(store)
            if isinstance(driver.operator, CheckpointedOperator):
                contents = (_of_subtask(group, content) for content in contents)
            for content in _together(contents, _keys_at_once(store)):
                yield from (rows for rows in table.batches(content) if rows.num_rows)


def _of_subtask(number: int, block: Block) -> Content:
    """Return the content of a subtask's group, with the number of the subtask as its key."""
    content = block.content()
    return Content({number: content.keys[KEY]} if KEY in content.keys else {}, large=content.large)


def _together(contents: Iterable[Block], most: int) -> Iterator[Block]:
    """Yield the content of blocks, several together, up to so many keys."""
    waiting: Block | None = None
    for content in contents:
        match waiting, content:
            case (Columns(), Columns()) if waiting.names == content.names:
                waiting.add(content)
            case (Content(), Content()):
                waiting.add(content)
            case _:
                if waiting is not None:
                    yield waiting
                waiting = content
        if waiting.size >= most:
            yield waiting
            waiting = None
    if waiting is not None:
        yield waiting


def files_left(folder: str, batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    """Write files with rows of a table, as `engine/worker.py` makes them, under names of the task's own."""
    files = (data.as_buffer() for batch in batches for data in batch.column("state"))
    for number, data in enumerate(files):
        name = _file_of_task(number)
        with open_output(f"{folder}/{name}") as opened:
            opened.write(data)
        rows = pq.read_metadata(pa.BufferReader(data)).num_rows
        yield pa.RecordBatch.from_pylist([{"name": name, "rows": rows}], WRITTEN)


def rows_to_file(
    rows_of_task: Mapped, schema: pa.Schema, folder: str, batches: Iterable[pa.RecordBatch]
) -> Iterator[pa.RecordBatch]:
    """Write the rows that a task computes into a file of its own, and yield it in the columns of `WRITTEN`.

    The folder has to be there.
    """
    name = _file_of_task()
    rows = write_file(rows_of_task(batches), schema, f"{folder}/{name}")
    if rows:
        yield pa.RecordBatch.from_pylist([{"name": name, "rows": rows}], WRITTEN)


def _file_of_task(number: int = 0) -> str:
    """Return a name that no other task or attempt has: two may run at once, and one may come again.

    `number` distinguishes the files of one task.
    """
    from pyspark import TaskContext

    context = TaskContext.get()
    task = f"-{context.partitionId():05}-{context.taskAttemptId()}" if context else ""
    return f"part{task}-{number}.parquet"


def _keys_at_once(store: MemoryStore) -> int:
    """Return how many keys of a group become rows together: fewer where they have large lists and maps."""
    index, size = store.read_page(INDEX), sum(map(len, store.pages.values()))
    keys = 0 if index is None else sum(page.keys for page in decode_index(index).pages)
    return max(1, min(ROWS, keys * ROWS_BYTES // max(size, 1)))


def _stores(batches: Iterable[pa.RecordBatch], where: str) -> Iterator[tuple[int, MemoryStore]]:
    for group, batches_of_group in grouped_stretches(batches, "group"):
        store = MemoryStore()
        for rows in batches_of_group:
            pages, states = rows.column("page").to_pylist(), rows.column("state").to_pylist()
            store.pages.update(zip(pages, states, strict=True))
        if store.read_page(INDEX) is None:
            raise StateError(f"{where}: the state of key group {group} has no index; take the savepoint again")
        yield group, store


def to_slices(
    payload: Payload, groups: int, chosen: bool, batches: Iterable[pa.RecordBatch]
) -> Iterator[pa.RecordBatch]:
    """Cut rows into slices, each of one key group, in the columns of `SLICES`; every group gets the broadcast state.

    A key's group is that of a STREAMING job, or is `chosen` by Spark and in the column `GROUP`.
    """
    with _opened(payload) as (_, table):
        waiting: list[pa.RecordBatch] = []
        for batch in (piece for received in batches for piece in _pieces(received)):
            keys = table.keys_of(batch)
            without = table.without_key(keys)
            if without:
                broadcast = _hashed(batch.take(pa.array(without, pa.int64())), [None] * len(without))
                rows = broadcast.drop_columns([GROUP]) if chosen else broadcast
                yield from (_slices([(group, rows)]) for group in range(groups))
                with_key = sorted(set(range(len(keys))) - set(without))
                keys, batch = [keys[i] for i in with_key], batch.take(pa.array(with_key, pa.int64()))
            hashes = key_hashes(keys)
            batch = _hashed(batch, hashes)
            if not chosen:
                batch = batch.append_column(GROUP_FIELD, pa.array([h % groups for h in hashes], GROUP_FIELD.type))
            if waiting and batch.nbytes > SLICED_BYTES:
                yield _by_group(waiting)
                waiting = []
            waiting.append(batch)
            if sum(b.num_rows for b in waiting) >= SLICED or sum(b.nbytes for b in waiting) >= SLICED_BYTES:
                yield _by_group(waiting)
                waiting = []
        if waiting:
            yield _by_group(waiting)


def read_slices(
    payload: Payload,
    groups: int,
    folder: str,
    state: OperatorState,
    splits: Sequence[Split],
    batches: Iterable[pa.RecordBatch],
) -> Iterator[pa.RecordBatch]:
    """Read the rows of the splits whose numbers come, as slices of the key groups of a STREAMING job."""
    return to_slices(payload, groups, False, _read_rows(folder, state, splits, batches))


def _read_rows(
    folder: str, state: OperatorState, splits: Sequence[Split], batches: Iterable[pa.RecordBatch]
) -> Iterator[pa.RecordBatch]:
    for batch in batches:
        for number in batch.column(0).to_pylist():
            if number < len(splits):  # of a table without rows
                yield from read_split(folder, state, splits[number])


def _pieces(batch: pa.RecordBatch) -> Iterator[pa.RecordBatch]:
    """Split rows into batches of at most `SLICED_BYTES`, or of one row: a slice has to fit into one array."""
    if batch.num_rows < 2 or batch.nbytes <= SLICED_BYTES:
        yield batch
        return
    middle = batch.num_rows // 2
    yield from _pieces(batch.slice(0, middle))
    yield from _pieces(batch.slice(middle))


def read_keys(
    folder: str,
    state: OperatorState,
    splits: Sequence[Split],
    names: Sequence[str],
    batches: Iterable[pa.RecordBatch],
) -> Iterator[pa.RecordBatch]:
    """Read the key of each row of the splits whose numbers come, next to the number of the split."""
    for batch in batches:
        for number in batch.column(0).to_pylist():
            for keys in read_split(folder, state, splits[number], names):
                yield keys.append_column(SPLIT_FIELD, pa.repeat(pa.scalar(number, SPLIT_FIELD.type), keys.num_rows))


def slices_in_groups(
    payload: Payload,
    groups: int,
    folder: str,
    state: OperatorState,
    splits: Sequence[Split],
    batches: Iterable[pa.RecordBatch],
) -> Iterator[pa.RecordBatch]:
    """Slice the rows of `read_keys`, in its order, by the key group that comes for each."""
    return to_slices(payload, groups, True, _in_groups(folder, state, splits, batches))


def _in_groups(
    folder: str, state: OperatorState, splits: Sequence[Split], batches: Iterable[pa.RecordBatch]
) -> Iterator[pa.RecordBatch]:
    """Yield the rows of splits, each with its group from `batches`."""
    for number, batches_of_split in grouped_stretches(batches, SPLIT):
        chosen = pa.chunked_array([], GROUP_FIELD.type)
        for rows in read_split(folder, state, splits[number]):
            while len(chosen) < rows.num_rows:
                chosen = pa.chunked_array([*chosen.chunks, next(batches_of_split).column(GROUP)])
            groups = pa.concat_arrays(chosen.slice(0, rows.num_rows).chunks)
            chosen = chosen.slice(rows.num_rows)
            yield rows.append_column(GROUP_FIELD, groups)


def _hashed(batch: pa.RecordBatch, hashes: Sequence[int | None]) -> pa.RecordBatch:
    return batch.append_column(HASH_FIELD, pa.array(hashes, HASH_FIELD.type))


def _by_group(waiting: list[pa.RecordBatch]) -> pa.RecordBatch:
    (batch,) = pa.Table.from_batches(waiting).sort_by(GROUP).combine_chunks().to_batches() or waiting[:1]
    return _slices([(group, rows.drop_columns([GROUP])) for group, rows in stretches(batch, GROUP)])


def _slices(rows: Sequence[tuple[int, pa.RecordBatch]]) -> pa.RecordBatch:
    groups, data = [group for group, _ in rows], [encode(batch) for _, batch in rows]
    columns = [pa.array(c, f.type) for c, f in zip((groups, data), SLICES, strict=True)]
    return pa.RecordBatch.from_arrays(columns, schema=SLICES)


def to_pages(
    payload: Payload, stored: pa.Schema, watermark: int, batches: Iterable[pa.RecordBatch]
) -> Iterator[pa.RecordBatch]:
    """Turn slices of a table with the columns `stored`, sorted by group, into pages of groups that saw `watermark`."""
    schema = stored.append(HASH_FIELD)
    with _opened(payload) as (driver, table):
        for group, batches_of_group in grouped_stretches(batches, "group"):
            slices = [
                decode(data.as_buffer(), schema)
                for rows in batches_of_group
                for data in rows.column("rows").drop_null()
            ]
            store = _filled(driver, table, slices, watermark)
            largest = max(map(len, store.pages.values()))
            if largest > LARGEST:
                raise StateError(
                    f"{table.where}: keys of key group {group} that share a page have {largest:,} bytes of state, and a"
                    f" page holds up to {LARGEST:,}; set another pipeline.max-parallelism, which spreads them anew"
                )
            yield from rows_of(group, store)


def _filled(driver: KeyGroups, table: StateTable, slices: Sequence[pa.RecordBatch], watermark: int) -> MemoryStore:
    store = MemoryStore()
    with driver.grouped.opened(store, watermark) as group:
        keyed = []
        for rows in slices:
            if rows.column(HASH).null_count < rows.num_rows:
                keyed.append(rows)
                continue
            broadcast = table.broadcast_of(rows)
            if broadcast is not None and driver.broadcast is not None:
                store.write_page(BROADCAST, driver.broadcast.encode(broadcast))
        pages = group.split(sum(rows.num_rows for rows in keyed), sum(rows.nbytes for rows in keyed))
        group.fill(_contents(table, keyed, pages), watermark)
    return store


def to_subtasks(
    payload: Payload, stored: pa.Schema, before: int, count: int, batches: Iterable[pa.RecordBatch]
) -> Iterator[pa.RecordBatch]:
    """Turn all rows of operator state, with the columns `stored`, from `before` subtasks into pages of `count`."""
    with _opened(payload) as (driver, table):
        assert isinstance(driver.operator, CheckpointedOperator)
        before_by_subtask: dict[int, dict[str, Any]] = {}
        for batch in batches:
            rows = table.content(decode(encode(batch), stored))
            before_by_subtask |= {number: state for number, state in rows.keys.items() if isinstance(number, int)}
        divided = redistributed([before_by_subtask[n] for n in sorted(before_by_subtask)], driver.operator.kinds, count)
        for number in range(count):
            state = divided[number]
            if before == count:
                state_before = before_by_subtask.get(number, {})
                state |= {
                    name: state_before.get(name, []) for name, kind in driver.operator.kinds.items() if kind == LIST
                }
            store = MemoryStore()
            driver.running.enter(number)
            with driver.grouped.opened(store) as group:
                content = Content(driver.operator.state_from_savepoint(state))
                group.fill([(0, len(content.keys), functools.partial(apart, content, {}))], MIN_TIMESTAMP)
            yield from rows_of(number, store)


def read_subtasks(
    payload: Payload,
    folder: str,
    state: OperatorState,
    splits: Sequence[Split],
    count: int,
    batches: Iterable[pa.RecordBatch],
) -> Iterator[pa.RecordBatch]:
    """Read all splits of operator state, whose numbers come, as `to_subtasks` gives its rows."""
    rows = _read_rows(folder, state, splits, batches)
    return to_subtasks(payload, table_schema(state), state.subtasks, count, rows)


def _contents(table: StateTable, keyed: Sequence[pa.RecordBatch], pages: int) -> Iterator[tuple[int, int, Divided]]:
    """Yield the keys of each page, and what it holds of the rows, which come in the order of its blocks."""
    of_page: dict[int, list[pa.RecordBatch]] = {}
    for together in _combinable(keyed):
        rows = pa.Table.from_batches(together)
        numbers = pages_of_hashes(rows.column(HASH), pages)
        rows = rows.append_column(PAGE, numbers).append_column(ORDER, in_order_of_blocks(numbers, rows.column(HASH)))
        (batch,) = rows.sort_by(ORDER).combine_chunks().to_batches()
        for number, rows in stretches(batch, PAGE):
            of_page.setdefault(number, []).append(rows)
    for number, slices in of_page.items():
        columns = table.columns(slices[0]) if len(slices) == 1 else None
        if columns is not None:
            yield number, len(columns.keys), functools.partial(_cut, columns, slices[0].column(HASH).to_pylist())
            continue
        content, hashes = Content(), dict[Hashable, int]()
        for rows in slices:
            content.add(table.content(rows))
            hashes.update(zip(table.keys_of(rows), rows.column(HASH).to_pylist(), strict=True))
        yield number, len(content.keys), functools.partial(apart, content, hashes)


def _cut(columns: Columns, hashes: Sequence[int], blocks: Blocks) -> list[Columns]:
    return columns.cut(blocks.ends_of(hashes))


def _combinable(batches: Sequence[pa.RecordBatch]) -> Iterator[list[pa.RecordBatch]]:
    """Group batches that can become one: Arrow counts the bytes of a column with 31 bits."""
    together: list[pa.RecordBatch] = []
    size = 0
    for batch in batches:
        if together and size + batch.nbytes > COMBINED_BYTES:
            yield together
            together, size = [], 0
        together.append(batch)
        size += batch.nbytes
    if together:
        yield together
