"""A deployment's checkpoint directory: what it was deployed as, who may write, where Spark's own checkpoints lie.

    <dir>/<pipeline>/deployment/{0,1}.json   identity, generation, and what must not change under kept state
    <dir>/<pipeline>/lease/<token>.json      fencing tokens; the greatest one may write
    <dir>/<pipeline>/control/<query>/        the control stream's latest event
    <dir>/<pipeline>/spark/<query>/          Spark's checkpoint
    <dir>/<pipeline>/iterations/<uid>/       the epochs of an iteration: state, and what is fed back
    <dir>/<pipeline>/malformed/<source>/     rows that did not fit, by epoch
    <dir>/<pipeline>/epochs/                 the epoch that is being committed
    <dir>/<pipeline>/calls/<query>/          how a Spark Connect server and the job speak of the epoch that runs
    <dir>/<pipeline>/running.json            which queries a Spark Connect server runs, and which job they obey
    <dir>/<pipeline>/splits/<query>.json     into how many tasks Spark splits what an epoch reads
    <dir>/<pipeline>/savepoints/<name>/      what one can go back to
    <dir>/<pipeline>/requests/, answers/     for a savepoint of the job that runs
    <dir>/<pipeline>/reports/{0,1}.json      what was committed and not reported yet, and what was
    <dir>/<pipeline>/late/{0,1}.json         which late records a run in BATCH has read
    <dir>/<pipeline>/settled.json            the job has stopped, and its sinks have what its state has
    <dir>/<pipeline>/initial/                pages of the savepoint that the job starts from, until its first epoch
    <dir>/<pipeline>/start.json              what the savepoint that the state began with says was read of each source

Dagster's run status does not decide who may write: a killed run's process may live on.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Mapping, Sequence
from threading import Event, Thread
from typing import TYPE_CHECKING, Self
from uuid import uuid4

import msgspec
from upath import UPath

from dagster_unified.connectors.collection import forget_collections
from dagster_unified.connectors.protocol.positions import Position
from dagster_unified.connectors.protocol.splits import forget_ranges
from dagster_unified.engine.streaming.atomic import AlternatingFiles, read_latest, write_atomically
from dagster_unified.errors import ConfigurationError, LeaseLostError, StateError, UnifiedError
from dagster_unified.graph.connectors import Boundedness
from dagster_unified.operators.state.evolution import shown
from dagster_unified.operators.time import wall_clock
from dagster_unified.storage import conditional
from dagster_unified.storage.paths import children, read_whole, remove_tree, storage_path

if TYPE_CHECKING:
    from dagster_unified.graph.plan import Plan


FORMAT = 3
"""Of the directory: of its records, and of the keys under which Spark keeps state."""

START = "start.json"
SETTLED = "settled.json"
INITIAL = "initial"

PATIENCE = 20.0
"""Seconds without a heartbeat after which a lease expires."""


class Deployed(msgspec.Struct, frozen=True):
    """The record of a deployment. `version` counts the writes of this record, `generation` the starts from new code."""

    version: int
    id: str
    pipeline: str
    fingerprint: str
    generation: int
    max_parallelism: int
    tasks: int
    """Over how many tasks the key groups are spread: as many as Spark had behind an exchange when the state began."""

    backend: str
    lanes: dict[str, int]
    levels: dict[str, list[list[str]]]
    finished: bool = False
    timeline: int = 0
    """How often a savepoint was restored: sinks keep the epochs of each timeline apart."""

    undone: list[tuple[int, int]] = []
    """The spans of time that restoring a savepoint undid. Milliseconds since the epoch."""

    restored: bool = False
    """Whether a savepoint was restored since the last start."""

    code: dict[str, dict[str, str]] = {}
    """What the fingerprint covers, operator by operator: see `graph/upgrade.py`."""

    loaded: str = ""
    """Which loading of the code location requested the last start; empty where a person did."""

    subtasks: dict[str, int] = {}
    """How many subtasks there are of each operator with operator state, by uid."""

    reads: dict[str, str] = {}
    """The query that reads each source, by the source's uid."""

    keys: dict[str, str] = {}
    """How the keys of each operator with keyed state lie in it, by uid: see `operators/state/evolution.py`."""

    sources: dict[str, list[str]] = {}
    """The sources of each query, by uid, in the order in which Spark numbers them."""

    event_time_unit: int | None = None
    """The milliseconds of the units in which records are counted by event time; None where they are not."""

    start: str = ""
    """The savepoint that the deployment's state began with; empty where it began without."""

    upgrades: int = 0
    """How often new code was started for that one loading.

    Its code is one: more than once says that the fingerprint is not stable.
    """

    format: int = FORMAT


