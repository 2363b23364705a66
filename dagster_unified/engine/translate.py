"""From the graph's nodes to the operators that run: the one dispatch table, for every driver.

Knows the graph and the operators; not Spark, so that the harness uses it with no JVM.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from dagster_unified.graph import nodes as g
from dagster_unified.graph.mode import Execution
from dagster_unified.graph.nodes import Edge, Key
from dagster_unified.graph.plan import Plan, Port
from dagster_unified.operators.keyed import KeyedOptions
from dagster_unified.operators.layout import StreamLayout, key_column
from dagster_unified.operators.program.spec import BroadcastInput, KeyedInput, Output, Program, Step
from dagster_unified.records import Decoder, RecordType, decoder

STEP_KINDS: dict[type[g.Node], str] = {
    g.MapNode: "map",
    g.FlatMapNode: "flat_map",
    g.FilterNode: "filter",
    g.MapBatchesNode: "map_batches",
    g.ProcessNode: "process",
    g.AsyncNode: "async",
    g.AssignTimestampsNode: "assign",
    g.KeyedProcessNode: "keyed_process",
    g.WindowNode: "window",
    g.BroadcastNode: "broadcast",
    g.ReduceNode: "reduce",
}
"""The nodes that run in Python, and the operators that run them."""


def runs_in_python(node: g.Node) -> bool:
    """Whether a node needs a Python worker. An assigner that reads a field does not by itself."""
    return type(node) in STEP_KINDS and not (
        isinstance(node, g.AssignTimestampsNode) and isinstance(node.assigner, str)
    )


def step(node: g.Node, parent: int, tag: str | None) -> Step:
    """The operator of one node."""
    function = getattr(node, "function", None)
    if isinstance(node, g.AssignTimestampsNode):
        assert node.records is not None
        function = (
            FieldTimestamp(node.records.getter(node.assigner)) if isinstance(node.assigner, str) else node.assigner
        )
        function = function if hasattr(function, "extract_timestamp") else CallableTimestamp(function)
    return Step(
        kind=STEP_KINDS[type(node)],
        name=node.name,
        function=function,
        uid=node.uid,
        parent=parent,
        tag=tag,
        output=None if isinstance(node, (g.FilterNode, g.AssignTimestampsNode)) else node.records,
        rolling=getattr(node, "rolling", None),
        parallelism=node.parallelism or 0,
    )


class CallableTimestamp:
    """A timestamp assigner from a function of the record."""

    def __init__(self, function: Any) -> None:
        self.function = function

    def extract_timestamp(self, value: Any, record_timestamp: int | None) -> Any:
        return self.function(value)


class FieldTimestamp:
    """A timestamp assigner that reads a field."""

    def __init__(self, get: Callable[[Any], Any]) -> None:
        self._get = get

    def extract_timestamp(self, value: Any, record_timestamp: int | None) -> Any:
        return self._get(value)


def keyed_options(execution: Execution, last_event_time: int | None) -> KeyedOptions:
    """The options of keyed operators."""
    return KeyedOptions(
        incremental_updates=execution.incremental_updates,
        processing_time=execution.processing_time,
        processing_time_at_end=execution.processing_time_at_end,
        end_of_input_chain=execution.end_of_input_chain,
        expiry=execution.mode == "STREAMING",
        last_event_time=last_event_time,
    )


def input_layout(plan: Plan, node: int) -> StreamLayout:
    """The columns of what reaches a node: its inputs united, with the computed key it is partitioned by, if any."""
    bare = _united(plan, plan.graph.main_inputs(node))
    key = getattr(plan.graph.node(node), "key", None)
    computed = (key.computed,) if key is not None and key.computed is not None else ()
    return StreamLayout(bare.records, bare.timestamped, computed)


def broadcast_layout(plan: Plan, node: int) -> StreamLayout:
    """The columns of a node's broadcast stream."""
    return _united(plan, plan.graph.broadcast_inputs(node))


def _united(plan: Plan, edges: Sequence[Edge]) -> StreamLayout:
    first = edges[0]
    records = plan.graph.port_type(first.source, first.tag.name if first.tag else None)
    assert records is not None
    return StreamLayout(records, any(plan.graph.node(e.source).timestamped for e in edges))


def keyed_input(node: g.KeyedNode, records: RecordType) -> KeyedInput:
    """How a keyed node's input, of these records, is keyed. A key of no fields is 0 for every record."""
    if node.key == Key():
        return KeyedInput((), int)
    computed = node.key.computed
    if computed is not None:
        return KeyedInput((key_column(0),), computed.python, decoder(computed.python))
    types = tuple(records.type_of(f) for f in node.key.fields)
    return KeyedInput(
        node.key.fields,
        types[0] if len(types) == 1 else tuple.__class_getitem__(types),
        _fields_decoder(node.key.fields, records),
    )


def _fields_decoder(fields: tuple[str, ...], records: RecordType) -> Decoder | None:
    """What turns a key as Arrow gives it into the record's own values; None where they are the same."""
    each = [records.decoder_of(f) for f in fields]
    if not any(each):
        return None
    if len(each) == 1:
        return each[0]
    return lambda key: tuple(
        value if decode is None else decode(value) for value, decode in zip(key, each, strict=True)
    )


def program(
    plan: Plan, stage: str, members: Sequence[int], outputs: Sequence[Port], last_event_time: int | None = None
) -> Program:
    """One pass for connected nodes, the head first; `outputs` are the streams that leave."""
    index = {node: i for i, node in enumerate(members)}
    steps = []
    for member in members:
        node = plan.graph.node(member)
        edge = plan.graph.main_inputs(member)[0]
        parent = index.get(edge.source, -1)
        steps.append(step(node, parent, edge.tag.name if edge.tag is not None and parent >= 0 else None))
    head = plan.graph.node(members[0])
    layout = input_layout(plan, members[0])
    return Program(
        pipeline=plan.name,
        stage=stage,
        input=layout,
        steps=tuple(steps),
        outputs=tuple(Output(index[p.node], plan.layout(p), p.tag) for p in outputs),
        keyed=keyed_input(head, layout.records) if isinstance(head, g.KeyedNode) else None,
        options=keyed_options(plan.execution, last_event_time),
        broadcast=BroadcastInput(broadcast_layout(plan, head.id)) if isinstance(head, g.BroadcastNode) else None,
    )
