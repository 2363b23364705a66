"""Streams from one query of a job to another: a log of what each epoch of the first one emitted.

    <checkpoint>/iterations/<uid>/handed-0000000012.json   an epoch: where its records are, and how far event time is
    <checkpoint>/iterations/<uid>/handed-<token>           a file of a task

The log is a source of the query that reads it; the source's offset is the number of the next epoch. An epoch that runs
again finds its output in the log. What the reader will not read again is deleted. Knows no query.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain
from typing import TYPE_CHECKING, Any, NamedTuple

import msgspec
import pyarrow as pa

from dagster_unified.connectors.protocol.frame import spark_schema
from dagster_unified.connectors.protocol.positions import Offsets
from dagster_unified.connectors.protocol.splits import SplitSource
from dagster_unified.engine.iterations.epoch_log import Manifests
from dagster_unified.engine.iterations.files import IterationFolder, MappedFiles, StoredMessage, text_of
from dagster_unified.engine.iterations.levels import collected
from dagster_unified.engine.iterations.worker import REPORT, read_output, write_output, write_output_again
from dagster_unified.engine.state_tables.savepoints import StartingState, described, record_columns, write_records
from dagster_unified.engine.streaming.control import event_of
from dagster_unified.errors import StateError
from dagster_unified.graph.connectors import Boundedness
from dagster_unified.graph.nodes import QueryInputNode, QueryOutputNode
from dagster_unified.graph.plan import Plan
from dagster_unified.operators.drivers.key_groups import ControlEvent
from dagster_unified.operators.layout import StreamLayout
from dagster_unified.records import RecordType
from dagster_unified.state.manifest import OperatorState, from_spark, to_spark
from dagster_unified.storage.paths import children

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession
    from upath import UPath

_LISTED_EVERY = 1.0
"""Seconds between two listings of a log in a bucket."""

_ALL = ""
"""The one part of the source."""


class LoggedOutput(msgspec.Struct, frozen=True):
    """The output of an epoch. Times are milliseconds since 1970."""

    messages: list[StoredMessage] = msgspec.field(name="parcels")
    before: int = -1
    """The epoch before it in the log."""

    watermark: int | None = None
    """No later record is older."""

    last_event_time: int | None = None
    """The latest event time of all records, once the input has ended."""

    subtasks: tuple[int, ...] = ()
    """The subtasks of each iteration: records of one key are in order within one of them."""

    idle: bool = False
    """Whether the stream is idle, so that nobody waits for its watermark."""

    ended: bool = False
    """Whether it is the last."""


class CrossQueryLog:
    """The log of one stream."""

    def __init__(self, folder: str) -> None:
        self.folder = folder
        self._folder = IterationFolder(folder)
        self._manifests = Manifests(self._folder, "handed", LoggedOutput)

    @property
    def is_local(self) -> bool:
        """Whether it is on a disk."""
        return self._folder.is_shared

    def epochs(self) -> list[int]:
        """Return the epochs in the log."""
        return self._manifests.numbers(children(self._folder.root))

    def read(self, epoch: int) -> LoggedOutput | None:
        """Return the output of an epoch; None where it is not in the log."""
        return self._manifests.read(epoch)

    def commit(self, epoch: int, output: LoggedOutput) -> None:
        """Add the output of an epoch."""
        self._manifests.create(epoch, output)

    def forget(self, before: int) -> None:
        """Delete what is before an epoch, except the last entry, which says how far the log is."""
        for epoch in self.epochs()[:-1]:
            if epoch < before:
                self._forget(epoch)

    def forget_unfinished(self, needed: Sequence[StoredMessage] = ()) -> None:
        """Delete files that a killed job wrote and did not log, except those that are `needed`."""
        logged = [self.read(epoch) for epoch in self.epochs()]
        files = {message.block.file for output in logged if output is not None for message in output.messages}
        files.update(message.block.file for message in needed)
        for name in children(self._folder.root):
            if not self._manifests.numbers([name]) and name not in files:
                self._folder.remove(name)

    def _forget(self, epoch: int) -> None:
        output = self.read(epoch)
        self._manifests.remove(epoch)  # first: what it names is gone then
        for name in {message.block.file for message in output.messages} if output is not None else ():
            self._folder.remove(name)


@dataclass
class QueryOutputs:
    """The outputs of a query that other queries read. A process that receives it calls `begin` itself."""

    plan: Plan
    ends: tuple[int, ...]
    folder: UPath
    offsets: UPath
    """Where Spark logs the query's epochs."""

    must_announce_idle: bool = False
    """Whether a stream went idle in an epoch with records: a further epoch must announce it."""

    _before: dict[int, list[StoredMessage]] = field(default_factory=dict)
    """The savepoint's records of each stream, which go into the log with the first records."""

    _ended_before: list[str] = field(default_factory=list)
    """The operators that had been told of the end of their input in the savepoint from which the query starts."""

    _logs: dict[int, CrossQueryLog] = field(default_factory=dict)
    _last: dict[int, tuple[int, LoggedOutput]] = field(default_factory=dict)

    def __getstate__(self) -> dict[str, object]:
        return {**self.__dict__, "_logs": {}, "_last": {}}

    def begin(self, start: StartingState | None) -> None:
        """Go on with the previous job's logs, or with the output in the savepoint from which the query starts."""
        if start is not None:
            self._ended_before = start.manifest.event.ended
        for node in self._nodes:
            folder = self.folder / node.uid
            folder.mkdir(parents=True, exist_ok=True)
            log = self._logs[node.id] = CrossQueryLog(text_of(folder))
            log.forget_unfinished(self._before.get(node.id, ()))
            last = max(log.epochs(), default=-1)
            if last < 0 and start is not None:
                self._before[node.id] = _unread_before(start, node, log.folder)
            self._last[node.id] = last, log.read(last) or LoggedOutput([])

    def __bool__(self) -> bool:
        return bool(self._nodes)

    @property
    def _nodes(self) -> list[QueryOutputNode]:
        return [node for node in map(self.plan.graph.node, self.ends) if isinstance(node, QueryOutputNode)]

    def event_of(self, epoch: int) -> ControlEvent:
        """Return the latest control event that an epoch had."""
        return event_of(self.offsets / str(epoch))

    def ended_by(self, epoch: int, ends: bool) -> Callable[[str], bool]:
        """Return a function that says whether an epoch brings an operator, by its uid, the end of its input.

        `ends` says that the epoch brings the end of all input.
        """
        before = self.event_of(epoch - 1).ended if epoch else self._ended_before
        ended = self.event_of(epoch).ended
        return lambda uid: (ends or uid in ended) and uid not in before

    def read(self, node: QueryOutputNode, epoch: int) -> LoggedOutput | None:
        """Return the output of an epoch that runs again; None where it is not in the log."""
        return self._logs[node.id].read(epoch)

    def write(self, node: QueryOutputNode, epoch: int, frame: DataFrame) -> list[StoredMessage]:
        """Write records to where nobody reads them yet."""
        writing = functools.partial(write_output, self._logs[node.id].folder, _columns(node), epoch)
        reports = collected(frame.mapInArrow(writing, spark_schema(REPORT)))
        return [message for report in reports for message in report.sent]

    def commit(
        self,
        node: QueryOutputNode,
        epoch: int,
        messages: list[StoredMessage],
        event: ControlEvent,
        waits: bool,
        subtasks: tuple[int, ...],
        check: Callable[[], None],
    ) -> None:
        """Add what an epoch emitted, with the event time of its control event unless that `waits`.

        `check` raises where this job may not write any more.
        """
        before, last = self._last[node.id]
        if before < 0 and node.id in self._before:
            # one split has all in its order: a key's records were handed on by whichever subtask
            messages = [msgspec.structs.replace(message, target=0) for message in (*self._before[node.id], *messages)]
            subtasks = ()  # so that it is read in one split with later epochs as well
        watermark = last.watermark if waits else event.watermarks.get(node.uid, last.watermark)
        ended = event.ends(node.uid)
        last_event_time = event.last_event_times.get(node.uid) if ended else None
        idle = node.uid in event.idle and not (waits or messages)
        self.must_announce_idle = self.must_announce_idle or (node.uid in event.idle and not waits and bool(messages))
        output = LoggedOutput(messages, before, watermark, last_event_time, subtasks, idle, ended)
        if messages or _time(output) != _time(last):
            check()
            self._logs[node.id].commit(epoch, output)
            self._last[node.id] = epoch, output


