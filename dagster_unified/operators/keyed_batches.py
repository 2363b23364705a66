"""Keyed `map_batches`: a keyed operator whose function is given a key's rows as Arrow batches.

Drivers hand an operator runs of records of a key, and do not look into them. Here the records that it reads are `Rows`,
of which a run is a slice, so that each driver drives batches as it drives records.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Sequence
from itertools import groupby
from typing import Any, overload

import pyarrow as pa

from dagster_unified.operators.failures import RAISED, user_failure
from dagster_unified.operators.functions.base import OutputTag, TimerService
from dagster_unified.operators.functions.batches import KeyedBatchFunction
from dagster_unified.operators.keyed import KeyedProcessOperator
from dagster_unified.operators.layout import TIMESTAMP, StreamLayout
from dagster_unified.operators.map_batches import checked
from dagster_unified.operators.metrics import Metrics
from dagster_unified.operators.operator import KeyedOptions
from dagster_unified.operators.program.epochs import Emitting
from dagster_unified.operators.program.step import KeyedStep, Place
from dagster_unified.operators.time import TimeDomain
from dagster_unified.records import RecordType, record_type


class Rows(Sequence[Any]):
    """Records that stay an Arrow batch, with the column of event times where they have them."""

    def __init__(self, batch: pa.RecordBatch, records: RecordType) -> None:
        self.batch, self._records = batch, records

    def __len__(self) -> int:
        return int(self.batch.num_rows)

    @overload
    def __getitem__(self, index: int) -> Any: ...
    @overload
    def __getitem__(self, index: slice) -> Rows: ...
    def __getitem__(self, index: int | slice) -> Any:
        if isinstance(index, slice):
            start, stop, _ = index.indices(len(self))
            return Rows(self.batch.slice(start, stop - start), self._records)
        return next(iter(self[index : index + 1]))

    def __iter__(self) -> Iterator[Any]:
        return iter(self._records.from_batch(self.batch))


class KeyedBatchOperator(KeyedProcessOperator):
    """Runs a `KeyedBatchFunction`."""

    takes: RecordType
    """The type of the rows that the function is given."""

    gives: RecordType
    """The type of those that it returns."""

    may_return_none = True
    """Whether its function may return None for no rows: a `KeyedBatchFunction` may."""

    def __init__(
        self, where: str, function: Any, options: KeyedOptions, clock: Callable[[], int], metrics: Metrics
    ) -> None:
        super().__init__(where, function, options, clock, metrics)
        self._sides: dict[str, RecordType] = {}
        self._times: Sequence[int | None] | None = None
        """The event times of the batch that is processed, where its stream has them."""

        self._for_function = _Context(self)

    def read(self, batch: pa.RecordBatch, layout: StreamLayout) -> Rows:
        names = [*layout.records.names, *([TIMESTAMP] if layout.timestamped else [])]
        return Rows(batch.select(names), layout.records)

    def process(self, records: Sequence[Any], timestamps: Sequence[int | None]) -> None:
        batch = self._batch(records, timestamps)
        self._domain, self._timestamp, self._generation = None, None, -1
        times = self._times = timestamps if TIMESTAMP in batch.schema.names else None
        try:
            returned = self._call(batch)
        except RAISED as error:
            raise user_failure(error, self.where, self.function, batch.slice(0, 3).to_pylist()) from error
        finally:
            self._times = None
        if returned is not None or not self.may_return_none:
            self.emit(returned, times)

    def process_in_time_order(self, key: Hashable, records: Sequence[Any], timestamps: Sequence[int | None]) -> None:
        start = 0
        for timestamp, same in groupby(timestamps):
            end = start + len(list(same))
            if timestamp is not None and timestamp - 1 > self.watermark:
                self.advance_watermark(timestamp - 1)
            self.select(key)
            self.process(records[start:end], timestamps[start:end])
            start = end

    def on_timer(self, timestamp: int, generation: int, domain: TimeDomain) -> None:
        function: Any = self.function
        self._begin_timer(timestamp, generation, domain)
        try:
            returned = function.on_timer(timestamp, self._for_function)
        except RAISED as error:
            shown = f"timer at {timestamp} of key {self.key!r}"
            raise user_failure(error, self.where, function.on_timer, shown) from error
        if returned is not None:
            self.emit(returned, None, self._moment())

    def emit(self, returned: object, timestamps: Sequence[int | None] | None = None, moment: int | None = None) -> None:
        """Takes a batch for the main output: made of rows of these event times, or of a timer's moment."""
        batch, times = checked(returned, self.gives, timestamps, self.where)
        self.out.emit_batch(None, batch, self.gives, times or [moment] * batch.num_rows)

    def emit_side(self, tag: OutputTag[Any], given: pa.RecordBatch) -> None:
        """Takes a batch for a side output.

        Its event times are those of its column, of the rows that it was made of, or the timer's moment.
        """
        where = f"{self.where}, side output '{tag.name}'"
        if tag.name not in self._sides:
            self._sides[tag.name] = record_type(tag.output_type, where)
        records = self._sides[tag.name]
        batch, times = checked(given, records, self._times, where)
        if times is None and TIMESTAMP in given.schema.names:
            times = given.column(TIMESTAMP).to_pylist()
        self.out.emit_batch(tag.name, batch, records, times or [self._moment()] * batch.num_rows)

    def _call(self, batch: pa.RecordBatch) -> object:
        function: Any = self.function
        return function.process_batch(batch, self._for_function)

    def _moment(self) -> int | None:
        """The event time of what a timer emits."""
        return self._timestamp if self._domain is TimeDomain.EVENT_TIME else None

    def _batch(self, records: Sequence[Any], timestamps: Sequence[int | None]) -> pa.RecordBatch:
        if isinstance(records, Rows):
            return records.batch
        batch = self.takes.to_batch(records)  # they waited for the watermark
        return batch.append_column(TIMESTAMP, pa.array(timestamps, pa.int64()))

    def _told(self) -> Emitting:
        return EmittingBatches(self, self.key)


class _Context(KeyedBatchFunction.OnTimerContext[Any]):
    """What a function is given: its operator, with batches for records."""

    def __init__(self, operator: KeyedBatchOperator) -> None:
        self._operator = operator

    def get_current_key(self) -> Any:
        return self._operator.get_current_key()

    def timer_service(self) -> TimerService:
        return self._operator.timer_service()

    def time_domain(self) -> TimeDomain:
        return self._operator.time_domain()

    def output(self, tag: OutputTag[Any], batch: pa.RecordBatch) -> None:
        self._operator.emit_side(tag, batch)


class EmittingBatches(Emitting):
    """What an `IterationListener` is given that emits batches."""

    def __init__(self, operator: KeyedBatchOperator, *key: Any) -> None:
        super().__init__(operator.out, *key)
        self._operator = operator

    def collect(self, value: Any) -> None:
        self._operator.emit(value)

    def output(self, tag: OutputTag[Any], value: Any) -> None:
        self._operator.emit_side(tag, value)


class KeyedBatchesStep(KeyedStep):
    """`map_batches` on a keyed stream, with state."""

    def operator(self, place: Place) -> KeyedBatchOperator:
        operator = self.made(place)
        assert self.input is not None
        assert self.output is not None
        operator.takes, operator.gives = self.input, self.output
        return operator

    def made(self, place: Place) -> KeyedBatchOperator:
        """The operator, which does not know yet what it takes and gives."""
        return KeyedBatchOperator(place.where, self.function, place.options, place.clock, place.metrics)
