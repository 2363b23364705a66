"""Timers of one keyed operator, for one time domain: a heap ordered by timestamp, each (key, timestamp) at most once.

Knows no driver. A timer carries its *generation*: how many timers, each registered by the callback of the one before it
and beyond the input's last event time, led to it. That is what ends a timer that re-registers itself for ever.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator
from heapq import heappop, heappush
from numbers import Integral
from typing import Any

from dagster_unified.errors import StateError
from dagster_unified.operators.time import MAX_TIMESTAMP, MIN_TIMESTAMP
from dagster_unified.records import shorten, type_name


def timer_time(moment: Any) -> int:
    """The time of a timer as an int; raises `StateError` for anything that is no time."""
    if type(moment) is int and MIN_TIMESTAMP <= moment <= MAX_TIMESTAMP:
        return moment
    if not isinstance(moment, Integral) or isinstance(moment, bool):
        raise StateError(
            f"a timer's time is an int, in milliseconds since the epoch, and was given {shorten(moment)}"
            f" ({type_name(type(moment))}); round a float, and use to_millis(moment) for a datetime"
        )
    if not MIN_TIMESTAMP <= moment <= MAX_TIMESTAMP:  # type: ignore[operator]
        raise StateError(
            f"a timer's time is an int of 64 bits, in milliseconds since the epoch, and was given {moment}"
        )
    return int(moment)


class TimerQueue:
    """Pending timers, popped in timestamp order and, at one timestamp, in the order of registration."""

    def __init__(self) -> None:
        self._heap: list[tuple[int, int, Hashable]] = []
        self._pending: dict[tuple[Hashable, int], tuple[int, int]] = {}
        self._registered = 0

    def __len__(self) -> int:
        return len(self._pending)

    def register(self, key: Hashable, timestamp: int, generation: int = 0) -> None:
        """Add a timer; one that is already pending stays, with the smaller generation."""
        slot = (key, timestamp)
        entry = self._pending.get(slot)
        if entry is None:
            self._registered += 1
            self._pending[slot] = (self._registered, generation)
            heappush(self._heap, (timestamp, self._registered, key))
        elif generation < entry[1]:
            self._pending[slot] = (entry[0], generation)

    def delete(self, key: Hashable, timestamp: int) -> None:
        """Remove a timer; does nothing where it is not pending."""
        self._pending.pop((key, timestamp), None)

    def pending(self) -> Iterator[tuple[int, Hashable, int]]:
        """All `(timestamp, key, generation)`, in the order of registration."""
        for (key, timestamp), (_, generation) in self._pending.items():
            yield timestamp, key, generation

    def due(self, until: int) -> Iterator[tuple[int, Hashable, int]]:
        """Pop `(timestamp, key, generation)` up to and including `until`, among them those registered meanwhile."""
        heap = self._heap
        while heap and heap[0][0] <= until:
            timestamp, number, key = heappop(heap)
            entry = self._pending.get((key, timestamp))
            if entry is not None and entry[0] == number:
                del self._pending[(key, timestamp)]
                yield timestamp, key, entry[1]
