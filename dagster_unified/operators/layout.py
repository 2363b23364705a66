"""How a stream's records lie in Arrow columns between operators, stages and engines.

A stream is its record type's columns, then the library's own: the event time, and the keys that functions computed for
the shuffles that follow. A program with several outputs puts each in a struct column of its own next to the output's
number.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from typing import Any, NamedTuple

import pyarrow as pa

from dagster_unified.errors import RecordTypeError
from dagster_unified.operators.failures import RAISED, user_failure
from dagster_unified.operators.state.columns import same_type
from dagster_unified.records import RecordType, is_column, record_type, shorten

TIMESTAMP = "__ts"
"""Event time, milliseconds since the epoch; null where a record has none."""

OUTPUT = "__o"
"""Which of several outputs a row belongs to."""

PARTITION_INDEX = "__partition"
"""Where one job processes several partitions of the pipeline, the index of a row's partition."""

EMITTED = "__n"
"""The order in which a task emitted its rows, where they are reordered and it matters."""

SUBTASK = "__subtask"
"""The subtask of a row, where an exchange chose it."""

METRICS = "__m"
"""A partition's report, JSON, in a row of its own; null in every other row."""


PARTITION_INDEX_FIELD = pa.field(PARTITION_INDEX, pa.int32())


def key_column(index: int) -> str:
    """The column of the key that a stream's `index`-th key function computed."""
    return f"__k{index}"


def output_column(index: int) -> str:
    """The struct column of one of several outputs."""
    return f"__o{index}"


@dataclass(frozen=True)
class ComputedKey:
    """A key that a function computes from a record, and its type for the author and for Arrow."""

    function: Any
    python: Any
    arrow: pa.DataType
    where: str

    def of(self, records: Sequence[Any]) -> list[Any]:
        """The keys of some records; raises `RecordTypeError` for one that is None or not of the declared type."""
        keys, _ = self._checked(records)
        return keys

    def column(self, records: Sequence[Any]) -> pa.Array:
        """The keys of some records as a column."""
        _, arrays = self._checked(records)
        if pa.types.is_struct(self.arrow):
            return pa.StructArray.from_arrays(arrays, fields=list(self.arrow))
        return arrays[0]

    def _checked(self, records: Sequence[Any]) -> tuple[list[Any], list[pa.Array]]:
        get = getattr(self.function, "get_key", self.function)
        record = None
        keys: list[Any] = []
        try:
            for record in records:
                keys.append(get(record))
        except RAISED as error:
            where, seen = self._author_view(record)
            raise user_failure(error, where, None if isinstance(get, DelegatingKey) else get, seen) from error
        if keys and is_column(keys[0]):
            where, seen = self._author_view(records[0])
            raise RecordTypeError(
                f"{where}: the key is {shorten(keys[0])} for {shorten(seen)}, which is an expression on columns;"
                " compute it from the record's fields with Python, or give key_by the names of fields"
            )
        if None in keys:
            where, seen = self._author_view(records[keys.index(None)])
            raise RecordTypeError(
                f"{where}: the key is None for {shorten(seen)}; filter such records out, or give them a key"
            )
        try:
            return keys, _record_type(self.python).to_batch(keys).columns
        except RecordTypeError as error:
            misfits = (r for r, key in zip(records, keys, strict=True) if not self._fits(key))
            where, _ = self._author_view(next(misfits, records[0]))
            raise RecordTypeError(
                f"{where}: a key is not of the type that its function is annotated with, or that key_type= gives:"
                f" {error}"
            ) from error

    def _fits(self, key: Any) -> bool:
        try:
            _record_type(self.python).to_batch([key])
        except RecordTypeError:
            return False
        return True

    def _author_view(self, record: Any) -> tuple[str, Any]:
        return self.function.author_view(record) if isinstance(self.function, DelegatingKey) else (self.where, record)


class DelegatingKey(ABC):
    """A key function of the library's that calls an author's function."""

    @abstractmethod
    def __call__(self, record: Any) -> Any: ...

    @abstractmethod
    def author_view(self, record: Any) -> tuple[str, Any]:
        """How errors name the author's function, and the record that the function gets."""


