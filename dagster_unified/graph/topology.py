"""The line of stages of one query of STREAMING.

    sources → pass 0 → level 1 → pass 1 → level 2 → … → the sinks' part, once per epoch

A *level* is one stateful Spark operator, for all keyed operators of one depth. A *pass* runs the chains between two
levels. Native operators, and exchanges that choose a record's subtask, stand behind the pass that leads to them, each
with a pass of its own. What comes after the last keyed operator of its path is the *tail*: it runs on each epoch's
output as a BATCH region does. Assigners that another query depends on stay upstream of the tail. Knows the
graph and the operators, not Spark.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from dagster_unified.errors import PipelineError
from dagster_unified.graph import nodes as g
from dagster_unified.graph.event_time import nearest_assigners
from dagster_unified.graph.execution_graph import (
    Chains,
    ExecutionGraph,
    Link,
    OperatorChain,
    channel_selector,
    channels,
    keyed_input,
    program,
    route,
)
from dagster_unified.graph.nodes import Edge, ExchangeKind, Port
from dagster_unified.graph.operator_state import CHOOSING
from dagster_unified.graph.plan import Plan
from dagster_unified.operators.layout import StreamLayout
from dagster_unified.operators.program.step import Output
from dagster_unified.operators.routing import (
    ByKey,
    ChannelSelector,
    Rebalance,
    Route,
    RoutedProgram,
)

TAIL = "sinks"
"""How errors name the operators behind the last one with state."""


@dataclass(frozen=True)
class Head:
    """A source: the native operators directly behind it, and the program of everything after them."""

    source: int
    native: tuple[int, ...]
    routed: RoutedProgram


@dataclass(frozen=True)
class Native:
    """Native operators between levels: Catalyst runs them on one lane's rows as columns, and a program goes on."""

    lane: int
    nodes: tuple[int, ...]
    routed: RoutedProgram


@dataclass(frozen=True)
class Exchanged:
    """Exchanges between levels: the rows of each lane and subtask come into one task, and a program goes on."""

    programs: Mapping[int, RoutedProgram]

    subtasks: int
    """How many the exchange with the most chooses from."""


@dataclass(frozen=True)
class Topology:
    """One query's line of stages, everything by lane."""

    heads: tuple[Head, ...]
    levels: tuple[Mapping[int, RoutedProgram], ...]
    passes: tuple[Mapping[int, RoutedProgram], ...]
    """The pass after each level."""

    between: tuple[tuple[Native | Exchanged, ...], ...]
    """What runs after the heads, and after each pass, in this order."""

    tail: ExecutionGraph
    tail_lanes: Mapping[Port, int]
    timed: Mapping[int, str]
    """The lanes of operators that wait for control events, and their uids."""

    iterations: Mapping[int, str]
    """The lanes of iterations, which wait for the end of their input, and their uids."""

    looks: bool
    """Whether an operator without a key looks at the control events."""

    @property
    def awaits_events(self) -> bool:
        """Whether there are control events."""
        return bool(self.timed or self.iterations or self.looks)


class Lanes:
    """Numbers of lanes. A name keeps its number for ever, since state is found by it."""

    def __init__(self, known: Mapping[str, int] | None = None) -> None:
        self.numbers = dict(known or {})

    def of(self, name: str) -> int:
        """The lane of an operator (by uid) or of a stream (by uid and purpose)."""
        return self.numbers.setdefault(name, max(self.numbers.values(), default=-1) + 1)


def malformed_lane(source: str) -> str:
    """The name of the lane that the malformed rows of a source, given by its uid, go on."""
    return f"{source} malformed"


def topology(plan: Plan, sinks: tuple[int, ...], lanes: Lanes) -> Topology:
    """The stages that lead to some of the plan's ends."""
    return _Builder(plan, sinks, lanes).build()


