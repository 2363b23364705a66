"""How the harness sends the records of a stream to the subtasks of the next operator."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from dagster_unified.graph import nodes as g
from dagster_unified.graph.execution_graph import channel_selector, channels
from dagster_unified.graph.nodes import Edge, ExchangeKind
from dagster_unified.graph.plan import Plan, Port
from dagster_unified.graph.subtasks import CHOOSING
from dagster_unified.operators.layout import StreamLayout
from dagster_unified.operators.routing import ByPartitioner
from dagster_unified.testing.driving import Timed, to_batch

InSubtasks = dict[int, list[Timed]]
"""The records of a stream, by subtask. Where no exchange chose it, all are in the first."""


def sent(plan: Plan, edge: Edge, node: g.Node, records: Mapping[int, list[Timed]]) -> InSubtasks:
    """The records of a stream in the subtasks of the operator behind an edge."""
    kind = edge.partitioning.kind
    if kind is ExchangeKind.FORWARD and {edge.source, node.id} <= set(plan.subtasks):
        return dict(records)
    together = in_one(records)
    if kind not in CHOOSING or kind is ExchangeKind.GLOBAL:
        return {0: together}
    count = channels(plan, edge)
    if kind is ExchangeKind.BROADCAST:
        return {subtask: list(together) for subtask in range(count)}
    found: InSubtasks = {}
    for timed, subtask in zip(together, _chosen(plan, edge, together, count), strict=True):
        found.setdefault(subtask, []).append(timed)
    return found


def in_one(records: Mapping[int, Iterable[Timed]]) -> list[Timed]:
    """The records of all subtasks."""
    return [timed for subtask in sorted(records) for timed in records[subtask]]


def _chosen(plan: Plan, edge: Edge, records: list[Timed], count: int) -> list[int]:
    if not records:
        return []
    key, selector = edge.partitioning.key, channel_selector(plan, edge, count)
    assert key is not None
    assert isinstance(selector, ByPartitioner)
    own = plan.layout(Port.of(edge))
    computed = () if key.computed is None else (key.computed,)
    batch = to_batch(plan.name, StreamLayout(own.records, own.timestamped, computed), records)
    return selector.subtasks([batch.column(name) for name in selector.keyed.columns])
