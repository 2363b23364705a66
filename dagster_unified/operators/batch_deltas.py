"""Delta iterations over Arrow batches: the solution set of a key group as columns, each a page of its own.

A page is written where its column has changed, so that what never changes, such as the edges of a graph, is written
once and read from where it lies.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pyarrow as pa
import pyarrow.compute as pc

from dagster_unified.errors import PipelineError, RecordTypeError
from dagster_unified.operators.arrow_functions import checked
from dagster_unified.operators.deltas import REDUCE, SOLUTION, WORK, Solutions, own_rows
from dagster_unified.operators.failures import RAISED, user_failure
from dagster_unified.operators.functions.base import RuntimeContext
from dagster_unified.operators.functions.deltas import BatchDeltaFunction
from dagster_unified.operators.keys import alike
from dagster_unified.operators.layout import in_declared_types
from dagster_unified.operators.numbers import COLUMNS
from dagster_unified.operators.operator import KeyedOperator, OperatorContext, PageStore
from dagster_unified.operators.state.backend import KeyedStateBackend
from dagster_unified.records import shorten


class BatchDeltaOperator(KeyedOperator):
    """Calls a `BatchDeltaFunction` with what the keys of a group were sent, and keeps its changes."""

    takes_batches = True
    ends_iterations = True

    def __init__(self, function: BatchDeltaFunction, context: OperatorContext, types: Solutions) -> None:
        super().__init__(function, context)
        self.function, self.types = function, types

    def open(self, context: Callable[[KeyedStateBackend | None], RuntimeContext]) -> None:
        self.function.open(context(None))

    def close(self) -> None:
        self.function.close()

    def process_batch(self, batch: pa.RecordBatch, store: PageStore) -> None:
        types, given, work = self.types, batch.column(SOLUTION), batch.column(WORK)
        held = _Columns(types, store)
        if given.null_count < batch.num_rows:
            held.add(own_rows(given.drop_null(), types.solution))
            self._check_unique(held.columns, "the initial solution set has the key", REDUCE)
            work = work.drop_null()
        workset = own_rows(work, types.work)
        if types.combiner is not None:
            workset = types.combiner.combined([workset])
        if workset.num_rows:
            self._update(held, workset)
        held.save()

    def end_of_group(self, store: PageStore) -> None:
        solution = _Columns(self.types, store).columns
        self.out.emit_batch(self.types.tag.name, solution, self.types.solution)

    def _update(self, held: _Columns, workset: pa.RecordBatch) -> None:
        keys = _arrays(workset, self.types.work_fields)
        solution = held.at(keys)
        try:
            returned = self.function.update_batch(solution, workset)
        except RAISED as error:
            shown = workset.slice(0, 3).to_pylist()
            raise user_failure(error, self.where, self.function.update_batch, shown) from error
        if not _are_batches(returned):
            raise RecordTypeError(
                f"{self.where}: update_batch returns changes and the next workset, each a pyarrow.RecordBatch or None,"
                f" and not {shorten(returned)}"
            )
        changes, following = returned
        if following is not None and following.num_rows:
            batch, _ = checked(following, self.types.work, None, self.where)
            self.out.emit_batch(None, batch, self.types.work)
        if changes is not None and changes.num_rows:
            found = self._checked(changes, keys)
            replaced, new = held.change(found, self._missing)
            if replaced + new.num_rows < found.num_rows:
                self._check_unique(found, "the function changed key", "give combine=, so that each key has one row")
            self._check_unique(new, "the function changed key", "give combine=, so that each key has one row")

    def _checked(self, changes: pa.RecordBatch, keys: Sequence[pa.Array]) -> pa.RecordBatch:
        """The changes in their declared types: the key's columns, and those that change."""
        fields, schema = self.types.fields, self.types.solution.schema
        for name in fields:
            if name not in changes.schema.names:
                raise RecordTypeError(f"{self.where}: the changes have no column '{name}', which is of the key")
        unknown = next((name for name in changes.schema.names if name not in schema.names), None)
        if unknown is not None:
            raise RecordTypeError(
                f"{self.where}: the changes have a column '{unknown}', and a {self.types.solution.describe()} has none"
            )
        own = pa.schema([field for field in schema if field.name in changes.schema.names])
        found = in_declared_types(changes, own, self.types.solution, self.where)
        stray = places(_arrays(found, fields), keys)
        if stray.null_count:
            key = found.filter(stray.is_null()).select(list(fields)).slice(0, 1).to_pylist()[0]
            raise RecordTypeError(
                f"{self.where}: the function changed the record of key {shorten(key)}, which was sent nothing; a change"
                " is the new record of a key of the workset, and other keys are sent a workset"
            )
        return found

    def _missing(self, name: str, key: object) -> RecordTypeError:
        return RecordTypeError(
            f"{self.where}: a change adds key {shorten(key)} to the solution set, and has no column '{name}'; give all"
            " columns where there may be new keys"
        )

    def _check_unique(self, rows: pa.RecordBatch, what: str, instead: str) -> None:
        if rows.num_rows < 2:
            return
        fields = list(self.types.fields)
        counted = (
            pa.Table.from_arrays(_arrays(rows, fields), fields)
            .group_by(fields, use_threads=False)
            .aggregate([([], "count_all")])
        )
        if counted.num_rows < rows.num_rows:
            twice = counted.filter(pc.greater(counted["count_all"], 1)).select(fields).slice(0, 1).to_pylist()[0]
            raise PipelineError(f"{self.where}: {what} {shorten(twice)} more than once; {instead}")


