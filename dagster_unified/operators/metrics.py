"""What a parallel instance reports when it ends: counters, and the last event time that each timestamp assigner gave.

Reports are merged by sums and maxima, so they may come in any order, from any number of partitions.
"""

from __future__ import annotations

from collections.abc import Iterable

import msgspec


class Metrics(msgspec.Struct):
    """Totals of one partition, or merged of many.

    `last_event_times` are milliseconds since the epoch, by the assigner's uid.
    """

    counters: dict[str, int] = {}
    last_event_times: dict[str, int] = {}

    def count(self, name: str, amount: int = 1) -> None:
        """Adds to one counter."""
        self.counters[name] = self.counters.get(name, 0) + amount

    def saw_event_time(self, assigner: str, timestamp: int) -> None:
        """Remembers the latest event time that an assigner gave."""
        self.last_event_times[assigner] = max(timestamp, self.last_event_times.get(assigner, timestamp))

    def last_event_time(self, assigners: Iterable[str]) -> int | None:
        """The latest event time that any of these assigners gave."""
        return max((self.last_event_times[a] for a in assigners if a in self.last_event_times), default=None)

    def clear(self) -> None:
        """Forgets everything, so that what was told is told once."""
        self.counters.clear()
        self.last_event_times.clear()

    def encode(self) -> str:
        """As JSON."""
        return msgspec.json.encode(self).decode()


def merge(reports: Iterable[str | Metrics]) -> Metrics:
    """The totals over several reports, given as `Metrics` or as their JSON."""
    total = Metrics()
    for report in reports:
        metrics = report if isinstance(report, Metrics) else msgspec.json.decode(report, type=Metrics)
        for name, amount in metrics.counters.items():
            total.count(name, amount)
        for assigner, timestamp in metrics.last_event_times.items():
            total.saw_event_time(assigner, timestamp)
    return total
