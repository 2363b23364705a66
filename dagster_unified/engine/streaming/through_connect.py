"""Runs a query's epochs where a Spark Connect server calls them: in a Python process that the server starts.

The rows of an epoch are there, so they are computed and committed there. Whether an epoch begins, and what follows from
it, the job's process says, as on a classic session; so Spark logs no epoch that the job does not know of. The two write
to each other in the checkpoint directory, each in a file of its own, of which the other waits for the next message:

    server: Asked(epoch)                    Done(outcome) or Failed(error)
    job:                 Go or Refused                                     Closed or Refused

A job that was killed answers no more: the next epoch then ends the query, once the job's lease expires or another job
has taken it. Knows neither rows nor sinks.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable
from threading import Event, Thread
from typing import TYPE_CHECKING, Generic, TypeAlias, TypeVar

import msgspec

from dagster_unified import errors
from dagster_unified.by_value import by_value_bytes
from dagster_unified.connectors.paths import is_local, read_whole, remove_tree
from dagster_unified.engine.failures import translated
from dagster_unified.engine.streaming.atomic import write_atomically
from dagster_unified.engine.streaming.checkpoint import PATIENCE, CheckpointDirectory
from dagster_unified.engine.streaming.epoch import EpochRunner, Outcome, StoppedError
from dagster_unified.errors import LeaseLostError, MissingRequirementError, PipelineError, StageError, StateError
from dagster_unified.graph.plan import Plan

if TYPE_CHECKING:
    from pyspark.sql import DataFrame
    from pyspark.sql.streaming.query import StreamingQuery
    from upath import UPath

_POLL, _POLL_STORE = 0.005, 0.05
"""Seconds between two looks for a message: on a disk, and in an object store."""

_IDLE = 0.1
"""Seconds between two looks for an epoch, where none comes for a while."""

_ALIVE = 0.5
"""Seconds between two looks at whether the other side is alive."""


class Asked(msgspec.Struct, frozen=True, tag=True):
    """Spark has an epoch: may it begin?"""

    epoch: int


class Done(msgspec.Struct, frozen=True, tag=True):
    """The epoch is committed to the sinks."""

    outcome: Outcome


class Failed(msgspec.Struct, frozen=True, tag=True):
    """The epoch has failed, with an error of this class in `errors`."""

    kind: str
    message: str


class Go(msgspec.Struct, frozen=True, tag=True):
    """The epoch may begin; `ends` says that it brings the end of the input."""

    ends: bool


class Closed(msgspec.Struct, frozen=True, tag=True):
    """What follows from the epoch is done, and Spark may log it."""


class Refused(msgspec.Struct, frozen=True, tag=True):
    """The epoch may not begin, or not be logged."""

    reason: str


FromServer: TypeAlias = Asked | Done | Failed
FromJob: TypeAlias = Go | Closed | Refused
RunEpoch: TypeAlias = Callable[[Callable[[bool], Outcome], int], None]
T = TypeVar("T")


class _Letters(Generic[T]):
    """The messages of one side, numbered from 1 on: a file has the latest. One side writes, the other reads."""

    def __init__(self, path: UPath, kind: object) -> None:
        self._path, self._kind = path, kind
        self._number = 0
        self.pause = _POLL if is_local(path) else _POLL_STORE

    def send(self, message: T) -> None:
        """Write the next message."""
        self._number += 1
        write_atomically(self._path, msgspec.json.encode((self._number, message)))

    def receive(self) -> T | None:
        """The next message, if it is there."""
        try:
            number, message = msgspec.json.decode(read_whole(self._path), type=tuple[int, self._kind])  # type: ignore[name-defined]
        except OSError:  # not there yet, or a store that is away for a moment; whoever waits looks at the lease as well
            return None
        if number <= self._number:
            return None
        self._number = number
        found: T = message
        return found


def _letters(folder: UPath) -> tuple[_Letters[FromServer], _Letters[FromJob]]:
    return _Letters(folder / "server.json", FromServer), _Letters(folder / "job.json", FromJob)


class EpochsElsewhere:
    """The job's side: has a query's epochs run in the server's process."""

    def __init__(self, plan: Plan, query: str, folder: UPath, directory: CheckpointDirectory, token: int) -> None:
        """`folder` has a folder for each job that ran the query, by the token of its lease."""
        self._plan, self._query, self._directory, self._token = plan, query, directory, token
        self._all = folder
        self._folder = folder / str(token)
        self._theirs, self._mine = _letters(self._folder)
        self._closed = Event()
        self._thread: Thread | None = None
        self.running: StreamingQuery | None = None
        """The query, as soon as it is known."""

        self.failure: Exception | None = None
        """Why this side could not go on."""

    def function(self, runner: EpochRunner) -> Callable[[DataFrame, int], None]:
        """What Spark calls with each micro-batch. It is sent by value, with the author's code."""
        try:
            payload = by_value_bytes(runner)
        except Exception as error:
            raise PipelineError(
                f"{self._plan.name}: what runs behind the last operator with state cannot be sent to the Spark Connect"
                f" server: {error}; create connections, locks and open files in open(), not before"
            ) from error
        return EpochsHere(payload, self._query, self._folder, self._directory, self._token)

    def serve(self, run_epoch: RunEpoch) -> None:
        """Have `run_epoch` called with every epoch that Spark has, and what runs it, in a thread."""
        with contextlib.suppress(OSError):  # the query of a job that was killed may still write there
            remove_tree(self._all)
        self._folder.mkdir(parents=True, exist_ok=True)
        self._thread = Thread(target=self._serve, args=(run_epoch,), daemon=True, name=f"epochs of {self._query}")
        self._thread.start()

    def close(self) -> None:
        """Answer no more."""
        self._closed.set()
        if self._thread is not None:
            self._thread.join()
            with contextlib.suppress(OSError):
                remove_tree(self._folder)

    def _serve(self, run_epoch: RunEpoch) -> None:
        from pyspark.errors import PySparkException

        try:
            while (asked := self._next(_IDLE)) is not None:
                if isinstance(asked, Asked):  # else it ends an epoch that has been refused meanwhile
                    self._mine.send(self._answer(run_epoch, asked.epoch))
        except Exception as error:  # the two cannot reach each other
            self.failure = error
            if self.running is not None and not isinstance(error, PySparkException):  # else it is Spark that is away
                self.running.stop()

    def _answer(self, run_epoch: RunEpoch, epoch: int) -> FromJob:
        try:
            run_epoch(self._run, epoch)
        except Exception as error:
            return Refused(str(error))
        return Closed()

    def _run(self, ends: bool) -> Outcome:
        """Have the server run the epoch that it has asked for."""
        self._mine.send(Go(ends))
        said = self._next()
        if isinstance(said, Done):
            return said.outcome
        if isinstance(said, Failed):
            kind: type[errors.UnifiedError] = getattr(errors, said.kind, StageError)
            raise kind(said.message)
        if self._closed.is_set():
            raise StoppedError("the query has stopped")
        raise (self.running.exception() if self.running is not None else None) or StageError(
            f"{self._plan.name}: query '{self._query}' ended on the Spark Connect server while it ran an epoch; the job"
            " goes on from the epoch before"
        )

    def _next(self, at_most: float = 0.0) -> FromServer | None:
        """The server's next message; None where there will be none. Looks less and less often, down to `at_most`."""
        looked, pause = time.monotonic(), self._theirs.pause
        while True:
            found = self._theirs.receive()
            if found is not None or self._closed.wait(pause):
                return found
            pause = max(self._theirs.pause, min(1.1 * pause, at_most))
            if time.monotonic() - looked >= _ALIVE:
                looked = time.monotonic()
                if self.running is not None and not self.running.isActive:
                    return self._theirs.receive()


