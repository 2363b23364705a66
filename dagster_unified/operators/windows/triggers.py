"""Triggers: when a window emits its result, and whether it keeps its elements then.

A trigger sees each element and each timer that it registered; its memory is state of its key and window. A new trigger
is a class here, or anywhere: it declares when it fires (`firing`) and whether elements may be taken many at a time
(`only_registers_end`), and nothing else knows it.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from datetime import timedelta
from enum import Enum
from typing import TYPE_CHECKING, Any, Generic, Self, TypeAlias

from dagster_unified.errors import PipelineError, UnsupportedError
from dagster_unified.operators.functions.type_variables import In, R, T, W, Win
from dagster_unified.operators.state.descriptors import StateDescriptor
from dagster_unified.operators.state.handles import ReducingStateDescriptor, ValueStateDescriptor
from dagster_unified.operators.time import MAX_TIMESTAMP, checked_span
from dagster_unified.operators.windows.window import Window
from dagster_unified.values import check_count

if TYPE_CHECKING:
    from typing_extensions import TypeForm


class TriggerContext(ABC):
    """Time, timers and state of the current key and window."""

    @abstractmethod
    def get_current_watermark(self) -> int:
        """Event time, in milliseconds since the epoch; in BATCH `MIN_TIMESTAMP` until the key's end."""

    @abstractmethod
    def get_current_processing_time(self) -> int:
        """The clock, in milliseconds since the epoch."""

    @abstractmethod
    def register_event_time_timer(self, timestamp: int) -> None:
        """Call `on_event_time` for this window once the watermark reaches `timestamp`."""

    @abstractmethod
    def register_processing_time_timer(self, timestamp: int) -> None:
        """Call `on_processing_time` for this window once the clock reaches `timestamp`."""

    @abstractmethod
    def delete_event_time_timer(self, timestamp: int) -> None:
        """Delete a timer."""

    @abstractmethod
    def delete_processing_time_timer(self, timestamp: int) -> None:
        """Delete a timer."""

    @abstractmethod
    def get_partitioned_state(self, descriptor: StateDescriptor[R]) -> R:
        """State of this key and window."""

    def early_results(self) -> bool:
        """Whether results before a window's end are wanted: by default in STREAMING only.

        The option is `execution.incremental-updates`.
        """
        return True


class OnMergeContext(TriggerContext):
    """The context that `on_merge` gets, with the state of the windows that were merged."""

    @abstractmethod
    def merge_partitioned_state(self, descriptor: StateDescriptor[Any]) -> None:
        """Merge reducing, aggregating or list state of the merged windows into the new window's."""


class TriggerResult(Enum):
    """The decision about a window; there is an example at `Trigger`."""

    CONTINUE = (False, False)
    FIRE = (True, False)
    PURGE = (False, True)
    FIRE_AND_PURGE = (True, True)

    def is_fire(self) -> bool:
        """Whether the window's function is called."""
        return self.value[0]

    def is_purge(self) -> bool:
        """Whether the window's elements are dropped."""
        return self.value[1]


class Firing(Enum):
    """The condition of a trigger's firing; there is an example at `Trigger`.

    It decides whether BATCH and STREAMING have the same results.
    """

    UNDECLARED = "not declared"
    """The trigger does not declare it. The lint notes it."""

    EVENT_TIME = "event time"
    """Event time alone, and once for each window except for late elements: both modes have the same results."""

    EARLY = "event time, also before the end"
    """In STREAMING also before a window's end; in BATCH there are no early results."""

    ELEMENTS = "elements"
    """The elements so far, and so their order."""

    CLOCK = "processing time"
    """The clock."""


