"""Python passes: which operators of a plan one `mapInArrow`, or one task, runs together.

Knows the plan and programs; no Spark, so that the harness uses it with no JVM.
"""

from __future__ import annotations

from dataclasses import dataclass

from dagster_unified.engine.dataframe.fragment import Fragment
from dagster_unified.graph.nodes import ExchangeKind
from dagster_unified.graph.plan import Plan, Port
from dagster_unified.operators.layout import StreamLayout
from dagster_unified.operators.program.spec import Output, Program


@dataclass(frozen=True)
class Pass:
    """One Python pass: the operators in it, and the streams that leave it."""

    members: tuple[int, ...]
    outputs: tuple[Port, ...]


def find_passes(plan: Plan, fragment: Fragment) -> list[Pass]:
    """The Python passes of a fragment: Python operators of one task that follow each other one-to-one.

    An assigner that reads a field joins a pass, but does not begin one.
    """
    graph = plan.graph
    task_of = {o: t.id for t in plan.tasks for o in t.operators}
    groups: list[list[int]] = []
    for node_id in fragment.nodes:
        node, edges = graph.node(node_id), graph.inputs(node_id)
        before = None
        forwarded = len(edges) == 1 and edges[0].partitioning.kind is ExchangeKind.FORWARD
        if forwarded and task_of[edges[0].source] == task_of[node_id]:
            before = next((group for group in groups if edges[0].source in group), None)
        if before is not None and node.step is not None:
            before.append(node_id)
        elif node.needs_worker:
            groups.append([node_id])
    return [Pass(tuple(group), _leaving(plan, fragment, group)) for group in groups]


def _leaving(plan: Plan, fragment: Fragment, group: list[int]) -> tuple[Port, ...]:
    found = [Port.of(e) for e in plan.graph.edges if e.source in group and e.target not in group]
    return (*dict.fromkeys(found), *[p for p in fragment.carried if p.node in group])


def is_computed_again(plan: Plan, fragment: Fragment, one: Pass) -> bool:
    """Whether a pass would run once for each of several readers.

    Not so where all its streams leave the fragment, since what leaves is computed together.
    """
    carried = [p for p in fragment.carried if p.node in one.members]
    edges = [e for e in plan.graph.edges if e.source in one.members and e.target not in one.members]
    if len(carried) + len(edges) < 2:
        return False
    written = {Port.of(e) for s in fragment.sinks for e in plan.graph.inputs(s)}
    return not set(one.outputs) <= {*fragment.outputs, *fragment.carried, *written}


def keys_program(plan: Plan, stage: str, layout: StreamLayout) -> Program:
    """A program of no operators, which adds the keys that functions compute."""
    bare = StreamLayout(layout.records, layout.timestamped)
    return Program(plan.name, stage, bare, (), (Output(-1, layout),))
