"""Runs the vertices of an execution graph in memory, each with all that reaches it.

So BATCH runs a whole pipeline, and STREAMING in each epoch the operators behind the last stage of a query. Programs run
under the drivers of Spark's workers. Where Spark promises no order, records are shuffled.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from enum import Enum
from itertools import chain
from random import Random
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from dagster_unified.graph import nodes as g
from dagster_unified.graph.execution_graph import (
    ExecutionEdge,
    ExecutionGraph,
    Runs,
    Vertex,
    aligned_columns,
    channel_selector,
    channels,
    keyed_input,
    keys_program,
    route,
)
from dagster_unified.graph.nodes import ExchangeKind, Port
from dagster_unified.graph.operator_state import CHOOSING
from dagster_unified.graph.plan import Plan
from dagster_unified.operators.drivers.batch import run_batch
from dagster_unified.operators.drivers.stages import Shipped
from dagster_unified.operators.functions.base import Subtask
from dagster_unified.operators.keys import KeyedInput, decoded, key_columns
from dagster_unified.operators.layout import TIMESTAMP, StreamLayout
from dagster_unified.operators.metrics import Metrics
from dagster_unified.operators.program.step import Program
from dagster_unified.operators.routing import ChannelSelector, Rebalance, Route, Sender, encode, in_columns
from dagster_unified.operators.time import MIN_TIMESTAMP
from dagster_unified.testing.iterations import HarnessLoop
from dagster_unified.testing.native import run_native
from dagster_unified.testing.records import shipped, with_keys

Streams = dict[Port, dict[int, list[pa.RecordBatch]]]
"""The batches of streams, in the columns of their layouts, by subtask. Where no exchange chose it, that is the first.
"""


class Order:
    """Shuffles records that come in no defined order."""

    def __init__(self, seed: int | None) -> None:
        self._random = None if seed is None else Random(seed)

    def shuffled(self, records: Iterable[Any]) -> list[Any]:
        """The records in any order."""
        shuffled = list(records)
        if self._random is not None:
            self._random.shuffle(shuffled)
        return shuffled

    def merged(self, streams: Iterable[Sequence[Any]]) -> list[Any]:
        """The records of several streams in any order that keeps that of each."""
        streams = [stream for stream in streams if stream]
        if len(streams) < 2:
            return list(streams[0]) if streams else []
        whose = self.shuffled([number for number, stream in enumerate(streams) for _ in stream])
        nexts = [iter(stream) for stream in streams]
        return [next(nexts[number]) for number in whose]

    def united(self, batches: Sequence[pa.RecordBatch], any_order: bool = False) -> pa.RecordBatch:
        """The rows of several batches in one, each in its own order or all in any."""
        starts = [sum(batch.num_rows for batch in batches[:number]) for number in range(len(batches))]
        rows = [range(start, start + batch.num_rows) for start, batch in zip(starts, batches, strict=True)]
        order = self.shuffled(chain.from_iterable(rows)) if any_order else self.merged(rows)
        whole = batches[0] if len(batches) == 1 else pa.concat_batches(batches)
        return whole if order == list(range(len(order))) else whole.take(pa.array(order, pa.int64()))


class Inputs:
    """What reaches the vertices of an execution graph.

    In BATCH (`spreads`) a stream that is forwarded keeps its own order, one that is spread does not; in STREAMING each
    keeps its own in a micro-batch.
    """

    def __init__(self, graph: ExecutionGraph, order: Order, spreads: bool) -> None:
        self.plan, self.order = graph.plan, order
        edges = graph.edges
        self._keying: dict[Port, Shipped[Program] | None] = {}
        """What computes the keys of a stream; None where it has no computed keys."""

        self._ports = {head: [edge.port for edge in edges_in] for head, edges_in in edges.items()}
        self._main = {head: self._routes(edges_in, False) for head, edges_in in edges.items()}
        self._broadcast = {head: self._routes(edges_in, True) for head, edges_in in edges.items()}
        self._shuffled = {
            head
            for head, edges_in in edges.items()
            if spreads and any(e.kind is not ExchangeKind.FORWARD for e in edges_in if not e.is_broadcast)
        }

    def keyed(self, port: Port, batch: pa.RecordBatch) -> pa.RecordBatch:
        """A batch of a stream, with the keys that copies of functions compute."""
        if port not in self._keying:
            layout = self.plan.layout(port)
            keys = keys_program(self.plan, "key_by", layout)
            self._keying[port] = shipped(keys, [keys], self.plan.name) if layout.keys else None
        keying = self._keying[port]
        return batch if keying is None else with_keys(keying.load(), batch)

    def _routes(self, edges: Iterable[ExecutionEdge], broadcast: bool) -> list[tuple[Port, Route]]:
        layout_of = self.plan.broadcast_layout if broadcast else self.plan.input_layout
        return [
            (e.port, route(self.plan, e.edge, 0, layout_of(e.edge.target), _selector(self.plan, e)))
            for e in edges
            if e.is_broadcast == broadcast
        ]

    def of(self, head: int, streams: Streams) -> dict[int, pa.RecordBatch]:
        """The main input of a vertex, by subtask."""
        arrived = [_arrived(route, streams.get(port, {})) for port, route in self._main[head]]
        return {
            subtask: self.order.united([of[subtask] for of in arrived if subtask in of], head in self._shuffled)
            for subtask in sorted(set().union(*arrived))
        }

    def of_iteration(self, node: g.IterationNode, streams: Streams) -> Iterator[pa.RecordBatch | None]:
        """What comes to each input of an iteration, in any order."""
        for head, ports in zip(node.heads, node.by_input(self._ports[node.id]), strict=True):
            schema = head.layout.schema
            batches = []
            for port in ports:
                columns = tuple(aligned_columns(self.plan.layout(port), head.layout))
                batches += [in_columns(batch, columns, schema) for batch in in_one(streams.get(port, {}))]
            yield self.order.united(batches, any_order=True) if batches else None

    def broadcast(self, head: int, streams: Streams) -> pa.RecordBatch | None:
        """The broadcast records of a vertex, if there are any; each of its subtasks gets all of them."""
        arrived = [_arrived(route, streams.get(port, {})) for port, route in self._broadcast[head]]
        united = [pa.concat_batches(list(by_subtask.values())) for by_subtask in arrived if by_subtask]
        return self.order.united(united, False) if united else None


def in_one(stream: Mapping[int, Sequence[pa.RecordBatch]]) -> list[pa.RecordBatch]:
    """The batches of all subtasks."""
    return [batch for subtask in sorted(stream) for batch in stream[subtask]]


def _selector(plan: Plan, edge: ExecutionEdge) -> ChannelSelector | None:
    """The subtask of what comes over an edge: where no exchange chooses it, there is one only."""
    if edge.kind is ExchangeKind.FORWARD and {edge.edge.source, edge.edge.target} <= set(plan.subtasks):
        return None
    if edge.is_broadcast or edge.kind not in CHOOSING:
        return Rebalance(1)
    return channel_selector(plan, edge.edge, channels(plan, edge.edge))


def _arrived(route: Route, stream: Mapping[int, Sequence[pa.RecordBatch]]) -> dict[int, pa.RecordBatch]:
    """What comes of a stream along a route, by subtask."""
    by_channel: dict[int, list[pa.RecordBatch]] = {}
    for subtask in sorted(stream):
        sender = Sender(subtask)
        for batch in stream[subtask]:
            for channel, part in route.split(route.aligned(batch), sender):
                by_channel.setdefault(channel, []).append(part)
    return {channel: parts[0] if len(parts) == 1 else pa.concat_batches(parts) for channel, parts in by_channel.items()}


class Vertices:
    """An execution graph that runs in memory."""

    def __init__(
        self, graph: ExecutionGraph, order: Order, clock: Callable[[], int], tables: Mapping[int, pa.RecordBatch]
    ) -> None:
        """`tables` are the records of lookups, by their nodes."""
        self.graph, self.plan, self.order = graph, graph.plan, order
        self.in_batch = self.plan.execution.mode == "BATCH"
        self.inputs = Inputs(graph, order, spreads=self.in_batch)
        self.metrics = Metrics()
        """What the vertices have measured in the latest run."""

        self._clock, self._tables = clock, tables
        self._vertices = [(vertex, self.plan.graph.nodes[vertex.head]) for vertex in graph.vertices]
        self._programs: dict[int, Shipped[Program]] = {}
        self._listening: set[int] = set()
        """The vertices in which a function hears of committed epochs."""

        self.loops = {
            node.id: HarnessLoop(self.plan, node, clock)
            for _, node in self._vertices
            if isinstance(node, g.IterationNode)
        }

    def run(
        self, streams: Streams, ends: Callable[[str], bool] = lambda uid: True, committed: int | None = None
    ) -> dict[int, list[pa.RecordBatch]]:
        """Run all vertices, and return what reaches the ends of the graph.

        `streams` are those of sources and from outside. `ends` says of an iteration, by its uid, whether its input ends
        now, and `committed` is the epoch before this one.
        """
        self.metrics = Metrics()
        arrived: dict[int, list[pa.RecordBatch]] = {}
        for vertex, node in self._vertices:
            if vertex.runs is Runs.END:
                arrived[node.id] = list(self.inputs.of(node.id, streams).values())
            elif isinstance(node, g.IterationNode):
                self._iteration(node, vertex, streams, ends(node.uid))
            elif node.step is not None:
                self._python(node, vertex, streams, committed)
            elif vertex.runs is Runs.CATALYST:
                self._native(node, streams)
        return arrived

    def tell_of_the_last_epoch(self, committed: int | None) -> None:
        """The last epoch is committed, and no record comes any more."""
        for head in self._listening:
            for _ in run_batch(self._programs[head].load(), [], self._clock, committed=committed):
                pass

    def _iteration(self, node: g.IterationNode, vertex: Vertex, streams: Streams, ends: bool) -> None:
        inputs = self.inputs.of_iteration(node, streams)
        for number, batches in enumerate(self.loops[node.id].micro_batch(inputs, ends)):
            port = Port(node.id, g.output_tag(number))
            if port in vertex.outputs:
                for batch in batches:
                    self._emit(streams, port, batch)

    def _python(self, node: g.Node, vertex: Vertex, streams: Streams, committed: int | None) -> None:
        arriving = self.inputs.of(node.id, streams)
        is_new = node.id not in self._programs
        if is_new:
            self._programs[node.id] = self._shipped(node, vertex)
        if not (self.in_batch or is_new or arriving or node.id in self._listening):
            return
        for subtask in range(self.plan.subtasks.get(node.id, 1)):
            program = self._with_broadcast(node, self._programs[node.id].load(), streams, leads=subtask == 0)
            batch = arriving.get(subtask)
            if node.key not in (None, g.Key()) and batch is not None:
                batch = self._sorted(node, program, batch)
            batches = [] if batch is None else [batch]
            run = run_batch(program, batches, self._clock, Subtask(subtask), committed)
            for emitted in run:
                streams.setdefault(vertex.outputs[emitted.output], {}).setdefault(subtask, []).append(emitted.batch)
            self.metrics.add(run.metrics[0])

    def _shipped(self, node: g.Node, vertex: Vertex) -> Shipped[Program]:
        last = self.metrics.last_event_time(self.plan.assigners_before(node.id)) if self.in_batch else None
        program = replace(self.graph.program(vertex, last), stage=node.name)
        if any(True for step in program.steps for _ in step.listeners()):
            self._listening.add(node.id)
        return shipped(program, [program], self.plan.name)

    def _with_broadcast(self, node: g.Node, program: Program, streams: Streams, leads: bool) -> Program:
        if program.broadcast is None:
            return program
        records = self.inputs.broadcast(node.id, streams)
        if records is not None and program.broadcast.layout.timestamped:
            records = records.take(_by_time(records))
        data = () if records is None else (encode(records),)
        return replace(program, broadcast=replace(program.broadcast, data=data, leads=leads))

    def _sorted(self, node: g.Node, program: Program, arriving: pa.RecordBatch) -> pa.RecordBatch:
        """A keyed vertex's input by key, and then by event time."""
        assert program.keyed is not None
        if program.input.timestamped:
            arriving = arriving.take(_by_time(arriving))
        keys = list(map(_sortable, _keys(self.plan.name, node.name, program.keyed, program.input, arriving)))
        return arriving.take(pa.array(sorted(range(len(keys)), key=keys.__getitem__), pa.int64()))

    def _native(self, node: g.Node, streams: Streams) -> None:
        layout = self.plan.input_layout(node.id)
        for subtask, arriving in self.inputs.of(node.id, streams).items():
            if node.aggregates_natively:
                check_keys(self.plan, node, layout, arriving)
            results = run_native(self.plan.name, node, layout, arriving, self._tables.get(node.id))
            self._emit(streams, Port(node.id), results, subtask)

    def _emit(self, streams: Streams, port: Port, batch: pa.RecordBatch, subtask: int = 0) -> None:
        if batch.num_rows:
            streams.setdefault(port, {}).setdefault(subtask, []).append(self.inputs.keyed(port, batch))


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


def _keys(pipeline: str, name: str, keyed: KeyedInput, layout: StreamLayout, batch: pa.RecordBatch) -> list[Any]:
    """The keys of some records; raises `RecordTypeError` for one that is None."""
    where = f"{pipeline}: operator '{name}'"
    columns = [c.to_pylist() for c in key_columns(batch, keyed, layout, where)]
    return decoded(keyed, columns[0] if len(columns) == 1 else list(zip(*columns, strict=True)), where)


def check_keys(decided: Plan, node: g.Node, layout: StreamLayout, batch: pa.RecordBatch) -> None:
    """Raise `RecordTypeError` where a native operation meets a key that is None."""
    _keys(decided.name, node.name, keyed_input(node, layout.records), layout, batch)
