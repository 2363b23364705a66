"""What Spark's Python workers run in STREAMING: passes over packed rows, and the key groups of a level.

Knows the operators and how they get to a worker; no session. A pass or a partition of a level ends with a report in its
own lane.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from operator import itemgetter
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
from pyspark.sql import Row

from dagster_unified.by_value import sent
from dagster_unified.connectors.protocol.frame import MALFORMED, PART
from dagster_unified.engine.shipping import Payload
from dagster_unified.engine.streaming.control import event_of
from dagster_unified.engine.worker import committed_epoch, control_event, this_epoch, this_subtask
from dagster_unified.operators.drivers.batch import spare_the_garbage_collector
from dagster_unified.operators.drivers.key_groups import ControlEvent, GroupInput, MicroBatch, decode_event
from dagster_unified.operators.drivers.stages import HEAD, Level, Pass, Programs, Report
from dagster_unified.operators.routing import (
    PACKED,
    REPORT,
    ROWS,
    BatchOrder,
    Packer,
    Route,
    RoutedProgram,
    decode,
    encoded,
    packed,
    place_of,
    sequence,
)
from dagster_unified.operators.time import MIN_TIMESTAMP, wall_clock
from dagster_unified.operators.watermarks import Kept
from dagster_unified.spark_internals.state_client import WriteBehindClient
from dagster_unified.storage.paths import worker_path

Mapped = Callable[[Iterable[pa.RecordBatch]], Iterator[pa.RecordBatch]]
_row = Row("lane", "group", "seq", "data")


def head(routed: RoutedProgram, groups: int, log: str, malformed: Route | None, source: str) -> Mapped:
    """A source's rows through its program, packed; `log` is Spark's log of the query's offsets, `source` its uid.

    Rows that do not fit their schema go to `malformed`, or are counted only.
    """
    return functools.partial(_head, shipped({HEAD: routed}, groups, log, malformed, source))


def between(programs: Mapping[int, RoutedProgram], groups: int, log: str) -> Mapped:
    """A pass between two levels.

    The lanes that it has a program for are unpacked, run and packed; all others pass through.
    """
    return functools.partial(_between, shipped(programs, groups, log))


def in_subtasks(programs: Mapping[int, RoutedProgram], groups: int, log: str) -> Mapped:
    """A pass behind an exchange, which brought the rows of a lane and a subtask into one task.

    Each subtask has an instance of its lane's program, and takes its rows in their order.
    """
    return functools.partial(_in_subtasks, shipped(programs, groups, log))


def shipped(programs: Mapping[int, RoutedProgram], *others: Any) -> Payload:
    """What ships programs by lane, and what else a worker is given with them.

    A program of subtasks is a payload of its own, which each subtask loads for functions of its own.
    """
    shared = {lane: routed for lane, routed in programs.items() if not routed.in_subtasks}
    apart = {lane: _payload_of(routed, [routed]) for lane, routed in programs.items() if routed.in_subtasks}
    return _payload_of((Programs(shared, apart), *others), shared.values())


def _payload_of(value: Any, routed: Iterable[RoutedProgram]) -> Payload:
    programs = [each.program for each in routed]
    functions = [step.function for program in programs for step in program.steps]
    where = ", ".join(f"{program.pipeline}: stage '{program.stage}'" for program in programs)
    return sent(programs, lambda: Payload.of(value, functions), where)


def unpack(schema: pa.Schema) -> Mapped:
    """The rows of one lane, as columns."""
    return functools.partial(_unpack, schema.serialize().to_pybytes())


def _unpack(schema: bytes, batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    columns = pa.ipc.read_schema(pa.py_buffer(schema))
    for batch in batches:
        if batch.num_rows:
            yield pa.concat_batches([decode(data.as_buffer(), columns) for data in batch.column("data")])


def _head(payload: Payload, batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    programs, groups, log, malformed, source = payload.load()
    part = ""
    with _packing(programs, groups, log) as (running, packer):
        names = running.of(HEAD).program.input.schema.names
        for batch in batches:
            if PART in batch.schema.names and batch.num_rows:
                part = batch.column(PART)[0].as_py()  # where the source says it: a task reads one
            if MALFORMED in batch.schema.names:
                batch = _without_malformed(batch, malformed, running.report, packer)
            running.report.read_from(source, batch.num_rows)
            if batch.num_rows:
                running.push(HEAD, 0, batch.select(names))
            yield from packer.flush(ROWS)
        yield from _finished(running, packer, part)


def _between(payload: Payload, batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    programs, groups, log = payload.load()
    with _packing(programs, groups, log) as (running, packer):
        for batch in batches:
            own, others = _own(batch, programs)
            for row in own:
                _take(running, *row)
            if others is not None:
                yield others
            yield from packer.flush(ROWS)
        yield from _finished(running, packer)


def _in_subtasks(payload: Payload, batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    programs, groups, log = payload.load()
    waiting: list[_PackedRow] = []
    with _packing(programs, groups, log) as (running, packer):
        for batch in batches:
            own, others = _own(batch, programs)
            waiting += own
            if others is not None:
                yield others
        waiting.sort(key=itemgetter(0, 1, 2))
        for row in waiting:
            _take(running, *row)
            yield from packer.flush(ROWS)
        yield from _finished(running, packer)


_PackedRow = tuple[int, int, int, pa.BinaryScalar]
"""The lane, the group, the sequence number and the data of a row."""


def _own(batch: pa.RecordBatch, programs: Programs) -> tuple[list[_PackedRow], pa.RecordBatch | None]:
    """The rows of a stage's own lanes, and those that pass by it, if there are any."""
    addresses = zip(*[batch.column(name).to_pylist() for name in ("lane", "group", "seq")], strict=True)
    own, others = [], []
    for i, (lane, group, seq) in enumerate(addresses):
        if lane in programs:
            own.append((lane, group, seq, batch.column("data")[i]))
        else:
            others.append(i)
    return own, batch.take(pa.array(others, pa.int64())) if others else None


