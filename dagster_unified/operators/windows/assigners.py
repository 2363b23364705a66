"""Window assigners: which windows an element is in."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import TYPE_CHECKING, Any, Generic, Self, TypeAlias

from dagster_unified.errors import PipelineError, UnsupportedError
from dagster_unified.operators.functions.type_variables import In, T, WinOut
from dagster_unified.operators.state.handles import ValueStateDescriptor
from dagster_unified.operators.time import checked_span
from dagster_unified.operators.windows.triggers import (
    CountTrigger,
    EventTimeTrigger,
    NeverTrigger,
    ProcessingTimeTrigger,
    PurgingTrigger,
    Trigger,
)
from dagster_unified.operators.windows.window import CountWindow, GlobalWindow, TimeWindow

if TYPE_CHECKING:
    from dagster_unified.operators.functions.base import RuntimeContext


class WindowAssignerContext(ABC):
    """The context that an assigner gets with an element."""

    @abstractmethod
    def get_current_processing_time(self) -> int:
        """The clock, in milliseconds since the epoch."""

    @abstractmethod
    def get_runtime_context(self) -> RuntimeContext:
        """The runtime context, with the state of the element's key."""


class ByEventTime(WindowAssignerContext):
    """The context of windows by event time alone, which are assigned without running an operator."""

    def get_current_processing_time(self) -> int:
        raise UnsupportedError("windows by event time do not read the clock; use the element's timestamp")

    def get_runtime_context(self) -> RuntimeContext:
        raise UnsupportedError("windows by event time have no state; use the element's timestamp")


class WindowAssigner(ABC, Generic[In, WinOut]):
    """Assigns each element to windows (Flink: *Windows*, "Window Assigners").

    `window_type` is the type of its windows: a NamedTuple with a `max_timestamp()`.

    Examples:
        >>> class Days(WindowAssigner[Sale, TimeWindow]):
        ...     def assign_windows(self, element, timestamp, context):
        ...         start = timestamp - timestamp % 86_400_000
        ...         return [TimeWindow(start, start + 86_400_000)]
        ...     def get_default_trigger(self):
        ...         return EventTimeTrigger.create()
        >>> [sale.amount for sale in collect(timed.window_all(Days()).sum("amount"))]
        [12]
    """

    WindowAssignerContext: TypeAlias = WindowAssignerContext

    window_type: Any = TimeWindow
    is_event_time: bool = True
    """Whether windows go by event time: then elements have to have one, and may be late."""
    is_processing_time: bool = False
    """Whether windows go by the clock."""
    is_by_order: bool = False
    """Whether an element's windows depend on the elements that came before it."""

    @abstractmethod
    def assign_windows(self, element: In, timestamp: int, context: WindowAssignerContext) -> Sequence[WinOut]:
        """The windows of an element. `timestamp` is its event time, or `MIN_TIMESTAMP` where it has none."""

    def panes(self) -> tuple[int, int] | None:
        """Length and offset of panes in milliseconds, if elements of one pane share their windows; else None."""
        return None

    @abstractmethod
    def get_default_trigger(self) -> Trigger[In, WinOut]:
        """The trigger of windows whose author chooses none."""

    def describe(self) -> str:
        """For plans."""
        return type(self).__name__


