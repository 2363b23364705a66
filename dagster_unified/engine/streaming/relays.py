"""The streams that one query of a job hands on to another: a log of what each of its epochs emitted.

    <checkpoint>/iterations/<uid>/handed-0000000012.json   an epoch: where its records are, and how far event time is
    <checkpoint>/iterations/<uid>/handed-<token>           a file of a task

The query that reads it takes the log for a source, whose offset is the number of the next epoch. An epoch that runs
again finds that it was handed on. What the reader will not read again is deleted. Knows no query.
"""

from __future__ import annotations

import functools
import re
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain
from typing import TYPE_CHECKING, Any, NamedTuple

import msgspec
import pyarrow as pa

from dagster_unified.connectors.paths import children
from dagster_unified.connectors.protocol.frame import spark_schema
from dagster_unified.connectors.protocol.offsets import Offsets
from dagster_unified.connectors.protocol.splits import SplitSource
from dagster_unified.engine.iterations import manifests
from dagster_unified.engine.iterations.files import MappedFiles, StoredParcel
from dagster_unified.engine.iterations.levels import collected
from dagster_unified.engine.iterations.places import Place, text_of
from dagster_unified.engine.iterations.worker import REPORT, hand_on, hand_on_again, read_output
from dagster_unified.engine.state_tables.savepoints import StartingState, described, record_columns, write_records
from dagster_unified.engine.streaming.control import event_of
from dagster_unified.errors import StateError
from dagster_unified.graph.connectors import Boundedness
from dagster_unified.graph.nodes import RelayedNode, RelayNode
from dagster_unified.graph.plan import Plan
from dagster_unified.operators.drivers.key_groups import ControlEvent
from dagster_unified.operators.layout import StreamLayout
from dagster_unified.records import RecordType
from dagster_unified.state.manifest import OperatorState
from dagster_unified.state.schemas import from_spark, to_spark

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession
    from upath import UPath

_HANDED = re.compile(r"handed-(\d{10})\.json")

_LISTED_EVERY = 1.0
"""Seconds after which a bucket is asked again what has been handed on."""

_ALL = ""
"""The one part of the source."""


class Handed(msgspec.Struct, frozen=True):
    """What an epoch handed on. Times are milliseconds since the epoch."""

    parcels: list[StoredParcel]
    before: int = -1
    """The epoch that handed something on before."""

    watermark: int | None = None
    """No record that comes later is from before it."""

    last_event_time: int | None = None
    """The latest event time of all, once its input has ended."""

    subtasks: tuple[int, ...] = ()
    """How many there were of each iteration: records of one key are in order in one of them."""

    idle: bool = False
    """Whether nothing more is expected for now, so that nobody is to wait for its watermark."""

    ended: bool = False
    """Whether nothing comes after it."""


class RelayLog:
    """The log of one stream."""

    def __init__(self, folder: str) -> None:
        self.folder = folder
        self._place = Place(folder)

    @property
    def is_local(self) -> bool:
        """Whether it is on a disk."""
        return self._place.is_shared

    def epochs(self) -> list[int]:
        """The epochs that were handed on and not deleted."""
        found = [_HANDED.fullmatch(name) for name in children(self._place.root)]
        return sorted(int(match[1]) for match in found if match)

    def read(self, epoch: int) -> Handed | None:
        """What an epoch handed on, if it did."""
        return manifests.read(self._place, _name(epoch), Handed)

    def commit(self, epoch: int, handed: Handed) -> None:
        """Hands something on."""
        manifests.create(self._place, _name(epoch), handed, epoch)

    def forget(self, before: int) -> None:
        """Deletes what was handed on before an epoch, but for the last: it says how far the log is."""
        for epoch in self.epochs()[:-1]:
            if epoch < before:
                self._forget(epoch)

    def forget_unfinished(self, needed: Sequence[StoredParcel] = ()) -> None:
        """Deletes the files that a job left that was killed before it handed them on, but those that are `needed`."""
        found = [self.read(epoch) for epoch in self.epochs()]
        files = {parcel.block.file for one in found if one is not None for parcel in one.parcels}
        files.update(parcel.block.file for parcel in needed)
        for name in children(self._place.root):
            if _HANDED.fullmatch(name) is None and name not in files:
                self._place.remove(name)

    def _forget(self, epoch: int) -> None:
        handed = self.read(epoch)
        self._place.remove(_name(epoch))  # first: what it names is gone then
        for name in {parcel.block.file for parcel in handed.parcels} if handed is not None else ():
            self._place.remove(name)


