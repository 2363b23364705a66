"""The trigger that compares elements."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from dagster_unified.operators.functions.type_variables import T
from dagster_unified.operators.state.value import ValueStateDescriptor
from dagster_unified.operators.windows.triggers.base import Firing, QuietTrigger, Trigger, TriggerResult
from dagster_unified.operators.windows.triggers.context import TriggerContext
from dagster_unified.operators.windows.window import Window

if TYPE_CHECKING:
    from typing_extensions import TypeForm


class DeltaTrigger(QuietTrigger):
    """Fires when an element is further than a threshold from the one at which it fired last.

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
        """Fires where `delta_function(last, element)` is more than `threshold`."""
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
