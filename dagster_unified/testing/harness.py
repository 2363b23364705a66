"""Drives one keyed function by hand: elements, watermarks and the clock, one at a time (Flink:
`KeyedOneInputStreamOperatorTestHarness`).
"""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any

from dagster_unified.operators.functions.base import FIRST, KeyedProcessFunction, RuntimeContext
from dagster_unified.operators.keyed import Collector, KeyedOptions, KeyedProcessOperator
from dagster_unified.operators.metrics import Metrics


class ManualClock:
    """A processing-time clock that stands still until it is moved. Milliseconds since the epoch."""

    def __init__(self, now: int = 0) -> None:
        self.now = now

    def __call__(self) -> int:
        return self.now

    def advance(self, milliseconds: int) -> None:
        """Moves the clock forward."""
        self.now += milliseconds


class KeyedHarness:
    """One `KeyedProcessFunction` with its state and timers, in STREAMING semantics.

    >>> from dagster_unified.api import KeyedProcessFunction, ValueStateDescriptor
    >>> class Count(KeyedProcessFunction):
    ...     def open(self, context):
    ...         self.count = context.get_state(ValueStateDescriptor("count", int))
    ...     def process_element(self, value, ctx):
    ...         self.count.update((self.count.value() or 0) + 1)
    ...         ctx.timer_service().register_event_time_timer(ctx.timestamp() + 10)
    ...     def on_timer(self, timestamp, ctx):
    ...         yield f"{ctx.get_current_key()}: {self.count.value()} at {timestamp}"
    >>> harness = KeyedHarness(Count())
    >>> harness.element("a", "x", timestamp=5)
    []
    >>> harness.watermark(15)
    ['a: 1 at 15']
    """

    def __init__(
        self,
        function: KeyedProcessFunction[Any, Any, Any],
        clock: ManualClock | None = None,
        options: KeyedOptions | None = None,
    ) -> None:
        self.clock = clock or ManualClock()
        self.metrics = Metrics()
        self.side_outputs: dict[str, list[Any]] = {}
        self._operator = KeyedProcessOperator(
            type(function).__name__,
            function,
            options or KeyedOptions(incremental_updates=True),
            self.clock,
            self.metrics,
        )
        self._operator.open(lambda state: RuntimeContext(type(function).__name__, FIRST, 1, self.metrics, state))

    def element(self, key: Hashable, value: Any, timestamp: int | None = None) -> list[Any]:
        """Processes one record; gives what the function emitted."""
        self._operator.select(key)
        self._operator.process([value], [timestamp])
        return self._taken()

    def watermark(self, timestamp: int) -> list[Any]:
        """Moves event time forward; gives what timers emitted."""
        self._operator.advance_watermark(timestamp)
        return self._taken()

    def processing_time(self, now: int) -> list[Any]:
        """Sets the clock; gives what timers emitted."""
        self.clock.now = now
        self._operator.advance_processing_time(now)
        return self._taken()

    def end_of_input(self) -> list[Any]:
        """Ends the input: all timers fire, as configured."""
        self._operator.end_of_input()
        return self._taken()

    def state(self, key: Hashable) -> dict[str, Any]:
        """The raw state of a key, by state name."""
        return dict(self._operator.state.keys.get(key, {}))

    def close(self) -> None:
        """Closes the function."""
        self._operator.close()

    def _taken(self) -> list[Any]:
        self._operator.check_state()
        out, self._operator.out = self._operator.out, Collector()
        for tag, (records, _) in out.side.items():
            self.side_outputs.setdefault(tag, []).extend(records)
        return out.records
