"""Runs a whole pipeline in memory in STREAMING semantics, through the stages that its queries have on Spark.

Queries run one after another. Each takes micro-batches, behind the control event (the watermark has moved, the clock
has) that the ones before led to, and at last the end of input. A micro-batch goes from stage to stage as on Spark, with
batches in memory for packed rows, and what leaves the last stage goes to the operators behind it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain
from typing import NamedTuple

import pyarrow as pa

from dagster_unified.connectors.protocol.positions import ALL
from dagster_unified.engine.job_time import JobTime
from dagster_unified.graph import nodes as g
from dagster_unified.graph.connectors import Boundedness
from dagster_unified.graph.execution_graph import ExecutionGraph
from dagster_unified.graph.nodes import Port
from dagster_unified.graph.plan import Plan
from dagster_unified.graph.queries import KeyGroupQueryPlan, QueryPlan, plan_queries
from dagster_unified.graph.topology import TAIL, Exchanged, Lanes, Native, Topology
from dagster_unified.operators.drivers.group import MemoryStore
from dagster_unified.operators.drivers.key_groups import ControlEvent, GroupInput, MicroBatch
from dagster_unified.operators.drivers.stages import HEAD, Level, Pass, Programs, Report, merge_reports
from dagster_unified.operators.functions.base import FIRST
from dagster_unified.operators.metrics import Metrics
from dagster_unified.operators.program.step import CompiledProgram, Program
from dagster_unified.operators.routing import EVERYWHERE, Route, RoutedProgram, Sender
from dagster_unified.operators.time import MIN_TIMESTAMP
from dagster_unified.operators.watermarks import Kept, Mark
from dagster_unified.testing.native import run_native
from dagster_unified.testing.records import shipped, to_timed
from dagster_unified.testing.vertices import Order, Streams, Vertices, check_keys

KEYS_PER_PAGE = 8
"""A harness's micro-batches are of a record or two: small pages keep what is read and written for each small."""


class Stage:
    """Programs that run as one stage of a query, shipped as to Spark's workers, by lane."""

    def __init__(self, programs: Mapping[int, RoutedProgram], where: str) -> None:
        self.programs = {lane: routed.program for lane, routed in programs.items()}
        counting = [program for program in self.programs.values() if program.counts_epochs]
        steps = chain.from_iterable(program.steps for program in counting)
        self.listens = any(True for step in steps for _ in step.listeners())
        """Whether a function hears of committed epochs."""

        shared = {lane: routed for lane, routed in programs.items() if not routed.in_subtasks}
        self._shared = shipped(shared, [routed.program for routed in shared.values()], where)
        self._in_subtasks = {
            lane: shipped(routed, [routed.program], where) for lane, routed in programs.items() if routed.in_subtasks
        }

        self._compiled: dict[int, CompiledProgram] = {}

    def load(self) -> Programs:
        """The programs, with functions that nobody has used."""
        return Programs(self._shared.load(), self._in_subtasks, self._compiled)


class InMemoryEpoch:
    """The epochs of a harness, one after another."""

    subtask = FIRST

    def __init__(self, clock: Callable[[], int]) -> None:
        self.clock = clock
        self.number = 0
        self.event = ControlEvent()
        """The latest event that a micro-batch has had."""

        self._before = ControlEvent()
        self._remembered: dict[str, dict[int, bytes]] = {}

    def begin(self, event: ControlEvent | None) -> None:
        """Begin an epoch, with its control event if it has one."""
        self._before, self.event = self.event, event or self.event

    def end(self, marks: Mapping[str, Mark]) -> None:
        """End an epoch, in which watermark generators emitted these marks."""
        for uid, mark in marks.items():
            kept = {**self._remembered.get(uid, {}), **mark.kept}
            self._remembered[uid] = {subtask: data for subtask, data in kept.items() if data is not None}
        self.number += 1

    def committed(self) -> int | None:
        return self.number - 1 if self.number else None

    def remembered(self) -> Mapping[str, Kept]:
        return self._remembered

    def watermark(self, uid: str, before_event: bool) -> int:
        event = self._before if before_event else self.event
        return event.watermarks.get(uid, MIN_TIMESTAMP)


class Pace(NamedTuple):
    """How micro-batches come."""

    clock: Callable[[], int]
    order: Order
    watermark_interval: int | None
    """After how many records time moves; None for only at the end of input."""

    micro_batch: int | None
    """How many records of a source come together; None for all of all sources."""


class _LoggedOutput(NamedTuple):
    """The records that a micro-batch of one query writes for another, and how far event time is."""

    records: list[pa.RecordBatch]
    watermark: int | None
    last_event_time: int | None
    ended: bool
    """Whether it is the last."""