class _Written(msgspec.Struct, frozen=True):
    """The fields that a record has in every format."""

    format: int


class Lease(msgspec.Struct, frozen=True):
    """Who may write, by which fencing token, and when its last heartbeat was, in milliseconds since the epoch."""

    token: int
    owner: str
    beat: int
    released: bool = False
    process: str = ""
    """Tells two processes apart that take it at one moment, as one owner."""

    def is_alive(self, patience: float) -> bool:
        """Return whether its holder has written a heartbeat within so many seconds, and still holds it."""
        return not self.released and wall_clock() - self.beat < patience * 1000


_STATE = {"spark", "epochs", "iterations", "splits"}
"""Folders that there are only once a deployment is recorded."""


class _Settled(msgspec.Struct, frozen=True):
    """Whether the sinks have exactly the last committed epoch, and which job said so."""

    settled: bool = True
    by: str = ""


class CheckpointDirectory:
    """The directory of one pipeline's deployment."""

    def __init__(self, root: str, pipeline: str) -> None:
        self.path = storage_path(root, "execution.checkpointing.dir") / pipeline
        self.sources = self.path / "sources"
        """Where its sources keep what they have decided, each in a folder of its uid."""

        self._deployment = AlternatingFiles(self.path / "deployment", Deployed, lambda d: d.version)
        self._mine: Deployed | None = None
        """The record as this object wrote it last."""

        self._unsettled: str | None = None
        """The version of the file that says that a job runs, as this object wrote it."""

    def deployed(self) -> Deployed | None:
        """Return the record of the deployment, or None."""
        folder = self.path / "deployment"
        record = self._deployment.read()
        written = record or read_latest(folder, _Written, lambda record: record.format)
        if written is None and folder.exists() and any(folder.iterdir()):
            raise StateError(
                f"the deployment record in {folder} is damaged; restore it from a copy, or remove {self.path} to start"
                " without state"
            )
        if written is not None and written.format != FORMAT:
            raise StateError(
                f"{self.path} was written in format {written.format}, and this version reads {FORMAT}; use the version"
                " that wrote it"
            )
        return record

    def deploy(self, wanted: Deployed, fresh: bool = False) -> Deployed:
        """Record a start.

        Raises where something has changed that must not change while state is kept, and where there is state without
        its record; `fresh` drops the state instead.
        """
        self._deployment.open()
        before = self.deployed()
        if fresh:
            for part in ("spark", "control", "epochs", "malformed", "splits", "iterations"):
                remove_tree(self.path / part)
            forget_ranges(self.sources)
            forget_collections(self.sources)
            before = None if before is None else msgspec.structs.replace(before, id="")
        elif before is None and (leftovers := sorted(_STATE & children(self.path).keys())):
            raise StateError(
                f"{self.path.name}: {self.path} has {leftovers[0]}/, and no record of the deployment that it is of: a"
                f" part of it was deleted. Restore it from a copy, or remove {self.path} to start without state"
            )
        if before is not None and before.id:
            _check(before, wanted)
        changed = before is None or not before.id or before.fingerprint != wanted.fingerprint
        record = msgspec.structs.replace(
            wanted,
            version=before.version + 1 if before else 1,
            id=before.id if before and before.id else uuid4().hex[:12],
            generation=(before.generation if before else 0) + changed,
            tasks=before.tasks if before and before.id else wanted.tasks,
            finished=False,
            timeline=before.timeline if before else 0,
            start=before.start if before and self.has_epoch() else wanted.start,
            undone=before.undone if before and before.id else [],
            upgrades=(before.upgrades if before and before.loaded == wanted.loaded else 0)
            + (changed and before is not None),
        )
        self._write(record)
        return record

    def finish(self) -> None:
        """Record that a bounded pipeline has finished."""
        deployed = self._mine or self.deployed()
        if deployed is not None:
            self._write(msgspec.structs.replace(deployed, version=deployed.version + 1, finished=True))

    def check(self, wanted: Deployed) -> None:
        """Raise where something has changed that must not change while state is kept."""
        deployed = self.deployed()
        if deployed is None or not deployed.id:
            return
        try:
            _check(deployed, wanted)
        except UnifiedError as error:
            if not deployed.restored:
                raise
            what = str(error).partition(";")[0]
            raise type(error)(
                f"{what}; this is the state that was gone back to: start the code that it is of first, or remove"
                f" {self.path} to start without state"
            ) from error

    def go_back(self, record: Deployed, since: int) -> None:
        """Record the restore of a savepoint, which was taken of `record` at the moment `since`."""
        self._deployment.open()
        deployed = self.deployed() or record
        undone = [*deployed.undone, (since, wall_clock())]
        self._write(
            msgspec.structs.replace(
                record,
                version=deployed.version + 1,
                timeline=deployed.timeline + 1,
                undone=undone,
                restored=True,
                finished=False,
            )
        )

    def _write(self, record: Deployed) -> None:
        try:
            self._deployment.write(record)
        except FileExistsError as error:
            raise LeaseLostError(
                f"{self.path.name}: another job has recorded its start in {self.path} meanwhile; this one stops and"
                " writes nothing more"
            ) from error
        self._mine = record

    def last_epoch(self, query: str) -> int | None:
        """Return the last epoch that Spark has logged as committed of a query; None before the first."""
        return last_number(self.path / "spark" / query / "commits")

    def has_epoch(self) -> bool:
        """Return whether any query has committed an epoch."""
        return any(self.last_epoch(query) is not None for query in children(self.path / "spark"))

    def begin_after(self, positions: Mapping[str, Position]) -> None:
        """Record the position in each source of the savepoint that the state begins with."""
        write_atomically(self.path / START, msgspec.json.encode(positions))

    def positions(self) -> dict[str, Position]:
        """Return the positions in the sources before the deployment's own first epoch."""
        return msgspec.json.decode((self.path / START).read_bytes(), type=dict[str, Position])

    # Whether the job that has stopped left its sinks and its state at one epoch

    def settled(self) -> bool:
        """Return whether no job runs, and the sinks have the last committed epoch and nothing of a later one."""
        try:
            return msgspec.json.decode(read_whole(self.path / SETTLED), type=_Settled).settled
        except (FileNotFoundError, msgspec.DecodeError):
            return False

    def settle(self, settled: bool) -> None:
        """Record whether the sinks are settled; raises `FileExistsError` where another job runs, with other sinks."""
        path = self.path / SETTLED
        before = conditional.read(path)
        version = self._unsettled if settled and self._unsettled else before and before.version
        data = msgspec.json.encode(_Settled(settled, uuid4().hex))
        self._unsettled = conditional.write(path, data, version)

    # The lease

    def holder(self) -> Lease | None:
        """Return the lease with the greatest token."""
        return _last(self._leases())

    def greatest(self) -> int:
        """Return the greatest fencing token so far."""
        return max((int(p.stem) for p in self._leases()), default=0)

    def check_lease(self, token: int) -> None:
        """Raise where the job with this token may not write any more.

        `LeaseLostError` where another job has taken over, and `StateError` where the directory was deleted.
        """
        greatest = self.greatest()
        if greatest > token:
            raise LeaseLostError(
                f"{self.path.name}: another job has taken over the checkpoint directory; this one stops and writes"
                " nothing more"
            )
        if greatest < token:
            raise self.deleted()

    def deleted(self) -> StateError:
        """Return the error for a directory that is gone while a job runs."""
        return StateError(
            f"{self.path.name}: the checkpoint directory {self.path} was deleted while the job ran; the job stops, and"
            " its state is gone. Suspend a job before you delete its checkpoints"
        )

    def released(self, token: int) -> bool:
        """Return whether a lease was released by its holder, which was not killed."""
        lease = _read(self.path / "lease" / f"{token}.json")
        return lease is not None and lease.released

    def take(self, owner: str, patience: float) -> HeldLease:
        """Take the lease, if nobody holds it or its last heartbeat is `patience` seconds ago.

        Raises `LeaseLostError` where the holder is alive.
        """
        folder = self.path / "lease"
        folder.mkdir(parents=True, exist_ok=True)
        leases = self._leases()  # once: a lease that comes after the look at its holder has the token that is next
        last = _last(leases)
        if last is not None and last.owner != owner and last.is_alive(patience):
            raise LeaseLostError(
                f"{self.path.name}: another job, {last.owner}, is writing and gave a sign of life"
                f" {(wall_clock() - last.beat) / 1000:.0f} s ago; stop it first, or wait until it has been silent for"
                f" {patience:.0f} s"
            )
        token = max((int(path.stem) for path in leases), default=0) + 1
        lease = Lease(token, owner, wall_clock(), process=uuid4().hex)
        try:
            conditional.write(folder / f"{token}.json", msgspec.json.encode(lease), None)
            if self.greatest() > token:
                raise FileExistsError
        except FileExistsError:
            raise LeaseLostError(
                f"{self.path.name}: another job took the lease at the same moment; it runs, this one does not"
            ) from None
        self._check_store(folder / f"{token}.json")
        for path in self._leases():
            if int(path.stem) < token - 8:
                path.unlink()
        return HeldLease(self, lease, beat=patience / 4)

    def _check_store(self, lease: UPath) -> None:
        """Raise where the store would let a job write that has lost its lease."""
        try:
            conditional.check_store(lease, "execution.checkpointing.dir")
        except ConfigurationError:
            lease.unlink(missing_ok=True)
            raise

    def _leases(self) -> list[UPath]:
        folder = self.path / "lease"
        names = (name for name in children(folder) if name.endswith(".json"))
        return [folder / name for name in names if name.removesuffix(".json").isdigit()]


