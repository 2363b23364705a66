"""Watermark alignment: which sources, and which of their parts, wait for which (FLIP-182, FLIP-217).

Knows the logical graph. In STREAMING a part of a source, such as a partition of a topic, is not read further while its
watermark is more than the drift ahead of the slowest part of its group. BATCH has no watermarks that could drift.
"""

from __future__ import annotations

from dataclasses import dataclass

from dagster_unified.errors import UnsupportedError
from dagster_unified.graph.nodes import AssignTimestampsNode, ExchangeKind, Graph, IterationNode, Node, SourceNode


@dataclass(frozen=True)
class Aligned:
    """A source whose parts wait for those of its group, by the watermarks of one assigner. Milliseconds."""

    source: int
    assigner: str
    group: str
    drift: int


def aligned(graph: Graph) -> list[Aligned]:
    """The sources that are aligned; raises `UnsupportedError` where one cannot wait."""
    found: dict[int, Aligned] = {}
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
        if source.id in found:
            raise UnsupportedError(
                f"{where}: source '{source.name}' is in watermark group '{found[source.id].group}' already, by another"
                " strategy; align it once"
            )
        found[source.id] = Aligned(source.id, node.uid, node.watermark_group, node.max_drift_ms)
    return list(found.values())


def straight_from_source(graph: Graph, node: AssignTimestampsNode) -> list[Node]:
    """What comes before an assigner, back to the source whose records come to it straight, part by part.

    It is empty where there is no such source.
    """
    found: list[Node] = []
    edges = graph.inputs(node.id)
    while len(edges) == 1 and edges[0].partitioning.kind is ExchangeKind.FORWARD:
        before = graph.node(edges[0].source)
        found.append(before)
        if isinstance(before, SourceNode):
            return found
        if before.runs_by_key or before.aggregates_natively or isinstance(before, IterationNode):
            return []
        edges = graph.inputs(before.id)
    return []
