"""Takes a savepoint of a deployment for somebody in another process, and holds the job's queries for it."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from threading import Event, Lock
from typing import TYPE_CHECKING, Literal, NamedTuple, TypeAlias, TypeVar
from uuid import uuid4

import msgspec
from upath import UPath

from dagster_unified.engine.failures import translated
from dagster_unified.engine.positions import after, check_positions
from dagster_unified.engine.streaming.atomic import write_atomically
from dagster_unified.engine.streaming.checkpoint import (
    PATIENCE,
    CheckpointDirectory,
    Deployed,
    check_not_drained,
    last_number,
)
from dagster_unified.engine.streaming.desired import ask
from dagster_unified.engine.streaming.savepoints.copy import Savepoint, save_drained, save_stopped, savepoints
from dagster_unified.engine.streaming.savepoints.export import FrozenCheckpoint, stopped, without_tables, write_tables
from dagster_unified.errors import StateError, UnifiedError
from dagster_unified.graph.nodes import IterationNode
from dagster_unified.graph.plan import Plan
from dagster_unified.graph.queries import MAIN, key_group_queries
from dagster_unified.graph.topology import Lanes
from dagster_unified.operators.time import wall_clock
from dagster_unified.state import manifest as manifests
from dagster_unified.storage.paths import children, read_whole

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

Then: TypeAlias = Literal["running", "suspended", "drained"]
"""The fate of the job whose savepoint is taken."""

KEPT = 3_600_000
"""Milliseconds for which an answer is kept that nobody has read."""

_REQUESTS, _ANSWERS = "requests", "answers"

T = TypeVar("T", bound=msgspec.Struct)


class Taken(NamedTuple):
    """A savepoint: where it is, and where its tables are."""

    savepoint: Savepoint
    location: str
    tables: str = ""
    """Empty where it has none."""

    error: str = ""
    """Why its tables could not be written."""


def take(
    plan: Plan,
    directory: CheckpointDirectory,
    owner: str,
    reason: str,
    spark: Callable[[], SparkSession],
    path: str = "",
    then: Then = "running",
) -> Taken:
    """Take a savepoint, with its tables in `path` if one is given.

    A job that is to be `suspended` then stops, and is kept stopped: the savepoint is its state where it stops. One that
    is to be `drained` comes to the end of its input before: what has arrived is processed, all timers fire, and the
    savepoint is the state that is left. Raises `StateError` where there is no state to save, or a savepoint in `path`
    already, or where a job is to be drained and none runs, `ConfigurationError` where one that was drained is to be
    suspended, and `UnsupportedError` where a path is given, or a job is to be drained, and a source cannot tell what
    has been read of it; nothing is asked then.
    """
    if then == "suspended":
        check_not_drained(directory, plan)
    no_tables = without_tables(plan)
    if path:
        path = str(manifests.check_free(path, "savepoint"))
    if no_tables and (path or then == "drained"):
        hint = "give no path" if path else "drain it without one"
        raise StateError(f"{plan.name}: a savepoint of this pipeline has no tables, since {no_tables}; {hint}")
    if path or then == "drained":
        check_positions(plan)
    answer_given = _answer_of_job(directory, reason, path, then)
    if answer_given is None:
        stopped_job = _StoppedJob(plan, directory, owner, reason, spark, path)
        return stopped_job.take_drained() if then == "drained" else stopped_job.take()
    if not answer_given.location:
        raise StateError(answer_given.error)
    name = answer_given.location.rstrip("/").rpartition("/")[2]
    saved = next(savepoint for savepoint in savepoints(directory) if savepoint.name == name)
    tables = "" if no_tables or answer_given.error else path or answer_given.location
    return Taken(saved, answer_given.location, tables, answer_given.error)


def _answer_of_job(directory: CheckpointDirectory, reason: str, path: str, then: Then) -> Answer | None:
    """Return the running job's answer; None where no job runs. Raises `StateError` where it was killed meanwhile."""
    stop, drain = then == "suspended", then == "drained"
    is_asked = False
    while True:
        holder = directory.holder()
        token = holder.token if holder is not None and holder.is_alive(PATIENCE) else None
        wanted = None if token is None else request(directory, token, reason, path, stop, drain)
        if (stop or (drain and wanted is not None)) and not is_asked:
            is_asked = bool(ask(directory, state=then, reason=reason))
        if wanted is None:
            return None
        answered = await_answer(directory, wanted)
        if answered is not None:
            return answered
        if then == "running" and not directory.released(wanted.token):
            raise StateError(
                f"{directory.path.name}: the job was killed or replaced before it had taken the savepoint; ask again"
            )


