"""Column lineage of a stage, where the graph alone shows it: operators that keep columns as they are, and Catalyst's.

Knows the logical graph only. Behind a Python function that returns a new record nothing is known, and nothing is said.
"""

from __future__ import annotations

from dagster_unified.graph.nodes import Lineage
from dagster_unified.graph.plan import Plan, Region


def column_lineage(plan: Plan, region: Region, node_id: int) -> Lineage | None:
    """Where the columns of a node's output come from, or None where that is not known."""
    node, edges = plan.graph.node(node_id), plan.graph.inputs(node_id)
    if node_id not in region.nodes or not edges:
        return {name: frozenset({(node_id, name)}) for name in node.records.names} if node.records else None
    if len(edges) != 1 or edges[0].tag is not None:
        return None
    before = column_lineage(plan, region, edges[0].source)
    return None if before is None else node.lineage(before)