class Trigger(ABC, Generic[In, Win]):
    """Decides when a window emits its result (Flink: *Windows*, "Triggers").

    A trigger declares what follows from its code, so that the lint and the operator need not know it. The declarations
    are not inherited: a subclass may do something else, and repeats them where it does not. In BATCH event-time timers
    fire at the end of a key, in STREAMING as the watermark passes them.

    Examples:
        >>> class OnLarge(Trigger[Sale, TimeWindow]):
        ...     firing = Firing.ELEMENTS
        ...     def on_element(self, element, timestamp, window, ctx):
        ...         return TriggerResult.FIRE if element.amount > 3 else TriggerResult.CONTINUE
        ...     def on_event_time(self, time, window, ctx):
        ...         return TriggerResult.CONTINUE
        ...     def on_processing_time(self, time, window, ctx):
        ...         return TriggerResult.CONTINUE
        ...     def clear(self, window, ctx):
        ...         pass
        >>> day = timed.window_all(TumblingEventTimeWindows.of(timedelta(days=1)))
        >>> [sale.amount for sale in collect(day.trigger(OnLarge()).sum("amount"), "STREAMING")]
        [7, 12]
    """

    TriggerContext: TypeAlias = TriggerContext
    OnMergeContext: TypeAlias = OnMergeContext

    firing: Firing = Firing.UNDECLARED
    """The condition of its firing."""

    only_registers_end: bool = False
    """Whether `on_element` only registers an event-time timer at a window's end that is still to come.

    Then elements are added to a window many at a time, and `on_element` is not called for them.
    """

    def __init_subclass__(cls, **named: Any) -> None:
        super().__init_subclass__(**named)
        cls.firing = cls.__dict__.get("firing", Firing.UNDECLARED)
        cls.only_registers_end = cls.__dict__.get("only_registers_end", False)

    @abstractmethod
    def on_element(self, element: In, timestamp: int | None, window: Win, ctx: TriggerContext) -> TriggerResult:
        """Called when an element has come into a window."""

    @abstractmethod
    def on_event_time(self, time: int, window: Win, ctx: TriggerContext) -> TriggerResult:
        """Called for an event-time timer of the window, and when the window is cleaned up."""

    @abstractmethod
    def on_processing_time(self, time: int, window: Win, ctx: TriggerContext) -> TriggerResult:
        """Called for a processing-time timer of the window, and when the window is cleaned up."""

    def can_merge(self) -> bool:
        """Whether it can be used with merging windows."""
        return False

    def on_merge(self, window: Win, ctx: OnMergeContext) -> None:
        """Called when windows have become one: merge their state and timers into its own."""
        raise UnsupportedError(
            f"{type(self).__name__} does not work with windows that merge; give it can_merge() and on_merge()"
        )

    @abstractmethod
    def clear(self, window: Win, ctx: TriggerContext) -> None:
        """Called when the window is gone: delete its timers and state."""


class QuietTrigger(Trigger[Any, Window]):
    """Does nothing when a timer fires, unless overridden."""

    def on_event_time(self, time: int, window: Window, ctx: TriggerContext) -> TriggerResult:
        return TriggerResult.CONTINUE

    def on_processing_time(self, time: int, window: Window, ctx: TriggerContext) -> TriggerResult:
        return TriggerResult.CONTINUE


class _Continuous(QuietTrigger):
    """Fires again and again, at the multiples of an interval, by timers of one domain.

    `_next` is when it fires next.
    """

    _next = ReducingStateDescriptor("next fire", min, int)

    def __init__(self, interval: int) -> None:
        self.interval = interval

    @classmethod
    def of(cls, interval: timedelta) -> Self:
        """Fire every `interval`."""
        return cls(checked_span(f"{cls.__name__}: the interval", interval, 1))

    def register(self, time: int, ctx: TriggerContext) -> None:
        """Register a timer of its domain."""
        raise NotImplementedError

    def delete(self, time: int, ctx: TriggerContext) -> None:
        """Delete a timer of its domain."""
        raise NotImplementedError

    def can_merge(self) -> bool:
        return True

    def on_merge(self, window: Window, ctx: OnMergeContext) -> None:
        ctx.merge_partitioned_state(self._next)
        following = ctx.get_partitioned_state(self._next).get()
        if following is not None:
            self.register(following, ctx)

    def clear(self, window: Window, ctx: TriggerContext) -> None:
        state = ctx.get_partitioned_state(self._next)
        following = state.get()
        if following is not None:
            self.delete(following, ctx)
            state.clear()

    def _begin(self, moment: int, window: Window, ctx: TriggerContext) -> None:
        """Register the first time to fire, where there is none yet."""
        if ctx.get_partitioned_state(self._next).get() is None:
            self._follow(moment, window, ctx)

    def _again(self, time: int, window: Window, ctx: TriggerContext, now: int) -> TriggerResult:
        """Fire if the timer at `time` is the current one; the next is at the first multiple after `now`."""
        state = ctx.get_partitioned_state(self._next)
        if state.get() != time:
            return TriggerResult.CONTINUE
        state.clear()
        self._follow(now, window, ctx)
        return TriggerResult.FIRE

    def _follow(self, moment: int, window: Window, ctx: TriggerContext) -> None:
        time = min(moment - moment % self.interval + self.interval, window.max_timestamp())
        ctx.get_partitioned_state(self._next).add(time)
        self.register(time, ctx)


