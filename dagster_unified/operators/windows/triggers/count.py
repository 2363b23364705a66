"""Triggers that count the elements of a window."""

from __future__ import annotations

from typing import Any, Self

from dagster_unified.errors import PipelineError
from dagster_unified.operators.state.reducing import ReducingStateDescriptor
from dagster_unified.operators.windows.triggers.base import Firing, QuietTrigger, TriggerResult
from dagster_unified.operators.windows.triggers.context import OnMergeContext, TriggerContext
from dagster_unified.operators.windows.window import Window
from dagster_unified.values import check_count


class _Counting(QuietTrigger):
    """Counts the elements of a window."""

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
        """Fires at every `count` elements."""
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
