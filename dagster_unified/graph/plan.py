"""The plan: tasks, exchanges, regions and their names, decided once from the graph and the configuration.

The engines execute these very objects and `explain` prints them, so that what is explained is what runs.
"""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial

from dagster_unified.errors import PipelineError
from dagster_unified.graph.aggregates import with_local_global
from dagster_unified.graph.event_time import check_generators, nearest_assigners
from dagster_unified.graph.fingerprint import digest
from dagster_unified.graph.iterations import check_iterations
from dagster_unified.graph.lint import lint
from dagster_unified.graph.lowering.deciding import Lowering, lowering_of
from dagster_unified.graph.mode import Execution, resolve
from dagster_unified.graph.nodes import (
    Edge,
    Graph,
    KeyedProcessNode,
    Lineage,
    Naming,
    Node,
    Port,
    ReduceNode,
    SinkNode,
    SourceNode,
    WindowNode,
)
from dagster_unified.graph.nodes.base import Finding
from dagster_unified.graph.nodes.functions import AssignTimestampsNode, FusedNode
from dagster_unified.graph.nodes.graph import edge_parts, own_parts
from dagster_unified.graph.operator_state import carrying, check_savepoint, subtasks, subtasks_with_state
from dagster_unified.graph.options import Configuration
from dagster_unified.graph.regions import Exchange, Task, behind_barriers, exchanges, regions, resolve_forward, tasks
from dagster_unified.operators.layout import CARRIED, CARRIED_LAYOUT, ComputedKey, StreamLayout
from dagster_unified.version import library_version

_LONGEST = 100
"""Characters of a stage's name, which is a part of paths."""


@dataclass(frozen=True)
class Region:
    """Tasks that run as one Spark job: one stage, one Dagster asset."""

    id: int
    name: str
    tasks: tuple[int, ...]
    nodes: tuple[int, ...]
    inputs: tuple[int, ...]
    """The regions whose intermediates it reads."""
    outputs: tuple[Port, ...]
    """The streams that later regions read, in the order in which the intermediate holds them."""
    sinks: tuple[int, ...]
    fingerprint: str
    carried: tuple[Port, ...] = ()
    """The state that it hands on to the next partition's run, where state is carried."""


