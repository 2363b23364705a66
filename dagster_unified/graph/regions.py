"""Tasks and pipelined regions: which operators are chained, what is one region (FLIP-119), and which run again."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Set
from dataclasses import dataclass, replace

from dagster_unified.errors import PipelineError
from dagster_unified.graph.nodes import Chaining, Edge, ExchangeKind, Graph, Partitioning


@dataclass(frozen=True)
class Task:
    """Operators chained together: the unit that Flink calls a task."""

    id: int
    operators: tuple[int, ...]

    @property
    def head(self) -> int:
        """The operator that reads the task's input."""
        return self.operators[0]


def resolve_forward(graph: Graph) -> Graph:
    """Make an exchange REBALANCE where parallelism changes and the author named no exchange.

    An explicit FORWARD is then an error. An operator without a parallelism of its own takes over that of the operator
    whose records are forwarded to it.
    """
    nodes = list(graph.nodes)
    for node in graph.nodes:
        forwarded = [
            nodes[e.source].parallelism
            for e in graph.edges
            if e.target == node.id and e.partitioning.kind is ExchangeKind.FORWARD
        ]
        if node.parallelism is None and len(set(forwarded)) == 1:
            nodes[node.id] = replace(node, parallelism=forwarded[0])
    graph = replace(graph, nodes=tuple(nodes))
    edges = []
    for edge in graph.edges:
        source, target = nodes[edge.source], nodes[edge.target]
        differs = target.parallelism is not None and None is not source.parallelism != target.parallelism
        if edge.partitioning.kind is ExchangeKind.FORWARD and differs:
            if edge.partitioning.explicit:
                raise PipelineError(
                    f"{graph.name}: forward() from '{source.name}' to '{target.name}' needs the same parallelism, but"
                    f" it goes from {source.parallelism} to {target.parallelism}; use rebalance() or rescale()"
                )
            edge = replace(edge, partitioning=Partitioning(ExchangeKind.REBALANCE))
        edges.append(edge)
    return replace(graph, edges=tuple(edges))


def chainable(graph: Graph, edge: Edge, enabled: bool) -> bool:
    """Return whether the two operators of an edge run in one task."""
    upstream, downstream = graph.nodes[edge.source], graph.nodes[edge.target]
    return (
        enabled
        and len(graph.inputs(edge.target)) == 1
        and edge.partitioning.kind is ExchangeKind.FORWARD
        and upstream.parallelism in (None, downstream.parallelism)
        and upstream.chaining is not Chaining.NEVER
        and downstream.chaining is Chaining.ALWAYS
    )


def tasks(graph: Graph, enabled: bool) -> tuple[Task, ...]:
    """Return the graph's tasks, in the order of their heads."""
    chained = {e.target: e.source for e in graph.edges if chainable(graph, e, enabled)}
    head = {n.id: n.id for n in graph.nodes}
    for node in graph.nodes:
        if node.id in chained:
            head[node.id] = head[chained[node.id]]
    chains: list[Task] = []
    for node in graph.nodes:
        if head[node.id] == node.id:
            chains.append(Task(len(chains), tuple(n.id for n in graph.nodes if head[n.id] == node.id)))
    return tuple(chains)


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
    """Return the edges between tasks, each with the reason why it is a barrier or not."""
    task_of = {operator: task.id for task in tasks for operator in task.operators}
    crossing: list[Exchange] = []
    for edge in graph.edges:
        source, target = task_of[edge.source], task_of[edge.target]
        if source != target:
            blocking, reason = _blocking(edge, shuffle_mode)
            crossing.append(Exchange(edge, source, target, blocking, reason))
    return tuple(crossing)


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


def behind_barriers(edges: Iterable[Exchange], tasks: Set[int]) -> Iterator[Exchange]:
    """Yield the exchanges; those among some tasks are barriers."""
    for exchange in edges:
        if exchange.source in tasks and exchange.target in tasks and not exchange.blocking:
            reason = "state is handed on by the event time of all that has come, which only a stage before can tell"
            yield replace(exchange, blocking=True, reason=reason)
        else:
            yield exchange


def regions(
    count: int, pipelined: Iterable[tuple[int, int]], blocking: Iterable[tuple[int, int]]
) -> tuple[tuple[int, ...], ...]:
    """Group tasks 0 … `count` - 1 into regions, in topological order.

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
    components: list[list[int]] = []
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
                    components.append(component)
    return components


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


def regions_to_restart(
    failed: int, inputs: Mapping[int, Collection[int]], available: Collection[int]
) -> tuple[int, ...]:
    """Return the regions to run again, upstream ones first.

    `inputs` gives for each region the regions that it reads from; `available` are the regions whose intermediates still
    stand.
    """
    restart: set[int] = set()
    pending = [failed]
    while pending:
        region = pending.pop()
        if region in restart:
            continue
        restart.add(region)
        pending += [producer for producer in inputs[region] if producer not in available]
        pending += [consumer for consumer, producers in inputs.items() if region in producers]
    return tuple(r for r in upstream_first(inputs) if r in restart)


def regions_to_recompute(
    wanted: int, inputs: Mapping[int, Collection[int]], available: Collection[int]
) -> tuple[int, ...]:
    """Return the ancestors to recompute before `wanted` can run.

    They are the part of `regions_to_restart` that lies upstream, upstream first.
    """
    ancestors: set[int] = set()
    pending = list(inputs[wanted])
    while pending:
        region = pending.pop()
        if region not in ancestors:
            ancestors.add(region)
            pending += inputs[region]
    return tuple(
        r
        for r in regions_to_restart(wanted, inputs, available)
        if r in ancestors and _needed(r, wanted, inputs, available)
    )


def _needed(region: int, wanted: int, inputs: Mapping[int, Collection[int]], available: Collection[int]) -> bool:
    """Return whether `region` is missing and lies on a path of missing intermediates to `wanted`."""
    if region in available:
        return False
    return any(
        consumer == wanted or _needed(consumer, wanted, inputs, available)
        for consumer, producers in inputs.items()
        if region in producers
    )


def upstream_first(inputs: Mapping[int, Collection[int]]) -> list[int]:
    """Return all regions, producers before consumers."""
    ordered: list[int] = []
    while len(ordered) < len(inputs):
        ordered += [r for r in inputs if r not in ordered and all(p in ordered for p in inputs[r])]
    return ordered


def releasable(inputs: Mapping[int, Collection[int]], finished: Collection[int]) -> frozenset[int]:
    """Return the regions whose intermediates nobody needs any more: finished, with consumers that have all finished.

    `inputs` gives for each region the regions that it reads from. A region without consumers has no intermediate.
    """
    consumers: dict[int, set[int]] = {}
    for region, producers in inputs.items():
        for producer in producers:
            consumers.setdefault(producer, set()).add(region)
    return frozenset(r for r, readers in consumers.items() if r in finished and readers <= set(finished))