def declared(columns: Sequence[pa.Array], schema: pa.Schema) -> pa.RecordBatch:
    """Columns that came through Spark, which makes all of them nullable, in their declared types.

    Where a record in a column is null, its parts are null too; a cast to a record with parts that are not nullable
    fails.
    """
    if any(
        pa.types.is_nested(column.type) and column.type != field.type
        for column, field in zip(columns, schema, strict=True)
    ):
        loose = pa.RecordBatch.from_arrays(columns, names=schema.names)
        return pa.ipc.read_record_batch(loose.serialize(), schema)
    return pa.RecordBatch.from_arrays(columns, schema=schema)


def cast(columns: Sequence[pa.Array], schema: pa.Schema) -> pa.RecordBatch:
    """Columns of any origin in their declared types; raises Arrow's errors for values that do not fit."""
    pairs = zip(columns, schema.types, strict=True)
    return declared([column if same_type(column.type, kind) else column.cast(kind) for column, kind in pairs], schema)


def in_declared_types(
    result: pa.RecordBatch, schema: pa.Schema, output: RecordType, where: str, what: str = "returned batch"
) -> pa.RecordBatch:
    """Columns of a batch in their declared types; raises `RecordTypeError`, which names the batch `what`."""
    same = result.schema.names == schema.names and result.schema.types == schema.types
    for declared in () if same else schema:
        kind = result.schema.field(declared.name).type
        if not _keeps_values(kind, declared.type):
            raise RecordTypeError(
                f"{where}: column '{declared.name}' of the {what} is a {kind}, and {output.describe()} has a"
                f" {declared.type}; cast it in the function, or change the declared type"
            )
    try:
        batch = cast([result.column(name) for name in schema.names], schema)
    except (pa.ArrowInvalid, pa.ArrowNotImplementedError) as error:
        raise RecordTypeError(f"{where}: the {what} does not fit {output.describe()}: {error}") from error
    for column, declared in zip(batch.columns, schema, strict=True):
        if column.null_count and not declared.nullable:
            raise RecordTypeError(
                f"{where}: field '{declared.name}' is None in the {what}, and its type does not allow None;"
                " annotate it as '| None' if it may be missing"
            )
    return batch


def _keeps_values(actual: pa.DataType, declared: pa.DataType) -> bool:
    """Whether a cast from one column type to another returns equal values, or fails.

    That is so within a family of types.
    """
    if pa.types.is_dictionary(actual):
        actual = actual.value_type
    if actual == declared or pa.types.is_null(actual):
        return True
    if pa.types.is_floating(declared):
        return bool(pa.types.is_integer(actual) or pa.types.is_floating(actual))
    if pa.types.is_decimal(declared):
        return bool(pa.types.is_integer(actual) or pa.types.is_decimal(actual))
    if pa.types.is_timestamp(declared):
        return bool(pa.types.is_timestamp(actual)) and (declared.tz is not None or actual.tz is None)
    if pa.types.is_list(declared):
        listed = pa.types.is_list(actual) or pa.types.is_large_list(actual) or pa.types.is_fixed_size_list(actual)
        return bool(listed) and _keeps_values(actual.value_type, declared.value_type)
    if pa.types.is_struct(declared):
        named = pa.types.is_struct(actual) and [f.name for f in actual] == [f.name for f in declared]
        return named and all(_keeps_values(g.type, d.type) for g, d in zip(actual, declared, strict=True))
    if pa.types.is_map(declared):
        return (
            bool(pa.types.is_map(actual))
            and _keeps_values(actual.key_type, declared.key_type)
            and _keeps_values(actual.item_type, declared.item_type)
        )
    return any(alike(actual) and alike(declared) for alike in _FAMILIES)