def _name(epoch: int) -> str:
    return f"handed-{epoch:010d}.json"


@dataclass
class Relays:
    """What a query hands on: those of its `ends` that another one reads. Another process begins what it is sent."""

    plan: Plan
    ends: tuple[int, ...]
    folder: UPath
    offsets: UPath
    """Where Spark logs the query's epochs."""

    owes_idleness: bool = False
    """Whether a stream is idle whose last epoch had records still, so that another epoch has to say it."""

    _before: dict[int, list[StoredParcel]] = field(default_factory=dict)
    """What that has of each stream, which is handed on with the first records."""

    _ended_before: list[str] = field(default_factory=list)
    """The operators that had been told of the end of their input in the savepoint from which the query starts."""

    _logs: dict[int, RelayLog] = field(default_factory=dict)
    _last: dict[int, tuple[int, Handed]] = field(default_factory=dict)

    def __getstate__(self) -> dict[str, object]:
        return {**self.__dict__, "_logs": {}, "_last": {}}

    def begin(self, start: StartingState | None) -> None:
        """Finds what the job before has left of the streams, or what the savepoint has from which the query starts."""
        if start is not None:
            self._ended_before = start.manifest.event.ended
        for node in self._nodes:
            folder = self.folder / node.uid
            folder.mkdir(parents=True, exist_ok=True)
            log = self._logs[node.id] = RelayLog(text_of(folder))
            log.forget_unfinished(self._before.get(node.id, ()))
            last = max(log.epochs(), default=-1)
            if last < 0 and start is not None:
                self._before[node.id] = _handed_on_before(start, node, log.folder)
            self._last[node.id] = last, log.read(last) or Handed([])

    def __bool__(self) -> bool:
        return bool(self._nodes)

    @property
    def _nodes(self) -> list[RelayNode]:
        return [node for node in map(self.plan.graph.node, self.ends) if isinstance(node, RelayNode)]

    def event_of(self, epoch: int) -> ControlEvent:
        """The latest control event that an epoch had."""
        return event_of(self.offsets / str(epoch))

    def ended_by(self, epoch: int, ends: bool) -> Callable[[str], bool]:
        """What says of an operator, by its uid, whether an epoch brings it the end of its input.

        `ends` says that it brings the end of all input.
        """
        before = self.event_of(epoch - 1).ended if epoch else self._ended_before
        ended = self.event_of(epoch).ended
        return lambda uid: (ends or uid in ended) and uid not in before

    def read(self, node: RelayNode, epoch: int) -> Handed | None:
        """What an epoch, which runs again, handed on, if it did."""
        return self._logs[node.id].read(epoch)

    def write(self, node: RelayNode, epoch: int, frame: DataFrame) -> list[StoredParcel]:
        """Writes records where nobody reads them yet."""
        writing = functools.partial(hand_on, self._logs[node.id].folder, _columns(node), epoch)
        reports = collected(frame.mapInArrow(writing, spark_schema(REPORT)))
        return [parcel for report in reports for parcel in report.sent]

    def commit(
        self,
        node: RelayNode,
        epoch: int,
        parcels: list[StoredParcel],
        event: ControlEvent,
        waits: bool,
        subtasks: tuple[int, ...],
        check: Callable[[], None],
    ) -> None:
        """Hands on what an epoch emitted, and the event time of its control event, unless that `waits`.

        `check` raises where this job may not write any more.
        """
        before, last = self._last[node.id]
        if before < 0 and node.id in self._before:
            # one split has all in its order: a key's records were handed on by whichever subtask
            parcels = [msgspec.structs.replace(one, target=0) for one in (*self._before[node.id], *parcels)]
            subtasks = ()  # so that it is read in one split with later epochs as well
        watermark = last.watermark if waits else event.watermarks.get(node.uid, last.watermark)
        ended = event.ends(node.uid)
        last_event_time = event.last_event_times.get(node.uid) if ended else None
        idle = node.uid in event.idle and not (waits or parcels)
        self.owes_idleness = self.owes_idleness or (node.uid in event.idle and not waits and bool(parcels))
        handed = Handed(parcels, before, watermark, last_event_time, subtasks, idle, ended)
        if parcels or _time(handed) != _time(last):
            check()
            self._logs[node.id].commit(epoch, handed)
            self._last[node.id] = epoch, handed