@dataclass
class _JobData:
    """What the queries of a job share, by uid: the records of sources, and the logs that one writes for another."""

    inputs: Mapping[str, pa.RecordBatch]
    log: dict[str, list[_LoggedOutput]] = field(default_factory=dict)


def run_streaming(
    plan: Plan, inputs: Mapping[str, pa.RecordBatch], pace: Pace
) -> tuple[dict[str, list[pa.RecordBatch]], Metrics]:
    """Run the queries of a plan, and return what reaches its sinks, by name, and the metrics."""
    job_data = _JobData(inputs)
    written: dict[str, list[pa.RecordBatch]] = {node.name: [] for node in plan.graph.sinks}
    metrics = Metrics()
    for query_plan in plan_queries(plan, Lanes()):
        query = _Query(query_plan, job_data, pace)
        query.run()
        for name, batches in query.written.items():
            written[name] += batches
        metrics.add(query.metrics())
    return written, metrics


class _Query:
    """One query: micro-batch after micro-batch."""

    def __init__(self, query: QueryPlan, job_data: _JobData, pace: Pace) -> None:
        plan = query.plan
        self.plan, self.pace, self.job_data = plan, pace, job_data
        nodes = plan.graph.upstream(*query.sinks)
        self.sources = [node for node in plan.graph.sources if node.id in nodes]
        self.logs = {node.id: job_data.log[node.uid] for node in self.sources if isinstance(node, g.QueryInputNode)}
        """The logs that it reads, by source."""

        self.records = {node.id: job_data.inputs[node.uid] for node in self.sources if node.id not in self.logs}
        self.bounded = [n for n in self.sources if n.id in self.records and n.source.boundedness is Boundedness.BOUNDED]
        self.read = dict.fromkeys(self.records, 0)
        """How many records of each source have been processed."""

        self.ends = {node.id: node for node in plan.graph.ends if node.id in query.sinks}
        self.written: dict[str, list[pa.RecordBatch]] = {
            node.name: [] for node in self.ends.values() if isinstance(node, g.SinkNode)
        }
        self.time = JobTime(plan, None, pace.clock(), native_windows=True)
        self.epoch = InMemoryEpoch(pace.clock)
        self.reports: list[Report] = []
        """What was measured since time was last taken, in each micro-batch."""

        self.measured = Metrics()
        tables = {n.id: job_data.inputs[n.uid] for n in plan.graph.readers if n not in plan.graph.sources}
        self.line: _Line | None = None
        if isinstance(query, KeyGroupQueryPlan):
            self.line = _Line(plan, query.stages, self.epoch, pace.order, tables)
            self.tail = Vertices(query.stages.tail, pace.order, pace.clock, tables)
        else:
            graph = ExecutionGraph(plan, TAIL, tuple(sorted(nodes)), sinks=query.sinks)
            self.tail = _UntilTheEnd(graph, pace, tables, self.time)

    def run(self) -> None:
        """Run it to the end of its input."""
        for node in self.ends.values():
            if isinstance(node, g.QueryOutputNode):
                self.job_data.log[node.uid] = []
        event, waiting = None, 0
        self._end_sources()
        for arriving in self._micro_batches():
            self._micro_batch(arriving, event)
            waiting += sum(batch.num_rows for batch in arriving.values())
            self._take_time(arriving)
            self._end_sources(arriving)
            event = None
            if self.pace.watermark_interval is not None and waiting >= self.pace.watermark_interval:
                event, waiting = self._after(), 0
        event = event or self._after()
        if event is not None:
            self._micro_batch({}, event)
            self._after()
        self._micro_batch({}, self.time.end(self.pace.clock()))
        if self.line is not None:
            self.line.tell_of_the_last_epoch()
        self.tail.tell_of_the_last_epoch(self.epoch.committed())

    def metrics(self) -> Metrics:
        """Return the metrics of all micro-batches."""
        for loop in self.tail.loops.values():
            self.measured.add(loop.metrics)
        return self.measured

    def _micro_batches(self) -> Iterator[dict[int, pa.RecordBatch]]:
        """Yield the records of each micro-batch, by source: one source after another, or everything at once.

        What another query wrote comes as it did, all streams together.
        """
        size = self.pace.micro_batch
        if size is None:
            together = {n: self.pace.order.united([batch], any_order=True) for n, batch in self.records.items()}
            logged = {n: [batch for entry in log for batch in entry.records] for n, log in self.logs.items()}
            yield together | {n: pa.concat_batches(batches) for n, batches in logged.items() if batches}
            return
        for number in range(max(map(len, self.logs.values()), default=0)):
            logged = {n: log[number].records for n, log in self.logs.items() if number < len(log)}
            yield {n: pa.concat_batches(batches) for n, batches in logged.items() if batches}
        for n, batch in self.records.items():
            for start in range(0, batch.num_rows, size):
                yield {n: self.pace.order.united([batch.slice(start, size)], any_order=True)}

    def _take_time(self, arriving: Mapping[int, object]) -> None:
        """Take the event time that was logged with records that have been processed."""
        for n, log in self.logs.items():
            passed = log if self.pace.micro_batch is None else log[: self.epoch.number]
            if passed:
                last = passed[-1]
                uid = self.plan.graph.nodes[n].uid
                self.time.reached(uid, last.watermark, last.last_event_time)
                if last.ended:
                    self.time.ended({uid: {ALL}})

    def _end_sources(self, arrived: Mapping[int, pa.RecordBatch] = {}) -> None:
        """Say which of the bounded sources have given their last record."""
        for n in arrived.keys() & self.read.keys():
            self.read[n] += arrived[n].num_rows
        ended = {n.uid: {ALL} for n in self.bounded if self.read[n.id] == self.records[n.id].num_rows}
        if ended:
            self.time.ended(ended)

    def _after(self) -> ControlEvent | None:
        reports, self.reports = self.reports, []
        return self.time.after(reports[0] if len(reports) == 1 else merge_reports(reports), self.pace.clock())

    def _micro_batch(self, arriving: Mapping[int, pa.RecordBatch], event: ControlEvent | None) -> None:
        before = self.epoch.event
        self.epoch.begin(event)
        latest, report = self.epoch.event, Report()

        def ends(uid: str) -> bool:
            return latest.ends(uid) and uid not in before.ended

        if self.line is not None:
            streams, report = self.line.run(arriving, event)
        else:
            streams = {Port(n): {0: [self.tail.inputs.keyed(Port(n), batch)]} for n, batch in arriving.items()}
        for n, batches in self.tail.run(streams, ends, self.epoch.committed()).items():
            node = self.ends[n]
            if isinstance(node, g.QueryOutputNode):
                self._log_output(node, batches)
            else:
                self.written[node.name] += batches
        if self.line is None:
            report = Report(self.tail.metrics)
        else:
            self.measured.add_later(self.tail.metrics)
        self.measured.add_later(report.metrics)
        self.reports.append(report)
        self.epoch.end(report.marks)
        self.time.delivered(latest)

    def _log_output(self, node: g.QueryOutputNode, batches: list[pa.RecordBatch]) -> None:
        log, event = self.job_data.log[node.uid], self.epoch.event
        watermark = log[-1].watermark if log else None
        loops = [self.tail.loops[n] for n in self.plan.graph.upstream(node.id) if n in self.tail.loops]
        if not node.waits_for_end and not any(loop.circulates for loop in loops):
            watermark = event.watermarks.get(node.uid, watermark)
        ended = event.ends(node.uid)
        last_event_time = event.last_event_times.get(node.uid) if ended else None
        log.append(_LoggedOutput(batches, watermark, last_event_time, ended))


