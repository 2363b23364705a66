"""Which operators have their records in subtasks that an exchange chose, and how many subtasks these are.

`global_`, `broadcast()` and `partition_custom` say which subtask of the next operator gets a record, and what is
forwarded stays in its subtask (Flink: *Physical Partitioning*). Everywhere else the engine decides. Knows the graph
only.
"""

from __future__ import annotations

from dagster_unified.errors import PipelineError
from dagster_unified.graph.nodes import Edge, ExchangeKind, Graph, Node

CHOOSING = (ExchangeKind.GLOBAL, ExchangeKind.BROADCAST, ExchangeKind.CUSTOM)
"""The exchanges that say which subtask gets a record."""


def subtasks(graph: Graph, parallelism: int | None) -> dict[int, int]:
    """How many subtasks there are, for each operator whose records are in subtasks that an exchange chose.

    An operator that Catalyst runs has no subtasks. It is among them only where it forwards its records to one that runs
    in Python.
    """
    counts: dict[int, int] = {}
    for node in graph.nodes:
        found = [_subtasks_after(graph, edge, node, parallelism, counts) for edge in graph.main_inputs(node.id)]
        count = max(found, default=0)
        if count:
            counts[node.id] = count
    seen: set[int] = set()
    for node in reversed(graph.nodes):
        forwards = any(e.target in seen and e.partitioning.kind is ExchangeKind.FORWARD for e in graph.outputs(node.id))
        if node.id in counts and (node.step is not None or forwards):
            seen.add(node.id)
    return {node: count for node, count in counts.items() if node in seen}


def _subtasks_after(graph: Graph, edge: Edge, node: Node, parallelism: int | None, counts: dict[int, int]) -> int:
    """How many subtasks an exchange chooses from; 0 where it does not choose."""
    if edge.partitioning.kind in CHOOSING:
        return chosen_from(graph, edge, node, parallelism)
    if edge.partitioning.kind is ExchangeKind.FORWARD and node.parallelism in (None, counts.get(edge.source)):
        return counts.get(edge.source, 0)
    return 0


def chosen_from(graph: Graph, edge: Edge, node: Node, parallelism: int | None) -> int:
    """How many subtasks an exchange before a node chooses from."""
    count = node.parallelism or parallelism
    if count is None and edge.partitioning.kind is ExchangeKind.CUSTOM:
        raise PipelineError(
            f"{graph.name}: operator '{node.name}' comes after partition_custom and needs set_parallelism(n), since the"
            " partitioner is asked for one of n partitions"
        )
    return count or 1
