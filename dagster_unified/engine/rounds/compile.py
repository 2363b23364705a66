"""From the body of an iteration to the loop that workers run.

Knows the graph and the operators; not Spark, so that the harness uses it with no JVM.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pyarrow as pa

from dagster_unified.engine.dataframe.fragment import Fragment
from dagster_unified.engine.passes import Pass, find_passes, keys_program
from dagster_unified.engine.translate import broadcast_layout, input_layout, keyed_by, program
from dagster_unified.graph import nodes as g
from dagster_unified.graph.chaining import tasks
from dagster_unified.graph.iterations import body_on
from dagster_unified.graph.nodes import Edge, ExchangeKind, Key
from dagster_unified.graph.plan import Plan, Port
from dagster_unified.operators.functions.iterations import hears_of_epochs
from dagster_unified.operators.layout import TIMESTAMP, StreamLayout, key_column
from dagster_unified.operators.operator import KeyedOptions
from dagster_unified.operators.program.spec import Output, Program
from dagster_unified.operators.rounds.spec import (
    GROUPS_PER_SUBTASK,
    BodyPass,
    Driver,
    InputBuffer,
    InputRoute,
    Level,
    Loop,
    OutputRoutes,
)
from dagster_unified.operators.routing import ByKey, ByPartitioner, ChannelSelector, Rebalance, Route


def body_plan(plan: Plan, node: g.IterationNode, parallelism: int) -> Plan:
    """The body of an iteration, with so many subtasks, as a plan of its own."""
    body = body_on(node, parallelism)
    return Plan(body, plan.execution, tasks(body, enabled=True), (), (), ())


def compiled(plan: Plan, node: g.IterationNode, parallelism: int, groups: Sequence[int] = ()) -> Loop:
    """The loop of an iteration with so many subtasks; `groups` are the key groups of each pass that has state."""
    return _Compiler(plan, node, parallelism, groups).loop()


class _Compiler:
    def __init__(self, plan: Plan, node: g.IterationNode, parallelism: int, groups: Sequence[int]) -> None:
        self.node, self.parallelism, self.plan = node, parallelism, body_plan(plan, node, parallelism)
        body = self.body = self.plan.graph
        self.where = f"{plan.name}: iteration '{node.name}'"
        inner = tuple(n.id for n in body.nodes if not isinstance(n, (g.HeadNode, g.TailNode)))
        self.passes = sorted(find_passes(self.plan, Fragment(node.name, inner)), key=lambda one: one.members[0])
        self.passes += [Pass((tail,), (Port(tail),)) for tail in self._handed_on()]
        self.pass_of = {member: one for one in self.passes for member in one.members}
        self.buffers: dict[tuple[int, bool], InputBuffer] = {}
        """By a node, and whether it is for broadcast records, or for those that a body hands straight on."""

        self.groups = dict(enumerate(groups))
        self.levels = self._levels()

    def loop(self) -> Loop:
        heads = sorted((n for n in self.body.nodes if isinstance(n, g.HeadNode)), key=lambda head: head.number)
        number = {one: index for index, one in enumerate(self.passes)}
        levels = [
            Level(tuple(self._compiled(number[one], one) for one in self.passes if self.levels[one] == level))
            for level in range(max(self.levels.values(), default=-1) + 1)
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

    def _handed_on(self) -> list[int]:
        """The streams that the body returns and that have records of an input as they are: a pass hands them on."""
        heads = {node.id for node in self.body.nodes if isinstance(node, g.HeadNode)}
        tails = {node.id for node in self.body.nodes if isinstance(node, g.TailNode)}
        return sorted({edge.target for edge in self.body.edges if edge.source in heads and edge.target in tails})

    def _levels(self) -> dict[Pass, int]:
        """A pass is in the level after those that an exchange separates it from."""
        found: dict[Pass, int] = {}
        for one in self.passes:
            level = 0
            for edge in self.body.inputs(one.members[0]):
                before = self.pass_of.get(edge.source)
                if before is not None:
                    level = max(level, found[before] + (edge.partitioning.kind is not ExchangeKind.FORWARD))
            found[one] = level
        return found

    def _compiled(self, number: int, one: Pass) -> BodyPass:
        head = self.body.node(one.members[0])
        if isinstance(head, g.TailNode):
            layout = input_layout(self.plan, head.id)
            bare = Program(self.plan.name, head.name, layout, (), (Output(-1, layout),))
            output = self._output(layout, self.body.inputs(head.id)[:1])
            return BodyPass(number, bare, Driver.PLAIN, head.parallelism or 1, self._buffer(head.id, True), (output,))
        bounded = head.id in self.node.per_round
        options = self.plan.execution
        ship = replace(
            program(self.plan, self.node.name, one.members, one.outputs),
            options=KeyedOptions(
                incremental_updates=not bounded,
                processing_time=options.processing_time,
                processing_time_at_end=options.processing_time_at_end,
                end_of_input_chain=options.end_of_input_chain,
                expiry=self.node.takes_input_in_all_rounds and options.mode == "STREAMING",
            ),
        )
        subtasks = head.parallelism or self.parallelism
        keyed = head.key is not None
        groups = self._groups(head) if keyed else 0
        functions = [self.body.node(member).user_function for member in one.members[keyed and groups != subtasks :]]
        grouped = Driver.BOUNDED if bounded else Driver.GROUPED
        return BodyPass(
            number=number,
            program=ship,
            driver=grouped if keyed else Driver.PLAIN,
            subtasks=subtasks,
            own=self._buffer(head.id),
            outputs=tuple(self._output_of(port) for port in one.outputs),
            broadcast=self._buffer(head.id, True) if head.has_broadcast_input else None,
            groups=groups,
            listens=any(map(hears_of_epochs, functions)),
        )

    def _groups(self, head: g.Node) -> int:
        """How many key groups an operator with state has: of its subtasks each is one, where it has no keys."""
        subtasks = head.parallelism or self.parallelism
        if head.key == Key():
            return subtasks
        number = self.passes.index(self.pass_of[head.id])
        return self.groups.get(number) or subtasks * GROUPS_PER_SUBTASK

    def _buffer(self, node: int, other: bool = False) -> InputBuffer:
        """Where records wait for a node; with `other` its broadcast records, or those that a body hands straight on."""
        if (node, other) not in self.buffers:
            reader = self.body.node(node)
            broadcast = other and reader.has_broadcast_input
            layout = broadcast_layout(self.plan, node) if broadcast else input_layout(self.plan, node)
            self.buffers[node, other] = InputBuffer(len(self.buffers), layout.schema, reader.uid, broadcast)
        return self.buffers[node, other]

    # Where records go

    def _output_of(self, port: Port) -> OutputRoutes:
        edges = [edge for edge in self.body.outputs(port.node) if edge.side_output == port.tag]
        inside = self.pass_of[port.node].members
        return self._output(self.plan.layout(port), [edge for edge in edges if edge.target not in inside])

    def _output(self, layout: StreamLayout, edges: list[Edge]) -> OutputRoutes:
        routes, feedback, criteria = [], [], False
        for edge in edges:
            tail = self.body.node(edge.target)
            if not isinstance(tail, g.TailNode):
                routes.append(self._route(layout, edge))
            elif tail.role is g.Role.OUTPUT:
                routes.append(self._to(self._buffer(tail.id), layout, input_layout(self.plan, tail.id)))
            elif tail.role is g.Role.FEEDBACK:
                head = next(n for n in self.body.nodes if isinstance(n, g.HeadNode) and n.number == tail.number)
                feedback.append(self._input(head, layout))
            else:
                criteria = True
        return OutputRoutes(tuple(routes), tuple(feedback), criteria)

    def _input(self, head: g.HeadNode, given: StreamLayout | None = None) -> InputRoute:
        """How the records of an input come into the body, from outside or fed back."""
        own = self.plan.layout(Port(head.id))
        bare = head.layout
        edges = self.body.outputs(head.id)
        routes = tuple(self._route(own, edge, outside=given is None) for edge in edges)
        keys = keys_program(self.plan, self.node.name, own) if own.keys else None
        return InputRoute(_columns(given or bare, bare), bare.schema, keys, routes)

    def _route(self, layout: StreamLayout, edge: Edge, outside: bool = False) -> Route:
        """The route of an edge; from `outside` records come in no subtask, and are spread over all of them."""
        target = self.body.node(edge.target)
        if isinstance(target, g.TailNode):  # handed straight on
            spread = Rebalance(target.parallelism or self.parallelism) if outside else None
            return self._to(self._buffer(target.id, True), layout, input_layout(self.plan, target.id), spread)
        everywhere = edge.partitioning.kind is ExchangeKind.BROADCAST
        apart = everywhere and target.has_broadcast_input
        wanted = broadcast_layout(self.plan, target.id) if apart else input_layout(self.plan, target.id)
        computed = None if edge.partitioning.key is None else edge.partitioning.key.computed
        column = None if computed is None else key_column(layout.keys.index(computed))
        route = self._to(
            self._buffer(target.id, apart), layout, wanted, self._selector(edge, target, wanted, outside), column
        )
        if computed is not None and not wanted.keys:
            key = pa.field(key_column(0), computed.arrow)
            return replace(route, columns=(*route.columns, column), key=key)
        return replace(route, everywhere=everywhere)

    def _to(
        self,
        buffer: InputBuffer,
        layout: StreamLayout,
        wanted: StreamLayout,
        selector: ChannelSelector | None = None,
        key: str | None = None,
    ) -> Route:
        return Route(buffer.number, buffer.schema, _columns(layout, wanted, key), selector)

    def _selector(self, edge: Edge, target: g.Node, layout: StreamLayout, outside: bool) -> ChannelSelector | None:
        kind, key, where = edge.partitioning.kind, edge.partitioning.key, f"{self.where}, before '{target.name}'"
        subtasks = target.parallelism or self.parallelism
        if kind is ExchangeKind.BROADCAST:
            return None
        if kind is ExchangeKind.FORWARD:
            return Rebalance(subtasks) if outside else None
        if kind is ExchangeKind.GLOBAL:
            return Rebalance(1)
        if kind is ExchangeKind.HASH:
            assert key is not None
            count = self._groups(target) if target.key is not None else subtasks
            return ByKey(keyed_by(key, layout.records), layout, where, count)
        if kind is ExchangeKind.CUSTOM:
            assert key is not None
            return ByPartitioner(edge.partitioning.partitioner, keyed_by(key, layout.records), subtasks, where)
        return Rebalance(subtasks)


def _columns(given: StreamLayout, wanted: StreamLayout, key: str | None = None) -> tuple[str | None, ...]:
    """The columns of a stream as another layout has them; its computed key, where it has one, is `key`."""
    names: list[str | None] = list(wanted.records.names)
    if wanted.timestamped:
        names.append(TIMESTAMP if given.timestamped else None)
    return (*names, *([key] if wanted.keys else []))
