"""Drives windows: one keyed operator for every assigner, trigger, evictor and function, also for merging windows."""

from __future__ import annotations

from abc import ABC, abstractmethod
from bisect import bisect_left, bisect_right, insort
from collections.abc import Callable, Sequence
from typing import Any

from dagster_unified.errors import PipelineError, RecordTypeError
from dagster_unified.operators.failures import RAISED, user_failure
from dagster_unified.operators.functions.base import RuntimeContext
from dagster_unified.operators.functions.windows import ProcessWindowFunction
from dagster_unified.operators.keyed import KeyedProcessOperator
from dagster_unified.operators.operator import OperatorContext
from dagster_unified.operators.state.backend import KeyedStateBackend
from dagster_unified.operators.state.handles import MapStateDescriptor
from dagster_unified.operators.time import MAX_TIMESTAMP, MIN_TIMESTAMP, TimeDomain
from dagster_unified.operators.windows.assigners import MergingWindowAssigner, WindowAssignerContext
from dagster_unified.operators.windows.contents import (
    CONTENTS,
    TIMERS,
    Evicted,
    OperatorAssignerContext,
    OperatorFunctionContext,
    OperatorTriggerContext,
    Windowing,
    WindowingOperator,
    contents_of,
)
from dagster_unified.operators.windows.triggers import TriggerResult
from dagster_unified.operators.windows.window import TimeWindow


class MergingWindows:
    """The windows of the current key in order, where they merge."""

    def __init__(self, operator: WindowingOperator, assigner: MergingWindowAssigner[Any, Any]) -> None:
        self._operator, self._assigner = operator, assigner
        self._touch = type(assigner).merge_windows is MergingWindowAssigner.merge_windows
        """Whether windows are one as soon as they touch."""
        self._ordered: list[Any] | None = None

    def begin(self) -> None:
        """Forget the windows of the last key."""
        self._ordered = None

    def forget(self, window: Any) -> None:
        """Forget a window that is gone."""
        if self._ordered is not None and window in self._ordered:
            self._ordered.remove(window)

    def merged(self, window: Any) -> Any:
        """The window that `window` becomes together with the key's windows that it touches."""
        operator = self._operator
        windows = operator.windows()
        if self._ordered is None:
            self._ordered = sorted(windows)
        ordered = self._ordered
        cover, parts = self._touching(ordered, window)
        if not parts:
            if not operator.is_late(cover):
                insort(ordered, cover)
            return cover
        if parts == [cover]:
            return cover
        if operator.is_late(cover):
            raise PipelineError(
                f"{operator.where}: {cover} came of merging and is already over; a merged window may not end before the"
                " watermark"
            )
        contents = [h for h in (windows.pop(part, None) for part in parts) if h is not None]
        for part in parts:
            del ordered[bisect_left(ordered, part)]
        insort(ordered, cover)
        windows[cover] = operator.contents.combined(contents)
        operator.merge_trigger(cover, parts)
        return cover

    def _touching(self, ordered: list[Any], window: Any) -> tuple[Any, list[Any]]:
        """The merged window, and the key's windows that become it."""
        if not self._touch:
            groups = self._assigner.merge_windows([*[w for w in ordered if w != window], window])
            cover, parts = next((c, p) for c, p in groups if window in p)
            return cover, [p for p in parts if p in ordered]
        # Sessions of a key do not touch one another, so that their ends are in the order of their starts.
        last = bisect_right(ordered, window.end, key=lambda w: w.start)
        first = last
        while first > 0 and ordered[first - 1].end >= window.start:
            first -= 1
        parts = ordered[first:last]
        cover = window
        for part in parts:
            cover = cover.cover(part)
        return cover, parts


class Strategy(ABC):
    """Puts elements of the current key into windows."""

    @abstractmethod
    def process(self, records: Sequence[Any], timestamps: Sequence[int | None]) -> None:
        """Process a run of elements, in order."""


