"""Shows a plan before anything runs: as text, as JSON, as a Mermaid diagram, and as the execution graph."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from dagster_unified.graph import nodes as g
from dagster_unified.graph.execution_graph import (
    ExecutionEdge,
    ExecutionGraph,
    Runs,
    Vertex,
    channel_selector,
    channels,
)
from dagster_unified.graph.loops import compile_loop
from dagster_unified.graph.nodes import (
    Edge,
    ExchangeKind,
    Graph,
    HeadNode,
    IterationNode,
    Key,
    LifeCycle,
    Node,
    Port,
    Role,
    TailNode,
)
from dagster_unified.graph.operator_state import CHOOSING
from dagster_unified.graph.plan import Plan, Region
from dagster_unified.graph.queries import (
    MAIN,
    CrossQueryStream,
    KeyGroupQueryPlan,
    NativeQueryPlan,
    cross_query_streams,
    plan_queries,
    query_name,
    segment_of,
)
from dagster_unified.graph.regions import Exchange
from dagster_unified.graph.topology import Exchanged, Lanes, Native
from dagster_unified.operators.iteration import BodyPass, Loop
from dagster_unified.operators.program.step import Program
from dagster_unified.operators.routing import Route, RoutedProgram


def as_json(plan: Plan) -> dict[str, Any]:
    """Return the plan as plain data: tasks, exchanges, regions, state, findings."""
    graph, execution = plan.graph, plan.execution
    in_catalyst = {number for region in plan.regions for number in ExecutionGraph.of(plan, region).in_sql}
    return {
        "pipeline": plan.name,
        "mode": execution.mode,
        "boundedness": execution.boundedness.value,
        "options": {
            "execution.schedule-mode": execution.schedule_mode,
            "execution.batch-shuffle-mode": execution.shuffle_mode,
            "execution.incremental-updates": execution.incremental_updates,
            "pipeline.processing-time.allow": execution.processing_time,
            "pipeline.processing-time.end-of-input": execution.processing_time_at_end,
            "pipeline.event-time.end-of-input-chain": execution.end_of_input_chain,
            "parallelism.default": execution.parallelism,
            "pipeline.max-parallelism": execution.streaming.max_parallelism,
        },
        "operators": [
            {
                **_operator_json(n),
                **(
                    {"function": known.describe(n.id in in_catalyst)} if (known := plan.lowering(n)) is not None else {}
                ),
                "parallelism": n.parallelism,
                "location": str(n.location) if n.location else None,
                **({"body": _body_json(n)} if isinstance(n, IterationNode) else {}),
            }
            for n in graph.nodes
        ],
        "tasks": [
            {"id": t.id, "operators": list(t.operators), "names": [graph.node(o).name for o in t.operators]}
            for t in plan.tasks
        ],
        "exchanges": [
            {
                "from": e.source,
                "to": e.target,
                "kind": e.kind.value,
                "key": e.edge.partitioning.key.describe() if e.edge.partitioning.key else None,
                "side_output": e.edge.side_output,
                "blocking": e.blocking,
                "reason": e.reason,
            }
            for e in plan.exchanges
        ],
        "regions": [
            {
                "id": r.id,
                "name": r.name,
                "tasks": list(r.tasks),
                "reads": [plan.regions[i].name for i in r.inputs],
                "outputs": [plan.graph.node(p.node).name + (f" / {p.tag}" if p.tag else "") for p in r.outputs],
                "sinks": [graph.node(s).name for s in r.sinks],
                "fingerprint": r.fingerprint,
            }
            for r in plan.regions
        ],
        "queries": _queries_json(plan),
        "lint": [{"rule": f.rule, "severity": f.severity, "message": f.message} for f in plan.findings],
    }


def _queries_json(plan: Plan) -> list[dict[str, Any]]:
    """Return the queries into which STREAMING cuts a plan, behind its iterations."""
    return [
        {
            "name": name,
            "operators": members,
            "hands_on": [
                {
                    "from": stream.stream.node,
                    "side_output": stream.stream.tag,
                    "to": query_name(MAIN, stream.target),
                    "relay": stream.log,
                }
                for stream in streams
            ],
        }
        for name, members, streams in _queries(plan)
    ]


def _queries(plan: Plan) -> list[tuple[str, list[int], list[CrossQueryStream]]]:
    """Return the name of each query, its operators, and the streams that it writes for others; [] for one query."""
    if plan.execution.mode != "STREAMING":
        return []
    numbers, streams = segment_of(plan.graph), cross_query_streams(plan)
    last = max(numbers.values(), default=0)
    return [
        (
            query_name(MAIN, segment),
            [node for node, number in numbers.items() if number == segment],
            [stream for stream in streams if stream.source == segment],
        )
        for segment in range(last + 1 if last else 0)
    ]


def _operator_json(node: Node) -> dict[str, Any]:
    return {
        "id": node.id,
        "uid": node.uid,
        "name": node.name,
        "kind": node.kind,
        "describes": node.describe(),
        "output": node.records.describe() if node.records else None,
        "state": node.state(),
    }


def _body_json(node: IterationNode) -> dict[str, Any]:
    """Return the body of an iteration; its feedback edges lead from a stream that it returns to an input."""
    body = node.body
    return {
        "life_cycle": node.life_cycle.value,
        "operators": [{**_operator_json(n), "life_cycle": _life_cycle(node, n)} for n in body.nodes],
        "exchanges": [
            {"from": e.source, "to": e.target, "kind": e.partitioning.kind.value, "side_output": e.side_output}
            for e in body.edges
        ],
        "feedback": [{"from": tail.id, "to": head.id} for tail, head in _feedback(node)],
    }


def _feedback(node: IterationNode) -> list[tuple[TailNode, HeadNode]]:
    heads = {head.number: head for head in node.heads}
    return [(tail, heads[tail.number]) for tail in node.tails if tail.role is Role.FEEDBACK]


def _life_cycle(node: IterationNode, inside: Node) -> str | None:
    """Return how long an operator of a body lives; None for its ends."""
    if isinstance(inside, (HeadNode, TailNode)):
        return None
    cycle = LifeCycle.PER_ROUND if inside.id in node.per_round else LifeCycle.ALL_ROUND
    return str(cycle.value)


def as_text(plan: Plan) -> str:
    """Return the plan for people, stage by stage."""
    execution = plan.execution
    lines = [
        f"{plan.name}: {execution.mode} ({execution.boundedness.value})",
        (
            f"  {execution.schedule_mode}, {execution.shuffle_mode}, incremental updates"
            f" {'on' if execution.incremental_updates else 'off'}, processing time {execution.processing_time} and at"
            f" the end {execution.processing_time_at_end}"
        ),
        f"  {_parallelism_text(plan)}",
    ]
    for region in plan.regions:
        lines += ["", *_region_text(plan, region)]
    lines += _queries_text(plan)
    if plan.findings:
        lines += ["", "lint"]
        lines += [f"  {f.severity}: {f.message} [{f.rule}]" for f in plan.findings]
    return "\n".join(lines)


def _parallelism_text(plan: Plan) -> str:
    """Say how many tasks are behind exchanges, unless `spark.sql.shuffle.partitions` is set, and how many key groups.

    No session is there to be asked.
    """
    execution = plan.execution
    tasks = f"{execution.parallelism} tasks" if execution.parallelism else "two tasks for each core of the session"
    return f"exchanges into {tasks}" + (
        f", keyed state in {execution.streaming.max_parallelism} key groups" if execution.mode == "STREAMING" else ""
    )


def _region_text(plan: Plan, region: Region) -> list[str]:
    lines = [f"stage {region.id + 1} of {len(plan.regions)}: {region.name}"]
    in_catalyst = ExecutionGraph.of(plan, region).in_sql
    for task_id in region.tasks:
        lines.append(f"  task {task_id + 1}")
        lines += [f"    {_exchange_text(plan, e)}" for e in plan.exchanges if e.target == task_id]
        for operator in plan.tasks[task_id].operators:
            node = plan.graph.node(operator)
            text = f"    {node.kind} '{node.name}'"
            if node.holds_subtask_state:
                text += " by subtask"
            elif node.key not in (None, Key()):
                text += f" by {node.key.describe()}"
            if node.parallelism is not None and (plan.execution.mode == "BATCH" or node.id in plan.subtasks):
                text += f" on {node.parallelism} subtask{'s' if node.parallelism > 1 else ''}"
            if node.describe():
                text += f": {node.describe()}"
            for state in node.state():
                text += f"; {state['kind']} state '{state['name']}'"
            if node.records is not None:
                text += f" → {node.records.describe()}"
            lines.append(text + (f"  ({node.location})" if node.location else ""))
            lowering = plan.lowering(node)
            if lowering is not None:
                lines.append(f"      {lowering.describe(node.id in in_catalyst)}")
            if isinstance(node, IterationNode):
                lines += [f"      {line}" for line in _body_text(node)]
    if region.outputs:
        lines.append(
            "  materializes "
            + ", ".join(plan.graph.node(p.node).name + (f" / {p.tag}" if p.tag else "") for p in region.outputs)
        )
    return lines


def _queries_text(plan: Plan) -> list[str]:
    graph, lines = plan.graph, list[str]()
    for name, members, streams in _queries(plan):
        lines.append(f"  query '{name}': {', '.join(graph.node(n).name for n in members)}")
        for stream in streams:
            tag = f" / {stream.stream.tag}" if stream.stream.tag else ""
            to = f"query '{query_name(MAIN, stream.target)}'"
            lines.append(f"    hands on '{graph.node(stream.stream.node).name}'{tag} to {to} ({stream.log})")
    return ["", "queries, since state comes after an iteration", *lines] if lines else []


def _body_text(node: IterationNode) -> list[str]:
    """Show the body of an iteration: each operator with what it reads."""
    body, lines = node.body, []
    back = {head.id: tail for tail, head in _feedback(node)}
    for inside in body.nodes:
        reads = [_read_text(body, edge) for edge in body.inputs(inside.id)]
        if inside.id in back:
            reads.append(f"{back[inside.id].name} of the epoch before")
        text = f"{inside.kind} '{inside.name}'"
        if isinstance(inside, (HeadNode, TailNode)):
            text = f"'{inside.name}'"
        text += _in_rounds(node, inside)
        lines.append(text + (f" reads {' and '.join(reads)}" if reads else ""))
    return lines


def _in_rounds(node: IterationNode, inside: Node) -> str:
    """Say what an operator of a body does from epoch to epoch, where the others do not."""
    if isinstance(inside, HeadNode):
        return ", replayed in every epoch" if inside.replayed else ""
    is_new = inside.id in node.per_round and node.life_cycle is LifeCycle.ALL_ROUND
    return ", new in each epoch" if is_new else ""


def _read_text(body: Graph, edge: Edge) -> str:
    kind, key = edge.partitioning.kind, edge.partitioning.key
    through = (
        "" if kind is ExchangeKind.FORWARD else f" through {kind.value}" + (f" by {key.describe()}" if key else "")
    )
    tag = f" / {edge.side_output}" if edge.side_output else ""
    return f"'{body.node(edge.source).name}'{tag}{through}"


def _exchange_text(plan: Plan, exchange: Exchange) -> str:
    edge = exchange.edge
    key = f" by {edge.partitioning.key.describe()}" if edge.partitioning.key else ""
    tag = f" / {edge.tag.name}" if edge.tag else ""
    barrier = "a barrier: " if exchange.blocking else ""
    producer, consumer = plan.graph.node(edge.source).name, plan.graph.node(edge.target).name
    place = f"stage '{plan.region_of(edge.source).name}'" if exchange.blocking else f"task {exchange.source + 1}"
    return (
        f"'{consumer}' reads '{producer}'{tag} of {place} through {exchange.kind.value}{key}"
        f" ({barrier}{exchange.reason})"
    )


def as_mermaid(plan: Plan) -> str:
    """Return the plan as a Mermaid flowchart: a box per stage, thick arrows for barriers.

    Where STREAMING cuts it into queries, a box for each, and thick arrows for what one hands on to another.
    """
    graph = plan.graph
    lines = ["flowchart LR"]
    queries = {node: name for name, members, _ in _queries(plan) for node in members}
    for region in plan.regions:
        lines.append(f'  subgraph r{region.id}["{_escape(region.name)}"]')
        for number, name in enumerate(dict.fromkeys(queries[n] for n in region.nodes if queries)):
            members = [n for n in region.nodes if queries[n] == name]
            lines.append(f'    subgraph r{region.id}_{number}["query {name}"]')
            lines += [f"      {line}" for line in _operators_mermaid(graph, members)]
            lines.append("    end")
        if not queries:
            lines += [f"    {line}" for line in _operators_mermaid(graph, region.nodes)]
        lines.append("  end")
    crossing = {id(e.edge): e for e in plan.exchanges}
    for edge in graph.edges:
        exchange = crossing.get(id(edge))
        if queries and queries[edge.source] != queries[edge.target]:
            lines.append(f'  n{edge.source} == "handed on" ==> n{edge.target}')
            continue
        if exchange is None:
            lines.append(f"  n{edge.source} --> n{edge.target}")
            continue
        label = exchange.kind.value + (f" by {edge.partitioning.key.describe()}" if edge.partitioning.key else "")
        arrow = f'== "{_escape(label)}" ==>' if exchange.blocking else f'-- "{_escape(label)}" -->'
        lines.append(f"  n{edge.source} {arrow} n{edge.target}")
    return "\n".join(lines)


def _operators_mermaid(graph: Graph, operators: Iterable[int]) -> list[str]:
    lines = []
    for operator in operators:
        node = graph.node(operator)
        left, right = _shape(graph, operator)
        lines.append(f'n{operator}{left}"{_escape(node.name)}"{right}')
        if isinstance(node, IterationNode):
            lines += _body_mermaid(node)
    return lines


def _body_mermaid(node: IterationNode) -> list[str]:
    """Draw the body of an iteration as a box of its own, with dotted arrows for what is fed back."""
    body = node.body
    lines = [f'subgraph b{node.id}["body of {_escape(node.name)}, {node.life_cycle.value}"]']
    for inside in body.nodes:
        left, right = _shape(body, inside.id)
        lines.append(f'  b{node.id}_{inside.id}{left}"{_escape(inside.name)}{_in_rounds(node, inside)}"{right}')
    for edge in body.edges:
        kind, key = edge.partitioning.kind, edge.partitioning.key
        label = kind.value + (f" by {key.describe()}" if key else "")
        arrow = "-->" if kind is ExchangeKind.FORWARD else f'-- "{_escape(label)}" -->'
        lines.append(f"  b{node.id}_{edge.source} {arrow} b{node.id}_{edge.target}")
    lines += [f'  b{node.id}_{t.id} -. "next epoch" .-> b{node.id}_{h.id}' for t, h in _feedback(node)]
    return [*lines, "end", f"n{node.id} --- b{node.id}"]


def _shape(graph: Graph, operator: int) -> tuple[str, str]:
    """Return Mermaid's brackets: round for what begins, a drum for what ends, a box for all between."""
    if not graph.inputs(operator):
        return "([", "])"
    return ("[", "]") if graph.outputs(operator) else ("[(", ")]")


