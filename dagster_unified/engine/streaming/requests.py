"""Requests for a savepoint of a job that runs, and its answers: two small records in the checkpoint directory.

The one who asks is another process: a command line, or a run of the control job.
"""

from __future__ import annotations

import time
from collections.abc import Callable

import msgspec

from dagster_unified.engine.streaming.atomic import read_latest, write_alternately
from dagster_unified.engine.streaming.checkpoint import CheckpointDirectory
from dagster_unified.errors import StateError


class Request(msgspec.Struct, frozen=True):
    """A savepoint is wanted, and why."""

    number: int = 0
    reason: str = ""


class Answer(msgspec.Struct, frozen=True):
    """What became of a request: where the savepoint is, or why there is none."""

    number: int = 0
    location: str = ""
    error: str = ""
    without_tables: str = ""
    """Why the savepoint has no tables, if it has none."""


def read_request(directory: CheckpointDirectory) -> Request:
    """The latest request."""
    return read_latest(directory.path / "requests", Request, lambda r: r.number) or Request()


def read_answer(directory: CheckpointDirectory) -> Answer:
    """The latest answer."""
    return read_latest(directory.path / "answers", Answer, lambda a: a.number) or Answer()


def request(directory: CheckpointDirectory, reason: str) -> Request:
    """Ask the job that runs for a savepoint."""
    wanted = Request(read_request(directory).number + 1, reason)
    write_alternately(directory.path / "requests", wanted.number, msgspec.json.encode(wanted))
    return wanted


def answer(directory: CheckpointDirectory, given: Answer) -> None:
    """Say what became of a request."""
    write_alternately(directory.path / "answers", given.number, msgspec.json.encode(given))


def await_answer(
    directory: CheckpointDirectory, wanted: Request, gone: Callable[[], bool], poll: float = 0.2
) -> Answer:
    """Wait until the job has answered.

    Raises `StateError` where it could not take the savepoint, and where it is `gone`.
    """
    while True:
        given = read_answer(directory)
        if given.number >= wanted.number:
            if given.error:
                raise StateError(given.error)
            return given
        if gone():
            raise StateError(f"{directory.path.name}: the job has ended, and took no savepoint; ask again")
        time.sleep(poll)
