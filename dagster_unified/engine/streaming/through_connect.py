"""Runs a query's epochs where a Spark Connect server calls them: in a Python process that the server starts.

The rows of an epoch are there, so they are computed and committed there. Whether an epoch begins, and what follows from
it, the job's process says, as on a classic session; so Spark logs no epoch that the job does not know of. The two write
to each other in the checkpoint directory, each in a file of its own, of which the other waits for the next message:

    server: EpochRequested
    job:    StartEpoch or EpochRejected
    server: EpochEvents, as often as there are some; at last EpochDone or EpochFailed
    job:    EpochClosed or EpochRejected

A job that was killed answers no more, and the epoch waits for the next one. Where that goes on with the query
(`attaching.py`), the server says to it once more what the other has not answered, and obeys it alone from then on;
where it does not, the query ends. A job that is being stopped says `StartEpoch` once more, so that an epoch whose
iterations go round closes soon. Knows neither rows nor sinks.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable
from dataclasses import fields
from functools import partial
from threading import Event, Thread
from typing import TYPE_CHECKING, Any, Generic, TypeAlias, TypeVar

import msgspec

from dagster_unified import errors
from dagster_unified.by_value import by_value_bytes
from dagster_unified.engine.events import Event as JobEvent
from dagster_unified.engine.events import InputHeldBack, IterationEpochCommitted, IterationResumed
from dagster_unified.engine.failures import translated
from dagster_unified.engine.interrupts import meanwhile
from dagster_unified.engine.iterations.epoch_log import Epoch, bare
from dagster_unified.engine.streaming import attaching
from dagster_unified.engine.streaming.atomic import write_atomically
from dagster_unified.engine.streaming.checkpoint import CheckpointDirectory
from dagster_unified.engine.streaming.epoch import EpochRunner, Outcome, StoppedError
from dagster_unified.engine.streaming.iterations import Host
from dagster_unified.errors import LeaseLostError, MissingRequirementError, PipelineError, StageError, StateError
from dagster_unified.graph.plan import Plan
from dagster_unified.storage.paths import is_local, read_whole, remove_tree

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

ORPHANED = 600.0
"""Seconds for which an epoch waits for another job, where the one that the query belonged to was killed."""


class EpochRequested(msgspec.Struct, frozen=True, tag=True):
    """Spark has an epoch: may it begin?"""

    epoch: int


class EpochEvents(msgspec.Struct, frozen=True, tag=True):
    """The latest events, of so many of the epoch: the fields of one of `_EVENTS` behind its name."""

    count: int
    events: list[tuple[str, list[msgspec.Raw]]]


class EpochDone(msgspec.Struct, frozen=True, tag=True):
    """The epoch is committed to the sinks."""

    epoch: int
    outcome: Outcome
    events: EpochEvents = EpochEvents(0, [])


class EpochFailed(msgspec.Struct, frozen=True, tag=True):
    """The epoch has failed, with an error of this class in `errors`."""

    kind: str
    message: str


class StartEpoch(msgspec.Struct, frozen=True, tag=True):
    """The epoch may begin; `ends` says that it brings the end of the input, `soon` that it is to close soon."""

    ends: bool
    soon: bool = False


class EpochClosed(msgspec.Struct, frozen=True, tag=True):
    """All that follows from the epoch is done, and Spark may log it."""


class EpochRejected(msgspec.Struct, frozen=True, tag=True):
    """The epoch may not begin, or not be logged."""

    reason: str


FromServer: TypeAlias = EpochRequested | EpochEvents | EpochDone | EpochFailed
FromJob: TypeAlias = StartEpoch | EpochClosed | EpochRejected
RunEpoch: TypeAlias = Callable[[Callable[[bool], Outcome], int], None]
EndEpoch: TypeAlias = Callable[[Callable[[bool], Outcome] | None, int], None]
"""Ends an epoch that another job has begun: with what says what has come of it, or None where Spark has logged it."""

T = TypeVar("T")
R = TypeVar("R")

_EVENTS: dict[str, tuple[type[JobEvent], tuple[Any, ...]]] = {
    IterationEpochCommitted.__name__: (IterationEpochCommitted, (str, str, Epoch)),
    InputHeldBack.__name__: (InputHeldBack, (str, int, int)),
    IterationResumed.__name__: (IterationResumed, (str, str, int)),
}
"""The events of iterations while an epoch runs, and the types of their fields."""

_KEPT = 32
"""How many of the latest events each message repeats: the other side may not have read the one before."""


def _encoded(event: JobEvent) -> tuple[str, list[msgspec.Raw]]:
    name = type(event).__name__
    values = [getattr(event, field.name) for field in fields(_EVENTS[name][0])]
    return name, [msgspec.Raw(msgspec.json.encode(_brief(value))) for value in values]


def _decoded(name: str, values: list[msgspec.Raw]) -> JobEvent:
    event, kinds = _EVENTS[name]
    return event(*(msgspec.json.decode(value, type=kind) for value, kind in zip(values, kinds, strict=True)))


def _brief(value: object) -> object:
    """Leave out what no listener needs: where the records of a round are."""
    return msgspec.structs.replace(bare(value), outputs=[]) if isinstance(value, Epoch) else value


class Mailbox(Generic[T]):
    """The messages of one side to or from one job, numbered from 1 on: a file has the latest.

    One side writes, the other reads.
    """

    def __init__(self, path: UPath, kind: object, token: int) -> None:
        self._path, self._kind = path, kind
        self._number = 0
        self.token = token
        """Of the job's lease: what the server says to another one is not read."""

        self.pause = _POLL if is_local(path) else _POLL_STORE

    def send(self, message: T) -> None:
        """Write the next message."""
        self._number += 1
        write_atomically(self._path, msgspec.json.encode((self._number, self.token, message)))

    def receive(self) -> T | None:
        """Return the next message, if it is there."""
        try:
            number, token, message = msgspec.json.decode(
                read_whole(self._path),
                type=tuple[int, int, self._kind],  # type: ignore[name-defined]
            )
        except OSError:  # not there yet, or a store that is away for a moment; whoever waits looks at the lease as well
            return None
        if number <= self._number or token != self.token:
            return None
        self._number = number
        received: T = message
        return received


