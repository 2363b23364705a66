"""Pipelined regions of a task graph (FLIP-119).

Knows the logical graph only. A region is the unit that is scheduled, retried and recovered together: tasks joined by
pipelined exchanges; regions with a cycle between them are merged, since neither could run first
(Flink: `PipelinedRegionComputeUtil`).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Set
from dataclasses import dataclass, replace

from dagster_unified.graph.chaining import Task
from dagster_unified.graph.nodes import Edge, ExchangeKind, Graph

POINTWISE = (ExchangeKind.FORWARD, ExchangeKind.RESCALE)


@dataclass(frozen=True)
class Exchange:
    """An edge between two tasks, and whether it is a barrier."""

    edge: Edge
    source: int
    target: int
    blocking: bool
    reason: str

    @property
    def kind(self) -> ExchangeKind:
        """How records travel."""
        return self.edge.partitioning.kind


def exchanges(graph: Graph, tasks: tuple[Task, ...], shuffle_mode: str) -> tuple[Exchange, ...]:
    """The edges between tasks, each with the reason why it is a barrier or not."""
    task_of = {operator: task.id for task in tasks for operator in task.operators}
    found: list[Exchange] = []
    for edge in graph.edges:
        source, target = task_of[edge.source], task_of[edge.target]
        if source != target:
            blocking, reason = _blocking(edge, shuffle_mode)
            found.append(Exchange(edge, source, target, blocking, reason))
    return tuple(found)


def _blocking(edge: Edge, shuffle_mode: str) -> tuple[bool, str]:
    kind = edge.partitioning.kind
    if shuffle_mode == "ALL_EXCHANGES_PIPELINED":
        return False, "all exchanges are pipelined"
    if shuffle_mode == "ALL_EDGES_BLOCKING":
        return True, "all edges between tasks are blocking"
    if kind is ExchangeKind.FORWARD:
        return False, "a forward exchange stays inside its region"
    if kind in POINTWISE:
        if shuffle_mode == "POINTWISE_EXCHANGES_PIPELINED":
            return False, "pointwise exchanges are pipelined"
        return True, f"{kind.value} is not a forward exchange, and all others are blocking"
    return True, f"{kind.value} is all-to-all: its consumer needs every producer's output"


def behind_barriers(found: Iterable[Exchange], tasks: Set[int]) -> Iterator[Exchange]:
    """The exchanges, of which those among some tasks are barriers."""
    for exchange in found:
        if exchange.source in tasks and exchange.target in tasks and not exchange.blocking:
            reason = "state is handed on by the event time of all that has come, which only a stage before can tell"
            yield replace(exchange, blocking=True, reason=reason)
        else:
            yield exchange


def regions(
    count: int, pipelined: Iterable[tuple[int, int]], blocking: Iterable[tuple[int, int]]
) -> tuple[tuple[int, ...], ...]:
    """Groups tasks 0 … `count` - 1 into regions, in topological order.

    Each exchange is a (source, target) pair of tasks.
    """
    parent = list(range(count))

    def root(task: int) -> int:
        while parent[task] != task:
            parent[task] = parent[parent[task]]
            task = parent[task]
        return task

    for source, target in pipelined:
        parent[root(source)] = root(target)
    between = list(blocking)
    for component in _strongly_connected(count, [(root(s), root(t)) for s, t in between]):
        for task in component[1:]:
            parent[root(task)] = root(component[0])
    groups: dict[int, list[int]] = {}
    for task in range(count):
        groups.setdefault(root(task), []).append(task)
    return _topological(list(map(tuple, groups.values())), between)


def _strongly_connected(count: int, arcs: list[tuple[int, int]]) -> list[list[int]]:
    """Tarjan's algorithm, without recursion."""
    following: dict[int, list[int]] = {}
    for source, target in arcs:
        following.setdefault(source, []).append(target)
    index: dict[int, int] = {}
    low: dict[int, int] = {}
    stack: list[int] = []
    found: list[list[int]] = []
    for start in range(count):
        if start in index:
            continue
        work = [(start, iter(following.get(start, ())))]
        index[start] = low[start] = len(index)
        stack.append(start)
        while work:
            node, successors = work[-1]
            for successor in successors:
                if successor not in index:
                    index[successor] = low[successor] = len(index)
                    stack.append(successor)
                    work.append((successor, iter(following.get(successor, ()))))
                    break
                if successor in stack:
                    low[node] = min(low[node], index[successor])
            else:
                work.pop()
                if work:
                    low[work[-1][0]] = min(low[work[-1][0]], low[node])
                if low[node] == index[node]:
                    component: list[int] = []
                    while not component or component[-1] != node:
                        component.append(stack.pop())
                    found.append(component)
    return found


def _topological(groups: list[tuple[int, ...]], arcs: list[tuple[int, int]]) -> tuple[tuple[int, ...], ...]:
    group_of = {task: i for i, group in enumerate(groups) for task in group}
    needs: dict[int, set[int]] = {i: set() for i in range(len(groups))}
    for source, target in arcs:
        if group_of[source] != group_of[target]:
            needs[group_of[target]].add(group_of[source])
    done: list[int] = []
    while len(done) < len(groups):
        done.append(next(i for i in range(len(groups)) if i not in done and needs[i] <= set(done)))
    return tuple(groups[i] for i in done)
