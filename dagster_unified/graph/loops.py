"""The body of an iteration as a loop: the passes of its execution graph, and where their records go."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from dagster_unified.graph import nodes as g
from dagster_unified.graph.execution_graph import (
    ExecutionGraph,
    Runs,
    Vertex,
    aligned_columns,
    channel_selector,
    keys_program,
    program,
    route,
)
from dagster_unified.graph.iterations import body_on
from dagster_unified.graph.nodes import Edge, ExchangeKind, Key, Port
from dagster_unified.graph.plan import Plan
from dagster_unified.graph.regions import tasks
from dagster_unified.operators.functions.iterations import hears_of_epochs
from dagster_unified.operators.iteration import (
    GROUPS_PER_SUBTASK,
    BodyPass,
    Driver,
    InputBuffer,
    InputRoute,
    Level,
    Loop,
    OutputRoutes,
)
from dagster_unified.operators.layout import StreamLayout
from dagster_unified.operators.operator import KeyedOptions
from dagster_unified.operators.program.step import Output
from dagster_unified.operators.routing import ChannelSelector, Rebalance, Route


def body_plan(plan: Plan, node: g.IterationNode, parallelism: int) -> Plan:
    """Return the body of an iteration, with so many subtasks, as a plan of its own."""
    body = body_on(node, parallelism)
    return Plan(body, plan.execution, tasks(body, enabled=True))


def compile_loop(plan: Plan, node: g.IterationNode, parallelism: int, groups: Sequence[int] = ()) -> Loop:
    """Return the loop of an iteration with so many subtasks; `groups` are those of each pass that has state."""
    return _Compiler(plan, node, parallelism, groups).loop()


class _Compiler:
    def __init__(self, plan: Plan, node: g.IterationNode, parallelism: int, groups: Sequence[int]) -> None:
        self.node, self.parallelism, self.plan = node, parallelism, body_plan(plan, node, parallelism)
        body = self.body = self.plan.graph
        self.where = f"{plan.name}: iteration '{node.name}'"
        heads = {n.id for n in body.nodes if isinstance(n, g.HeadNode)}
        tails = {n.id for n in body.nodes if isinstance(n, g.TailNode)}
        handed_on = {e.target for e in body.edges if e.source in heads and e.target in tails}
        """The streams that the body returns and that have records of an input as they are: a pass hands them on."""
        inner = tuple(n.id for n in body.nodes if n.id in handed_on or n.id not in heads | tails)
        self.graph = ExecutionGraph(self.plan, node.name, inner)
        self.passes = sorted(self.graph.vertices, key=lambda vertex: (vertex.runs is Runs.END, vertex.head))
        self.buffers: dict[tuple[int, bool], InputBuffer] = {}
        """By a node, and whether it is for broadcast records, or for those that a body hands straight on."""

        self.groups = dict(enumerate(groups))

    def loop(self) -> Loop:
        heads = sorted((n for n in self.body.nodes if isinstance(n, g.HeadNode)), key=lambda head: head.number)
        number = {vertex: index for index, vertex in enumerate(self.passes)}
        levels = [
            Level(tuple(self._compiled(number[vertex], vertex) for vertex in self.passes if vertex.depth == depth))
            for depth in range(max((vertex.depth for vertex in self.passes), default=-1) + 1)
        ]
        inputs = tuple(self._input(head) for head in heads)
        outputs = tuple(self._buffer(tail.id) for tail in self.node.outputs)
        return Loop(
            where=self.where,
            levels=tuple(levels),
            buffers=tuple(self.buffers.values()),
            inputs=inputs,
            replayed=frozenset(head.number for head in heads if head.replayed),
            outputs=outputs,
            has_criteria=self.node.has_criteria,
            parallelism=self.parallelism,
            staleness=self.node.staleness,
        )

    # Passes

    def _compiled(self, number: int, vertex: Vertex) -> BodyPass:
        head = self.body.node(vertex.head)
        if isinstance(head, g.TailNode):
            layout = self.plan.input_layout(head.id)
            bare = program(self.plan, head.name, (), (Output(-1, layout),), layout)
            output = self._output(layout, self.body.inputs(head.id)[:1])
            return BodyPass(number, bare, Driver.PLAIN, head.parallelism or 1, self._buffer(head.id, True), (output,))
        bounded = head.id in self.node.per_round
        options = self.plan.execution
        ship = replace(
            self.graph.program(vertex),
            options=KeyedOptions(
                incremental_updates=not bounded,
                processing_time=options.processing_time,
                processing_time_at_end=options.processing_time_at_end,
                end_of_input_chain=options.end_of_input_chain,
                expiry=self.node.is_unbounded and options.mode == "STREAMING",
            ),
        )
        subtasks = head.parallelism or self.parallelism
        keyed = head.key is not None
        groups = self._groups(head) if keyed else 0
        functions = [self.body.node(member).user_function for member in vertex.members[keyed and groups != subtasks :]]
        grouped = Driver.BOUNDED if bounded else Driver.GROUPED
        return BodyPass(
            number=number,
            program=ship,
            driver=grouped if keyed else Driver.PLAIN,
            subtasks=subtasks,
            main=self._buffer(head.id),
            outputs=tuple(
                self._output(self.plan.layout(leaving.port), leaving.edges) for leaving in vertex.chain.outputs
            ),
            broadcast=self._buffer(head.id, True) if head.has_broadcast_input else None,
            groups=groups,
            listens=any(map(hears_of_epochs, functions)),
        )

    def _groups(self, head: g.Node) -> int:
        """Return how many key groups an operator with state has: without keys, one for each of its subtasks."""
        subtasks = head.parallelism or self.parallelism
        if head.key == Key():
            return subtasks
        number = self.passes.index(self.graph.vertex_of[head.id])
        return self.groups.get(number) or subtasks * GROUPS_PER_SUBTASK

    def _buffer(self, node: int, other: bool = False) -> InputBuffer:
        """Return the buffer where records wait for a node.

        With `other` it is that of its broadcast records, or of those that a body hands straight on.
        """
        if (node, other) not in self.buffers:
            reader = self.body.node(node)
            broadcast = other and reader.has_broadcast_input
            layout = self.plan.broadcast_layout(node) if broadcast else self.plan.input_layout(node)
            self.buffers[node, other] = InputBuffer(len(self.buffers), layout.schema, reader.uid, broadcast)
        return self.buffers[node, other]

    # Where records go

    def _output(self, layout: StreamLayout, edges: Sequence[Edge]) -> OutputRoutes:
        routes, feedback, criteria = [], [], False
        for edge in edges:
            tail = self.body.node(edge.target)
            if not isinstance(tail, g.TailNode):
                routes.append(self._route(layout, edge))
            elif tail.role is g.Role.OUTPUT:
                routes.append(self._to_end(self._buffer(tail.id), layout))
            elif tail.role is g.Role.FEEDBACK:
                head = next(n for n in self.body.nodes if isinstance(n, g.HeadNode) and n.number == tail.number)
                feedback.append(self._input(head, layout))
            else:
                criteria = True
        return OutputRoutes(tuple(routes), tuple(feedback), criteria)

    def _input(self, head: g.HeadNode, fed_back: StreamLayout | None = None) -> InputRoute:
        """Return how the records of an input come into the body, from outside or fed back."""
        layout = self.plan.layout(Port(head.id))
        bare = head.layout
        edges = self.body.outputs(head.id)
        routes = tuple(self._route(layout, edge, outside=fed_back is None) for edge in edges)
        keys = keys_program(self.plan, self.node.name, layout) if layout.keys else None
        return InputRoute(tuple(aligned_columns(fed_back or bare, bare)), bare.schema, keys, routes)

    def _route(self, layout: StreamLayout, edge: Edge, outside: bool = False) -> Route:
        """Return the route of an edge; records from `outside` come in no subtask, and are spread over all of them."""
        target = self.body.node(edge.target)
        subtasks = target.parallelism or self.parallelism
        spread = Rebalance(subtasks) if outside else None
        if isinstance(target, g.TailNode):  # handed straight on
            return self._to_end(self._buffer(target.id, True), layout, spread)
        everywhere = edge.partitioning.kind is ExchangeKind.BROADCAST
        apart = everywhere and target.has_broadcast_input
        wanted = self.plan.broadcast_layout(target.id) if apart else self.plan.input_layout(target.id)
        by_key = edge.partitioning.kind is ExchangeKind.HASH and target.key is not None
        count = self._groups(target) if by_key else subtasks
        where = f"{self.where}, before '{target.name}'"
        selector = None if everywhere else channel_selector(self.plan, edge, count, where) or spread
        return route(self.plan, edge, self._buffer(target.id, apart).number, wanted, selector, everywhere)

    def _to_end(self, buffer: InputBuffer, layout: StreamLayout, spread: ChannelSelector | None = None) -> Route:
        """Return the route of a stream, unchanged, to where it leaves the body."""
        wanted = self.plan.input_layout(next(n.id for n in self.body.nodes if n.uid == buffer.reader))
        return Route(buffer.number, buffer.schema, tuple(aligned_columns(layout, wanted)), spread)
