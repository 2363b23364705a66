"""The queries of STREAMING: a plan is cut behind its iterations, where operators with state come after them.

Each segment is a query, and one more for each native aggregate that Spark keeps. An iteration goes round while an epoch
is committed, when the operators with state of its query have had their turn. So those behind it are in another query,
which reads what this one has committed. Streams leave a segment for another through a `QueryOutputNode`, and come in by
a `QueryInputNode`. Knows no engine.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import product

from dagster_unified.errors import UnsupportedError
from dagster_unified.graph.connectors import Boundedness, Source
from dagster_unified.graph.event_time import aligned, nearest_assigners, straight_from_source
from dagster_unified.graph.fingerprint import digest
from dagster_unified.graph.mode import boundedness
from dagster_unified.graph.nodes import Edge, Graph, IterationNode, Node, Port, QueryInputNode, QueryOutputNode
from dagster_unified.graph.plan import Plan
from dagster_unified.graph.regions import tasks
from dagster_unified.graph.topology import Lanes, Topology, topology
from dagster_unified.records import RecordType

MAIN = "main"
"""The query of a plan's first segment, but for native aggregates that Spark keeps."""


def query_name(name: str, segment: int) -> str:
    """Return the name of a query of a segment: `name` is that of the same query of a plan that is not cut."""
    return f"{name}-{segment}" if segment else name


@dataclass(frozen=True, eq=False)
class QueryPlan(ABC):
    """One query of a job."""

    name: str
    plan: Plan
    """The segment that it runs, or a part of it."""

    segment: int
    sinks: tuple[int, ...]

    @property
    @abstractmethod
    def sources(self) -> list[str]:
        """Return the uids of its sources, in the order in which Spark numbers them."""


@dataclass(frozen=True, eq=False)
class KeyGroupQueryPlan(QueryPlan):
    """A query of everything but native aggregates that Spark keeps."""

    stages: Topology

    @property
    def sources(self) -> list[str]:
        return [self.plan.graph.nodes[head.source].uid for head in self.stages.heads]


@dataclass(frozen=True, eq=False)
class NativeQueryPlan(QueryPlan):
    """The query of one native aggregate."""

    aggregate: int

    @property
    def sources(self) -> list[str]:
        return list(dict.fromkeys(self._leading_to(self.aggregate)))

    def _leading_to(self, node: int) -> Iterator[str]:
        """Yield the uids of the sources that lead to a node, as its inputs come one after another."""
        for edge in self.plan.graph.inputs(node):
            yield from self._leading_to(edge.source)
        if not self.plan.graph.inputs(node):
            yield self.plan.graph.node(node).uid


def plan_queries(plan: Plan, lanes: Lanes) -> list[QueryPlan]:
    """Return the queries that a pipeline needs, each behind those whose output it reads.

    Raises `UnsupportedError` for a pipeline that STREAMING cannot run.
    """
    whole = _sinks_by_aggregate(plan)
    _check_aligned(plan, [aggregate for aggregate in whole if aggregate is not None])
    queries: list[QueryPlan] = []
    plans = segments(plan)
    for number, segment in enumerate(plans):
        for aggregate, sinks in (whole if len(plans) == 1 else _sinks_by_aggregate(segment)).items():
            if aggregate is None:
                stages = topology(segment, sinks, lanes)
                queries.append(KeyGroupQueryPlan(query_name(MAIN, number), segment, number, sinks, stages))
            else:
                name = query_name(segment.graph.node(aggregate).uid, number)
                queries.append(NativeQueryPlan(name, segment, number, sinks, aggregate))
    return queries


def key_group_queries(plan: Plan, lanes: Lanes) -> list[KeyGroupQueryPlan]:
    """Return the queries that a pipeline needs, without those of native aggregates."""
    return [query for query in plan_queries(plan, lanes) if isinstance(query, KeyGroupQueryPlan)]