def _take(running: Pass, lane: int, group: int, seq: int, data: pa.BinaryScalar) -> None:
    """Give a packed row to the program of its lane."""
    schema = running.of(lane, group).program.input.schema
    running.push(lane, group, decode(data.as_buffer(), schema), place_of(seq) is BatchOrder.BEFORE_EVENT)


@contextmanager
def _packing(programs: Programs, groups: int, log: str) -> Iterator[tuple[Pass, Packer]]:
    """A pass in this task, and what packs what leaves it."""
    spare_the_garbage_collector()
    epoch = SparkEpoch(log)
    packer = Packer(epoch.subtask.number, groups)
    with Pass(programs, epoch, packer.add) as running:
        running.open()
        yield running, packer


def _finished(running: Pass, packer: Packer, part: str | None = None) -> Iterator[pa.RecordBatch]:
    """What is left of a pass, and its report."""
    report = running.finish(part)
    yield from packer.flush()
    if not report.empty():
        yield packed([(REPORT, this_subtask().number, 0, report.encode())])


def _without_malformed(batch: pa.RecordBatch, route: Route | None, report: Report, packer: Packer) -> pa.RecordBatch:
    """The rows that fit."""
    column = batch.column(MALFORMED)
    if column.null_count == batch.num_rows:
        return batch
    unfit = batch.filter(column.is_valid()).column(MALFORMED)
    report.metrics.count("malformed rows dropped" if route is None else "malformed rows diverted", len(unfit))
    if route is not None:
        columns = [unfit.field(name) for name in route.schema.names]
        packer.add(route, pa.RecordBatch.from_arrays(columns, schema=route.schema))
    return batch.filter(column.is_null())


class SparkEpoch:
    """The epoch that this task works on; `log` is Spark's log of the query's offsets."""

    def __init__(self, log: str) -> None:
        self.subtask = this_subtask()
        self._log = log
        self._events: dict[bool, ControlEvent] = {}
        """The latest control event before that of the micro-batch (True), and with it."""

    def clock(self) -> int:
        return wall_clock()

    def committed(self) -> int | None:
        return committed_epoch(self._log)

    def remembered(self) -> Mapping[str, Kept]:
        event = control_event()
        return {} if event is None else decode_event(event.encode()).remembered

    def watermark(self, uid: str, before_event: bool) -> int:
        """As Spark has logged it: an epoch that runs again sees the same."""
        if before_event not in self._events:
            epoch = this_epoch(self._log) - before_event
            logged = worker_path(self._log, "checkpoint directory") / str(epoch)
            self._events[before_event] = event_of(logged) if epoch >= 0 else ControlEvent()
        return self._events[before_event].watermarks.get(uid, MIN_TIMESTAMP)


LANE, GROUP, SEQ = "__lane", "__group", "__seq"
PASS_THROUGH = (LANE, GROUP, SEQ, "__data")
"""The columns of packed rows, where they pass through operators on a record's columns."""


def with_pass_through(schema: pa.Schema) -> pa.Schema:
    """The columns of packed rows, and those of a record."""
    own = [pa.field(name, f.type) for name, f in zip(PASS_THROUGH, PACKED, strict=True)]
    return pa.schema([*own, *[f.with_nullable(True) for f in schema]])


def spread(lane: int, schema: pa.Schema) -> Mapped:
    """The rows of one lane as columns.

    Each record is a row with the `group` and `seq` of its packed row; the rows of all other lanes pass through, with no
    record.
    """
    return functools.partial(_spread, lane, schema.serialize().to_pybytes())


def gather(lane: int, routed: RoutedProgram, groups: int, log: str) -> Mapped:
    """The inverse: the records of one lane through its program, packed."""
    return functools.partial(_gather, lane, shipped({lane: routed}, groups, log))


