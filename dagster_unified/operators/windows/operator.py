"""Drives windows: one keyed operator for every assigner, trigger, evictor and function, also for merging windows."""

from __future__ import annotations

from bisect import bisect_left, bisect_right, insort
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import pyarrow as pa

from dagster_unified.errors import PipelineError, RecordTypeError
from dagster_unified.operators.by_field import FieldFold, Fold, Rows
from dagster_unified.operators.failures import RAISED, user_failure
from dagster_unified.operators.functions.base import RuntimeContext
from dagster_unified.operators.functions.windows import ProcessWindowFunction
from dagster_unified.operators.keyed import KeyedProcessOperator
from dagster_unified.operators.layout import StreamLayout
from dagster_unified.operators.operator import OperatorContext
from dagster_unified.operators.state.backend import KeyedStateBackend
from dagster_unified.operators.state.handles import MapStateDescriptor
from dagster_unified.operators.time import MAX_TIMESTAMP, MIN_TIMESTAMP, TimeDomain
from dagster_unified.operators.windows.assigners import MergingWindowAssigner, WindowAssignerContext
from dagster_unified.operators.windows.contents import (
    CONTENTS,
    Evicted,
    OperatorAssignerContext,
    OperatorFunctionContext,
    OperatorTriggerContext,
    Windowing,
    WindowTimers,
    contents_of,
    remove_entry,
)
from dagster_unified.operators.windows.triggers import TriggerResult
from dagster_unified.operators.windows.window import TimeWindow
from dagster_unified.records import record_type


class MergingWindows:
    """The windows of the current key in order, where they merge."""

    def __init__(self, assigner: MergingWindowAssigner[Any, Any]) -> None:
        self._assigner = assigner
        self._touch = type(assigner).merge_windows is MergingWindowAssigner.merge_windows
        """Whether windows are one as soon as they touch."""
        self._ordered: list[Any] | None = None

    def begin(self) -> None:
        """Forget the windows of the last key."""
        self._ordered = None

    def add(self, window: Any) -> None:
        assert self._ordered is not None
        insort(self._ordered, window)

    def remove(self, window: Any) -> None:
        """Forget a window that is gone."""
        if self._ordered is not None:
            place = bisect_left(self._ordered, window)
            if self._ordered[place : place + 1] == [window]:
                del self._ordered[place]

    def merged(self, window: Any, windows: Any) -> tuple[Any, list[Any]]:
        """The window that `window` becomes together with some of the key's `windows`, and these."""
        if self._ordered is None:
            self._ordered = sorted(windows)
        ordered = self._ordered
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


