"""What Spark's Python workers run in STREAMING: passes over packed rows, and the key groups of a level.

Knows the operators and how they get to a worker; no session. A pass or a partition of a level ends with a report in its
own lane.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator, Mapping
from operator import itemgetter
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
from pyspark.sql import Row

from dagster_unified.by_value import sent
from dagster_unified.connectors.paths import worker_path
from dagster_unified.connectors.protocol.frame import MALFORMED, PART
from dagster_unified.engine.shipping import Payload
from dagster_unified.engine.spark_internals.state_client import WriteBehindClient
from dagster_unified.engine.streaming.control import event_of
from dagster_unified.engine.worker import committed_epoch, control_event, this_epoch, this_subtask
from dagster_unified.operators.drivers.batch import spare_the_garbage_collector
from dagster_unified.operators.drivers.key_groups import Arrived, ControlEvent, KeyGroups, MicroBatch, decode_event
from dagster_unified.operators.drivers.report import Report
from dagster_unified.operators.functions.base import Subtask
from dagster_unified.operators.numbers import INDEX
from dagster_unified.operators.program.blocks import close_each
from dagster_unified.operators.program.run import RunningProgram
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

Mapped = Callable[[Iterable[pa.RecordBatch]], Iterator[pa.RecordBatch]]
_row = Row("lane", "group", "seq", "data")


def head(routed: RoutedProgram, groups: int, log: str, malformed: Route | None) -> Mapped:
    """A source's rows through its program, packed; `log` is Spark's log of the query's offsets.

    Rows that do not fit their schema go to `malformed`, or are counted only.
    """
    return functools.partial(_head, shipped({HEAD: routed}, groups, log, malformed))


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
    by_lane = {
        lane: _payload_of(routed, [routed]) if routed.in_subtasks else routed for lane, routed in programs.items()
    }
    return _payload_of((by_lane, *others), [routed for routed in programs.values() if not routed.in_subtasks])


def _payload_of(value: Any, routed: Iterable[RoutedProgram]) -> Payload:
    programs = [one.program for one in routed]
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


HEAD = 0
"""What stands for the lane of a source's rows, which have none yet."""


