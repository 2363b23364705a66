"""The trigger by processing time."""

from __future__ import annotations

from typing import Any, Self

from dagster_unified.operators.windows.triggers.base import Firing, QuietTrigger, TriggerResult
from dagster_unified.operators.windows.triggers.context import OnMergeContext, TriggerContext
from dagster_unified.operators.windows.window import Window


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