class ContinuousEventTimeTrigger(_Continuous):
    """Fires each time the watermark passes a multiple of an interval, and at the window's end.

    In BATCH it fires once, at the window's end. With carried state each partition moves the watermark, and a window
    that stays open fires once for it.

    Examples:
        >>> shift = timed.window_all(TumblingEventTimeWindows.of(timedelta(hours=4)))
        >>> totals = shift.trigger(ContinuousEventTimeTrigger.of(timedelta(hours=1))).sum("amount")
        >>> [sale.amount for sale in collect(totals)], [sale.amount for sale in collect(totals, "STREAMING")]
        ([12], [12, 12, 12])
    """

    firing = Firing.EARLY

    def register(self, time: int, ctx: TriggerContext) -> None:
        ctx.register_event_time_timer(time)

    def delete(self, time: int, ctx: TriggerContext) -> None:
        ctx.delete_event_time_timer(time)

    def on_element(self, element: Any, timestamp: int | None, window: Window, ctx: TriggerContext) -> TriggerResult:
        if window.max_timestamp() <= ctx.get_current_watermark():
            return TriggerResult.FIRE
        self.register(window.max_timestamp(), ctx)
        if timestamp is not None:
            self._begin(timestamp, window, ctx)
        return TriggerResult.CONTINUE

    def on_event_time(self, time: int, window: Window, ctx: TriggerContext) -> TriggerResult:
        if time == window.max_timestamp():
            return TriggerResult.FIRE
        watermark = ctx.get_current_watermark()
        if window.max_timestamp() > watermark:
            return self._again(time, window, ctx, time if ctx.early_results() else watermark)
        if ctx.early_results() and window.max_timestamp() < MAX_TIMESTAMP:
            return self._again(time, window, ctx, time)
        return TriggerResult.CONTINUE  # the result at the window's end follows

    def on_merge(self, window: Window, ctx: OnMergeContext) -> None:
        self.register(window.max_timestamp(), ctx)
        super().on_merge(window, ctx)

    def clear(self, window: Window, ctx: TriggerContext) -> None:
        super().clear(window, ctx)
        self.delete(window.max_timestamp(), ctx)


class ContinuousProcessingTimeTrigger(_Continuous):
    """Fires each time the clock passes a multiple of an interval, as long as elements come.

    In BATCH time hardly passes while a stage runs, so that it may fire only at the end of a key.

    Examples:
        >>> trigger = ContinuousProcessingTimeTrigger.of(timedelta(minutes=1))
        >>> build = lambda numbers: numbers.window_all(GlobalWindows.create()).trigger(trigger).sum()
        >>> harness = OneInputHarness(build, int)
        >>> harness.process_element(3), harness.set_processing_time(60_000)
        ([], [3])
    """

    firing = Firing.CLOCK

    def register(self, time: int, ctx: TriggerContext) -> None:
        ctx.register_processing_time_timer(time)

    def delete(self, time: int, ctx: TriggerContext) -> None:
        ctx.delete_processing_time_timer(time)

    def on_element(self, element: Any, timestamp: int | None, window: Window, ctx: TriggerContext) -> TriggerResult:
        self._begin(ctx.get_current_processing_time(), window, ctx)
        return TriggerResult.CONTINUE

    def on_processing_time(self, time: int, window: Window, ctx: TriggerContext) -> TriggerResult:
        return self._again(time, window, ctx, time)


class _Counting(QuietTrigger):
    _count = ReducingStateDescriptor("count", lambda a, b: a + b, int)

    def clear(self, window: Window, ctx: TriggerContext) -> None:
        ctx.get_partitioned_state(self._count).clear()


