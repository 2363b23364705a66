"""Requests for a savepoint of a job that runs, and its answers: a small file for each, in the checkpoint directory.

    <dir>/<pipeline>/requests/<id>.json    written by the one who asks, another process: a command line or a control run
    <dir>/<pipeline>/answers/<id>.json     written by the job

A request is to one job, by the fencing token of its lease. If that job ends first, no other job takes the request.
"""

from __future__ import annotations

import contextlib
import time
from typing import TypeVar
from uuid import uuid4

import msgspec
from upath import UPath

from dagster_unified.connectors.paths import children, read_whole
from dagster_unified.engine.streaming.atomic import write_atomically
from dagster_unified.engine.streaming.checkpoint import PATIENCE, CheckpointDirectory
from dagster_unified.operators.time import wall_clock

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