def _escape(text: str) -> str:
    return text.replace('"', "#quot;").replace("<", "#lt;").replace(">", "#gt;")


def dumps(plan: Plan) -> str:
    """`as_json` as text."""
    return json.dumps(as_json(plan), indent=2)


def physical(plan: Plan) -> str:
    """Return the execution graph of each stage, or in STREAMING of each query."""
    shown = _stages(plan) if plan.execution.mode == "BATCH" else _queries_of(plan)
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
            yield f"  reads {_stream(plan, edge.port)} of {_origin(plan, edge, numbers)}: {_travels(graph, edge)}"
        kept = graph.kept_rows(vertex.head)
        if kept is not None:
            yield f"  Spark leaves out rows for which this is false: {kept}"
        node = plan.graph.node(vertex.head)
        if isinstance(node, g.IterationNode):
            yield from _indented(_loop(compile_loop(plan, node, node.parallelism or plan.execution.parallelism or 1)))


def _origin(plan: Plan, edge: ExecutionEdge, numbers: Mapping[Vertex, int]) -> str:
    if edge.source is not None:
        return f"vertex {numbers[edge.source]}"
    region = next((region for region in plan.regions if edge.edge.source in region.nodes), None)
    return "the operators with state" if region is None or len(plan.regions) == 1 else f"stage '{region.name}'"