def _of_server(folder: UPath, token: int) -> Mailbox[FromServer]:
    return Mailbox(folder / "server.json", FromServer, token)


def _of_job(folder: UPath, token: int) -> Mailbox[FromJob]:
    return Mailbox(folder / f"{token}.json", FromJob, token)


class EpochsElsewhere:
    """The job's side: lets a query's epochs run in the server's process."""

    def __init__(
        self,
        plan: Plan,
        query: str,
        folder: UPath,
        directory: CheckpointDirectory,
        token: int,
        started: int,
        host: Host,
    ) -> None:
        """`folder` has a folder for each job that `started` the query, by the token of its lease."""
        self._plan, self._query, self._directory, self._token = plan, query, directory, token
        self._host = host
        self._all = folder
        self._folder = folder / str(started)
        self._theirs, self._mine = _of_server(self._folder, token), _of_job(self._folder, token)
        self._closed = Event()
        self._thread: Thread | None = None
        self._next_epoch: EpochRequested | None = None
        """An epoch that the server has asked for where another one was waited for."""

        self._heard = 0
        """How many events of the epoch have been observed."""

        self.running: StreamingQuery | None = None
        """The query, as soon as it is known."""

        self.failure: Exception | None = None
        """Why this side could not go on."""

    def function(self, runner: EpochRunner) -> Callable[[DataFrame, int], None]:
        """Return the function that Spark calls with each micro-batch. It is sent by value, with the author's code."""
        try:
            payload = by_value_bytes(runner)
        except Exception as error:
            raise PipelineError(
                f"{self._plan.name}: what runs behind the last operator with state cannot be sent to the Spark Connect"
                f" server: {error}; create connections, locks and open files in open(), not before"
            ) from error
        return EpochsHere(payload, self._query, self._folder, self._directory, self._token)

    def serve(self, run_epoch: RunEpoch) -> None:
        """Call `run_epoch`, in a thread, with every epoch that Spark has, and what runs it."""
        with contextlib.suppress(OSError):  # the query of a job that was killed may still write there
            remove_tree(self._all)
        self._folder.mkdir(parents=True, exist_ok=True)
        self._start(run_epoch)

    def go_on(self, run_epoch: RunEpoch, end_epoch: EndEpoch, begun: int | None) -> None:
        """As `serve`, for a query that another job started, which may have `begun` an epoch that is not logged yet."""
        self._start(run_epoch, end_epoch, begun)

    def close(self) -> None:
        """Answer no more."""
        self.leave()
        if self._thread is not None:
            with contextlib.suppress(OSError):
                remove_tree(self._folder)

    def leave(self) -> None:
        """Answer no more, since another job does."""
        self._closed.set()
        if self._thread is not None:
            self._thread.join()

    def _start(self, run_epoch: RunEpoch, end_epoch: EndEpoch | None = None, begun: int | None = None) -> None:
        self._thread = Thread(
            target=self._serve, args=(run_epoch, end_epoch, begun), daemon=True, name=f"epochs of {self._query}"
        )
        self._thread.start()

    def _serve(self, run_epoch: RunEpoch, end_epoch: EndEpoch | None, begun: int | None) -> None:
        from pyspark.errors import PySparkException

        try:
            if end_epoch is not None and begun is not None:
                self._end(end_epoch, begun)
            while (asked := self._next(_IDLE)) is not None:
                if isinstance(asked, EpochRequested):  # else it ends an epoch that has been refused meanwhile
                    self._mine.send(self._answer(run_epoch, self._run, asked.epoch))
        except Exception as error:  # the two cannot reach each other
            self.failure = error
            if self.running is not None and not isinstance(error, PySparkException):  # else it is Spark that is away
                self.running.stop()

    def _answer(self, end: Callable[[R, int], None], run: R, epoch: int) -> FromJob:
        try:
            end(run, epoch)
        except Exception as error:
            return EpochRejected(str(error))
        return EpochClosed()

    def _end(self, end_epoch: EndEpoch, epoch: int) -> None:
        """End an epoch that the previous job began."""

        def is_logged() -> bool:
            with contextlib.suppress(OSError):  # a store that is away for a moment
                last = self._directory.last_epoch(self._query)
                return last is not None and last >= epoch
            return False

        try:
            message = self._next(_IDLE, is_logged)
        except Exception as error:
            raised = error

            def failed(_: bool) -> Outcome:
                raise raised

            self._answer(end_epoch, failed, epoch)  # or whoever waits for the epoch would wait for ever
            raise
        if isinstance(message, EpochRequested) and message.epoch > epoch:  # so the one before is logged
            self._next_epoch = message
            end_epoch(None, epoch)
        elif message is None and is_logged():
            end_epoch(None, epoch)
        else:
            run = self._run if isinstance(message, EpochRequested) else lambda _: self._outcome(message)
            answer = self._answer(end_epoch, run, epoch)
            if message is not None:
                self._mine.send(answer)

    def _run(self, ends: bool) -> Outcome:
        """Let the server run the epoch that it asked for."""
        self._mine.send(StartEpoch(ends))
        message: FromServer | None = None
        with meanwhile(partial(self._hasten, ends), f"stop of {self._query}"):
            while isinstance(message := self._next(), EpochEvents):
                self._observe(message)
        return self._outcome(message)

    def _hasten(self, ends: bool, done: Event) -> None:
        """Tell the server if the job is being stopped, until the epoch is `done`."""
        while not done.wait(_IDLE):
            if self._host.stopping():
                self._mine.send(StartEpoch(ends, soon=True))
                return

    def _observe(self, latest: EpochEvents) -> None:
        """Observe the events that earlier messages did not have."""
        new = max(0, latest.count - self._heard)
        for name, values in latest.events[len(latest.events) - min(new, len(latest.events)) :]:
            self._host.observe(_decoded(name, values))
        self._heard = latest.count

    def _outcome(self, message: FromServer | None) -> Outcome:
        if isinstance(message, EpochDone):
            self._observe(message.events)
            self._heard = 0
            return message.outcome
        if isinstance(message, EpochFailed):
            kind: type[errors.UnifiedError] = getattr(errors, message.kind, StageError)
            raise kind(message.message)
        if self._closed.is_set():
            raise StoppedError("the query has stopped")
        raise (self.running.exception() if self.running is not None else None) or StageError(
            f"{self._plan.name}: query '{self._query}' ended on the Spark Connect server while it ran an epoch; the job"
            " goes on from the epoch before"
        )

    def _next(self, at_most: float = 0.0, until: Callable[[], bool] = lambda: False) -> FromServer | None:
        """Return the server's next message; None where none will come, or where there is none `until` then.

        It looks less and less often, down to every `at_most` seconds.
        """
        if self._next_epoch is not None:
            received, self._next_epoch = self._next_epoch, None
            return received
        looked, pause = time.monotonic(), self._theirs.pause
        while True:
            message = self._theirs.receive()
            if message is not None or self._closed.wait(pause):
                return message
            pause = max(self._theirs.pause, min(1.1 * pause, at_most))
            if time.monotonic() - looked >= _ALIVE:
                looked = time.monotonic()
                if until() or (self.running is not None and not self.running.isActive):
                    return self._theirs.receive()


