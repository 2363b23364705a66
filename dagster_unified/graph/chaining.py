"""Chains operators into tasks, as Flink's `StreamingJobGraphGenerator.isChainable` decides it.

Knows the logical graph only. Two operators are chained when the downstream one has a single input, their exchange is
FORWARD, their parallelism is the same, and neither side forbids it. A task is a head with everything chained to it.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from dagster_unified.errors import PipelineError
from dagster_unified.graph.nodes import Chaining, Edge, ExchangeKind, Graph, Partitioning


@dataclass(frozen=True)
class Task:
    """Operators chained together: the unit that Flink calls a task."""

    id: int
    operators: tuple[int, ...]

    @property
    def head(self) -> int:
        """The operator that reads the task's input."""
        return self.operators[0]


def resolve_forward(graph: Graph) -> Graph:
    """Makes an exchange REBALANCE where parallelism changes and the author named no exchange.

    An explicit FORWARD is then an error. An operator without a parallelism of its own takes over that of the operator
    whose records are forwarded to it.
    """
    nodes = list(graph.nodes)
    for node in graph.nodes:
        forwarded = [
            nodes[e.source].parallelism
            for e in graph.edges
            if e.target == node.id and e.partitioning.kind is ExchangeKind.FORWARD
        ]
        if node.parallelism is None and len(set(forwarded)) == 1:
            nodes[node.id] = replace(node, parallelism=forwarded[0])
    graph = replace(graph, nodes=tuple(nodes))
    edges = []
    for edge in graph.edges:
        source, target = nodes[edge.source], nodes[edge.target]
        differs = target.parallelism is not None and None is not source.parallelism != target.parallelism
        if edge.partitioning.kind is ExchangeKind.FORWARD and differs:
            if edge.partitioning.explicit:
                raise PipelineError(
                    f"{graph.name}: forward() from '{source.name}' to '{target.name}' needs the same parallelism, but"
                    f" it goes from {source.parallelism} to {target.parallelism}; use rebalance() or rescale()"
                )
            edge = replace(edge, partitioning=Partitioning(ExchangeKind.REBALANCE))
        edges.append(edge)
    return replace(graph, edges=tuple(edges))


def chainable(graph: Graph, edge: Edge, enabled: bool) -> bool:
    """Whether the two operators of an edge run in one task."""
    upstream, downstream = graph.nodes[edge.source], graph.nodes[edge.target]
    return (
        enabled
        and len(graph.inputs(edge.target)) == 1
        and edge.partitioning.kind is ExchangeKind.FORWARD
        and upstream.parallelism in (None, downstream.parallelism)
        and upstream.chaining is not Chaining.NEVER
        and downstream.chaining is Chaining.ALWAYS
    )


def tasks(graph: Graph, enabled: bool) -> tuple[Task, ...]:
    """The graph's tasks, in the order of their heads."""
    chained = {e.target: e.source for e in graph.edges if chainable(graph, e, enabled)}
    head = {n.id: n.id for n in graph.nodes}
    for node in graph.nodes:
        if node.id in chained:
            head[node.id] = head[chained[node.id]]
    found: list[Task] = []
    for node in graph.nodes:
        if head[node.id] == node.id:
            found.append(Task(len(found), tuple(n.id for n in graph.nodes if head[n.id] == node.id)))
    return tuple(found)