class PerElement(Strategy):
    """One by one, for every assigner, trigger and evictor."""

    def __init__(
        self, operator: WindowingOperator, triggers: OperatorTriggerContext, merging: MergingWindows | None
    ) -> None:
        self._operator, self._triggers, self._merging = operator, triggers, merging
        self._event_time = operator.spec.assigner.is_event_time

    def process(self, records: Sequence[Any], timestamps: Sequence[int | None]) -> None:
        record = None
        try:
            for record, timestamp in zip(records, timestamps, strict=True):
                self._element(record, timestamp)
        except RAISED as error:
            raise user_failure(error, self._operator.where, self._operator.spec.suspect, record) from error

    def _element(self, record: Any, timestamp: int | None) -> None:
        operator = self._operator
        spec, merging = operator.spec, self._merging
        moment = timestamp
        if moment is None:
            if self._event_time:
                raise RecordTypeError(
                    f"{operator.where}: a record has no event time: {record!r}; assign timestamps before the window"
                )
            moment = MIN_TIMESTAMP
        operator.at(timestamp)
        skipped = True
        assigned_windows = spec.assigner.assign_windows(record, moment, operator.assigning)
        copy = operator.copy if len(assigned_windows) > 1 else None
        for assigned in assigned_windows:
            window = assigned if merging is None else merging.merged(assigned)
            if operator.is_late(window):
                continue
            skipped = False
            windows = operator.windows()
            contents = windows.get(window)
            added = operator.contents.add(contents, record if copy is None else copy(record), timestamp)
            if added is not contents:
                windows[window] = added
            operator.act(spec.trigger.on_element(record, timestamp, window, self._triggers.of(window)), window)
            operator.register_cleanup(window)
        if skipped and self._event_time:
            operator.late(record, moment)


class _ManyAtOnce(Strategy):
    """Many at a time; elements without an event time one by one."""

    def __init__(self, operator: WindowingOperator, one_by_one: PerElement) -> None:
        self._operator, self._one_by_one = operator, one_by_one

    def process(self, records: Sequence[Any], timestamps: Sequence[int | None]) -> None:
        if None in timestamps:
            self._one_by_one.process(records, timestamps)
        else:
            self._timed(records, timestamps)  # type: ignore[arg-type]

    @abstractmethod
    def _timed(self, records: Sequence[Any], timestamps: Sequence[int]) -> None:
        """Process elements that all have an event time."""


class Panes(_ManyAtOnce):
    """Elements of one pane, which are in the same windows, at once."""

    def __init__(self, operator: WindowingOperator, one_by_one: PerElement, panes: tuple[int, int]) -> None:
        super().__init__(operator, one_by_one)
        self._length, self._offset = panes

    def _timed(self, records: Sequence[Any], timestamps: Sequence[int]) -> None:
        operator, length, offset = self._operator, self._length, self._offset
        assign, assigning = operator.spec.assigner.assign_windows, operator.assigning
        panes = [t - (t - offset) % length for t in timestamps]
        start, size = 0, len(panes)
        while start < size:
            pane, end = panes[start], start + 1
            while end < size and panes[end] == pane:
                end += 1
            windows: Sequence[Any] = assign(records[start], timestamps[start], assigning)
            if windows and windows[0].max_timestamp() > operator.watermark:
                copy, run = operator.copy if len(windows) > 1 else None, records[start:end]
                for window in windows:
                    operator.add_all(window, run if copy is None else list(map(copy, run)))
            else:
                self._one_by_one.process(records[start:end], timestamps[start:end])
            start = end


class Sessions(_ManyAtOnce):
    """Elements that follow one another in one session, at once."""

    def __init__(self, operator: WindowingOperator, one_by_one: PerElement, merging: MergingWindows, gap: int) -> None:
        super().__init__(operator, one_by_one)
        self._merging, self._gap = merging, gap

    def _timed(self, records: Sequence[Any], timestamps: Sequence[int]) -> None:
        operator, gap, watermark = self._operator, self._gap, self._operator.watermark
        first: int | None = None
        low = high = 0
        for number, moment in enumerate(timestamps):
            if first is not None and moment <= high and low <= moment + gap and moment + gap - 1 > watermark:
                low, high = min(low, moment), max(high, moment + gap)
                continue
            if first is not None:
                operator.add_all(self._merging.merged(TimeWindow(low, high)), records[first:number])
            if moment + gap - 1 > watermark:
                first, low, high = number, moment, moment + gap
            else:
                first = None
                self._one_by_one.process(records[number : number + 1], timestamps[number : number + 1])
        if first is not None:
            operator.add_all(self._merging.merged(TimeWindow(low, high)), records[first:])


