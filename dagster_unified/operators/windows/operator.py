"""Drives windows: one keyed operator for every assigner, trigger, evictor and function.

After Flink's `WindowOperator`. A key's windows, what they hold, their triggers' state and their timers are maps of that
key's state, so that they live and are paged as any state. In BATCH the watermark is `MIN` until a key's end: nothing is
late there, and windows fire in the order of time. A window that is reduced or aggregated holds one value, in every
mode.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right, insort
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import reduce
from typing import Any

from dagster_unified.errors import PipelineError, RecordTypeError, UnsupportedError
from dagster_unified.operators.failures import user_failure
from dagster_unified.operators.functions.base import AggregateFunction, Function, OutputTag, RuntimeContext
from dagster_unified.operators.keyed import KeyedOptions, KeyedProcessOperator
from dagster_unified.operators.metrics import Metrics
from dagster_unified.operators.state.backend import Declared, KeyedStateBackend, StateBackend
from dagster_unified.operators.state.descriptors import StateDescriptor
from dagster_unified.operators.state.handles import State
from dagster_unified.operators.state.map import MapStateDescriptor
from dagster_unified.operators.state.store import BackendStore, KeyedStateStore
from dagster_unified.operators.time import MAX_TIMESTAMP, MIN_TIMESTAMP, TimeDomain
from dagster_unified.operators.timers import timer_time
from dagster_unified.operators.windows.assigners import (
    AlignedEventTimeWindows,
    EventTimeSessionWindows,
    MergingWindowAssigner,
    WindowAssigner,
)
from dagster_unified.operators.windows.evictors import Evictor
from dagster_unified.operators.windows.functions import ProcessWindowFunction, WindowFunction
from dagster_unified.operators.windows.triggers import EventTimeTrigger, OnMergeContext, Trigger, TriggerResult
from dagster_unified.operators.windows.window import TimeWindow

CONTENTS = "window contents"
TIMERS = {TimeDomain.EVENT_TIME: "window timers", TimeDomain.PROCESSING_TIME: "window clock timers"}


@dataclass(frozen=True)
class Windowing:
    """What an author says of a windowed stream.

    A window holds its elements, or what `reduce` or `aggregate` makes of them.
    """

    assigner: WindowAssigner[Any, Any]
    trigger: Trigger[Any, Any]
    element_type: Any
    evictor: Evictor[Any, Any] | None = None
    lateness: int = 0
    """Milliseconds for which a window stays after its end."""
    late_tag: OutputTag[Any] | None = None
    reduce: Any = None
    aggregate: AggregateFunction[Any, Any, Any] | None = None
    accumulator_type: Any = None
    function: ProcessWindowFunction[Any, Any, Any, Any] | WindowFunction[Any, Any, Any, Any] | None = None

    @property
    def stored_type(self) -> Any:
        """What a window holds."""
        if self.evictor is not None:
            return list[tuple[self.element_type, int | None]]  # type: ignore[name-defined]
        if self.aggregate is not None:
            return self.accumulator_type | None
        return self.element_type | None if self.reduce is not None else list[self.element_type]  # type: ignore[name-defined]

    def describe(self) -> str:
        """One line for plans."""
        parts = [self.assigner.describe()]
        if type(self.trigger) is not type(self.assigner.get_default_trigger()):
            parts.append(type(self.trigger).__name__)
        if self.evictor is not None:
            parts.append(type(self.evictor).__name__)
        if self.lateness:
            parts.append(f"allowed lateness {self.lateness} ms")
        held = "aggregated" if self.aggregate is not None else "reduced" if self.reduce is not None else "all elements"
        return ", ".join([*parts, "all elements" if self.evictor is not None else held])

    @property
    def wrapped_functions(self) -> tuple[Any, ...]:
        """The author's."""
        return (self.assigner, self.trigger, self.evictor, self.reduce, self.aggregate, self.function)

    @property
    def drops_late_records(self) -> bool:
        """Whether a record can come too late for all its windows."""
        return self.assigner.is_event_time

    @property
    def late_tags(self) -> tuple[OutputTag[Any] | None, ...]:
        """Where late records go, for each input."""
        return (self.late_tag,)

    @property
    def functions(self) -> list[Function]:
        """Those that have to be opened and closed."""
        return [f for f in (self.reduce, self.aggregate, self.function) if isinstance(f, Function)]


