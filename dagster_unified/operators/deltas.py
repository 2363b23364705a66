"""Delta iterations (Ewen et al., VLDB 2012): keyed operators whose state is the solution set."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import pyarrow as pa
import pyarrow.compute as pc

from dagster_unified.errors import PipelineError, RecordTypeError
from dagster_unified.operators.arrow_aggregate import CombineColumns
from dagster_unified.operators.arrow_functions import checked
from dagster_unified.operators.failures import RAISED, placed, user_failure
from dagster_unified.operators.functions.base import OutputTag, RuntimeContext
from dagster_unified.operators.functions.iterations import BatchDeltaFunction, DeltaFunction
from dagster_unified.operators.keys import alike, key_part
from dagster_unified.operators.layout import ComputedKey, StreamLayout, declared, in_declared_types
from dagster_unified.operators.operator import COLUMNS, KeyedOperator, OperatorContext, PageStore
from dagster_unified.operators.state.backend import KeyedStateBackend
from dagster_unified.operators.state.handles import ValueStateDescriptor
from dagster_unified.records import RecordType, shorten

SOLUTION, WORK = "solution", "work"
"""The columns of the two streams: a row has a value in one of them. The columns of the key are before them."""


@dataclass(frozen=True)
class Sided:
    """Turns the records of one of the two streams into rows of the combined stream."""

    records: RecordType
    """The stream's."""

    rows: RecordType
    """The combined stream's."""

    side: str
    fields: tuple[str, ...] = ()
    computed: ComputedKey | None = None
    """The key: fields, or what a function computes."""

    where: str = ""

    def __call__(self, batch: pa.RecordBatch) -> pa.RecordBatch:
        typed = declared(batch.select(list(self.records.names)).columns, self.records.schema)
        if self.computed is not None:
            key_columns = {"": self.computed.column(self.records.from_batch(typed))}
        else:
            key_columns = {name: typed.column(name) for name in self.fields}
        keys = [key_part(name, column, typed, self.records.names, self.where) for name, column in key_columns.items()]
        other = self.rows.schema.field(WORK if self.side == SOLUTION else SOLUTION)
        value = typed.column(0)
        if self.records.shape != "value":
            value = pa.StructArray.from_arrays(typed.columns, fields=list(self.rows.schema.field(self.side).type))
        nothing = pa.nulls(typed.num_rows, other.type)
        sides = [value, nothing] if self.side == SOLUTION else [nothing, value]
        return pa.RecordBatch.from_arrays([*keys, *sides], schema=self.rows.schema)


def rows_type(key: Sequence[Any], solution: RecordType, work: RecordType) -> Any:
    """The record of the combined stream: the parts of the key, and one record, of the solution set or the workset."""
    keys = [(f"key{number}", part) for number, part in enumerate(key)]
    return NamedTuple("Delta", [*keys, (SOLUTION, solution.python | None), (WORK, work.python | None)])


REDUCE = (
    "reduce its records to one before, also in STREAMING: in a window that ends with the input"
    " (GlobalWindows.create_with_end_of_stream_trigger())"
)
"""The advice where a key has several initial solutions."""


class _Initial(NamedTuple):
    """A record of the initial solution set, among those of the workset."""

    solution: Any


def side_rows(column: pa.Array, records: RecordType) -> pa.RecordBatch:
    """The records of one side, from a column without nulls."""
    columns = [column] if records.shape == "value" else column.flatten()
    return pa.RecordBatch.from_arrays(columns, schema=records.schema)


@dataclass(frozen=True)
class Solutions:
    """The types and keys of a delta iteration's records."""

    solution: RecordType
    work: RecordType
    tag: OutputTag[Any]
    """The side output that emits the solution set when the iteration has ended."""

    fields: tuple[str, ...] = ()
    computed: ComputedKey | None = None
    """The key of the solution set."""

    work_fields: tuple[str, ...] = ()
    """Those of the workset's key."""

    combiner: CombineColumns | None = None
    """Combines what several subtasks sent to a key, where the function takes batches."""

    def keys_of(self, changes: Sequence[Any]) -> list[Any]:
        """The keys of records of the solution set."""
        if self.computed is not None:
            return self.computed.of(changes)
        getters = [self.solution.getter(name) for name in self.fields]
        if len(getters) == 1:
            return list(map(getters[0], changes))
        return [tuple(get(change) for get in getters) for change in changes]