class CountTrigger(_Counting):
    """Fires whenever `count` elements have come, in both modes; elements that are left over do not fire it.

    Examples:
        >>> day = timed.window_all(TumblingEventTimeWindows.of(timedelta(days=1)))
        >>> [sale.amount for sale in collect(day.trigger(CountTrigger.of(2)).sum("amount"))]
        [7]
    """

    firing = Firing.ELEMENTS

    def __init__(self, count: int) -> None:
        self.count = count

    @classmethod
    def of(cls, count: int) -> Self:
        """Fire at every `count` elements."""
        check_count("CountTrigger: the count", count)
        return cls(count)

    def on_element(self, element: Any, timestamp: int | None, window: Window, ctx: TriggerContext) -> TriggerResult:
        state = ctx.get_partitioned_state(self._count)
        state.add(1)
        if (state.get() or 0) < self.count:
            return TriggerResult.CONTINUE
        state.clear()
        return TriggerResult.FIRE

    def can_merge(self) -> bool:
        return True

    def on_merge(self, window: Window, ctx: OnMergeContext) -> None:
        ctx.merge_partitioned_state(self._count)


class SlidingCountTrigger(_Counting):
    """Fires at the first `size` elements, and then at every `slide` more.

    Sliding count windows use it, with an evictor that keeps the last `size`.
    """

    firing = Firing.ELEMENTS

    def __init__(self, size: int, slide: int) -> None:
        if size < 1 or slide < 1:
            raise PipelineError(
                f"count windows have to have a size and a slide of at least 1, and have {size} and {slide}"
            )
        self.size, self.slide = size, slide

    def on_element(self, element: Any, timestamp: int | None, window: Window, ctx: TriggerContext) -> TriggerResult:
        state = ctx.get_partitioned_state(self._count)
        state.add(1)
        beyond = (state.get() or 0) - self.size
        return TriggerResult.FIRE if beyond >= 0 and beyond % self.slide == 0 else TriggerResult.CONTINUE


class DeltaTrigger(QuietTrigger):
    """Fires when an element is further than a threshold from the element at which it last fired.

    Before it has fired, the first element counts. Elements come in the order of event time in BATCH and of arrival in
    STREAMING.

    Examples:
        >>> day = timed.window_all(TumblingEventTimeWindows.of(timedelta(days=1)))
        >>> grown = DeltaTrigger.of(1, lambda last, sale: sale.amount - last.amount, Sale)
        >>> [sale.amount for sale in collect(day.trigger(grown).sum("amount"))]
        [12]
    """

    firing = Firing.ELEMENTS

    def __init__(
        self, threshold: float, delta_function: Callable[[Any, Any], float], element_type: TypeForm[Any]
    ) -> None:
        self.threshold = threshold
        self.delta_function = getattr(delta_function, "get_delta", delta_function)
        self._last = ValueStateDescriptor("last element", element_type)

    @classmethod
    def of(
        cls, threshold: float, delta_function: Callable[[T, T], float], element_type: TypeForm[T]
    ) -> Trigger[T, Window]:
        """Fire where `delta_function(last, element)` is more than `threshold`."""
        return cls(threshold, delta_function, element_type)

    def on_element(self, element: Any, timestamp: int | None, window: Window, ctx: TriggerContext) -> TriggerResult:
        state = ctx.get_partitioned_state(self._last)
        last = state.value()
        if last is None:
            state.update(element)
            return TriggerResult.CONTINUE
        if self.delta_function(last, element) <= self.threshold:
            return TriggerResult.CONTINUE
        state.update(element)
        return TriggerResult.FIRE

    def clear(self, window: Window, ctx: TriggerContext) -> None:
        ctx.get_partitioned_state(self._last).clear()


class EventTimeTrigger(QuietTrigger):
    """Fires once the watermark passes the window's end, and then for every late element that is still allowed.

    In BATCH that is once, at the end of the key. Windows by event time have it unless they get another trigger.

    Examples:
        >>> hours = timed.window_all(TumblingEventTimeWindows.of(timedelta(hours=1)))
        >>> [sale.amount for sale in collect(hours.trigger(EventTimeTrigger.create()).sum("amount"))]
        [7, 5]
    """

    firing = Firing.EVENT_TIME
    only_registers_end = True

    @classmethod
    def create(cls) -> Self:
        """The trigger."""
        return cls()

    def on_element(self, element: Any, timestamp: int | None, window: Window, ctx: TriggerContext) -> TriggerResult:
        if window.max_timestamp() <= ctx.get_current_watermark():
            return TriggerResult.FIRE
        ctx.register_event_time_timer(window.max_timestamp())
        return TriggerResult.CONTINUE

    def on_event_time(self, time: int, window: Window, ctx: TriggerContext) -> TriggerResult:
        return TriggerResult.FIRE if time == window.max_timestamp() else TriggerResult.CONTINUE

    def can_merge(self) -> bool:
        return True

    def on_merge(self, window: Window, ctx: OnMergeContext) -> None:
        if window.max_timestamp() > ctx.get_current_watermark():
            ctx.register_event_time_timer(window.max_timestamp())

    def clear(self, window: Window, ctx: TriggerContext) -> None:
        ctx.delete_event_time_timer(window.max_timestamp())