def _check_aligned(plan: Plan, aggregates: Sequence[int]) -> None:
    graph = plan.graph
    for member, aggregate in product(aligned(graph), aggregates):
        if member.source in graph.upstream(aggregate):
            raise UnsupportedError(
                f"{plan.name}: source '{graph.node(member.source).name}' is in watermark group '{member.group}', and"
                f" the native aggregate '{graph.node(aggregate).uid}' goes by Spark's own watermark; launch"
                " with state.native-aggregates=PORTABLE, or do not align it"
            )


def _sinks_by_aggregate(plan: Plan) -> dict[int | None, tuple[int, ...]]:
    """Return the sinks of each query of a segment: one query for each native aggregate, one for everything else."""
    graph, sinks = plan.graph, dict[int | None, tuple[int, ...]]()
    aggregating = [node.id for node in graph.nodes if node.aggregates_natively]
    for node in graph.ends:
        upstream = graph.upstream(node.id) if aggregating else set()
        aggregates = [n for n in aggregating if n in upstream]
        if aggregates:
            name = graph.node(aggregates[0]).name
            others = [
                graph.node(n).name
                for n in upstream
                if graph.node(n).runs_by_key or isinstance(graph.node(n), IterationNode)
            ]
            if len(aggregates) > 1 or others:
                raise UnsupportedError(
                    f"{plan.name}: sink '{node.name}' comes after the native aggregate '{name}' and after"
                    f" '{(others or [graph.node(aggregates[1]).name])[0]}', which STREAMING cannot run in one query"
                    " with state.native-aggregates=SPARK; remove the option, or write a table between them"
                )
            if any(s.id in upstream and s.id not in graph.upstream(aggregates[0]) for s in graph.sources):
                raise UnsupportedError(
                    f"{plan.name}: sink '{node.name}' unites the native aggregate '{name}' with another stream, which"
                    " STREAMING cannot run with state.native-aggregates=SPARK; remove the option, or write them to two"
                    " sinks"
                )
        aggregate = aggregates[0] if aggregates else None
        sinks[aggregate] = (*sinks.get(aggregate, ()), node.id)
    return sinks


@dataclass(frozen=True)
class CrossQueryStream:
    """A stream that one segment writes for another, and the uid of its log."""

    stream: Port
    source: int
    target: int
    log: str


class QueryInput(Source[object]):
    """The stream that another query of the same job writes, before an engine says where that is."""

    kind = "relay"
    boundedness = Boundedness.BOUNDED

    def __init__(self, name: str, records: RecordType) -> None:
        self.name, self.records = name, records

    def describe(self) -> str:
        return f"what '{self.name}' hands on"

    def snapshot(self) -> str:
        return self.name


def segments(plan: Plan) -> tuple[Plan, ...]:
    """Return the plan in pieces, each of which reads nothing of those after it; the plan itself where there is one."""
    numbers = segment_of(plan.graph)
    last = max(numbers.values(), default=0)
    if not last:
        return (plan,)
    return tuple(_cut(plan, numbers, number) for number in range(last + 1))


def cross_query_streams(plan: Plan) -> list[CrossQueryStream]:
    """Return the streams that a plan's segments write for others."""
    numbers = segment_of(plan.graph)
    crossing = ((e.port, numbers[e.source], numbers[e.target]) for e in plan.graph.edges)
    distinct = dict.fromkeys(crossed for crossed in crossing if crossed[1] < crossed[2])
    return [CrossQueryStream(*crossed, _uid(plan, crossed[0], crossed[2])) for crossed in distinct]


def segment_of(graph: Graph) -> dict[int, int]:
    """The segment of each node: the first that it can be in, or the one of all that read it, if that is later."""
    loops = {node.id for node in graph.nodes if isinstance(node, IterationNode)}
    if not loops:
        return {node.id: 0 for node in graph.nodes}
    cuts = _before_state(graph, loops)
    segment: dict[int, int] = {}
    for node in graph.nodes:
        before = [edge.source for edge in graph.inputs(node.id)]
        segment[node.id] = max((segment[n] + (n in cuts) for n in before), default=0)
    stay = loops | {aligned_source.source for aligned_source in aligned(graph)}
    for node in reversed(graph.nodes):
        after = [segment[edge.target] for edge in graph.outputs(node.id)]
        if after and node.id not in stay:
            segment[node.id] = min(after)
    for node in graph.assigners:
        # only where its source is read does it know which part a record is of
        path = [node, *straight_from_source(graph, node)]
        segment |= dict.fromkeys((n.id for n in path), segment[path[-1].id])
    return segment