class DeltaOperator(KeyedOperator):
    """Calls a `DeltaFunction` for each key that received records, and stores its changes."""

    ends_iterations = True

    def __init__(self, function: DeltaFunction[Any, Any], context: OperatorContext, types: Solutions) -> None:
        super().__init__(function, context)
        self.function, self.types = function, types
        self._has_initial = False
        """Whether the last batch had records of the initial solution set."""

        self.state.register(ValueStateDescriptor(SOLUTION, types.solution.python))

    @property
    def one_value(self) -> str | None:
        return SOLUTION

    def open(self, context: Callable[[KeyedStateBackend | None], RuntimeContext]) -> None:
        self.function.open(context(None))

    def close(self) -> None:
        self.function.close()

    def read(self, batch: pa.RecordBatch, layout: StreamLayout) -> Sequence[Any]:
        types, solution, work = self.types, batch.column(SOLUTION), batch.column(WORK)
        self._has_initial = solution.null_count < batch.num_rows
        if not self._has_initial:
            return types.work.from_batch(side_rows(work, types.work))
        initial = iter(types.solution.from_batch(side_rows(solution.drop_null(), types.solution)))
        later = iter(types.work.from_batch(side_rows(work.drop_null(), types.work)))
        return [
            _Initial(next(initial)) if is_initial else next(later) for is_initial in solution.is_valid().to_pylist()
        ]

    def process(self, records: Sequence[Any], timestamps: Sequence[int | None]) -> None:
        self.process_runs([self.key], [0], records, timestamps, lambda: None)

    def process_runs(
        self,
        keys: Sequence[Hashable],
        starts: Sequence[int],
        records: Sequence[Any],
        timestamps: Sequence[int | None],
        after: Callable[[], None],
    ) -> None:
        solutions = self.state.take(SOLUTION, keys)
        changed: dict[Hashable, Any] = {}
        ends = (*starts[1:], len(records))
        if self._has_initial:
            workset = self._begin(keys, starts, records, solutions)
            changed = {key: solution for key, solution in zip(keys, solutions, strict=True) if solution is not None}
        else:
            workset = [records[start:end] for start, end in zip(starts, ends, strict=True)]
        changes = self._update(keys, solutions, workset)
        if changes:
            changed |= self._checked(changes)
        if changed:
            self._put(keys, solutions, changed)
        self.out.timestamps += [None] * (len(self.out.records) - len(self.out.timestamps))
        after()

    def _begin(
        self, keys: Sequence[Hashable], starts: Sequence[int], records: Sequence[Any], solutions: list[Any]
    ) -> list[Sequence[Any]]:
        """Put initial solutions in their places, and return the workset of each key."""
        worksets: list[Sequence[Any]] = []
        for number, (key, start, end) in enumerate(zip(keys, starts, (*starts[1:], len(records)), strict=True)):
            key_records = records[start:end]
            for record in key_records:
                if type(record) is not _Initial:
                    continue
                if solutions[number] is not None:
                    raise PipelineError(
                        f"{self.where}: the initial solution set has two records of key {key!r}:"
                        f" {shorten(solutions[number])} and {shorten(record.solution)}; {REDUCE}"
                    )
                solutions[number] = record.solution
            worksets.append([record for record in key_records if type(record) is not _Initial])
        return worksets

    def _update(
        self, keys: Sequence[Hashable], solutions: Sequence[Any], workset: Sequence[Sequence[Any]]
    ) -> dict[Hashable, Any]:
        update, send = self.function.update, self.out.emit_records
        changes: dict[Hashable, Any] = {}
        key, work = None, ()
        try:
            for key, solution, work in zip(keys, solutions, workset, strict=True):  # type: ignore[assignment]
                if work:
                    returned = update(solution, work)
                    if type(returned) is not tuple or len(returned) != 2:
                        raise RecordTypeError(
                            f"{self.where}: update returns the change or None, and the next workset, such as `return"
                            f" changed, ()`, and not {shorten(returned)}"
                        )
                    change, following = returned
                    if change is not None:
                        changes[key] = change
                    if following:
                        send(following)
        except RAISED as error:
            what = f"the workset {shorten(work)} of key {key!r}"
            raise user_failure(error, self.where, update, what) from error
        return changes

    def _checked(self, changes: dict[Hashable, Any]) -> dict[Hashable, Any]:
        """The changes in normal form; raises `RecordTypeError` for one of another type or another key."""
        with placed(self.where):
            normal = self.types.solution.all_normal(list(changes.values()))
        for key, changed_key in zip(changes, self.types.keys_of(normal), strict=True):
            if key != changed_key:
                raise RecordTypeError(
                    f"{self.where}: the function changed the record of key {changed_key!r} when it was called for key"
                    f" {key!r}; a change is the new record of the function's own key, and other keys are sent a workset"
                )
        return dict(zip(changes, normal, strict=True))

    def _put(self, keys: Sequence[Hashable], solutions: Sequence[Any], changed: dict[Hashable, Any]) -> None:
        values = [changed.get(key, solution) for key, solution in zip(keys, solutions, strict=True)]
        if None in values:  # keys that the solution set has no record of
            keys = [key for key, value in zip(keys, values, strict=True) if value is not None]
            values = [value for value in values if value is not None]
            self.state.take(SOLUTION, keys)
        self.state.put(SOLUTION, keys, values)

    def end_of_iteration(self) -> None:
        solution = self.state.current.get(SOLUTION)
        if solution is not None:
            self.out.emit_side(self.types.tag, solution, None)


