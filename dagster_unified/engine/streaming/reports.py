"""What a STREAMING job has committed and has not reported yet: kept in the checkpoint directory until it is.

    <dir>/<pipeline>/reports/{0,1}.json      the notes of the job
    <dir>/<pipeline>/late/{0,1}.json         which counts of late records are settled, as the sensor says

An epoch is noted after its commit and before Spark logs it. So every epoch that Spark has logged is noted, and one that
runs again after a kill is noted once. What is to be reported gets an id and is written before it is reported, and taken
off afterwards; of one that is found again, its id tells whether it was reported. Knows nothing of whom it is reported
to.

A table without partitions has a report of all that was committed since the one before. With partitions each has one,
once event time has passed its end. Records are counted by their event time where timestamps are assigned; what comes
after a partition's report is late.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from threading import Lock
from typing import NamedTuple, Protocol

import msgspec

from dagster_unified.engine.events import EpochCommitted
from dagster_unified.engine.streaming.atomic import AlternatingFiles
from dagster_unified.engine.streaming.checkpoint import CheckpointDirectory, Deployed
from dagster_unified.errors import LeaseLostError
from dagster_unified.operators.time import MAX_TIMESTAMP, MIN_TIMESTAMP

FOLDER = "reports"


class Window(NamedTuple):
    """A partition's range of event time: from `start` up to `end`, in milliseconds since the epoch."""

    key: str
    start: int
    end: int


class Windows(Protocol):
    """Partitions by event time. A unit is a length of time that none of their bounds divides."""

    def of(self, number: int) -> Window | None:
        """Return the partition of a unit, by the unit's number since 1970; None where it belongs to none."""

    def exists(self, key: str) -> bool:
        """Return whether a partition is there by now."""


@dataclass(frozen=True)
class ByPartition:
    """How a job's records belong to partitions."""

    windows: Windows
    sinks: Mapping[str, Collection[str]]
    """The sinks to which an assigner of timestamps gives their event time, by its uid."""


class Report(msgspec.Struct, frozen=True):
    """What was committed to a sink since the report before, or to one of its partitions.

    Moments are milliseconds since the epoch.
    """

    id: str
    sink: str
    partition: str | None
    rows: int
    """The rows that were written; of a partition, the records of its event time."""

    bytes: int
    query: str
    epoch: int
    """The last one that wrote rows."""

    at: int
    """When that was committed."""

    epochs: dict[str, int]
    """The last epoch of each query that is committed."""

    version: int | None = None
    """The version of the table that was committed last, where it has versions."""

    watermark: int | None = None


class Written(msgspec.Struct):
    """What was committed to one sink: rows and bytes since its last report, and the rest of its last epoch."""

    rows: int = 0
    bytes: int = 0
    query: str = ""
    epoch: int = -1
    at: int = 0
    version: int | None = None
    watermark: int | None = None


class OpenPartition(msgspec.Struct):
    """A partition that has records and is not reported yet. `written`: its table has got rows since the first."""

    start: int
    end: int
    records: int = 0
    written: bool = False


class Late(msgspec.Struct, frozen=True):
    """The records that came after their partition's report, and when the last of them was committed."""

    records: int
    at: int


class Partitions(msgspec.Struct):
    """The partitions of one sink's table."""

    complete_until: int = MIN_TIMESTAMP
    open: dict[str, OpenPartition] = {}
    done: list[tuple[int, int]] = []
    """The spans of event time whose partitions are reported, in order."""

    late: dict[str, Late] = {}

    def count(self, window: Window, records: int, now: int) -> None:
        """Count records that were read of a partition."""
        if any(start <= window.start and window.end <= end for start, end in self.done):
            before = self.late.get(window.key)
            self.late[window.key] = Late(records + (before.records if before else 0), now)
        else:
            partition = self.open.setdefault(window.key, OpenPartition(window.start, window.end))
            partition.records += records

    def passed(self, windows: Windows) -> list[str]:
        """Return the partitions that event time has passed, in order."""
        ended = [(p.end, key) for key, p in self.open.items() if p.end <= self.complete_until and windows.exists(key)]
        return [key for _, key in sorted(ended)]

    def close(self, key: str) -> OpenPartition:
        """Take a partition off, and count as late from now on what comes to it, if anything was written."""
        partition = self.open.pop(key)
        if partition.written:
            spans: list[tuple[int, int]] = []
            for start, end in sorted([*self.done, (partition.start, partition.end)]):
                if spans and start <= spans[-1][1]:
                    spans[-1] = (spans[-1][0], max(end, spans[-1][1]))
                else:
                    spans.append((start, end))
            self.done = spans
        return partition