class EpochsHere:
    """The server's side: the function that Spark calls with each micro-batch."""

    def __init__(self, payload: bytes, query: str, folder: UPath, directory: CheckpointDirectory, token: int) -> None:
        """`token` is that of the job that starts the query."""
        self._payload, self._query, self._folder = payload, query, folder
        self._directory, self._started = directory, token
        self._mine, self._theirs = _of_server(folder, token), _of_job(folder, token)
        self._runner: EpochRunner | None = None
        self._events: list[tuple[str, list[msgspec.Raw]]] = []
        """The latest events of the epoch, of so many."""

        self._count = 0
        self._soon, self._looked = False, 0.0
        """Whether the epoch is to close soon, and when the job's messages were looked at for that."""

        self._heartbeat: tuple[int, int, bool] | None = None
        self._seen = 0.0
        """The last heartbeat of a job, and when it was seen here: two machines have two clocks."""

    def __call__(self, frame: DataFrame, epoch: int) -> None:
        go = self._ask(EpochRequested(epoch))
        ends = isinstance(go, StartEpoch) and go.ends
        self._soon = isinstance(go, StartEpoch) and go.soon
        self._events, self._count = [], 0
        try:
            if self._runner is None:
                self._runner = self._loaded()
                self._runner.begin(Host(frame.sparkSession, self._check, self._tell, self._is_stopping))
            outcome = self._runner.run(frame, epoch, ends)
        except Exception as error:
            failed = error if self._runner is None else self._failed(self._runner, error, frame)
            kinds = (kind.__name__ for kind in type(failed).__mro__ if hasattr(errors, kind.__name__))
            self._mine.send(EpochFailed(next(kinds, StageError.__name__), str(failed)))
            raise failed from error
        self._ask(EpochDone(epoch, outcome, self._latest_events()))

    def _tell(self, event: JobEvent) -> None:
        self._events = [*self._events[1 - _KEPT :], _encoded(event)]
        self._count += 1
        self._mine.send(self._latest_events())

    def _latest_events(self) -> EpochEvents:
        return EpochEvents(self._count, self._events)

    def _is_stopping(self) -> bool:
        """Return whether the job has said that the epoch is to close soon."""
        if not self._soon and time.monotonic() - self._looked >= _IDLE:
            self._looked = time.monotonic()
            received = self._theirs.receive()
            self._soon = isinstance(received, StartEpoch) and received.soon
        return self._soon

    def _loaded(self) -> EpochRunner:
        """Load the epochs' runner; raises `MissingRequirementError` where the server's process lacks what it needs."""
        from pyspark import cloudpickle

        try:
            runner: EpochRunner = cloudpickle.loads(self._payload)
        except Exception as error:
            raise MissingRequirementError(
                f"{self._directory.path.name}: the Python process of the Spark Connect server cannot load what commits"
                f" the epochs of query '{self._query}': {type(error).__name__}: {error}; install there what the job"
                " has, in the same versions"
            ) from error
        return runner

    def _failed(self, runner: EpochRunner, error: Exception, frame: DataFrame) -> errors.UnifiedError:
        try:
            return translated(error, runner.writer.plan, self._query, frame.sparkSession)
        finally:
            runner.close()

    def _ask(self, message: FromServer) -> FromJob:
        """Send a message to the job of the query, which may change meanwhile, and return its answer.

        The answer of a job whose lease another has taken does not count. A job that could close an epoch still had the
        lease while it did what follows from that.
        """
        self._mine.send(message)
        looked = time.monotonic()
        while True:
            received = self._theirs.receive()
            if isinstance(received, EpochClosed):
                return received
            if isinstance(received, StartEpoch) and not isinstance(message, EpochRequested):
                continue  # it says that the epoch is to close soon, which it does
            if received is None and time.monotonic() - looked < _ALIVE:
                time.sleep(self._theirs.pause)
                continue
            looked = time.monotonic()
            if received is None:
                self._check_job()
            if self._follow():
                self._mine.send(message)
            elif isinstance(received, EpochRejected):
                if self._runner is not None:
                    self._runner.close()
                raise StoppedError(received.reason)
            elif received is not None:
                return received

    def _check(self) -> None:
        """Raise where the query's job may not write any more."""
        if self._obey() < self._theirs.token:
            raise self._directory.deleted()

    def _follow(self) -> bool:
        """Obey the job that has the lease; return whether it is another one than before."""
        before = self._theirs.token
        self._obey()
        return self._theirs.token > before

    def _obey(self) -> int:
        """Obey the job that has the lease; return the greatest token, or none where the directory is gone.

        A job that has just taken the lease is awaited: it says whether it goes on with the query. Raises
        `LeaseLostError` where it does not.
        """
        while (greatest := self._directory.greatest()) > self._theirs.token:
            running = attaching.running(self._directory)
            if running is None or running.token <= self._theirs.token:
                self._check_job()
                time.sleep(_ALIVE)
            elif running.started == self._started and self._query in running.queries:
                self._mine.token, self._theirs = running.token, _of_job(self._folder, running.token)
            else:
                raise LeaseLostError(
                    f"{self._directory.path.name}: another job has taken over the checkpoint directory, and runs a"
                    " query of its own; this one ends"
                )
        return greatest

    def _check_job(self) -> None:
        """Raise where there is no job for which the query could wait."""
        holder = self._directory.holder()
        if holder is None:
            raise StateError(
                f"{self._directory.path.name}: the Spark Connect server does not find the job's lease in"
                f" {self._directory.path}; give execution.checkpointing.dir a place that the job and the server share"
            )
        if holder.released and holder.token == self._theirs.token:
            raise LeaseLostError(f"{self._directory.path.name}: the job that this query belongs to has stopped")
        heartbeat = (holder.token, holder.beat, holder.released)
        if heartbeat != self._heartbeat:
            self._heartbeat, self._seen = heartbeat, time.monotonic()
        elif time.monotonic() - self._seen > ORPHANED:
            raise LeaseLostError(
                f"{self._directory.path.name}: the process of the job that this query belongs to has given no sign of"
                f" life for {ORPHANED:.0f} s, and no other job has gone on with it; the query ends, and the next job"
                " goes on where it was"
            )
