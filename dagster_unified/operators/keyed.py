"""Keyed operators: `process` with state and timers, the rolling `reduce` family, and functions of single records."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Sequence
from itertools import chain, repeat
from typing import Any

import pyarrow as pa

from dagster_unified.errors import UnsupportedError
from dagster_unified.operators.by_field import FieldFold, Fold
from dagster_unified.operators.failures import RAISED, user_failure
from dagster_unified.operators.functions.base import (
    Function,
    KeyedProcessFunction,
    NoTimers,
    OutputTag,
    ProcessFunction,
    RuntimeContext,
    TimerService,
    Wrapping,
)
from dagster_unified.operators.functions.iterations import IterationListener, iteration_listeners
from dagster_unified.operators.layout import StreamLayout
from dagster_unified.operators.operator import KeyedOperator, OperatorContext, timer_time
from dagster_unified.operators.program.blocks import Emitting, tell
from dagster_unified.operators.state.backend import KeyedStateBackend
from dagster_unified.operators.state.handles import ValueStateDescriptor
from dagster_unified.operators.time import TimeDomain
from dagster_unified.records import RecordType
from dagster_unified.values import FOLD


class KeyedProcessOperator(KeyedOperator, KeyedProcessFunction.OnTimerContext[Any], TimerService):
    """Runs a `KeyedProcessFunction`; is itself the function's context and timer service."""

    def __init__(
        self,
        function: KeyedProcessFunction[Any, Any, Any],
        context: OperatorContext,
        fields: tuple[int, ...] | None = None,
    ) -> None:
        """`fields` are those that the function reads of its records, where that is known and they are not all."""
        super().__init__(function, context)
        self._fields = None if self.time_sorted else fields  # elements that wait for the watermark are state
        self._partly_read: tuple[list[Any], pa.RecordBatch, RecordType] | None = None
        self.metrics = context.metrics
        self._timestamp: int | None = None
        self._domain: TimeDomain | None = None
        self._generation = -1
        self._listeners: Sequence[IterationListener[Any]] | None = None

    def open(self, context: Callable[[KeyedStateBackend | None], RuntimeContext]) -> None:
        python = type(self.function)
        before = getattr(python, "process_element", None)
        self.function.open(context(self.state))
        is_same = getattr(python, "process_element", None) is before
        if not is_same or "process_element" in getattr(self.function, "__dict__", {}):
            self._fields = None

    def close(self) -> None:
        self.function.close()

    @property
    def time_sorted(self) -> bool:
        return bool(getattr(self.function, "requires_time_sorted_input", False))

    def process(self, records: Sequence[Any], timestamps: Sequence[int | None]) -> None:
        process, emit = self.function.process_element, self.out.emit_all
        self._domain = None
        self._generation = -1
        record = None
        try:
            for record, timestamp in zip(records, timestamps, strict=True):
                self._timestamp = timestamp
                emit(process(record, self), timestamp)
        except RAISED as error:
            raise user_failure(error, self.where, self.function.process_element, self._whole(record)) from error

    def read(self, batch: pa.RecordBatch, layout: StreamLayout) -> Sequence[Any]:
        if self._fields is None:
            return super().read(batch, layout)
        columns = batch.select(list(layout.records.names))
        try:
            records = layout.records.partly_read(columns, self._fields)
        except Exception:
            return super().read(batch, layout)  # which raises it again, as it would have
        self._partly_read = records, columns, layout.records
        return records

    def _whole(self, record: Any) -> Any:
        """A record that was given to the function, with all its fields."""
        if self._partly_read is None or self._fields is None:
            return record
        records, batch, kind = self._partly_read
        number = next((number for number, read in enumerate(records) if read is record), None)
        if number is None:
            return record
        given, whole = (kind.columns([each]) for each in (record, *kind.from_batch(batch.slice(number, 1))))
        values = [(given if n in self._fields else whole)[n][0] for n in range(len(kind.names))]  # it may have changed
        return kind.record(tuple(values))

    @property
    def listeners(self) -> Sequence[IterationListener[Any]]:
        if self._listeners is None:
            self._listeners = tuple(iteration_listeners(self.function))
        return self._listeners

    def end_of_epoch(self, epoch: int) -> None:
        for listener in self.listeners:
            emitter = self._emitter()
            try:
                tell(listener.on_epoch_watermark_incremented, epoch, emitted=emitter)
            except RAISED as error:
                what = f"the end of epoch {epoch} of key {self.key!r}"
                raise user_failure(error, self.where, listener.on_epoch_watermark_incremented, what) from error

    def end_of_iteration(self) -> None:
        for listener in self.listeners:
            emitter = self._emitter()
            try:
                tell(listener.on_iteration_terminated, emitted=emitter)
            except RAISED as error:
                what = f"the end of the iteration of key {self.key!r}"
                raise user_failure(error, self.where, listener.on_iteration_terminated, what) from error

    def _emitter(self) -> Emitting:
        return Emitting(self.out, self.key)

    def on_timer(self, timestamp: int, generation: int, domain: TimeDomain) -> None:
        self._begin_timer(timestamp, generation, domain)
        try:
            self.out.emit_all(
                self.function.on_timer(timestamp, self), timestamp if domain is TimeDomain.EVENT_TIME else None
            )
        except RAISED as error:
            raise user_failure(
                error, self.where, self.function.on_timer, f"timer at {timestamp} of key {self.key!r}"
            ) from error

    def _begin_timer(self, timestamp: int, generation: int, domain: TimeDomain) -> None:
        self._timestamp, self._domain = timestamp, domain
        beyond = self.at_end and (self.last_event_time is None or timestamp > self.last_event_time)
        self._generation = generation if beyond or domain is TimeDomain.PROCESSING_TIME else -1

    def timestamp(self) -> int | None:
        return self._timestamp

    def timer_service(self) -> TimerService:
        return self

    def output(self, tag: OutputTag[Any], value: Any) -> None:
        self.out.emit_side(tag, value, None if self._domain is TimeDomain.PROCESSING_TIME else self._timestamp)

    def get_current_key(self) -> Any:
        return self.key

    def time_domain(self) -> TimeDomain:
        if self._domain is None:
            raise UnsupportedError("time_domain() is known in on_timer only")
        return self._domain

    def current_processing_time(self) -> int:
        return self.read_clock()

    def current_watermark(self) -> int:
        return self.watermark

    def register_event_time_timer(self, timestamp: int) -> None:
        generation = self._generation + 1
        moment = timer_time(timestamp)
        if generation > self.options.end_of_input_chain:
            self.metrics.count("timers past the end of input, not followed")
        else:
            self.event_timers.register(self.key, moment, generation)

    def register_processing_time_timer(self, timestamp: int) -> None:
        if self.options.processing_time == "FAIL":
            raise UnsupportedError(
                "a processing-time timer was registered, and pipeline.processing-time.allow is FAIL; use event time, or"
                " launch with ALLOW or IGNORE"
            )
        moment = timer_time(timestamp)
        if self.options.processing_time == "ALLOW" and not self.ended:
            self.processing_timers.register(self.key, moment)

    def delete_event_time_timer(self, timestamp: int) -> None:
        self.event_timers.delete(self.key, timer_time(timestamp))

    def delete_processing_time_timer(self, timestamp: int) -> None:
        self.processing_timers.delete(self.key, timer_time(timestamp))


