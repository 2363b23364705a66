"""What the harness sends from vertex to vertex: Arrow batches by subtask, along the routes of the execution graph.

Where Spark promises no order, records are shuffled.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import chain
from random import Random
from typing import Any

import pyarrow as pa

from dagster_unified.graph.execution_graph import ExecutionEdge, ExecutionGraph, channel_selector, channels, route
from dagster_unified.graph.nodes import ExchangeKind, IterationNode
from dagster_unified.graph.plan import Plan, Port
from dagster_unified.graph.programs import keys_program
from dagster_unified.graph.subtasks import CHOOSING
from dagster_unified.operators.layout import StreamLayout
from dagster_unified.operators.program.spec import Program
from dagster_unified.operators.routing import ChannelSelector, Rebalance, Route, Sender
from dagster_unified.testing.driving import Timed, shipped, to_batch, to_timed, with_keys

Streams = dict[Port, dict[int, list[pa.RecordBatch]]]
"""The batches of streams, in the columns of their layouts, by subtask. Where no exchange chose it, that is the first.
"""


class Order:
    """Shuffles records that come in no defined order."""

    def __init__(self, seed: int | None) -> None:
        self._random = None if seed is None else Random(seed)

    def shuffled(self, records: Iterable[Any]) -> list[Any]:
        """The records in any order."""
        found = list(records)
        if self._random is not None:
            self._random.shuffle(found)
        return found

    def merged(self, streams: Iterable[Sequence[Any]]) -> list[Any]:
        """The records of several streams in any order that keeps that of each."""
        streams = [stream for stream in streams if stream]
        if len(streams) < 2:
            return list(streams[0]) if streams else []
        whose = self.shuffled([number for number, stream in enumerate(streams) for _ in stream])
        nexts = [iter(stream) for stream in streams]
        return [next(nexts[number]) for number in whose]


class Inputs:
    """What reaches the vertices of an execution graph.

    In BATCH (`spreads`) a stream that is forwarded keeps its own order, one that is spread does not; in STREAMING each
    keeps its own in a micro-batch.
    """

    def __init__(self, graph: ExecutionGraph, order: Order, spreads: bool) -> None:
        self.plan, self.order = graph.plan, order
        edges = graph.edges
        self.layouts = {head: self.plan.input_layout(head) for head, found in edges.items() if found}
        """The columns of each vertex's main input."""

        self._made: dict[Port, tuple[StreamLayout, Callable[[], Program] | None]] = {}
        """How records of a stream become Arrow: their columns, and what computes their keys."""

        self._edges = {
            head: [(edge.port, self.plan.layout(edge.port)) for edge in found]
            for head, found in edges.items()
            if isinstance(self.plan.graph.node(head), IterationNode)
        }
        self._main = {head: self._routes(found, False) for head, found in edges.items()}
        self._broadcast = {head: self._routes(found, True) for head, found in edges.items()}
        self._shuffled = {
            head
            for head, found in edges.items()
            if spreads and any(e.kind is not ExchangeKind.FORWARD for e in found if not e.is_broadcast)
        }

    def batch(self, port: Port, timed: Sequence[Timed]) -> pa.RecordBatch:
        """Records of a stream as Arrow, with the keys that copies of functions compute."""
        if port not in self._made:
            layout = self.plan.layout(port)
            bare = StreamLayout(layout.records, layout.timestamped)
            keys = keys_program(self.plan, "key_by", layout)
            self._made[port] = bare, shipped(keys, [keys], self.plan.name) if layout.keys else None
        bare, keying = self._made[port]
        batch = to_batch(self.plan.name, bare, timed)
        return batch if keying is None else with_keys(keying(), batch)

    def _routes(self, edges: Iterable[ExecutionEdge], broadcast: bool) -> list[tuple[Port, Route]]:
        layout_of = self.plan.broadcast_layout if broadcast else self.plan.input_layout
        return [
            (e.port, route(self.plan, e.edge, 0, layout_of(e.edge.target), _selector(self.plan, e)))
            for e in edges
            if e.is_broadcast == broadcast
        ]

    def of(self, head: int, streams: Streams) -> dict[int, pa.RecordBatch]:
        """The main input of a vertex, by subtask."""
        arrived = [_arrived(way, streams.get(port, {})) for port, way in self._main[head]]
        found = {}
        for subtask in sorted(set().union(*arrived)):
            found[subtask] = self._united([own[subtask] for own in arrived if subtask in own], head in self._shuffled)
        return found

    def records(self, head: int, streams: Streams) -> list[Timed]:
        """The main input of a vertex as records, of all subtasks."""
        return [timed for batch in self.of(head, streams).values() for timed in to_timed(self.layouts[head], batch)]

    def of_iteration(self, head: int, streams: Streams) -> list[list[Timed]]:
        """What comes to an iteration over each edge."""
        return [
            [timed for batch in in_one(streams.get(port, {})) for timed in to_timed(layout, batch)]
            for port, layout in self._edges[head]
        ]

    def broadcast(self, head: int, streams: Streams) -> pa.RecordBatch | None:
        """The broadcast records of a vertex, if there are any; each of its subtasks gets all of them."""
        arrived = [_arrived(way, streams.get(port, {})) for port, way in self._broadcast[head]]
        united = [pa.concat_batches(list(own.values())) for own in arrived if own]
        return self._united(united, False) if united else None

    def _united(self, batches: Sequence[pa.RecordBatch], shuffled: bool) -> pa.RecordBatch:
        starts = [sum(batch.num_rows for batch in batches[:number]) for number in range(len(batches))]
        rows = [range(start, start + batch.num_rows) for start, batch in zip(starts, batches, strict=True)]
        order = self.order.shuffled(chain.from_iterable(rows)) if shuffled else self.order.merged(rows)
        whole = batches[0] if len(batches) == 1 else pa.concat_batches(batches)
        return whole if order == list(range(len(order))) else whole.take(pa.array(order, pa.int64()))


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


def _arrived(way: Route, stream: Mapping[int, Sequence[pa.RecordBatch]]) -> dict[int, pa.RecordBatch]:
    """What comes of a stream along a route, by subtask."""
    found: dict[int, list[pa.RecordBatch]] = {}
    for subtask in sorted(stream):
        sender = Sender(subtask)
        for batch in stream[subtask]:
            for channel, part in way.split(way.aligned(batch), sender):
                found.setdefault(channel, []).append(part)
    return {channel: parts[0] if len(parts) == 1 else pa.concat_batches(parts) for channel, parts in found.items()}
