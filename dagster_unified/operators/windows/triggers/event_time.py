"""Triggers by event time, and the one that never fires."""

from __future__ import annotations

from typing import Any, Self

from dagster_unified.operators.windows.triggers.base import Firing, QuietTrigger, TriggerResult
from dagster_unified.operators.windows.triggers.context import OnMergeContext, TriggerContext
from dagster_unified.operators.windows.window import Window


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