_SAME_KEY = object()
"""Stands for the key's last result, before each of its records but the first."""


WORTH_COLUMNS = 500
"""Records of a group in a micro-batch from which on columns are faster: they cost half a millisecond to begin with."""


class ReduceOperator(KeyedOperator):
    """Combines a key's records. One update per record with incremental updates, else one result at the end of a bundle.

    The result carries the event time of the record that was combined last.
    """

    @property
    def one_value(self) -> str | None:
        plain = self.options.incremental_updates and not self.copies and len(self.state.descriptors) == 1
        return "value" if plain else None

    def __init__(
        self,
        function: Any,
        context: OperatorContext,
        builtin: tuple[str, str | int | None] | None = None,
        fold: Fold | None = None,
    ) -> None:
        """`builtin` is the kind and the field of one of the library's combinations, instead of a function.

        `fold` is what the function does to each field, where that is known.
        """
        super().__init__(function, context)
        records = context.output
        assert records is not None
        self.state.register(ValueStateDescriptor("value", records.python))
        self.function: Callable[[Any, Any], Any] = (
            rolling(*builtin) if builtin is not None else getattr(function, "reduce", function)
        )
        self.user_function = function
        self._records = records
        self._by_field = None if fold is None else FieldFold(fold, records, records)
        self._normal = records.normal
        self._fold = records.fit.fold("function(combined, value)")
        self._scan = records.fit.scan
        self._last: dict[Hashable, int | None] = {}
        self._are_values = False
        """Whether what `process` is given are the values that runs have become."""

    def open(self, context: Callable[[KeyedStateBackend | None], RuntimeContext]) -> None:
        if hasattr(self.user_function, "open"):
            self.user_function.open(context(self.state))

    def close(self) -> None:
        if hasattr(self.user_function, "close"):
            self.user_function.close()

    def combined(
        self, batch: pa.RecordBatch, layout: StreamLayout, starts: Sequence[int], goes_on: bool
    ) -> Sequence[Any] | None:
        if self._by_field is None or self.options.incremental_updates:
            return None
        held = self.state.current.get("value") if goes_on else None
        values = self._by_field.combined(batch.select(list(layout.records.names)), starts, held)
        self._are_values = values is not None
        return values

    def takes_columns(self, count: int) -> bool:
        return self._by_field is not None and self.one_value is not None and count >= WORTH_COLUMNS

    def process_columns(
        self,
        keys: Sequence[Hashable],
        starts: Sequence[int],
        batch: pa.RecordBatch,
        timestamps: Sequence[int | None],
        after: Callable[[], None],
    ) -> bool:
        assert self._by_field is not None
        rolled = self._by_field.rolling(batch, starts, self.state.take("value", keys))
        if rolled is None:
            return False
        updates, latest = rolled
        self.state.put("value", keys, latest)
        self.out.emit_batch(None, updates, self._records, timestamps)
        after()
        return True

    def process_runs(
        self,
        keys: Sequence[Hashable],
        starts: Sequence[int],
        records: Sequence[Any],
        timestamps: Sequence[int | None],
        after: Callable[[], None],
    ) -> None:
        if self.one_value is None:
            super().process_runs(keys, starts, records, timestamps, after)
            return
        values = self.state.take("value", keys)
        first = len(self.out.records)
        self._update(values, starts, records)
        updates = self.out.records
        latest = [updates[first + start - 1] for start in starts[1:]]
        latest.append(updates[-1])
        self.state.put("value", keys, latest)
        self.out.timestamps += timestamps
        after()

    def _update(self, values: Sequence[Any], starts: Sequence[int], records: Sequence[Any]) -> None:
        """Emit one update for each record; `values` are those of the keys, and `starts` where their runs begin."""
        before: list[Any] = [_SAME_KEY] * len(records)
        for start, value in zip(starts, values, strict=True):
            before[start] = value
        try:
            self._scan(records, before, _SAME_KEY, self.function, self._normal, self.out.records.append)
        except RAISED as error:
            raise self._failed(error, records) from error

    def process(self, records: Sequence[Any], timestamps: Sequence[int | None]) -> None:
        state, out = self.state.current, self.out
        value = state.get("value")
        try:
            if not self.options.incremental_updates:
                rest = iter(records)
                if value is None or self._are_values:
                    value = next(rest)
                state["value"] = self._fold(value, rest, self.function, self._normal)
                self._last[self.key] = timestamps[-1]
                return
            emit = out.records.append if self.copies.get(None) is None else lambda record: out.emit_records((record,))
            before = chain((value,), repeat(_SAME_KEY))
            state["value"] = self._scan(records, before, _SAME_KEY, self.function, self._normal, emit)
            out.timestamps += timestamps
        except RAISED as error:
            raise self._failed(error, records) from error

    def _failed(self, error: BaseException, records: Sequence[Any]) -> Exception:
        return user_failure(error, self.where, self.user_function, _operands(error, records))

    def finish_bundle(self) -> None:
        if not self.options.incremental_updates and "value" in self.state.current:
            self.out.emit(self.state.current["value"], self._last.pop(self.key, None))


