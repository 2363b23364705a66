"""Takes a savepoint of a deployment, whether its job runs or not, for the one who asks from another process.

A job that runs is asked for it. Of one that does not, the checkpoint is copied here, and a Spark session writes its
tables.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Literal, NamedTuple, TypeAlias, TypeVar
from uuid import uuid4

import msgspec
from upath import UPath

from dagster_unified.connectors.paths import children, read_whole
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
from dagster_unified.graph.segments import MAIN
from dagster_unified.graph.topology import Lanes, packed
from dagster_unified.operators.time import wall_clock
from dagster_unified.state import manifest as manifests

if TYPE_CHECKING:
    from pyspark.sql import SparkSession


Then: TypeAlias = Literal["running", "suspended", "drained"]
"""What becomes of the job of which a savepoint is taken."""


class Taken(NamedTuple):
    """A savepoint, where it is, and where its tables are."""

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
    why = without_tables(plan)
    if path:
        path = str(manifests.check_free(path, "savepoint"))
    if why and (path or then == "drained"):
        hint = "give no path" if path else "drain it without one"
        raise StateError(f"{plan.name}: a savepoint of this pipeline has no tables, since {why}; {hint}")
    if path or then == "drained":
        check_positions(plan)
    given = _asked(directory, reason, path, then)
    if given is None:
        take_here = _take_drained if then == "drained" else _take_stopped
        return take_here(plan, directory, owner, reason, spark, path)
    if not given.location:
        raise StateError(given.error)
    name = given.location.rstrip("/").rpartition("/")[2]
    saved = next(one for one in savepoints(directory) if one.name == name)
    tables = "" if why or given.error else path or given.location
    return Taken(saved, given.location, tables, given.error)


def _asked(directory: CheckpointDirectory, reason: str, path: str, then: Then) -> Answer | None:
    """The answer of the job that runs; None where none does. Raises `StateError` where it was killed meanwhile."""
    asked = False
    while True:
        holder = directory.holder()
        token = holder.token if holder is not None and holder.is_alive(PATIENCE) else None
        stop, drain = then == "suspended", then == "drained"
        wanted = None if token is None else request(directory, token, reason, path, stop, drain)
        if (stop or (drain and wanted is not None)) and not asked:
            asked = bool(ask(directory, state=then, reason=reason))
        if wanted is None:
            return None
        given = await_answer(directory, wanted)
        if given is not None:
            return given
        if then == "running" and not directory.released(wanted.token):
            raise StateError(
                f"{directory.path.name}: the job was killed or replaced before it had taken the savepoint; ask again"
            )


def _take_stopped(
    plan: Plan, directory: CheckpointDirectory, owner: str, reason: str, spark: Callable[[], SparkSession], path: str
) -> Taken:
    """Take a savepoint of a job that does not run."""
    saved = save_stopped(directory, owner, reason, tables=path)
    folder = directory.path / "savepoints" / saved.name
    keeps = any(node.runs_by_key or isinstance(node, IterationNode) for node in plan.graph.nodes)
    if without_tables(plan) or not (keeps or path):
        return Taken(saved, str(folder))
    tables = path or str(folder)
    try:
        _write_tables(plan, spark(), directory, saved.deployed, _checkpoint(plan, directory, saved), tables, reason)
    except UnifiedError as error:
        return Taken(saved, str(folder), error=str(error))
    return Taken(saved, str(folder), tables)


def _take_drained(
    plan: Plan, directory: CheckpointDirectory, owner: str, reason: str, spark: Callable[[], SparkSession], path: str
) -> Taken:
    """Take a savepoint of a job that has come to the end of its input, and does not run any more."""
    lease = directory.take(owner, PATIENCE)
    # Spark may have begun an epoch after the last one, in which nothing was done: the queries have stopped
    names = [one.name for one in packed(plan, Lanes())]
    last = {name: directory.last_epoch(name) for name in names}
    checkpoint = FrozenCheckpoint(directory.path, directory.sources, last)
    try:
        saved = save_drained(
            directory,
            reason,
            lease.check,
            lambda deployed, to: _write_tables(plan, spark(), directory, deployed, checkpoint, to, reason),
            path,
        )
    finally:
        lease.release()
    folder = str(directory.path / "savepoints" / saved.name)
    return Taken(saved, folder, path or folder)


def _write_tables(
    plan: Plan,
    spark: SparkSession,
    directory: CheckpointDirectory,
    deployed: Deployed,
    checkpoint: FrozenCheckpoint,
    path: str,
    reason: str,
) -> None:
    if deployed.start:  # what was read before the deployment's own first epoch has been read as well
        plan = after(plan, directory.positions(), plan.execution.savepoint.ignore_unclaimed)
    try:
        write_tables(plan, spark, deployed, packed(plan, Lanes(deployed.lanes)), checkpoint, path, reason)
    except Exception as error:
        raise translated(error, plan, "savepoint", spark) from error


def _checkpoint(plan: Plan, directory: CheckpointDirectory, saved: Savepoint) -> FrozenCheckpoint:
    folder = directory.path / "savepoints" / saved.name
    names = [one.name for one in packed(plan, Lanes())]
    epochs = {name: last_number(folder / "spark" / name / "commits") for name in names}
    if saved.settled and epochs.get(MAIN) is not None:
        return FrozenCheckpoint(folder, directory.sources, epochs)
    return stopped(folder, directory.sources, names)


T = TypeVar("T", bound=msgspec.Struct)

KEPT = 3_600_000
"""Milliseconds for which an answer is kept that nobody has read."""


class Request(msgspec.Struct, frozen=True):
    """A savepoint is wanted of the job that holds the lease `token`, and why. Milliseconds since the epoch."""

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
    """What became of a request: where the savepoint is, or why there is none. Milliseconds since the epoch."""

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
    write_atomically(directory.path / "requests" / f"{wanted.id}.json", msgspec.json.encode(wanted))
    return wanted


def pending(directory: CheckpointDirectory, token: int) -> list[Request]:
    """The requests to the job that holds the lease `token`, the oldest first."""
    found = [one for _, one in _all(directory, "requests", Request) if one.token == token]
    return sorted(found, key=lambda r: (r.asked, r.id))


def answer(directory: CheckpointDirectory, wanted: Request, location: str = "", error: str = "") -> None:
    """Say what became of a request."""
    given = Answer(wanted.id, wall_clock(), location, error)
    write_atomically(directory.path / "answers" / f"{wanted.id}.json", msgspec.json.encode(given))
    (directory.path / "requests" / f"{wanted.id}.json").unlink(missing_ok=True)


def await_answer(directory: CheckpointDirectory, wanted: Request, poll: float = 0.2) -> Answer | None:
    """Wait until the job has answered; None where it has ended without. Who stops waiting withdraws the request."""
    try:
        while True:
            gone = not _serves(directory, wanted)
            given = _read(directory, wanted)
            if given is not None or gone:
                return given
            time.sleep(poll)
    finally:
        for folder in ("requests", "answers"):
            (directory.path / folder / f"{wanted.id}.json").unlink(missing_ok=True)


def forget(directory: CheckpointDirectory, token: int) -> None:
    """Remove what was asked of earlier jobs than the one that holds the lease `token`, and old answers."""
    requests = [path for path, one in _all(directory, "requests", Request) if one.token < token]
    answers = [path for path, one in _all(directory, "answers", Answer) if one.at < wall_clock() - KEPT]
    for path in (*requests, *answers):
        path.unlink(missing_ok=True)


def _serves(directory: CheckpointDirectory, wanted: Request) -> bool:
    """Whether the job that was asked still holds the lease, and is alive."""
    holder = directory.holder()
    return holder is not None and holder.token == wanted.token and holder.is_alive(PATIENCE)


def _all(directory: CheckpointDirectory, folder: str, kind: type[T]) -> list[tuple[UPath, T]]:
    """The records in a folder that are whole, with their files; others may come and go meanwhile."""
    names = [name for name in children(directory.path / folder) if name.endswith(".json") and name[0] != "."]
    found: list[tuple[UPath, T]] = []
    for path in (directory.path / folder / name for name in names):
        with contextlib.suppress(FileNotFoundError, msgspec.DecodeError):
            found.append((path, msgspec.json.decode(read_whole(path), type=kind)))
    return found


def _read(directory: CheckpointDirectory, wanted: Request) -> Answer | None:
    try:
        return msgspec.json.decode(read_whole(directory.path / "answers" / f"{wanted.id}.json"), type=Answer)
    except (FileNotFoundError, msgspec.DecodeError):
        return None