class WindowOperator(KeyedProcessOperator):
    """Runs a `Windowing`."""

    def __init__(
        self, where: str, spec: Windowing, options: KeyedOptions, clock: Callable[[], int], metrics: Metrics
    ) -> None:
        super().__init__(where, spec, options, clock, metrics)  # type: ignore[arg-type]
        self.spec = spec
        self._merging = spec.assigner if isinstance(spec.assigner, MergingWindowAssigner) else None
        self._sessions = (
            self._merging is not None and type(self._merging).merge_windows is MergingWindowAssigner.merge_windows
        )
        self._by_pane = _by_pane(spec)
        self._gap = _gap(spec)
        self._reduce = getattr(spec.reduce, "reduce", spec.reduce)
        self._ordered: list[Any] | None = None
        """The windows of the current key in order, where they merge."""

        window: Any = spec.assigner.window_type
        self.state.register(MapStateDescriptor(CONTENTS, window, spec.stored_type))
        windows: Any = list.__class_getitem__(window)
        for name in TIMERS.values():
            self.state.register(MapStateDescriptor(name, int, windows))
        made = spec.accumulator_type if spec.aggregate is not None else spec.element_type
        self._held = Declared(
            "the accumulator of a window" if spec.aggregate is not None else "the reduced value of a window", "", made
        )
        self._triggers = _TriggerContext(self)
        self._functions = _FunctionContext(self)

    def open(self, context: Callable[[KeyedStateBackend | None], RuntimeContext]) -> None:
        for function in self.spec.functions:
            function.open(context(self.state))

    def close(self) -> None:
        for function in self.spec.functions:
            function.close()

    def select(self, key: Any) -> None:
        super().select(key)
        self._ordered = None

    # Elements

    def process(self, records: Sequence[Any], timestamps: Sequence[int | None]) -> None:
        self._domain, self._generation = None, -1
        if self._by_pane is not None and None not in timestamps:
            self._process_by_pane(*self._by_pane, records, timestamps)  # type: ignore[arg-type]
        elif self._gap is not None and None not in timestamps:
            self._process_by_session(self._gap, records, timestamps)  # type: ignore[arg-type]
        else:
            self._one_by_one(records, timestamps)

    def _one_by_one(self, records: Sequence[Any], timestamps: Sequence[int | None]) -> None:
        record = None
        try:
            for record, timestamp in zip(records, timestamps, strict=True):
                self._element(record, timestamp)
        except Exception as error:
            raise user_failure(error, self.where, _suspect(self.spec), record) from error

    def _process_by_pane(self, slide: int, offset: int, records: Sequence[Any], timestamps: Sequence[int]) -> None:
        """Elements of one pane, which are in the same windows, in one go."""
        panes = [t - (t - offset) % slide for t in timestamps]
        start, size = 0, len(panes)
        while start < size:
            pane, end = panes[start], start + 1
            while end < size and panes[end] == pane:
                end += 1
            windows: Sequence[Any] = self.spec.assigner.assign_windows(None, timestamps[start], 0)
            if windows and windows[0].max_timestamp() > self.watermark:
                for window in windows:
                    self._add_all(window, records[start:end])
            else:
                self._one_by_one(records[start:end], timestamps[start:end])
            start = end

    def _process_by_session(self, gap: int, records: Sequence[Any], timestamps: Sequence[int]) -> None:
        """Elements that follow one another in one session, in one go; those that would be late alone, one by one."""
        first: int | None = None
        low = high = 0
        for number, moment in enumerate(timestamps):
            if first is not None and moment <= high and low <= moment + gap and moment + gap - 1 > self.watermark:
                low, high = min(low, moment), max(high, moment + gap)
                continue
            if first is not None:
                self._add_all(self._merged(TimeWindow(low, high)), records[first:number])
            if moment + gap - 1 > self.watermark:
                first, low, high = number, moment, moment + gap
            else:
                first = None
                self._one_by_one(records[number : number + 1], timestamps[number : number + 1])
        if first is not None:
            self._add_all(self._merged(TimeWindow(low, high)), records[first:])

    def _element(self, record: Any, timestamp: int | None) -> None:
        spec = self.spec
        if timestamp is None and spec.assigner.is_event_time:
            raise RecordTypeError(
                f"{self.where}: a record has no event time: {record!r}; assign timestamps before the window"
            )
        self._timestamp = timestamp
        skipped = True
        for assigned in spec.assigner.assign_windows(
            record, MIN_TIMESTAMP if timestamp is None else timestamp, self.clock()
        ):
            window = assigned if self._merging is None else self._merged(assigned)
            if self._is_late(window):
                continue
            skipped = False
            self._add(window, record, timestamp)
            self._act(spec.trigger.on_element(record, timestamp, window, self._triggers.of(window)), window)
            self._register_cleanup(window)
        if (
            skipped
            and spec.assigner.is_event_time
            and timestamp is not None
            and timestamp + spec.lateness <= self.watermark
        ):
            if spec.late_tag is not None:
                self.out.emit_side(spec.late_tag, record, timestamp)
            else:
                self._metrics.count("late records dropped")

    def _is_late(self, window: Any) -> bool:
        return self.spec.assigner.is_event_time and self._cleanup_time(window) <= self.watermark

    def _add(self, window: Any, record: Any, timestamp: int | None) -> None:
        spec, windows = self.spec, self.state.current.setdefault(CONTENTS, {})
        held = windows.get(window)
        if spec.evictor is not None:
            record = (record, timestamp)
        elif spec.aggregate is not None:
            windows[window] = self._checked(
                spec.aggregate.add(record, spec.aggregate.create_accumulator() if held is None else held)
            )
            return
        elif spec.reduce is not None:
            windows[window] = record if held is None else self._checked(self._reduce(held, record))
            return
        if held is None:
            windows[window] = [record]
        else:
            held.append(record)

    def _add_all(self, window: Any, records: Sequence[Any]) -> None:
        """Elements into a window that fires once, at its end, which is still to come."""
        spec, windows = self.spec, self.state.current.setdefault(CONTENTS, {})
        held = windows.get(window)
        record = None
        try:
            if spec.aggregate is not None:
                add = spec.aggregate.add
                if held is None:
                    held = spec.aggregate.create_accumulator()
                for record in records:
                    held = add(record, held)
                self._checked(held)
            elif spec.reduce is not None:
                held = self._checked(
                    reduce(self._reduce, records) if held is None else reduce(self._reduce, records, held)
                )
            elif held is None:
                held = list(records)
            else:
                held += records
        except Exception as error:
            raise user_failure(error, self.where, _suspect(spec), records[0] if record is None else record) from error
        windows[window] = held
        self._register(window, window.max_timestamp(), TimeDomain.EVENT_TIME)
        self._register_cleanup(window)

    def _checked(self, held: Any) -> Any:
        """What an author's function made of a window's elements, which is state."""
        if type(held) not in self._held.fit.exact:
            self.state.look(self._held, held)
        return held

    # Merging

    def _merged(self, window: Any) -> Any:
        """The window that `window` becomes together with those of the key that it touches."""
        windows = self.state.current.setdefault(CONTENTS, {})
        if self._ordered is None:
            self._ordered = sorted(windows)
        ordered = self._ordered
        cover, parts = self._touching(ordered, window)
        if not parts:
            if not self._is_late(cover):
                insort(ordered, cover)
            return cover
        if parts == [cover]:
            return cover
        if self._is_late(cover):
            raise PipelineError(
                f"{self.where}: {cover} came of merging and is already over; a merged window may not end before the"
                " watermark"
            )
        held = [h for h in (windows.pop(part, None) for part in parts) if h is not None]
        for part in parts:
            del ordered[bisect_left(ordered, part)]
        insort(ordered, cover)
        windows[cover] = self._combined(held)
        trigger = self.spec.trigger
        trigger.on_merge(cover, self._triggers.of(cover, parts))
        for part in parts:
            if part != cover:
                trigger.clear(part, self._triggers.of(part))
                self._unregister(part, self._cleanup_time(part), self._cleanup_domain())
        return cover

    def _touching(self, ordered: list[Any], window: Any) -> tuple[Any, list[Any]]:
        if not self._sessions:
            assert self._merging is not None
            groups = self._merging.merge_windows([*[w for w in ordered if w != window], window])
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

    def _combined(self, held: list[Any]) -> Any:
        """What merged windows hold, together; the longest list takes in the others."""
        spec = self.spec
        if spec.evictor is None and spec.aggregate is not None:
            return self._checked(reduce(spec.aggregate.merge, held)) if held else None
        if spec.evictor is None and spec.reduce is not None:
            return self._checked(reduce(self._reduce, held)) if held else None
        if not held:
            return []
        whole: list[Any] = held[0]
        for more in held[1:]:
            whole += more
        return whole

    # Results

    def _act(self, result: TriggerResult, window: Any) -> None:
        if result is TriggerResult.CONTINUE:
            return
        windows = self.state.current.get(CONTENTS) or {}
        held = windows.get(window)
        if result.fires and held is not None:
            self._emit(window, held, windows)
        if result.purges and held is not None:
            if self._merging is None:
                self._forget(CONTENTS, window)
            else:
                windows[window] = [] if isinstance(held, list) else None

    def _emit(self, window: Any, held: Any, windows: Any) -> None:
        spec, kept = self.spec, None
        elements: Iterable[Any]
        if spec.evictor is not None:
            kept = spec.evictor.evict_before(held, window)
            elements = [record for record, _ in kept]
            elements = self._folded(elements)
        elif spec.aggregate is not None:
            elements = [spec.aggregate.get_result(held)]
        else:
            elements = [held] if spec.reduce is not None else held
        at = window.max_timestamp()
        self._timestamp = at
        function = spec.function
        if function is None:
            self.out.emit_all(elements, at)
        elif isinstance(function, ProcessWindowFunction):
            self.out.emit_all(function.process(self.key, self._functions.of(window), elements), at)
        else:
            self.out.emit_all(function.apply(self.key, window, elements), at)
        if kept is not None and spec.evictor is not None:
            windows[window] = list(spec.evictor.evict_after(kept, window))

    def _folded(self, elements: list[Any]) -> list[Any]:
        """What a function is given of a window with an evictor, which is reduced or aggregated only now."""
        spec = self.spec
        if not elements or (spec.reduce is None and spec.aggregate is None):
            return elements
        if spec.aggregate is None:
            return [reduce(self._reduce, elements)]
        accumulator = spec.aggregate.create_accumulator()
        for element in elements:
            accumulator = spec.aggregate.add(element, accumulator)
        return [spec.aggregate.get_result(accumulator)]

    # Timers

    def on_timer(self, timestamp: int, generation: int, domain: TimeDomain) -> None:
        self._begin_timer(timestamp, generation, domain)
        waiting = self.state.current.get(TIMERS[domain])
        windows = waiting.get(timestamp) if waiting else None
        self._forget(TIMERS[domain], timestamp)
        try:
            for window in windows or ():
                context = self._triggers.of(window)
                if domain is TimeDomain.EVENT_TIME:
                    self._act(self.spec.trigger.on_event_time(timestamp, window, context), window)
                else:
                    self._act(self.spec.trigger.on_processing_time(timestamp, window, context), window)
                if domain is self._cleanup_domain() and timestamp == self._cleanup_time(window):
                    self._clear(window)
        except Exception as error:
            raise user_failure(
                error, self.where, _suspect(self.spec), f"windows {windows} of key {self.key!r}"
            ) from error

    def _register(self, window: Any, timestamp: int, domain: TimeDomain) -> None:
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

    def _unregister(self, window: Any, timestamp: int, domain: TimeDomain) -> None:
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

    def _cleanup_domain(self) -> TimeDomain:
        return TimeDomain.EVENT_TIME if self.spec.assigner.is_event_time else TimeDomain.PROCESSING_TIME

    def _cleanup_time(self, window: Any) -> int:
        last: int = window.max_timestamp()
        return min(last + self.spec.lateness, MAX_TIMESTAMP) if self.spec.assigner.is_event_time else last

    def _register_cleanup(self, window: Any) -> None:
        moment = self._cleanup_time(window)
        if moment < MAX_TIMESTAMP:
            self._register(window, moment, self._cleanup_domain())

    def _clear(self, window: Any) -> None:
        self._forget(CONTENTS, window)
        if self._ordered is not None and window in self._ordered:
            self._ordered.remove(window)
        self.spec.trigger.clear(window, self._triggers.of(window))
        if isinstance(self.spec.function, ProcessWindowFunction):
            self.spec.function.clear(self._functions.of(window))

    def _forget(self, name: str, entry: Any) -> None:
        """Takes an entry out of a map of the current key, and the map where it was the last."""
        held = self.state.current.get(name)
        if held:
            held.pop(entry, None)
        if held is not None and not len(held):
            self.state.current.pop(name, None)