class _Builder:
    def __init__(self, plan: Plan, sinks: tuple[int, ...], lanes: Lanes) -> None:
        self.plan, self.graph, self.sinks, self.lanes = plan, plan.graph, sinks, lanes
        self.nodes = plan.graph.nodes
        self.members = sorted(plan.graph.upstream(*sinks))
        self.inputs: dict[int, list[Edge]] = {n: [] for n in self.members}
        self.outputs: dict[int, list[Edge]] = {n: [] for n in self.members}
        for edge in plan.graph.edges:
            if edge.target in self.inputs:
                self.inputs[edge.target].append(edge)
                self.outputs[edge.source].append(edge)
        self.keyed = [n for n in self.members if self.nodes[n].runs_by_key]
        self.level_of = self._levels()
        watching = [n for n in self.members if self.nodes[n].is_told_watermark and n not in self.keyed]
        is_end = {n.id for n in plan.graph.ends}
        self.looking = {n for n in watching if n not in is_end and not self._is_after_loop(n)}
        """The operators without a key that look at the watermark, which differs before and behind a control event."""

        self.body = self._body()
        self.tail = [n for n in self.members if n not in self.body and n not in self.keyed]
        self.tail_lanes: dict[Port, int] = {}
        self.depth_of = self._depths()
        self.pending: list[int] = []
        """Native operators that a program leads to."""

        self.exchanged: set[int] = set()
        """Operators to which an exchange sends what comes out of a program."""

        edges = [edge for edges in self.outputs.values() for edge in edges]
        self.chains = Chains(edges, [edge for edge in edges if self.joins(edge)])

    def build(self) -> Topology:
        heads = tuple(map(self._head, self._sources()))
        levels: list[dict[int, RoutedProgram]] = []
        passes: list[dict[int, RoutedProgram]] = []
        between = [self._between(0)]
        for level in range(1, max(map(self.level_of.__getitem__, self.keyed), default=0) + 1):
            mine = [n for n in self.keyed if self.level_of[n] == level]
            levels.append({self._lane(n): self._keyed(n) for n in mine})
            passes.append({lane: routed for n in mine for lane, routed in self._after(n)})
            between.append(self._between(level))
        uids = {self._lane(n): self.nodes[n].uid for n in self.keyed if self.nodes[n].is_told_watermark}
        tail = ExecutionGraph(self.plan, TAIL, tuple(self.tail), sinks=self.sinks)
        iterations = {self._lane(n): self.nodes[n].uid for n in self.tail if isinstance(self.nodes[n], g.IterationNode)}
        return Topology(
            heads,
            tuple(levels),
            tuple(passes),
            tuple(between),
            tail,
            self.tail_lanes,
            uids,
            iterations,
            looks=bool(self.looking),
        )

    def _sources(self) -> list[g.Node]:
        """The sources, in the order in which the first code of the deployment had them.

        Spark finds in its checkpoint what was read of each by its place in the query.
        """
        sources = [node for node in self.graph.sources if node.id in self.members]
        return sorted(sources, key=lambda node: self.lanes.of(malformed_lane(node.uid)))

    def _body(self) -> set[int]:
        """The operators, other than keyed ones, that do not belong to the tail.

        They are the sources, what lies between a source or a keyed operator and a keyed operator, an assigner whose
        event time another query reads or an operator that looks at the watermark, and what stays with one of these in a
        subtask that an exchange chose.
        """
        sources = {node.id for node in self.graph.sources if node.id in self.members}
        timed = self._timed()
        shown = timed | self.looking
        body = sources | self._before(set(self.keyed)) | shown | self._before(shown)
        while True:
            together = {e.target for n in [*body, *self.keyed] for e in self.outputs[n] if self._stays(e)}
            together = {n for n in together if n not in body and n not in self.keyed and not self._is_after_loop(n)}
            if not together:
                return body
            body |= together | self._before(together)

    def _timed(self) -> set[int]:
        """The assigners whose event time another query reads: the tail reports none while a job runs."""
        query_outputs = [n for n in self.sinks if isinstance(self.nodes[n], g.QueryOutputNode)]
        nearest = nearest_assigners(self.graph, [edge for n in query_outputs for edge in self.inputs[n]])
        return {node.id for node in nearest if not self._is_after_loop(node.id)}

    def _is_after_loop(self, node: int) -> bool:
        """Whether an iteration, which is in the tail, comes before a node, or is one."""
        return any(isinstance(self.nodes[n], g.IterationNode) for n in self.plan.graph.upstream(node))

    def _before(self, nodes: set[int]) -> set[int]:
        """What is upstream of some nodes, without the keyed operators."""
        return self.plan.graph.upstream(*nodes) - nodes - set(self.keyed)

    def _levels(self) -> dict[int, int]:
        """How many keyed operators there are on the way to each node, itself included."""
        levels: dict[int, int] = {}
        for node in self.members:
            before = max((levels[e.source] for e in self.inputs[node]), default=0)
            levels[node] = before + (node in self.keyed)
        return levels

    def _depths(self) -> dict[int, int]:
        """How many exchanges there are between the last level and each node, its own included."""
        depths: dict[int, int] = {}
        for node in self.members:
            edges = self.inputs[node]
            before = [depths[e.source] for e in edges if self.level_of[e.source] == self.level_of[node]]
            depths[node] = max(before, default=0) + any(self.exchanges(e) for e in edges)
        return depths

    # Exchanges that choose a record's subtask

    def exchanges(self, edge: Edge) -> bool:
        """Whether what comes over an edge goes to subtasks with a pass of their own; a keyed operator has its level."""
        if edge.target not in self.body:
            return False
        if edge.target not in self.plan.subtasks:
            return edge.partitioning.kind is ExchangeKind.BROADCAST
        return edge.partitioning.kind in CHOOSING or len(self.graph.main_inputs(edge.target)) > 1

    def _stays(self, edge: Edge) -> bool:
        """Whether records stay in the subtask that an exchange chose for them."""
        return edge.partitioning.kind is ExchangeKind.FORWARD and {edge.source, edge.target} <= set(self.plan.subtasks)

    def _selector(self, edge: Edge) -> ChannelSelector | None:
        """The subtask of what comes over an edge; None where it stays in its own."""
        count = channels(self.plan, edge)
        return channel_selector(self.plan, edge, count) or (None if self._stays(edge) else Rebalance(count))

    def _check_key_groups(self, node: g.Node) -> None:
        """Raises where a subtask has no key group, in which its copy of the broadcast state would be."""
        if node.holds_subtask_state:
            self.plan.subtasks_with_state(node)
        count, groups = self.plan.subtasks[node.id], self.plan.execution.streaming.max_parallelism
        if count > groups:
            raise PipelineError(
                f"{self.plan.name}: operator '{node.name}' has {count} subtasks, and broadcast state for {groups};"
                f" launch with pipeline.max-parallelism={count} or more, or set a smaller parallelism"
            )

    def _lane(self, node: int) -> int:
        return self.lanes.of(self.nodes[node].uid)

    def tail_lane(self, port: Port) -> int:
        if port not in self.tail_lanes:
            self.tail_lanes[port] = self.lanes.of(f"{self.nodes[port.node].uid} {port.tag or ''} to the sinks")
        return self.tail_lanes[port]

    # What runs

    def _head(self, node: g.Node) -> Head:
        native = self._followed_natively(node.id)
        return Head(node.id, tuple(native), self._onward(Port([node.id, *native][-1])))

    def _followed_natively(self, current: int) -> list[int]:
        """The native operators that alone follow a node, one after another."""
        natives: list[int] = []
        while True:
            edges = self.outputs[current]
            following = self.nodes[edges[0].target] if len(edges) == 1 else None
            if (
                following is None
                or following.id not in self.body
                or not following.native
                or len(self.inputs[following.id]) > 1
                or self.exchanges(edges[0])
            ):
                return natives
            natives.append(following.id)
            current = following.id

    def _between(self, level: int) -> tuple[Native | Exchanged, ...]:
        """The native operators that are pending, those that they lead to, and the exchanges behind a level.

        All that leads to an exchange runs before it, so that a subtask has one instance of an operator.
        """
        stages: list[Native | Exchanged] = []
        while True:
            stages += self._natives()
            ready = [n for n in self.exchanged if self.level_of[n] == level]
            if not ready:
                return tuple(stages)
            depth = min(self.depth_of[n] for n in ready)
            nodes = sorted(n for n in ready if self.depth_of[n] == depth)
            self.exchanged -= set(nodes)
            subtasks = max(channels(self.plan, edge) for n in nodes for edge in self.graph.main_inputs(n))
            stages.append(Exchanged({self._subtasks_lane(n): self._in_subtasks(n) for n in nodes}, subtasks))

    def _natives(self) -> list[Native]:
        natives: list[Native] = []
        while self.pending:
            wanted, self.pending = list(dict.fromkeys(self.pending)), []
            for node in wanted:
                nodes = [node, *self._followed_natively(node)]
                natives.append(Native(self._native_lane(node), tuple(nodes), self._onward(Port(nodes[-1]))))
        return natives

    def _native_lane(self, node: int) -> int:
        return self.lanes.of(f"{self.nodes[node].uid} natively")

    def _subtasks_lane(self, node: int) -> int:
        return self.lanes.of(f"{self.nodes[node].uid} in subtasks")

    def _keyed(self, node_id: int) -> RoutedProgram:
        """A keyed operator alone: what it emits goes to the pass after it, or straight to the tail."""
        node = self.nodes[node_id]
        outputs: list[Output] = []
        routes: list[tuple[Route]] = []
        for port in self.ports(node_id):
            layout = self.plan.layout(port)
            if self._has_pass(port):
                routes.append((_all(self._pass_lane(port), layout.without_keys),))
                outputs.append(Output(0, layout.without_keys, port.tag))
            if any(edge.target in self.tail for edge in self.edges_of(port)):
                routes.append((_all(self.tail_lane(port), layout),))
                outputs.append(Output(0, layout, port.tag))
        alone = program(self.plan, node.name, (Link(node_id),), outputs)
        return RoutedProgram(alone, tuple(routes), node_id in self.plan.subtasks)

    def _after(self, node_id: int) -> list[tuple[int, RoutedProgram]]:
        ports = filter(self._has_pass, self.ports(node_id))
        return [(self._pass_lane(port), self._onward(port)) for port in ports]

    def _has_pass(self, port: Port) -> bool:
        """Whether a pass takes what a keyed operator emits; what goes to the tail does without."""
        return any(edge.target in self.body or edge.target in self.keyed for edge in self.edges_of(port))

    def ports(self, node_id: int) -> list[Port]:
        return list(dict.fromkeys(edge.port for edge in self.outputs[node_id]))

    def edges_of(self, port: Port) -> list[Edge]:
        return [edge for edge in self.outputs[port.node] if edge.side_output == port.tag]

    def _pass_lane(self, port: Port) -> int:
        return self.lanes.of(f"{self.nodes[port.node].uid} {port.tag or ''} onward")

    def joins(self, edge: Edge) -> bool:
        """All that needs no state, no Catalyst and no exchange runs where its records are: a union with each input."""
        return edge.target in self.body and not self.nodes[edge.target].native and not self.exchanges(edge)

    def _onward(self, port: Port) -> RoutedProgram:
        """Everything from a stream to the next keyed operators, native operators and exchanges, and to the tail."""
        name, in_subtasks = self.nodes[port.node].name, port.node in self.plan.subtasks
        return self._routed(name, self.plan.layout(port).without_keys, self.chains.behind(port), in_subtasks)

    def _in_subtasks(self, node_id: int) -> RoutedProgram:
        """Everything from what an exchange brings to an operator, itself included."""
        node, layout = self.nodes[node_id], self.plan.input_layout(node_id)
        if not node.native:
            return self._routed(node.name, layout, self.chains.of(node_id), True)
        self.pending.append(node_id)
        bare = program(self.plan, node.name, (), (Output(-1, layout),), layout)
        return RoutedProgram(bare, ((_all(self._native_lane(node_id), layout),),), True)

    def _routed(self, name: str, layout: StreamLayout, chain: OperatorChain, in_subtasks: bool) -> RoutedProgram:
        outputs: list[Output] = []
        routes: list[tuple[Route, ...]] = []
        for link, port, edges in chain.outputs:
            onward = [self.route(edge) for edge in edges if edge.target not in self.tail]
            if len(onward) < len(edges) and port.node not in self.keyed:
                onward.append(_all(self.tail_lane(port), self.plan.layout(port)))
            if onward:
                outputs.append(Output(link, self.plan.layout(port), port.tag if link >= 0 else None))
                routes.append(tuple(onward))
        return RoutedProgram(program(self.plan, name, chain.links, outputs, layout), tuple(routes), in_subtasks)

    def route(self, edge: Edge) -> Route:
        """From a stream to the lane of the operator behind an edge, in the columns of that operator's input."""
        node = self.nodes[edge.target]
        if edge in self.graph.broadcast_inputs(node.id):
            copied = self.plan.broadcast_layout(node.id)
            return route(self.plan, edge, self._lane(node.id), copied, everywhere=True)
        wanted = self.plan.input_layout(node.id)
        if node.id in self.keyed and node.id not in self.plan.subtasks:
            return route(self.plan, edge, self._lane(node.id), wanted, self._key_group(node, wanted))
        if node.id in self.keyed:
            self._check_key_groups(node)
            return route(self.plan, edge, self._lane(node.id), wanted, self._selector(edge))
        if self.exchanges(edge):
            self.exchanged.add(node.id)
            return route(self.plan, edge, self._subtasks_lane(node.id), wanted, self._selector(edge))
        self.pending.append(node.id)
        return route(self.plan, edge, self._native_lane(node.id), wanted)

    def _key_group(self, node: g.Node, layout: StreamLayout) -> ChannelSelector:
        """The key group of what reaches an operator with state; any of them where it has no key."""
        keyed = keyed_input(node, layout.records)
        groups = self.plan.subtasks_with_state(node) or self.plan.execution.streaming.max_parallelism
        if not keyed.columns:
            return Rebalance(groups)
        return ByKey(keyed, layout, f"{self.plan.name}: operator '{node.name}'", groups)


def _all(lane: int, layout: StreamLayout) -> Route:
    return Route(lane, layout.schema, tuple(layout.schema.names))
