"""`map_batches`: a function of Arrow batches, and whether what it returns fits the type that it declares."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pyarrow as pa

from dagster_unified.errors import RecordTypeError
from dagster_unified.operators.failures import RAISED, placed, user_failure
from dagster_unified.operators.layout import TIMESTAMP, in_declared_types
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
