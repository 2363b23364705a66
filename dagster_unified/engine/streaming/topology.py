"""From the plan to the queries of a STREAMING job, each a line of stages.

    sources → pass 0 → level 1 → pass 1 → level 2 → … → the sinks' part, once per epoch

A *level* is one stateful Spark operator, for all keyed operators of one depth. A *pass* runs the chains between two
levels. What comes after the last keyed operator of its path is the *tail*: it runs on each epoch's output as a BATCH
region does. Knows the graph and the operators, not Spark.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

from dagster_unified.engine.dataframe.fragment import Fragment
from dagster_unified.engine.translate import (
    broadcast_input,
    broadcast_layout,
    input_layout,
    keyed_input,
    keyed_options,
    step,
)
from dagster_unified.errors import UnsupportedError
from dagster_unified.graph import nodes as g
from dagster_unified.graph.nodes import Edge, ExchangeKind
from dagster_unified.graph.plan import Plan, Port
from dagster_unified.operators.lanes import Route, Track
from dagster_unified.operators.layout import TIMESTAMP, StreamLayout, key_column
from dagster_unified.operators.program.spec import Output, Program
from dagster_unified.operators.program.step import Step

MAIN = "main"
"""The query of everything but native aggregates."""

TAIL = "sinks"
"""How errors name the operators behind the last one with state."""


@dataclass(frozen=True)
class Head:
    """A source: the native operators directly behind it, and the track of everything after them."""

    source: int
    native: tuple[int, ...]
    track: Track


@dataclass(frozen=True)
class Native:
    """Native operators between levels: Catalyst runs them on one lane's rows as columns, and a track goes on."""

    lane: int
    nodes: tuple[int, ...]
    track: Track


@dataclass(frozen=True)
class Topology:
    """One query's line of stages, everything by lane."""

    heads: tuple[Head, ...]
    levels: tuple[Mapping[int, Track], ...]
    passes: tuple[Mapping[int, Track], ...]
    """The pass after each level."""

    natives: tuple[tuple[Native, ...], ...]
    """The native operators after the heads, and after each pass, in the order in which they run."""
    tail: Fragment
    tail_lanes: Mapping[Port, int]
    timed: Mapping[int, str]
    """The lanes of operators that wait for control events, and their uids."""


class QuerySpec(NamedTuple):
    """One query that a pipeline needs: its sinks and, for a query of its own, the native aggregate before them."""

    name: str
    sinks: tuple[int, ...]
    aggregate: int | None


def queries(plan: Plan) -> list[QuerySpec]:
    """The queries that a pipeline needs: one for each native aggregate, one for everything else."""
    graph = plan.graph
    found: dict[int | None, list[int]] = {}
    for node in graph.sinks:
        upstream = plan.upstream(node.id)
        aggregates = [n for n in upstream if graph.node(n).aggregates_natively]
        if aggregates:
            name = graph.node(aggregates[0]).name
            others = [graph.node(n).name for n in upstream if graph.node(n).runs_by_key]
            if len(aggregates) > 1 or others:
                raise UnsupportedError(
                    f"{plan.name}: sink '{node.name}' comes after the native aggregate '{name}' and after"
                    f" '{(others or [graph.node(aggregates[1]).name])[0]}', which STREAMING cannot run in one query;"
                    " use reduce instead of one of them, or write a table between them"
                )
            if any(s.id in upstream and s.id not in plan.upstream(aggregates[0]) for s in graph.sources):
                raise UnsupportedError(
                    f"{plan.name}: sink '{node.name}' unites the native aggregate '{name}' with another stream, which"
                    " STREAMING cannot run; write them to two sinks"
                )
        found.setdefault(aggregates[0] if aggregates else None, []).append(node.id)
    return [
        QuerySpec(MAIN if aggregate is None else graph.node(aggregate).uid, tuple(sinks), aggregate)
        for aggregate, sinks in found.items()
    ]


class Lanes:
    """Numbers of lanes. A name keeps its number for ever, since state is found by it."""

    def __init__(self, known: Mapping[str, int] | None = None) -> None:
        self.numbers = dict(known or {})

    def of(self, name: str) -> int:
        """The lane of an operator (by uid) or of a stream (by uid and purpose)."""
        return self.numbers.setdefault(name, max(self.numbers.values(), default=-1) + 1)


def topology(plan: Plan, sinks: tuple[int, ...], lanes: Lanes) -> Topology:
    """The stages that lead to some of the plan's sinks."""
    return _Builder(plan, sinks, lanes).build()


