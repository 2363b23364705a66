"""Joins of two keyed streams: within a window, or within an interval around each record.

A window join is a window over both streams' records as `Either`; an interval join is a keyed function with two buffers.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from dagster_unified.operators.functions.base import (
    KeyedProcessFunction,
    OutputTag,
    RuntimeContext,
    Wrapping,
)
from dagster_unified.operators.functions.two_streams import (
    KeyedCoProcessFunction,
    ProcessJoinFunction,
)
from dagster_unified.operators.functions.windows import WindowFunction
from dagster_unified.operators.state.map import MapStateDescriptor


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

    The interval is `lower <= right - left <= upper`, in milliseconds. Records are taken in the order of time, in both
    modes, so that what no record can meet any more is forgotten as time goes on: BATCH holds an interval of a key, not
    the key. A record that comes after the watermark is dropped and counted, or goes to a side output.
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
        """How far after a record, of either side, what it meets may be."""
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
        """Keeps a record of one side, and pairs it with those of the other that are near."""
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