@dataclass(frozen=True, eq=False)
class Plan:
    """Everything that is decided before a run."""

    graph: Graph
    execution: Execution
    tasks: tuple[Task, ...]
    exchanges: tuple[Exchange, ...] = ()
    regions: tuple[Region, ...] = ()
    findings: tuple[Finding, ...] = ()

    @cached_property
    def name(self) -> str:
        """The pipeline's name."""
        return self.graph.name

    def connected(self, resources: Mapping[str, object]) -> Plan:
        """Return the same plan, whose sources and sinks connect by these resources; raises as `Graph.connected`."""
        return replace(self, graph=self.graph.connected(resources))

    @property
    def inputs(self) -> dict[int, tuple[int, ...]]:
        """For each region, the regions that it reads from."""
        return {r.id: r.inputs for r in self.regions}

    def region_of(self, node: int) -> Region:
        """Return the region that a node runs in."""
        return next(r for r in self.regions if node in r.nodes)

    def region(self, name: str) -> Region:
        """Return the region with this name."""
        return next(r for r in self.regions if r.name == name)

    def nodes_of(self, region: Region) -> list[Node]:
        """Return the nodes that run in a region."""
        return [self.graph.nodes[n] for n in region.nodes]

    @cached_property
    def task_of(self) -> dict[int, int]:
        """The task of each operator."""
        return {operator: task.id for task in self.tasks for operator in task.operators}

    @cached_property
    def subtasks(self) -> dict[int, int]:
        """How many subtasks there are, for each operator whose records are in subtasks that an exchange chose."""
        return subtasks(self.graph, self.execution.parallelism)

    def subtasks_with_state(self, node: Node) -> int | None:
        """By how many subtasks an operator keeps its state; None where it keeps it by key, or has none."""
        if not node.holds_subtask_state:
            return None
        return subtasks_with_state(self.graph, node, self.subtasks.get(node.id), self.execution)

    def subtasks_of_state(self, nodes: Iterable[Node]) -> dict[str, int]:
        """By how many subtasks those of some operators that have operator state keep it, by uid."""
        return {node.uid: count for node in nodes if (count := self.subtasks_with_state(node)) is not None}

    def code_of(self, region: Region) -> str:
        """A fingerprint of a region's code and of all that comes before it, whatever their sources hold just now."""
        nodes = sorted(self.graph.upstream(*region.nodes))
        return digest(*(digest(*own_parts(self.graph.nodes[n], with_input=False).values()) for n in nodes))

    def identifies_input(self, region: Region) -> bool:
        """Return whether a region's fingerprint changes with all that its sources hold."""
        nodes = self.graph.upstream(*region.nodes)
        return all(n.source.identifies_input() for n in self.graph.readers if n.id in nodes)

    def assigners_before(self, node: int) -> tuple[str, ...]:
        """Return the uids of the nearest timestamp assigners upstream of a node.

        Their last event time is the last of the node's input.
        """
        return self.assigners_of(self.graph.inputs(node))

    def assigners_of(self, edges: Sequence[Edge]) -> tuple[str, ...]:
        """Return the uids of the nearest timestamp assigners of what comes over some edges."""
        return tuple(n.uid for n in nearest_assigners(self.graph, edges))

    @cached_property
    def _computed_keys(self) -> dict[Port, tuple[ComputedKey, ...]]:
        """The keys that functions compute for the shuffles that each stream goes into."""
        keys: dict[Port, tuple[ComputedKey, ...]] = {}
        for edge in self.graph.edges:
            key, port = edge.partitioning.key, edge.port
            if key is not None and key.computed is not None and key.computed not in keys.get(port, ()):
                keys[port] = (*keys.get(port, ()), key.computed)
        return keys

    def layout(self, port: Port) -> StreamLayout:
        """Return the columns of a stream between operators that do not share a Python pass."""
        if port.tag == CARRIED:
            return CARRIED_LAYOUT
        layout = self._layouts.get(port)
        if layout is None:
            node = self.graph.nodes[port.node]
            records = self.graph.port_type(port.node, port.tag)
            if records is None:
                raise PipelineError(f"{self.name}: '{node.name}' has no output")
            keys = self._computed_keys.get(port, ())
            layout = self._layouts[port] = StreamLayout(records, node.timestamped, keys)
        return layout

    def input_layout(self, node: int) -> StreamLayout:
        """The columns of what reaches a node: its inputs united, with the computed key it is partitioned by, if any."""
        layout = self._input_layouts.get(node)
        if layout is None:
            united, key = self._united(self.graph.main_inputs(node)), self.graph.nodes[node].key
            computed = (key.computed,) if key is not None and key.computed is not None else ()
            layout = self._input_layouts[node] = replace(united, keys=computed)
        return layout

    def broadcast_layout(self, node: int) -> StreamLayout:
        """Return the columns of a node's broadcast stream."""
        return self._united(self.graph.broadcast_inputs(node))

    @cached_property
    def _layouts(self) -> dict[Port, StreamLayout]:
        return {}

    @cached_property
    def _input_layouts(self) -> dict[int, StreamLayout]:
        return {}

    def lowering(self, node: Node) -> Lowering | None:
        """How the function of an operator runs; None for an operator of another kind than those that are read."""
        folds = type(node) is ReduceNode or (
            type(node) is WindowNode and (node.function.reduce is not None or node.function.aggregate is not None)
        )
        is_process = type(node) is KeyedProcessNode
        if not isinstance(node, FusedNode) and not folds and not is_process:
            return None
        if node not in self._lowerings:
            found = lowering_of(node, self.input_layout(node.id).records, self.execution)
            if isinstance(node, ReduceNode) and found.fold is not None:
                found = self._folded(node, found)
            before = self._gives_records(node) if found.inlined is not None else None
            if before is not None:
                found = Lowering(why_not=f"'{before.name}' before it gives records one by one")
            self._lowerings[node] = None if is_process and found.fields is None else found
        return self._lowerings[node]

    def _folded(self, node: ReduceNode, lowering: Lowering) -> Lowering:
        """Return how a reduce runs: drivers that keep state fold updates, and the others what comes at the end."""
        keeps = self.execution.mode == "STREAMING" or any(p.node == node.id for r in self.regions for p in r.carried)
        if keeps and not self.execution.incremental_updates:
            return Lowering(why_not="its state goes on after the run")
        if not keeps and self.execution.incremental_updates:
            return Lowering(why_not="it emits a result for each record")
        return lowering

    def _gives_records(self, node: Node) -> Node | None:
        """Return the operator before a node, in its task, that leaves no columns; None where there is none."""
        for edge in self.graph.main_inputs(node.id):
            before = self.graph.nodes[edge.source]
            if before.step is None or self.task_of.get(before.id) != self.task_of.get(node.id):
                continue
            if isinstance(before, AssignTimestampsNode) and before.is_field:
                found = self._gives_records(before)
                if found is not None:
                    return found
                continue
            lowering = self.lowering(before)
            if lowering is None or lowering.inlined is None:
                return before
        return None

    @cached_property
    def _lowerings(self) -> dict[Node, Lowering | None]:
        return {}

    def _united(self, edges: Sequence[Edge]) -> StreamLayout:
        layouts = [self.layout(edge.port) for edge in edges]
        return StreamLayout(layouts[0].records, any(layout.timestamped for layout in layouts))


