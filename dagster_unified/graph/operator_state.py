"""Operator state: which operators may have it, and by how many subtasks it is kept. Knows the logical graph only."""

from __future__ import annotations

from dagster_unified.errors import PipelineError
from dagster_unified.graph.mode import Execution
from dagster_unified.graph.nodes import ExchangeKind, Graph, IterationNode, Node
from dagster_unified.operators.functions.checkpoints import checkpointed


def check_operator_state(graph: Graph) -> None:
    """Raises `PipelineError` for a function with operator state where there is none."""
    for node in graph.nodes:
        if node.holds_subtask_state or isinstance(node, IterationNode):  # a body is checked where it is built
            continue
        function = next((found for found in map(checkpointed, node.code()) if found is not None), None)
        if function is None:
            continue
        what = f"{graph.name}: operator '{node.name}' is given a CheckpointedFunction ({type(function).__name__})"
        if any(edge.partitioning.kind is ExchangeKind.HASH for edge in graph.main_inputs(node.id)):
            raise PipelineError(
                f"{what}, and its stream is keyed; use keyed state, which open() gets from its runtime context, or put"
                " the function before key_by"
            )
        raise PipelineError(
            f"{what}, and has no operator state; give the function to map, flat_map, filter, map_batches or process on"
            " a stream without a key, or behind connect of two such streams"
        )


def subtasks_with_state(graph: Graph, node: Node, chosen_from: int | None, execution: Execution) -> int:
    """By how many subtasks a node keeps its state.

    `chosen_from` is how many there are where an exchange chooses the subtask of its records. Raises `PipelineError`
    where they are more than there are key groups.
    """
    groups = execution.streaming.max_parallelism
    count = chosen_from or node.parallelism or execution.parallelism or groups
    if count > groups:
        raise PipelineError(
            f"{graph.name}: operator '{node.name}' has {count} subtasks, and operator state for {groups}; launch with"
            f" pipeline.max-parallelism={count} or more, or set a smaller parallelism"
        )
    return count
