"""Pages that are filled by column hold what pages hold that are filled key by key, each key in the same block."""

from collections.abc import Iterable
from unittest.mock import patch

import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dagster_unified.api import KeyedProcessFunction, ValueStateDescriptor
from dagster_unified.engine.state_tables import worker
from dagster_unified.operators.drivers.group import MemoryStore
from dagster_unified.operators.drivers.key_groups import KeyGroups
from dagster_unified.operators.keys import key_hash
from dagster_unified.operators.operator import INDEX
from dagster_unified.operators.state.pages import Columns, Content, decode_index, decode_page
from dagster_unified.operators.state.table import StateTable
from tests.operators.test_state_of_every_operator import Driving, Event


class Remember(KeyedProcessFunction):
    def open(self, context):
        self.value = context.get_state(ValueStateDescriptor("value", int))
        self.last = context.get_state(ValueStateDescriptor("last", Event))

    def process_element(self, value, ctx) -> Iterable[str]:
        self.value.update(value.value)
        return ()


KEYS = st.lists(
    st.tuples(st.integers(0, 1_000_000), st.lists(st.integers(0, 50), max_size=2, unique=True), st.booleans()),
    min_size=1,
    max_size=300,
    unique_by=lambda entry: entry[0],
)


@pytest.fixture(scope="module")
def payload():
    build = lambda _, first, __: first.key_by(lambda event: event.at, key_type=int).process(Remember())  # noqa: E731
    return Driving(build, None).payload


def content_of(entries, all_alike):
    held = Content()
    for key, timers, both in entries:
        held.keys[key] = {"value": key % 7} | ({"last": Event("a", key, 0, 1)} if both or all_alike else {})
        held.event_timers += [(at, key, 0) for at in timers]
        held.processing_timers += [(at + 1, key, 1) for at in timers[:1]]
    return held


def filled(payload, entries, all_alike):
    """The pages of one group: what it holds, by page and block, and whether any were filled by column."""
    by_column = []
    columns = StateTable.columns

    def seen(table, batch):
        found = columns(table, batch)
        by_column.append(found is not None)
        return found

    driver = KeyGroups(payload.load(), lambda *_: None, lambda: 0)
    (rows,) = driver.table().batches(content_of(entries, all_alike))
    slices = pa.Table.from_batches(worker.to_slices(payload, 1, False, [rows])).to_batches()
    with patch.object(StateTable, "columns", seen):
        made = pa.Table.from_batches(worker.to_pages(payload, rows.schema, 0, slices))
    store = MemoryStore(dict(zip(made["page"].to_pylist(), made["state"].to_pylist(), strict=True)))
    index = decode_index(store.read_page(INDEX))
    assert len(index.pages) == 1
    blocks = decode_page(index.inline)
    codec = driver.grouped.codec
    found = [codec.decode(data, store.read_page) for data in blocks.data]
    assert [entry.keys for entry in blocks.entries] == [len(block.keys) for block in found]
    for number, block in enumerate(found):
        assert {blocks.block_of(key_hash(key)) for key in block.keys} <= {number}
    return [(block.keys, sorted(block.event_timers), sorted(block.processing_timers)) for block in found], by_column


@given(entries=KEYS)
def test_pages_by_column_are_those_by_key(payload, entries):
    found, by_column = filled(payload, entries, all_alike=True)
    assert by_column == [True]
    with patch.object(StateTable, "columns", lambda *_: None):
        assert filled(payload, entries, all_alike=True)[0] == found


@given(entries=KEYS)
def test_keys_with_other_states_than_others_keep_theirs(payload, entries):
    found, _ = filled(payload, entries, all_alike=False)
    held = content_of(entries, all_alike=False)
    assert {key: state for keys, *_ in found for key, state in keys.items()} == held.keys
    assert sorted(timer for _, timers, _ in found for timer in timers) == sorted(held.event_timers)


def test_columns_are_cut_where_blocks_end():
    timers = [(5, "a", 0), (9, "c", 0), (3, "c", 0)]
    parts = Columns(("n",), ["a", "b", "c", "d"], [[1, 2, 3, 4]], event_timers=timers).cut([1, 1, 3, 4])
    assert [part.keys for part in parts] == [["a"], [], ["b", "c"], ["d"]]
    assert [part.values for part in parts] == [[[1]], [[]], [[2, 3]], [[4]]]
    assert [part.event_timers for part in parts] == [[(5, "a", 0)], [], [(9, "c", 0), (3, "c", 0)], []]