class _TimeWindows(WindowAssigner[Any, TimeWindow]):
    """Windows of one size; a new one begins every `slide` milliseconds."""

    def __init__(self, size: int, slide: int, offset: int) -> None:
        self.size, self.slide, self.offset = size, slide, offset

    def windows_at(self, moment: int) -> list[TimeWindow]:
        """The windows around a moment, the earliest first."""
        size, slide = self.size, self.slide
        last = moment - (moment - self.offset) % slide
        if size == slide:
            return [TimeWindow(last, last + size)]
        return (
            [
                TimeWindow(start, start + size)
                for start in range(last - (size - 1 - (moment - last)) // slide * slide, last + slide, slide)
            ]
            if size > moment - last
            else []
        )

    def describe(self) -> str:
        every = "" if self.size == self.slide else f" every {timedelta(milliseconds=self.slide)}"
        shifted = f", offset {timedelta(milliseconds=self.offset)}" if self.offset else ""
        return f"{type(self).__name__} of {timedelta(milliseconds=self.size)}{every}{shifted}"


class _Tumbling(_TimeWindows):
    @classmethod
    def of(cls, size: timedelta, offset: timedelta = timedelta(0)) -> Self:
        """Windows of `size`, at least a millisecond, with a smaller `offset`; else raises `PipelineError`."""
        millis = _millis(cls, "size", size, at_least=1)
        return cls(millis, millis, _offset(cls, offset, millis))


class _Sliding(_TimeWindows):
    @classmethod
    def of(cls, size: timedelta, slide: timedelta, offset: timedelta = timedelta(0)) -> Self:
        """Windows of `size` every `slide`, each at least a millisecond; raises `PipelineError` for other lengths."""
        step = _millis(cls, "slide", slide, at_least=1)
        return cls(_millis(cls, "size", size, at_least=1), step, _offset(cls, offset, step))


class AlignedEventTimeWindows(_TimeWindows):
    """Tumbling and sliding windows by event time."""

    def assign_windows(self, element: Any, timestamp: int, context: WindowAssignerContext) -> Sequence[TimeWindow]:
        return self.windows_at(timestamp)

    def panes(self) -> tuple[int, int] | None:
        regular = self.size % self.slide == 0 and _keeps(self, AlignedEventTimeWindows, "assign_windows", "windows_at")
        return (self.slide, self.offset) if regular else None

    def get_default_trigger(self) -> Trigger[Any, Any]:
        return EventTimeTrigger()


class _ProcessingTime(_TimeWindows):
    is_event_time = False
    is_processing_time = True

    def assign_windows(self, element: Any, timestamp: int, context: WindowAssignerContext) -> Sequence[TimeWindow]:
        return self.windows_at(context.get_current_processing_time())

    def get_default_trigger(self) -> Trigger[Any, Any]:
        return ProcessingTimeTrigger()


class TumblingEventTimeWindows(_Tumbling, AlignedEventTimeWindows):
    """Windows of one size that follow one another, by event time, aligned with the epoch (plus `offset`).

    In BATCH they close at the end of their key, and nothing is late; in STREAMING when the watermark passes their end,
    and an element that comes later is dropped and counted, or goes to `side_output_late_data`.

    Examples:
        >>> days = timed.window_all(TumblingEventTimeWindows.of(timedelta(days=1)))
        >>> [sale.amount for sale in collect(days.sum("amount"))]
        [12]
    """


class TumblingProcessingTimeWindows(_Tumbling, _ProcessingTime):
    """Windows of one size that follow one another, by processing time.

    Their elements depend on when the job runs; in BATCH those of a key close at its end.

    Examples:
        >>> hours = TumblingProcessingTimeWindows.of(timedelta(hours=1))
        >>> harness = OneInputHarness(lambda numbers: numbers.window_all(hours).sum(), int)
        >>> harness.process_element(3), harness.process_element(4), harness.set_processing_time(3_600_000)
        ([], [], [7])
    """


class SlidingEventTimeWindows(_Sliding, AlignedEventTimeWindows):
    """Windows of one size, by event time; one begins every `slide`.

    An element is in several windows or, where the slide is longer than the size, perhaps in none. They close as
    `TumblingEventTimeWindows` do.

    Examples:
        >>> hours = timed.window_all(SlidingEventTimeWindows.of(timedelta(hours=2), timedelta(hours=1)))
        >>> [sale.amount for sale in collect(hours.sum("amount"))]
        [7, 12, 5]
    """


class SlidingProcessingTimeWindows(_Sliding, _ProcessingTime):
    """Windows of one size, by processing time; one begins every `slide`.

    Their elements depend on when the job runs. There is an example at `TumblingProcessingTimeWindows`.
    """


class MergingWindowAssigner(WindowAssigner[In, WinOut]):
    """An assigner whose windows grow together, such as sessions.

    Each element gets a window of its own, and windows that touch become one. There is an example at
    `EventTimeSessionWindows`.
    """

    def fixed_gap(self) -> int | None:
        """Milliseconds that an element's window lasts after its event time, if nothing else decides it; else None.

        Windows that touch or overlap then become one.
        """
        return None

    def merge_windows(self, windows: Sequence[Any]) -> list[tuple[Any, list[Any]]]:
        """The merged windows, each with its parts; a window that stays alone is its own part."""
        merged: list[tuple[Any, list[Any]]] = []
        for window in sorted(windows):
            if merged and merged[-1][0].intersects(window):
                cover, parts = merged[-1]
                merged[-1] = (cover.cover(window), [*parts, window])
            else:
                merged.append((window, [window]))
        return merged


class _Sessions(MergingWindowAssigner[Any, TimeWindow]):
    def __init__(self, gap: int | Callable[[Any], timedelta | int]) -> None:
        self.gap = gap

    @classmethod
    def with_gap(cls, gap: timedelta) -> Self:
        """Sessions that end when nothing has come for `gap`, of at least a millisecond."""
        return cls(_millis(cls, "gap", gap, at_least=1))

    @classmethod
    def with_dynamic_gap(cls, extractor: Callable[[T], timedelta | int]) -> MergingWindowAssigner[T, TimeWindow]:
        """Sessions with a gap for each element: `extractor` returns a timedelta or milliseconds, more than 0."""
        return cls(getattr(extractor, "extract", extractor))

    def session_at(self, element: Any, moment: int) -> TimeWindow:
        """The session of one element alone."""
        gap = self.gap
        if callable(gap):
            extracted = gap(element)
            if not isinstance(extracted, (int, timedelta)) or isinstance(extracted, bool):
                raise PipelineError(f"a session's gap is a timedelta or an int of milliseconds, not {extracted!r}")
            gap = checked_span("a session's gap", extracted) if isinstance(extracted, timedelta) else extracted
            if gap <= 0:
                raise PipelineError(f"a session's gap must be more than 0 ms, not {gap}")
        return TimeWindow(moment, moment + gap)

    def describe(self) -> str:
        return (
            f"{type(self).__name__} with"
            f" {'a gap that each element says' if callable(self.gap) else f'gap {timedelta(milliseconds=self.gap)}'}"
        )


class EventTimeSessionWindows(_Sessions):
    """Sessions by event time: elements that are less than the gap apart are together.

    In BATCH they close at the end of their key; in STREAMING when the watermark passes their last element's time by the
    gap.

    Examples:
        >>> sessions = timed.window_all(EventTimeSessionWindows.with_gap(timedelta(minutes=35)))
        >>> [sale.amount for sale in collect(sessions.sum("amount"))]
        [7, 5]
    """

    def assign_windows(self, element: Any, timestamp: int, context: WindowAssignerContext) -> Sequence[TimeWindow]:
        return [self.session_at(element, timestamp)]

    def fixed_gap(self) -> int | None:
        regular = _keeps(self, EventTimeSessionWindows, "assign_windows", "session_at", "merge_windows")
        return self.gap if regular and isinstance(self.gap, int) else None

    def get_default_trigger(self) -> Trigger[Any, Any]:
        return EventTimeTrigger()


class ProcessingTimeSessionWindows(_Sessions):
    """Sessions by processing time: their elements depend on when the job runs.

    There is an example at `EventTimeSessionWindows`.
    """

    is_event_time = False
    is_processing_time = True

    def assign_windows(self, element: Any, timestamp: int, context: WindowAssignerContext) -> Sequence[TimeWindow]:
        return [self.session_at(element, context.get_current_processing_time())]

    def get_default_trigger(self) -> Trigger[Any, Any]:
        return ProcessingTimeTrigger()


class GlobalWindows(WindowAssigner[Any, GlobalWindow]):
    """One window for everything, which ends with the input if at all (Flink: *Windows*, "Global Windows").

    Examples:
        >>> windows = sales.key_by("shop").window(GlobalWindows.create_with_end_of_stream_trigger())
        >>> sorted(sale.amount for sale in collect(windows.max_by("amount"), "STREAMING"))
        [4, 5]
    """

    window_type = GlobalWindow
    is_event_time = False

    def __init__(self, ends: bool = False) -> None:
        self.ends = ends

    @classmethod
    def create(cls) -> Self:
        """For a trigger of yours: elements for which it never fires until the input ends emit nothing, in both modes.

        There is an example at `PurgingTrigger`.
        """
        return cls()

    @classmethod
    def create_with_end_of_stream_trigger(cls) -> Self:
        """Fires once for each key, when the input has ended, in both modes."""
        return cls(ends=True)

    def assign_windows(self, element: Any, timestamp: int, context: WindowAssignerContext) -> Sequence[GlobalWindow]:
        return (GlobalWindow(),)

    def get_default_trigger(self) -> Trigger[Any, Any]:
        return EventTimeTrigger() if self.ends else NeverTrigger()


class _ByCount(WindowAssigner[Any, CountWindow]):
    """Windows of `size` elements of a key; one begins at every `slide` elements."""

    window_type = CountWindow
    is_event_time = False
    is_by_order = True
    _count: ValueStateDescriptor[int]

    def __init__(self, size: int, slide: int) -> None:
        if size < 1 or slide < 1:
            raise PipelineError(
                f"{type(self).__name__}: size and slide have to be at least 1, and are {size} and {slide}"
            )
        self.size, self.slide = size, slide

    def assign_windows(self, element: Any, timestamp: int, context: WindowAssignerContext) -> Sequence[CountWindow]:
        state = context.get_runtime_context().get_state(self._count)
        before = state.value() or 0
        state.update(before + 1)
        last = before // self.slide
        first = max((before - self.size) // self.slide + 1, 0)
        return [CountWindow(number) for number in range(first, last + 1)]

    def get_default_trigger(self) -> Trigger[Any, Any]:
        return PurgingTrigger.of(CountTrigger.of(self.size))


class CountTumblingWindowAssigner(_ByCount):
    """Windows of this many elements of a key, one after another, as the elements come.

    A window fires when it is full; elements left over at the end of the input emit nothing. Which elements are together
    depends on their order, and so on the mode.

    Examples:
        >>> class Numbered(ProcessWindowFunction[Sale, str, str, CountWindow]):
        ...     def process(self, key: str, context: ProcessWindowFunction.Context, elements: list[Sale]) -> list[str]:
        ...         return [f"{key}, window {context.window().id}: {[sale.amount for sale in elements]}"]
        >>> collect(timed.key_by("shop").window(CountTumblingWindowAssigner.of(2)).process(Numbered()))
        ['north, window 0: [3, 5]']
    """

    _count = ValueStateDescriptor("tumble-count-assigner", int)

    @classmethod
    def of(cls, window_size: int) -> Self:
        """Windows of `window_size` elements."""
        return cls(window_size, window_size)

    def describe(self) -> str:
        return f"{type(self).__name__} of {self.size}"


class CountSlidingWindowAssigner(_ByCount):
    """Windows of this many elements of a key; one begins at every `window_slide` elements.

    A window fires when it is full; elements left over at the end of the input emit nothing. Which elements are together
    depends on their order, and so on the mode.

    Examples:
        >>> pairs = timed.window_all(CountSlidingWindowAssigner.of(2, 1))
        >>> [sale.amount for sale in collect(pairs.sum("amount"))]
        [7, 9]
    """

    _count = ValueStateDescriptor("slide-count-assigner", int)

    @classmethod
    def of(cls, window_size: int, window_slide: int) -> Self:
        """Windows of `window_size` elements; one begins at every `window_slide` elements."""
        return cls(window_size, window_slide)

    def describe(self) -> str:
        return f"{type(self).__name__} of {self.size} every {self.slide}"


def _keeps(assigner: object, base: type, *methods: str) -> bool:
    """Whether an assigner's class has not overridden these methods of `base`."""
    return all(getattr(type(assigner), name) is getattr(base, name) for name in methods)


def _offset(kind: type, offset: timedelta, period: int) -> int:
    millis = _millis(kind, "offset", offset, at_least=-period + 1)
    if abs(millis) >= period:
        raise PipelineError(f"{kind.__name__}: the offset has to be smaller than the period, and is {offset}")
    return millis


def _millis(kind: type, what: str, length: timedelta, at_least: int) -> int:
    return checked_span(f"{kind.__name__}: the {what}", length, at_least)