class _Columns:
    """The solution set of a key group."""

    def __init__(self, types: Solutions, store: PageStore) -> None:
        self._types, self._store = types, store
        self._schema = pa.schema([field.with_nullable(True) for field in types.solution.schema])
        self._changed: set[str] = set()
        self.columns = pa.RecordBatch.from_arrays(
            [self._read(number, field) for number, field in enumerate(self._schema)], schema=self._schema
        )

    def at(self, keys: Sequence[pa.Array]) -> pa.RecordBatch:
        """The rows of some keys, null where there are none."""
        found = places(keys, _arrays(self.columns, self._types.fields))
        return pa.RecordBatch.from_arrays([column.take(found) for column in self.columns.columns], schema=self._schema)

    def add(self, rows: pa.RecordBatch) -> None:
        """Adds rows of keys that it does not have."""
        self.columns = pa.concat_batches([self.columns, pa.RecordBatch.from_arrays(rows.columns, schema=self._schema)])
        self._changed |= set(self._schema.names)

    def change(
        self, changes: pa.RecordBatch, missing: Callable[[str, object], Exception]
    ) -> tuple[int, pa.RecordBatch]:
        """Replaces columns of rows, and adds rows of other keys; raises `missing` for one without all columns.

        Returns how many rows it has replaced, and those that were added.
        """
        fields = self._types.fields
        held = _arrays(self.columns, fields)
        new = changes.filter(places(_arrays(changes, fields), held).is_null())
        row = places(held, _arrays(changes, fields))
        arrays = []
        for name, column in zip(self._schema.names, self.columns.columns, strict=True):
            if name in changes.schema.names and name not in fields and row.null_count < len(row):
                column = pc.if_else(row.is_valid(), changes.column(name).take(row), column)
                self._changed.add(name)
            arrays.append(column)
        self.columns = pa.RecordBatch.from_arrays(arrays, schema=self._schema)
        if new.num_rows:
            absent = next((name for name in self._schema.names if name not in new.schema.names), None)
            if absent is not None:
                raise missing(absent, new.select(list(fields)).slice(0, 1).to_pylist()[0])
            self.add(new.select(self._schema.names))
        return len(row) - row.null_count, new

    def save(self) -> None:
        """Writes the columns that have changed."""
        for number, column in enumerate(self._schema):
            if column.name in self._changed:
                batch = pa.RecordBatch.from_arrays([self.columns.column(number)], schema=pa.schema([column]))
                self._store.write_page(COLUMNS + number, batch.serialize().to_pybytes())

    def _read(self, number: int, field: pa.Field) -> pa.Array:
        data = self._store.read_page(COLUMNS + number)
        if data is None:
            return pa.array([], field.type)
        return pa.ipc.read_record_batch(pa.py_buffer(data), pa.schema([field])).column(0)


def _are_batches(returned: object) -> bool:
    """Whether a function has returned what it should."""
    return (
        isinstance(returned, tuple)
        and len(returned) == 2
        and all(one is None or isinstance(one, pa.RecordBatch) for one in returned)
    )


def places(keys: Sequence[pa.Array], held: Sequence[pa.Array]) -> pa.Array:
    """The rows of some keys among others, null where they are not."""
    if len(keys) == 1:
        return pc.index_in(keys[0], value_set=held[0])
    rows = {key: row for row, key in enumerate(zip(*(column.to_pylist() for column in held), strict=True))}
    return pa.array([rows.get(key) for key in zip(*(column.to_pylist() for column in keys), strict=True)], pa.int32())


def _arrays(batch: pa.RecordBatch, names: Sequence[str]) -> list[pa.Array]:
    return [alike(batch.column(name)) for name in names]