def _by_pane(spec: Windowing) -> tuple[int, int] | None:
    """Slide and offset, where elements of one pane may be taken in one go: windows by event time that fire once, at
    their end.
    """
    simple = (
        isinstance(spec.assigner, AlignedEventTimeWindows)
        and type(spec.trigger) is EventTimeTrigger
        and spec.evictor is None
    )
    if not simple or spec.assigner.size % spec.assigner.slide:  # type: ignore[attr-defined]
        return None
    return spec.assigner.slide, spec.assigner.offset  # type: ignore[attr-defined]


def _gap(spec: Windowing) -> int | None:
    """The gap of sessions by event time that fire once, at their end."""
    simple = (
        type(spec.assigner) is EventTimeSessionWindows
        and type(spec.trigger) is EventTimeTrigger
        and spec.evictor is None
    )
    gap = spec.assigner.gap if simple else None  # type: ignore[attr-defined]
    return gap if isinstance(gap, int) else None


def _suspect(spec: Windowing) -> Any:
    """The function that an error is looked for in."""
    for function, method in ((spec.function, "process"), (spec.aggregate, "add"), (spec.reduce, "reduce")):
        if function is not None:
            return getattr(function, method, function)
    return spec.trigger.on_element


class _Scope(StateBackend):
    """State of one window of the current key: each state is a map by window in the key's own state."""

    def __init__(self, operator: WindowOperator, prefix: str) -> None:
        super().__init__(operator.clock)
        self._operator, self._prefix = operator, prefix
        self.window: Any = None
        self.current = _WindowCells(self)

    def look(self, declared: Declared, value: Any) -> None:
        self._operator.state.look(declared, value)

    def look_at_latest(self, declared: Declared, value: Any) -> None:
        self._operator.state.look(declared, value)  # the latest is by key, and a key has one value for each window

    def on_first(self, descriptor: StateDescriptor[Any]) -> None:
        window = self._operator.spec.assigner.window_type
        self._operator.state.register(MapStateDescriptor(self.name(descriptor.name), window, descriptor.stored_type))

    def name(self, name: str) -> str:
        """A state's name among the key's."""
        return f"{self._prefix} {name}"

    @property
    def of_key(self) -> dict[str, Any]:
        """The state of the current key."""
        return self._operator.state.current


