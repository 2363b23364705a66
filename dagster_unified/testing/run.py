"""Runs a whole pipeline in memory, in BATCH or in STREAMING semantics: the harness's two engines.

Both execute the execution graph, vertex by vertex: BATCH with all of its input, sorted where it is keyed; STREAMING in
micro-batches, each behind the control event (the watermark has moved, the clock has) that the ones before it led to,
and at last the end of input. Programs run under the drivers of Spark's workers. Where Spark promises no order, records
are shuffled.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import Enum
from functools import partial
from itertools import chain
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from dagster_unified.connectors.collection import CollectionSource
from dagster_unified.connectors.protocol.positions import ALL
from dagster_unified.engine.job_time import JobTime
from dagster_unified.errors import PipelineError
from dagster_unified.graph import nodes as g
from dagster_unified.graph.connectors import Boundedness
from dagster_unified.graph.execution_graph import ExecutionGraph, Vertex, keyed_input
from dagster_unified.graph.plan import Plan, Port
from dagster_unified.graph.segments import segments
from dagster_unified.graph.topology import Lanes, laid_out
from dagster_unified.operators.drivers.batch import run_batch
from dagster_unified.operators.drivers.key_groups import Arrived, ControlEvent
from dagster_unified.operators.drivers.report import Report
from dagster_unified.operators.failures import placed
from dagster_unified.operators.functions.base import Subtask
from dagster_unified.operators.keys import KeyedInput, decoded, key_columns
from dagster_unified.operators.layout import TIMESTAMP, StreamLayout
from dagster_unified.operators.metrics import Metrics, merge
from dagster_unified.operators.program.blocks import close_each
from dagster_unified.operators.program.step import Program
from dagster_unified.operators.routing import encode
from dagster_unified.operators.time import MIN_TIMESTAMP, wall_clock
from dagster_unified.operators.watermarks import Mark
from dagster_unified.testing.driving import Driven, Inputs, Order, Streams, Timed, planned, shipped, to_timed
from dagster_unified.testing.iterations import HarnessLoop
from dagster_unified.testing.native import run_native


@dataclass
class Result:
    """What reached the sinks, in order, by sink name; and the metrics. There is an example at `run_pipeline`."""

    sinks: dict[str, list[Any]] = field(default_factory=dict)
    metrics: Metrics = field(default_factory=Metrics)

    def only(self) -> list[Any]:
        """The records of the one sink."""
        if len(self.sinks) != 1:
            raise PipelineError(
                f"the pipeline has {len(self.sinks)} sinks: {', '.join(self.sinks)}; read one by its name"
            )
        return next(iter(self.sinks.values()))


def run_pipeline(
    pipeline: Any,
    mode: str,
    inputs: Mapping[str, Sequence[Any]] | None = None,
    options: Mapping[str, Any] | None = None,
    clock: Callable[[], int] = wall_clock,
    watermark_interval: int | None = 1,
    micro_batch: int | None = 1,
    seed: int | None = 0,
) -> Result:
    """Runs `pipeline` in `mode` ("BATCH" or "STREAMING"), with copies of its functions, as Spark's workers get them.

    `inputs` gives records by source name; a source that reads a collection may be left out. In STREAMING a micro-batch
    takes `micro_batch` records of a source, one source after another, or all there are where it is None. Between
    micro-batches the watermark moves and processing-time timers that are due fire: after every `watermark_interval`
    records, or only at the end of input where it is None. A micro-batch is an epoch, of which a `CheckpointListener`
    hears before the next one. Records that Spark brings in no defined order are shuffled by `seed`: in BATCH what comes
    over an exchange or from several streams, in STREAMING those of one micro-batch. None keeps them as they are.

    Examples:
        >>> sink = sales.key_by("shop").sum("amount").print("totals")
        >>> [sale.amount for sale in run_pipeline(pipeline, "STREAMING", {"sales": [Sale("east", 7, at(9, 0))]}).only()]
        [7]
    """
    decided = planned(pipeline.graph(), mode, options)
    for name, number in (("watermark_interval", watermark_interval), ("micro_batch", micro_batch)):
        if number is not None and number < 1:
            raise PipelineError(f"{decided.name}: {name} is a number of records of at least 1, or None, not {number}")
    given = _inputs(decided, inputs or {})
    order = Order(seed)
    if decided.execution.mode == "BATCH":
        return _Batch(decided, given, clock, order).run()
    return _run_streaming(decided, given, clock, order, watermark_interval, micro_batch)


def _inputs(decided: Plan, inputs: Mapping[str, Sequence[Any]]) -> dict[int, list[Any]]:
    found: dict[int, list[Any]] = {}
    reading = decided.graph.readers
    names = [n.reads for n in reading]
    for name in inputs:
        if name not in names:
            raise PipelineError(f"{decided.name} has no source '{name}'; its sources are {', '.join(names)}")
    for node in reading:
        name = node.reads
        if name in inputs:
            given = inputs[name]
        elif isinstance(node.source, CollectionSource):
            given = node.source.data
        else:
            raise PipelineError(
                f"{decided.name}: source '{name}' reads {node.source.describe()}, which the harness does not; give its"
                f" records as inputs={{'{name}': [...]}}"
            )
        declared = node.source.records
        with placed(f"{decided.name}: source '{name}'"):
            found[node.id] = list(declared.from_batch(declared.to_batch(list(given))))  # as Spark hands them over
    return found


def _keys(pipeline: str, name: str, keyed: KeyedInput, layout: StreamLayout, batch: pa.RecordBatch) -> list[Any]:
    """The keys of some records; raises `RecordTypeError` for one that is None."""
    where = f"{pipeline}: operator '{name}'"
    columns = [c.to_pylist() for c in key_columns(batch, keyed, layout, where)]
    return decoded(keyed, columns[0] if len(columns) == 1 else list(zip(*columns, strict=True)), where)


def _check_keys(decided: Plan, node: g.Node, layout: StreamLayout, batch: pa.RecordBatch) -> None:
    """Raise `RecordTypeError` where a native operation meets a key that is None."""
    _keys(decided.name, node.name, keyed_input(node, layout.records), layout, batch)


class _Batch:
    """BATCH semantics: each vertex over its whole input, keyed input sorted by key and event time."""

    def __init__(self, decided: Plan, inputs: dict[int, list[Any]], clock: Callable[[], int], order: Order) -> None:
        self.plan, self.records, self.clock, self.order = decided, inputs, clock, order
        self.graph = ExecutionGraph(decided, decided.name, tuple(node.id for node in decided.graph.nodes))
        self.inputs = Inputs(self.graph, order, spreads=True)
        self.streams: Streams = {}
        self.reports: list[Metrics] = []

    def run(self) -> Result:
        result = Result()
        for vertex in self.graph.vertices:
            node = self.plan.graph.node(vertex.head)
            if isinstance(node, g.SourceNode):
                self._emit(vertex.outputs[0], 0, [(r, None) for r in self.records[node.id]])
            elif isinstance(node, g.SinkNode):
                records = self.inputs.records(node.id, self.streams)
                result.sinks.setdefault(node.name, []).extend(record for record, _ in records)
            elif isinstance(node, g.IterationNode):
                self._iteration(node, vertex)
            elif node.step is not None:
                self._python(node, vertex)
            else:
                self._native(node)
        result.metrics = merge(self.reports)
        return result

    def _emit(self, port: Port, subtask: int, records: Sequence[Timed]) -> None:
        batch = self.inputs.batch(port, records)
        self.streams.setdefault(port, {}).setdefault(subtask, []).append(batch)

    def _iteration(self, node: g.IterationNode, vertex: Vertex) -> None:
        streams = self.inputs.of_iteration(node.id, self.streams)
        inputs = [self.order.shuffled(chain.from_iterable(own)) for own in node.by_input(streams)]
        loop = HarnessLoop(self.plan, node, self.clock)
        for number, records in enumerate(loop.micro_batch(inputs, ends=True)):
            if Port(node.id, g.output_tag(number)) in vertex.outputs:
                self._emit(Port(node.id, g.output_tag(number)), 0, records)
        self.reports.append(loop.metrics)

    def _python(self, node: g.Node, vertex: Vertex) -> None:
        arriving = self.inputs.of(node.id, self.streams)
        last = merge(self.reports).last_event_time(self.plan.assigners_before(node.id))
        program = replace(self.graph.program(vertex, last), stage=node.name)
        load = shipped(program, [program], self.plan.name)
        for subtask in range(self.plan.subtasks.get(node.id, 1)):
            self._run(node, vertex, load(), subtask, arriving.get(subtask))

    def _run(
        self, node: g.Node, vertex: Vertex, program: Program, subtask: int, arriving: pa.RecordBatch | None
    ) -> None:
        if program.broadcast is not None:
            records = self.inputs.broadcast(node.id, self.streams)
            if records is not None and program.broadcast.layout.timestamped:
                records = records.take(_by_time(records))
            data = () if records is None else (encode(records),)
            program = replace(program, broadcast=replace(program.broadcast, data=data, leads=subtask == 0))
        if node.key not in (None, g.Key()) and arriving is not None:
            arriving = self._sorted(node, program, arriving)
        run = run_batch(program, [] if arriving is None else [arriving], self.clock, Subtask(subtask))
        for emitted in run:
            port = vertex.outputs[emitted.output]
            self.streams.setdefault(port, {}).setdefault(subtask, []).append(emitted.batch)
        self.reports.append(run.metrics[0])

    def _sorted(self, node: g.Node, program: Program, arriving: pa.RecordBatch) -> pa.RecordBatch:
        """A keyed vertex's input by key, and then by event time."""
        assert program.keyed is not None
        if program.input.timestamped:
            arriving = arriving.take(_by_time(arriving))
        keys = list(map(_sortable, _keys(self.plan.name, node.name, program.keyed, program.input, arriving)))
        return arriving.take(pa.array(sorted(range(len(keys)), key=keys.__getitem__), pa.int64()))

    def _native(self, node: g.Node) -> None:
        layout, looked_up = self.inputs.layouts[node.id], self.records.get(node.id, ())
        for subtask, arriving in (self.inputs.of(node.id, self.streams) or {0: None}).items():
            if node.aggregates_natively and arriving is not None:
                _check_keys(self.plan, node, layout, arriving)
            records = [] if arriving is None else to_timed(layout, arriving)
            self._emit(Port(node.id), subtask, run_native(self.plan.name, node, layout, records, looked_up))


