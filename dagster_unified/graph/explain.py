"""Shows a plan before anything runs: as text, as a Mermaid diagram, as JSON for tools.

Prints the very objects that the engines execute, and decides nothing itself.
"""

from __future__ import annotations

import ast
import inspect
import json
import textwrap
from typing import Any

from dagster_unified.graph.code import authors
from dagster_unified.graph.nodes import (
    AssignTimestampsNode,
    BroadcastNode,
    KeyedNode,
    KeyedProcessNode,
    LookupNode,
    NativeKeyedNode,
    NativeNode,
    Node,
    ReduceNode,
    SinkNode,
    SourceNode,
    WindowAggregateNode,
    WindowNode,
)
from dagster_unified.graph.plan import Plan, Region
from dagster_unified.graph.regions import Exchange
from dagster_unified.operators.windows.operator import CONTENTS


def as_json(plan: Plan) -> dict[str, Any]:
    """The plan as plain data: tasks, exchanges, regions, state, findings."""
    graph, execution = plan.graph, plan.execution
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
        },
        "operators": [
            {
                "id": n.id,
                "uid": n.uid,
                "name": n.name,
                "kind": kind(n),
                "describes": describe(n),
                "output": n.records.describe() if n.records else None,
                "state": state(n),
                "parallelism": n.parallelism,
                "location": str(n.location) if n.location else None,
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
                "side_output": e.edge.tag.name if e.edge.tag else None,
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
        "lint": [{"rule": f.rule, "severity": f.severity, "message": f.message} for f in plan.findings],
    }


def kind(node: Node) -> str:
    """`map`, `keyed process`, `source`: what a node is, in words."""
    name = type(node).__name__.removesuffix("Node")
    return "".join(f" {c.lower()}" if c.isupper() else c for c in name).strip()


def describe(node: Node) -> str:
    """What a node does, beyond its name."""
    if isinstance(node, SourceNode):
        return f"{node.source.describe()}, {node.source.boundedness.value}"
    if isinstance(node, SinkNode):
        return f"{node.sink.describe()}, {node.sink.guarantee.value}"
    if isinstance(node, LookupNode):
        return (
            f"Catalyst: {', '.join(f'{a} = {b}' for a, b in node.on)} in"
            f" {node.source.describe()}{', inner' if node.inner else ''}"
        )
    if isinstance(node, (NativeNode, NativeKeyedNode)):
        windows = f" in {node.assigner.describe()}" if isinstance(node, WindowAggregateNode) else ""
        return "Catalyst: " + ", ".join(map(str, node.columns)) + windows
    if isinstance(node, ReduceNode) and node.rolling is not None:
        return f"{node.rolling[0]}({'' if node.rolling[1] is None else node.rolling[1]})"
    if isinstance(node, WindowNode):
        return str(node.function.describe())
    if isinstance(node, AssignTimestampsNode):
        bound = node.max_out_of_orderness_ms
        return "event time, no watermarks" if bound is None else f"event time, out of order by up to {bound} ms"
    return ""


def state(node: Node) -> list[dict[str, str]]:
    """The keyed state of an operator, as far as its code shows it."""
    if isinstance(node, NativeKeyedNode):
        return [{"name": "aggregates", "kind": "aggregating"}]
    if isinstance(node, ReduceNode):
        return [{"name": "value", "kind": "value"}]
    if isinstance(node, WindowNode):
        return [{"name": CONTENTS, "kind": "map"}]
    if not isinstance(node, KeyedProcessNode):
        return []
    found = []
    if isinstance(node, BroadcastNode):
        found += [{"name": d.name, "kind": "broadcast"} for d in node.function.descriptors]
    for call in (call for function in authors(node.function) for call in _calls(type(function))):
        name = (
            call.func.id
            if isinstance(call.func, ast.Name)
            else call.func.attr
            if isinstance(call.func, ast.Attribute)
            else ""
        )
        if name.endswith("StateDescriptor") and call.args and isinstance(call.args[0], ast.Constant):
            found.append({"name": str(call.args[0].value), "kind": name.removesuffix("StateDescriptor").lower()})
    return found


def _calls(cls: type) -> list[ast.Call]:
    try:
        tree = ast.parse(textwrap.dedent(inspect.getsource(cls)))
    except (OSError, TypeError, SyntaxError):
        return []
    return [n for n in ast.walk(tree) if isinstance(n, ast.Call)]


def as_text(plan: Plan) -> str:
    """The plan for people, stage by stage."""
    execution = plan.execution
    lines = [
        f"{plan.name}: {execution.mode} ({execution.boundedness.value})",
        (
            f"  {execution.schedule_mode}, {execution.shuffle_mode}, incremental updates"
            f" {'on' if execution.incremental_updates else 'off'}, processing time {execution.processing_time} and at"
            f" the end {execution.processing_time_at_end}"
        ),
    ]
    for region in plan.regions:
        lines += ["", *_region_text(plan, region)]
    if plan.findings:
        lines += ["", "lint"]
        lines += [f"  {f.severity}: {f.message} [{f.rule}]" for f in plan.findings]
    return "\n".join(lines)


def _region_text(plan: Plan, region: Region) -> list[str]:
    lines = [f"stage {region.id + 1} of {len(plan.regions)}: {region.name}"]
    for task_id in region.tasks:
        lines.append(f"  task {task_id + 1}")
        lines += [f"    {_exchange_text(plan, e)}" for e in plan.exchanges if e.target == task_id]
        for operator in plan.tasks[task_id].operators:
            node = plan.graph.node(operator)
            text = f"    {kind(node)} '{node.name}'"
            if isinstance(node, KeyedNode):
                text += f" by {node.key.describe()}"
            if describe(node):
                text += f": {describe(node)}"
            for held in state(node):
                text += f"; {held['kind']} state '{held['name']}'"
            if node.records is not None:
                text += f" → {node.records.describe()}"
            lines.append(text + (f"  ({node.location})" if node.location else ""))
    if region.outputs:
        lines.append(
            "  materializes "
            + ", ".join(plan.graph.node(p.node).name + (f" / {p.tag}" if p.tag else "") for p in region.outputs)
        )
    return lines


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
    """The plan as a Mermaid flowchart: a box per stage, thick arrows for barriers."""
    graph = plan.graph
    lines = ["flowchart LR"]
    for region in plan.regions:
        lines.append(f'  subgraph r{region.id}["{_escape(region.name)}"]')
        for operator in region.nodes:
            node = graph.node(operator)
            left, right = (
                ("([", "])")
                if isinstance(node, SourceNode)
                else ("[(", ")]")
                if isinstance(node, SinkNode)
                else ("[", "]")
            )
            lines.append(f'    n{operator}{left}"{_escape(node.name)}"{right}')
        lines.append("  end")
    crossing = {id(e.edge): e for e in plan.exchanges}
    for edge in graph.edges:
        exchange = crossing.get(id(edge))
        if exchange is None:
            lines.append(f"  n{edge.source} --> n{edge.target}")
            continue
        label = exchange.kind.value + (f" by {edge.partitioning.key.describe()}" if edge.partitioning.key else "")
        arrow = f'== "{_escape(label)}" ==>' if exchange.blocking else f'-- "{_escape(label)}" -->'
        lines.append(f"  n{edge.source} {arrow} n{edge.target}")
    return "\n".join(lines)


def _escape(text: str) -> str:
    return text.replace('"', "#quot;").replace("<", "#lt;").replace(">", "#gt;")


def dumps(plan: Plan) -> str:
    """`as_json` as text."""
    return json.dumps(as_json(plan), indent=2)