class HeldLease:
    """A lease that a thread keeps alive until it is released."""

    def __init__(self, directory: CheckpointDirectory, lease: Lease, beat: float) -> None:
        self._directory, self._lease = directory, lease
        self._stopped = Event()
        self._thread = Thread(target=self._beat, args=(beat,), daemon=True, name="lease")
        self._thread.start()

    @property
    def token(self) -> int:
        """The fencing token."""
        return self._lease.token

    def check(self) -> None:
        """Raise `LeaseLostError` where another job has taken over; call it before each commit."""
        self._directory.check_lease(self.token)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> None:
        self.release()

    def release(self) -> None:
        """Release the lease, so that others need not wait until it expires."""
        self._stopped.set()
        self._thread.join(timeout=10)
        if self._directory.greatest() == self.token:
            self._write_heartbeat(released=True)

    def _beat(self, every: float) -> None:
        while not self._stopped.wait(every):
            with contextlib.suppress(Exception):  # of a store that cannot be reached: it may be the next time
                if self._directory.greatest() != self.token:  # another job has taken over, or the directory is gone
                    return
                self._write_heartbeat(released=False)

    def _write_heartbeat(self, released: bool) -> None:
        """Write a heartbeat, or the release.

        Where it cannot be written, as on a full disk, the lease expires: no harm, for its holder is fenced.
        """
        lease = msgspec.structs.replace(self._lease, beat=wall_clock(), released=released)
        with contextlib.suppress(OSError):
            write_atomically(self._directory.path / "lease" / f"{lease.token}.json", msgspec.json.encode(lease))