def _by_time(batch: pa.RecordBatch) -> pa.Array:
    """The rows of a batch in the order of their event times."""
    return pc.array_sort_indices(pc.fill_null(batch[TIMESTAMP], MIN_TIMESTAMP))


def _sortable(key: Any) -> Any:
    """Keys in an order of their own kind, field by field; None and mixed kinds sort by text."""
    names = getattr(key, "__struct_fields__", None) or getattr(key, "__dataclass_fields__", None)
    if names is not None:
        return tuple(_sortable(getattr(key, name)) for name in names)
    if isinstance(key, tuple):
        return tuple(map(_sortable, key))
    plain = key.value if isinstance(key, Enum) else key
    return (type(plain).__name__, "" if plain is None else plain)


@dataclass
class _LoggedOutput:
    """What a micro-batch of one segment hands on to another, and how far event time is."""

    records: list[Timed]
    watermark: int | None
    last_event_time: int | None
    ended: bool
    """Whether nothing comes after it."""


def _run_streaming(
    decided: Plan,
    inputs: Mapping[int, list[Any]],
    clock: Callable[[], int],
    order: Order,
    interval: int | None,
    size: int | None,
) -> Result:
    """Segment after segment; each reads what those before it have handed on, micro-batch by micro-batch."""
    plans = segments(decided)
    laid_out(decided, Lanes(), plans)  # refuses what a job refuses
    result = Result(sinks={n.name: [] for n in decided.graph.sinks})
    by_uid = {decided.graph.node(n).uid: records for n, records in inputs.items()}
    handed: dict[str, list[_LoggedOutput]] = {}
    measured = []
    for segment in plans:
        one = _Streaming(segment, by_uid, clock, order, interval, size, handed)
        found = one.run()
        for name, records in found.sinks.items():
            result.sinks[name] += records
        measured.append(found.metrics)
        handed |= one.handed
    result.metrics = merge(measured)
    return result