def plan(
    graph: Graph, configuration: Configuration | None = None, carry_state: bool = False, with_input: bool = True
) -> Plan:
    """Decide mode, tasks, exchanges and regions; raises where graph and configuration contradict each other.

    With `carry_state` the plan is that of a partition whose keyed state goes on to the next. Without `with_input` the
    fingerprints of the regions are of the code, and nobody looks at what the sources hold; so it is in STREAMING.
    """
    execution = resolve(graph, configuration or Configuration())
    whole = lint(graph, execution, carry_state)
    bare, numbers = _decided(graph, execution, carry_state)
    findings = tuple(replace(f, node=None if f.node is None else numbers.get(f.node)) for f in whole)
    graph, found_tasks = bare.graph, bare.tasks
    in_batch = execution.mode == "BATCH"
    carried = carrying(graph, execution) if carry_state or (in_batch and execution.has_savepoint) else ()
    found_exchanges = exchanges(graph, found_tasks, execution.shuffle_mode)
    groups = _grouped(found_tasks, found_exchanges)
    early = {task for group in groups if _begins_early(graph, found_tasks, group, carried) for task in group}
    if early:
        found_exchanges = tuple(behind_barriers(found_exchanges, early))
        groups = _grouped(found_tasks, found_exchanges)
    marking = partial(_fingerprint, graph, execution, with_input=with_input and in_batch)
    found_regions = _regions(graph, found_tasks, found_exchanges, groups, carried, marking)
    return replace(bare, exchanges=found_exchanges, regions=found_regions, findings=findings)


def plan_in_one(graph: Graph, configuration: Configuration | None = None) -> Plan:
    """Return the plan of what runs in one piece: mode and tasks, without regions and what else is only for them."""
    return _decided(graph, resolve(graph, configuration or Configuration()), False)[0]


def _decided(graph: Graph, execution: Execution, carry_state: bool) -> tuple[Plan, dict[int, int]]:
    """Return the mode and the tasks of a plan, and the numbers in it of the graph's nodes."""
    used = _used(graph)
    graph, rewritten = with_local_global(_without_unused(graph, used), execution, carry_state)
    if execution.mode == "STREAMING":
        check_iterations(graph, execution.goes_on)
        check_generators(graph)
    graph = resolve_forward(graph)
    if execution.has_savepoint:
        check_savepoint(graph)
    numbers = {old: rewritten[new] for old, new in used.items()}
    return Plan(graph, execution, tasks(graph, execution.chaining)), numbers


def _grouped(all_tasks: tuple[Task, ...], all_exchanges: tuple[Exchange, ...]) -> tuple[tuple[int, ...], ...]:
    return regions(
        len(all_tasks),
        [(e.source, e.target) for e in all_exchanges if not e.blocking],
        [(e.source, e.target) for e in all_exchanges if e.blocking],
    )


def _begins_early(
    graph: Graph, all_tasks: tuple[Task, ...], group: tuple[int, ...], carrying_nodes: tuple[int, ...]
) -> bool:
    """Return whether a region would hand on state before it knows how far event time has come.

    An operator with state ends a partition with the watermark of all that has come. The stages before it tell that,
    and its own cannot. Where a stream goes around the operator, the assigner is in the operator's own stage.
    """
    task_of = {node: task for task in group for node in all_tasks[task].operators}
    return any(
        assigner.id in task_of and task_of[assigner.id] != task_of[node]
        for node in carrying_nodes
        if node in task_of
        for assigner in nearest_assigners(graph, graph.inputs(node))
    )


def _used(graph: Graph) -> dict[int, int]:
    """Return the nodes that lead to a sink, with the numbers that they have in the plan."""
    needed = {n.id for n in graph.sinks}
    for node in reversed(graph.nodes):
        if any(e.source == node.id and e.target in needed for e in graph.edges):
            needed.add(node.id)
    return {old.id: new for new, old in enumerate(n for n in graph.nodes if n.id in needed)}


def _without_unused(graph: Graph, number: dict[int, int]) -> Graph:
    """Return the graph without what leads to no sink: it does not run."""
    nodes = tuple(replace(n, id=number[n.id]) for n in graph.nodes if n.id in number)
    edges = tuple(
        replace(e, source=number[e.source], target=number[e.target]) for e in graph.edges if e.target in number
    )
    return replace(graph, nodes=nodes, edges=edges)