_FAMILIES: tuple[Callable[[pa.DataType], bool], ...] = (
    pa.types.is_integer,
    lambda kind: pa.types.is_string(kind) or pa.types.is_large_string(kind) or pa.types.is_string_view(kind),
    lambda kind: (
        pa.types.is_binary(kind)
        or pa.types.is_large_binary(kind)
        or pa.types.is_fixed_size_binary(kind)
        or pa.types.is_binary_view(kind)
    ),
    pa.types.is_duration,
    pa.types.is_date,
)


_record_type = lru_cache(maxsize=256)(record_type)


@dataclass(frozen=True)
class StreamLayout:
    """The columns of one stream: its records, its event time if it has one, its computed keys."""

    records: RecordType
    timestamped: bool = False
    keys: tuple[ComputedKey, ...] = ()
    fields: frozenset[int] | None = None
    """The fields of the records that have columns, since somebody reads them; None for all."""

    @cached_property
    def schema(self) -> pa.Schema:
        fields = [self.records.schema.field(number) for number in self.numbers]
        if self.timestamped:
            fields.append(pa.field(TIMESTAMP, pa.int64()))
        fields += [pa.field(key_column(i), key.arrow) for i, key in enumerate(self.keys)]
        return pa.schema(fields)

    @cached_property
    def numbers(self) -> Sequence[int]:
        """The fields of the records that have columns, in their order."""
        return range(len(self.records.names)) if self.fields is None else sorted(self.fields)

    @cached_property
    def without_keys(self) -> StreamLayout:
        """The same, without the computed keys."""
        return replace(self, keys=()) if self.keys else self

    def with_fields(self, fields: frozenset[int]) -> StreamLayout:
        """The same, with columns for these fields only."""
        return replace(self, fields=None if len(fields) == len(self.records.names) else fields)

    def whole(self, batch: pa.RecordBatch) -> pa.RecordBatch:
        """A batch of these columns and others, with a column of type null for each field that has none."""
        if self.fields is None:
            return batch
        names = self.records.names
        own = [
            batch.column(name) if number in self.fields else pa.nulls(batch.num_rows)
            for number, name in enumerate(names)
        ]
        others = [name for name in batch.schema.names if name not in names]
        return pa.RecordBatch.from_arrays([*own, *map(batch.column, others)], names=[*names, *others])


CARRIED = "__carried"
"""The side output that carries a program's state to the next partition."""


class Carried(NamedTuple):
    """A row of state between two partitions."""

    group: int
    page: int
    state: bytes


CARRIED_LAYOUT = StreamLayout(record_type(Carried))


def combined_schema(layouts: tuple[StreamLayout, ...]) -> pa.Schema:
    """The schema of a program's output: one stream flat, several as structs; with the metrics column."""
    if len(layouts) == 1:
        fields = [field.with_nullable(True) for field in layouts[0].schema]
    else:
        fields = [pa.field(OUTPUT, pa.int32())]
        fields += [pa.field(output_column(i), pa.struct(list(layout.schema))) for i, layout in enumerate(layouts)]
    return pa.schema([*fields, pa.field(METRICS, pa.string())])


def combine(schema: pa.Schema, index: int, batch: pa.RecordBatch) -> pa.RecordBatch:
    """One output's batch in the shape of `combined_schema`."""
    size = batch.num_rows
    missing = pa.nulls(size, pa.string())
    if schema.names[0] != OUTPUT:
        return declared([*batch.columns, missing], schema)
    column_name = output_column(index)
    arrays: list[pa.Array] = [pa.repeat(pa.scalar(index, pa.int32()), size)]
    arrays += [
        (
            pa.StructArray.from_arrays(batch.columns, fields=list(field.type))
            if field.name == column_name
            else pa.nulls(size, field.type)
        )
        for field in list(schema)[1:-1]
    ]
    return pa.RecordBatch.from_arrays([*arrays, missing], schema=schema)


def metrics_row(schema: pa.Schema, report: str) -> pa.RecordBatch:
    """A row that holds only a partition's report."""
    arrays = [pa.nulls(1, field.type) for field in list(schema)[:-1]]
    return pa.RecordBatch.from_arrays([*arrays, pa.array([report], pa.string())], schema=schema)