def wait_for(directory: CheckpointDirectory, owner: str, patience: float, stopped: Callable[[], bool]) -> HeldLease:
    """Take the lease; wait for a killed holder's to expire, and raise where the holder stays alive."""
    begun = time.monotonic()
    while True:
        try:
            return directory.take(owner, patience)
        except LeaseLostError:
            if time.monotonic() - begun > 1.5 * patience or stopped():
                raise
            time.sleep(patience / 20)


def last_number(log: UPath) -> int | None:
    """Return the last number in one of Spark's logs, `offsets` or `commits`; None where it is empty."""
    return max((int(name) for name in children(log) if name.isdigit()), default=None)


def _last(leases: Sequence[UPath]) -> Lease | None:
    readable = [lease for path in leases if (lease := _read(path)) is not None]
    return max(readable, key=lambda lease: lease.token, default=None)


def _read(path: UPath) -> Lease | None:
    try:
        return msgspec.json.decode(read_whole(path), type=Lease)
    except msgspec.DecodeError:
        return Lease(int(path.stem), "a job that was interrupted while it took the lease", 0)
    except FileNotFoundError:
        return None


def _check(deployed: Deployed, wanted: Deployed) -> None:
    if deployed.max_parallelism != wanted.max_parallelism:
        raise ConfigurationError(
            f"{deployed.pipeline}: pipeline.max-parallelism is {wanted.max_parallelism}, and the checkpoint has"
            f" {deployed.max_parallelism} key groups; set it back, or start without state (upgrade mode stateless)"
        )
    if deployed.backend != wanted.backend:
        raise ConfigurationError(
            f"{deployed.pipeline}: state.backend.type is {wanted.backend}, and the checkpoint was written by"
            f" {deployed.backend}; set it back, or start without state (upgrade mode stateless)"
        )
    if deployed.levels != wanted.levels:
        raise StateError(
            f"{deployed.pipeline}: the stateful operators are {_shown(wanted.levels)}, and the checkpoint has"
            f" {_shown(deployed.levels)}; keep their uids and their order, or start without state (upgrade mode"
            " stateless)"
        )
    for uid, layout in deployed.keys.items():
        if wanted.keys.get(uid, layout) != layout:
            raise StateError(
                f"{deployed.pipeline}: operator '{uid}': the type of the key has changed: the checkpoint has"
                f" {shown(layout)}, and {shown(wanted.keys[uid])} is declared; key by what it was, or start without"
                " state (upgrade mode stateless)"
            )
    check_sources(deployed, wanted.sources)
    for uid, count in deployed.subtasks.items():
        if wanted.subtasks.get(uid, count) != count:
            raise ConfigurationError(
                f"{deployed.pipeline}: operator '{uid}' has {wanted.subtasks[uid]} subtasks, and the checkpoint has its"
                f" operator state of {count}; set the parallelism back, or stop the job with a savepoint and start from"
                " that, which splits the state anew"
            )


