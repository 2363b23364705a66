"""What a parallel instance reports when it ends: counters, and the last event time that it assigned.

Reports are merged by sums and maxima, so they may come in any order, from any number of partitions.
"""

from __future__ import annotations

from collections.abc import Iterable

import msgspec


class Metrics(msgspec.Struct):
    """Totals of one partition, or merged of many. `last_event_time` is milliseconds since the epoch."""

    counters: dict[str, int] = {}
    last_event_time: int | None = None

    def count(self, name: str, amount: int = 1) -> None:
        """Adds to one counter."""
        self.counters[name] = self.counters.get(name, 0) + amount

    def saw_event_time(self, timestamp: int | None) -> None:
        """Remembers the latest event time."""
        if timestamp is not None and (self.last_event_time is None or timestamp > self.last_event_time):
            self.last_event_time = timestamp

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
        total.saw_event_time(metrics.last_event_time)
    return total