def _spread(lane: int, schema: bytes, batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    columns = pa.ipc.read_schema(pa.py_buffer(schema))
    record = pa.schema(list(columns)[len(PASS_THROUGH) :])
    for batch in batches:
        mine = [i for i, number in enumerate(batch.column("lane").to_pylist()) if number == lane]
        for i in mine:
            records = decode(batch.column("data")[i].as_buffer(), record)
            size = records.num_rows
            own = [
                pa.repeat(pa.scalar(lane, pa.int32()), size),
                pa.repeat(batch.column("group")[i], size),
                pa.repeat(batch.column("seq")[i], size),
                pa.nulls(size, pa.binary()),
            ]
            yield pa.RecordBatch.from_arrays([*own, *records.columns], schema=columns)
        if len(mine) < batch.num_rows:
            others = batch.take(pa.array(sorted(set(range(batch.num_rows)) - set(mine)), pa.int64()))
            yield pa.RecordBatch.from_arrays(
                [*others.columns, *[pa.nulls(others.num_rows, f.type) for f in record]], schema=columns
            )


def _gather(lane: int, payload: Payload, batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    programs, groups, log = payload.load()
    with _packing(programs, groups, log) as (running, packer):
        for batch in batches:
            mine = pc.equal(batch.column(LANE), lane)
            records = batch.filter(mine)
            for subtask, own in _by_subtask(records) if lane in programs.in_subtasks else [(0, records)]:
                is_before = pc.less(own.column(SEQ), sequence(BatchOrder.EVENT, 0))
                for before_event, chosen in ((True, is_before), (False, pc.invert(is_before))):
                    part = own.filter(chosen)
                    if part.num_rows:
                        names = running.of(lane, subtask).program.input.schema.names
                        running.push(lane, subtask, part.select(names), before_event)
            if records.num_rows < batch.num_rows:
                others = batch.filter(pc.invert(mine)).select(list(PASS_THROUGH))
                yield pa.RecordBatch.from_arrays(others.columns, schema=PACKED)
            yield from packer.flush(ROWS)
        yield from _finished(running, packer)


def _by_subtask(records: pa.RecordBatch) -> Iterator[tuple[int, pa.RecordBatch]]:
    groups = records.column(GROUP)
    for group in groups.unique():
        yield group.as_py(), records.filter(pc.equal(groups, group))


class LevelTask:
    """Runs the keyed operators of one level in one task, each with the state of the key group that Spark hands over."""

    def __init__(self, payload: Payload, client: WriteBehindClient, pages: Any) -> None:
        programs, log = payload.load()
        self._level = Level(programs, SparkEpoch(log), self._leave)
        self._store = _SparkStore(client, pages)
        self._out: list[Row] = []
        self._count = 0
        spare_the_garbage_collector()

    def run(self, lane: int, group: int, rows: Iterator[Any]) -> Iterator[Row]:
        """What the rows of one key group of one lane give, packed."""
        if lane not in self._level.programs:
            yield from (_row(lane, group, row[2], row[3]) for row in rows)
            return
        program = self._level.of(lane, group).program
        placed: dict[BatchOrder, list[Any]] = {place: [] for place in BatchOrder}
        for _, _, seq, data, _ in sorted(rows, key=lambda row: row[2]):
            placed[place_of(seq)].append(data)
        events = [decode_event(data) for data in placed[BatchOrder.EVENT]]

        copied = program.broadcast.layout if program.broadcast is not None else program.input

        def group_input(keyed: BatchOrder, broadcast: BatchOrder) -> GroupInput:
            return GroupInput(
                [decode(data, program.input.schema) for data in placed[keyed]],
                [decode(data, copied.schema) for data in placed[broadcast]],
            )

        micro_batch = MicroBatch(
            group_input(BatchOrder.BEFORE_EVENT, BatchOrder.BROADCAST_BEFORE_EVENT),
            max(events, key=lambda e: e.number, default=None),
            group_input(BatchOrder.AFTER_EVENT, BatchOrder.BROADCAST_AFTER_EVENT),
            leads=group == 0,
        )
        self._count = 0
        report = self._level.run(lane, group, self._store, micro_batch)
        yield from self._out
        self._out.clear()
        if not report.empty():
            yield _row(REPORT, group, 0, report.encode())

    def close(self) -> None:
        """Close the author's functions."""
        self._level.close()

    def _leave(self, route: Route, batch: pa.RecordBatch, before_event: bool, group: int | None) -> None:
        """Pack what the key group that is current emits."""
        assert group is not None
        place = BatchOrder.of(before_event)
        for data in encoded(batch):
            self._count += 1
            self._out.append(_row(route.target, group, sequence(place, (group << 40) + self._count), data))


class _SparkStore:
    """The state of the group that is current in Spark's handles.

    The index lies among the pages, so that Spark's state reader finds both at once.
    """

    def __init__(self, client: WriteBehindClient, pages: Any) -> None:
        self._client, self._pages = client, pages

    def read_page(self, number: int) -> bytes | None:
        row = self._pages.getValue((number,))
        return None if row is None else bytes(row[0])

    def write_page(self, number: int, data: bytes) -> None:
        with self._client.writing():
            self._pages.updateValue((number,), (data,))

    def remove_page(self, number: int) -> None:
        with self._client.writing():
            self._pages.removeKey((number,))