class Notes(msgspec.Struct):
    """The record. `deployment` and `timeline` say whose epochs they are."""

    number: int = 0
    deployment: str = ""
    timeline: int = 0
    reports: int = 0
    """How many there have been."""

    epochs: dict[str, int] = {}
    sinks: dict[str, Written] = {}
    partitions: dict[str, Partitions] = {}
    due: list[Report] = []
    """What may have been reported, or not: the oldest first."""

    def late(self) -> dict[str, Late]:
        """Return the late records of each partition: those of the table that has most, and the last of any."""
        late: dict[str, Late] = {}
        for partitions in self.partitions.values():
            for key, counted in partitions.late.items():
                before = late.get(key, counted)
                late[key] = Late(max(before.records, counted.records), max(before.at, counted.at))
        return late

    def end(self) -> None:
        """Take all partitions to be complete: the input has ended."""
        for partitions in self.partitions.values():
            partitions.complete_until = MAX_TIMESTAMP

    def is_pending(self, by_partition: ByPartition | None) -> bool:
        """Return whether there is something to report now."""
        if self.due or by_partition is None:
            return bool(self.due) or any(written.rows for written in self.sinks.values())
        return any(partitions.passed(by_partition.windows) for partitions in self.partitions.values())


class Reports:
    """The notes of one job, which holds the lease. Safe for several threads."""

    def __init__(
        self, directory: CheckpointDirectory, deployed: Deployed, by_partition: ByPartition | None = None
    ) -> None:
        self._files = _files(directory)
        self._pipeline, self._lock, self._by_partition = directory.path.name, Lock(), by_partition
        self._notes = self._files.open() or Notes()
        self.found = frozenset(report.id for report in self._notes.due)
        """The ids of reports that an earlier process has left: perhaps it has made them."""

        if (self._notes.deployment, self._notes.timeline) != (deployed.id, deployed.timeline):
            self._begin(deployed)

    def _begin(self, deployed: Deployed) -> None:
        """Begin with the epochs of another deployment, which count from zero, or go on after a savepoint.

        What was written before that deployment is still to be reported. What a savepoint had not reported when it was
        taken, was reported later, or is undone; of partitions it knows which had come to their end then.
        """
        notes = self._notes
        if notes.deployment == deployed.id:
            notes.sinks = {}
        else:
            self._move_to_due()
            notes.epochs = {}
            notes.partitions = {sink: Partitions(open=p.open) for sink, p in notes.partitions.items()}
        notes.deployment, notes.timeline = deployed.id, deployed.timeline

    def note(self, event: EpochCommitted, now: int) -> None:
        """Note an epoch that is committed to the sinks and that Spark has not logged yet."""
        with self._lock:
            notes = self._notes
            if event.epoch <= notes.epochs.get(event.query, -1):
                return
            notes.epochs[event.query] = event.epoch
            written = {sink: of_sink for sink, of_sink in event.written.items() if of_sink.rows}
            for sink, of_sink in written.items():
                before = notes.sinks.get(sink, Written())
                notes.sinks[sink] = Written(
                    before.rows + of_sink.rows,
                    before.bytes + of_sink.bytes,
                    event.query,
                    event.epoch,
                    now,
                    of_sink.version,
                    event.watermark,
                )
            if self._by_partition is not None:
                self._note_partitions(self._by_partition, event, written, now)
            if written or event.event_times or notes.is_pending(self._by_partition):
                self._write()

    def _note_partitions(
        self, by_partition: ByPartition, event: EpochCommitted, written: Collection[str], now: int
    ) -> None:
        partitions = self._notes.partitions
        for uid, counts in event.event_times.items():
            sinks = by_partition.sinks.get(uid, ())
            for number, records in counts.items():
                if (window := by_partition.windows.of(number)) is not None:
                    for sink in sinks:
                        partitions.setdefault(sink, Partitions()).count(window, records, now)
        for sink, moment in event.complete_until.items():
            of_sink = partitions.setdefault(sink, Partitions())
            of_sink.complete_until = max(moment, of_sink.complete_until)
        for sink in written:
            for partition in partitions.setdefault(sink, Partitions()).open.values():
                partition.written = True

    def end(self) -> None:
        """Take all partitions to be complete: the input has ended."""
        self._notes.end()

    def due(self) -> list[Report]:
        """Return what is to be reported now, the oldest first."""
        with self._lock:
            if self._move_to_due():
                self._write()
            return list(self._notes.due)

    def reported(self, report: Report) -> None:
        """Take a report off."""
        with self._lock:
            self._notes.due.remove(report)
            self._write()

    def forget(self, settled: Settled) -> None:
        """Forget the counts of late records that are settled."""
        with self._lock:
            changed = False
            for partitions in self._notes.partitions.values():
                kept = {key: of for key, of in partitions.late.items() if of.at > settled.partitions.get(key, -1)}
                changed, partitions.late = changed or len(kept) < len(partitions.late), kept
            if changed:
                self._write()

    def late(self, sink: str) -> dict[str, int]:
        """Return how many records came after the report of their partition, by partition."""
        with self._lock:
            partitions = self._notes.partitions.get(sink, Partitions())
            return {key: late.records for key, late in sorted(partitions.late.items())}

    @property
    def is_pending(self) -> bool:
        """Whether there is something to report now."""
        with self._lock:
            return self._notes.is_pending(self._by_partition)

    def _move_to_due(self) -> bool:
        """Put what is to be reported among the reports; return whether anything has changed."""
        notes = self._notes
        if self._by_partition is None:
            sinks = [sink for sink, written in notes.sinks.items() if written.rows]
            for sink in sinks:
                written = notes.sinks[sink]
                self._add(sink, None, written.rows, written.bytes)
                written.rows = written.bytes = 0
            return bool(sinks)
        windows, changed = self._by_partition.windows, False
        for sink, partitions in notes.partitions.items():
            for key in partitions.passed(windows):
                partition, changed = partitions.close(key), True
                if partition.written:
                    self._add(sink, key, partition.records, 0)
        return changed

    def _add(self, sink: str, partition: str | None, rows: int, size: int) -> None:
        notes, last = self._notes, self._notes.sinks.get(sink, Written())
        notes.reports += 1
        number = f"{notes.deployment}/{notes.timeline}/{notes.reports}"
        of_epoch = (last.query, last.epoch, last.at, dict(notes.epochs), last.version, last.watermark)
        notes.due.append(Report(number, sink, partition, rows, size, *of_epoch))

    def _write(self) -> None:
        self._notes.number += 1
        try:
            self._files.write(self._notes)
        except FileExistsError as error:
            raise LeaseLostError(
                f"{self._pipeline}: another job has written what is to be reported meanwhile; this one stops and writes"
                " nothing more"
            ) from error


class Settled(msgspec.Struct, frozen=True):
    """Up to which moment the late records of partitions are settled: a run in BATCH has read them."""

    number: int = 0
    partitions: dict[str, int] = {}


def read_settled(directory: CheckpointDirectory) -> Settled:
    """Return which late records are settled."""
    return _settled(directory).read() or Settled()


def settle_late(directory: CheckpointDirectory, partitions: Mapping[str, int]) -> None:
    """Record which late records are settled, for the job to forget them: their partitions, and up to which moment."""
    files = _settled(directory)
    before = files.open() or Settled()
    if before.partitions != partitions:
        files.write(Settled(before.number + 1, dict(partitions)))


def _settled(directory: CheckpointDirectory) -> AlternatingFiles[Settled]:
    return AlternatingFiles(directory.path / "late", Settled, lambda settled: settled.number)


def read_notes(directory: CheckpointDirectory) -> Notes:
    """Return the notes of the job before."""
    return _files(directory).read() or Notes()


def _files(directory: CheckpointDirectory) -> AlternatingFiles[Notes]:
    return AlternatingFiles(directory.path / FOLDER, Notes, lambda notes: notes.number)