class _Streaming:
    """STREAMING semantics: micro-batch after micro-batch through all operators, in the order of the graph."""

    def __init__(
        self,
        decided: Plan,
        inputs: Mapping[str, list[Any]],
        clock: Callable[[], int],
        order: Order,
        interval: int | None,
        size: int | None,
        given: Mapping[str, Sequence[_LoggedOutput]],
    ) -> None:
        self.plan, self.clock, self.order = decided, clock, order
        nodes = tuple(node.id for node in decided.graph.nodes)
        self.graph = ExecutionGraph(decided, decided.name, nodes, state_alone=True)
        self.inputs = Inputs(self.graph, order, spreads=False)
        self.vertices = [(vertex, decided.graph.node(vertex.head)) for vertex in self.graph.vertices]
        self.told = {
            vertex.head
            for vertex, head in self.vertices
            if head.key is not None or any(decided.graph.node(n).is_told_watermark for n in vertex.members)
        }
        """The vertices, by their heads, that are told how far event time is."""

        self.records = {n.id: inputs[n.uid] for n in decided.graph.readers if not isinstance(n, g.QueryInputNode)}
        self.interval, self.size = interval, size
        self.given = {n.id: given[n.uid] for n in decided.graph.nodes if isinstance(n, g.QueryInputNode)}
        self.handed: dict[str, list[_LoggedOutput]] = {
            n.uid: [] for n in decided.graph.nodes if isinstance(n, g.QueryOutputNode)
        }
        self.result = Result(sinks={n.name: [] for n in decided.graph.sinks})
        self.time = JobTime(decided, None, clock(), native_windows=True)
        self.driven: dict[int, list[Driven]] = {}
        """The instances of each vertex, by its head."""

        self.iterations = {
            n.id: HarnessLoop(decided, n, clock) for n in decided.graph.nodes if isinstance(n, g.IterationNode)
        }
        self.streams: dict[bool, Streams] = {}
        """The records of a micro-batch: those that its control event led to (True), and those that came of records."""

        self.delivered = ControlEvent()
        """The latest event that a micro-batch has had."""

        self.due: list[int] = []
        self.kept: dict[int, list[tuple[Timed, int]]] = {}
        """For a native operation on keys, what has come, and the watermark at which it did."""

        self.late = Metrics()
        self.marks: list[dict[str, Mark]] = []
        """What watermark generators have emitted since the time was last taken."""

        self.epoch = 0
        self.committed: int | None = None
        """The epoch that was committed last."""
        self.read = dict.fromkeys(self.records, 0)
        """How many records of each source have been processed."""

    def run(self) -> Result:
        failure: BaseException | None = None
        try:
            for vertex, node in self.vertices:
                if node.step is not None:
                    self.driven[node.id] = list(self._opened(vertex, node))
            event, waiting = None, 0
            self._end_sources()
            for arriving in self._micro_batches():
                self._micro_batch(arriving, event)
                waiting += sum(map(len, arriving.values()))
                self._take_time(arriving)
                self._end_sources(arriving)
                event = None
                if self.interval is not None and waiting >= self.interval:
                    event, waiting = self._after(), 0
            event = event or self._after()
            if event is not None:
                self._micro_batch({}, event)
                self._after()
            self._micro_batch({}, self.time.end(self.clock()))
            self._tell_of_the_last_epoch()
        except BaseException as error:
            failure = error
            raise
        finally:
            close_each(self._instances(), failure)
        iterated = (one.metrics for one in self.iterations.values())
        self.result.metrics = merge([self.late, *(d.metrics for d in self._instances()), *iterated])
        return self.result

    def _opened(self, vertex: Vertex, node: g.Node) -> Iterator[Driven]:
        """The instances of a vertex, one for each subtask."""
        program = replace(self.graph.program(vertex), stage=node.name)
        apart = node.has_broadcast_input and node.key not in (None, g.Key())
        groups = self.plan.execution.streaming.max_parallelism if apart else 0
        for subtask in range(self.plan.subtasks.get(node.id, 1)):
            yield Driven(program, partial(self._emit_from, vertex, subtask), self.clock, None, subtask, groups)

    def _instances(self) -> Iterator[Driven]:
        return chain.from_iterable(self.driven.values())

    def _micro_batches(self) -> Iterator[dict[int, list[Timed]]]:
        """One source after another, a micro-batch's number of records at a time; with no number, everything at once.

        What another segment handed on comes as it did, all streams together.
        """
        sources = [n.id for n in self.plan.graph.sources if n.id not in self.given]
        reading = {n: [(record, None) for record in self.records[n]] for n in sources}
        epochs = max(map(len, self.given.values()), default=0)
        handed = [{n: given[i].records for n, given in self.given.items() if i < len(given)} for i in range(epochs)]
        if self.size is None:
            together = {n: list(chain.from_iterable(one.records for one in given)) for n, given in self.given.items()}
            yield {n: self.order.shuffled(records) for n, records in reading.items()} | together
            return
        yield from handed
        for n, records in reading.items():
            for start in range(0, len(records), self.size):
                yield {n: self.order.shuffled(records[start : start + self.size])}

    def _take_time(self, arriving: Mapping[int, object]) -> None:
        """Takes the event time that was handed on with records that have been processed."""
        for n in self.given.keys() & arriving.keys():
            passed = self.given[n] if self.size is None else self.given[n][: self.epoch]
            if passed:
                last = passed[-1]
                uid = self.plan.graph.node(n).uid
                self.time.reached(uid, last.watermark, last.last_event_time)
                if last.ended:
                    self.time.ended({uid: {ALL}})

    def _end_sources(self, arrived: Mapping[int, Sequence[object]] = {}) -> None:
        """Says which of the bounded sources have given their last record."""
        for n in arrived.keys() & self.read.keys():
            self.read[n] += len(arrived[n])
        bounded = (
            n for n in self.plan.graph.sources if n.id in self.records and n.source.boundedness is Boundedness.BOUNDED
        )
        self.time.ended({n.uid: {ALL} for n in bounded if self.read[n.id] == len(self.records[n.id])})

    def _after(self) -> ControlEvent | None:
        report = Report(merge(d.metrics for d in self._instances()), min(self.due, default=None))
        for marks in self.marks:
            report.mark(marks)
        self.marks = []
        return self.time.after(report, self.clock())

    def _micro_batch(self, arriving: Mapping[int, list[Timed]], event: ControlEvent | None) -> None:
        self.streams, self.due = {True: {}, False: {}}, []
        ended_before, self.delivered = self.delivered.ended, event or self.delivered
        for driven in self._instances():
            if not self.epoch or driven.listens:
                driven.begin(self.committed)
        for vertex, node in self.vertices:
            if isinstance(node, g.SourceNode):
                if arriving.get(node.id):
                    self._emit(Port(node.id), 0, arriving[node.id])
            elif isinstance(node, g.SinkNode):
                self.result.sinks[node.name] += [record for record, _ in self._records(node)]
            elif isinstance(node, g.QueryOutputNode):
                self._hand_on(node, self._records(node), event)
            elif isinstance(node, g.IterationNode):
                self._iteration(node, vertex, self.delivered.ends(node.uid) and node.uid not in ended_before)
            elif node.step is not None:
                self._python(node, event)
            elif node.aggregates_natively:
                self._native_keyed(node, event)
            else:
                self._native(node)
        self._end_micro_batch()

    def _end_micro_batch(self) -> None:
        self.marks += [driven.end() for driven in self._instances()]
        self.committed, self.epoch = self.epoch, self.epoch + 1
        self.time.delivered(self.delivered)

    def _tell_of_the_last_epoch(self) -> None:
        """The last epoch is committed, and no record comes any more."""
        for driven in self._instances():
            if driven.listens:
                driven.begin(self.committed)
                driven.end()

    def _records(self, node: g.Node) -> list[Timed]:
        """All that reaches a node in the micro-batch."""
        return [timed for ahead in (True, False) for timed in self.inputs.records(node.id, self.streams[ahead])]

    def _emit_from(self, vertex: Vertex, subtask: int, ahead: bool, number: int, batch: pa.RecordBatch) -> None:
        self.streams[ahead].setdefault(vertex.outputs[number], {}).setdefault(subtask, []).append(batch)

    def _emit(self, port: Port, subtask: int, timed: Sequence[Timed], ahead: bool = False) -> None:
        if timed:
            self.streams[ahead].setdefault(port, {}).setdefault(subtask, []).append(self.inputs.batch(port, timed))

    def _python(self, head: g.Node, event: ControlEvent | None) -> None:
        own = [self.inputs.of(head.id, self.streams[ahead]) for ahead in (True, False)]
        broadcast = [self.inputs.broadcast(head.id, self.streams[ahead]) for ahead in (True, False)]
        for subtask, driven in enumerate(self.driven[head.id]):
            ahead, behind = (
                Arrived([side[subtask]] if subtask in side else [], [] if rules is None else [rules])
                for side, rules in zip(own, broadcast, strict=True)
            )
            if any((*ahead, *behind)) or (event is not None and head.id in self.told):
                due = driven.run(ahead, event, behind, self.committed)
                self.due += [] if due is None else [due]

    def _iteration(self, node: g.IterationNode, vertex: Vertex, ends: bool) -> None:
        streams = zip(*[self.inputs.of_iteration(node.id, self.streams[ahead]) for ahead in (True, False)], strict=True)
        own = [[*ahead, *behind] for ahead, behind in streams]
        inputs = [self.order.shuffled(chain.from_iterable(one)) for one in node.by_input(own)]
        for number, records in enumerate(self.iterations[node.id].micro_batch(inputs, ends)):
            if Port(node.id, g.output_tag(number)) in vertex.outputs:
                self._emit(Port(node.id, g.output_tag(number)), 0, records)

    def _hand_on(self, node: g.QueryOutputNode, records: list[Timed], event: ControlEvent | None) -> None:
        handed = self.handed[node.uid]
        watermark = handed[-1].watermark if handed else None
        circulates = any(self.iterations[one].circulates for one in self._before(node))
        if not node.waits_for_end and not circulates:
            watermark = self.delivered.watermarks.get(node.uid, watermark)
        ended = self.delivered.ends(node.uid)
        last_event_time = self.delivered.last_event_times.get(node.uid) if ended else None
        handed.append(_LoggedOutput(records, watermark, last_event_time, ended))

    def _before(self, node: g.Node) -> list[int]:
        """The iterations before a node."""
        return [n for n in self.plan.upstream(node.id) if n in self.iterations]

    def _native(self, node: g.Node) -> None:
        layout, looked_up = self.inputs.layouts[node.id], self.records.get(node.id, ())
        for ahead in (True, False):
            for subtask, batch in self.inputs.of(node.id, self.streams[ahead]).items():
                records = run_native(self.plan.name, node, layout, to_timed(layout, batch), looked_up)
                self._emit(Port(node.id), subtask, records, ahead)

    def _native_keyed(self, node: g.Node, event: ControlEvent | None) -> None:
        mark, layout = self.time.latest.watermarks.get(node.uid, MIN_TIMESTAMP), self.inputs.layouts[node.id]
        kept = self.kept.setdefault(node.id, [])
        for batch in chain(*[self.inputs.of(node.id, self.streams[ahead]).values() for ahead in (True, False)]):
            _check_keys(self.plan, node, layout, batch)
            for record, time in to_timed(layout, batch):
                windows = node.windows_of(record, time)
                if windows and all(w.max_timestamp() <= mark for w in windows):
                    self.late.count("late records")
                else:
                    kept.append(((record, time), mark))
        if event is not None and event.end:
            marks = [mark for _, mark in kept]
            timed = run_native(self.plan.name, node, layout, [timed for timed, _ in kept], marks=marks)
            self._emit(Port(node.id), 0, timed)