class _UntilTheEnd(Vertices):
    """The operators of a query of a native aggregate, of which the harness emits the results at the end of input."""

    def __init__(self, graph: ExecutionGraph, pace: Pace, tables: Mapping[int, pa.RecordBatch], time: JobTime) -> None:
        super().__init__(graph, pace.order, pace.clock, tables)
        self._time = time
        self._kept: dict[int, list[tuple[pa.RecordBatch, int]]] = {}
        """For each native aggregate, the records that have come, with the watermark at which they came."""

    def _native(self, node: g.Node, streams: Streams) -> None:
        if not node.aggregates_natively:
            super()._native(node, streams)
            return
        latest, layout = self._time.latest, self.plan.input_layout(node.id)
        mark, kept = latest.watermarks.get(node.uid, MIN_TIMESTAMP), self._kept.setdefault(node.id, [])
        for batch in self.inputs.of(node.id, streams).values():
            check_keys(self.plan, node, layout, batch)
            windows = [node.windows_of(record, time) for record, time in to_timed(layout, batch)]
            in_time = [not of or any(w.max_timestamp() > mark for w in of) for of in windows]
            if False in in_time:
                self.metrics.count("late records", in_time.count(False))
            kept.append((batch.filter(pa.array(in_time, pa.bool_())), mark))
        if latest.end and kept:
            marks = [mark for batch, mark in kept for _ in range(batch.num_rows)]
            arrived = pa.concat_batches([batch for batch, _ in kept])
            self._emit(streams, Port(node.id), run_native(self.plan.name, node, layout, arrived, marks=marks))


