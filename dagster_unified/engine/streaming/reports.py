"""What a STREAMING job has committed and has not reported yet: kept in the checkpoint directory until it is.

    <dir>/<pipeline>/reports/{0,1}.json

An epoch is noted after its commit and before Spark logs it. So every epoch that Spark has logged is noted, and one that
runs again after a kill is noted once. What is to be reported gets an id and is written before it is reported, and taken
off afterwards; of one that is found again, its id tells whether it was reported. Knows nothing of whom it is reported
to.
"""

from __future__ import annotations

from threading import Lock

import msgspec

from dagster_unified.engine.events import EpochCommitted
from dagster_unified.engine.streaming.atomic import AlternatingFiles
from dagster_unified.engine.streaming.checkpoint import CheckpointDirectory, Deployed
from dagster_unified.errors import LeaseLostError

FOLDER = "reports"


class Report(msgspec.Struct, frozen=True):
    """What was committed to a sink since the report before. Moments are milliseconds since the epoch."""

    id: str
    sink: str
    rows: int
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


class Unreported(msgspec.Struct):
    """What was committed to one sink since its last report."""

    rows: int = 0
    bytes: int = 0
    query: str = ""
    epoch: int = -1
    at: int = 0
    version: int | None = None
    watermark: int | None = None


class Notes(msgspec.Struct):
    """The record. `deployment` and `timeline` say whose epochs they are."""

    number: int = 0
    deployment: str = ""
    timeline: int = 0
    reports: int = 0
    """How many there have been."""

    epochs: dict[str, int] = {}
    sinks: dict[str, Unreported] = {}
    due: list[Report] = []
    """What may have been reported, or not: the oldest first."""


class Reports:
    """The notes of one job, which holds the lease. Safe for several threads."""

    def __init__(self, directory: CheckpointDirectory, deployed: Deployed) -> None:
        self._files = AlternatingFiles(directory.path / FOLDER, Notes, lambda notes: notes.number)
        self._pipeline, self._lock = directory.path.name, Lock()
        self._notes = self._files.open() or Notes()
        self.found = frozenset(report.id for report in self._notes.due)
        """The ids of reports that an earlier process has left: perhaps it has made them."""

        if (self._notes.deployment, self._notes.timeline) != (deployed.id, deployed.timeline):
            self._begin(deployed)

    def _begin(self, deployed: Deployed) -> None:
        """Begin with the epochs of another deployment, which count from zero, or go on after a savepoint.

        What was written before that deployment is still to be reported. What a savepoint had not reported when it was
        taken, was reported later, or is undone.
        """
        notes = self._notes
        if notes.deployment == deployed.id:
            notes.sinks = {}
        else:
            self._move_to_due()
            notes.epochs = {}
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
                unreported = notes.sinks.setdefault(sink, Unreported())
                unreported.rows += of_sink.rows
                unreported.bytes += of_sink.bytes
                unreported.query, unreported.epoch, unreported.at = event.query, event.epoch, now
                unreported.version, unreported.watermark = of_sink.version, event.watermark
            if written:
                self._write()

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

    @property
    def is_pending(self) -> bool:
        """Whether there is something to report."""
        return is_pending(self._notes)

    def _move_to_due(self) -> bool:
        notes = self._notes
        for sink, unreported in notes.sinks.items():
            notes.reports += 1
            notes.due.append(
                Report(
                    f"{notes.deployment}/{notes.timeline}/{notes.reports}",
                    sink,
                    unreported.rows,
                    unreported.bytes,
                    unreported.query,
                    unreported.epoch,
                    unreported.at,
                    dict(notes.epochs),
                    unreported.version,
                    unreported.watermark,
                )
            )
        moved = bool(notes.sinks)
        notes.sinks = {}
        return moved

    def _write(self) -> None:
        self._notes.number += 1
        try:
            self._files.write(self._notes)
        except FileExistsError as error:
            raise LeaseLostError(
                f"{self._pipeline}: another job has written what is to be reported meanwhile; this one stops and writes"
                " nothing more"
            ) from error


def read_notes(directory: CheckpointDirectory) -> Notes:
    """Return the notes of the job before."""
    return AlternatingFiles(directory.path / FOLDER, Notes, lambda notes: notes.number).read() or Notes()


def is_pending(notes: Notes) -> bool:
    """Return whether something of them is to be reported."""
    return bool(notes.sinks or notes.due)
