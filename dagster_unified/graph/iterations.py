"""Iterations in a graph, and where the operators of a body run.

Knows the logical graph only.
"""

from __future__ import annotations

from dataclasses import replace

from dagster_unified.errors import PipelineError
from dagster_unified.graph.chaining import resolve_forward
from dagster_unified.graph.nodes import Chaining, ExchangeKind, Graph, HeadNode, IterationNode, Node


def check_no_iterations(graph: Graph) -> None:
    """Raises `PipelineError` where STREAMING would have to run an iteration."""
    node = next((n for n in graph.nodes if isinstance(n, IterationNode)), None)
    if node is not None:
        raise PipelineError(
            f"{graph.name}: iteration '{node.name}' runs in BATCH only; launch with execution.runtime-mode=BATCH and"
            " bounded sources"
        )


def body_on(node: IterationNode, parallelism: int) -> Graph:
    """The body of an iteration with so many subtasks: each operator has all of them, or one.

    One has an operator behind `global_()`, one that says so with `set_parallelism(1)`, and what is forwarded to it.
    """
    body = node.body
    nodes = tuple(_on(node, one, parallelism) for one in body.nodes)
    graph = resolve_forward(replace(body, nodes=nodes))
    nodes = tuple(replace(one, parallelism=one.parallelism or parallelism) for one in graph.nodes)
    return resolve_forward(replace(graph, nodes=nodes))


def _on(iteration: IterationNode, node: Node, parallelism: int) -> Node:
    if isinstance(node, HeadNode):
        return replace(node, parallelism=parallelism)
    edges = iteration.body.main_inputs(node.id)
    if any((edge.source in iteration.per_round) is not (node.id in iteration.per_round) for edge in edges):
        node = replace(node, chaining=Chaining.HEAD)  # a pass has one life cycle
    alone = bool(edges) and all(edge.partitioning.kind is ExchangeKind.GLOBAL for edge in edges)
    return replace(node, parallelism=1) if alone else node
