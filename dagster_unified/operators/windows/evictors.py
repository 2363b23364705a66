"""Evictors: which elements a window drops before or after its function sees them.

A window with an evictor keeps all its elements, not an aggregate.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any, Generic, Self

from dagster_unified.operators.functions.type_variables import T, Win
from dagster_unified.operators.time import checked_span
from dagster_unified.operators.windows.window import Window
from dagster_unified.values import check_count

Element = tuple[T, "int | None"]
"""An element with its event time."""


class Evictor(Generic[T, Win]):  # both moments have a default
    """Returns the elements of a window that stay (Flink: *Windows*, "Evictors").

    In BATCH the order is that of event time, in STREAMING that of arrival.

    Examples:
        >>> class WithoutSmall(Evictor[Sale, TimeWindow]):
        ...     def evict_before(self, elements, window):
        ...         return [element for element in elements if element[0].amount > 3]
        >>> day = timed.window_all(TumblingEventTimeWindows.of(timedelta(days=1)))
        >>> collect(day.evictor(WithoutSmall()).sum("amount"))[0].amount
        9
    """

    def evict_before(self, elements: Sequence[Element[T]], window: Win) -> Sequence[Element[T]]:
        """The elements that the window's function gets, and that stay."""
        return elements

    def evict_after(self, elements: Sequence[Element[T]], window: Win) -> Sequence[Element[T]]:
        """The elements that stay once the function has seen them."""
        return elements


class _Once(Evictor[Any, Window]):
    """Evicts at one of the two moments, before unless `do_evict_after`."""

    def __init__(self, do_evict_after: bool) -> None:
        self.do_evict_after = do_evict_after

    def keep(self, elements: Sequence[Element[Any]]) -> Sequence[Element[Any]]:
        """The elements that stay."""
        raise NotImplementedError

    def evict_before(self, elements: Sequence[Element[Any]], window: Window) -> Sequence[Element[Any]]:
        return elements if self.do_evict_after else self.keep(elements)

    def evict_after(self, elements: Sequence[Element[Any]], window: Window) -> Sequence[Element[Any]]:
        return self.keep(elements) if self.do_evict_after else elements


class CountEvictor(_Once):
    """Keeps the last `count` elements, in the order of event time in BATCH and of arrival in STREAMING.

    Examples:
        >>> day = timed.window_all(TumblingEventTimeWindows.of(timedelta(days=1)))
        >>> collect(day.evictor(CountEvictor.of(2)).sum("amount"))[0].amount
        9
    """

    def __init__(self, count: int, do_evict_after: bool = False) -> None:
        super().__init__(do_evict_after)
        self.count = count

    @classmethod
    def of(cls, count: int, do_evict_after: bool = False) -> Self:
        """Keep the last `count` elements."""
        check_count("CountEvictor: the count", count)
        return cls(count, do_evict_after)

    def keep(self, elements: Sequence[Element[Any]]) -> Sequence[Element[Any]]:
        return elements[-self.count :]


class TimeEvictor(_Once):
    """Keeps the elements that are at most a length of time older than the newest.

    Examples:
        >>> day = timed.window_all(TumblingEventTimeWindows.of(timedelta(days=1)))
        >>> collect(day.evictor(TimeEvictor.of(timedelta(minutes=30))).sum("amount"))[0].amount
        5
    """

    def __init__(self, millis: int, do_evict_after: bool = False) -> None:
        super().__init__(do_evict_after)
        self.millis = millis

    @classmethod
    def of(cls, length: timedelta, do_evict_after: bool = False) -> Self:
        """Keep the elements that are less than `length` older than the newest."""
        return cls(checked_span(f"{cls.__name__}: the length", length, 0), do_evict_after)

    def keep(self, elements: Sequence[Element[Any]]) -> Sequence[Element[Any]]:
        times = [t for _, t in elements if t is not None]
        if not times:
            return elements
        cutoff = max(times) - self.millis
        return [e for e in elements if e[1] is None or e[1] > cutoff]


class DeltaEvictor(_Once):
    """Keeps the elements that are less than a threshold from the last one.

    Examples:
        >>> day = timed.window_all(TumblingEventTimeWindows.of(timedelta(days=1)))
        >>> nearby = DeltaEvictor.of(2, lambda sale, last: abs(last.amount - sale.amount))
        >>> collect(day.evictor(nearby).sum("amount"))[0].amount
        9
    """

    def __init__(
        self, threshold: float, delta_function: Callable[[Any, Any], float], do_evict_after: bool = False
    ) -> None:
        super().__init__(do_evict_after)
        self.threshold = threshold
        self.delta_function = getattr(delta_function, "get_delta", delta_function)

    @classmethod
    def of(
        cls, threshold: float, delta_function: Callable[[T, T], float], do_evict_after: bool = False
    ) -> Evictor[T, Window]:
        """Keep the elements for which `delta_function(element, last)` is less than `threshold`."""
        return cls(threshold, delta_function, do_evict_after)

    def keep(self, elements: Sequence[Element[Any]]) -> Sequence[Element[Any]]:
        if not elements:
            return elements
        last = elements[-1][0]
        return [e for e in elements if self.delta_function(e[0], last) < self.threshold]
