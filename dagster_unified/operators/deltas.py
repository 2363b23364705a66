"""Delta iterations (Ewen et al., VLDB 2012): keyed operators whose state is the solution set."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

import pyarrow as pa
import pyarrow.compute as pc

from dagster_unified.arrow_types import has, python_values
from dagster_unified.errors import PipelineError, RecordTypeError
from dagster_unified.operators.arrow_aggregate import CombineColumns
from dagster_unified.operators.arrow_functions import checked
from dagster_unified.operators.failures import RAISED, placed, user_failure
from dagster_unified.operators.functions.base import OutputTag, RuntimeContext
from dagster_unified.operators.keys import alike, key_part
from dagster_unified.operators.layout import ComputedKey, declared, in_declared_types, key_column
from dagster_unified.operators.operator import COLUMNS, KeyedOperator, OperatorContext, PageStore
from dagster_unified.operators.state.backend import KeyedStateBackend
from dagster_unified.records import Decoder, RecordType, shorten

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


def side_rows(column: pa.Array, records: RecordType) -> pa.RecordBatch:
    """The records of one side, from a column without nulls."""
    columns = [column] if records.shape == "value" else column.flatten()
    return pa.RecordBatch.from_arrays(columns, schema=records.schema)


@dataclass(frozen=True)
class Solutions:
    """The types and keys of a delta iteration's records."""

    solution: RecordType
    work: RecordType
    rows: RecordType
    """The combined stream's."""

    tag: OutputTag[Any]
    """The side output that emits the solution set when the iteration has ended."""

    fields: tuple[str, ...] = ()
    computed: ComputedKey | None = None
    """The key of the solution set."""

    work_fields: tuple[str, ...] = ()
    """Those of the workset's key."""

    combiner: CombineColumns | None = None
    """Combines what several subtasks sent to a key, where the function takes batches."""

    def python_keys(self, columns: Sequence[pa.Array]) -> list[Hashable]:
        """The keys in some columns, as the author knows them."""
        parts = [
            values if decode is None else list(map(decode, values))
            for decode, values in zip(self._decoders, map(python_values, columns), strict=True)
        ]
        return parts[0] if len(parts) == 1 else list(zip(*parts, strict=True))

    @cached_property
    def _decoders(self) -> list[Decoder | None]:
        """For each part of a key, what turns Arrow's form into the author's; None where they are the same."""
        return [self.rows.decoder_of(name) for name in self.rows.names[:-2]]

    def keys_of(self, records: pa.RecordBatch) -> list[pa.Array]:
        """The columns of the key of records of the solution set."""
        if self.computed is not None:
            return [alike(self.computed.column(self.solution.from_batch(records)))]
        return _arrays(records, self.fields)

    def places(self, keys: Sequence[pa.Array], among: Sequence[pa.Array]) -> pa.Array:
        """The place of each key among other keys, the first of several; null where it is not there."""
        if not any(pa.types.is_nested(column.type) for column in keys):
            return _places(keys, among)
        place_of: dict[Hashable, int] = {}
        for place, key in enumerate(self.python_keys(among)):
            place_of.setdefault(key, place)
        return pa.array(map(place_of.get, self.python_keys(keys)), pa.int32())


def _places(keys: Sequence[pa.Array], among: Sequence[pa.Array]) -> pa.Array:
    """As `Solutions.places`, of keys that Arrow compares: several parts become one number, part by part."""
    key, key_among = keys[0], among[0]
    for part, part_among in zip(keys[1:], among[1:], strict=True):
        first, second = key_among.dictionary_encode(), part_among.dictionary_encode()
        size = len(second.dictionary)
        key = _paired(pc.index_in(key, first.dictionary), pc.index_in(part, second.dictionary), size)
        key_among = _paired(first.indices, second.indices, size)
    return pc.index_in(key, value_set=key_among)


def _paired(first: pa.Array, second: pa.Array, size: int) -> pa.Array:
    return pc.add(pc.multiply(first.cast(pa.int64()), size), second.cast(pa.int64()))


