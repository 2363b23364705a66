"""Shows a plan before anything runs: as text, as a Mermaid diagram, as JSON for tools.

Prints the very objects that the engines execute, and decides nothing itself.
"""

from __future__ import annotations

import json
from typing import Any

from dagster_unified.graph.nodes import Graph, Key
from dagster_unified.graph.plan import Plan, Region
from dagster_unified.graph.regions import Exchange


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
                "kind": n.kind,
                "describes": n.describe(),
                "output": n.records.describe() if n.records else None,
                "state": n.state(),
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
        "lint": [{"rule": f.rule, "severity": f.severity, "message": f.message} for f in plan.findings],
    }


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
            text = f"    {node.kind} '{node.name}'"
            if node.holds_subtask_state:
                text += " by subtask"
            elif node.key not in (None, Key()):
                text += f" by {node.key.describe()}"
            if node.describe():
                text += f": {node.describe()}"
            for held in node.state():
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
            left, right = _shape(graph, operator)
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


def _shape(graph: Graph, operator: int) -> tuple[str, str]:
    """Mermaid's brackets: round for what begins, a drum for what ends, a box for all between."""
    if not graph.inputs(operator):
        return "([", "])"
    return ("[", "]") if graph.outputs(operator) else ("[(", ")]")


def _escape(text: str) -> str:
    return text.replace('"', "#quot;").replace("<", "#lt;").replace(">", "#gt;")


def dumps(plan: Plan) -> str:
    """`as_json` as text."""
    return json.dumps(as_json(plan), indent=2)