@dataclass(frozen=True)
class _StoppedJob:
    """A job that does not run, whose savepoint is taken in this process."""

    plan: Plan
    directory: CheckpointDirectory
    owner: str
    reason: str
    spark: Callable[[], SparkSession]
    path: str
    """Where the tables go; empty for the folder of the savepoint."""

    def take(self) -> Taken:
        saved = save_stopped(self.directory, self.owner, self.reason, tables=self.path)
        folder = self._folder(saved)
        keeps = any(node.runs_by_key or isinstance(node, IterationNode) for node in self.plan.graph.nodes)
        if without_tables(self.plan) or not (keeps or self.path):
            return Taken(saved, str(folder))
        tables = self.path or str(folder)
        try:
            self._write_tables(saved.deployed, self._checkpoint(folder, saved), tables)
        except UnifiedError as error:
            return Taken(saved, str(folder), error=str(error))
        return Taken(saved, str(folder), tables)

    def take_drained(self) -> Taken:
        """Take the savepoint of a job that has come to the end of its input."""
        with self.directory.take(self.owner, PATIENCE) as lease:
            # Spark may have begun an epoch after the last one, in which nothing was done: the queries have stopped
            last = {name: self.directory.last_epoch(name) for name in self._queries()}
            checkpoint = FrozenCheckpoint(self.directory.path, self.directory.sources, last)
            saved = save_drained(
                self.directory,
                self.reason,
                lease.check,
                lambda deployed, path: self._write_tables(deployed, checkpoint, path),
                self.path,
            )
        folder = str(self._folder(saved))
        return Taken(saved, folder, self.path or folder)

    def _folder(self, saved: Savepoint) -> UPath:
        return self.directory.path / "savepoints" / saved.name

    def _queries(self) -> list[str]:
        return [query.name for query in key_group_queries(self.plan, Lanes())]

    def _checkpoint(self, folder: UPath, saved: Savepoint) -> FrozenCheckpoint:
        epochs = {name: last_number(folder / "spark" / name / "commits") for name in self._queries()}
        if saved.settled and epochs.get(MAIN) is not None:
            return FrozenCheckpoint(folder, self.directory.sources, epochs)
        return stopped(folder, self.directory.sources, epochs)

    def _write_tables(self, deployed: Deployed, checkpoint: FrozenCheckpoint, path: str) -> None:
        plan, spark = self.plan, self.spark()
        if deployed.start:  # what was read before the deployment's own first epoch has been read as well
            plan = after(plan, self.directory.positions(), plan.execution.savepoint.ignore_unclaimed)
        try:
            write_tables(
                plan, spark, deployed, key_group_queries(plan, Lanes(deployed.lanes)), checkpoint, path, self.reason
            )
        except Exception as error:
            raise translated(error, plan, "savepoint", spark) from error


# Requests and answers


class Request(msgspec.Struct, frozen=True):
    """A request for a savepoint of the job with the lease `token`, and why. Milliseconds since the epoch."""

    id: str
    token: int
    asked: int
    reason: str
    path: str = ""
    """Where its tables go; empty for the folder of the savepoint."""

    stop: bool = False
    """Whether the job stops, and takes the savepoint where it has stopped."""

    drain: bool = False
    """Whether its input ends here first: all timers fire, and the savepoint is what is left."""


class Answer(msgspec.Struct, frozen=True):
    """The answer to a request: where the savepoint is, or why there is none. Milliseconds since the epoch."""

    id: str
    at: int
    location: str = ""
    error: str = ""
    """Why there is no savepoint; with a location, why it has no tables."""


def request(
    directory: CheckpointDirectory, token: int, reason: str, path: str = "", stop: bool = False, drain: bool = False
) -> Request:
    """Ask the job that holds the lease `token` for a savepoint."""
    wanted = Request(uuid4().hex, token, wall_clock(), reason, path, stop, drain)
    write_atomically(_file(directory, _REQUESTS, wanted), msgspec.json.encode(wanted))
    return wanted