def strategy_of(
    operator: WindowingOperator, triggers: OperatorTriggerContext, merging: MergingWindows | None
) -> Strategy:
    """The fastest strategy that assigner, trigger and evictor allow."""
    spec = operator.spec
    one_by_one = PerElement(operator, triggers, merging)
    if spec.evictor is not None or not spec.only_registers_end:
        return one_by_one
    panes = spec.assigner.panes()
    if panes is not None:
        return Panes(operator, one_by_one, panes)
    gap = spec.assigner.fixed_gap() if isinstance(spec.assigner, MergingWindowAssigner) else None
    if gap is not None and merging is not None:
        return Sessions(operator, one_by_one, merging, gap)
    return one_by_one


class WindowOperator(KeyedProcessOperator):
    """Runs a `Windowing`."""

    assigning: WindowAssignerContext
    """The assigner's context."""

    def __init__(self, spec: Windowing, context: OperatorContext) -> None:
        super().__init__(spec, context)  # type: ignore[arg-type]
        self.spec = spec
        self.copy = context.copy
        """Copies an element for each of several windows; None where it is immutable."""

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
        """Set the event time of the current element."""
        self._timestamp = timestamp

    def windows(self) -> Any:
        """The contents of each window of the current key."""
        return self.state.current.setdefault(CONTENTS, {})

    def is_late(self, window: Any) -> bool:
        """Whether a window is gone already."""
        return self._by_event_time and self._cleanup_time(window) <= self.watermark

    def late(self, record: Any, timestamp: int) -> None:
        """Handle an element without a remaining window: if it is late, emit it to the side output, or count it."""
        if timestamp + self.spec.lateness > self.watermark:
            return
        if self.spec.late_tag is not None:
            self.out.emit_side(self.spec.late_tag, record, timestamp)
        else:
            self._metrics.count("late records dropped")

    def add_all(self, window: Any, records: Sequence[Any]) -> None:
        """Add elements to a window that fires only at its end, which is still to come."""
        windows = self.windows()
        windows[window] = self.contents.add_all(windows.get(window), records)
        self.register(window, window.max_timestamp(), TimeDomain.EVENT_TIME)
        self.register_cleanup(window)

    # Results

    def act(self, result: TriggerResult, window: Any) -> None:
        """Do what a trigger decided."""
        if result is TriggerResult.CONTINUE:
            return
        windows = self.state.current.get(CONTENTS) or {}
        contents = windows.get(window)
        if self.contents.is_empty(contents):
            return
        if result.is_fire():
            self._emit(window, contents, windows)
        if result.is_purge():
            if self.merging is None:
                self._forget(CONTENTS, window)
            else:
                windows[window] = self.contents.empty()

    def _emit(self, window: Any, contents: Any, windows: Any) -> None:
        evicted, function, at = self._evicted, self.spec.function, window.max_timestamp()
        if evicted is not None:
            contents = evicted.before(contents, window)
        elements = self.contents.elements(contents)
        self._timestamp = at
        if function is None:
            self.out.emit_all(elements, at)
        elif isinstance(function, ProcessWindowFunction):
            self.out.emit_all(function.process(self.key, self._functions.of(window), elements), at)
        else:
            self.out.emit_all(function.apply(self.key, window, elements), at)
        if evicted is not None:
            windows[window] = evicted.after(contents, window)

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
        """Register a timer of a window."""
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
        """Delete a timer of a window."""
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
        """Register the moment when a window is removed."""
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
        """Merge the triggers' state and timers of windows that have become one."""
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
        """Remove an entry from a map of the current key, and the map where it was the last."""
        entries = self.state.current.get(name)
        if entries:
            entries.pop(entry, None)
        if entries is not None and not len(entries):
            self.state.current.pop(name, None)