class WindowOperator(KeyedProcessOperator):
    """Runs a `Windowing`."""

    _assigning: WindowAssignerContext

    def __init__(self, spec: Windowing, context: OperatorContext, fold: Fold | None = None) -> None:
        """`fold` is what the function that combines elements does to each field, where that is known."""
        super().__init__(spec, context)  # type: ignore[arg-type]
        self.spec = spec
        self._copy = context.copy
        """Copies an element for each of several windows; None where it is immutable."""

        by_field = None
        if fold is not None and context.input is not None and context.copy is None:
            value = record_type(spec.element_type if spec.aggregate is None else spec.accumulator_type)
            by_field = FieldFold(fold, value, context.input)
        self._contents = contents_of(spec, self.where, self.state, by_field)
        self._evicted = self._contents if isinstance(self._contents, Evicted) else None
        assigner = spec.assigner
        window: Any = assigner.window_type
        self.state.register(MapStateDescriptor(CONTENTS, window, self._contents.stored_type))
        self._timers = WindowTimers(self, window)
        self._triggers = OperatorTriggerContext(self, window, self._timers)
        self._functions = OperatorFunctionContext(self, window)
        self._merging = MergingWindows(assigner) if isinstance(assigner, MergingWindowAssigner) else None
        self._by_event_time = assigner.is_event_time
        self._many_at_once = self._fastest()
        """Puts elements that all have an event time into windows; None where they are taken one by one."""

        self._by_field = None if self._many_at_once is None else by_field

    def open(self, context: Callable[[KeyedStateBackend | None], RuntimeContext]) -> None:
        runtime_context = context(self.state)
        self._assigning = OperatorAssignerContext(self, runtime_context)
        for function in self.spec.functions:
            function.open(runtime_context)

    def close(self) -> None:
        for function in self.spec.functions:
            function.close()

    def select(self, key: Any) -> None:
        super().select(key)
        if self._merging is not None:
            self._merging.begin()

    # Elements

    def read(self, batch: pa.RecordBatch, layout: StreamLayout) -> Sequence[Any]:
        if self._by_field is None:
            return super().read(batch, layout)
        return Rows(layout.records, batch.select(list(layout.records.names)), self._by_field.reads)

    def process(self, records: Sequence[Any], timestamps: Sequence[int | None]) -> None:
        self._domain, self._generation = None, -1
        if self._many_at_once is None or None in timestamps:
            self._one_by_one(records, timestamps)
        else:
            self._many_at_once(records, timestamps)

    def _fastest(self) -> Callable[[Sequence[Any], Any], None] | None:
        """The fastest way to take elements that assigner, trigger and evictor allow."""
        assigner = self.spec.assigner
        if not self.spec.takes_runs:
            return None
        panes = assigner.panes()
        if panes is not None:
            return partial(self._by_pane, *panes)
        gap = assigner.fixed_gap() if isinstance(assigner, MergingWindowAssigner) else None
        return None if gap is None else partial(self._by_session, gap)

    def _one_by_one(self, records: Sequence[Any], timestamps: Sequence[int | None]) -> None:
        record = None
        try:
            for record, timestamp in zip(records, timestamps, strict=True):
                self._element(record, timestamp)
        except RAISED as error:
            raise user_failure(error, self.where, self.spec.suspect, record) from error

    def _element(self, record: Any, timestamp: int | None) -> None:
        spec = self.spec
        moment = timestamp
        if moment is None:
            if self._by_event_time:
                raise RecordTypeError(
                    f"{self.where}: a record has no event time: {record!r}; assign timestamps before the window"
                )
            moment = MIN_TIMESTAMP
        self._timestamp = timestamp
        skipped = True
        assigned_windows = spec.assigner.assign_windows(record, moment, self._assigning)
        copy = self._copy if len(assigned_windows) > 1 else None
        for assigned in assigned_windows:
            window = assigned if self._merging is None else self._merged(assigned)
            if self._is_late(window):
                continue
            skipped = False
            windows = self._windows()
            contents = windows.get(window)
            added = self._contents.add(contents, record if copy is None else copy(record), timestamp)
            if added is not contents:
                windows[window] = added
            self._act(spec.trigger.on_element(record, timestamp, window, self._triggers.of(window)), window)
            self._register_cleanup(window)
        if skipped and self._by_event_time:
            self._late(record, moment)

    def _by_pane(self, length: int, offset: int, records: Sequence[Any], timestamps: Sequence[int]) -> None:
        """Take elements of one pane, which are in the same windows, at once."""
        assign = self.spec.assigner.assign_windows
        panes = [t - (t - offset) % length for t in timestamps]
        start, size = 0, len(panes)
        while start < size:
            pane, end = panes[start], start + 1
            while end < size and panes[end] == pane:
                end += 1
            windows: Sequence[Any] = assign(None, timestamps[start], self._assigning)  # elements have no part in panes
            if windows and windows[0].max_timestamp() > self.watermark:
                copy, run = self._copy if len(windows) > 1 else None, records[start:end]
                for window in windows:
                    self._add_all(window, run if copy is None else list(map(copy, run)))
            else:
                self._one_by_one(records[start:end], timestamps[start:end])
            start = end

    def _by_session(self, gap: int, records: Sequence[Any], timestamps: Sequence[int]) -> None:
        """Take elements that follow one another in one session at once."""
        watermark = self.watermark
        first: int | None = None
        low = high = 0
        for number, moment in enumerate(timestamps):
            if first is not None and moment <= high and low <= moment + gap and moment + gap - 1 > watermark:
                low, high = min(low, moment), max(high, moment + gap)
                continue
            if first is not None:
                self._add_all(self._merged(TimeWindow(low, high)), records[first:number])
            if moment + gap - 1 > watermark:
                first, low, high = number, moment, moment + gap
            else:
                first = None
                self._one_by_one(records[number : number + 1], timestamps[number : number + 1])
        if first is not None:
            self._add_all(self._merged(TimeWindow(low, high)), records[first:])

    def _add_all(self, window: Any, records: Sequence[Any]) -> None:
        """Add elements to a window that fires only at its end, which is still to come."""
        windows = self._windows()
        windows[window] = self._contents.add_all(windows.get(window), records)
        self._timers.register(window, window.max_timestamp(), TimeDomain.EVENT_TIME)
        if self.spec.lateness:  # else it is removed as it fires
            self._register_cleanup(window)

    def _windows(self) -> Any:
        return self.state.current.setdefault(CONTENTS, {})

    def _is_late(self, window: Any) -> bool:
        """Whether a window is gone already."""
        return self._by_event_time and self._cleanup_time(window) <= self.watermark

    def _late(self, record: Any, timestamp: int) -> None:
        """Handle an element without a remaining window: if it is late, emit it to the side output, or count it."""
        if timestamp + self.spec.lateness > self.watermark:
            return
        if self.spec.late_tag is not None:
            self.out.emit_side(self.spec.late_tag, record, timestamp)
        else:
            self.metrics.count("late records dropped")

    def _merged(self, window: Any) -> Any:
        """Merge a window with the key's windows that become one with it, and return the merged one."""
        assert self._merging is not None
        windows = self._windows()
        cover, parts = self._merging.merged(window, windows)
        if not parts:
            if not self._is_late(cover):
                self._merging.add(cover)
            return cover
        if parts == [cover]:
            return cover
        if self._is_late(cover):
            raise PipelineError(
                f"{self.where}: {cover} came of merging and is already over; a merged window may not end before the"
                " watermark"
            )
        contents = [c for c in (windows.pop(part, None) for part in parts) if c is not None]
        for part in parts:
            self._merging.remove(part)
        self._merging.add(cover)
        windows[cover] = self._contents.combined(contents)
        trigger = self.spec.trigger
        trigger.on_merge(cover, self._triggers.of(cover, parts))
        for part in parts:
            if part != cover:
                trigger.clear(part, self._triggers.of(part))
                self._timers.delete(part, self._cleanup_time(part), self._cleanup_domain())
        return cover

    # Results

    def _act(self, result: TriggerResult, window: Any) -> None:
        if result is TriggerResult.CONTINUE:
            return
        windows = self.state.current.get(CONTENTS) or {}
        contents = windows.get(window)
        if self._contents.is_empty(contents):
            return
        if result.is_fire():
            self._emit(window, contents, windows)
        if result.is_purge():
            if self._merging is None:
                remove_entry(self.state, CONTENTS, window)
            else:
                windows[window] = self._contents.empty()

    def _emit(self, window: Any, contents: Any, windows: Any) -> None:
        evicted, function, at = self._evicted, self.spec.function, window.max_timestamp()
        if evicted is not None:
            contents = evicted.before(contents, window)
        elements = self._contents.elements(contents)
        self._timestamp = at
        if function is None:
            self.out.emit_all(elements, at)
        elif isinstance(function, ProcessWindowFunction):
            self.out.emit_all(function.process(self.key, self._functions.of(window), elements), at)
        else:
            self.out.emit_all(function.apply(self.key, window, elements), at)
        if evicted is not None:
            windows[window] = evicted.after(contents, window)

    # Timers, and the end of a window

    def on_timer(self, timestamp: int, generation: int, domain: TimeDomain) -> None:
        self._begin_timer(timestamp, generation, domain)
        windows = self._timers.take(timestamp, domain)
        trigger = self.spec.trigger
        call_trigger = trigger.on_event_time if domain is TimeDomain.EVENT_TIME else trigger.on_processing_time
        try:
            for window in windows:
                self._act(call_trigger(timestamp, window, self._triggers.of(window)), window)
                if domain is self._cleanup_domain() and timestamp == self._cleanup_time(window):
                    self._clear(window)
        except RAISED as error:
            what = f"windows {windows} of key {self.key!r}"
            raise user_failure(error, self.where, self.spec.suspect, what) from error

    def _register_cleanup(self, window: Any) -> None:
        """Register the moment when a window is removed."""
        moment = self._cleanup_time(window)
        if moment < MAX_TIMESTAMP:
            self._timers.register(window, moment, self._cleanup_domain())

    def _cleanup_domain(self) -> TimeDomain:
        return TimeDomain.EVENT_TIME if self._by_event_time else TimeDomain.PROCESSING_TIME

    def _cleanup_time(self, window: Any) -> int:
        last: int = window.max_timestamp()
        return min(last + self.spec.lateness, MAX_TIMESTAMP) if self._by_event_time else last

    def _clear(self, window: Any) -> None:
        remove_entry(self.state, CONTENTS, window)
        if self._merging is not None:
            self._merging.remove(window)
        self.spec.trigger.clear(window, self._triggers.of(window))
        if isinstance(self.spec.function, ProcessWindowFunction):
            self.spec.function.clear(self._functions.of(window))
