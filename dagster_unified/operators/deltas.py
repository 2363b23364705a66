"""Delta iterations: a keyed operator whose state is the solution set (Ewen et al., VLDB 2012).

Its input is the solution set, which comes once, and the workset, in one stream: a record is a key and either a record
of the solution or one of the workset. They are put together and taken apart as Arrow columns, so that the many records
of worksets cost no more than they would alone.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import pyarrow as pa

from dagster_unified.errors import PipelineError, RecordTypeError
from dagster_unified.operators.combining import CombineColumns
from dagster_unified.operators.failures import RAISED, placed, user_failure
from dagster_unified.operators.functions.base import OutputTag, RuntimeContext
from dagster_unified.operators.functions.deltas import DeltaFunction
from dagster_unified.operators.keys import key_part
from dagster_unified.operators.layout import ComputedKey, StreamLayout, declared
from dagster_unified.operators.operator import KeyedOperator, OperatorContext
from dagster_unified.operators.state.backend import KeyedStateBackend
from dagster_unified.operators.state.value import ValueStateDescriptor
from dagster_unified.records import RecordType, shorten

SOLUTION, WORK = "solution", "work"
"""The columns of the two streams, of which a row has one; the columns of the key are before them."""


@dataclass(frozen=True)
class Sided:
    """How the records of one of the two streams become rows of the stream that both are."""

    records: RecordType
    """The stream's."""

    rows: RecordType
    """Those of both."""

    side: str
    fields: tuple[str, ...] = ()
    computed: ComputedKey | None = None
    """The key: fields, or what a function gives."""

    where: str = ""

    def __call__(self, batch: pa.RecordBatch) -> pa.RecordBatch:
        own = declared(batch.select(list(self.records.names)).columns, self.records.schema)
        if self.computed is not None:
            found = {"": self.computed.column(self.records.from_batch(own))}
        else:
            found = {name: own.column(name) for name in self.fields}
        keys = [key_part(name, column, own, self.records.names, self.where) for name, column in found.items()]
        other = self.rows.schema.field(WORK if self.side == SOLUTION else SOLUTION)
        value = own.column(0)
        if self.records.shape != "value":
            value = pa.StructArray.from_arrays(own.columns, fields=list(self.rows.schema.field(self.side).type))
        nothing = pa.nulls(own.num_rows, other.type)
        sides = [value, nothing] if self.side == SOLUTION else [nothing, value]
        return pa.RecordBatch.from_arrays([*keys, *sides], schema=self.rows.schema)


def rows_type(key: Sequence[Any], solution: RecordType, work: RecordType) -> Any:
    """The record of both streams: the parts of the key, and one of a solution and a workset's record."""
    keys = [(f"key{number}", part) for number, part in enumerate(key)]
    return NamedTuple("Delta", [*keys, (SOLUTION, solution.python | None), (WORK, work.python | None)])


REDUCE = (
    "reduce its records to one before, also in STREAMING: in a window that ends with the input"
    " (GlobalWindows.create_with_end_of_stream_trigger())"
)
"""What to do where a key has several initial solutions."""


class _Initial(NamedTuple):
    """A record of the initial solution set, among those of the workset."""

    solution: Any


def own_rows(column: pa.Array, records: RecordType) -> pa.RecordBatch:
    """The records of one side, of which the column has no null."""
    columns = [column] if records.shape == "value" else column.flatten()
    return pa.RecordBatch.from_arrays(columns, schema=records.schema)


@dataclass(frozen=True)
class Solutions:
    """What a delta iteration's operator knows of its records."""

    solution: RecordType
    work: RecordType
    tag: OutputTag[Any]
    """The side output by which the solution set leaves, when the iteration has ended."""

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
    """Calls a `DeltaFunction` for each key that received something, and keeps its changes."""

    ends_iterations = True

    def __init__(self, function: DeltaFunction[Any, Any], context: OperatorContext, types: Solutions) -> None:
        super().__init__(function, context)
        self.function, self.types = function, types
        self._has_initial = False
        """Whether what was read last has records of the initial solution set."""

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
            return types.work.from_batch(own_rows(work, types.work))
        initial = iter(types.solution.from_batch(own_rows(solution.drop_null(), types.solution)))
        later = iter(types.work.from_batch(own_rows(work.drop_null(), types.work)))
        return [_Initial(next(initial)) if given else next(later) for given in solution.is_valid().to_pylist()]

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
        held = self.state.take(SOLUTION, keys)
        changed: dict[Hashable, Any] = {}
        ends = (*starts[1:], len(records))
        if self._has_initial:
            workset = self._begin(keys, starts, records, held)
            changed = {key: solution for key, solution in zip(keys, held, strict=True) if solution is not None}
        else:
            workset = [records[start:end] for start, end in zip(starts, ends, strict=True)]
        changes = self._update(keys, held, workset)
        if changes:
            changed |= self._checked(changes)
        if changed:
            self._put(keys, held, changed)
        self.out.timestamps += [None] * (len(self.out.records) - len(self.out.timestamps))
        after()

    def _begin(
        self, keys: Sequence[Hashable], starts: Sequence[int], records: Sequence[Any], held: list[Any]
    ) -> list[Sequence[Any]]:
        """Puts initial solutions where they are held, and returns the workset of each key."""
        found: list[Sequence[Any]] = []
        for number, (key, start, end) in enumerate(zip(keys, starts, (*starts[1:], len(records)), strict=True)):
            own = records[start:end]
            for record in own:
                if type(record) is not _Initial:
                    continue
                if held[number] is not None:
                    raise PipelineError(
                        f"{self.where}: the initial solution set has two records of key {key!r}:"
                        f" {shorten(held[number])} and {shorten(record.solution)}; {REDUCE}"
                    )
                held[number] = record.solution
            found.append([record for record in own if type(record) is not _Initial])
        return found

    def _update(
        self, keys: Sequence[Hashable], held: Sequence[Any], workset: Sequence[Sequence[Any]]
    ) -> dict[Hashable, Any]:
        """Calls the function, and returns the changes."""
        update, send = self.function.update, self.out.emit_records
        changes: dict[Hashable, Any] = {}
        key, work = None, ()
        try:
            for key, solution, work in zip(keys, held, workset, strict=True):  # type: ignore[assignment]
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
        """The changes in normal form; raises for one of another type, or of another key."""
        with placed(self.where):
            given = self.types.solution.all_normal(list(changes.values()))
        for key, own in zip(changes, self.types.keys_of(given), strict=True):
            if key != own:
                raise RecordTypeError(
                    f"{self.where}: the function changed the record of key {own!r} when it was called for key {key!r};"
                    " a change is the new record of the function's own key, and other keys are sent a workset"
                )
        return dict(zip(changes, given, strict=True))

    def _put(self, keys: Sequence[Hashable], held: Sequence[Any], changed: dict[Hashable, Any]) -> None:
        values = [changed.get(key, solution) for key, solution in zip(keys, held, strict=True)]
        if None in values:  # keys that the solution set has no record of
            keys = [key for key, value in zip(keys, values, strict=True) if value is not None]
            values = [value for value in values if value is not None]
            self.state.take(SOLUTION, keys)
        self.state.put(SOLUTION, keys, values)

    def end_of_iteration(self) -> None:
        solution = self.state.current.get(SOLUTION)
        if solution is not None:
            self.out.emit_side(self.types.tag, solution, None)
