"""The windows themselves: plain values, which are stored in state and are keys there."""

from __future__ import annotations

from typing import NamedTuple, Protocol

from dagster_unified.operators.time import MAX_TIMESTAMP


class Window(Protocol):
    """An assigner's window: a hashable value whose type says how it is stored."""

    def max_timestamp(self) -> int:
        """The greatest event time in the window, in milliseconds since the epoch; its results carry it."""


class TimeWindow(NamedTuple):
    """From `start` up to but not including `end`, in milliseconds since the epoch.

    Examples:
        >>> TimeWindow(0, 10).max_timestamp(), TimeWindow(0, 10).cover(TimeWindow(10, 30))
        (9, TimeWindow(start=0, end=30))
    """

    start: int
    end: int

    def max_timestamp(self) -> int:
        """`end - 1`."""
        return self.end - 1

    def intersects(self, other: TimeWindow) -> bool:
        """Whether two windows overlap or touch."""
        return self.start <= other.end and other.start <= self.end

    def cover(self, other: TimeWindow) -> TimeWindow:
        """The smallest window that contains both."""
        return TimeWindow(min(self.start, other.start), max(self.end, other.end))


class GlobalWindow(NamedTuple):
    """The one window of `GlobalWindows`; every element is in it.

    Examples:
        >>> GlobalWindow().max_timestamp() == MAX_TIMESTAMP
        True
    """

    def max_timestamp(self) -> int:
        """The end of time."""
        return MAX_TIMESTAMP


class CountWindow(NamedTuple):
    """The `id`th window of its key, from 0; there is an example at `CountTumblingWindowAssigner`."""

    id: int

    def max_timestamp(self) -> int:
        """The end of time: event time does not close it."""
        return MAX_TIMESTAMP
