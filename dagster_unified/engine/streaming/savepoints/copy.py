"""Savepoints: copies of a stopped job's state and source positions, which can be restored until somebody removes them.

    <dir>/<pipeline>/savepoints/<name>/spark/, control/, iterations/, reports/   as they were
    <dir>/<pipeline>/savepoints/<name>/files.json                      what they consist of, and how large it is
    <dir>/<pipeline>/savepoints/<name>/savepoint.json                  whole at last: until then there is no savepoint

That of a job whose input has ended has no such copies: it is tables only, and cannot be restored.
Restoring one starts a new *timeline* of the deployment, on which sinks take epochs that they had on the one before.
Spark writes each file once and never changes it: on a local disk files are linked, not copied; in a bucket they are
copied while the job goes on.
"""

from __future__ import annotations

import contextlib
import os
import re
import shutil
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, replace
from datetime import datetime, timezone
from uuid import uuid4

import msgspec
from upath import UPath

from dagster_unified.engine.streaming.atomic import write_atomically
from dagster_unified.engine.streaming.checkpoint import PATIENCE, CheckpointDirectory, Deployed
from dagster_unified.engine.streaming.control import ControlFile
from dagster_unified.engine.streaming.reports import FOLDER as REPORTS
from dagster_unified.errors import LeaseLostError, StateError
from dagster_unified.graph.queries import MAIN
from dagster_unified.operators.time import wall_clock
from dagster_unified.state.manifest import NAME as TABLES
from dagster_unified.storage import conditional
from dagster_unified.storage.paths import children, is_local, place_of, remove_tree, sizes, storage_path

SPARK = "spark"
FOLDERS = (SPARK, "control", "iterations", REPORTS)
MANIFEST, FILES = "savepoint.json", "files.json"
RESTORING = "restoring.json"

_AT_ONCE = 6
"""Files that are copied at once beside a job: s3fs has ten connections, and the job's epochs need some."""

_NAME = re.compile(r"g\d+-\d{8}T\d{6}-\d{3}")


class Savepoint(msgspec.Struct, frozen=True):
    """The manifest of a savepoint.

    `taken` is in milliseconds since the epoch; `epochs` has the last one that each query has committed.
    """

    name: str
    taken: int
    reason: str
    deployed: Deployed
    epochs: dict[str, int]
    settled: bool = False
    """Whether the sinks had nothing of a later epoch."""

    tables: str = ""
    """Where its tables were asked for; empty for its own folder."""

    periodic: bool = False
    """Whether the job took it by itself, as `execution.savepoint.interval` says."""

    drained: bool = False
    """Whether the input had come to its end, and all timers had fired."""

    def describe(self) -> str:
        reached = (
            ", ".join(f"epoch {epoch} of {query}" for query, epoch in sorted(self.epochs.items()))
            or "before the first epoch"
        )
        return (
            f"{self.name}: generation {self.deployed.generation}, {reached}, taken"
            f" {_utc(self.taken):%Y-%m-%d %H:%M:%S} UTC ({self.reason})"
            + (", drained" if self.drained else "")
            + (f", tables in {self.tables}" if self.tables else "")
        )


def savepoints(directory: CheckpointDirectory) -> list[Savepoint]:
    """Return the savepoints of a deployment, the oldest first."""
    whole = []
    for path in _folders(directory.path / "savepoints"):
        with contextlib.suppress(FileNotFoundError, NotADirectoryError, msgspec.DecodeError):
            whole.append(msgspec.json.decode((path / MANIFEST).read_bytes(), type=Savepoint))
    return sorted(whole, key=lambda s: (s.taken, s.name))