_Taken = list[tuple[int, int, bool, pa.RecordBatch]]
"""Batches for a pass: the lane and the group of each, and whether it is before the control event."""


class _Rows:
    """The records of a micro-batch between two stages, by lane and group, before the control event and after it."""

    def __init__(self, order: Order, in_one: frozenset[int]) -> None:
        """`in_one` are the lanes whose key groups are one."""
        self._order, self._in_one = order, in_one
        self._waiting: dict[tuple[int, int, bool], dict[tuple[int, int], list[pa.RecordBatch]]] = {}
        """By lane, group and whether they are before the event, and by the route and subtask from which they come."""

        self._senders: dict[int, Sender] = {}

    def add(self, route: Route, batch: pa.RecordBatch, before_event: bool, subtask: int | None) -> None:
        """Take a batch of a route's output: see `Leave`."""
        if not batch.num_rows:
            return
        aligned, number = route.aligned(batch), subtask or 0
        if route.target in self._in_one and not route.everywhere:
            parts = [(0, aligned if route.key is None else aligned.select(route.schema.names))]
        else:
            parts = list(route.split(aligned, self._senders.setdefault(number, Sender(number))))
        for group, part in parts:
            senders = self._waiting.setdefault((route.target, group, before_event), {})
            senders.setdefault((id(route), number), []).append(part)

    def groups(self, lane: int) -> list[int]:
        """Return the groups of a lane that have records."""
        return sorted({group for target, group, _ in self._waiting if target == lane})

    def at(self, lane: int, group: int, before_event: bool) -> list[pa.RecordBatch]:
        """Return the records of a group, in one batch; those of each sender keep their order."""
        senders = self._waiting.get((lane, group, before_event), {})
        batches = [parts[0] if len(parts) == 1 else pa.concat_batches(parts) for parts in senders.values()]
        return batches if len(batches) < 2 else [self._order.united(batches)]

    def taken(self, lanes: Mapping[int, object]) -> _Taken:
        """Return the records of some lanes, first those before the control event."""
        return [
            (lane, group, before_event, batch)
            for before_event in (True, False)
            for lane in lanes
            for group in self.groups(lane)
            for batch in self.at(lane, group, before_event)
        ]