def _before_state(graph: Graph, loops: set[int]) -> set[int]:
    """Return the iterations behind which there are operators with state, before the next iteration if there is one.

    Or behind which is an operator that is told the watermark, or an assigner of timestamps that it goes by: after an
    iteration, a query learns of no event time.
    """
    pending = [node.id for node in graph.nodes if node.runs_by_key or node.is_told_watermark]
    timed = [edge for node in graph.nodes if node.is_told_watermark for edge in graph.inputs(node.id)]
    pending += [node.id for node in nearest_assigners(graph, timed)]
    seen: set[int] = set()
    while pending:
        for edge in graph.inputs(pending.pop()):
            if edge.source not in seen:
                seen.add(edge.source)
                pending += [edge.source] if edge.source not in loops else []
    return seen & loops


def _cut(plan: Plan, numbers: dict[int, int], number: int) -> Plan:
    """Return one segment, whose nodes have numbers of their own."""
    graph = plan.graph
    query_inputs: dict[Port, int] = {}
    nodes: list[Node] = []
    for edge in graph.edges:
        if numbers[edge.source] < number == numbers[edge.target] and edge.port not in query_inputs:
            query_inputs[edge.port] = len(nodes)
            nodes.append(_query_input(plan, edge.port, len(nodes), number))
    ids: dict[int, int] = {}
    for node in graph.nodes:
        if numbers[node.id] == number:
            ids[node.id] = len(nodes)
            nodes.append(replace(node, id=len(nodes)))
    edges: list[Edge] = []
    written: set[tuple[Port, int]] = set()
    for edge in graph.edges:
        port, target = edge.port, numbers[edge.target]
        if target == number and edge.source in ids:
            edges.append(replace(edge, source=ids[edge.source], target=ids[edge.target]))
        elif target == number:
            edges.append(replace(edge, source=query_inputs[port], target=ids[edge.target], tag=None))
        elif edge.source in ids and (port, target) not in written:
            written.add((port, target))
            edges.append(Edge(ids[edge.source], len(nodes), tag=edge.tag))
            nodes.append(_query_output(plan, port, len(nodes), numbers, target))
    cut = replace(graph, nodes=tuple(nodes), edges=tuple(edges))
    execution = replace(plan.execution, boundedness=boundedness(cut))
    return Plan(cut, execution, tasks(cut, execution.chaining))


def _uid(plan: Plan, port: Port, number: int) -> str:
    """Return the uid of both ends of a stream that a segment reads of another."""
    return f"relay-{digest(plan.graph.node(port.node).uid, port.tag, number)[:16]}"


def _query_input(plan: Plan, port: Port, id_: int, number: int) -> QueryInputNode:
    node, records = plan.graph.node(port.node), plan.graph.port_type(port.node, port.tag)
    assert records is not None
    return QueryInputNode(
        id=id_,
        name=node.name,
        uid=_uid(plan, port, number),
        records=records,
        timestamped=node.timestamped,
        source=QueryInput(node.name, records),
        is_timed=bool(nearest_assigners(plan.graph, [Edge(port.node, port.node)])),
    )


def _query_output(plan: Plan, port: Port, id_: int, numbers: dict[int, int], target: int) -> QueryOutputNode:
    node, records = plan.graph.node(port.node), plan.graph.port_type(port.node, port.tag)
    assert records is not None
    before = (plan.graph.node(n) for n in sorted(plan.graph.upstream(port.node)))
    iterations = [n for n in before if isinstance(n, IterationNode) and numbers[n.id] == numbers[port.node]]
    return QueryOutputNode(
        id=id_,
        name=f"{node.name} handed on",
        uid=_uid(plan, port, target),
        records=records,
        timestamped=node.timestamped,
        after_iteration=bool(iterations),
        waits_for_end=any(not n.is_unbounded for n in iterations),
    )
