"""Operator state as rows of a savepoint, and as pages of another number of subtasks: what Spark's workers run."""

from typing import NamedTuple

import pyarrow as pa
import pytest

from dagster_unified.api import (
    ArrowListStateDescriptor,
    CheckpointedFunction,
    ListStateDescriptor,
    MapFunction,
    Pipeline,
)
from dagster_unified.engine.state_tables import worker
from dagster_unified.errors import StateError
from dagster_unified.graph import nodes as g
from dagster_unified.graph.execution_graph import keyed_program
from dagster_unified.operators.drivers.batch import rows_of
from dagster_unified.operators.state import chunks
from dagster_unified.records import record_type
from dagster_unified.state import Savepoint
from dagster_unified.testing import OneInputHarness
from dagster_unified.testing.operators import MemoryStore


class Item(NamedTuple):
    name: str
    amount: int


class Kept(MapFunction, CheckpointedFunction):
    item: type = Item

    def initialize_state(self, context):
        store = context.get_operator_state_store()
        self.items = store.get_list_state(ListStateDescriptor("items", self.item))
        self.seen = store.get_union_list_state(ListStateDescriptor("seen", int))
        if not context.is_restored():
            self.seen.add(-1)

    def snapshot_state(self, context):
        pass

    def map(self, value: Item) -> str:
        self.items.add(value)
        self.seen.add(value.amount)
        return f"{[item.amount for item in self.items]} {sorted(self.seen)}"


def payload(function):
    pipeline = Pipeline("kept")
    pipeline.from_collection([], Item, "items").map(function).print()
    plan = pipeline.plan({"execution.runtime-mode": "STREAMING"})
    (node,) = [node for node in plan.graph.nodes if isinstance(node, g.CheckpointedNode)]
    return worker.payload_of(keyed_program(plan, node))


def harness(snapshot=None):
    found = OneInputHarness(lambda items: items.map(Kept()), Item)
    if snapshot is not None:
        found.restore(snapshot)
    return found


def subtask(number, *items):
    """The pages of a subtask that has processed some items."""
    one = harness()
    for item in items:
        one.process_element(item)
    (pages,) = rows_of(number, MemoryStore(one.snapshot()))
    return pages


def rows(*pages):
    return list(worker.to_rows(payload(Kept()), pages))


def restored(batches, before, count):
    """What each subtask that starts with the rows of a savepoint answers to an item."""
    schema = batches[0].schema if batches else pa.schema([])
    pages = worker.to_subtasks(payload(Kept()), schema, before, count, batches)
    found = {}
    for batch in pages:
        numbers, places, data = (column.to_pylist() for column in batch.columns)
        one = harness(dict(zip(places, data, strict=True)))
        found[numbers[0]] = one.process_element(Item("new", 0))
    return found


def test_a_savepoint_has_a_row_for_each_subtask():
    found = pa.Table.from_batches(rows(subtask(0, Item("a", 1), Item("b", 2)), subtask(3, Item("c", 3))))
    assert found.select(["subtask", "items", "seen"]).to_pylist() == [
        {"subtask": 0, "items": [{"name": "a", "amount": 1}, {"name": "b", "amount": 2}], "seen": [-1, 1, 2]},
        {"subtask": 3, "items": [{"name": "c", "amount": 3}], "seen": [-1, 3]},
    ]
    roles = {field.name: field.metadata[b"role"] for field in found.schema if field.metadata}
    assert roles == {"subtask": b"key", "items": b"list", "seen": b"union"}


def test_as_many_subtasks_as_before_keep_their_lists_and_see_all_union_lists():
    saved = rows(subtask(0, Item("a", 1), Item("b", 2)), subtask(1, Item("c", 3)))
    assert restored(saved, 2, 2) == {0: ["[1, 2, 0] [-1, -1, 0, 1, 2, 3]"], 1: ["[3, 0] [-1, -1, 0, 1, 2, 3]"]}


@pytest.mark.parametrize("before", [2, 0])
def test_another_number_of_subtasks_share_the_elements_of_the_lists(before):
    saved = rows(subtask(0, Item("a", 1), Item("b", 2)), subtask(1, Item("c", 3)))
    union = "[-1, -1, 0, 1, 2, 3]"
    assert restored(saved, before, 1) == {0: [f"[1, 2, 3, 0] {union}"]}
    assert restored(saved, before, 4) == {n: [f"[{n + 1}, 0] {union}" if n < 3 else f"[0] {union}"] for n in range(4)}


class Own(Kept):
    """Puts only what it has seen itself into its state."""

    def initialize_state(self, context):
        super().initialize_state(context)
        self.known, self.mine = sorted(self.seen.get()), []

    def snapshot_state(self, context):
        self.seen.update(self.mine)

    def map(self, value: Item) -> str:
        self.mine.append(value.amount)
        return str(self.known)


def own(snapshot=None):
    found = OneInputHarness(lambda items: items.map(Own()), Item)
    if snapshot is not None:
        found.restore(snapshot)
    return found


