"""The execution graph: what all runtimes execute, computed once from the plan, and the programs of its vertices."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import Enum
from functools import cached_property
from typing import NamedTuple

import pyarrow as pa
from msgspec import inspect as mi

from dagster_unified.graph import nodes as g
from dagster_unified.graph.lowering.catalyst import InSql, OperatorsInSql
from dagster_unified.graph.lowering.deciding import key_on_columns
from dagster_unified.graph.lowering.needed import NeededFields
from dagster_unified.graph.lowering.sifting import all_kept, kept_rows
from dagster_unified.graph.mode import Execution
from dagster_unified.graph.nodes import Edge, ExchangeKind, Key, Port
from dagster_unified.graph.operator_state import chosen_from
from dagster_unified.graph.plan import Plan, Region
from dagster_unified.operators.keys import KeyedInput
from dagster_unified.operators.layout import CARRIED, TIMESTAMP, StreamLayout, key_column
from dagster_unified.operators.operator import KeyedOptions
from dagster_unified.operators.program.inlined import Inlined
from dagster_unified.operators.program.step import BroadcastInput, Output, Program, Step
from dagster_unified.operators.routing import ByKey, ByPartitioner, ChannelSelector, CopyToAll, Rebalance, Route
from dagster_unified.records import Decoder, RecordType, decoder_of


def _step(plan: Plan, node: g.Node, parent: int, tag: str | None) -> Step:
    assert node.step is not None
    lowering = plan.lowering(node)
    arguments = node.step_arguments()
    if lowering is not None and type(node) is g.KeyedProcessNode:
        arguments["arguments"] = {**arguments["arguments"], "fields": lowering.fields}
    elif lowering is not None and isinstance(node, g.KeyedNode):
        arguments["arguments"] = {**arguments["arguments"], "fold": lowering.fold}
    elif lowering is not None:
        arguments["inlined"] = lowering.inlined
    return node.step(
        name=node.name,
        function=node.runnable,
        uid=node.uid,
        parent=parent,
        tag=tag,
        input=plan.input_layout(node.id).records,
        output=None if node.keeps_records else node.records,
        parallelism=_parallelism(plan, node),
        **arguments,
    )


def _keys_on_columns(plan: Plan, layout: StreamLayout) -> tuple[Inlined | None, ...]:
    """Return what computes the keys of a stream on columns, for each key where that is known."""
    lowers = plan.execution.lowers
    return tuple(key_on_columns(key, layout.records) if lowers else None for key in layout.keys)


def _parallelism(plan: Plan, node: g.Node) -> int:
    """Return the parallelism that a function is told; 0 where Spark decides."""
    keeps = plan.execution.mode == "STREAMING" or plan.execution.has_savepoint
    return (plan.subtasks_with_state(node) if keeps else None) or node.parallelism or 0


def _keyed_options(execution: Execution, last_event_time: int | None) -> KeyedOptions:
    return KeyedOptions(
        incremental_updates=execution.incremental_updates,
        object_reuse=execution.object_reuse,
        processing_time=execution.processing_time,
        processing_time_at_end=execution.processing_time_at_end,
        end_of_input_chain=execution.end_of_input_chain,
        expiry=execution.mode == "STREAMING",
        last_event_time=last_event_time,
    )


def keyed_input(node: g.Node, records: RecordType) -> KeyedInput:
    """Return how a keyed node's input, of these records, is keyed. A key of no fields is 0 for every record."""
    assert node.key is not None
    return keyed_by(node.key, records)


def keyed_by(key: Key, records: RecordType) -> KeyedInput:
    """Return how a stream of these records is keyed."""
    if key == Key():
        return KeyedInput((), int)
    computed = key.computed
    if computed is not None:
        return KeyedInput((key_column(0),), computed.python, decoder_of(mi.type_info(computed.python)))
    types = tuple(records.type_of(f) for f in key.fields)
    return KeyedInput(
        key.fields,
        types[0] if len(types) == 1 else tuple.__class_getitem__(types),
        _fields_decoder(key.fields, records),
    )