class BatchDeltaOperator(KeyedOperator):
    """Calls a `BatchDeltaFunction` with the workset of a group's keys, and stores its changes."""

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
        types, initial, work = self.types, batch.column(SOLUTION), batch.column(WORK)
        solution_set = _SolutionSet(types, store)
        if initial.null_count < batch.num_rows:
            solution_set.add(side_rows(initial.drop_null(), types.solution))
            self._check_unique(solution_set.columns, "the initial solution set has the key", REDUCE)
            work = work.drop_null()
        workset = side_rows(work, types.work)
        if types.combiner is not None:
            workset = types.combiner.combined([workset])
        if workset.num_rows:
            self._update(solution_set, workset)
        solution_set.save()

    def end_of_group(self, store: PageStore) -> None:
        solution = _SolutionSet(self.types, store).columns
        self.out.emit_batch(self.types.tag.name, solution, self.types.solution)

    def _update(self, solution_set: _SolutionSet, workset: pa.RecordBatch) -> None:
        keys = _arrays(workset, self.types.work_fields)
        solution = solution_set.at(keys)
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
            typed = self._checked(changes, keys)
            replaced, new = solution_set.change(typed, self._missing)
            if replaced + new.num_rows < typed.num_rows:
                self._check_unique(typed, "the function changed key", "give combine=, so that each key has one row")
            self._check_unique(new, "the function changed key", "give combine=, so that each key has one row")

    def _checked(self, changes: pa.RecordBatch, keys: Sequence[pa.Array]) -> pa.RecordBatch:
        """The changes in their declared types: the key's columns, and the columns that change."""
        fields, schema = self.types.fields, self.types.solution.schema
        for name in fields:
            if name not in changes.schema.names:
                raise RecordTypeError(f"{self.where}: the changes have no column '{name}', which is of the key")
        unknown = next((name for name in changes.schema.names if name not in schema.names), None)
        if unknown is not None:
            raise RecordTypeError(
                f"{self.where}: the changes have a column '{unknown}', and a {self.types.solution.describe()} has none"
            )
        changed_schema = pa.schema([field for field in schema if field.name in changes.schema.names])
        typed = in_declared_types(changes, changed_schema, self.types.solution, self.where)
        stray = rows_of_keys(_arrays(typed, fields), keys)
        if stray.null_count:
            key = typed.filter(stray.is_null()).select(list(fields)).slice(0, 1).to_pylist()[0]
            raise RecordTypeError(
                f"{self.where}: the function changed the record of key {shorten(key)}, which was sent nothing; a change"
                " is the new record of a key of the workset, and other keys are sent a workset"
            )
        return typed

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


class _SolutionSet:
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
        rows = rows_of_keys(keys, _arrays(self.columns, self._types.fields))
        return pa.RecordBatch.from_arrays([column.take(rows) for column in self.columns.columns], schema=self._schema)

    def add(self, rows: pa.RecordBatch) -> None:
        """Add rows of new keys."""
        self.columns = pa.concat_batches([self.columns, pa.RecordBatch.from_arrays(rows.columns, schema=self._schema)])
        self._changed |= set(self._schema.names)

    def change(
        self, changes: pa.RecordBatch, missing: Callable[[str, object], Exception]
    ) -> tuple[int, pa.RecordBatch]:
        """Replace columns of rows, and add rows of other keys; raises `missing` for a new row without all columns.

        Returns how many rows it has replaced, and the rows that were added.
        """
        fields = self._types.fields
        known_keys = _arrays(self.columns, fields)
        new = changes.filter(rows_of_keys(_arrays(changes, fields), known_keys).is_null())
        row = rows_of_keys(known_keys, _arrays(changes, fields))
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
        """Write the columns that have changed."""
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
    return (
        isinstance(returned, tuple)
        and len(returned) == 2
        and all(batch is None or isinstance(batch, pa.RecordBatch) for batch in returned)
    )


def rows_of_keys(keys: Sequence[pa.Array], among: Sequence[pa.Array]) -> pa.Array:
    """The row of each key among other keys, null where it is not there."""
    if len(keys) == 1:
        return pc.index_in(keys[0], value_set=among[0])
    rows = {key: row for row, key in enumerate(zip(*(column.to_pylist() for column in among), strict=True))}
    return pa.array([rows.get(key) for key in zip(*(column.to_pylist() for column in keys), strict=True)], pa.int32())


def _arrays(batch: pa.RecordBatch, names: Sequence[str]) -> list[pa.Array]:
    return [alike(batch.column(name)) for name in names]