class SolutionSetOperator(KeyedOperator):
    """Keeps the solution set of a delta iteration, in columns of each key group."""

    takes_batches = True

    def __init__(self, function: Any, context: OperatorContext, types: Solutions) -> None:
        super().__init__(function, context)
        self.types = types

    def open(self, context: Callable[[KeyedStateBackend | None], RuntimeContext]) -> None:
        self.function.open(context(None))

    def close(self) -> None:
        self.function.close()

    def process_batch(self, batch: pa.RecordBatch, store: PageStore) -> None:
        solution_set = _SolutionSet(self.types, store)
        if batch.column(SOLUTION).null_count < batch.num_rows:
            is_initial = batch.column(SOLUTION).is_valid()
            self._begin(solution_set, batch.filter(is_initial))
            batch = batch.filter(pc.invert(is_initial))
        if batch.num_rows:
            self.update(solution_set, batch)
        solution_set.save()

    @abstractmethod
    def update(self, solution_set: _SolutionSet, batch: pa.RecordBatch) -> None:
        """Call the function with worksets, which are rows of the combined stream, and take its changes."""

    def _begin(self, solution_set: _SolutionSet, initial: pa.RecordBatch) -> None:
        """Take the initial solution set; raises `PipelineError` where a key has several records."""
        records = side_rows(initial.column(SOLUTION), self.types.solution)
        with placed(self.where):
            self.types.solution.check_nulls(records)
        solution_set.add(records, initial.columns[:-2])
        row = _first_elsewhere(self.types.places(solution_set.keys, solution_set.keys))
        if row is not None:
            keys = [column.slice(row, 1) for column in solution_set.keys]
            (key,), before = self.types.python_keys(keys), self.types.places(keys, solution_set.keys)
            first, second = solution_set.records(pa.array([before[0].as_py(), row]))
            raise PipelineError(
                f"{self.where}: the initial solution set has two records of key {key!r}: {shorten(first)} and"
                f" {shorten(second)}; reduce its records to one before, also in STREAMING: in a window that ends with"
                " the input (GlobalWindows.create_with_end_of_stream_trigger())"
            )

    def end_of_group(self, store: PageStore) -> None:
        records = self.types.solution
        solution = _SolutionSet(self.types, store).rows.select(list(records.names))
        self.out.emit_batch(self.types.tag.name, solution, records)


def _first_elsewhere(places: pa.Array) -> int | None:
    """The first row whose key is not at its own place: an earlier row has it, or none."""
    row = pc.index(pc.fill_null(pc.equal(places, pa.arange(0, len(places))), False), False).as_py()
    return None if row < 0 else row


