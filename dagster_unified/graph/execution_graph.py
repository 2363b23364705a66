"""The execution graph: what all runtimes execute, computed once from the plan.

A vertex is the operators that run in one pass, an edge says how records travel between two of them. What a job of BATCH
runs, the part of a STREAMING query behind its state, the body of an iteration and the harness are built alike. Knows
the plan and the operators; no engine.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from functools import cached_property

import pyarrow as pa

from dagster_unified.graph import nodes as g
from dagster_unified.graph.nodes import Edge, ExchangeKind
from dagster_unified.graph.plan import Plan, Port, Region
from dagster_unified.graph.programs import keyed_by, program
from dagster_unified.graph.subtasks import chosen_from
from dagster_unified.operators.layout import TIMESTAMP, StreamLayout, key_column
from dagster_unified.operators.program.spec import Program
from dagster_unified.operators.routing import ByKey, ByPartitioner, ChannelSelector, CopyToAll, Rebalance, Route


class Runs(Enum):
    """What runs a vertex."""

    SOURCE = "source"
    PYTHON = "Python"
    CATALYST = "Catalyst"
    ITERATION = "iteration"
    END = "end"
    """A sink, what hands records on to another query, or the end of a body."""


@dataclass(frozen=True)
class Vertex:
    """Operators that run in one pass, the head first, and the streams that leave it."""

    members: tuple[int, ...]
    outputs: tuple[Port, ...]
    depth: int
    """How many exchanges there are before it, at most."""

    runs: Runs

    @property
    def head(self) -> int:
        """The operator that reads its input."""
        return self.members[0]


@dataclass(frozen=True)
class ExecutionEdge:
    """How the records of a stream travel to a vertex."""

    edge: Edge
    target: Vertex
    source: Vertex | None
    """None where they come from outside."""

    port: Port
    """The stream."""

    kind: ExchangeKind
    is_broadcast: bool
    """Whether they are a stream of their own for the operator, apart from its main input."""


@dataclass(frozen=True, eq=False)
class ExecutionGraph:
    """Operators of a plan that run together; errors give `name` as their stage."""

    plan: Plan
    name: str
    nodes: tuple[int, ...]
    outputs: tuple[Port, ...] = ()
    """The streams that are materialized."""

    sinks: tuple[int, ...] = ()
    carried: tuple[Port, ...] = ()
    """The state that goes on to the next partition."""

    state_alone: bool = False
    """Whether an operator with state is a vertex alone, as in a STREAMING query."""

    @staticmethod
    def of(plan: Plan, region: Region) -> ExecutionGraph:
        """The operators of a region."""
        return ExecutionGraph(plan, region.name, region.nodes, region.outputs, region.sinks, region.carried)

    @cached_property
    def vertices(self) -> tuple[Vertex, ...]:
        """The vertices, each behind those that it reads.

        Python operators of one task that follow each other one-to-one are one. An assigner that reads a field joins a
        vertex of Python, but does not begin one.
        """
        graph = self.plan.graph
        task_of = {o: t.id for t in self.plan.tasks for o in t.operators}
        groups: dict[int, list[int]] = {}
        group_of: dict[int, list[int]] = {}
        for number in sorted(self.nodes):
            node, edges = graph.node(number), graph.inputs(number)
            before = None
            if len(edges) == 1 and edges[0].partitioning.kind is ExchangeKind.FORWARD and node.step is not None:
                before = group_of.get(edges[0].source)
            if before is not None and task_of[before[0]] == task_of[number] and self._goes_on(before[0]):
                before.append(number)
                group_of[number] = before
            else:
                groups[number] = group_of[number] = [number]
        found: list[Vertex] = []
        depth_of: dict[int, int] = {}
        for head, group in groups.items():
            reads = [e for e in graph.inputs(head) if e.source in depth_of]
            depth = max(
                (depth_of[e.source] + (e.partitioning.kind is not ExchangeKind.FORWARD) for e in reads), default=0
            )
            depth_of |= dict.fromkeys(group, depth)
            found.append(Vertex(tuple(group), self._leaving(group), depth, _runs(graph.node(head))))
        return tuple(found)

    def _goes_on(self, head: int) -> bool:
        """Whether operators may follow a head in its vertex."""
        node = self.plan.graph.node(head)
        return node.needs_worker and not (self.state_alone and node.runs_by_key)

    def _leaving(self, group: Sequence[int]) -> tuple[Port, ...]:
        found = [Port.of(e) for e in self.plan.graph.edges if e.source in group and e.target not in group]
        return (*dict.fromkeys(found), *[p for p in self.carried if p.node in group])

    @cached_property
    def vertex_of(self) -> dict[int, Vertex]:
        """The vertex of each operator."""
        return {member: vertex for vertex in self.vertices for member in vertex.members}

    @cached_property
    def edges(self) -> dict[int, list[ExecutionEdge]]:
        """The edges that lead to each vertex, by its head."""
        graph = self.plan.graph
        found: dict[int, list[ExecutionEdge]] = {}
        for vertex in self.vertices:
            broadcast = graph.broadcast_inputs(vertex.head)
            found[vertex.head] = []
            for edge in graph.inputs(vertex.head):
                source, kind = self.vertex_of.get(edge.source), edge.partitioning.kind
                found[vertex.head].append(ExecutionEdge(edge, vertex, source, Port.of(edge), kind, edge in broadcast))
        return found

    def program(self, vertex: Vertex, last_event_time: int | None = None) -> Program:
        """What a vertex of Python runs."""
        return program(self.plan, self.name, vertex.members, vertex.outputs, last_event_time)

    def is_computed_again(self, vertex: Vertex) -> bool:
        """Whether a vertex would run once for each of several readers, as lazy streams do.

        Not so where all its streams leave the graph, since what leaves is computed together.
        """
        graph = self.plan.graph
        carried = [p for p in self.carried if p.node in vertex.members]
        edges = [e for e in graph.edges if e.source in vertex.members and e.target not in vertex.members]
        if len(carried) + len(edges) < 2:
            return False
        written = {Port.of(e) for s in self.sinks for e in graph.inputs(s)}
        return not set(vertex.outputs) <= {*self.outputs, *self.carried, *written}


def _runs(node: g.Node) -> Runs:
    if isinstance(node, g.SourceNode):
        return Runs.SOURCE
    if isinstance(node, g.IterationNode):
        return Runs.ITERATION
    if node.needs_worker:
        return Runs.PYTHON
    return Runs.CATALYST if node.native or node.step is not None else Runs.END


def channels(plan: Plan, edge: Edge) -> int:
    """How many subtasks an exchange chooses from."""
    node = plan.graph.node(edge.target)
    return plan.subtasks.get(node.id) or chosen_from(plan.graph, edge, node, plan.execution.parallelism)


def channel_selector(plan: Plan, edge: Edge, count: int, place: str = "") -> ChannelSelector | None:
    """Which of `count` channels of the operator behind an edge get a record; None where it stays in its subtask.

    An error says `place`, if it is given, for the operator.
    """
    kind, key, node = edge.partitioning.kind, edge.partitioning.key, plan.graph.node(edge.target)
    if kind is ExchangeKind.FORWARD:
        return None
    if kind is ExchangeKind.GLOBAL:
        return Rebalance(1)
    if kind is ExchangeKind.BROADCAST:
        return CopyToAll(count)
    if key is None:
        return Rebalance(count)
    layout = plan.input_layout(node.id)
    keyed = keyed_by(key, layout.records)
    if kind is ExchangeKind.CUSTOM:
        where = place or f"{plan.name}: partition_custom before '{node.name}'"
        return ByPartitioner(edge.partitioning.partitioner, keyed, count, where)
    return ByKey(keyed, layout, place or f"{plan.name}: operator '{node.name}'", count)


def route(
    plan: Plan,
    edge: Edge,
    target: int,
    wanted: StreamLayout,
    selector: ChannelSelector | None = None,
    everywhere: bool = False,
) -> Route:
    """The route of an edge to `target`, in the columns that are `wanted` there."""
    own = plan.layout(Port.of(edge))
    columns = aligned_columns(own, wanted)
    computed = None if edge.partitioning.key is None else edge.partitioning.key.computed
    key = None
    if computed is not None and (wanted.keys or selector is not None):
        columns.append(key_column(own.keys.index(computed)))
        key = None if wanted.keys else pa.field(key_column(0), computed.arrow)
    return Route(target, wanted.schema, tuple(columns), selector, key, everywhere)


def aligned_columns(own: StreamLayout, wanted: StreamLayout) -> list[str | None]:
    """A stream's columns, without keys, in the order in which an operator that unites several has them."""
    columns: list[str | None] = list(own.records.names)
    if wanted.timestamped:
        columns.append(TIMESTAMP if own.timestamped else None)
    return columns
