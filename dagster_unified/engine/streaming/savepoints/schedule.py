"""Takes the savepoints of a job: those that others ask for or that are due while it runs, and those where it stops.

One at a time: what is asked for meanwhile waits. Between two epochs a checkpoint on a disk is linked, and one in a
bucket is listed. All else is done in a thread of its own while the job goes on: the copy in a bucket, and the tables. A
job that would remove what the copy needs is held until it is made.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from functools import partial
from threading import Thread
from typing import TYPE_CHECKING, TypeAlias

from dagster_unified.engine.events import Observer, SavepointTaken
from dagster_unified.engine.failures import translated
from dagster_unified.engine.session import cores
from dagster_unified.engine.streaming.checkpoint import CheckpointDirectory, Deployed, HeldLease
from dagster_unified.engine.streaming.query import Query
from dagster_unified.engine.streaming.savepoints.copy import (
    Savepoint,
    UnfinishedSavepoint,
    begin,
    remove_halves,
    retain,
    save_drained,
    savepoints,
)
from dagster_unified.engine.streaming.savepoints.export import FrozenCheckpoint, without_tables, write_tables
from dagster_unified.engine.streaming.savepoints.request import Brake, Pause, Request, answer, pending
from dagster_unified.graph.plan import Plan
from dagster_unified.graph.queries import MAIN, KeyGroupQueryPlan
from dagster_unified.operators.time import to_span, wall_clock
from dagster_unified.storage.paths import is_local, remove_tree, storage_path

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

INTERVAL = "execution.savepoint.interval"
LOOK, LOOK_IN_BUCKET = 1.0, 3.0
"""Seconds after which a job looks again what it is asked for, on a disk and in a bucket."""

_SPARE = 2
"""Of the epochs that Spark keeps, those by which a job may not be ahead of one that is being copied."""


Epochs: TypeAlias = Mapping[str, int | None]
"""The last epoch of each query; None before its first."""


@dataclass(frozen=True)
class _InProgress:
    """A savepoint that was begun for a request, with its epochs and its moment on the monotonic clock."""

    request: Request
    savepoint: UnfinishedSavepoint
    epochs: Epochs
    since: float


@dataclass
class SavepointSchedule:
    """The savepoints of one job."""

    plan: Plan
    spark: SparkSession
    directory: CheckpointDirectory
    lease: HeldLease
    queries: Sequence[KeyGroupQueryPlan]
    """The specs of all queries except those of native aggregates."""

    running: Sequence[Query]
    """The queries of these specs that run."""

    observe: Observer
    _starts: frozenset[str] = frozenset()
    """The savepoints that the job starts from, which stay."""

    _due: int | None = None
    """When the next savepoint is due that nobody asks for. Milliseconds since the epoch."""

    _last: Savepoint | None = None
    """The last one of these."""

    _timeline: int = 0

    _looked: float = 0.0
    _done: set[str] = field(default_factory=set)
    """The requests that have been answered."""

    _busy: bool = False
    """Whether one is waiting for the end of its epoch, or being written."""

    _pause: Pause | None = None
    """The pause for the last savepoint that was taken while the queries ran."""

    _brake: Brake | None = None
    """The brake that holds them while its checkpoint is copied."""

    _writing: Thread | None = field(default=None, repr=False)

    def begin(self, deployed: Deployed) -> None:
        """Go on where the previous job has ended: remove what it left half done, and count from its last savepoint."""
        starts = (deployed.start, self.plan.execution.starts_from)
        self._starts = frozenset(start for start in starts if start)
        remove_halves(self.directory, self._starts)
        periodic = [savepoint for savepoint in savepoints(self.directory) if savepoint.periodic]
        of_deployment = [savepoint for savepoint in periodic if savepoint.deployed.id == deployed.id]
        self._last, self._timeline = of_deployment[-1] if of_deployment else None, deployed.timeline
        self._next_after(wall_clock() if self._last is None else self._last.taken)

    def look(self) -> list[Request]:
        """Take what is asked for, or due; gives the requests for a savepoint where the job stops or is drained.

        Raises `LeaseLostError` where another job has taken over: a process that was paused does nothing before it asks.
        """
        every = LOOK if is_local(self.directory.path) else LOOK_IN_BUCKET
        if time.monotonic() - self._looked < every:
            return []
        self._looked = time.monotonic()
        self.lease.check()
        busy = self._busy  # asked first: what another thread ends meanwhile is not taken once more
        waiting = [request for request in self._pending() if request.id not in self._done]
        ending = [request for request in waiting if request.stop or request.drain]
        if ending or busy:
            return ending
        is_due = self._due is not None and wall_clock() >= self._due
        if not (waiting or is_due) or not self._may_take():
            return []
        if waiting:
            self._take(waiting[0])
        else:
            self._next_after(wall_clock())
            self._take(Request("", self.lease.token, wall_clock(), INTERVAL))
        return []

    def _may_take(self) -> bool:
        """Return whether there is anything to save: until then no query is held for the others."""
        runs = any(query.name == MAIN for query in self.running)
        return not runs or self.directory.last_epoch(MAIN) is not None

    @property
    def _interval(self) -> timedelta | None:
        return self.plan.execution.savepoint.interval

    def _next_after(self, moment: int) -> None:
        """Schedule the next savepoint one interval after a moment."""
        if self._interval is not None:
            self._due = moment + to_span(self._interval)

    def give_up(self) -> None:
        """Release the queries that are held; who has asked asks again once the job has stopped."""
        if self._pause is not None:
            self._pause.give_up()
        self._release()

    def wait(self) -> None:
        """Wait until all tables in progress are written."""
        if self._writing is not None:
            self._writing.join()

    def at_stop(self) -> list[Request]:
        """Return the requests for a savepoint where the job stops."""
        return [request for request in self._pending() if request.stop]

    def at_end(self) -> list[Request]:
        """Return the requests for a savepoint where the job's input ends."""
        return [request for request in self._pending() if request.drain]

    def _pending(self) -> list[Request]:
        return pending(self.directory, self.lease.token)

    def take_stopped(self, requests: Sequence[Request]) -> None:
        """Take the savepoints that were requested of the queries, which have stopped."""
        self.wait()
        for request in requests:
            in_progress = self._begin(request, self.last_epochs())
            if in_progress is not None:
                self._write(in_progress)

    def last_epochs(self) -> Epochs:
        return {query.name: self.directory.last_epoch(query.name) for query in self.queries}

    def take_drained(self, requests: Sequence[Request]) -> bool:
        """Take savepoints of what the end of the input has left, for the ones who have asked for them.

        Returns whether all have one.
        """
        self.wait()
        all_taken = True
        for request in requests:
            since = time.monotonic()
            write = partial(self._write_drained, request.reason)
            try:
                saved = save_drained(self.directory, request.reason, self.lease.check, write, request.path)
            except Exception as raised:
                error = str(translated(raised, self.plan, "savepoint", self.spark))
                self._ended(request, error=f"{error}. The input has come to its end all the same: ask again")
                all_taken = False
            else:
                folder = self.directory.path / "savepoints" / saved.name
                self._ended(request, str(folder), seconds=time.monotonic() - since)
        return all_taken

    def _write_drained(self, reason: str, deployed: Deployed, path: str) -> None:
        checkpoint = FrozenCheckpoint(self.directory.path, self.directory.sources, self.last_epochs())
        self.write_tables(deployed, checkpoint, path, reason)

    def _take(self, request: Request) -> None:
        """Take a savepoint between two epochs of each query of the job that goes on."""
        no_tables = without_tables(self.plan)
        if no_tables:
            error = (
                f"{self.plan.name}: {no_tables}, and it is copied only where the job stops; suspend it with a savepoint"
            )
            self._ended(request, error=error)
            return
        self._busy = True
        names = [query.name for query in self.running]
        self._pause = Pause(names, lambda epochs: self._take_meanwhile(request, epochs))
        for query in self.running:
            query.pause(self._pause)

    def _take_meanwhile(self, request: Request, epochs: Epochs) -> None:
        """Begin a savepoint while all queries are held, and write it in a thread of its own while they go on."""
        in_progress = self._begin(request, epochs)
        if in_progress is None:
            return
        if not in_progress.savepoint.is_copied:
            self._hold_ahead(epochs)
        name = f"savepoint of {self.plan.name}"
        self._writing = Thread(target=self._write, args=(in_progress, True), name=name, daemon=True)
        self._writing.start()

    def _begin(self, request: Request, epochs: Epochs) -> _InProgress | None:
        """Begin a savepoint; None where that failed, or where an interval asks and nothing is new since the last."""
        since, is_due = time.monotonic(), not request.id
        if is_due and self._last is not None and self._is_of(self._last, epochs):
            self._due, self._busy = wall_clock(), False  # it stays due until something is new
            return None
        try:
            unfinished = begin(self.directory, request.reason, self.lease.check, True, request.path, periodic=is_due)
        except Exception as error:
            self._ended(request, error=str(error))
            return None
        return _InProgress(request, unfinished, epochs, since)

    def _is_of(self, saved: Savepoint, epochs: Epochs) -> bool:
        """Return whether a savepoint is of these epochs of the queries, and of this timeline."""
        return saved.deployed.timeline == self._timeline and all(
            saved.epochs.get(name) == epoch for name, epoch in epochs.items()
        )

    def _hold_ahead(self, epochs: Epochs) -> None:
        """Hold the queries before the epoch with which Spark might remove the files that are being copied."""
        ahead = max(0, self.plan.execution.streaming.retained - _SPARE)
        self._brake = Brake({name: (-1 if epoch is None else epoch) + ahead for name, epoch in epochs.items()})
        for query in self.running:
            query.brake(self._brake)

    def _release(self) -> None:
        if self._brake is not None:
            self._brake.let_go()

    def _write(self, in_progress: _InProgress, beside_epochs: bool = False) -> None:
        request, folder = in_progress.request, in_progress.savepoint.folder
        try:
            saved = in_progress.savepoint.complete()
        except Exception as raised:
            self._ended(request, error=str(raised))
            return
        finally:
            self._release()
        error = ""
        if not without_tables(self.plan):
            try:
                checkpoint = FrozenCheckpoint(folder, self.directory.sources, in_progress.epochs)
                path = request.path or str(folder)
                self.write_tables(saved.deployed, checkpoint, path, request.reason, beside_epochs)
            except Exception as raised:
                error = str(translated(raised, self.plan, "savepoint", self.spark))
        if not request.id and not error:
            self._last = saved
        self._ended(request, str(folder), error, time.monotonic() - in_progress.since)

    def write_tables(
        self, deployed: Deployed, checkpoint: FrozenCheckpoint, path: str, reason: str, beside_epochs: bool = False
    ) -> None:
        """Write the tables of a checkpoint; with `beside_epochs` half of the cores are left to the job that goes on."""
        tasks = max(1, cores(self.spark) // 2) if beside_epochs else None
        write_tables(self.plan, self.spark, deployed, self.queries, checkpoint, path, reason, tasks)

    def _ended(self, request: Request, location: str = "", error: str = "", seconds: float = 0.0) -> None:
        self._done.add(request.id)
        try:
            if request.id:
                answer(self.directory, request, location, error)
            elif error and location:
                remove_tree(storage_path(location, "savepoint"))
                location = ""
            elif not error:
                retain(self.directory, self.plan.execution.savepoint.retained, self._starts)
        except OSError as raised:  # a full disk stops no job
            error = error or str(raised)
        self._busy = False
        self.observe(SavepointTaken(request.reason, location, seconds, error))