def write_unread_input(
    node: QueryInputNode, spark: SparkSession, log: str, offset: str | None, folder: UPath, attempt: str
) -> OperatorState:
    """Write the table of a log's output from an offset on; nobody writes to the log meanwhile."""
    schema = _columns(node)
    first = 0 if offset is None else msgspec.json.decode(offset, type=dict[str, int])[_ALL]
    source_log = CrossQueryLog(log)
    messages = tuple(
        message for epoch in source_log.epochs() if epoch >= first for message in _read(source_log, epoch).messages
    )
    typed = record_columns(schema)
    reading = functools.partial(read_output, log, schema, typed, (msgspec.msgpack.encode(messages),))
    table = described(node.uid, node.name, typed, attempt, "~handed")
    return write_records(spark, table, typed, reading, 1, folder)


def _read(source_log: CrossQueryLog, epoch: int) -> LoggedOutput:
    output = source_log.read(epoch)
    if output is None:
        raise StateError(f"what epoch {epoch} handed on cannot be read in {source_log.folder}; go back to a savepoint")
    return output


def _unread_before(start: StartingState, node: QueryOutputNode, log: str) -> list[StoredMessage]:
    """Write a savepoint's unread records of a stream to where its reader finds them."""
    table = next((stream for stream in start.manifest.handed_on if stream.uid == node.uid), None)
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
    writing = functools.partial(write_output_again, log, schema, str(start.folder), table)
    (report,) = collected(start.spark.range(0, 1, 1, 1).mapInArrow(writing, spark_schema(REPORT)))
    return report.sent


