"""Operators of two inputs: connected streams, and joins within a window or within an interval around each record."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

from dagster_unified.operators.functions.base import (
    KeyedProcessFunction,
    OutputTag,
    ProcessFunction,
    RuntimeContext,
    Wrapping,
)
from dagster_unified.operators.functions.two_streams import KeyedCoProcessFunction, ProcessJoinFunction
from dagster_unified.operators.functions.windows import WindowFunction
from dagster_unified.operators.keys import key_hash
from dagster_unified.operators.layout import DelegatingKey
from dagster_unified.operators.state.handles import MapStateDescriptor
from dagster_unified.records import UNITED, type_name


def either_type(first: Any, second: Any) -> Any:
    """The record of two united streams: the stream that it is from (1 or 2), and its record there."""
    either = _either(first, second)
    setattr(either, UNITED, f"{type_name(first)} | {type_name(second)}")
    return either


def _either(first: Any, second: Any) -> Any:
    return NamedTuple("Either", [("side", int), ("first", first | None), ("second", second | None)])


class Tag:
    """Wraps a stream's records as `Either`."""

    keeps_form = True
    """Whether its result is in normal form where its record is."""

    def __init__(self, either: Any, side: int) -> None:
        self.either, self.side = either, side

    def __call__(self, record: Any) -> Any:
        return self.either(1, record, None) if self.side == 1 else self.either(2, None, record)


def _side_record(either: Any) -> Any:
    return either.first if either.side == 1 else either.second


class SideKey(NamedTuple):
    """How the key of one stream's records is read, and its names in errors and in plans."""

    get: Callable[[Any], Any]
    where: str
    name: str


class EitherKey(DelegatingKey):
    """The key of a record of `Either`: the key in its own stream."""

    def __init__(self, first: SideKey, second: SideKey) -> None:
        self._first, self._second = first.get, second.get
        self._where = {1: first.where, 2: second.where}
        self.__name__ = " | ".join(dict.fromkeys((first.name, second.name)))

    def __call__(self, record: Any) -> Any:
        return self._first(record.first) if record.side == 1 else self._second(record.second)

    def author_view(self, record: Any) -> tuple[str, Any]:
        return self._where[record.side], _side_record(record)


_SPREAD = 1024
"""Keys over which the records of a stream without a key are spread, where the other stream has one."""


class OneSidesKey(DelegatingKey):
    """The key of a record of `Either` where only one of the streams is keyed: `(0, key)`.

    The other stream's records get keys that sort before all of those, so that in BATCH they come first.
    """

    def __init__(self, side: int, side_key: SideKey, width: int) -> None:
        self.side, self.get, self.where, self.width = side, side_key.get, side_key.where, width
        self.__name__ = side_key.name

    def __call__(self, record: Any) -> Any:
        side_record = _side_record(record)
        if record.side != self.side:
            return (-1 - key_hash(side_record) % _SPREAD, *[None] * self.width)
        key = self.get(side_record)
        fields = key if isinstance(key, tuple) else (key,)
        return None if None in fields else (0, *fields)

    def author_view(self, record: Any) -> tuple[str, Any]:
        return self.where, _side_record(record)


class _Both(Wrapping):
    """Calls one of two methods of a function, by the record's side."""

    first = second = ""
    """The names of the methods."""

    def __init__(self, function: Any) -> None:
        super().__init__(function)
        self._first, self._second = getattr(function, self.first), getattr(function, self.second)


class CoMap(_Both):
    """A `CoMapFunction` over `Either`."""

    first, second = "map1", "map2"

    def map(self, value: Any) -> Any:
        """As `MapFunction.map`."""
        return self._first(value.first) if value.side == 1 else self._second(value.second)


class CoFlatMap(_Both):
    """A `CoFlatMapFunction` over `Either`."""

    first, second = "flat_map1", "flat_map2"

    def flat_map(self, value: Any) -> Iterable[Any]:
        """As `FlatMapFunction.flat_map`."""
        results: Iterable[Any] = self._first(value.first) if value.side == 1 else self._second(value.second)
        return results


class CoProcess(_Both, ProcessFunction[Any, Any]):
    """A `CoProcessFunction` or a `KeyedCoProcessFunction` over `Either`."""

    first, second = "process_element1", "process_element2"

    def process_element(self, value: Any, ctx: ProcessFunction.Context) -> Iterable[Any] | None:
        results: Iterable[Any] | None = (
            self._first(value.first, ctx) if value.side == 1 else self._second(value.second, ctx)
        )
        return results

    def on_timer(self, timestamp: int, ctx: KeyedProcessFunction.OnTimerContext[Any]) -> Iterable[Any] | None:
        results: Iterable[Any] | None = self.function.on_timer(timestamp, ctx)
        return results