def test_a_subtask_without_records_does_not_hand_on_the_union_list_that_it_was_given():
    first = own()
    first.process_element(Item("a", 1))
    first.process_element(Item("a", 2))
    saved = list(worker.to_rows(payload(Own()), rows_of(0, MemoryStore(first.snapshot()))))
    assert [row["seen"] for row in pa.Table.from_batches(saved).to_pylist()] == [[2]]
    pages = list(worker.to_subtasks(payload(Own()), saved[0].schema, 1, 3, saved))
    idle = pa.Table.from_batches(worker.to_rows(payload(Own()), pages)).to_pylist()
    assert [(row["subtask"], row["seen"]) for row in idle] == [(0, []), (1, []), (2, [])]
    one = own(dict(zip(pages[1].column("page").to_pylist(), pages[1].column("state").to_pylist(), strict=True)))
    assert one.process_element(Item("b", 7)) == ["[2]"]
    assert one.operator_state("seen") == [7]
    assert one.process_element(Item("b", 8)) == ["[7]"]


def test_a_list_that_is_large_is_saved_and_split_as_well(monkeypatch):
    monkeypatch.setattr(chunks, "ENTRIES_PER_CHUNK", 10)
    items = [Item("a", n) for n in range(60)]
    pages = subtask(0, *items[:30])
    assert pages.num_rows > 2
    saved = rows(pages, subtask(1, *items[30:]))
    (answer,) = restored(saved, 2, 1)[0]
    assert answer.partition("]")[0] == str([*range(60), 0])[:-1]


class InRows(MapFunction, CheckpointedFunction):
    """Keeps items as Arrow rows."""

    item: type = Item

    def initialize_state(self, context):
        store = context.get_operator_state_store()
        self.items = store.get_list_state(ArrowListStateDescriptor("items", self.item))

    def snapshot_state(self, context):
        pass

    def map(self, value: Item) -> str:
        self.items.add(record_type(Item).to_batch([value]))
        return str([tuple(row.values()) for row in self.items.get().to_pylist()])


def in_rows(snapshot=None):
    found = OneInputHarness(lambda items: items.map(InRows()), Item)
    if snapshot is not None:
        found.restore(snapshot)
    return found


def test_arrow_rows_are_records_in_a_savepoint_and_go_to_another_number_of_subtasks():
    groups = []
    for number, items in enumerate([[Item("a", 1), Item("b", 2)], [Item("c", 3)]]):
        one = in_rows()
        for item in items:
            one.process_element(item)
        groups += rows_of(number, MemoryStore(one.snapshot()))
    saved = list(worker.to_rows(payload(InRows()), groups))
    assert [row["items"] for row in pa.Table.from_batches(saved).to_pylist()] == [
        [{"name": "a", "amount": 1}, {"name": "b", "amount": 2}],
        [{"name": "c", "amount": 3}],
    ]
    (pages,) = worker.to_subtasks(payload(InRows()), saved[0].schema, 2, 1, saved)
    one = in_rows(dict(zip(pages["page"].to_pylist(), pages["state"].to_pylist(), strict=True)))
    assert one.process_element(Item("new", 0)) == ["[('a', 1), ('b', 2), ('c', 3), ('new', 0)]"]


class Amount(NamedTuple):
    name: str
    amount: str


class Changed(Kept):
    item = Amount


class OfText(InRows):
    item = Amount


def test_a_type_that_does_not_fit_is_an_error_before_anything_runs():
    (saved,) = rows(subtask(0, Item("a", 1)))
    given = [saved.schema]
    numbers = [pa.RecordBatch.from_pydict({"id": [0]})]
    with pytest.raises(StateError, match=r"operator 'Changed': state 'items' is declared list\[.*Amount\], and the"):
        list(worker.describe([payload(Changed())], given, numbers))
    with pytest.raises(StateError, match=r"operator 'OfText': state 'items' is declared Amount, and has rows of name"):
        list(worker.describe([payload(OfText())], given, numbers))


def test_a_table_of_subtasks_may_be_made_operator_state():
    pipeline = Pipeline("kept")
    pipeline.from_collection([], Item, "items").map(Kept()).uid("kept").print()
    items = pa.table({"subtask": [0], "items": [[{"name": "a", "amount": 1}]], "seen": [[1]]})
    made = Savepoint.new(pipeline).with_state("kept", items)
    assert made.operator("kept").key == ("subtask",)
    assert list(made.rows("kept")) == items.to_pylist()
    assert restored(made.keyed_state("kept").to_batches(), 0, 2) == {0: ["[1, 0] [0, 1]"], 1: ["[0] [0, 1]"]}


def test_what_was_read_keeps_its_roles_where_it_is_written_again():
    (saved,) = rows(subtask(0, Item("a", 1)))
    made = Savepoint.new("kept").with_state("kept", pa.Table.from_batches([saved]))
    assert [(column.name, column.role) for column in made.operator("kept").states] == [
        ("items", "list"),
        ("seen", "union"),
    ]
