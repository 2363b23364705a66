"""Whether a record can come too late for an operator in STREAMING (FLIP-134: "late records"; in BATCH none can).

Knows the logical graph, and what sources say of the order of their records. A record is late when the watermark has
passed it, and the watermark of an input follows the strategies of its nearest timestamp assigners.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from dagster_unified.graph.code import field_of
from dagster_unified.graph.nodes import AssignTimestampsNode, Edge, Graph, Node, TimedNode
from dagster_unified.operators.functions.event_time import WatermarkGenerator
from dagster_unified.operators.watermarks import encoded_attributes


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
    """The nearest timestamp assigners upstream of what comes over some edges.

    A stream that another query hands on stands for those before it.
    """
    pending: list[Edge] = list(edges)
    seen: set[int] = set()
    found: list[TimedNode] = []
    timed = {node.id: node for node in graph.timed}
    while pending:
        source = pending.pop().source
        if source in seen:
            continue
        seen.add(source)
        if source in timed:
            found.append(timed[source])
        else:
            pending += graph.inputs(source)
    return found


def assigners(graph: Graph, node: Node) -> list[Assigned]:
    """The nearest assigners upstream of `node` that move its watermark before the end of input."""
    found = nearest_assigners(graph, graph.inputs(node.id))
    return [
        Assigned(n.name, n.max_out_of_orderness_ms, _disorder(graph, n))
        for n in found
        if isinstance(n, AssignTimestampsNode) and (n.max_out_of_orderness_ms is not None or n.generator is not None)
    ]


def _disorder(graph: Graph, node: AssignTimestampsNode) -> int | None:
    """What a source that stands right before an assigner says of the field that it reads."""
    inputs: list[Edge] = graph.inputs(node.id)
    source = graph.node(inputs[0].source) if len(inputs) == 1 else None
    fields = (node.assigner,) if isinstance(node.assigner, str) else field_of(node.assigner)
    if source is None or fields is None or len(fields) != 1:
        return None
    return source.disorder(fields[0])
