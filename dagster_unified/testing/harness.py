"""Drives one keyed function by hand: elements, watermarks and the clock, one at a time.

Flink: `KeyedOneInputStreamOperatorTestHarness`.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator
from contextlib import contextmanager
from typing import Any

import msgspec

from dagster_unified.by_value import InThisProcess
from dagster_unified.errors import PipelineError
from dagster_unified.operators.drivers.group import Group, MemoryStore
from dagster_unified.operators.drivers.grouped import GroupedOperator
from dagster_unified.operators.functions.base import FIRST, KeyedProcessFunction, RuntimeContext
from dagster_unified.operators.keyed import KeyedProcessOperator
from dagster_unified.operators.metrics import Metrics, Registry
from dagster_unified.operators.operator import KeyedOptions, OperatorContext
from dagster_unified.operators.time import MIN_TIMESTAMP
from dagster_unified.testing.shared import InTheTest

_Key = bool | int | float | str | tuple[object, ...] | None
"""The keys that come back from state as they went, without a type that says what they are."""

_keys = msgspec.msgpack.Decoder(_Key)


class ManualClock(InTheTest):
    """A processing-time clock that stands still until it is moved. Milliseconds since the epoch.

    Examples:
        >>> clock = ManualClock(1_000)
        >>> clock.advance(500)
        >>> clock()
        1500
    """

    def __init__(self, now: int = 0) -> None:
        self.now = now

    def __call__(self) -> int:
        return self.now

    def advance(self, milliseconds: int) -> None:
        """Moves the clock forward."""
        self.now += milliseconds


class KeyedHarness:
    """One `KeyedProcessFunction` with its state and timers, in STREAMING semantics.

    State and timers go through the encoding of a checkpoint after every call, which is a micro-batch: the function is
    another object in each, opened and closed.

    Examples:
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
        self._name = type(function).__name__
        self._options = options or KeyedOptions(incremental_updates=True)
        self._shipped = InThisProcess(function)
        self._store = MemoryStore()
        with self._opened():
            pass

    def element(self, key: Hashable, value: Any, timestamp: int | None = None) -> list[Any]:
        """Processes one record; returns what the function emits."""
        self._check(key)
        with self._opened() as (grouped, group):
            grouped.process(group, [key], [0], [value], [timestamp])
            return self._taken(grouped, group)

    def watermark(self, timestamp: int) -> list[Any]:
        """Moves event time forward; returns what timers emit."""
        with self._opened() as (grouped, group):
            grouped.advance(group, timestamp, MIN_TIMESTAMP)
            return self._taken(grouped, group)

    def processing_time(self, now: int) -> list[Any]:
        """Sets the clock; returns what timers emit."""
        self.clock.now = now
        with self._opened() as (grouped, group):
            grouped.advance(group, MIN_TIMESTAMP, now)
            return self._taken(grouped, group)

    def end_of_input(self) -> list[Any]:
        """Ends the input: all timers fire, as configured."""
        with self._opened() as (grouped, group):
            grouped.end(group, grouped.operator.last_event_time)
            return self._taken(grouped, group)

    def state(self, key: Hashable) -> dict[str, Any]:
        """The raw state of a key, by state name."""
        with self._opened() as (grouped, _):
            contents = [one.content() for one in grouped.contents(self._store)]
        return next((dict(content.keys[key]) for content in contents if key in content.keys), {})

    def close(self) -> None:
        """Ends the harness. The function has been closed after each call."""
        self._store = MemoryStore()

    @contextmanager
    def _opened(self) -> Iterator[tuple[GroupedOperator, Group]]:
        """Opens the function for one call, which is a micro-batch: a new object each time, as on Spark."""
        registry = Registry()
        context = OperatorContext(where=self._name, options=self._options, clock=self.clock, metrics=registry.metrics)
        operator = KeyedProcessOperator(self._shipped.load(), context)
        if operator.time_sorted:
            raise PipelineError(
                f"{self._name}: requires_time_sorted_input makes elements wait in state until the watermark passes"
                " them, which needs their type; use OneInputHarness, which knows it"
            )
        operator.open(lambda state: RuntimeContext(self._name, FIRST, 1, registry, state))
        try:
            grouped = GroupedOperator(operator, _Key, object, holds_back=False, after=lambda: None)
            with grouped.opened(self._store) as group:
                yield grouped, group
        finally:
            operator.close()
            self.metrics.add_later(registry.metrics)

    def _check(self, key: Hashable) -> None:
        """Raises for a key that is another one when it comes back from state, of which the harness has no type."""
        try:
            stored = _keys.decode(msgspec.msgpack.encode(key))
        except (TypeError, ValueError):
            stored = None
        if type(stored) is not type(key) or stored != key:
            raise PipelineError(
                f"{self._name}: a {type(key).__name__} as a key needs its type; use OneInputHarness, which knows it"
            )

    def _taken(self, grouped: GroupedOperator, group: Group) -> list[Any]:
        """What was emitted; the state goes back to its pages."""
        grouped.operator.check_state()
        grouped.save(group)
        out = grouped.operator.out
        for tag, (records, _) in out.side.items():
            self.side_outputs.setdefault(tag, []).extend(records)
        return out.records
