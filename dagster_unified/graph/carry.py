"""Which operators hand state from one partition to the next, and which cannot (`carry_state`).

Knows the logical graph only.
"""

from __future__ import annotations

from dagster_unified.errors import UnsupportedError
from dagster_unified.graph.mode import Execution
from dagster_unified.graph.nodes import Graph


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
    """Raises `UnsupportedError` naming an operator whose state no savepoint can hold."""
    for node in graph.nodes:
        if node.aggregates_natively:
            raise UnsupportedError(
                f"{graph.name}: a savepoint cannot hold the state of '{node.name}', which Catalyst aggregates with"
                " state.native-aggregates=SPARK; remove that, or use reduce or aggregate, or a window with a function"
            )