class _WindowCells:
    """The states of a scope's window, each an entry of a map in the key's state."""

    def __init__(self, scope: _Scope) -> None:
        self._scope = scope

    def get(self, name: str) -> Any:
        held = self._scope.of_key.get(self._scope.name(name))
        return held.get(self._scope.window) if held else None

    def __setitem__(self, name: str, value: Any) -> None:
        self._scope.of_key.setdefault(self._scope.name(name), {})[self._scope.window] = value

    def setdefault(self, name: str, value: Any) -> Any:
        held = self.get(name)
        if held is None:
            self[name] = held = value
        return held

    def pop(self, name: str, default: Any) -> Any:
        full = self._scope.name(name)
        held = self._scope.of_key.get(full)
        if not held:
            return default
        value = held.pop(self._scope.window, default)
        if not len(held):
            self._scope.of_key.pop(full, None)
        return value


class _TriggerContext(OnMergeContext):
    def __init__(self, operator: WindowOperator) -> None:
        self._operator = operator
        self._scope = _Scope(operator, "trigger")
        self._merged: Sequence[Any] = ()

    def of(self, window: Any, merged: Sequence[Any] = ()) -> _TriggerContext:
        self._scope.window, self._merged = window, merged
        return self

    def get_current_watermark(self) -> int:
        return self._operator.watermark

    def get_current_processing_time(self) -> int:
        return self._operator.read_clock()

    def register_event_time_timer(self, timestamp: int) -> None:
        self._operator._register(self._scope.window, timer_time(timestamp), TimeDomain.EVENT_TIME)

    def register_processing_time_timer(self, timestamp: int) -> None:
        self._operator._register(self._scope.window, timer_time(timestamp), TimeDomain.PROCESSING_TIME)

    def delete_event_time_timer(self, timestamp: int) -> None:
        self._operator._unregister(self._scope.window, timestamp, TimeDomain.EVENT_TIME)

    def delete_processing_time_timer(self, timestamp: int) -> None:
        self._operator._unregister(self._scope.window, timestamp, TimeDomain.PROCESSING_TIME)

    def get_partitioned_state(self, descriptor: StateDescriptor[Any]) -> Any:
        return self._scope.bind(descriptor)

    def early_results(self) -> bool:
        return self._operator.options.incremental_updates

    def merge_partitioned_state(self, descriptor: StateDescriptor[Any]) -> None:
        scope, into = self._scope, self._scope.window
        found = []
        for window in self._merged:
            scope.window = window
            value = scope.current.pop(descriptor.name, None)
            if value is not None:
                found.append(value)
        scope.window = into
        if not found:
            return
        state: State = scope.bind(descriptor)
        try:
            state.merge(found)
        except UnsupportedError as error:
            raise UnsupportedError(f"{self._operator.where}: {error}") from error


class _FunctionContext(ProcessWindowFunction.Context[Any]):
    def __init__(self, operator: WindowOperator) -> None:
        self._operator = operator
        self._scope = _Scope(operator, "window")
        self._of_window, self._of_key = BackendStore(self._scope), BackendStore(operator.state)

    def of(self, window: Any) -> _FunctionContext:
        self._scope.window = window
        return self

    def window(self) -> Any:
        return self._scope.window

    def current_processing_time(self) -> int:
        return self._operator.read_clock()

    def current_watermark(self) -> int:
        return self._operator.watermark

    def window_state(self) -> KeyedStateStore:
        return self._of_window

    def global_state(self) -> KeyedStateStore:
        return self._of_key

    def output(self, tag: OutputTag[Any], value: Any) -> None:
        self._operator.out.emit_side(tag, value, self._scope.window.max_timestamp())
