"""Iterations in a graph, and where the operators of a body run.

Knows the logical graph only.
"""

from __future__ import annotations

from dataclasses import replace

from dagster_unified.errors import UnsupportedError
from dagster_unified.graph.connectors import Boundedness
from dagster_unified.graph.nodes import (
    Chaining,
    ExchangeKind,
    FlatMapNode,
    Graph,
    HeadNode,
    IterationNode,
    Node,
    Role,
    TailNode,
)
from dagster_unified.graph.regions import resolve_forward
from dagster_unified.operators.functions.iterations import TerminateOnMaxIter


def check_iterations(graph: Graph, goes_on: bool) -> None:
    """Raise `UnsupportedError` where a bounded iteration would wait for ever: for an input that goes on.

    `goes_on` says that the end of the data is not the end of the input. A job has one end, that of all its sources.
    """
    waiting = next((n for n in graph.nodes if isinstance(n, IterationNode) and not n.is_unbounded), None)
    if goes_on and waiting is not None:
        raise UnsupportedError(
            f"{graph.name}: iteration '{waiting.name}' waits for the end of its input, and with"
            " execution.savepoint.path the job leaves its state before that; remove the option, or launch with"
            " execution.runtime-mode=BATCH"
        )
    endless = next((s for s in graph.sources if s.source.boundedness is Boundedness.UNBOUNDED), None)
    if endless is not None and waiting is not None:
        raise UnsupportedError(
            f"{graph.name}: iteration '{waiting.name}' waits for the end of the job's input, and source"
            f" '{endless.name}' has none; put the iteration into a pipeline of its own, or bound the source"
        )


def check_staleness(where: str, node: IterationNode) -> None:
    """Raise `UnsupportedError` where a subtask could not go on without the others, and the body has a staleness."""
    body = node.body
    for operator_node in body.nodes:
        operator = f"{where}, operator '{operator_node.name}'"
        if operator_node.id in node.per_round:
            raise UnsupportedError(
                f"{operator}: it lives for one epoch, which ends at another time in each subtask; keep what it needs"
                " in state, in an ALL_ROUND operator, or leave staleness out"
            )
        edges = body.inputs(operator_node.id)
        alone = operator_node.parallelism == 1 or any(edge.partitioning.kind is ExchangeKind.GLOBAL for edge in edges)
        inside = [edge for edge in edges if not isinstance(body.node(edge.source), HeadNode)]
        if alone or any(edge.partitioning.kind is not ExchangeKind.FORWARD for edge in inside):
            what = "has one subtask" if alone else "is sent records by other subtasks of the same epoch"
            raise UnsupportedError(
                f"{operator}: it {what}, for which each epoch waits for all; with a staleness records reach other"
                " subtasks over the feedback only: exchange the variable, as in variables[0].key_by(...), or leave"
                " staleness out"
            )
        if isinstance(operator_node, TailNode) and operator_node.role is Role.CRITERIA:
            before = body.node(inside[0].source) if inside else operator_node
            if not isinstance(before, FlatMapNode) or not isinstance(before.function, TerminateOnMaxIter):
                raise UnsupportedError(
                    f"{where}: its termination criteria '{before.name}' need what all subtasks did in an epoch; with a"
                    " staleness use flat_map(TerminateOnMaxIter(n)), or leave staleness out"
                )


def body_on(node: IterationNode, parallelism: int) -> Graph:
    """Return the body of an iteration with so many subtasks: each operator has all of them, or one.

    One has an operator behind `global_()`, one that says so with `set_parallelism(1)`, and what is forwarded to it.
    """
    body = node.body
    nodes = tuple(_on(node, member, parallelism) for member in body.nodes)
    graph = resolve_forward(replace(body, nodes=nodes))
    nodes = tuple(replace(member, parallelism=member.parallelism or parallelism) for member in graph.nodes)
    return resolve_forward(replace(graph, nodes=nodes))


def _on(iteration: IterationNode, node: Node, parallelism: int) -> Node:
    if isinstance(node, HeadNode):
        return replace(node, parallelism=parallelism)
    edges = iteration.body.main_inputs(node.id)
    if any((edge.source in iteration.per_round) is not (node.id in iteration.per_round) for edge in edges):
        node = replace(node, chaining=Chaining.HEAD)  # a pass has one life cycle
    alone = bool(edges) and all(edge.partitioning.kind is ExchangeKind.GLOBAL for edge in edges)
    return replace(node, parallelism=1) if alone else node
