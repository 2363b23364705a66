"""Which operators hand state from one partition to the next, and which cannot (`carry_state`).

Knows the logical graph only.
"""

from __future__ import annotations

from dagster_unified.errors import UnsupportedError
from dagster_unified.graph.mode import Execution
from dagster_unified.graph.nodes import (
    AggregateNode,
    BroadcastNode,
    Graph,
    KeyedProcessNode,
    ReduceNode,
    WindowAggregateNode,
)
from dagster_unified.operators.windows.assigners import AlignedEventTimeWindows


def carrying(graph: Graph, execution: Execution) -> tuple[int, ...]:
    """The nodes whose state is carried; raises `UnsupportedError` naming an operator whose state cannot be."""
    if execution.shuffle_mode == "ALL_EXCHANGES_PIPELINED":
        raise UnsupportedError(
            f"{graph.name}: carry_state hands state on from stage to stage of two partitions, and"
            " execution.batch-shuffle-mode=ALL_EXCHANGES_PIPELINED has no stages; remove the option"
        )
    for node in graph.nodes:
        if isinstance(node, WindowAggregateNode) and not isinstance(node.assigner, AlignedEventTimeWindows):
            raise UnsupportedError(
                f"{graph.name}: carry_state cannot hand on the open sessions of '{node.name}', which Catalyst runs; use"
                " window(...).aggregate(...) or .reduce(...) with a function"
            )
        if isinstance(node, BroadcastNode):
            raise UnsupportedError(
                f"{graph.name}: carry_state cannot hand on the broadcast state of '{node.name}'; run it in STREAMING,"
                " or without carry_state"
            )
    return tuple(
        n.id for n in graph.nodes if isinstance(n, (KeyedProcessNode, ReduceNode, AggregateNode, WindowAggregateNode))
    )