@dataclass(frozen=True)
class UnfinishedSavepoint:
    """A savepoint in the making: its files are known, and not all are copied yet."""

    savepoint: Savepoint
    folder: UPath
    _mark: str
    """The mark in the place of its manifest."""

    _check: Callable[[], None]
    _rest: Sequence[str] = ()
    """The files to copy, as paths from the deployment's folder."""

    @property
    def is_copied(self) -> bool:
        """Whether it has all of its files."""
        return not self._rest

    def complete(self) -> Savepoint:
        """Copy what is left, and complete the savepoint.

        The job may go on meanwhile, but has to keep all that the savepoint's epoch needs; what it no longer kept for it
        may go. Where not all can be copied, the copies are removed.
        """
        try:
            self._copy_rest()
        except Exception:
            with contextlib.suppress(Exception):  # else the next job does it
                self._check()
                remove_tree(self.folder)
            raise
        (self.folder / FILES).write_bytes(msgspec.json.encode(_sizes(self.folder)))
        return self.commit()

    def commit(self) -> Savepoint:
        """Complete the savepoint without copies."""
        self._check()
        try:
            conditional.write(self.folder / MANIFEST, msgspec.json.encode(self.savepoint), self._mark)
        except FileExistsError as error:
            raise LeaseLostError(
                f"savepoint {self.savepoint.name}: another job has taken over, and removed what was copied; ask that"
                " one"
            ) from error
        return self.savepoint

    def _copy_rest(self) -> None:
        if self._rest:
            source = self.folder.parent.parent
            origins, targets = ([f"{place.path}/{path}" for path in self._rest] for place in (source, self.folder))
            self.folder.fs.copy(origins, targets, on_error="ignore", batch_size=_AT_ONCE)


def save(directory: CheckpointDirectory, reason: str, check: Callable[[], None], tables: str = "") -> Savepoint:
    """Take a savepoint of a job that does not run, as `begin` says."""
    return begin(directory, reason, check, directory.settled(), tables).complete()


def begin(
    directory: CheckpointDirectory,
    reason: str,
    check: Callable[[], None],
    settled: bool,
    tables: str = "",
    periodic: bool = False,
) -> UnfinishedSavepoint:
    """Begin a savepoint. The caller holds the lease, and `check` raises where it lost it; no job may write meanwhile.

    `settled` says whether the sinks have nothing of a later epoch; `periodic` that an interval made it. Raises
    `StateError` where there is no state.
    """
    check_whole(directory)
    deployed = directory.deployed()
    if deployed is None or not deployed.id or not (directory.path / "spark").exists():
        raise StateError(f"{directory.path.name}: there is no state to save in {directory.path}; start the job first")
    ended = [
        query.name
        for query in _folders(directory.path / "control")
        if (event := ControlFile(str(query)).read()) is not None and event.end
    ]
    if deployed.finished or ended:
        raise StateError(
            f"{directory.path.name}: its input has come to its end, and all timers have fired, so that there is nothing"
            " to go on from; take savepoints before draining"
        )
    unfinished = _marked(directory, deployed, reason, check, tables, settled=settled, periodic=periodic)
    rest: Sequence[str] = ()
    for folder in FOLDERS:
        if folder == SPARK and not is_local(unfinished.folder):
            rest = list(_sizes(directory.path, [folder]))
        else:
            _copy(directory.path / folder, unfinished.folder / folder)
    return replace(unfinished, _rest=rest)


def save_drained(
    directory: CheckpointDirectory,
    reason: str,
    check: Callable[[], None],
    write: Callable[[Deployed, str], None],
    tables: str = "",
) -> Savepoint:
    """Take a savepoint of a job whose input has come to its end: its tables, which `write` writes into a folder.

    The caller holds the lease, and `check` raises where it lost it. Raises `StateError` where the input goes on.
    """
    check_whole(directory)
    deployed = directory.deployed()
    if deployed is None or not deployed.finished:
        raise StateError(
            f"{directory.path.name}: its input has not come to its end, and no job runs that could drain it; resume it,"
            " and ask again"
        )
    unfinished = _marked(directory, deployed, reason, check, tables, settled=True, drained=True)
    write(deployed, tables or str(unfinished.folder))
    return unfinished.commit()


