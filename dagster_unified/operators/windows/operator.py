"""Drives windows: one keyed operator for every assigner, trigger, evictor and function.

After Flink's `WindowOperator`. A key's windows, what they hold, their triggers' state and their timers are maps of that
key's state, so that they live and are paged as any state. In BATCH the watermark is `MIN` until a key's end: nothing is
late there, and windows fire in the order of time. How elements get into windows is a strategy (`strategies.py`), what
windows hold is in `contents.py`, and how they grow together in `merging.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from dagster_unified.operators.failures import RAISED, user_failure
from dagster_unified.operators.functions.base import RuntimeContext
from dagster_unified.operators.functions.windows import ProcessWindowFunction
from dagster_unified.operators.keyed import KeyedProcessOperator
from dagster_unified.operators.operator import OperatorContext
from dagster_unified.operators.state.backend import KeyedStateBackend
from dagster_unified.operators.state.map import MapStateDescriptor
from dagster_unified.operators.time import MAX_TIMESTAMP, TimeDomain
from dagster_unified.operators.windows.assigners import MergingWindowAssigner
from dagster_unified.operators.windows.contents import Evicted, contents_of
from dagster_unified.operators.windows.context import WindowAssignerContext
from dagster_unified.operators.windows.contexts import (
    OperatorAssignerContext,
    OperatorFunctionContext,
    OperatorTriggerContext,
)
from dagster_unified.operators.windows.merging import MergingWindows
from dagster_unified.operators.windows.spec import CONTENTS, TIMERS, Windowing
from dagster_unified.operators.windows.strategies import strategy_of
from dagster_unified.operators.windows.triggers import TriggerResult


class WindowOperator(KeyedProcessOperator):
    """Runs a `Windowing`."""

    assigning: WindowAssignerContext
    """What the assigner is given."""

    def __init__(self, spec: Windowing, context: OperatorContext) -> None:
        super().__init__(spec, context)  # type: ignore[arg-type]
        self.spec = spec
        self.copy = context.copy
        """What copies an element for each of several windows; None where it cannot change."""

        self.contents = contents_of(spec, self.where, self.state)
        self._evicted = self.contents if isinstance(self.contents, Evicted) else None
        window: Any = spec.assigner.window_type
        self.state.register(MapStateDescriptor(CONTENTS, window, self.contents.stored_type))
        windows: Any = list.__class_getitem__(window)
        for name in TIMERS.values():
            self.state.register(MapStateDescriptor(name, int, windows))
        self.triggers = OperatorTriggerContext(self)
        self._functions = OperatorFunctionContext(self)
        assigner = spec.assigner
        self.merging = MergingWindows(self, assigner) if isinstance(assigner, MergingWindowAssigner) else None
        self._by_event_time = assigner.is_event_time
        self._strategy = strategy_of(self, self.triggers, self.merging)

    def open(self, context: Callable[[KeyedStateBackend | None], RuntimeContext]) -> None:
        runtime_context = context(self.state)
        self.assigning = OperatorAssignerContext(self, runtime_context)
        for function in self.spec.functions:
            function.open(runtime_context)

    def close(self) -> None:
        for function in self.spec.functions:
            function.close()

    def select(self, key: Any) -> None:
        super().select(key)
        if self.merging is not None:
            self.merging.begin()

    # Elements

    def process(self, records: Sequence[Any], timestamps: Sequence[int | None]) -> None:
        self._domain, self._generation = None, -1
        self._strategy.process(records, timestamps)

    def at(self, timestamp: int | None) -> None:
        """The event time of the element that is current."""
        self._timestamp = timestamp

    def windows(self) -> Any:
        """What each window of the current key holds."""
        return self.state.current.setdefault(CONTENTS, {})

    def is_late(self, window: Any) -> bool:
        """Whether a window is gone already."""
        return self._by_event_time and self._cleanup_time(window) <= self.watermark

    def late(self, record: Any, timestamp: int) -> None:
        """An element is in no window that is still there: where that is because it is late, it goes to the side."""
        if timestamp + self.spec.lateness > self.watermark:
            return
        if self.spec.late_tag is not None:
            self.out.emit_side(self.spec.late_tag, record, timestamp)
        else:
            self._metrics.count("late records dropped")

    def add_all(self, window: Any, records: Sequence[Any]) -> None:
        """Elements into a window that fires at its end only, which is still to come."""
        windows = self.windows()
        windows[window] = self.contents.add_all(windows.get(window), records)
        self.register(window, window.max_timestamp(), TimeDomain.EVENT_TIME)
        self.register_cleanup(window)

    # Results

    def act(self, result: TriggerResult, window: Any) -> None:
        """Does what a trigger says."""
        if result is TriggerResult.CONTINUE:
            return
        windows = self.state.current.get(CONTENTS) or {}
        held = windows.get(window)
        if self.contents.is_empty(held):
            return
        if result.is_fire():
            self._emit(window, held, windows)
        if result.is_purge():
            if self.merging is None:
                self._forget(CONTENTS, window)
            else:
                windows[window] = self.contents.empty()

    def _emit(self, window: Any, held: Any, windows: Any) -> None:
        evicted, function, at = self._evicted, self.spec.function, window.max_timestamp()
        if evicted is not None:
            held = evicted.before(held, window)
        elements = self.contents.elements(held)
        self._timestamp = at
        if function is None:
            self.out.emit_all(elements, at)
        elif isinstance(function, ProcessWindowFunction):
            self.out.emit_all(function.process(self.key, self._functions.of(window), elements), at)
        else:
            self.out.emit_all(function.apply(self.key, window, elements), at)
        if evicted is not None:
            windows[window] = evicted.after(held, window)

    # Timers

    def on_timer(self, timestamp: int, generation: int, domain: TimeDomain) -> None:
        self._begin_timer(timestamp, generation, domain)
        waiting = self.state.current.get(TIMERS[domain])
        windows = waiting.get(timestamp) if waiting else None
        self._forget(TIMERS[domain], timestamp)
        trigger = self.spec.trigger
        came = trigger.on_event_time if domain is TimeDomain.EVENT_TIME else trigger.on_processing_time
        try:
            for window in windows or ():
                self.act(came(timestamp, window, self.triggers.of(window)), window)
                if domain is self._cleanup_domain() and timestamp == self._cleanup_time(window):
                    self._clear(window)
        except RAISED as error:
            raise user_failure(
                error, self.where, self.spec.suspect, f"windows {windows} of key {self.key!r}"
            ) from error

    def register(self, window: Any, timestamp: int, domain: TimeDomain) -> None:
        """Registers a timer of a window."""
        waiting = self.state.current.setdefault(TIMERS[domain], {})
        windows = waiting.get(timestamp)
        if windows is None:
            waiting[timestamp] = [window]
            if domain is TimeDomain.EVENT_TIME:
                self.register_event_time_timer(timestamp)
            else:
                self.register_processing_time_timer(timestamp)
        elif window not in windows:
            windows.append(window)

    def unregister(self, window: Any, timestamp: int, domain: TimeDomain) -> None:
        """Takes a timer of a window back."""
        windows = (self.state.current.get(TIMERS[domain]) or {}).get(timestamp)
        if windows is None or window not in windows:
            return
        windows.remove(window)
        if not windows:
            self._forget(TIMERS[domain], timestamp)
            if domain is TimeDomain.EVENT_TIME:
                self.delete_event_time_timer(timestamp)
            else:
                self.delete_processing_time_timer(timestamp)

    def register_cleanup(self, window: Any) -> None:
        """Registers the moment when a window goes."""
        moment = self._cleanup_time(window)
        if moment < MAX_TIMESTAMP:
            self.register(window, moment, self._cleanup_domain())

    def _cleanup_domain(self) -> TimeDomain:
        return TimeDomain.EVENT_TIME if self._by_event_time else TimeDomain.PROCESSING_TIME

    def _cleanup_time(self, window: Any) -> int:
        last: int = window.max_timestamp()
        return min(last + self.spec.lateness, MAX_TIMESTAMP) if self._by_event_time else last

    # The end of a window

    def merge_trigger(self, cover: Any, parts: Sequence[Any]) -> None:
        """Windows have become one: their triggers' state and timers become its."""
        trigger = self.spec.trigger
        trigger.on_merge(cover, self.triggers.of(cover, parts))
        for part in parts:
            if part != cover:
                trigger.clear(part, self.triggers.of(part))
                self.unregister(part, self._cleanup_time(part), self._cleanup_domain())

    def _clear(self, window: Any) -> None:
        self._forget(CONTENTS, window)
        if self.merging is not None:
            self.merging.forget(window)
        self.spec.trigger.clear(window, self.triggers.of(window))
        if isinstance(self.spec.function, ProcessWindowFunction):
            self.spec.function.clear(self._functions.of(window))

    def _forget(self, name: str, entry: Any) -> None:
        """Takes an entry out of a map of the current key, and the map where it was the last."""
        held = self.state.current.get(name)
        if held:
            held.pop(entry, None)
        if held is not None and not len(held):
            self.state.current.pop(name, None)