class _Builder:
    def __init__(self, plan: Plan, sinks: tuple[int, ...], lanes: Lanes) -> None:
        self.plan, self.graph, self.sinks, self.lanes = plan, plan.graph, sinks, lanes
        self.members = sorted(plan.upstream(*sinks))
        self.keyed = [n for n in self.members if self.graph.node(n).runs_by_key]
        self.body = self._body()
        self.tail = [n for n in self.members if n not in self.body and n not in self.keyed]
        self.tail_lanes: dict[Port, int] = {}
        self.pending: list[int] = []
        """Native operators that a track leads to."""

    def build(self) -> Topology:
        level_of = self._levels()
        heads = tuple(self._head(node) for node in self.graph.sources if node.id in self.members)
        levels: list[dict[int, Track]] = []
        passes: list[dict[int, Track]] = []
        natives = [self._natives()]
        for level in range(1, max(level_of.values(), default=0) + 1):
            mine = [n for n in self.keyed if level_of[n] == level]
            levels.append({self._lane(n): self._keyed(n) for n in mine})
            passes.append({lane: track for n in mine for lane, track in self._after(n)})
            natives.append(self._natives())
        uids = {self._lane(n): self.graph.node(n).uid for n in self.keyed if self.graph.node(n).has_timers}
        tail = Fragment(TAIL, tuple(self.tail), sinks=self.sinks)
        return Topology(heads, tuple(levels), tuple(passes), tuple(natives), tail, self.tail_lanes, uids)

    def _outputs(self, node: int) -> list[Edge]:
        return [e for e in self.graph.outputs(node) if e.target in self.members]

    def _body(self) -> set[int]:
        """The sources, and what lies between a source or a keyed operator and a keyed operator."""
        found = {node.id for node in self.graph.sources if node.id in self.members}
        for node in reversed(self.members):
            if node not in self.keyed and any(
                e.target in self.keyed or (e.target in found and e.target != node) for e in self._outputs(node)
            ):
                found.add(node)
        return found

    def _levels(self) -> dict[int, int]:
        levels: dict[int, int] = {}
        for node in self.members:
            before = max((levels[e.source] for e in self.graph.inputs(node)), default=0)
            levels[node] = before + (node in self.keyed)
        return {n: levels[n] for n in self.keyed}

    def _lane(self, node: int) -> int:
        return self.lanes.of(self.graph.node(node).uid)

    def _tail_lane(self, port: Port) -> int:
        if port not in self.tail_lanes:
            self.tail_lanes[port] = self.lanes.of(f"{self.graph.node(port.node).uid} {port.tag or ''} to the sinks")
        return self.tail_lanes[port]

    # What runs

    def _head(self, node: g.Node) -> Head:
        native = self._followed_natively(node.id)
        return Head(node.id, tuple(native), self._onward([node.id, *native][-1]))

    def _followed_natively(self, current: int) -> list[int]:
        """The native operators that alone follow a node, one after another."""
        found: list[int] = []
        while True:
            edges = self._outputs(current)
            following = self.graph.node(edges[0].target) if len(edges) == 1 else None
            if (
                following is None
                or following.id not in self.body
                or not following.native
                or len(self.graph.inputs(following.id)) > 1
            ):
                return found
            found.append(following.id)
            current = following.id

    def _natives(self) -> tuple[Native, ...]:
        """The native operators that are pending, and those that they lead to."""
        found: list[Native] = []
        while self.pending:
            wanted, self.pending = list(dict.fromkeys(self.pending)), []
            for node in wanted:
                nodes = [node, *self._followed_natively(node)]
                found.append(Native(self._native_lane(node), tuple(nodes), self._onward(nodes[-1])))
        return tuple(found)

    def _native_lane(self, node: int) -> int:
        return self.lanes.of(f"{self.graph.node(node).uid} natively")

    def _onward(self, node: int) -> Track:
        layout = self.plan.layout(Port(node))
        return self._track(Port(node), StreamLayout(layout.records, layout.timestamped))

    def _keyed(self, node_id: int) -> Track:
        """A keyed operator alone: what it emits goes to the pass after it, or straight to the tail."""
        node = self.graph.node(node_id)
        layout = input_layout(self.plan, node_id)
        outputs: list[Output] = []
        routes: list[Route] = []
        for port in self._ports(node_id):
            full = self.plan.layout(port)
            bare = StreamLayout(full.records, full.timestamped)
            targets = [e.target for e in self._outputs(node_id) if _tag(e) == port.tag]
            if any(t in self.body or t in self.keyed for t in targets):
                routes.append(_all(len(outputs), self._pass_lane(port), bare))
                outputs.append(Output(0, bare, port.tag))
            if any(t in self.tail for t in targets):
                routes.append(_all(len(outputs), self._tail_lane(port), full))
                outputs.append(Output(0, full, port.tag))
        return Track(
            Program(
                self.plan.name,
                node.name,
                layout,
                (step(self.plan, node, -1, None),),
                tuple(outputs),
                keyed_input(node, layout.records),
                keyed_options(self.plan.execution, None),
                broadcast_input(self.plan, node),
            ),
            tuple(routes),
        )

    def _after(self, node_id: int) -> list[tuple[int, Track]]:
        found = []
        for port in self._ports(node_id):
            if any(
                e.target in self.body or e.target in self.keyed for e in self._outputs(node_id) if _tag(e) == port.tag
            ):
                full = self.plan.layout(port)
                found.append((self._pass_lane(port), self._track(port, StreamLayout(full.records, full.timestamped))))
        return found

    def _ports(self, node_id: int) -> list[Port]:
        return list(dict.fromkeys(Port(node_id, _tag(e)) for e in self._outputs(node_id)))

    def _pass_lane(self, port: Port) -> int:
        return self.lanes.of(f"{self.graph.node(port.node).uid} {port.tag or ''} onward")

    def _track(self, entry: Port, layout: StreamLayout) -> Track:
        """Everything from a stream to the next keyed operators and the tail.

        A node with several inputs is there once for each of them.

        What a keyed operator emits to the tail goes there without a pass between.
        """
        steps: list[Step] = []
        outputs: list[Output] = []
        routes: list[Route] = []

        def follow(port: Port, index: int) -> None:
            edges = [e for e in self._outputs(port.node) if _tag(e) == port.tag]
            native = [e for e in edges if e.target in self.body and self.graph.node(e.target).native]
            leaving = [
                e
                for e in edges
                if e in native or e.target in self.keyed or (e.target in self.tail and port.node not in self.keyed)
            ]
            if leaving:
                number = len(outputs)
                outputs.append(Output(index, self.plan.layout(port), port.tag if index >= 0 else None))
                routes.extend(self._route(number, port, e) for e in leaving if e.target in self.keyed)
                routes.extend(self._to_native(number, port, e) for e in native)
                if any(e.target in self.tail for e in leaving):
                    routes.append(_all(number, self._tail_lane(port), self.plan.layout(port)))
            for edge in edges:
                if edge.target in self.body and edge not in native:
                    node = self._in_python(edge)
                    steps.append(step(self.plan, node, index, port.tag if index >= 0 else None))
                    mine = len(steps) - 1
                    for out in self._ports(node.id):
                        follow(out, mine)

        follow(entry, -1)
        name = self.graph.node(entry.node).name
        return Track(
            Program(
                self.plan.name,
                name,
                layout,
                tuple(steps),
                tuple(outputs),
                None,
                keyed_options(self.plan.execution, None),
            ),
            tuple(routes),
        )

    def _in_python(self, edge: Edge) -> g.Node:
        node = self.graph.node(edge.target)
        assert node.step is not None
        self._check_exchange(edge, node)
        return node

    def _check_exchange(self, edge: Edge, node: g.Node) -> None:
        if edge.partitioning.kind in (ExchangeKind.GLOBAL, ExchangeKind.BROADCAST, ExchangeKind.CUSTOM):
            raise UnsupportedError(
                f"{self.plan.name}: the {edge.partitioning.kind.value} exchange before '{node.name}' stands before or"
                " at an operator with state, which STREAMING cannot run; leave it out, or put it behind the last"
                " operator with state"
            )

    def _to_native(self, output: int, port: Port, edge: Edge) -> Route:
        self.pending.append(edge.target)
        own, wanted = self.plan.layout(port), input_layout(self.plan, edge.target)
        return Route(output, self._native_lane(edge.target), wanted.schema, tuple(_columns(own, wanted)))

    def _route(self, output: int, port: Port, edge: Edge) -> Route:
        """From a stream to the lane of a keyed operator, in the columns of that operator's input."""
        node = self.graph.node(edge.target)
        own = self.plan.layout(port)
        if edge in self.graph.broadcast_inputs(node.id):
            copied = broadcast_layout(self.plan, node.id)
            return Route(output, self._lane(node.id), copied.schema, tuple(_columns(own, copied)), everywhere=True)
        self._check_exchange(edge, node)
        wanted = input_layout(self.plan, node.id)
        columns = _columns(own, wanted)
        computed = edge.partitioning.key.computed if edge.partitioning.key is not None else None
        if computed is not None:
            columns.append(key_column(own.keys.index(computed)))
        return Route(
            output,
            self._lane(node.id),
            wanted.schema,
            tuple(columns),
            keyed_input(node, wanted.records),
            wanted,
            f"{self.plan.name}: operator '{node.name}'",
        )


def _columns(own: StreamLayout, wanted: StreamLayout) -> list[str | None]:
    """A stream's columns, in the order in which an operator that unites several has them."""
    columns: list[str | None] = list(own.records.names)
    if wanted.timestamped:
        columns.append(TIMESTAMP if own.timestamped else None)
    return columns


def _all(output: int, lane: int, layout: StreamLayout) -> Route:
    return Route(output, lane, layout.schema, tuple(layout.schema.names))


def _tag(edge: Edge) -> str | None:
    return edge.tag.name if edge.tag is not None else None