def _marked(
    directory: CheckpointDirectory,
    deployed: Deployed,
    reason: str,
    check: Callable[[], None],
    tables: str,
    *,
    settled: bool,
    periodic: bool = False,
    drained: bool = False,
) -> UnfinishedSavepoint:
    """Choose the folder of a savepoint; a mark stands for its manifest until it is complete."""
    now = wall_clock()
    name = f"g{deployed.generation}-{_utc(now):%Y%m%dT%H%M%S}-{now % 1000:03d}"
    savepoint = Savepoint(name, now, reason, deployed, _epochs(directory), settled, tables, periodic, drained)
    folder = directory.path / "savepoints" / name
    mark = conditional.write(folder / MANIFEST, msgspec.json.encode({"begun": uuid4().hex}), None)
    return UnfinishedSavepoint(savepoint, folder, mark, check)


def _utc(milliseconds: int) -> datetime:
    return datetime.fromtimestamp(milliseconds / 1000, timezone.utc)


def retain(directory: CheckpointDirectory, count: int, starts: Collection[str]) -> None:
    """Remove an interval's savepoints, except the last `count`. One that a job `starts` from stays."""
    periodic = [savepoint for savepoint in savepoints(directory) if savepoint.periodic]
    for savepoint in periodic[: max(0, len(periodic) - count)]:
        _remove(directory.path / "savepoints" / savepoint.name, starts)


def discard(directory: CheckpointDirectory, name: str) -> None:
    """Remove a savepoint, but not tables of it that are elsewhere."""
    _remove(directory.path / "savepoints" / name, ())


def remove_halves(directory: CheckpointDirectory, starts: Collection[str]) -> None:
    """Remove what a job that was killed has left of savepoints: half of a copy, or one of an interval without tables.

    The caller holds the lease.
    """
    whole = {savepoint.name: savepoint for savepoint in savepoints(directory)}
    for folder in _folders(directory.path / "savepoints"):
        savepoint = whole.get(folder.name)
        is_ours = savepoint.periodic if savepoint is not None else _NAME.fullmatch(folder.name) is not None
        if is_ours and not (folder / TABLES).exists():
            _remove(folder, starts)


def _remove(folder: UPath, starts: Collection[str]) -> None:
    """Remove a savepoint, its manifests first, so that nobody takes a part of it for the whole."""
    if place_of(folder) in {place_of(storage_path(start, "savepoint")) for start in starts}:
        return
    for manifest in (TABLES, MANIFEST):
        (folder / manifest).unlink(missing_ok=True)
    remove_tree(folder)


def _restore(directory: CheckpointDirectory, name: str | None, check: Callable[[], None]) -> Savepoint:
    """Restore a savepoint, by default the latest. The caller holds the lease, and `check` raises where it lost it.

    The present state is dropped. Sinks undo what they got since the savepoint (see each sink's guarantee), so that
    later savepoints cannot be restored any more. Raises `StateError` where there is no such savepoint, where it is not
    of the history of the present state, or where its copy is not whole; the state is then as it was.
    """
    named = [s for s in savepoints(directory) if name in (None, s.name)]
    restorable = [s for s in named if not s.drained]
    if named and not restorable:
        raise StateError(
            f"{directory.path.name}: savepoint '{named[-1].name}' was taken where the input had come to its end, and"
            " all timers had fired, so that there is nothing to go back to; start another job from its tables, with"
            " execution.state-recovery.path"
        )
    present = directory.deployed()
    possible = [s for s in restorable if present is None or _in_history(s, present)]
    if not possible:
        if restorable:
            raise StateError(
                f"{directory.path.name}: savepoint '{restorable[-1].name}' is not of the history of what runs now,"
                " which was started without state, or has gone back to before it; the sinks do not hold what they held"
                " then"
            )
        known = ", ".join(s.name for s in savepoints(directory))
        raise StateError(
            f"{directory.path.name}: no savepoint{'' if name is None else f' {name!r}'} in"
            f" {directory.path / 'savepoints'}; {f'there are {known}' if known else 'there is none'}"
        )
    chosen = possible[-1]
    _check_copy(directory, chosen)
    check()
    write_atomically(directory.path / RESTORING, msgspec.json.encode({"savepoint": chosen.name}))
    directory.settle(False)
    for folder in (*FOLDERS, "epochs"):
        remove_tree(directory.path / folder)
    for folder in FOLDERS:
        _copy(directory.path / "savepoints" / chosen.name / folder, directory.path / folder)
    for source in _folders(directory.path / "malformed"):
        reached = chosen.epochs.get(chosen.deployed.reads.get(source.name, MAIN), -1)
        for diverted in _folders(source):
            if int(diverted.name.removeprefix("epoch=")) > reached:
                remove_tree(diverted)
    check()
    directory.go_back(chosen.deployed, chosen.taken)
    (directory.path / RESTORING).unlink()
    return chosen


