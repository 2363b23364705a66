"""Runs a whole pipeline in memory, in BATCH or in STREAMING semantics: the harness's two drivers.

BATCH evaluates operator by operator, keyed input sorted, through the driver that Spark's workers use. STREAMING pushes one
record at a time through all operators, moves the watermark as it goes, and ends the input at the end.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import pyarrow as pa

from dagster_unified.connectors.collection import CollectionSource
from dagster_unified.engine.translate import STEP_KINDS, input_layout, step
from dagster_unified.errors import PipelineError
from dagster_unified.graph import nodes as g
from dagster_unified.graph.mode import sources
from dagster_unified.graph.nodes import Edge
from dagster_unified.graph.options import Configuration
from dagster_unified.graph.plan import Plan, Port, plan
from dagster_unified.operators.batch import run_batch
from dagster_unified.operators.broadcast import BroadcastOperator
from dagster_unified.operators.keyed import KeyedOperator
from dagster_unified.operators.lanes import encode
from dagster_unified.operators.layout import StreamLayout
from dagster_unified.operators.metrics import Metrics, merge
from dagster_unified.operators.program import Program, RunningProgram
from dagster_unified.operators.time import MAX_TIMESTAMP, MIN_TIMESTAMP, to_millis, wall_clock
from dagster_unified.testing.driving import Timed, single
from dagster_unified.testing.driving import tags as tags_of
from dagster_unified.testing.native import run_native


@dataclass
class Result:
    """What reached the sinks, in order, by sink name; and the counters."""

    sinks: dict[str, list[Any]] = field(default_factory=dict)
    metrics: Metrics = field(default_factory=Metrics)

    def only(self) -> list[Any]:
        """The records of the one sink."""
        if len(self.sinks) != 1:
            raise PipelineError(f"the pipeline has {len(self.sinks)} sinks: {', '.join(self.sinks)}; read one by its name")
        return next(iter(self.sinks.values()))


def run_pipeline(
    pipeline: Any,
    mode: str,
    inputs: Mapping[str, Sequence[Any]] | None = None,
    options: Mapping[str, Any] | None = None,
    clock: Callable[[], int] = wall_clock,
    watermark_interval: int | None = 1,
) -> Result:
    """Runs `pipeline` in `mode` ("BATCH" or "STREAMING").

    `inputs` gives records by source name; a source that reads a collection may be left out. In STREAMING a watermark follows
    every `watermark_interval` records of an assigner, or only the end of input where it is None.
    """
    decided = plan(pipeline.graph(), Configuration.of({**(options or {}), "execution.runtime-mode": mode}))
    mode = decided.execution.mode
    given = _inputs(decided, inputs or {})
    return _Batch(decided, given, clock).run() if mode == "BATCH" else _Streaming(decided, given, clock, watermark_interval).run()


def _inputs(decided: Plan, inputs: Mapping[str, Sequence[Any]]) -> dict[int, list[Any]]:
    found: dict[int, list[Any]] = {}
    tables = [n for n in decided.graph.nodes if isinstance(n, g.LookupNode)]
    reading: list[g.SourceNode | g.LookupNode] = [*sources(decided.graph), *tables]
    names = [*(s.name for s in sources(decided.graph)), *(n.source.name for n in tables)]
    for name in inputs:
        if name not in names:
            raise PipelineError(f"{decided.name} has no source '{name}'; its sources are {', '.join(names)}")
    for node in reading:
        name = node.source.name if isinstance(node, g.LookupNode) else node.name
        if name in inputs:
            found[node.id] = list(inputs[name])
        elif isinstance(node.source, CollectionSource):
            found[node.id] = list(node.source.data)
        else:
            raise PipelineError(f"{decided.name}: source '{name}' reads {node.source.describe()}, which the harness does not; give its records as inputs={{'{name}': [...]}}")
    return found


def _check_key(decided: Plan, node: g.KeyedNode, record: Any) -> None:
    key = _key_of(decided, node, record)
    if None in (key if isinstance(key, tuple) else (key,)):
        raise PipelineError(f"{decided.name}: operator '{node.name}': a key is None; filter such records out before key_by")


def _key_of(decided: Plan, node: g.KeyedNode, record: Any) -> Any:
    if node.key.computed is not None:
        (key,) = node.key.computed.of([record])
        return key
    if node.key == g.Key():
        return 0
    layout = input_layout(decided, node.id)
    values = [column[0] for column in layout.records.columns([record])]
    picked = [values[layout.records.names.index(f)] for f in node.key.fields]
    return picked[0] if len(picked) == 1 else tuple(picked)


class _Batch:
    """BATCH semantics: each operator over its whole input, keyed input sorted by key and event time."""

    def __init__(self, decided: Plan, inputs: dict[int, list[Any]], clock: Callable[[], int]) -> None:
        self.plan, self.inputs, self.clock = decided, inputs, clock
        self.streams: dict[Port, list[Timed]] = {}
        self.reports: list[str | Metrics] = []

    def run(self) -> Result:
        result = Result()
        for node in self.plan.graph.nodes:
            if isinstance(node, g.SourceNode):
                self.streams[Port(node.id)] = [(r, None) for r in self.inputs[node.id]]
            elif isinstance(node, g.SinkNode):
                result.sinks.setdefault(node.name, []).extend(r for r, _ in self._arriving(node.id))
            elif type(node) in STEP_KINDS:
                self._python(node)
            else:
                self._native(node)
        result.metrics = merge(self.reports)
        return result

    def _arriving(self, node_id: int) -> list[Timed]:
        return self._records(self.plan.graph.main_inputs(node_id))

    def _records(self, edges: Sequence[Edge]) -> list[Timed]:
        return [timed for e in edges for timed in self.streams.get(Port(e.source, e.tag.name if e.tag else None), [])]

    def _python(self, node: g.Node) -> None:
        tags = tags_of(self.plan, node)
        program = single(self.plan, node, merge(self.reports).last_event_time(self.plan.assigners_before(node.id)))
        if program.broadcast is not None:
            records = self._records(self.plan.graph.broadcast_inputs(node.id))
            if program.broadcast.layout.timestamped:
                records.sort(key=lambda timed: MIN_TIMESTAMP if timed[1] is None else timed[1])
            data = tuple(encode(_one(program.broadcast.layout, record, time)) for record, time in records)
            program = replace(program, broadcast=replace(program.broadcast, data=data))
        for item in run_batch(program, [self._batch(node, program)], self.clock):
            if isinstance(item, str):
                self.reports.append(item)
                continue
            number, batch = item
            layout = program.outputs[number].layout
            times = batch.column("__ts").to_pylist() if layout.timestamped else [None] * batch.num_rows
            self.streams.setdefault(Port(node.id, tags[number]), []).extend(zip(layout.records.from_batch(batch), times, strict=True))

    def _batch(self, node: g.Node, program: Program) -> pa.RecordBatch:
        layout = program.input
        arriving = self._arriving(node.id)
        if isinstance(node, g.KeyedNode) and node.key != g.Key():
            keys = [_key_of(self.plan, node, r) for r, _ in arriving]
            order = sorted(range(len(arriving)), key=lambda i: (_sortable(keys[i]), MIN_TIMESTAMP if arriving[i][1] is None else arriving[i][1]))
            arriving, keys = [arriving[i] for i in order], [keys[i] for i in order]
        batch = layout.records.to_batch([r for r, _ in arriving])
        columns = list(batch.columns)
        if layout.timestamped:
            columns.append(pa.array([t for _, t in arriving], pa.int64()))
        for computed in layout.keys:
            names = [f.name for f in computed.arrow] if pa.types.is_struct(computed.arrow) else None
            columns.append(pa.array([dict(zip(names, k, strict=True)) if names and k is not None else k for k in keys], computed.arrow))
        return pa.RecordBatch.from_arrays(columns, schema=layout.schema)

    def _native(self, node: g.Node) -> None:
        layout = input_layout(self.plan, node.id)
        assert node.records is not None
        arriving = self._arriving(node.id)
        if isinstance(node, g.NativeKeyedNode):
            for record, _ in arriving:
                _check_key(self.plan, node, record)
        self.streams[Port(node.id)] = run_native(self.plan.name, node, layout, arriving, self.inputs.get(node.id, ()))


def _sortable(key: Any) -> Any:
    """Keys in an order of their own kind; None and mixed kinds, which the operator refuses, sort by text."""
    parts = key if isinstance(key, tuple) else (key,)
    return tuple((type(p).__name__, "" if p is None else p) for p in parts)


class _Streaming:
    """STREAMING semantics: records as they arrive, watermarks that follow them, and at last the end of input."""

    def __init__(self, decided: Plan, inputs: dict[int, list[Any]], clock: Callable[[], int], interval: int | None) -> None:
        self.plan, self.inputs, self.clock, self.interval = decided, inputs, clock, interval
        self.result = Result()
        self.running: dict[int, RunningProgram] = {}
        self.tags: dict[int, list[str | None]] = {}
        self.watermarks: dict[int, dict[int, int]] = {}
        self.held: dict[int, list[tuple[int, int, Any]]] = {}
        self.arrived = 0
        self.event_times = Metrics()
        self.ahead: dict[int, int] = {}
        self.since: dict[int, int] = {}
        self.kept: dict[int, list[Timed]] = {}
        self.marks: dict[int, list[int]] = {}
        """The watermarks at which what is kept came."""

        self.late = Metrics()
        for node in decided.graph.nodes:
            self.watermarks[node.id] = {e.source: MIN_TIMESTAMP for e in decided.graph.inputs(node.id)}

    def run(self) -> Result:
        for node in self.plan.graph.nodes:
            if isinstance(node, g.SinkNode):
                self.result.sinks.setdefault(node.name, [])
        try:
            for node in self.plan.graph.nodes:
                if type(node) in STEP_KINDS:
                    self._open(node)
            streams = [node.id for node in sources(self.plan.graph)]
            for node_id in streams:
                for record in self.inputs[node_id]:
                    self._emit(node_id, None, record, None)
            for node_id in streams:
                self._watermark_from(node_id, MAX_TIMESTAMP)
        finally:
            for running in self.running.values():
                running.close()
        self.result.metrics = merge([self.late, *(r.metrics for r in self.running.values())])
        return self.result

    def _open(self, node: g.Node) -> None:
        tags = self.tags[node.id] = tags_of(self.plan, node)
        program = single(self.plan, node)

        def leave(number: int, batch: pa.RecordBatch) -> None:
            layout = program.outputs[number].layout
            times = batch.column("__ts").to_pylist() if layout.timestamped else [None] * batch.num_rows
            for record, time in zip(layout.records.from_batch(batch), times, strict=True):
                self._emit(node.id, tags[number], record, time)

        self.running[node.id] = RunningProgram(program, leave, self.clock)

    def _emit(self, node_id: int, tag: str | None, record: Any, time: int | None) -> None:
        for edge in self.plan.graph.outputs(node_id):
            if (edge.tag.name if edge.tag else None) == tag:
                node = self.plan.graph.node(edge.target)
                if edge in self.plan.graph.broadcast_inputs(node.id):
                    self._broadcast(node, record, time)
                else:
                    self._arrive(node, record, time)

    def _arrive(self, node: g.Node, record: Any, time: int | None) -> None:
        if isinstance(node, g.SinkNode):
            self.result.sinks[node.name].append(record)
        elif isinstance(node, g.AssignTimestampsNode):
            self._assign(node, record, time)
        elif isinstance(node, g.KeyedNode) and type(node) in STEP_KINDS:
            if getattr(getattr(node, "function", None), "requires_time_sorted_input", False) and time is not None:
                self.arrived += 1
                heapq.heappush(self.held.setdefault(node.id, []), (time, self.arrived, record))
            else:
                self._keyed(node, record, time)
        elif type(node) in STEP_KINDS:
            layout = self.running[node.id].program.input
            self.running[node.id].push(_one(layout, record, time))
        elif isinstance(node, g.NativeKeyedNode):
            _check_key(self.plan, node, record)
            watermark = min(self.watermarks[node.id].values())
            if isinstance(node, g.WindowAggregateNode) and time is not None and all(w.max_timestamp() <= watermark for w in node.assigner.assign_windows(record, time, time)):
                self.late.count("late records")
                return
            self.kept.setdefault(node.id, []).append((record, time))
            self.marks.setdefault(node.id, []).append(watermark)
        else:
            for produced, at in run_native(self.plan.name, node, input_layout(self.plan, node.id), [(record, time)], self.inputs.get(node.id, ())):
                self._emit(node.id, None, produced, at)

    def _broadcast(self, node: g.Node, record: Any, time: int | None) -> None:
        running = self.running[node.id]
        assert isinstance(running.keyed, BroadcastOperator)
        assert running.program.broadcast is not None
        operator = running.keyed
        operator.keys = lambda: operator.state.keys
        running.broadcast(_one(running.program.broadcast.layout, record, time), leads=True)
        running.drain()

    def _keyed(self, node: g.KeyedNode, record: Any, time: int | None) -> None:
        running = self.running[node.id]
        key = _key_of(self.plan, node, record)
        if key is None or (node.key.computed is None and isinstance(key, tuple) and None in key):
            raise PipelineError(f"{self.plan.name}: operator '{node.name}': the key is None for {record!r}; filter such records out before key_by")
        running.run_of(key, [record], [time])
        assert running.keyed is not None
        running.keyed.finish_bundle()
        running.drain()

    def _assign(self, node: g.AssignTimestampsNode, record: Any, time: int | None) -> None:
        function = step(node, -1, None).function
        moment = to_millis(function.extract_timestamp(record, time))
        self.ahead[node.id] = max(moment, self.ahead.get(node.id, MIN_TIMESTAMP))
        self.event_times.saw_event_time(node.uid, moment)
        self._emit(node.id, None, record, moment)
        self.since[node.id] = self.since.get(node.id, 0) + 1
        if self.interval is not None and node.max_out_of_orderness_ms is not None and self.since[node.id] >= self.interval:
            self.since[node.id] = 0
            self._watermark_from(node.id, self.ahead[node.id] - node.max_out_of_orderness_ms - 1)

    def _watermark_from(self, node_id: int, watermark: int) -> None:
        """A watermark leaves a node: what is downstream sees the smallest of its inputs'."""
        for target in dict.fromkeys(e.target for e in self.plan.graph.outputs(node_id)):
            node = self.plan.graph.node(target)
            seen = self.watermarks[target]
            before = min(seen.values())
            seen[node_id] = max(watermark, seen[node_id])
            now = min(seen.values())
            if now > before:
                self._advance(node, now)

    def _advance(self, node: g.Node, watermark: int) -> None:
        if isinstance(node, g.AssignTimestampsNode) and watermark != MAX_TIMESTAMP:
            return  # it makes watermarks of its own
        if isinstance(node, g.KeyedNode) and node.id in self.running:
            self._advance_keyed(node, watermark)
        if isinstance(node, g.NativeKeyedNode) and watermark == MAX_TIMESTAMP:
            for record, time in run_native(self.plan.name, node, input_layout(self.plan, node.id), self.kept.get(node.id, []), marks=self.marks.get(node.id)):
                self._emit(node.id, None, record, time)
        self._watermark_from(node.id, watermark)

    def _advance_keyed(self, node: g.KeyedNode, watermark: int) -> None:
        running = self.running[node.id]
        operator: KeyedOperator | None = running.keyed
        assert operator is not None
        held = self.held.get(node.id, [])
        while held and held[0][0] <= watermark:
            time, _, record = heapq.heappop(held)
            self._keyed(node, record, time)
        if watermark == MAX_TIMESTAMP:
            operator.last_event_time = self.event_times.last_event_time(self.plan.assigners_before(node.id))
            operator.end_of_input()
        else:
            operator.advance_watermark(watermark)
        running.drain()


def _one(layout: StreamLayout, record: Any, time: int | None) -> pa.RecordBatch:
    columns = list(layout.records.to_batch([record]).columns)
    if layout.timestamped:
        columns.append(pa.array([time], pa.int64()))
    return pa.RecordBatch.from_arrays(columns, schema=StreamLayout(layout.records, layout.timestamped).schema)
