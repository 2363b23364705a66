"""From the graph's nodes to programs of the steps that they name, for every driver: what a vertex runs.

Knows the graph and the operators.
"""

from __future__ import annotations

from collections.abc import Sequence

from dagster_unified.graph import nodes as g
from dagster_unified.graph.mode import Execution
from dagster_unified.graph.nodes import Key
from dagster_unified.graph.plan import Plan, Port
from dagster_unified.operators.keys import KeyedInput
from dagster_unified.operators.layout import StreamLayout, key_column
from dagster_unified.operators.operator import KeyedOptions
from dagster_unified.operators.program.spec import BroadcastInput, Output, Program
from dagster_unified.operators.program.step import Step
from dagster_unified.records import Decoder, RecordType, decoder


def step(plan: Plan, node: g.Node, parent: int, tag: str | None) -> Step:
    """The step of one node that runs in Python."""
    assert node.step is not None
    return node.step(
        name=node.name,
        function=node.runnable,
        uid=node.uid,
        parent=parent,
        tag=tag,
        input=plan.input_layout(node.id).records,
        output=None if node.keeps_records else node.records,
        parallelism=_parallelism(plan, node),
        **node.step_arguments(),
    )


def _parallelism(plan: Plan, node: g.Node) -> int:
    """What a function learns of its operator's parallelism; 0 where Spark decides."""
    keeps = plan.execution.mode == "STREAMING" or plan.execution.has_savepoint
    return (plan.subtasks_with_state(node) if keeps else None) or node.parallelism or 0


def keyed_options(execution: Execution, last_event_time: int | None) -> KeyedOptions:
    """The options of keyed operators."""
    return KeyedOptions(
        incremental_updates=execution.incremental_updates,
        object_reuse=execution.object_reuse,
        processing_time=execution.processing_time,
        processing_time_at_end=execution.processing_time_at_end,
        end_of_input_chain=execution.end_of_input_chain,
        expiry=execution.mode == "STREAMING",
        last_event_time=last_event_time,
    )


def broadcast_input(plan: Plan, node: g.Node) -> BroadcastInput | None:
    """What a node is given besides its main input, if anything."""
    return BroadcastInput(plan.broadcast_layout(node.id)) if node.has_broadcast_input else None


def keyed_input(node: g.Node, records: RecordType) -> KeyedInput:
    """How a keyed node's input, of these records, is keyed. A key of no fields is 0 for every record."""
    assert node.key is not None
    return keyed_by(node.key, records)


def keyed_by(key: Key, records: RecordType) -> KeyedInput:
    """How a stream of these records is keyed."""
    if key == Key():
        return KeyedInput((), int)
    computed = key.computed
    if computed is not None:
        return KeyedInput((key_column(0),), computed.python, decoder(computed.python))
    types = tuple(records.type_of(f) for f in key.fields)
    return KeyedInput(
        key.fields,
        types[0] if len(types) == 1 else tuple.__class_getitem__(types),
        _fields_decoder(key.fields, records),
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


def keyed_program(plan: Plan, node: g.Node) -> Program:
    """One keyed operator alone, none of whose output goes anywhere."""
    layout = plan.input_layout(node.id)
    keyed, options = keyed_input(node, layout.records), keyed_options(plan.execution, None)
    own = (step(plan, node, -1, None),)
    return Program(plan.name, node.name, layout, own, (), keyed, options, broadcast_input(plan, node))


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
        steps.append(step(plan, node, parent, edge.tag.name if edge.tag is not None and parent >= 0 else None))
    head = plan.graph.node(members[0])
    layout = plan.input_layout(members[0])
    return Program(
        pipeline=plan.name,
        stage=stage,
        input=layout,
        steps=tuple(steps),
        outputs=tuple(Output(index[p.node], plan.layout(p), p.tag) for p in outputs),
        keyed=keyed_input(head, layout.records) if head.key is not None else None,
        options=keyed_options(plan.execution, last_event_time),
        broadcast=broadcast_input(plan, head),
        in_subtasks=head.id in plan.subtasks,
    )


def keys_program(plan: Plan, stage: str, layout: StreamLayout) -> Program:
    """A program of no operators, which adds the keys that functions compute."""
    bare = StreamLayout(layout.records, layout.timestamped)
    return Program(plan.name, stage, bare, (), (Output(-1, layout),))