def _travels(graph: ExecutionGraph, edge: ExecutionEdge) -> str:
    """Say how the records of an edge travel, and which columns do."""
    plan = graph.plan
    node = plan.graph.node(edge.edge.target)
    layout = plan.broadcast_layout(node.id) if edge.is_broadcast else graph.input_layout(node.id)
    text = str(edge.kind.value).lower()
    if edge.is_broadcast:
        text = "a copy to all"
    elif edge.kind in CHOOSING:
        selector = channel_selector(plan, edge.edge, channels(plan, edge.edge))
        text = text if selector is None else selector.describe()
    elif edge.kind is ExchangeKind.HASH and edge.target.runs is Runs.PYTHON and node.key is not None:
        text += ", sorted by key and time" if layout.timestamped else ", sorted by key"
    return f"{text} ({', '.join(layout.schema.names)})"


def _queries_of(plan: Plan) -> Iterator[str]:
    lanes = Lanes()
    queries = plan_queries(plan, lanes)
    names = {number: " ".join(name.split()) for name, number in lanes.numbers.items()}
    for query in queries:
        yield from ("", f"query '{query.name}'")
        if isinstance(query, NativeQueryPlan):
            upstream = tuple(sorted(query.plan.graph.upstream(query.aggregate)))
            yield from _indented(_vertices(ExecutionGraph(query.plan, query.name, upstream)))
        elif isinstance(query, KeyGroupQueryPlan):
            yield from _indented(_topology(query, names))


def _topology(query: KeyGroupQueryPlan, names: Mapping[int, str]) -> Iterator[str]:
    plan, topology = query.plan, query.stages
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
    yield f"body on {loop.parallelism} subtask{'s' if loop.parallelism > 1 else ''}"
    for number, input_route in enumerate(loop.inputs):
        for route in input_route.routes:
            yield f"  input {number} → '{loop.buffers[route.target].reader}': {_way(route)}"
    for number, level in enumerate(loop.levels):
        yield f"  level {number}"
        for body_pass in level.passes:
            groups = f", {body_pass.groups} key groups" * (body_pass.groups > 0)
            yield f"    {body_pass.driver.value} pass on {body_pass.subtasks}{groups}"
            yield from _indented(_indented(_indented(_pass(loop, body_pass))))


def _pass(loop: Loop, body_pass: BodyPass) -> Iterator[str]:
    yield from _steps(body_pass.program)
    for number, output in enumerate(body_pass.outputs):
        name = _output(body_pass.program, number)
        for route in output.routes:
            yield f"{name} → '{loop.buffers[route.target].reader}': {_way(route)}"
        if output.feedback:
            yield f"{name} → next epoch"
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
