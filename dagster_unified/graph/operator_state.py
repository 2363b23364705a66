"""State as the graph alone shows it: operator state and its subtasks, and what is carried to the next partition."""

from __future__ import annotations

from dagster_unified.errors import PipelineError, UnsupportedError
from dagster_unified.graph.mode import Execution
from dagster_unified.graph.nodes import Edge, ExchangeKind, Graph, IterationNode, Node
from dagster_unified.operators.functions.checkpoints import checkpointed


def check_operator_state(graph: Graph) -> None:
    """Raise `PipelineError` for a function with operator state where there is none."""
    # a body is checked where it is built
    stateless = [node for node in graph.nodes if not (node.holds_subtask_state or isinstance(node, IterationNode))]
    for node, code in [(node, node.code()) for node in stateless]:
        function = next((part for part in map(checkpointed, code) if part is not None), None)
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


CHOOSING = (ExchangeKind.GLOBAL, ExchangeKind.BROADCAST, ExchangeKind.CUSTOM)
"""The exchanges that say which subtask gets a record."""


def subtasks(graph: Graph, parallelism: int | None) -> dict[int, int]:
    """Return how many subtasks there are, for each operator whose records are in subtasks that an exchange chose.

    An operator that Catalyst runs has no subtasks. It is among them only where it forwards its records to one that runs
    in Python.
    """
    if not any(edge.partitioning.kind in CHOOSING for edge in graph.edges):
        return {}
    counts: dict[int, int] = {}
    for node in graph.nodes:
        counts_before = [_subtasks_after(graph, edge, node, parallelism, counts) for edge in graph.main_inputs(node.id)]
        count = max(counts_before, default=0)
        if count:
            counts[node.id] = count
    seen: set[int] = set()
    for node in reversed(graph.nodes):
        forwards = any(e.target in seen and e.partitioning.kind is ExchangeKind.FORWARD for e in graph.outputs(node.id))
        if node.id in counts and (node.step is not None or forwards):
            seen.add(node.id)
    return {node: count for node, count in counts.items() if node in seen}


def _subtasks_after(graph: Graph, edge: Edge, node: Node, parallelism: int | None, counts: dict[int, int]) -> int:
    """Return how many subtasks an exchange chooses from; 0 where it does not choose."""
    if edge.partitioning.kind in CHOOSING:
        return chosen_from(graph, edge, node, parallelism)
    if edge.partitioning.kind is ExchangeKind.FORWARD and node.parallelism in (None, counts.get(edge.source)):
        return counts.get(edge.source, 0)
    return 0


def chosen_from(graph: Graph, edge: Edge, node: Node, parallelism: int | None) -> int:
    """Return how many subtasks an exchange before a node chooses from."""
    count = node.parallelism or parallelism
    if count is None and edge.partitioning.kind is ExchangeKind.CUSTOM:
        raise PipelineError(
            f"{graph.name}: operator '{node.name}' comes after partition_custom and needs set_parallelism(n), since the"
            " partitioner is asked for one of n partitions"
        )
    return count or 1


def carrying(graph: Graph, execution: Execution) -> tuple[int, ...]:
    """The nodes whose state is carried; raises `UnsupportedError` naming an operator whose state cannot be."""
    what = "a savepoint" if execution.has_savepoint else "carry_state"
    if execution.shuffle_mode == "ALL_EXCHANGES_PIPELINED":
        raise UnsupportedError(
            f"{graph.name}: {what} hands state on from stage to stage of two runs, and"
            " execution.batch-shuffle-mode=ALL_EXCHANGES_PIPELINED has no stages; remove the option"
        )
    for node in graph.nodes:
        if node.not_carried is not None:
            raise UnsupportedError(f"{graph.name}: {what} {node.not_carried}")
    return tuple(n.id for n in graph.nodes if n.carries_state)


def check_savepoint(graph: Graph) -> None:
    """Raise `UnsupportedError` naming an operator whose state no savepoint can hold."""
    for node in graph.nodes:
        if node.aggregates_natively:
            raise UnsupportedError(
                f"{graph.name}: a savepoint cannot hold the state of '{node.name}', which Catalyst aggregates with"
                " state.native-aggregates=SPARK; remove that, or use reduce or aggregate, or a window with a function"
            )
