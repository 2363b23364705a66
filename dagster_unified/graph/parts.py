"""What decides what operators do and where their records go, part by part: fingerprints are made of these.

Knows single nodes and edges; no plan.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from dagster_unified.graph.fingerprint import digest, fingerprint_of

if TYPE_CHECKING:
    from dagster_unified.graph.nodes.base import Node
    from dagster_unified.graph.nodes.graph import Edge


def own_parts(node: Node, with_input: bool = True) -> dict[str, str]:
    """What decides what a node does, part by part: its settings under '', the author's code by where it was written.

    Without `with_input` not what a source holds just now.
    """
    described: list[object] = [
        type(node).__name__,
        node.uid,
        node.records.describe() if node.records else "",
        node.timestamped,
        node.parallelism,
    ]
    parts = {"": digest(*described, *node.settings(with_input))}
    return {**parts, **fingerprint_of(*node.code()).parts}


def edge_parts(edge: Edge) -> dict[str, str]:
    """What decides where an edge's records go, as `own_parts` does for a node."""
    key = edge.partitioning.key
    tag = edge.tag.name if edge.tag else ""
    parts = {"": digest(edge.partitioning.kind, key.fields if key else "", tag)}
    functions = [
        key.computed.function if key is not None and key.computed is not None else None,
        edge.partitioning.partitioner,
    ]
    return {**parts, **fingerprint_of(*(f for f in functions if f is not None)).parts}