def _fields_decoder(fields: tuple[str, ...], records: RecordType) -> Decoder | None:
    """Return what turns Arrow's form of a key into the record's own values; None where they are the same."""
    each = [records.decoder_of(f) for f in fields]
    if not any(each):
        return None
    if len(each) == 1:
        return each[0]
    return lambda key: tuple(
        value if decode is None else decode(value) for value, decode in zip(key, each, strict=True)
    )


class Link(NamedTuple):
    """An operator of a chain, and the link whose records it takes, or a side output of it; -1 for the chain's input."""

    node: int
    parent: int = -1
    tag: str | None = None


class Leaving(NamedTuple):
    """A stream that leaves a chain: that of a link, or its input (-1), and the edges over which it does."""

    link: int
    port: Port
    edges: tuple[Edge, ...] = ()


@dataclass(frozen=True, eq=False)
class OperatorChain:
    """Operators that run in one pass, each behind the one whose records it takes, and the streams that leave them."""

    links: tuple[Link, ...]
    outputs: tuple[Leaving, ...]


class Chains:
    """Puts operators into chains: over the edges that are `joined`, records stay in the chain."""

    def __init__(self, edges: Iterable[Edge], joined: Collection[Edge]) -> None:
        self._joined = joined
        self._outputs: dict[int, list[Edge]] = {}
        for edge in edges:
            self._outputs.setdefault(edge.source, []).append(edge)

    def behind(self, port: Port) -> OperatorChain:
        """Return all that runs on a stream; an operator is there once for each of its inputs that the chain has."""
        links: list[Link] = []
        leaving: list[Leaving] = []
        self._follow(port, -1, links, leaving)
        return OperatorChain(tuple(links), tuple(leaving))

    def of(self, head: int) -> OperatorChain:
        """Return an operator, and all that runs on what it emits."""
        links: list[Link] = []
        leaving: list[Leaving] = []
        self._run(Link(head), links, leaving)
        return OperatorChain(tuple(links), tuple(leaving))

    def _run(self, link: Link, links: list[Link], leaving: list[Leaving]) -> None:
        links.append(link)
        number = len(links) - 1
        for tag in dict.fromkeys(edge.side_output for edge in self._outputs.get(link.node, ())):
            self._follow(Port(link.node, tag), number, links, leaving)

    def _follow(self, port: Port, number: int, links: list[Link], leaving: list[Leaving]) -> None:
        edges = [edge for edge in self._outputs.get(port.node, ()) if edge.side_output == port.tag]
        others = tuple(edge for edge in edges if edge not in self._joined)
        if others:
            leaving.append(Leaving(number, port, others))
        for edge in edges:
            if edge in self._joined:
                self._run(Link(edge.target, number, port.tag if number >= 0 else None), links, leaving)


def program(
    plan: Plan,
    stage: str,
    links: Sequence[Link],
    outputs: Iterable[Output] = (),
    layout: StreamLayout | None = None,
    last_event_time: int | None = None,
) -> Program:
    """Return the program of a chain; errors give `stage` as their stage.

    Without a `layout` it takes the input of its first operator, which may be keyed; else a stream of these columns.
    """
    head = plan.graph.nodes[links[0].node] if layout is None else None
    columns = plan.input_layout(links[0].node) if layout is None else layout
    has_broadcast = head is not None and head.has_broadcast_input
    return Program(
        pipeline=plan.name,
        stage=stage,
        input=columns,
        steps=tuple(_step(plan, plan.graph.nodes[link.node], link.parent, link.tag) for link in links),
        outputs=tuple(replace(output, keys=_keys_on_columns(plan, output.layout)) for output in outputs),
        keyed=keyed_input(head, columns.records) if head is not None and head.key is not None else None,
        options=_keyed_options(plan.execution, last_event_time),
        broadcast=BroadcastInput(plan.broadcast_layout(links[0].node)) if has_broadcast else None,
        event_time_unit=plan.execution.streaming.event_time_unit,
    )


def keyed_program(plan: Plan, node: g.Node) -> Program:
    """One keyed operator alone, none of whose output goes anywhere."""
    return program(plan, node.name, (Link(node.id),))