class EpochsHere:
    """The server's side: the function that Spark calls with each micro-batch."""

    def __init__(self, payload: bytes, query: str, folder: UPath, directory: CheckpointDirectory, token: int) -> None:
        self._payload, self._query = payload, query
        self._directory, self._token = directory, token
        self._mine, self._theirs = _letters(folder)
        self._runner: EpochRunner | None = None
        self._beat, self._seen = 0, 0.0
        """The last sign of life of the job, and when it was seen here: two machines have two clocks."""

    def __call__(self, frame: DataFrame, epoch: int) -> None:
        self._mine.send(Asked(epoch))
        go = self._answer()
        ends = isinstance(go, Go) and go.ends
        try:
            self._runner = self._runner or self._loaded()
            outcome = self._runner.run(frame, epoch, ends)
        except Exception as error:
            failed = error if self._runner is None else self._failed(self._runner, error, frame)
            kinds = (kind.__name__ for kind in type(failed).__mro__ if hasattr(errors, kind.__name__))
            self._mine.send(Failed(next(kinds, StageError.__name__), str(failed)))
            raise failed from error
        self._mine.send(Done(outcome))
        self._answer()

    def _loaded(self) -> EpochRunner:
        """What runs the epochs; raises `MissingRequirementError` where the server's process lacks what it needs."""
        from pyspark import cloudpickle

        try:
            found: EpochRunner = cloudpickle.loads(self._payload)
        except Exception as error:
            raise MissingRequirementError(
                f"{self._directory.path.name}: the Python process of the Spark Connect server cannot load what commits"
                f" the epochs of query '{self._query}': {type(error).__name__}: {error}; install there what the job"
                " has, in the same versions"
            ) from error
        return found

    def _failed(self, runner: EpochRunner, error: Exception, frame: DataFrame) -> errors.UnifiedError:
        try:
            return translated(error, runner.writer.plan, self._query, frame.sparkSession)
        finally:
            runner.close()

    def _answer(self) -> FromJob:
        looked = time.monotonic()
        while True:
            found = self._theirs.receive()
            if isinstance(found, Refused):
                if self._runner is not None:
                    self._runner.close()
                raise StoppedError(found.reason)
            if found is not None:
                return found
            if time.monotonic() - looked >= _ALIVE:
                looked = time.monotonic()
                self._check_job()
            time.sleep(self._theirs.pause)

    def _check_job(self) -> None:
        """Raise where the job has gone that this query belongs to."""
        self._directory.check_lease(self._token)
        holder = self._directory.holder()
        if holder is None:
            raise StateError(
                f"{self._directory.path.name}: the Spark Connect server does not find the job's lease in"
                f" {self._directory.path}; give execution.checkpointing.dir a place that the job and the server share"
            )
        if holder.released:
            raise LeaseLostError(f"{self._directory.path.name}: the job that this query belongs to has stopped")
        if holder.beat != self._beat:
            self._beat, self._seen = holder.beat, time.monotonic()
        elif time.monotonic() - self._seen > PATIENCE:
            raise LeaseLostError(
                f"{self._directory.path.name}: the process of the job that this query belongs to has given no sign of"
                f" life for {PATIENCE:.0f} s; the query ends, and the next job goes on where it was"
            )
