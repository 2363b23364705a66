"""Shows the execution graph as text: vertices, and how records travel between them.

Prints the very objects that the engines execute, and decides nothing itself.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping

from dagster_unified.graph import nodes as g
from dagster_unified.graph.body import compiled
from dagster_unified.graph.execution_graph import (
    ExecutionEdge,
    ExecutionGraph,
    Runs,
    Vertex,
    channel_selector,
    channels,
)
from dagster_unified.graph.nodes import ExchangeKind
from dagster_unified.graph.plan import Plan, Port
from dagster_unified.graph.segments import segments
from dagster_unified.graph.subtasks import CHOOSING
from dagster_unified.graph.topology import Exchanged, Lanes, Native, Topology, laid_out
from dagster_unified.operators.program.spec import Program
from dagster_unified.operators.rounds.spec import BodyPass, Loop
from dagster_unified.operators.routing import Route, RoutedProgram


def as_physical(plan: Plan) -> str:
    """The execution graph of each stage, or in STREAMING of each query."""
    shown = _stages(plan) if plan.execution.mode == "BATCH" else _queries(plan)
    return "\n".join([f"{plan.name}: {plan.execution.mode}", *shown])


def _stages(plan: Plan) -> Iterator[str]:
    for region in plan.regions:
        yield from ("", f"stage '{region.name}'")
        yield from _indented(_vertices(ExecutionGraph.of(plan, region)))


def _vertices(graph: ExecutionGraph) -> Iterator[str]:
    plan, numbers = graph.plan, {vertex: number for number, vertex in enumerate(graph.vertices, 1)}
    for vertex, number in numbers.items():
        names = " → ".join(f"'{plan.graph.node(member).name}'" for member in vertex.members)
        yield f"vertex {number}, depth {vertex.depth}, {vertex.runs.value}: {names}"
        for edge in graph.edges[vertex.head]:
            yield f"  reads {_stream(plan, edge.port)} of {_origin(plan, edge, numbers)}: {_travels(plan, edge)}"
        node = plan.graph.node(vertex.head)
        if isinstance(node, g.IterationNode):
            yield from _indented(_loop(compiled(plan, node, node.parallelism or plan.execution.parallelism or 1)))


def _origin(plan: Plan, edge: ExecutionEdge, numbers: Mapping[Vertex, int]) -> str:
    if edge.source is not None:
        return f"vertex {numbers[edge.source]}"
    region = next((region for region in plan.regions if edge.edge.source in region.nodes), None)
    return "the operators with state" if region is None or len(plan.regions) == 1 else f"stage '{region.name}'"


def _travels(plan: Plan, edge: ExecutionEdge) -> str:
    """How the records of an edge travel, and the columns that do."""
    node = plan.graph.node(edge.edge.target)
    layout = plan.broadcast_layout(node.id) if edge.is_broadcast else plan.input_layout(node.id)
    text = str(edge.kind.value).lower()
    if edge.is_broadcast:
        text = "a copy to all"
    elif edge.kind in CHOOSING:
        selector = channel_selector(plan, edge.edge, channels(plan, edge.edge))
        text = text if selector is None else selector.describe()
    elif edge.kind is ExchangeKind.HASH and edge.target.runs is Runs.PYTHON and node.key is not None:
        text += ", sorted by key and time" if layout.timestamped else ", sorted by key"
    return f"{text} ({', '.join(layout.schema.names)})"


def _queries(plan: Plan) -> Iterator[str]:
    plans, lanes = segments(plan), Lanes()
    for query, topology in laid_out(plan, lanes, plans).items():
        yield from ("", f"query '{query.name}'")
        own = plans[query.segment]
        if topology is None:
            assert query.aggregate is not None
            upstream = tuple(sorted(own.upstream(query.aggregate)))
            yield from _indented(_vertices(ExecutionGraph(own, query.name, upstream)))
        else:
            yield from _indented(
                _topology(own, topology, {number: " ".join(name.split()) for name, number in lanes.numbers.items()})
            )


def _topology(plan: Plan, topology: Topology, names: Mapping[int, str]) -> Iterator[str]:
    for head in topology.heads:
        natives = "".join(f" → '{plan.graph.node(number).name}'" for number in head.native)
        yield f"source '{plan.graph.node(head.source).name}'{natives}"
        yield from _indented(_program(head.routed, names))
    yield from _between(plan, topology.between[0], names)
    stages = zip(topology.levels, topology.passes, topology.between[1:], strict=True)
    for number, (level, passes, between) in enumerate(stages, 1):
        for title, programs in (("state", level), ("pass behind state", passes)):
            for lane, program in programs.items():
                yield f"{title} {number}, lane {lane} '{names[lane]}'"
                yield from _indented(_program(program, names))
        yield from _between(plan, between, names)
    if topology.tail.nodes:
        yield "sinks, once per epoch"
        yield from _indented(_vertices(topology.tail))


def _between(plan: Plan, stages: Iterable[Native | Exchanged], names: Mapping[int, str]) -> Iterator[str]:
    for stage in stages:
        if isinstance(stage, Native):
            operators = " → ".join(f"'{plan.graph.node(number).name}'" for number in stage.nodes)
            yield f"Catalyst, lane {stage.lane}: {operators}"
            yield from _indented(_program(stage.routed, names))
            continue
        for lane, program in stage.programs.items():
            yield f"exchange into {stage.subtasks} subtasks, lane {lane} '{names[lane]}'"
            yield from _indented(_program(program, names))


def _program(routed: RoutedProgram, names: Mapping[int, str]) -> Iterator[str]:
    yield from _steps(routed.program)
    for number, routes in enumerate(routed.routes):
        for route in routes:
            yield f"{_output(routed.program, number)} → lane {route.target} '{names[route.target]}': {_way(route)}"


def _loop(loop: Loop) -> Iterator[str]:
    """The body of an iteration, level by level."""
    yield f"body on {loop.parallelism} subtask{'s' if loop.parallelism > 1 else ''}"
    for number, own in enumerate(loop.inputs):
        for route in own.routes:
            yield f"  input {number} → '{loop.buffers[route.target].reader}': {_way(route)}"
    for number, level in enumerate(loop.levels):
        yield f"  level {number}"
        for one in level.passes:
            yield f"    {one.driver.value} pass on {one.subtasks}" + (f", {one.groups} key groups" * (one.groups > 0))
            yield from _indented(_indented(_indented(_pass(loop, one))))


def _pass(loop: Loop, one: BodyPass) -> Iterator[str]:
    yield from _steps(one.program)
    for number, output in enumerate(one.outputs):
        name = _output(one.program, number)
        for route in output.routes:
            yield f"{name} → '{loop.buffers[route.target].reader}': {_way(route)}"
        if output.feedback:
            yield f"{name} → next round"
        if output.is_criteria:
            yield f"{name} → termination criteria"


def _steps(program: Program) -> Iterator[str]:
    if program.steps:
        yield "Python: " + ", ".join(f"'{step.name}'" for step in program.steps)


def _output(program: Program, number: int) -> str:
    output = program.outputs[number]
    name = "its input" if output.step < 0 else f"'{program.steps[output.step].name}'"
    return name + (f" / {output.tag}" if output.tag else "")


def _way(route: Route) -> str:
    return f"{route.describe()} ({', '.join(route.schema.names)})"


def _stream(plan: Plan, port: Port) -> str:
    return f"'{plan.graph.node(port.node).name}'" + (f" / {port.tag}" if port.tag else "")


def _indented(lines: Iterable[str]) -> Iterator[str]:
    return (f"  {line}" for line in lines)
