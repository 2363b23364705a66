"""`map_batches`: a function of Arrow batches, and whether what it returns fits the type that it declares."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pyarrow as pa

from dagster_unified.errors import RecordTypeError
from dagster_unified.operators.failures import RAISED, placed, user_failure
from dagster_unified.operators.layout import TIMESTAMP, cast
from dagster_unified.operators.program.blocks import Block, Consumer, encoded
from dagster_unified.operators.program.step import BlockStep, Place
from dagster_unified.records import RecordType


class MapBatchesStep(BlockStep):
    """`map_batches`."""

    def emitted(self, collected: list[Any], timestamps: list[int | None], where: str) -> Block:
        output = self.output
        assert output is not None
        batches = [checked(given, output, None, where)[0] for given in collected]
        if not batches:
            return Block([], None, [], output)
        batch = pa.concat_batches(batches)
        return Block(None, batch, [None] * batch.num_rows, output)

    def applied(self, place: Place) -> Callable[[pa.RecordBatch], Any]:
        """Its function, as it is called with a batch."""
        function: Callable[[pa.RecordBatch], Any] = self.function
        return function

    def consumer(self, place: Place) -> Consumer:
        function, records, output = self.function, self.input, self.output
        assert records is not None
        assert output is not None
        place.open(function)
        call = self.applied(place)

        def consume(block: Block) -> None:
            given = encoded(block, records, place.before)
            if block.timestamps is not None:
                given = given.append_column(TIMESTAMP, pa.array(block.timestamps, pa.int64()))
            try:
                result = call(given)
            except RAISED as error:
                raise user_failure(error, place.where, function, given.slice(0, 3).to_pylist()) from error
            batch, timestamps = checked(result, output, block.timestamps, place.where)
            place.send(None, Block(None, batch, timestamps, output))

        return consume


class BroadcastBatchesStep(MapBatchesStep):
    """`map_batches` of a stream and a broadcast one: the function has all records of the latter at hand, as a table."""

    def applied(self, place: Place) -> Callable[[pa.RecordBatch], Any]:
        return lambda given: self.function(given, place.table())


def checked(
    result: Any, output: RecordType, timestamps: Sequence[int | None] | None, where: str
) -> tuple[pa.RecordBatch, Sequence[int | None] | None]:
    """The returned batch in its declared type, and the event times of its rows; raises `RecordTypeError`."""
    if not isinstance(result, pa.RecordBatch):
        raise RecordTypeError(f"{where}: map_batches must return a pyarrow.RecordBatch, not {type(result).__name__}")
    names = result.schema.names
    missing = [name for name in output.names if name not in names]
    if missing:
        raise RecordTypeError(f"{where}: the returned batch has no column '{missing[0]}'; it has {', '.join(names)}")
    if timestamps is not None:
        if TIMESTAMP in names:
            timestamps = result.column(TIMESTAMP).to_pylist()
        elif result.num_rows != len(timestamps) and not any(moment is not None for moment in timestamps):
            timestamps = [None] * result.num_rows
        elif result.num_rows != len(timestamps):
            raise RecordTypeError(
                f"{where}: the function was given {len(timestamps)} rows and returned {result.num_rows}, so their event"
                f" times are not known; keep the column '{TIMESTAMP}', or assign timestamps after this operator"
            )
    batch = in_declared_types(result, output.schema, output, where)
    with placed(where):
        output.check_members(batch)
    return batch, timestamps


def in_declared_types(
    result: pa.RecordBatch, schema: pa.Schema, output: RecordType, where: str, what: str = "returned batch"
) -> pa.RecordBatch:
    """Columns of a batch in their declared types; raises `RecordTypeError`, in which the batch is called `what`."""
    same = result.schema.names == schema.names and result.schema.types == schema.types
    for declared in () if same else schema:
        given = result.schema.field(declared.name).type
        if not _keeps_values(given, declared.type):
            raise RecordTypeError(
                f"{where}: column '{declared.name}' of the {what} is a {given}, and {output.describe()} has a"
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


def _keeps_values(given: pa.DataType, declared: pa.DataType) -> bool:
    """Whether a cast from one column type to another returns equal values, or fails.

    That is so within a family of types.
    """
    if pa.types.is_dictionary(given):
        given = given.value_type
    if given == declared or pa.types.is_null(given):
        return True
    if pa.types.is_floating(declared):
        return bool(pa.types.is_integer(given) or pa.types.is_floating(given))
    if pa.types.is_decimal(declared):
        return bool(pa.types.is_integer(given) or pa.types.is_decimal(given))
    if pa.types.is_timestamp(declared):
        return bool(pa.types.is_timestamp(given)) and (declared.tz is not None or given.tz is None)
    if pa.types.is_list(declared):
        listed = pa.types.is_list(given) or pa.types.is_large_list(given) or pa.types.is_fixed_size_list(given)
        return bool(listed) and _keeps_values(given.value_type, declared.value_type)
    if pa.types.is_struct(declared):
        named = pa.types.is_struct(given) and [f.name for f in given] == [f.name for f in declared]
        return named and all(_keeps_values(g.type, d.type) for g, d in zip(given, declared, strict=True))
    if pa.types.is_map(declared):
        return (
            bool(pa.types.is_map(given))
            and _keeps_values(given.key_type, declared.key_type)
            and _keeps_values(given.item_type, declared.item_type)
        )
    return any(alike(given) and alike(declared) for alike in _FAMILIES)


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