class DeltaOperator(SolutionSetOperator):
    """Calls a `DeltaFunction` for each key that received records."""

    def update(self, solution_set: _SolutionSet, batch: pa.RecordBatch) -> None:
        columns, work = batch.columns[:-2], self.types.work
        with placed(self.where):
            records = work.from_batch(side_rows(batch.column(WORK), work))
        worksets: dict[Hashable, list[Any]] = {}
        firsts: list[int] = []
        """The row of each key's first record."""

        for row, (key, record) in enumerate(zip(self.types.python_keys(columns), records, strict=True)):
            workset = worksets.get(key)
            if workset is None:
                worksets[key] = [record]
                firsts.append(row)
            else:
                workset.append(record)
        taken = pa.array(firsts, pa.int64())
        keys = [column.take(taken) for column in columns]
        places = self.types.places(keys, solution_set.keys)
        with placed(self.where):
            solutions = solution_set.records(places)
        changes = self._call(worksets, solutions)
        if changes:
            numbers = pa.array(changes, pa.int32())
            changed_keys = [column.take(numbers) for column in keys]
            self._change(solution_set, list(changes.values()), changed_keys, places.take(numbers))

    def _call(self, worksets: Mapping[Hashable, list[Any]], solutions: Sequence[Any]) -> dict[int, Any]:
        """Call the function for each key, send what it returns, and return its changes by the number of their key."""
        update, send = self.function.update, self.out.emit_records
        changes: dict[int, Any] = {}
        number, work = 0, list[Any]()
        try:
            for number, work in enumerate(worksets.values()):
                returned = update(solutions[number], work)
                if type(returned) is not tuple or len(returned) != 2:
                    raise RecordTypeError(
                        f"{self.where}: update returns the change or None, and the next workset, such as `return"
                        f" changed, ()`, and not {shorten(returned)}"
                    )
                change, following = returned
                if change is not None:
                    changes[number] = change
                if following:
                    send(following)
        except RAISED as error:
            what = f"the workset {shorten(work)} of key {list(worksets)[number]!r}"
            raise user_failure(error, self.where, update, what) from error
        self.out.timestamps += [None] * (len(self.out.records) - len(self.out.timestamps))
        return changes

    def _change(
        self, solution_set: _SolutionSet, records: list[Any], keys: Sequence[pa.Array], places: pa.Array
    ) -> None:
        """Store the new records of keys at their places in the solution set; those of new keys have none."""
        types = self.types
        with placed(self.where):
            changes = types.solution.to_batch(records)
        changed_keys = types.keys_of(changes)
        are_same = all(changed.equals(key) for changed, key in zip(changed_keys, keys, strict=True))
        stray = None if are_same else _first_elsewhere(types.places(changed_keys, keys))
        if stray is not None:
            key, changed_key = (types.python_keys([c.slice(stray, 1) for c in of])[0] for of in (keys, changed_keys))
            raise RecordTypeError(
                f"{self.where}: the function changed the record of key {changed_key!r} when it was called for key"
                f" {key!r}; a change is the new record of the function's own key, and other keys are sent a workset"
            )
        if not places.null_count:
            before = solution_set.rows.take(places)
            names = [name for name in types.solution.names if not _are_same(changes.column(name), before.column(name))]
            changes = changes.select(names)  # columns that have not changed are not written again
        solution_set.change(changes, keys, places)


def _are_same(column: pa.Array, before: pa.Array) -> bool:
    """Whether a column has the same values, bit by bit: to Arrow 0.0 equals -0.0."""
    if pa.types.is_floating(column.type):
        column, before = column.view(pa.int64()), before.view(pa.int64())
    return not has(column.type, pa.types.is_floating) and column.equals(before)


class BatchDeltaOperator(SolutionSetOperator):
    """Calls a `BatchDeltaFunction` with the workset of many keys."""

    def update(self, solution_set: _SolutionSet, batch: pa.RecordBatch) -> None:
        types = self.types
        workset = side_rows(batch.column(WORK), types.work)
        if types.combiner is not None:
            workset = types.combiner.combined([workset])
        keys = _arrays(workset, types.work_fields)
        solution = solution_set.rows.take(types.places(keys, solution_set.keys))
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
            following, _ = checked(following, types.work, None, self.where)
            self.out.emit_batch(None, following, types.work)
        if changes is not None and changes.num_rows:
            self._change(solution_set, self._checked(changes), keys)

    def _checked(self, changes: pa.RecordBatch) -> pa.RecordBatch:
        """The changes in their declared types: the key's columns, and the columns that change."""
        schema = self.types.solution.schema
        for name in self.types.fields:
            if name not in changes.schema.names:
                raise RecordTypeError(f"{self.where}: the changes have no column '{name}', which is of the key")
        unknown = next((name for name in changes.schema.names if name not in schema.names), None)
        if unknown is not None:
            raise RecordTypeError(
                f"{self.where}: the changes have a column '{unknown}', and a {self.types.solution.describe()} has none"
            )
        changed_schema = pa.schema([field for field in schema if field.name in changes.schema.names])
        return in_declared_types(changes, changed_schema, self.types.solution, self.where)

    def _change(self, solution_set: _SolutionSet, changes: pa.RecordBatch, keys: Sequence[pa.Array]) -> None:
        """Store changes of the function, which was called for some keys."""
        types, changed_keys = self.types, _arrays(changes, self.types.fields)
        stray = types.places(changed_keys, keys)
        if stray.null_count:
            key = self._key_at(changes, pc.index(stray.is_null(), True).as_py())
            raise RecordTypeError(
                f"{self.where}: the function changed the record of key {key}, which was sent nothing; a change is the"
                " new record of a key of the workset, and other keys are sent a workset"
            )
        again = _first_elsewhere(types.places(changed_keys, changed_keys))
        if again is not None:
            raise PipelineError(
                f"{self.where}: the function changed key {self._key_at(changes, again)} more than once; give combine=,"
                " so that each key has one row"
            )
        places = types.places(changed_keys, solution_set.keys)
        absent = next((name for name in types.solution.names if name not in changes.schema.names), None)
        if places.null_count and absent is not None:
            key = self._key_at(changes, pc.index(places.is_null(), True).as_py())
            raise RecordTypeError(
                f"{self.where}: a change adds key {key} to the solution set, and has no column '{absent}'; give all"
                " columns where there may be new keys"
            )
        if not places.null_count:
            changes = changes.drop_columns(list(types.fields))
        solution_set.change(changes, changed_keys, places)

    def _key_at(self, changes: pa.RecordBatch, row: int) -> str:
        return shorten(changes.select(list(self.types.fields)).slice(row, 1).to_pylist()[0])


