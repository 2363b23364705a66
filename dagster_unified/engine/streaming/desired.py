"""The desired state of a deployment and the status of its job: two small records in the checkpoint directory.

Both outlive any process: a sensor whose cursor was reset, or a job that was killed, finds them again.
"""

from __future__ import annotations

import contextlib

import msgspec

from dagster_unified.engine.streaming.atomic import AlternatingFiles
from dagster_unified.engine.streaming.checkpoint import CheckpointDirectory
from dagster_unified.operators.time import wall_clock


class Desired(msgspec.Struct, frozen=True):
    """The desired state. `stop` is the fencing token of the job that is to stop, and `reason` says why."""

    number: int = 0
    state: str | None = None
    """`running`, `suspended` or `drained`; None where the program decides."""
    stop: int = 0
    reason: str = ""
    at: int = 0
    """When the state was requested, in milliseconds since the epoch; failures before a resumption do not count."""

    accepted: str = ""
    """The fingerprint of the new code that may take the place of the old, for a deployment that asks before it does."""


class Status(msgspec.Struct, frozen=True):
    """The last status of a job: which run it is, and since when it has been busy with one epoch.

    Milliseconds since the epoch.
    """

    number: int
    run_id: str
    token: int
    at: int
    epochs: int = 0
    busy_since: int | None = None
    watermark: int | None = None
    lost: str = ""
    """The job's cluster's last loss, and `lost_at` when."""

    lost_at: int = 0
    phase: str = ""
    """What the job does: `running`, `draining`, or what it does before its first epoch."""


def read_desired(directory: CheckpointDirectory) -> Desired:
    """Return the present desired state."""
    return _desired(directory).read() or Desired()


def ask(
    directory: CheckpointDirectory,
    *,
    state: str | None = None,
    stop: int | None = None,
    accepted: str | None = None,
    reason: str = "",
) -> Desired:
    """Change the desired state, request that one holder of the lease stops, or accept new code.

    What others ask meanwhile stays: for certain in a bucket, and on a disk but for those who ask at the same moment.
    """
    while True:
        files = _desired(directory)
        desired = files.open() or Desired()
        wanted = Desired(
            desired.number + 1,
            state or desired.state,
            desired.stop if stop is None else stop,
            reason,
            wall_clock() if state else desired.at,
            desired.accepted if accepted is None else accepted,
        )
        with contextlib.suppress(FileExistsError):  # another was first: once more, after it
            files.write(wanted)
            return wanted


def read_status(directory: CheckpointDirectory) -> Status | None:
    """Return the last status of the last job."""
    return _status(directory).read()


def write_status(directory: CheckpointDirectory, status: Status) -> None:
    """Write the status of a job."""
    with contextlib.suppress(FileExistsError):  # a later job's, which counts
        _status(directory).write(status)


def _desired(directory: CheckpointDirectory) -> AlternatingFiles[Desired]:
    return AlternatingFiles(directory.path / "desired", Desired, lambda d: d.number)


def _status(directory: CheckpointDirectory) -> AlternatingFiles[Status]:
    return AlternatingFiles(directory.path / "status", Status, lambda s: s.number)
