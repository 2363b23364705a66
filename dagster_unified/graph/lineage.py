"""Column lineage of a stage, where the graph alone shows it: operators that keep columns as they are, and Catalyst's.

Knows the logical graph only. Behind a Python function that makes a new record nothing is known, and nothing is said.
"""

from __future__ import annotations

from dagster_unified.graph import nodes as g
from dagster_unified.graph.expressions import Column
from dagster_unified.graph.plan import Plan, Region

Lineage = dict[str, frozenset[tuple[int, str]]]
"""For each column, the (node of an earlier region or source, column) pairs that it comes from."""


def column_lineage(plan: Plan, region: Region, node_id: int) -> Lineage | None:
    """Where the columns of a node's output come from, or None where that is not known."""
    node = plan.graph.node(node_id)
    if node_id not in region.nodes or isinstance(node, g.SourceNode):
        return {name: frozenset({(node_id, name)}) for name in node.records.names} if node.records else None
    edges = plan.graph.inputs(node_id)
    if len(edges) != 1 or edges[0].tag is not None:
        return None
    before = column_lineage(plan, region, edges[0].source)
    if before is None or isinstance(node, (g.SinkNode, g.FilterNode, g.WhereNode, g.AssignTimestampsNode)):
        return before
    if isinstance(node, g.ReduceNode) and node.rolling is not None:
        return before
    if isinstance(node, g.LookupNode):
        return None
    if isinstance(node, g.SelectNode):
        return _columns(before, {}, node.columns, node.records.names if node.records else ())
    if isinstance(node, g.AggregateNode):
        kept = {k: before[k] for k in node.key.fields}
        return _columns(before, kept, node.columns, node.records.names[len(kept) :] if node.records else ())
    return None


def _columns(before: Lineage, kept: Lineage, columns: tuple[object, ...], names: tuple[str, ...]) -> Lineage | None:
    found = dict(kept)
    for name, column in zip(names, columns, strict=True):
        read = (
            column.references()
            if isinstance(column, Column)
            else {column}
            if isinstance(column, str) and column in before
            else None
        )
        if read is None or not read <= set(before):
            return None
        found[name] = frozenset(origin for r in read for origin in before[r])
    return found