class WindowedPairs(Wrapping, WindowFunction[Any, Any, Any, Any]):
    """Splits a window's records by their side, for a join or a co-group."""

    def __init__(self, function: Any, kind: str) -> None:
        super().__init__(function)
        self.kind = kind
        self._call = getattr(function, "co_group" if kind == "co_group" else "join", function)

    def apply(self, key: Any, window: Any, inputs: Iterable[Any]) -> Iterable[Any]:
        first: list[Any] = []
        second: list[Any] = []
        for record in inputs:
            if record.side == 1:
                first.append(record.first)
            else:
                second.append(record.second)
        if self.kind == "co_group":
            yield from self._call(first, second) or ()
            return
        for left in first:
            for right in second:
                if self.kind == "flat_join":
                    yield from self._call(left, right) or ()
                else:
                    yield self._call(left, right)


class IntervalJoin(Wrapping, KeyedCoProcessFunction[Any, Any, Any, Any]):
    """Pairs records of one key whose times are in an interval around each other (Flink: *Interval Join*).

    The interval is `lower <= right - left <= upper`, in milliseconds. Both modes take records in order of time, and
    forget a record once no other can meet it: BATCH holds an interval of a key, not the key. A record that comes after
    the watermark is dropped and counted, or goes to a side output.
    """

    requires_time_sorted_input = True
    drops_late_records = True

    def __init__(
        self,
        function: ProcessJoinFunction[Any, Any, Any],
        lower: int,
        upper: int,
        types: tuple[Any, Any],
        late: tuple[OutputTag[Any] | None, OutputTag[Any] | None],
    ) -> None:
        super().__init__(function)
        self._ranges = ((lower, upper), (-upper, -lower))
        """How far after a record of each side the records that it meets may be, in milliseconds."""
        self.late_tags = late
        self._descriptors = [
            MapStateDescriptor(name, int, list[kind])  # type: ignore[valid-type]
            for name, kind in zip(("left", "right"), types, strict=True)
        ]
        for descriptor in self._descriptors:
            descriptor.trusted = True
        self._pair = _Pair()

    def open(self, runtime_context: RuntimeContext) -> None:
        self._buffers = [runtime_context.get_map_state(d) for d in self._descriptors]
        self._count = runtime_context.count
        super().open(runtime_context)

    def process_element1(self, value: Any, ctx: KeyedProcessFunction.Context[Any]) -> Iterable[Any]:
        return self._meet(0, value, ctx)

    def process_element2(self, value: Any, ctx: KeyedProcessFunction.Context[Any]) -> Iterable[Any]:
        return self._meet(1, value, ctx)

    def on_timer(self, timestamp: int, ctx: KeyedProcessFunction.OnTimerContext[Any]) -> Iterable[Any] | None:
        for buffer, (_, high) in zip(self._buffers, self._ranges, strict=True):
            buffer.remove(timestamp - max(high, 0))
        return None

    def _meet(self, side: int, value: Any, ctx: KeyedProcessFunction.Context[Any]) -> Iterable[Any]:
        """Keep a record of one side, and pair it with the other side's records that are near."""
        moment = self._on_time(value, ctx, self.late_tags[side])
        if moment is None:
            return
        low, high = self._ranges[side]
        self._keep(self._buffers[side], moment, value)
        others = self._buffers[1 - side]
        for other in sorted(t for t in others.keys() if moment + low <= t <= moment + high):  # noqa: SIM118 - a state handle
            for met in others.get(other) or ():
                if side == 0:
                    yield from self.function.process_element(value, met, self._pair.of(ctx, moment, other)) or ()
                else:
                    yield from self.function.process_element(met, value, self._pair.of(ctx, other, moment)) or ()
        ctx.timer_service().register_event_time_timer(moment + max(high, 0))

    def _on_time(self, value: Any, ctx: KeyedProcessFunction.Context[Any], tag: OutputTag[Any] | None) -> int | None:
        moment = ctx.timestamp()
        if moment is not None and moment >= ctx.timer_service().current_watermark():
            return moment
        if tag is not None:
            ctx.output(tag, value)
        else:
            self._count("late records dropped")
        return None

    @staticmethod
    def _keep(buffer: Any, moment: int, value: Any) -> None:
        buffer.put(moment, [*(buffer.get(moment) or ()), value])


class _Pair(ProcessJoinFunction.Context):
    def of(self, ctx: KeyedProcessFunction.Context[Any], left: int, right: int) -> _Pair:
        self._ctx, self._left, self._right = ctx, left, right
        return self

    def get_left_timestamp(self) -> int:
        return self._left

    def get_right_timestamp(self) -> int:
        return self._right

    def get_timestamp(self) -> int:
        return max(self._left, self._right)

    def output(self, tag: OutputTag[Any], value: Any) -> None:
        self._ctx.output(tag, value)