def _regions(
    graph: Graph,
    all_tasks: tuple[Task, ...],
    all_exchanges: tuple[Exchange, ...],
    groups: tuple[tuple[int, ...], ...],
    carrying_nodes: tuple[int, ...],
    fingerprint: Callable[[tuple[int, ...], tuple[Port, ...], list[str]], str],
) -> tuple[Region, ...]:
    region_of = {task: i for i, group in enumerate(groups) for task in group}
    writing = {n.id for n in graph.sinks}
    names: list[str] = []
    regions: list[Region] = []
    for i, group in enumerate(groups):
        nodes = tuple(n for task in group for n in all_tasks[task].operators)
        leaving = [e for e in all_exchanges if e.blocking and region_of[e.source] == i != region_of[e.target]]
        entering = [e for e in all_exchanges if e.blocking and region_of[e.target] == i != region_of[e.source]]
        inputs = tuple(sorted({region_of[e.source] for e in entering}))
        outputs = tuple(dict.fromkeys(e.edge.port for e in leaving))
        sinks = tuple(n for n in nodes if n in writing)
        name = _stage_name(graph, nodes, outputs, sinks, names)
        names.append(name)
        carried = tuple(Port(n, CARRIED) for n in nodes if n in carrying_nodes)
        mark = fingerprint(nodes, outputs + carried, [regions[r].fingerprint for r in inputs])
        regions.append(Region(i, name, group, nodes, inputs, outputs, sinks, mark, carried))
    return tuple(regions)


def _stage_name(
    graph: Graph, nodes: tuple[int, ...], outputs: tuple[Port, ...], sinks: tuple[int, ...], taken: list[str]
) -> str:
    """Name a stage after the operator that says most of what leaves it, the last of equals.

    Candidates are on the way to its first output, or to its first sink. The author's name of an operator comes before
    that of a function, that of a source and the library's own word. Of equally good names, one that no stage has is
    taken.
    """
    on_the_way = _on_the_way(graph, nodes, outputs[0].node if outputs else sinks[0])
    sources = {_word(source.name) for source in graph.sources}
    named = [(node.naming, word) for node in on_the_way if (word := _word(_called(node, sources)))]
    best = max((naming for naming, _ in named), default=Naming.LIBRARY)
    words = [word for naming, word in reversed(named) if naming is best] or ["stage"]
    base = next((word for word in words if word not in taken), words[0])
    name, number = base, 1
    while name in taken:
        number += 1
        name = f"{base}_{number}"
    return name


def _called(node: Node, sources: Collection[str]) -> str:
    """Return a stage's name of an operator: its own, with the number of its uid behind that of a source's name.

    So its state, its stage and its asset are told from the source in one way. `sources` are the words of their names.
    """
    numbered = _word(node.name) in sources and not node.given_uid and not isinstance(node, SourceNode | SinkNode)
    return node.uid if numbered else node.name


def _word(name: str) -> str:
    """Return a name as stages have it, in paths and in Dagster's names: a word of ASCII, or '' where it has none."""
    letters = "".join(letter for letter in unicodedata.normalize("NFKD", name) if not unicodedata.combining(letter))
    return re.sub(r"\W+", "_", letters, flags=re.ASCII).strip("_").lower()[:_LONGEST].strip("_")


def _on_the_way(graph: Graph, nodes: tuple[int, ...], last: int) -> list[Node]:
    """Return an operator of a region and those of the region upstream of it, in the order of the program."""
    on_the_way, pending = {last}, [last]
    while pending:
        before = {e.source for e in graph.inputs(pending.pop())} & set(nodes) - on_the_way
        on_the_way |= before
        pending += before
    return [graph.nodes[n] for n in sorted(on_the_way)]


def _fingerprint(
    graph: Graph,
    execution: Execution,
    nodes: tuple[int, ...],
    outputs: tuple[Port, ...],
    upstream: list[str],
    with_input: bool,
) -> str:
    members = set(nodes)
    parts = [digest(*own_parts(graph.nodes[n], with_input).values()) for n in nodes]
    if not with_input:
        parts += [digest(n.source.settings()) for n in graph.readers if n.id in members]
    crossing = (edge for edge in graph.edges if edge.source in members or edge.target in members)
    edges = [digest(*edge_parts(edge).values()) for edge in crossing]
    return digest(library_version(), execution, *parts, *edges, *outputs, *upstream)


def column_lineage(plan: Plan, region: Region, node_id: int) -> Lineage | None:
    """Where the columns of a node's output come from, or None where that is not known."""
    node, edges = plan.graph.nodes[node_id], plan.graph.inputs(node_id)
    if node_id not in region.nodes or not edges:
        return {name: frozenset({(node_id, name)}) for name in node.records.names} if node.records else None
    if len(edges) != 1 or edges[0].tag is not None:
        return None
    before = column_lineage(plan, region, edges[0].source)
    return None if before is None else node.lineage(before)