def _operands(error: BaseException, records: Sequence[Any]) -> Any:
    """The two records that were being combined, from the frame of the loop that called the function."""
    trace = error.__traceback__
    while trace is not None:
        if trace.tb_frame.f_code.co_filename == FOLD:
            return trace.tb_frame.f_locals["combined"], trace.tb_frame.f_locals.get("value")
        trace = trace.tb_next
    return None, records[0]


def rolling(kind: str, field: str | int | None) -> Callable[[Any, Any], Any]:
    """The combining function of `sum`, `min`, `max`, `min_by` and `max_by` over one field.

    Where `field` is None, the record is the value. `sum`, `min` and `max` keep the other fields of the first record;
    `min_by` and `max_by` return the whole record, the first of equal ones (Flink: `ComparableAggregator`,
    `SumAggregator`). Not-a-number is the largest of all numbers, as in Java and Spark.
    """
    if field is None:
        return _PLAIN[kind]
    get: Callable[[Any], Any] = (lambda r: r[field]) if isinstance(field, int) else (lambda r: getattr(r, field))
    if kind == "min_by":
        return lambda a, b: b if is_less(get(b), get(a)) else a
    if kind == "max_by":
        return lambda a, b: b if is_less(get(a), get(b)) else a
    combine = _PLAIN[kind]
    return lambda a, b: _with(a, field, combine(get(a), get(b)))


