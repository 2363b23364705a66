"""The results of drivers for their engine: in BATCH batches and metrics, in STREAMING a partition's report.

A report has the metrics of a partition of a micro-batch, and the time when its processing-time timers are due.
"""

from __future__ import annotations

from collections.abc import Generator, Iterable, Iterator, Mapping
from typing import NamedTuple

import msgspec
import pyarrow as pa

from dagster_unified.operators.metrics import Metrics
from dagster_unified.operators.watermarks import Mark, slowest


class Report(msgspec.Struct):
    """The report of one partition, or merged from many.

    `due` is the earliest pending processing-time timer, in milliseconds since the epoch.
    """

    metrics: Metrics = msgspec.field(default_factory=Metrics)
    due: int | None = None
    rows: int = 0
    """Records read from sources."""

    marks: dict[str, Mark] = {}
    """The marks of watermark generators, by their assigner's uid."""

    parts: dict[str, dict[str, int]] = {}
    """The last event time of each part of a source, such as a partition of a topic, by the assigner's uid.

    '' stands for sources without parts.
    """

    def saw_part(self, part: str, last_event_times: Mapping[str, int]) -> None:
        """Note the last event times that assigners saw in one part of a source."""
        for uid, moment in last_event_times.items():
            times = self.parts.setdefault(uid, {})
            times[part] = max(moment, times.get(part, moment))

    def mark(self, marks: Mapping[str, Mark]) -> None:
        """Note the marks of more watermark generators."""
        self.marks = {uid: slowest(m[uid] for m in (self.marks, marks) if uid in m) for uid in {**self.marks, **marks}}

    def add(self, other: Report) -> None:
        """Add the report of another partition."""
        self.metrics.add(other.metrics)
        self.due = min((due for due in (self.due, other.due) if due is not None), default=None)
        self.rows += other.rows
        self.mark(other.marks)
        for uid, times in other.parts.items():
            for part, moment in times.items():
                self.saw_part(part, {uid: moment})

    def empty(self) -> bool:
        """Whether there is nothing to report."""
        return self.due is None and not self.rows and not self.marks and self.metrics.empty()

    def encode(self) -> bytes:
        """As JSON."""
        return msgspec.json.encode(self)


def merge_reports(reports: Iterable[bytes]) -> Report:
    """The totals over several reports, as they were encoded."""
    return merged(msgspec.json.decode(report, type=Report) for report in reports)


def merged(reports: Iterable[Report]) -> Report:
    """The totals over several reports."""
    total = Report()
    for report in reports:
        total.add(report)
    return total


class Emitted(NamedTuple):
    """A batch of one of a program's outputs, and the index of the partition that it belongs to."""

    output: int
    batch: pa.RecordBatch
    partition: int = 0


Emitting = Generator[Emitted, None, dict[int, Metrics]]
"""A driver at work; it returns the metrics of each partition."""


class Run:
    """A driver's run, which goes on while it is iterated."""

    def __init__(self, emitting: Emitting) -> None:
        self._emitting = emitting
        self.metrics: dict[int, Metrics] = {}
        """The metrics of each partition by its index, at the end of the run."""

    def __iter__(self) -> Iterator[Emitted]:
        self.metrics = yield from self._emitting