def keys_program(plan: Plan, stage: str, layout: StreamLayout, taken: StreamLayout | None = None) -> Program:
    """Return a program of no operators, which adds the keys that functions compute; by default it takes the others."""
    return program(plan, stage, (), (Output(-1, layout),), taken or layout.without_keys)


_WITHOUT_KEYS = frozenset(
    [ExchangeKind.FORWARD, ExchangeKind.REBALANCE, ExchangeKind.RESCALE, ExchangeKind.SHUFFLE, ExchangeKind.GLOBAL]
)

_MOST_FILTERS = 8
"""The filters of a chain of which there is a condition; each is in the one of those before it."""


class Runs(Enum):
    """What runs a vertex."""

    SOURCE = "source"
    PYTHON = "Python"
    CATALYST = "Catalyst"
    ITERATION = "iteration"
    END = "end"
    """A sink, what hands records on to another query, or the end of a body."""


@dataclass(frozen=True, eq=False)
class Vertex:
    """A chain of operators in an execution graph."""

    chain: OperatorChain
    depth: int
    """How many exchanges there are before it, at most."""

    runs: Runs

    @cached_property
    def members(self) -> tuple[int, ...]:
        """Its operators, the head first."""
        return tuple(link.node for link in self.chain.links)

    @cached_property
    def head(self) -> int:
        """The operator that reads its input."""
        return self.members[0]

    @cached_property
    def outputs(self) -> tuple[Port, ...]:
        """The streams that leave it."""
        return tuple(leaving.port for leaving in self.chain.outputs)


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

    runs_again: bool = False
    """Whether what runs it runs it once more, and calls all functions, where an error says that only they know.

    Then columns that nobody reads are left out, and Catalyst runs what it can.
    """

    @staticmethod
    def of(plan: Plan, region: Region) -> ExecutionGraph:
        """Return the operators of a region. State that goes on may hold records, and these are whole."""
        runs_again = plan.execution.lowers and plan.execution.mode == "BATCH" and not region.carried
        return ExecutionGraph(plan, region.name, region.nodes, region.outputs, region.sinks, region.carried, runs_again)

    @cached_property
    def _needed(self) -> NeededFields:
        return NeededFields(self.plan, self.nodes, {*self.outputs, *self.carried}, self._in_python, self.is_unseen)

    def is_unseen(self, port: Port) -> bool:
        """Return whether nobody has looked at the values of a stream, so that some may not be of their types."""
        if self._in_python(port.node) or port.node in self.in_sql:
            return False
        return not self.plan.layout(port).keys or self.keys_in_sql(port) is not None

    def _in_python(self, node: int) -> bool:
        vertex = self.vertex_of.get(node)
        return self.plan.graph.nodes[node].needs_worker if vertex is None else vertex.runs is Runs.PYTHON

    @cached_property
    def _sql(self) -> OperatorsInSql:
        chains = Chains(self.plan.graph.edges, self._joined())

        def chain_of(head: int) -> list[int]:
            return [link.node for link in chains.of(head).links]

        return OperatorsInSql(self.plan, self.nodes if self.runs_again else (), chain_of)

    @property
    def in_sql(self) -> Mapping[int, InSql]:
        """What Catalyst runs in place of operators that else run in Python."""
        return self._sql.operators

    def keys_in_sql(self, port: Port) -> tuple[str, ...] | None:
        """Return what computes the keys of a stream that no Python emits; None where a worker computes them."""
        return self._sql.keys(port) if self.runs_again else None

    def layout(self, port: Port) -> StreamLayout:
        """Return the columns in which a stream leaves its vertex, without those that nobody reads."""
        layout = self.plan.layout(port)
        if not self.runs_again or port.node not in self.vertex_of or port.tag == CARRIED:
            return layout
        return layout.with_fields(self._needed.of_stream(port))

    def input_layout(self, node: int) -> StreamLayout:
        """Return the columns of what reaches an operator, without those that neither it nor what is behind it reads."""
        layout = self.plan.input_layout(node)
        if not self.runs_again or node not in self.vertex_of or not self._in_python(node):
            return layout
        return layout.with_fields(self._needed.of_input(node))

    def kept_rows(self, node: int) -> str | None:
        """Return the condition, in Spark's SQL, that the filters at the head of a chain of Python ask first.

        It is false for rows that they surely drop, and null where only they know. None where there is none.
        """
        vertex = self.vertex_of.get(node)
        inputs = self.plan.graph.inputs(node)
        if not self.runs_again or not inputs or vertex is None or node in self.plan.subtasks:
            return None
        if vertex.head != node or vertex.runs is not Runs.PYTHON:
            return None
        records, conditions = self.plan.input_layout(node).records, list[str]()
        if any(edge.partitioning.kind not in _WITHOUT_KEYS or self.cannot_sift(edge.port) for edge in inputs):
            return None
        for node_id in self._leading(vertex.chain)[:_MOST_FILTERS]:
            filtering = self.plan.graph.nodes[node_id]
            lowering = self.plan.lowering(filtering)
            if not isinstance(filtering, g.FilterNode) or lowering is None or lowering.inlined is None:
                break
            asked = kept_rows(filtering.function, records)
            if asked is None:
                break
            conditions.append(asked)
        return all_kept(conditions) if conditions else None

    @staticmethod
    def _leading(chain: OperatorChain) -> list[int]:
        """Return the operators at the head of a chain that follow one another, until one has other readers as well."""
        read = Counter([link.parent for link in chain.links] + [leaving.link for leaving in chain.outputs])
        shared = next((number for number in range(len(chain.links)) if read[number] != 1), len(chain.links) - 1)
        return [link.node for link in chain.links[: shared + 1]]

    def cannot_sift(self, port: Port) -> bool:
        """Return whether rows of a stream have to reach a worker, as only that can say if their values fit."""
        records = self.plan.layout(port).records
        unchecked = any(not records.is_checked_by_columns(number) for number in range(len(records.names)))
        return self.is_unseen(port) and unchecked

    def keys_program(self, port: Port) -> Program:
        """Return a program of no operators, which adds the keys that functions compute to a stream."""
        layout = self.layout(port)
        taken = layout.without_keys
        if layout.fields is not None:
            taken = taken.with_fields(self._needed.before_keys(port))
        return keys_program(self.plan, self.name, layout, taken)

    @cached_property
    def vertices(self) -> tuple[Vertex, ...]:
        """The vertices, each behind those that it reads.

        An assigner that reads a field joins a chain of Python, but does not begin one.
        """
        graph = self.plan.graph
        in_python = [edge for edge in self._joined() if not {edge.source, edge.target} & self.in_sql.keys()]
        chains, alone = Chains(graph.edges, in_python), Chains(graph.edges, ())
        vertices: list[Vertex] = []
        depth_of: dict[int, int] = {}
        for number in sorted(self.nodes):
            if number in depth_of:
                continue
            reads = [edge for edge in graph.inputs(number) if edge.source in depth_of]
            depths = (depth_of[e.source] + (e.partitioning.kind is not ExchangeKind.FORWARD) for e in reads)
            node = graph.nodes[number]
            runs = Runs.CATALYST if number in self.in_sql else _runs(node)
            chain = (chains if runs is Runs.PYTHON else alone).of(number)
            vertex = Vertex(self._with_carried(chain), max(depths, default=0), runs)
            vertices.append(vertex)
            depth_of |= dict.fromkeys(vertex.members, vertex.depth)
        return tuple(vertices)

    def _joined(self) -> list[Edge]:
        """Return the edges between Python operators of one task that follow each other one-to-one."""
        graph, task_of = self.plan.graph, self.plan.task_of
        inputs = Counter(edge.target for edge in graph.edges)
        return [
            edge
            for edge in graph.edges
            if edge.target in self.nodes
            and inputs[edge.target] == 1
            and edge.partitioning.kind is ExchangeKind.FORWARD
            and graph.nodes[edge.target].step is not None
            and task_of[edge.source] == task_of[edge.target]
        ]

    def _with_carried(self, chain: OperatorChain) -> OperatorChain:
        index = {link.node: number for number, link in enumerate(chain.links)}
        carried = [Leaving(index[port.node], port) for port in self.carried if port.node in index]
        return OperatorChain(chain.links, (*chain.outputs, *carried)) if carried else chain

    @cached_property
    def vertex_of(self) -> dict[int, Vertex]:
        """The vertex of each operator."""
        return {member: vertex for vertex in self.vertices for member in vertex.members}

    @cached_property
    def edges(self) -> dict[int, list[ExecutionEdge]]:
        """The edges that lead to each vertex, by its head."""
        graph = self.plan.graph
        edges: dict[int, list[ExecutionEdge]] = {}
        for vertex in self.vertices:
            broadcast = graph.broadcast_inputs(vertex.head)
            edges[vertex.head] = []
            for edge in graph.inputs(vertex.head):
                source, kind = self.vertex_of.get(edge.source), edge.partitioning.kind
                edges[vertex.head].append(ExecutionEdge(edge, vertex, source, edge.port, kind, edge in broadcast))
        return edges

    def program(self, vertex: Vertex, last_event_time: int | None = None) -> Program:
        """Return the program of a Python vertex."""
        outputs = [
            Output(leaving.link, self.layout(leaving.port), leaving.port.tag) for leaving in vertex.chain.outputs
        ]
        made = program(self.plan, self.name, vertex.chain.links, outputs, last_event_time=last_event_time)
        return replace(made, input=self.input_layout(vertex.head), in_subtasks=vertex.head in self.plan.subtasks)

    @cached_property
    def behind_python(self) -> frozenset[Vertex]:
        """The vertices that have functions called again where they are computed again."""
        found = set[Vertex]()
        for vertex in self.vertices:
            sources = [edge.source for edge in self.edges[vertex.head] if edge.source is not None]
            if any(source.runs is Runs.PYTHON or source in found for source in sources):
                found.add(vertex)
        return frozenset(found)

    def is_computed_again(self, vertex: Vertex) -> bool:
        """Return whether a vertex would run once for each of several readers, as lazy streams do.

        It does not where all its streams leave the graph and none is read in it, since those are computed together.
        """
        readers = [max(len(leaving.edges), 1) for leaving in vertex.chain.outputs]  # what is carried is read as well
        if sum(readers) < 2:
            return False
        targets = [edge.target for leaving in vertex.chain.outputs for edge in leaving.edges]
        if any(target in self.vertex_of and self.vertex_of[target].runs is not Runs.END for target in targets):
            return True
        written = {e.port for s in self.sinks for e in self.plan.graph.inputs(s)}
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
    """Return how many subtasks an exchange chooses from."""
    node = plan.graph.nodes[edge.target]
    return plan.subtasks.get(node.id) or chosen_from(plan.graph, edge, node, plan.execution.parallelism)


def channel_selector(plan: Plan, edge: Edge, count: int, place: str = "") -> ChannelSelector | None:
    """Which of `count` channels of the operator behind an edge get a record; None where it stays in its subtask.

    An error says `place`, if it is given, for the operator.
    """
    kind, key, node = edge.partitioning.kind, edge.partitioning.key, plan.graph.nodes[edge.target]
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
    """Return the route of an edge to `target`, in the columns that are `wanted` there."""
    emitted = plan.layout(edge.port)
    columns = aligned_columns(emitted, wanted)
    computed = None if edge.partitioning.key is None else edge.partitioning.key.computed
    key = None
    if computed is not None and (wanted.keys or selector is not None):
        columns.append(key_column(emitted.keys.index(computed)))
        key = None if wanted.keys else pa.field(key_column(0), computed.arrow)
    return Route(target, wanted.schema, tuple(columns), selector, key, everywhere)


def aligned_columns(layout: StreamLayout, wanted: StreamLayout) -> list[str | None]:
    """Return a stream's columns, without keys, in the order in which an operator that unites several has them."""
    columns: list[str | None] = list(layout.records.names)
    if wanted.timestamped:
        columns.append(TIMESTAMP if layout.timestamped else None)
    return columns