def add(a: Any, b: Any) -> Any:
    """The sum."""
    return a + b


def is_less(a: Any, b: Any) -> bool:
    """Whether `a` comes before `b`, where not-a-number comes after all numbers."""
    return bool(a < b or (b != b and a == a))


def least(a: Any, b: Any) -> Any:
    """The smaller one, the first of equal ones."""
    return b if is_less(b, a) else a


def greatest(a: Any, b: Any) -> Any:
    """The larger one, the first of equal ones."""
    return b if is_less(a, b) else a


_PLAIN: dict[str, Callable[[Any, Any], Any]] = {
    "sum": add, "min": least, "max": greatest, "min_by": least, "max_by": greatest
}  # fmt: skip


def _with(record: Any, field: str | int, value: Any) -> Any:
    if isinstance(field, int):
        return (*record[:field], value, *record[field + 1 :])
    if isinstance(record, tuple):
        return record._replace(**{field: value})  # type: ignore[attr-defined]
    return type(record)(**{**{n: getattr(record, n) for n in _fields(record)}, field: value})


def _fields(record: Any) -> Iterable[str]:
    names: Iterable[str] = getattr(record, "__struct_fields__", None) or record.__dataclass_fields__
    return names


def may_hold_state(function: Any) -> bool:
    """Whether a function may ask for keyed state or timers.

    It can ask for state in `open` only, and timers reach `on_timer` only. A function that takes the records of all keys
    in one subtask has no key.
    """
    if isinstance(function, IterationListener) and function.in_one_subtask:
        return False
    overridden = [(Function, "open"), (ProcessFunction, "on_timer")]
    return any(
        isinstance(function, base) and getattr(type(function), name) is not getattr(base, name)
        for base, name in overridden
    )