def pending(directory: CheckpointDirectory, token: int) -> list[Request]:
    """Return the requests to the job that holds the lease `token`, the oldest first."""
    requests = [record for _, record in _all(directory, _REQUESTS, Request) if record.token == token]
    return sorted(requests, key=lambda r: (r.asked, r.id))


def answer(directory: CheckpointDirectory, wanted: Request, location: str = "", error: str = "") -> None:
    """Answer a request."""
    record = Answer(wanted.id, wall_clock(), location, error)
    write_atomically(_file(directory, _ANSWERS, wanted), msgspec.json.encode(record))
    _file(directory, _REQUESTS, wanted).unlink(missing_ok=True)


def await_answer(directory: CheckpointDirectory, wanted: Request, poll: float = 0.2) -> Answer | None:
    """Wait for the job's answer; None where it has ended without. Who stops waiting withdraws the request."""
    try:
        while True:
            has_ended = not _serves(directory, wanted)
            answered = _read(_file(directory, _ANSWERS, wanted), Answer)
            if answered is not None or has_ended:
                return answered
            time.sleep(poll)
    finally:
        for folder in (_REQUESTS, _ANSWERS):
            _file(directory, folder, wanted).unlink(missing_ok=True)


def forget(directory: CheckpointDirectory, token: int) -> None:
    """Remove the requests to earlier jobs than the one with the lease `token`, and old answers."""
    requests = [path for path, record in _all(directory, _REQUESTS, Request) if record.token < token]
    answers = [path for path, record in _all(directory, _ANSWERS, Answer) if record.at < wall_clock() - KEPT]
    for path in (*requests, *answers):
        path.unlink(missing_ok=True)


def _serves(directory: CheckpointDirectory, wanted: Request) -> bool:
    """Return whether the job that was asked still holds the lease, and is alive."""
    holder = directory.holder()
    return holder is not None and holder.token == wanted.token and holder.is_alive(PATIENCE)


def _file(directory: CheckpointDirectory, folder: str, wanted: Request) -> UPath:
    return directory.path / folder / f"{wanted.id}.json"


def _all(directory: CheckpointDirectory, folder: str, kind: type[T]) -> list[tuple[UPath, T]]:
    """Return the complete records in a folder, with their files; others may come and go meanwhile."""
    names = [name for name in children(directory.path / folder) if name.endswith(".json") and name[0] != "."]
    read = ((path, _read(path, kind)) for path in (directory.path / folder / name for name in names))
    return [(path, record) for path, record in read if record is not None]


def _read(path: UPath, kind: type[T]) -> T | None:
    try:
        return msgspec.json.decode(read_whole(path), type=kind)
    except (FileNotFoundError, msgspec.DecodeError):
        return None


class Brake:
    """Holds each query back behind the last epoch that it may end, until it is released."""

    def __init__(self, last: Mapping[str, int]) -> None:
        self._last = last
        self._let_go = Event()

    def wait(self, query: str, epoch: int) -> None:
        """Wait where a query is about to end an epoch that is too far ahead."""
        if epoch > self._last[query]:
            self._let_go.wait()

    def let_go(self) -> None:
        """Let all queries go on from now on."""
        self._let_go.set()


class Pause:
    """Calls `action` once when all of the queries are held, with the epoch before for each; None before its first.

    Nothing is written then: what one query hands on to another is between the same two epochs at both.
    """

    def __init__(self, queries: Collection[str], action: Callable[[Mapping[str, int | None]], None]) -> None:
        self._queries = frozenset(queries)
        self._action = action
        self._epochs: dict[str, int | None] = {}
        self._paused: list[Callable[[], None]] = []
        self._is_over = False
        self._lock = Lock()

    def hold(self, query: str, epoch: int | None, go_on: Callable[[], None]) -> None:
        """Note that a query is held behind an epoch, until `go_on` is called."""
        with self._lock:
            if self._is_over:
                go_on()
                return
            self._paused.append(go_on)
            self._epochs[query] = epoch
            if self._epochs.keys() >= self._queries:
                try:
                    self._action(self._epochs)
                finally:
                    self._let_go()

    def give_up(self) -> None:
        """Let all queries go on; end what is being done first."""
        with self._lock:
            if not self._is_over:
                self._let_go()

    def _let_go(self) -> None:
        self._is_over = True
        for go_on in self._paused:
            go_on()