def check_sources(deployed: Deployed, sources: Mapping[str, Sequence[str]]) -> None:
    """Raise `StateError` where queries read other sources than those whose positions Spark's checkpoint has.

    Spark finds a position by the place of its source in the query, and would read on from another one's.
    """
    for query, before in deployed.sources.items():
        now = sources.get(query, before)
        if now != before:
            raise StateError(
                f"{deployed.pipeline}: the sources are {', '.join(now)}, and the checkpoint has what was read of"
                f" {', '.join(before)}; with the code before, stop the job with a savepoint elsewhere, and start from"
                " that (execution.state-recovery.path), or start without state (upgrade mode stateless)"
            )


def _shown(levels: dict[str, list[list[str]]]) -> str:
    return "; ".join(" → ".join(", ".join(level) for level in query) or "none" for query in levels.values()) or "none"


def check_not_drained(directory: CheckpointDirectory, plan: Plan) -> None:
    """Raise where the input of an unbounded job was ended: begun anew, the job would read all of it once more."""
    deployed, start = directory.deployed(), plan.execution.starts_from or ""
    if (
        deployed is None
        or not deployed.finished
        or plan.execution.boundedness is Boundedness.BOUNDED
        or start != deployed.start
    ):
        return
    raise ConfigurationError(
        f"{plan.name} was drained: its input has ended, and its timers have fired, so that there is nothing to go on"
        " from; go back to a savepoint (dagster-unified restore), start from one elsewhere"
        f" (execution.state-recovery.path), or remove {directory.path} to read all input once more"
    )