class _SolutionSet:
    """The solution set of a key group: a record for each key, whose columns are pages of the group's state."""

    def __init__(self, types: Solutions, store: PageStore) -> None:
        self._types, self._store = types, store
        fields = [*types.solution.schema]
        if types.computed is not None:
            fields.append(pa.field(key_column(0), types.computed.arrow))
        self._schema = pa.schema([field.with_nullable(True) for field in fields])
        self._changed: set[str] = set()
        self.rows = pa.RecordBatch.from_arrays(
            [self._read(number, field) for number, field in enumerate(self._schema)], schema=self._schema
        )
        """The records, each with its key where a function computes that."""

    @property
    def keys(self) -> list[pa.Array]:
        """The columns of the key."""
        return _arrays(self.rows, self._types.fields or (key_column(0),))

    def records(self, places: pa.Array) -> list[Any]:
        """The records at some places, as the author knows them; None for a place that is null."""
        records = self._types.solution.from_batch(self.rows.take(places.drop_null()))
        if not places.null_count:
            return records
        remaining = iter(records)
        return [next(remaining) if is_known else None for is_known in places.is_valid().to_pylist()]

    def add(self, records: pa.RecordBatch, keys: Sequence[pa.Array]) -> None:
        """Add records of new keys."""
        columns = records.columns if self._types.fields else [*records.columns, *keys]
        self.rows = pa.concat_batches([self.rows, pa.RecordBatch.from_arrays(columns, schema=self._schema)])
        self._changed |= set(self._schema.names)

    def change(self, changes: pa.RecordBatch, keys: Sequence[pa.Array], places: pa.Array) -> None:
        """Replace columns of the records at their places, and add records of keys that have none."""
        if places.null_count < len(places):
            change = pc.index_in(pa.arange(0, self.rows.num_rows), value_set=places.cast(pa.int64()))
            is_changed, columns = change.is_valid(), dict(zip(self._schema.names, self.rows.columns, strict=True))
            for name, column in zip(changes.schema.names, changes.columns, strict=True):
                columns[name] = pc.if_else(is_changed, column.take(change), columns[name])
                self._changed.add(name)
            self.rows = pa.RecordBatch.from_arrays(list(columns.values()), schema=self._schema)
        if places.null_count:
            is_new = places.is_null()
            new = changes.select(list(self._types.solution.names)).filter(is_new)
            self.add(new, [column.filter(is_new) for column in keys])

    def save(self) -> None:
        """Write the columns that have changed."""
        for number, column in enumerate(self._schema):
            if column.name in self._changed:
                batch = pa.RecordBatch.from_arrays([self.rows.column(number)], schema=pa.schema([column]))
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


def _arrays(batch: pa.RecordBatch, names: Sequence[str]) -> list[pa.Array]:
    return [alike(batch.column(name)) for name in names]
