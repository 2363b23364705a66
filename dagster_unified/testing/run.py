"""Runs a whole pipeline in memory, in BATCH or in STREAMING semantics: the harness's two engines.

BATCH evaluates operator by operator, keyed input sorted. STREAMING takes the input in micro-batches through all
operators, each behind the control event (the watermark has moved, the clock has) that the ones before it led to, and at
last the end of input. Operators run under the drivers of Spark's workers. Where Spark promises no order, records are
shuffled.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import Enum
from functools import partial
from itertools import chain
from random import Random
from typing import Any

from dagster_unified.connectors.collection import CollectionSource
from dagster_unified.connectors.protocol.alignment import ALL
from dagster_unified.engine.job_time import JobTime
from dagster_unified.errors import PipelineError
from dagster_unified.graph import nodes as g
from dagster_unified.graph.connectors import Boundedness
from dagster_unified.graph.plan import Plan, Port
from dagster_unified.graph.programs import input_layout, keyed_input
from dagster_unified.graph.segments import segments
from dagster_unified.graph.topology import Lanes, laid_out
from dagster_unified.operators.drivers.batch import run_batch
from dagster_unified.operators.drivers.key_groups import ControlEvent
from dagster_unified.operators.drivers.report import Report
from dagster_unified.operators.failures import placed
from dagster_unified.operators.functions.base import Subtask
from dagster_unified.operators.keys import KeyedInput, decoded, key_columns
from dagster_unified.operators.layout import StreamLayout
from dagster_unified.operators.metrics import Metrics, merge
from dagster_unified.operators.packing import encode
from dagster_unified.operators.program.closing import close_each
from dagster_unified.operators.program.spec import Output, Program
from dagster_unified.operators.time import MIN_TIMESTAMP, wall_clock
from dagster_unified.operators.watermarks import Mark
from dagster_unified.testing.driving import Driven, Timed, planned, shipped, single, to_batch, to_timed
from dagster_unified.testing.exchanging import InSubtasks, in_one, sent
from dagster_unified.testing.iterations import StreamedIteration, run_iteration
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
    order = _Order(seed)
    if decided.execution.mode == "BATCH":
        return _Batch(decided, given, clock, order).run()
    return _run_streaming(decided, given, clock, order, watermark_interval, micro_batch)


class _Order:
    """Shuffles records that come in no defined order."""

    def __init__(self, seed: int | None) -> None:
        self._random = None if seed is None else Random(seed)

    def shuffled(self, records: Sequence[Any]) -> list[Any]:
        """The records in any order."""
        found = list(records)
        if self._random is not None:
            self._random.shuffle(found)
        return found

    def merged(self, streams: Sequence[Sequence[Any]]) -> list[Any]:
        """The records of several streams in any order that keeps that of each."""
        streams = [stream for stream in streams if stream]
        if len(streams) < 2:
            return list(streams[0]) if streams else []
        whose = self.shuffled([number for number, stream in enumerate(streams) for _ in stream])
        nexts = [iter(stream) for stream in streams]
        return [next(nexts[number]) for number in whose]


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


def _keys(pipeline: str, name: str, keyed: KeyedInput, layout: StreamLayout, timed: Sequence[Timed]) -> list[Any]:
    """The keys of some records; raises `RecordTypeError` for one that is None."""
    where = f"{pipeline}: operator '{name}'"
    columns = [c.to_pylist() for c in key_columns(to_batch(pipeline, layout, timed), keyed, layout, where)]
    return decoded(keyed, columns[0] if len(columns) == 1 else list(zip(*columns, strict=True)), where)


def _check_keys(decided: Plan, node: g.Node, timed: Sequence[Timed]) -> None:
    """Raise `RecordTypeError` where a native operation meets a key that is None."""
    layout = input_layout(decided, node.id)
    _keys(decided.name, node.name, keyed_input(node, layout.records), layout, timed)


class _Batch:
    """BATCH semantics: each operator over its whole input, keyed input sorted by key and event time."""

    def __init__(self, decided: Plan, inputs: dict[int, list[Any]], clock: Callable[[], int], order: _Order) -> None:
        self.plan, self.inputs, self.clock, self.order = decided, inputs, clock, order
        self.streams: dict[Port, InSubtasks] = {}
        self.reports: list[Metrics] = []

    def run(self) -> Result:
        result = Result()
        for node in self.plan.graph.nodes:
            if isinstance(node, g.SourceNode):
                self.streams[Port(node.id)] = {0: [(r, None) for r in self.inputs[node.id]]}
            elif isinstance(node, g.SinkNode):
                result.sinks.setdefault(node.name, []).extend(r for r, _ in in_one(self._arriving(node)))
            elif isinstance(node, g.IterationNode):
                self._iteration(node)
            elif node.step is not None:
                self._python(node)
            else:
                self._native(node)
        result.metrics = merge(self.reports)
        return result

    def _arriving(self, node: g.Node) -> InSubtasks:
        """What reaches a node, by subtask.

        A stream that is forwarded keeps its own order, one that is spread does not.
        """
        edges = self.plan.graph.main_inputs(node.id)
        streams = [sent(self.plan, e, node, self.streams.get(Port.of(e), {})) for e in edges]
        forwarded = all(e.partitioning.kind is g.ExchangeKind.FORWARD for e in edges)
        found: InSubtasks = {}
        for subtask in sorted({0}.union(*streams)):
            own = [stream.get(subtask, []) for stream in streams]
            found[subtask] = self.order.merged(own) if forwarded else self.order.shuffled([t for o in own for t in o])
        return found

    def _iteration(self, node: g.IterationNode) -> None:
        streams = [in_one(self.streams.get(Port.of(e), {})) for e in self.plan.graph.inputs(node.id)]
        inputs = [self.order.shuffled(list(chain.from_iterable(own))) for own in node.by_input(streams)]
        outputs, metrics = run_iteration(self.plan, node, inputs, self.clock)
        for number, records in enumerate(outputs):
            self.streams[Port(node.id, g.output_tag(number))] = {0: records}
        self.reports.append(metrics)

    def _python(self, node: g.Node) -> None:
        arriving = self._arriving(node)
        program = single(self.plan, node, merge(self.reports).last_event_time(self.plan.assigners_before(node.id)))
        load = shipped(program, [program], self.plan.name)
        for subtask in range(self.plan.subtasks.get(node.id, 1)):
            self._run(node, load(), subtask, arriving.get(subtask, []), program.outputs)

    def _run(
        self, node: g.Node, program: Program, subtask: int, arriving: list[Timed], outputs: Sequence[Output]
    ) -> None:
        if program.broadcast is not None:
            edges = self.plan.graph.broadcast_inputs(node.id)
            records = self.order.merged([in_one(self.streams.get(Port.of(e), {})) for e in edges])
            if program.broadcast.layout.timestamped:
                records.sort(key=lambda timed: MIN_TIMESTAMP if timed[1] is None else timed[1])
            data = tuple(encode(to_batch(self.plan.name, program.broadcast.layout, [timed])) for timed in records)
            program = replace(program, broadcast=replace(program.broadcast, data=data, leads=subtask == 0))
        if node.key not in (None, g.Key()) and arriving:
            assert program.keyed is not None
            keys = _keys(self.plan.name, node.name, program.keyed, program.input, arriving)
            order = sorted(
                range(len(arriving)),
                key=lambda i: (_sortable(keys[i]), MIN_TIMESTAMP if arriving[i][1] is None else arriving[i][1]),
            )
            arriving = [arriving[i] for i in order]
        run = run_batch(program, [to_batch(self.plan.name, program.input, arriving)], self.clock, Subtask(subtask))
        for emitted in run:
            output = outputs[emitted.output]
            records = to_timed(output.layout, emitted.batch)
            self.streams.setdefault(Port(node.id, output.tag), {}).setdefault(subtask, []).extend(records)
        self.reports.append(run.metrics[0])

    def _native(self, node: g.Node) -> None:
        found = self.streams[Port(node.id)] = {}
        for subtask, arriving in self._arriving(node).items():
            if node.aggregates_natively and arriving:
                _check_keys(self.plan, node, arriving)
            layout, looked_up = input_layout(self.plan, node.id), self.inputs.get(node.id, ())
            found[subtask] = run_native(self.plan.name, node, layout, arriving, looked_up)


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
class _Stream:
    """A stream's records of one micro-batch.

    `ahead` are those that its control event led to, `behind` those that came of its records.
    """

    ahead: InSubtasks = field(default_factory=dict)
    behind: InSubtasks = field(default_factory=dict)


@dataclass
class _Handed:
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
    order: _Order,
    interval: int | None,
    size: int | None,
) -> Result:
    """Segment after segment; each reads what those before it have handed on, micro-batch by micro-batch."""
    laid_out(decided, Lanes())  # refuses what a job refuses
    result = Result(sinks={n.name: [] for n in decided.graph.sinks})
    by_uid = {decided.graph.node(n).uid: records for n, records in inputs.items()}
    handed: dict[str, list[_Handed]] = {}
    measured = []
    for segment in segments(decided):
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
        order: _Order,
        interval: int | None,
        size: int | None,
        given: Mapping[str, Sequence[_Handed]],
    ) -> None:
        self.plan, self.clock, self.order = decided, clock, order
        self.inputs = {n.id: inputs[n.uid] for n in decided.graph.readers if not isinstance(n, g.RelayedNode)}
        self.interval, self.size = interval, size
        self.given = {n.id: given[n.uid] for n in decided.graph.nodes if isinstance(n, g.RelayedNode)}
        self.handed: dict[str, list[_Handed]] = {n.uid: [] for n in decided.graph.nodes if isinstance(n, g.RelayNode)}
        self.result = Result(sinks={n.name: [] for n in decided.graph.sinks})
        self.time = JobTime(decided, None, clock(), native_windows=True)
        self.driven: dict[int, list[Driven]] = {}
        """The instances of each operator."""

        self.iterations = {
            n.id: StreamedIteration(decided, n, clock) for n in decided.graph.nodes if isinstance(n, g.IterationNode)
        }
        self.streams: dict[Port, _Stream] = {}
        self.delivered = ControlEvent()
        """The latest event that a micro-batch has had."""

        self.ahead = False
        self.due: list[int] = []
        self.kept: dict[int, list[tuple[Timed, int]]] = {}
        """For a native operation on keys, what has come, and the watermark at which it did."""

        self.late = Metrics()
        self.marks: list[dict[str, Mark]] = []
        """What watermark generators have emitted since the time was last taken."""

        self.epoch = 0
        self.committed: int | None = None
        """The epoch that was committed last."""
        self.read = dict.fromkeys(self.inputs, 0)
        """How many records of each source have been processed."""

    def run(self) -> Result:
        failure: BaseException | None = None
        try:
            for node in self.plan.graph.nodes:
                if node.step is not None:
                    driven = self.driven[node.id] = []
                    for subtask in range(self.plan.subtasks.get(node.id, 1)):
                        emit = partial(self._emit_from, node.id, subtask)
                        driven.append(Driven(self.plan, node, emit, self.clock, subtask=subtask, apart=True))
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

    def _instances(self) -> Iterator[Driven]:
        return chain.from_iterable(self.driven.values())

    def _micro_batches(self) -> Iterator[dict[int, list[Timed]]]:
        """One source after another, a micro-batch's number of records at a time; with no number, everything at once.

        What another segment handed on comes as it did, all streams together.
        """
        sources = [n.id for n in self.plan.graph.sources if n.id not in self.given]
        reading = {n: [(record, None) for record in self.inputs[n]] for n in sources}
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
                self.time.relayed(uid, last.watermark, last.last_event_time)
                if last.ended:
                    self.time.ended({uid: {ALL}})

    def _end_sources(self, arrived: Mapping[int, Sequence[object]] = {}) -> None:
        """Says which of the bounded sources have given their last record."""
        for n in arrived.keys() & self.read.keys():
            self.read[n] += len(arrived[n])
        bounded = (
            n for n in self.plan.graph.sources if n.id in self.inputs and n.source.boundedness is Boundedness.BOUNDED
        )
        self.time.ended({n.uid: {ALL} for n in bounded if self.read[n.id] == len(self.inputs[n.id])})

    def _after(self) -> ControlEvent | None:
        report = Report(merge(d.metrics for d in self._instances()), min(self.due, default=None))
        for marks in self.marks:
            report.mark(marks)
        self.marks = []
        return self.time.after(report, self.clock())

    def _micro_batch(self, arriving: Mapping[int, list[Timed]], event: ControlEvent | None) -> None:
        self.streams, self.due = {}, []
        ended_before, self.delivered = self.delivered.ended, event or self.delivered
        for driven in self._instances():
            if not self.epoch or driven.listens:
                driven.begin(self.committed)
        for node in self.plan.graph.nodes:
            if isinstance(node, g.SourceNode):
                self.streams[Port(node.id)] = _Stream(behind={0: arriving.get(node.id, [])})
                continue
            came = self._arriving(node)
            if isinstance(node, g.SinkNode):
                self.result.sinks[node.name] += [r for r, _ in [*in_one(came.ahead), *in_one(came.behind)]]
            elif isinstance(node, g.RelayNode):
                self._hand_on(node, [*in_one(came.ahead), *in_one(came.behind)], event)
            elif isinstance(node, g.IterationNode):
                self._iteration(node, self.delivered.ends(node.uid) and node.uid not in ended_before)
            elif node.step is not None:
                self._python(node, came, event)
            elif node.aggregates_natively:
                self._native_keyed(node, came, event)
            else:
                self._native(node, came)
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

    def _arriving(self, node: g.Node) -> _Stream:
        ahead, behind = [], []
        for edge in self.plan.graph.main_inputs(node.id):
            stream = self.streams.get(Port.of(edge), _Stream())
            ahead.append(sent(self.plan, edge, node, stream.ahead))
            behind.append(sent(self.plan, edge, node, stream.behind))
        return _Stream(self._merged(ahead), self._merged(behind))

    def _merged(self, streams: Sequence[InSubtasks]) -> InSubtasks:
        return {n: self.order.merged([s.get(n, []) for s in streams]) for n in sorted(set().union(*streams))}

    def _emit_from(self, node_id: int, subtask: int, tag: str | None, timed: list[Timed]) -> None:
        self._emit(Port(node_id, tag), subtask, timed)

    def _emit(self, port: Port, subtask: int, timed: list[Timed]) -> None:
        stream = self.streams.setdefault(port, _Stream())
        (stream.ahead if self.ahead else stream.behind).setdefault(subtask, []).extend(timed)

    def _python(self, node: g.Node, came: _Stream, event: ControlEvent | None) -> None:
        """What is ahead of the event, the event, and what is behind it; the end of the input comes last."""
        rules = [self.streams.get(Port.of(e), _Stream()) for e in self.plan.graph.broadcast_inputs(node.id)]
        end = event if event is not None and event.ends(node.uid) else None
        moved = event.without_end if event is not None else None
        dues: dict[int, int | None] = {}
        for self.ahead, own, broadcast, given in (
            (True, came.ahead, [in_one(s.ahead) for s in rules], moved),
            (False, came.behind, [in_one(s.behind) for s in rules], end),
        ):
            records = self.order.merged(broadcast)
            for subtask, driven in enumerate(self.driven[node.id]):
                mine = own.get(subtask, [])
                if mine or records or (given is not None and (node.key is not None or node.is_told_watermark)):
                    dues[subtask] = driven.run(mine, given, records, self.committed)
        self.due += [due for due in dues.values() if due is not None]

    def _iteration(self, node: g.IterationNode, ends: bool) -> None:
        streams = [self.streams.get(Port.of(e), _Stream()) for e in self.plan.graph.inputs(node.id)]
        own = [[*in_one(stream.ahead), *in_one(stream.behind)] for stream in streams]
        inputs = [self.order.shuffled(list(chain.from_iterable(one))) for one in node.by_input(own)]
        self.ahead = False
        for number, records in enumerate(self.iterations[node.id].micro_batch(inputs, ends)):
            self._emit(Port(node.id, g.output_tag(number)), 0, records)

    def _hand_on(self, node: g.RelayNode, records: list[Timed], event: ControlEvent | None) -> None:
        handed = self.handed[node.uid]
        watermark = handed[-1].watermark if handed else None
        circulates = any(self.iterations[one].circulates for one in self._before(node))
        if not node.waits_for_end and not circulates:
            watermark = self.delivered.watermarks.get(node.uid, watermark)
        ended = self.delivered.ends(node.uid)
        last_event_time = self.delivered.last_event_times.get(node.uid) if ended else None
        handed.append(_Handed(records, watermark, last_event_time, ended))

    def _before(self, node: g.Node) -> list[int]:
        """The iterations before a node."""
        return [n for n in self.plan.upstream(node.id) if n in self.iterations]

    def _native(self, node: g.Node, came: _Stream) -> None:
        layout, looked_up = input_layout(self.plan, node.id), self.inputs.get(node.id, ())
        for self.ahead, own in ((True, came.ahead), (False, came.behind)):
            for subtask, records in own.items():
                self._emit(Port(node.id), subtask, run_native(self.plan.name, node, layout, records, looked_up))

    def _native_keyed(self, node: g.Node, came: _Stream, event: ControlEvent | None) -> None:
        mark = self.time.latest.watermarks.get(node.uid, MIN_TIMESTAMP)
        timed = [*in_one(came.ahead), *in_one(came.behind)]
        if timed:
            _check_keys(self.plan, node, timed)
        kept = self.kept.setdefault(node.id, [])
        for record, time in timed:
            windows = node.windows_of(record, time)
            if windows and all(w.max_timestamp() <= mark for w in windows):
                self.late.count("late records")
            else:
                kept.append(((record, time), mark))
        if event is not None and event.end:
            self.ahead = False
            marks = [mark for _, mark in kept]
            layout = input_layout(self.plan, node.id)
            self._emit(
                Port(node.id), 0, run_native(self.plan.name, node, layout, [timed for timed, _ in kept], marks=marks)
            )