def _columns(node: QueryOutputNode | QueryInputNode) -> pa.Schema:
    assert node.records is not None
    return StreamLayout(node.records, node.timestamped).schema


@dataclass
class QueryOutputsInEpoch:
    """The outputs of a query in one of its epochs."""

    query_outputs: QueryOutputs
    epoch: int
    circulates: Callable[[], bool]
    """Whether something goes on circulating in an iteration, of which records of any time may come."""

    subtasks: tuple[int, ...]
    """How many there are of each iteration."""

    check: Callable[[], None]
    """Raises where this job may not write any more."""

    _written: list[tuple[QueryOutputNode, list[StoredMessage]]] = field(default_factory=list)

    def write(self, node: QueryOutputNode, frame: DataFrame) -> None:
        """Write the records of a stream, unless they are in the log because the epoch ran before."""
        if self.query_outputs.read(node, self.epoch) is None:
            self._written.append((node, self.query_outputs.write(node, self.epoch, frame)))

    def commit(self) -> None:
        """Add what was written to the logs."""
        circulates, event = self.circulates(), self.query_outputs.event_of(self.epoch)
        for node, messages in self._written:
            waits = node.waits_for_end or (circulates and node.after_iteration)
            self.query_outputs.commit(node, self.epoch, messages, event, waits, self.subtasks, self.check)


def _time(output: LoggedOutput) -> tuple[int | None, int | None, bool, bool]:
    return output.watermark, output.last_event_time, output.idle, output.ended


class _Split(NamedTuple):
    """The messages of one subtask in some epochs, up to this one."""

    epoch: int
    messages: list[StoredMessage]


class CrossQuerySource(SplitSource[Any]):
    """Reads the output of another query."""

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
        log = CrossQueryLog(self.folder)
        if log.is_local or time.monotonic() - self._listed >= _LISTED_EVERY:
            self._newest = {_ALL: max(log.epochs(), default=-1) + 1}
            self._listed = time.monotonic()
        return self._newest

    def splits(self, start: Offsets, end: Offsets) -> list[_Split]:
        log, by_target = CrossQueryLog(self.folder), dict[int, list[StoredMessage]]()
        scales = set[tuple[int, ...]]()
        epoch = end[_ALL] - 1
        outputs: list[LoggedOutput] = []
        while epoch >= start[_ALL]:
            output = log.read(epoch)
            if output is None:
                raise StateError(
                    f"what '{self.name}' handed on in epoch {epoch} is gone from {self.folder}; go back to a savepoint,"
                    " or start the job without state"
                )
            outputs.append(output)
            scales.add(output.subtasks)
            epoch = output.before
        for message in chain.from_iterable(output.messages for output in reversed(outputs)):
            # a key that has gone to another subtask meanwhile: one split has all in its order
            by_target.setdefault(message.target if len(scales) == 1 else 0, []).append(message)
        return [_Split(end[_ALL] - 1, by_target[target]) for target in sorted(by_target)]

    def read_split(self, split: _Split) -> Iterator[pa.RecordBatch]:
        files = MappedFiles(self.folder, split.epoch)
        for message in split.messages:
            yield files.batch_of(message, self._schema)

    def backlog(self, offset: str, latest: str) -> int | None:
        return None  # it was counted where it was read first


class QueryInputPosition:
    """How far a query has read the output of another one."""

    def __init__(self, folder: str) -> None:
        self._log = CrossQueryLog(folder)
        self.read = 0
        """The epoch of the log up to which the query has read."""

    def logged(self) -> int:
        """Return the epoch up to which the log has output."""
        return max(self._log.epochs(), default=-1) + 1

    def reached(self, offset: str) -> LoggedOutput | None:
        """Note the offset up to which an epoch has read; return the last output before it, if there is any.

        It deletes what the epoch before has read: Spark has logged that.
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
    """Return the plan of a segment whose sources know where their input is."""
    nodes = []
    for node in plan.graph.nodes:
        if isinstance(node, QueryInputNode):
            assert node.records is not None
            schema = StreamLayout(node.records, node.timestamped).schema
            source = CrossQuerySource(node.source.name, node.records, schema, text_of(folder / node.uid))
            node = replace(node, source=source)
        nodes.append(node)
    return replace(plan, graph=replace(plan.graph, nodes=tuple(nodes)))