class _Line:
    """The stages of one query."""

    def __init__(
        self,
        plan: Plan,
        topology: Topology,
        epoch: InMemoryEpoch,
        order: Order,
        tables: Mapping[int, pa.RecordBatch],
    ) -> None:
        self.plan, self.topology, self.epoch, self.order, self._tables = plan, topology, epoch, order, tables
        self.heads = [(head, self._stage({HEAD: head.routed})) for head in topology.heads]
        self.between = [[self._inner(stage) for stage in stages] for stages in topology.between]
        self.levels = [self._stage(programs) for programs in topology.levels]
        self.passes = [self._stage(programs) for programs in topology.passes]
        nodes = {node.uid: node for node in plan.graph.nodes}
        self.groups = {
            lane: self._groups(nodes[program.steps[0].uid], program)
            for level in self.levels
            for lane, program in level.programs.items()
        }
        """The groups of each lane of a level that exist before records come."""

        self.in_one = frozenset(lane for lane, groups in self.groups.items() if list(groups) == [0])
        self.stores: dict[int, dict[int, MemoryStore]] = {
            lane: {group: MemoryStore() for group in groups} for lane, groups in self.groups.items()
        }
        """The state of each lane's key groups."""

        self.report = Report()

    def run(self, arriving: Mapping[int, pa.RecordBatch], event: ControlEvent | None) -> tuple[Streams, Report]:
        """Run a micro-batch of the sources, and return the streams that leave the last stage, and the report."""
        self.report = Report()
        rows = _Rows(self.order, self.in_one)
        for head, stage in self.heads:
            batch = self._natively(head.native, arriving.get(head.source))
            self._pass(stage, rows, [] if batch is None else [(HEAD, 0, False, batch)], part="")
        self._through(self.between[0], rows)
        for level, onward, between in zip(self.levels, self.passes, self.between[1:], strict=True):
            self._level(level, rows, event)
            self._pass(onward, rows, rows.taken(onward.programs))
            self._through(between, rows)
        leaving = {port: rows.taken({lane: port}) for port, lane in self.topology.tail_lanes.items()}
        return {port: {0: [batch for *_, batch in taken]} for port, taken in leaving.items() if taken}, self.report

    def tell_of_the_last_epoch(self) -> None:
        """The last epoch is committed, and no record comes any more."""
        rows = _Rows(self.order, self.in_one)
        passes = [stage for _, stage in self.heads] + self.passes
        passes += [stage for stages in self.between for _, stage in stages]
        for stage in passes:
            if stage.listens:
                with Pass(stage.load(), self.epoch, rows.add) as running:
                    running.open()
        for stage in self.levels:
            if stage.listens:
                with Level(stage.load(), self.epoch, rows.add, KEYS_PER_PAGE) as level:
                    self._open(stage, level)

    def _stage(self, programs: Mapping[int, RoutedProgram]) -> Stage:
        return Stage(programs, self.plan.name)

    def _inner(self, stage: Native | Exchanged) -> tuple[tuple[int, ...], Stage]:
        """Return a stage between two levels: the native operators before its programs, and the programs."""
        if isinstance(stage, Native):
            return stage.nodes, self._stage({stage.lane: stage.routed})
        return (), self._stage(stage.programs)

    def _groups(self, node: g.Node, program: Program) -> Sequence[int]:
        """Return the groups of a keyed operator that exist before records come.

        All of its key groups are one group here. Where each has its own copy of broadcast state, key groups are apart
        once they have records, and one more group has no records and leads.
        """
        if node.id in self.plan.subtasks:
            return range(self.plan.subtasks[node.id])
        return [EVERYWHERE] if program.broadcast is not None and node.key != g.Key() else [0]

    def _opens(self, stage: Stage) -> bool:
        """Whether programs are opened where no record comes: in the first epoch, and to hear of committed ones."""
        return stage.listens or not self.epoch.number

    def _through(self, stages: Sequence[tuple[tuple[int, ...], Stage]], rows: _Rows) -> None:
        for nodes, stage in stages:
            taken = rows.taken(stage.programs)
            if nodes:
                remaining = ((place, self._natively(nodes, place[3])) for place in taken)
                taken = [(*place[:3], batch) for place, batch in remaining if batch is not None]
            self._pass(stage, rows, taken)

    def _pass(self, stage: Stage, rows: _Rows, taken: _Taken, part: str | None = None) -> None:
        opens = self._opens(stage)
        if not stage.programs or not (taken or opens):
            return
        with Pass(stage.load(), self.epoch, rows.add, self.report) as running:
            if opens:
                running.open()
            for lane, group, before_event, batch in taken:
                running.push(lane, group, batch, before_event)
            running.finish(part)

    def _level(self, stage: Stage, rows: _Rows, event: ControlEvent | None) -> None:
        work = [task for lane in stage.programs for task in self._micro_batches(lane, rows, event)]
        opens = self._opens(stage)
        if not (work or opens):
            return
        with Level(stage.load(), self.epoch, rows.add, KEYS_PER_PAGE) as level:
            if opens:
                self._open(stage, level)
            for lane, group, micro_batch in work:
                self.report.add(level.run(lane, max(group, 0), self.stores[lane][group], micro_batch))

    def _open(self, stage: Stage, level: Level) -> None:
        for lane in stage.programs:
            for group in self.groups[lane]:
                level.of(lane, max(group, 0))

    def _micro_batches(
        self, lane: int, rows: _Rows, event: ControlEvent | None
    ) -> Iterator[tuple[int, int, MicroBatch]]:
        """Yield the micro-batches of a lane's groups, each with its lane and group."""
        stores = self.stores[lane]
        broadcast = [rows.at(lane, EVERYWHERE, before_event) for before_event in (True, False)]
        awaited = event if lane in self.topology.timed else None
        for group in rows.groups(lane):
            if group not in stores and group != EVERYWHERE:
                stores[group] = MemoryStore(stores[EVERYWHERE].pages)
        leader = min(stores)
        for group in sorted(stores):
            keyed = [[] if group == EVERYWHERE else rows.at(lane, group, before) for before in (True, False)]
            if any((*keyed, *broadcast)) or awaited is not None:
                before, after = (GroupInput(*side) for side in zip(keyed, broadcast, strict=True))
                yield lane, group, MicroBatch(before, awaited, after, leads=group == leader)

    def _natively(self, nodes: Sequence[int], batch: pa.RecordBatch | None) -> pa.RecordBatch | None:
        """Run native operators on a batch; return None where they leave no record."""
        for number in nodes:
            if batch is not None and batch.num_rows:
                node, layout = self.plan.graph.nodes[number], self.plan.input_layout(number)
                batch = run_native(self.plan.name, node, layout, batch, self._tables.get(number))
        return batch if batch is None or batch.num_rows else None