def _head(payload: Payload, batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    programs, groups, log, malformed = payload.load()
    spare_the_garbage_collector()
    with _Pass(programs, groups, log) as running:
        program = running.program(HEAD)
        push, names = program.push, program.program.input.schema.names
        for batch in batches:
            if PART in batch.schema.names and batch.num_rows:
                running.part = batch.column(PART)[0].as_py()
            if MALFORMED in batch.schema.names:
                batch = running.without_malformed(batch, malformed)
            running.report.rows += batch.num_rows
            if batch.num_rows:
                push(batch.select(names))
            yield from running.packer.flush(ROWS)
        yield from running.finish()


def _between(payload: Payload, batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    programs, groups, log = payload.load()
    spare_the_garbage_collector()
    with _Pass(programs, groups, log) as running:
        for batch in batches:
            passed = []
            for i, (lane, group, seq) in enumerate(_addresses(batch)):
                if lane in programs:
                    running.take(lane, group, seq, batch.column("data")[i])
                else:
                    passed.append(i)
            if passed:
                yield batch.take(pa.array(passed, pa.int64()))
            yield from running.packer.flush(ROWS)
        yield from running.finish()


def _in_subtasks(payload: Payload, batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    programs, groups, log = payload.load()
    spare_the_garbage_collector()
    held: list[tuple[int, int, int, pa.BinaryScalar]] = []
    with _Pass(programs, groups, log) as running:
        for batch in batches:
            passed = []
            for i, (lane, group, seq) in enumerate(_addresses(batch)):
                if lane in programs:
                    held.append((lane, group, seq, batch.column("data")[i]))
                else:
                    passed.append(i)
            if passed:
                yield batch.take(pa.array(passed, pa.int64()))
        held.sort(key=itemgetter(0, 1, 2))
        for row in held:
            running.take(*row)
            yield from running.packer.flush(ROWS)
        yield from running.finish()


def _addresses(batch: pa.RecordBatch) -> Iterable[tuple[int, int, int]]:
    """The lane, the group and the sequence number of each row."""
    return zip(*[batch.column(name).to_pylist() for name in ("lane", "group", "seq")], strict=True)


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
        mine = [i for i, found in enumerate(batch.column("lane").to_pylist()) if found == lane]
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
    spare_the_garbage_collector()
    with _Pass(programs, groups, log) as running:
        for batch in batches:
            mine = pc.equal(batch.column(LANE), lane)
            records = batch.filter(mine)
            for subtask, own in _by_subtask(records) if running.in_subtasks(lane) else [(0, records)]:
                ahead = pc.less(own.column(SEQ), sequence(BatchOrder.EVENT, 0))
                for running.ahead, chosen in ((True, ahead), (False, pc.invert(ahead))):
                    part = own.filter(chosen)
                    if part.num_rows:
                        program = running.program(lane, subtask)
                        program.push(part.select(program.program.input.schema.names))
            if records.num_rows < batch.num_rows:
                others = batch.filter(pc.invert(mine)).select(list(PASS_THROUGH))
                yield pa.RecordBatch.from_arrays(others.columns, schema=PACKED)
            yield from running.packer.flush(ROWS)
        yield from running.finish()


def _by_subtask(records: pa.RecordBatch) -> Iterator[tuple[int, pa.RecordBatch]]:
    groups = records.column(GROUP)
    for group in groups.unique():
        yield group.as_py(), records.filter(pc.equal(groups, group))


def _loaded(shipped: RoutedProgram | Payload) -> RoutedProgram:
    found: RoutedProgram = shipped.load() if isinstance(shipped, Payload) else shipped
    return found


class _Pass:
    """The programs of one partition of a pass, by lane, and what they packed."""

    def __init__(self, programs: Mapping[int, RoutedProgram | Payload], groups: int, log: str) -> None:
        self.subtask = this_subtask()
        self.packer = Packer(self.subtask.number, groups)
        self.report = Report()
        self.part: str | None = None
        """The part of a source that this task reads, where the source says it: a task has one."""

        self._ahead = False
        self._log = log
        self._events: dict[bool, ControlEvent] = {}
        """The control event of the micro-batch, and that of the one before it for what is ahead."""

        self._programs = programs
        self._running: dict[tuple[int, int | None], RunningProgram] = {}

    def __enter__(self) -> _Pass:
        for lane in self._programs:
            if not self.in_subtasks(lane):
                self.program(lane)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> None:
        close_each(self._running.values(), error)

    @property
    def ahead(self) -> bool:
        """Whether what goes through now is ahead of the micro-batch's control event."""
        return self._ahead

    @ahead.setter
    def ahead(self, ahead: bool) -> None:
        if ahead is not self._ahead:
            self._flush()
            self._ahead = ahead

    def _flush(self) -> None:
        """Emits what operators hold."""
        for running in self._running.values():
            running.flush()

    @property
    def reads_source(self) -> bool:
        """Whether this is the pass behind a source."""
        return HEAD in self._programs

    def in_subtasks(self, lane: int) -> bool:
        """Whether each subtask has an instance of the lane's program."""
        return isinstance(self._programs[lane], Payload)

    def take(self, lane: int, group: int, seq: int, data: pa.BinaryScalar) -> None:
        """Give a packed row to the program of its lane."""
        self.ahead = place_of(seq) is BatchOrder.AHEAD
        program = self.program(lane, group)
        program.push(decode(data.as_buffer(), program.program.input.schema))

    def program(self, lane: int, group: int = 0) -> RunningProgram:
        """The program of a lane, or the instance of it in the subtask `group`."""
        subtask = group if self.in_subtasks(lane) else None
        running = self._running.get((lane, subtask))
        if running is None:
            running = self._running[lane, subtask] = self._opened(_loaded(self._programs[lane]), subtask)
            _notify(running, self._log)
        return running

    def _opened(self, routed: RoutedProgram, subtask: int | None) -> RunningProgram:
        def emit(number: int, batch: pa.RecordBatch) -> None:
            for route in routed.routes[number]:
                self.packer.add(route, batch, self.ahead, subtask)

        own = self.subtask if subtask is None else Subtask(subtask, self.subtask.attempt)
        remembered = _remembered() if any(step.remembers for step in routed.program.steps) else None
        return RunningProgram(routed.program, emit, wall_clock, own, True, remembered, self._watermark)

    def _watermark(self, uid: str) -> int:
        """How far event time is for an operator, as Spark has logged it: an epoch that runs again sees the same."""
        if self._ahead not in self._events:
            epoch = this_epoch(self._log) - self._ahead
            logged = worker_path(self._log, "checkpoint directory") / str(epoch)
            self._events[self._ahead] = event_of(logged) if epoch >= 0 else ControlEvent()
        return self._events[self._ahead].watermarks.get(uid, MIN_TIMESTAMP)

    def without_malformed(self, batch: pa.RecordBatch, route: Route | None) -> pa.RecordBatch:
        """The rows that fit."""
        column = batch.column(MALFORMED)
        if column.null_count < batch.num_rows:
            unfit = batch.filter(column.is_valid()).column(MALFORMED)
            self.report.metrics.count(
                "malformed rows dropped" if route is None else "malformed rows diverted", len(unfit)
            )
            if route is not None:
                self.packer.add(
                    route, pa.RecordBatch.from_arrays([unfit.field(n) for n in route.schema.names], schema=route.schema)
                )
            batch = batch.filter(column.is_null())
        return batch

    def finish(self) -> Iterator[pa.RecordBatch]:
        """What is left, and the report."""
        self._flush()
        yield from self.packer.flush()
        for running in self._running.values():
            report = running.report()
            if self.reads_source:
                self.report.saw_part(self.part or "", report.last_event_times)
            self.report.metrics.add(report)
            self.report.mark(running.end_of_batch())
        yield from _reported(self.report, self.subtask.number)


def _notify(running: RunningProgram, log: str) -> None:
    """Tell the functions that need it which epoch was committed last, by Spark's log of the query's offsets."""
    if running.program.counts_epochs and (committed := committed_epoch(log)) is not None:
        running.notify(committed)


def _remembered() -> Mapping[str, Kept]:
    """What watermark generators kept in the micro-batch before."""
    event = control_event()
    return {} if event is None else decode_event(event.encode()).remembered


def _reported(report: Report, partition: int) -> Iterator[pa.RecordBatch]:
    if not report.empty():
        yield packed([(REPORT, partition, 0, report.encode())])


class LevelTask:
    """Runs the keyed operators of one level in one task, each with the state of the key group that Spark hands over."""

    def __init__(self, payload: Payload, client: WriteBehindClient, pages: Any) -> None:
        programs, log = payload.load()
        self._programs: Mapping[int, RoutedProgram | Payload] = programs
        self._log: str = log
        self._store = _SparkStore(client, pages)
        self._out: list[Row] = []
        self._opened: dict[tuple[int, int | None], KeyGroups] = {}
        self._address = (0, 0)
        self._count = 0
        spare_the_garbage_collector()

    def run(self, lane: int, group: int, rows: Iterator[Any]) -> Iterator[Row]:
        """What the rows of one key group of one lane give, packed."""
        if lane not in self._programs:
            yield from (_row(lane, group, row[2], row[3]) for row in rows)
            return
        groups = self._groups(lane, group)
        program = groups.program
        placed: dict[BatchOrder, list[Any]] = {place: [] for place in BatchOrder}
        for _, _, seq, data, _ in sorted(rows, key=lambda row: row[2]):
            placed[place_of(seq)].append(data)
        events = [decode_event(data) for data in placed[BatchOrder.EVENT]]

        copied = program.broadcast.layout if program.broadcast is not None else program.input

        def arrived(own: BatchOrder, broadcast: BatchOrder) -> Arrived:
            return Arrived(
                [decode(data, program.input.schema) for data in placed[own]],
                [decode(data, copied.schema) for data in placed[broadcast]],
            )

        self._address, self._count = (lane, group), 0
        groups.running.enter(group)
        micro_batch = MicroBatch(
            arrived(BatchOrder.AHEAD, BatchOrder.BROADCAST_AHEAD),
            max(events, key=lambda e: e.number, default=None),
            arrived(BatchOrder.BEHIND, BatchOrder.BROADCAST),
            leads=group == 0,
        )
        due = groups.run(self._store, micro_batch)
        report = Report(groups.running.report(), due)
        yield from self._out
        self._out.clear()
        if not report.empty():
            yield _row(REPORT, group, 0, report.encode())

    def close(self) -> None:
        """Closes the author's functions."""
        close_each(self._opened.values(), None)

    def _groups(self, lane: int, group: int) -> KeyGroups:
        """The program of a lane; where its records are in subtasks that an exchange chose, the one of the subtask."""
        in_subtasks = isinstance(self._programs[lane], Payload)
        place = (lane, group if in_subtasks else None)
        if place not in self._opened:
            routed = _loaded(self._programs[lane])

            def emit(number: int, batch: pa.RecordBatch) -> None:
                at, group = BatchOrder.AHEAD if self._opened[place].ahead else BatchOrder.BEHIND, self._address[1]
                for data in encoded(batch):
                    for route in routed.routes[number]:
                        self._count += 1
                        self._out.append(_row(route.target, group, sequence(at, (group << 40) + self._count), data))

            task = this_subtask()
            own = Subtask(group, task.attempt) if in_subtasks else task
            self._opened[place] = KeyGroups(routed.program, emit, wall_clock, own)
            _notify(self._opened[place].running, self._log)
        return self._opened[place]


class _SparkStore:
    """The state of the group that is current in Spark's handles.

    The index lies among the pages, so that Spark's state reader finds both at once.
    """

    def __init__(self, client: WriteBehindClient, pages: Any) -> None:
        self._client, self._pages = client, pages

    def read_index(self) -> bytes | None:
        return self.read_page(INDEX)

    def write_index(self, data: bytes) -> None:
        self.write_page(INDEX, data)

    def read_page(self, number: int) -> bytes | None:
        held = self._pages.getValue((number,))
        return None if held is None else bytes(held[0])

    def write_page(self, number: int, data: bytes) -> None:
        with self._client.writing():
            self._pages.updateValue((number,), (data,))

    def remove_page(self, number: int) -> None:
        with self._client.writing():
            self._pages.removeKey((number,))