def _check_copy(directory: CheckpointDirectory, chosen: Savepoint) -> None:
    """Raise `StateError` where a file of a savepoint is gone or incomplete."""
    folder = directory.path / "savepoints" / chosen.name
    try:
        expected = msgspec.json.decode((folder / FILES).read_bytes(), type=dict[str, int])
    except (FileNotFoundError, msgspec.DecodeError):
        damaged: str | None = FILES
    else:
        copied = _sizes(folder)
        lacking = [name for name, size in expected.items() if copied.get(name, -1) < size]
        damaged = min(lacking, key=lambda name: (name.rpartition("/")[2].startswith("."), name), default=None)
    if damaged is not None:
        raise StateError(
            f"{directory.path.name}: savepoint '{chosen.name}' is not whole: {folder / damaged} is gone, or a part of"
            " it; the state stays as it is. Go back to another savepoint, or put the file back"
        )


def _sizes(folder: UPath, folders: Sequence[str] = FOLDERS) -> dict[str, int]:
    return {f"{name}/{path}": size for name in folders for path, size in sizes(folder / name).items()}


def _in_history(savepoint: Savepoint, present: Deployed) -> bool:
    undone = any(since < savepoint.taken <= until for since, until in present.undone)
    return savepoint.deployed.id == present.id and not undone


def forget_interrupted(directory: CheckpointDirectory) -> None:
    """Forget that a restore was interrupted, once the state was started anew."""
    (directory.path / RESTORING).unlink(missing_ok=True)


def check_whole(directory: CheckpointDirectory) -> None:
    """Raise `StateError` where restoring a savepoint was interrupted."""
    if interrupted(directory):
        name = msgspec.json.decode((directory.path / RESTORING).read_bytes())["savepoint"]
        raise StateError(
            f"{directory.path.name}: going back to savepoint '{name}' was interrupted, and the state is not whole;"
            f" restore it again, or remove {directory.path} to start without state"
        )


def interrupted(directory: CheckpointDirectory) -> bool:
    """Return whether restoring a savepoint was interrupted."""
    return bool((directory.path / RESTORING).exists())


def save_stopped(
    directory: CheckpointDirectory, owner: str, reason: str, patience: float = PATIENCE, tables: str = ""
) -> Savepoint:
    """Take a savepoint of a job that does not run; raises `LeaseLostError` where it does."""
    with directory.take(owner, patience) as lease:
        return save(directory, reason, lease.check, tables)


def restore_stopped(
    directory: CheckpointDirectory, owner: str, name: str | None, patience: float = PATIENCE
) -> Savepoint:
    """Restore a savepoint of a job that does not run; raises `LeaseLostError` where it does."""
    with directory.take(owner, patience) as lease:
        return _restore(directory, name, lease.check)


def _epochs(directory: CheckpointDirectory) -> dict[str, int]:
    last = {query.name: directory.last_epoch(query.name) for query in _folders(directory.path / "spark")}
    return {name: epoch for name, epoch in last.items() if epoch is not None}


def _folders(path: UPath) -> list[UPath]:
    return [path / name for name, is_folder in children(path).items() if is_folder]


def _copy(source: UPath, target: UPath) -> None:
    if not source.exists():
        return
    remove_tree(target)
    if source.protocol in ("", "file"):
        shutil.copytree(str(source), str(target), copy_function=_link)
    else:
        source.fs.copy(source.path, target.path, recursive=True)


def _link(source: str, target: str) -> None:
    try:
        os.link(source, target)
    except FileNotFoundError:  # of a running job, what is older than it keeps goes meanwhile
        return
    except OSError:  # another disk, or one that has no links
        shutil.copy2(source, target)
