"""Operator state of several subtasks in one worker: each its own copy of the function, over days and over slices."""

from dataclasses import replace
from typing import NamedTuple

import msgspec
import pyarrow as pa
import pytest

from dagster_unified.api import CheckpointedFunction, ListStateDescriptor, MapFunction, Pipeline
from dagster_unified.graph import nodes as g
from dagster_unified.graph.execution_graph import keyed_program
from dagster_unified.operators.drivers import batch
from dagster_unified.operators.drivers.batch import GROUP, PAGE, STATE, run_batch
from dagster_unified.operators.drivers.key_groups import ControlEvent
from dagster_unified.operators.layout import CARRIED, CARRIED_LAYOUT, StreamLayout
from dagster_unified.operators.program.step import CarryOver, Output
from dagster_unified.operators.time import MIN_TIMESTAMP


class Row(NamedTuple):
    value: int


class Seen(NamedTuple):
    subtask: int
    value: int
    before: int
    """How many records its subtask had seen."""


class Counted(MapFunction[Row, Seen], CheckpointedFunction):
    def initialize_state(self, context):
        self.state = context.get_operator_state_store().get_list_state(ListStateDescriptor("values", int))
        self.values = self.state.get()

    def open(self, runtime_context):
        self.subtask = runtime_context.get_index_of_this_subtask()

    def snapshot_state(self, context):
        self.state.update(self.values)

    def map(self, value: Row) -> Seen:
        self.values.append(value.value)
        return Seen(self.subtask, value.value, len(self.values) - 1)


def program():
    pipeline = Pipeline("counted")
    pipeline.from_collection([], Row, "rows").map(Counted()).print()
    plan = pipeline.plan()
    (node,) = [node for node in plan.graph.nodes if isinstance(node, g.CheckpointedNode)]
    outputs = (Output(0, StreamLayout(node.records)), Output(0, CARRIED_LAYOUT, CARRIED))
    carry = (CarryOver(MIN_TIMESTAMP, msgspec.json.encode(ControlEvent())),)
    return replace(keyed_program(plan, node), outputs=outputs, carry=carry)


def day(rows, state=(), size=1000):
    """What a day's records of each subtask give, and the state that it leaves; `rows` are (subtask, value)."""
    shipped = program()
    records = [{"value": value, GROUP: subtask, PAGE: None, STATE: None} for subtask, value in rows]
    pages = [{"value": None, GROUP: s.group, PAGE: s.page, STATE: s.state} for s in state]
    ordered = sorted(pages + records, key=lambda r: (r[GROUP], r[PAGE] is None))
    schema = pa.schema([("value", pa.int64()), (GROUP, pa.int32()), (PAGE, pa.int64()), (STATE, pa.binary())])
    emitted, left = [], []
    for output, chunk, _ in run_batch(shipped, pa.Table.from_pylist(ordered, schema).to_batches(max_chunksize=size)):
        layout = shipped.outputs[output].layout
        (left if output == 1 else emitted).extend(layout.records.from_batch(chunk))
    return emitted, left


def test_each_subtask_goes_on_with_its_own_state():
    emitted, state = day([(0, 1), (2, 5), (2, 6)])
    assert emitted == [Seen(0, 1, 0), Seen(2, 5, 0), Seen(2, 6, 1)]
    emitted, state = day([(1, 8), (2, 7)], state)
    assert emitted == [Seen(1, 8, 0), Seen(2, 7, 2)]
    emitted, _ = day([(0, 2)], state)
    assert emitted == [Seen(0, 2, 1)]


@pytest.mark.parametrize("size", [1, 3, 1000])
def test_a_subtask_with_many_records_takes_them_in_slices_and_keeps_its_count(monkeypatch, size):
    monkeypatch.setattr(batch, "MOST_WAITING", 4)
    emitted, state = day([(0, n) for n in range(11)] + [(1, n) for n in range(5)], size=size)
    assert emitted == [Seen(0, n, n) for n in range(11)] + [Seen(1, n, n) for n in range(5)]
    assert day([(1, 9)], state)[0] == [Seen(1, 9, 5)]