class NeverTrigger(QuietTrigger):
    """Never fires; `GlobalWindows` have it unless they get another trigger.

    Examples:
        >>> collect(timed.window_all(GlobalWindows.create()).sum("amount"))
        []
    """

    firing = Firing.EVENT_TIME

    def on_element(self, element: Any, timestamp: int | None, window: Window, ctx: TriggerContext) -> TriggerResult:
        return TriggerResult.CONTINUE

    def can_merge(self) -> bool:
        return True

    def on_merge(self, window: Window, ctx: OnMergeContext) -> None:
        """There is nothing to merge."""

    def clear(self, window: Window, ctx: TriggerContext) -> None:
        """There is nothing to clear."""


class ProcessingTimeTrigger(QuietTrigger):
    """Fires once the clock passes the window's end; in BATCH at the end of the key.

    Windows by processing time have it unless they get another trigger. There is an example at
    `TumblingProcessingTimeWindows`.
    """

    firing = Firing.CLOCK

    @classmethod
    def create(cls) -> Self:
        """The trigger."""
        return cls()

    def on_element(self, element: Any, timestamp: int | None, window: Window, ctx: TriggerContext) -> TriggerResult:
        ctx.register_processing_time_timer(window.max_timestamp())
        return TriggerResult.CONTINUE

    def on_processing_time(self, time: int, window: Window, ctx: TriggerContext) -> TriggerResult:
        return TriggerResult.FIRE

    def can_merge(self) -> bool:
        return True

    def on_merge(self, window: Window, ctx: OnMergeContext) -> None:
        if window.max_timestamp() > ctx.get_current_processing_time():
            ctx.register_processing_time_timer(window.max_timestamp())

    def clear(self, window: Window, ctx: TriggerContext) -> None:
        ctx.delete_processing_time_timer(window.max_timestamp())


class PurgingTrigger(Trigger[In, Win]):
    """Makes another trigger empty a window when it fires, in both modes.

    Examples:
        >>> everything = timed.window_all(GlobalWindows.create())
        >>> pairs = everything.trigger(PurgingTrigger.of(CountTrigger.of(1)))
        >>> [sale.amount for sale in collect(pairs.sum("amount"))]
        [3, 4, 5]
    """

    def __init__(self, nested: Trigger[In, Win]) -> None:
        self.nested = nested
        if type(self) is PurgingTrigger:  # a subclass may do more than purge
            self.firing, self.only_registers_end = nested.firing, nested.only_registers_end

    @classmethod
    def of(cls, nested: Trigger[T, W]) -> PurgingTrigger[T, W]:
        """Turn every FIRE of `nested` into a FIRE_AND_PURGE."""
        return PurgingTrigger(nested)

    def on_element(self, element: In, timestamp: int | None, window: Win, ctx: TriggerContext) -> TriggerResult:
        return _purging(self.nested.on_element(element, timestamp, window, ctx))

    def on_event_time(self, time: int, window: Win, ctx: TriggerContext) -> TriggerResult:
        return _purging(self.nested.on_event_time(time, window, ctx))

    def on_processing_time(self, time: int, window: Win, ctx: TriggerContext) -> TriggerResult:
        return _purging(self.nested.on_processing_time(time, window, ctx))

    def can_merge(self) -> bool:
        return self.nested.can_merge()

    def on_merge(self, window: Win, ctx: OnMergeContext) -> None:
        self.nested.on_merge(window, ctx)

    def clear(self, window: Win, ctx: TriggerContext) -> None:
        self.nested.clear(window, ctx)


def _purging(result: TriggerResult) -> TriggerResult:
    return TriggerResult.FIRE_AND_PURGE if result.is_fire() else result