class KeyedMap(Wrapping, KeyedProcessFunction[Any, Any, Any]):
    """A `MapFunction` with state."""

    def process_element(self, value: Any, ctx: KeyedProcessFunction.Context[Any]) -> Iterable[Any]:
        return (self.function.map(value),)


class KeyedFlatMap(Wrapping, KeyedProcessFunction[Any, Any, Any]):
    """A `FlatMapFunction` with state."""

    def process_element(self, value: Any, ctx: KeyedProcessFunction.Context[Any]) -> Iterable[Any]:
        results: Iterable[Any] = self.function.flat_map(value)
        return results


class KeyedFilter(Wrapping, KeyedProcessFunction[Any, Any, Any]):
    """A `FilterFunction` with state."""

    def process_element(self, value: Any, ctx: KeyedProcessFunction.Context[Any]) -> Iterable[Any]:
        return (value,) if self.function.filter(value) else ()


class KeyedProcess(Wrapping, KeyedProcessFunction[Any, Any, Any]):
    """A `ProcessFunction` with state and timers."""

    def process_element(self, value: Any, ctx: KeyedProcessFunction.Context[Any]) -> Iterable[Any] | None:
        results: Iterable[Any] | None = self.function.process_element(value, ctx)
        return results

    def on_timer(self, timestamp: int, ctx: KeyedProcessFunction.OnTimerContext[Any]) -> Iterable[Any] | None:
        results: Iterable[Any] | None = self.function.on_timer(timestamp, ctx)
        return results


class PartlyKeyed(Wrapping, KeyedProcessFunction[Any, Any, Any]):
    """A function over a keyed stream and another stream, united as records of `Either`.

    A record of the stream without a key has no keyed state, and there are no timers (Flink: `CoProcessOperator`).
    """

    def __init__(self, function: KeyedProcessFunction[Any, Any, Any], keyed_side: int) -> None:
        super().__init__(function)
        self._keyed_side = keyed_side
        self._state: KeyedStateBackend | None = None

    def open(self, runtime_context: RuntimeContext) -> None:
        self._state = runtime_context.keyed_state
        super().open(runtime_context)

    def process_element(self, value: Any, ctx: KeyedProcessFunction.Context[Any]) -> Iterable[Any] | None:
        if value.side != self._keyed_side:
            assert self._state is not None
            self._state.current = _NO_KEY
        results: Iterable[Any] | None = self.function.process_element(value, _Untimed(ctx))
        return results


class NoKey(dict[str, Any]):
    """The state of a record without a key: any access raises `UnsupportedError` with `message`."""

    def __init__(self, message: str) -> None:
        self._message = message

    def _refuse(self, *_: Any) -> Any:
        raise UnsupportedError(self._message)

    get = setdefault = pop = __getitem__ = __setitem__ = __contains__ = _refuse


_NO_KEY = NoKey(
    "a record of a stream without a key has no keyed state; call key_by on both connected streams, or use the state for"
    " the keyed stream's records only"
)


class _Untimed(ProcessFunction.Context, NoTimers):
    """The context of a record, without timers."""

    def __init__(self, context: KeyedProcessFunction.Context[Any]) -> None:
        self._context = context

    def timestamp(self) -> int | None:
        return self._context.timestamp()

    def timer_service(self) -> TimerService:
        return self

    def output(self, tag: OutputTag[Any], value: Any) -> None:
        self._context.output(tag, value)

    def current_processing_time(self) -> int:
        return self._context.timer_service().current_processing_time()

    def current_watermark(self) -> int:
        return self._context.timer_service().current_watermark()


KEYED_FORMS: dict[str, Callable[[Any], KeyedProcessFunction[Any, Any, Any]]] = {
    "map": KeyedMap,
    "flat_map": KeyedFlatMap,
    "filter": KeyedFilter,
    "process": KeyedProcess,
}
"""The wrapper that runs a function with state, by the operator that it was passed to."""