def write_handed_on(
    node: RelayedNode, spark: SparkSession, log: str, offset: str | None, folder: UPath, attempt: str
) -> OperatorState:
    """Writes the table of what was handed on by a log from an offset on; nobody writes to the log."""
    schema = _columns(node)
    first = 0 if offset is None else msgspec.json.decode(offset, type=dict[str, int])[_ALL]
    relay = RelayLog(log)
    parcels = tuple(parcel for epoch in relay.epochs() if epoch >= first for parcel in _read(relay, epoch).parcels)
    typed = record_columns(schema)
    reading = functools.partial(read_output, log, schema, typed, (msgspec.msgpack.encode(parcels),))
    table = described(node.uid, node.name, typed, attempt, "~handed")
    return write_records(spark, table, typed, reading, 1, folder)


def _read(relay: RelayLog, epoch: int) -> Handed:
    found = relay.read(epoch)
    if found is None:
        raise StateError(f"what epoch {epoch} handed on cannot be read in {relay.folder}; go back to a savepoint")
    return found


def _handed_on_before(start: StartingState, node: RelayNode, log: str) -> list[StoredParcel]:
    """What a savepoint has of a stream, written where its reader finds it."""
    table = next((one for one in start.manifest.handed_on if one.uid == node.uid), None)
    if table is None or not table.rows:
        return []
    schema = _columns(node)
    stored = from_spark(table.schema)
    if stored != from_spark(to_spark(schema)):
        raise StateError(
            f"{start.plan.name}: records that were handed on by '{table.name}' have the columns"
            f" {', '.join(stored.names)} in the savepoint, and {', '.join(schema.names)} now, or other types; keep its"
            " type, or drain the job"
        )
    writing = functools.partial(hand_on_again, log, schema, str(start.folder), table)
    (report,) = collected(start.spark.range(0, 1, 1, 1).mapInArrow(writing, spark_schema(REPORT)))
    return report.sent


def _columns(node: RelayNode | RelayedNode) -> pa.Schema:
    assert node.records is not None
    return StreamLayout(node.records, node.timestamped).schema


@dataclass
class RelaysInEpoch:
    """What a query hands on in one of its epochs."""

    relays: Relays
    epoch: int
    circulates: Callable[[], bool]
    """Whether something goes on circulating in an iteration, of which records of any time may come."""

    subtasks: tuple[int, ...]
    """How many there are of each iteration."""

    check: Callable[[], None]
    """Raises where this job may not write any more."""

    _written: list[tuple[RelayNode, list[StoredParcel]]] = field(default_factory=list)

    def write(self, node: RelayNode, frame: DataFrame) -> None:
        """Writes the records of a stream, unless they were handed on when the epoch ran before."""
        if self.relays.read(node, self.epoch) is None:
            self._written.append((node, self.relays.write(node, self.epoch, frame)))

    def commit(self) -> None:
        """Hands on what was written."""
        circulates, event = self.circulates(), self.relays.event_of(self.epoch)
        for node, parcels in self._written:
            waits = node.waits_for_end or (circulates and node.after_iteration)
            self.relays.commit(node, self.epoch, parcels, event, waits, self.subtasks, self.check)


