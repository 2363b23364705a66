"""The trigger that makes another one purge."""

from __future__ import annotations

from dagster_unified.operators.functions.type_variables import In, T, W, Win
from dagster_unified.operators.windows.triggers.base import Trigger, TriggerResult
from dagster_unified.operators.windows.triggers.context import OnMergeContext, TriggerContext


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
        """Makes every FIRE of `nested` a FIRE_AND_PURGE."""
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
