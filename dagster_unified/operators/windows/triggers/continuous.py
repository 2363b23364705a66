"""Triggers that fire again and again, at the multiples of an interval."""

from __future__ import annotations

from datetime import timedelta
from typing import Any, Self

from dagster_unified.operators.state.reducing import ReducingStateDescriptor
from dagster_unified.operators.time import MAX_TIMESTAMP, checked_span
from dagster_unified.operators.windows.triggers.base import Firing, QuietTrigger, TriggerResult
from dagster_unified.operators.windows.triggers.context import OnMergeContext, TriggerContext
from dagster_unified.operators.windows.window import Window


class _Continuous(QuietTrigger):
    """Fires again and again, at the multiples of an interval, by timers of one domain.

    `_next` is when it fires next.
    """

    _next = ReducingStateDescriptor("next fire", min, int)

    def __init__(self, interval: int) -> None:
        self.interval = interval

    @classmethod
    def of(cls, interval: timedelta) -> Self:
        """Fires every `interval`."""
        return cls(checked_span(f"{cls.__name__}: the interval", interval, 1))

    def register(self, time: int, ctx: TriggerContext) -> None:
        """Registers a timer of its domain."""
        raise NotImplementedError

    def delete(self, time: int, ctx: TriggerContext) -> None:
        """Takes a timer of its domain back."""
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
        """The first time to fire, where there is none yet."""
        if ctx.get_partitioned_state(self._next).get() is None:
            self._follow(moment, window, ctx)

    def _again(self, time: int, window: Window, ctx: TriggerContext, now: int) -> TriggerResult:
        """Fires if the timer at `time` is the one to fire at; the next one is at the first multiple after `now`."""
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

    In BATCH it fires once, at the window's end. With carried state a partition is what moves the watermark, and a
    window that stays open fires once for it.

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

    In BATCH time hardly passes while a stage runs, so that it may fire at the end of a key only.

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