def _time(handed: Handed) -> tuple[int | None, int | None, bool, bool]:
    return handed.watermark, handed.last_event_time, handed.idle, handed.ended


class _Split(NamedTuple):
    """What a subtask emitted in some epochs, up to this one."""

    epoch: int
    parcels: list[StoredParcel]


class RelaySource(SplitSource[Any]):
    """Reads what another query hands on."""

    kind = "relay"
    boundedness = Boundedness.BOUNDED
    can_wait = False

    def __init__(self, name: str, records: RecordType, schema: pa.Schema, folder: str) -> None:
        self.name, self.records, self.folder = name, records, folder
        self._schema = schema
        self._listed = 0.0
        self._newest: dict[str, int] = {}

    def describe(self) -> str:
        return f"what '{self.name}' hands on"

    @property
    def columns(self) -> pa.Schema:
        return self._schema

    @property
    def origin(self) -> str:
        return self.folder

    def oldest(self) -> Offsets:
        return {_ALL: 0}

    def newest(self) -> Offsets:
        log = RelayLog(self.folder)
        if log.is_local or time.monotonic() - self._listed >= _LISTED_EVERY:
            self._newest = {_ALL: max(log.epochs(), default=-1) + 1}
            self._listed = time.monotonic()
        return self._newest

    def splits(self, start: Offsets, end: Offsets) -> list[_Split]:
        log, found = RelayLog(self.folder), dict[int, list[StoredParcel]]()
        scales = set[tuple[int, ...]]()
        epoch = end[_ALL] - 1
        handed: list[Handed] = []
        while epoch >= start[_ALL]:
            one = log.read(epoch)
            if one is None:
                raise StateError(
                    f"what '{self.name}' handed on in epoch {epoch} is gone from {self.folder}; go back to a savepoint,"
                    " or start the job without state"
                )
            handed.append(one)
            scales.add(one.subtasks)
            epoch = one.before
        for parcel in chain.from_iterable(one.parcels for one in reversed(handed)):
            # a key that has gone to another subtask meanwhile: one split has all in its order
            found.setdefault(parcel.target if len(scales) == 1 else 0, []).append(parcel)
        return [_Split(end[_ALL] - 1, found[target]) for target in sorted(found)]

    def read_split(self, split: _Split) -> Iterator[pa.RecordBatch]:
        files = MappedFiles(self.folder, split.epoch)
        for parcel in split.parcels:
            yield files.batch_of(parcel, self._schema)

    def backlog(self, offset: str, latest: str) -> int | None:
        return None  # it was counted where it was read first


class Reading:
    """How far a query has read a stream that another hands on."""

    def __init__(self, folder: str) -> None:
        self._log = RelayLog(folder)
        self.read = 0
        """The epoch of the log up to which the query has read."""

    def handed(self) -> int:
        """The epoch of the log up to which something has been handed on."""
        return max(self._log.epochs(), default=-1) + 1

    def reached(self, offset: str) -> Handed | None:
        """Note the offset up to which an epoch has read, and what was handed on last before it, if anything.

        What the epoch before has read is deleted: Spark has logged it.
        """
        try:
            next_ = msgspec.json.decode(offset, type=dict[str, int])[_ALL]
        except msgspec.DecodeError:
            return None
        if self.read:
            self._log.forget(self.read)
        self.read = next_
        before = [epoch for epoch in self._log.epochs() if epoch < next_]
        return self._log.read(before[-1]) if before else None


def bound(plan: Plan, folder: UPath) -> Plan:
    """The plan of a segment whose sources know where what is handed to it is."""
    nodes = []
    for node in plan.graph.nodes:
        if isinstance(node, RelayedNode):
            assert node.records is not None
            schema = StreamLayout(node.records, node.timestamped).schema
            source = RelaySource(node.source.name, node.records, schema, text_of(folder / node.uid))
            node = replace(node, source=source)
        nodes.append(node)
    return replace(plan, graph=replace(plan.graph, nodes=tuple(nodes)))
