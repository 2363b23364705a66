"""Event time in a graph: which sources wait for which (FLIP-182, FLIP-217), and whether a record can be late."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from dagster_unified.errors import UnsupportedError
from dagster_unified.graph.code import field_of
from dagster_unified.graph.nodes import (
    AssignTimestampsNode,
    Edge,
    ExchangeKind,
    Graph,
    IterationNode,
    Node,
    SourceNode,
    TimedNode,
)
from dagster_unified.operators.functions.event_time import WatermarkGenerator
from dagster_unified.operators.watermarks import encoded_attributes


@dataclass(frozen=True)
class Aligned:
    """A source whose parts wait for those of its group, by the watermarks of one assigner. Milliseconds."""

    source: int
    assigner: str
    group: str
    drift: int


def aligned(graph: Graph) -> list[Aligned]:
    """Return the sources that are aligned; raises `UnsupportedError` where one cannot wait."""
    by_source: dict[int, Aligned] = {}
    for node in graph.assigners:
        if node.watermark_group is None:
            continue
        where = f"{graph.name}: operator '{node.name}' in watermark group '{node.watermark_group}'"
        before = straight_from_source(graph, node)
        source = before[-1] if before else None
        if not isinstance(source, SourceNode):
            raise UnsupportedError(
                f"{where}: it does not know which part of a source a record is of; assign timestamps to each source by"
                " itself, before it is united with others or keyed"
            )
        if not source.source.can_wait:
            raise UnsupportedError(
                f"{where}: source '{source.name}' cannot wait for others, because Spark fixes how much of it a"
                " micro-batch reads when the query starts; leave it out of the group, or limit the source that gets"
                " ahead, with max_files_per_trigger or an option of its format such as maxOffsetsPerTrigger"
            )
        if source.id in by_source:
            raise UnsupportedError(
                f"{where}: source '{source.name}' is in watermark group '{by_source[source.id].group}' already, by"
                " another strategy; align it once"
            )
        by_source[source.id] = Aligned(source.id, node.uid, node.watermark_group, node.max_drift_ms)
    return list(by_source.values())


def straight_from_source(graph: Graph, node: AssignTimestampsNode) -> list[Node]:
    """Return the path from an assigner back to the source whose records come to it straight, part by part.

    It is empty where there is no such source.
    """
    path: list[Node] = []
    edges = graph.inputs(node.id)
    while len(edges) == 1 and edges[0].partitioning.kind is ExchangeKind.FORWARD:
        before = graph.node(edges[0].source)
        path.append(before)
        if isinstance(before, SourceNode):
            return path
        if before.runs_by_key or before.aggregates_natively or isinstance(before, IterationNode):
            return []
        edges = graph.inputs(before.id)
    return []


@dataclass(frozen=True)
class Assigned:
    """A timestamp assigner upstream. Times are in milliseconds."""

    name: str
    bound: int | None
    """How far out of order its records may be before they are late; None where a watermark generator decides."""

    disorder: int | None
    """How far they are, at most; None where nobody knows."""

    @property
    def covered(self) -> bool:
        """Whether none of its records can be late."""
        return self.disorder is not None and self.bound is not None and self.disorder <= self.bound


def check_generators(graph: Graph) -> None:
    """Raise `RecordTypeError` where a watermark generator keeps what cannot go on to the next micro-batch."""
    for node in graph.timed:
        if isinstance(node, AssignTimestampsNode) and node.remembers:
            generator = None if node.generator is None else node.generator()
            if isinstance(generator, WatermarkGenerator):
                encoded_attributes(generator, node.remembers, f"{graph.name}: operator '{node.name}'")


def nearest_assigners(graph: Graph, edges: Sequence[Edge]) -> list[TimedNode]:
    """Return the nearest timestamp assigners upstream of what comes over some edges.

    A stream that another query hands on stands for those before it.
    """
    pending: list[Edge] = list(edges)
    seen: set[int] = set()
    nearest: list[TimedNode] = []
    timed = {node.id: node for node in graph.timed}
    while pending:
        source = pending.pop().source
        if source in seen:
            continue
        seen.add(source)
        if source in timed:
            nearest.append(timed[source])
        else:
            pending += graph.inputs(source)
    return nearest


def assigners(graph: Graph, node: Node) -> list[Assigned]:
    """Return the nearest assigners upstream of `node` that move its watermark before the end of input."""
    nearest = nearest_assigners(graph, graph.inputs(node.id))
    return [
        Assigned(n.name, n.max_out_of_orderness_ms, _disorder(graph, n))
        for n in nearest
        if isinstance(n, AssignTimestampsNode) and (n.max_out_of_orderness_ms is not None or n.generator is not None)
    ]


def _disorder(graph: Graph, node: AssignTimestampsNode) -> int | None:
    """Return what a source right before an assigner says of the disorder of the field that it reads."""
    inputs: list[Edge] = graph.inputs(node.id)
    source = graph.node(inputs[0].source) if len(inputs) == 1 else None
    fields = (node.assigner,) if isinstance(node.assigner, str) else field_of(node.assigner)
    if source is None or fields is None or len(fields) != 1:
        return None
    return source.disorder(fields[0])
