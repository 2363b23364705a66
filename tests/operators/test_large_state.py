"""Lists and maps of one key that outgrow their page: the same results, and a micro-batch that costs what it touches."""

from collections import defaultdict
from collections.abc import Iterable

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from dagster_unified.api import KeyedProcessFunction, ListStateDescriptor, MapStateDescriptor, ValueStateDescriptor
from dagster_unified.operators.state import chunks
from tests.operators.support import Memory, Row, process, ran

ACTIONS = ("add", "put", "remove", "clear list", "clear map", "replace list", "read")


class Collections(KeyedProcessFunction):
    """Does what a record's `at` says, with its amount; a timer shows everything at the end."""

    def open(self, context):
        self.items = context.get_list_state(ListStateDescriptor("items", int))
        self.by = context.get_map_state(MapStateDescriptor("by", int, Row))

    def process_element(self, value: Row, ctx) -> Iterable[str]:
        ctx.timer_service().register_event_time_timer(10_000)
        action = ACTIONS[value.at]
        if action == "add":
            self.items.add(value.amount)
        elif action == "put":
            self.by.put(value.amount, value)
        elif action == "remove":
            self.by.remove(value.amount)
        elif action == "clear list":
            self.items.clear()
        elif action == "clear map":
            self.by.clear()
        elif action == "replace list":
            self.items.update(range(value.amount))
        else:
            yield (
                f"{value.key} {value.amount} is {self.by.get(value.amount)} of {len(self.by.keys())} and"
                f" {self.items.get()}"
            )

    def on_timer(self, timestamp, ctx) -> Iterable[str]:
        yield f"{ctx.get_current_key()} {self.items.get()} {sorted(self.by.items())} {self.by.is_empty()}"


@pytest.fixture
def small_parts(monkeypatch):
    monkeypatch.setattr(chunks, "ENTRIES_PER_CHUNK", 2)


steps = st.lists(
    st.builds(Row, st.sampled_from("ab"), st.integers(0, len(ACTIONS) - 1), st.integers(0, 12)), max_size=60
)


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(steps, st.integers(1, 7))
def test_parts_change_nothing(monkeypatch, records, size):
    monkeypatch.setattr(chunks, "ENTRIES_PER_CHUNK", 1 << 30)
    expected = ran(process(Collections()), [(records, None)])
    monkeypatch.setattr(chunks, "ENTRIES_PER_CHUNK", 2)
    stores = defaultdict(Memory)
    cut = [(records[i : i + size], None) for i in range(0, len(records), size)]
    found = ran(process(Collections()), cut, stores=stores)
    found += ran(process(Collections()), [([], 20_000)], stores=stores)
    per_key = lambda lines: {key: [line for line in lines if line[0] == key] for key in "ab"}  # noqa: E731
    assert per_key(found) == per_key(expected)


def test_a_hot_key_costs_what_a_micro_batch_touches(monkeypatch):
    monkeypatch.setattr(chunks, "ENTRIES_PER_CHUNK", 100)
    stores = defaultdict(Memory)
    step, put, add = process(Collections()), ACTIONS.index("put"), ACTIONS.index("add")
    ran(
        step,
        [([Row("a", put, i) for i in range(5000)] + [Row("a", add, i) for i in range(5000)], None)],
        groups=1,
        stores=stores,
    )
    store = stores[0]
    assert len(store.pages) > 100
    store.read.clear()
    store.written.clear()
    ran(
        step,
        [([Row("a", put, 7), Row("a", put, 9_999)] + [Row("a", add, i) for i in range(150)], None)],
        groups=1,
        stores=stores,
    )
    assert len(store.read) <= 2
    assert len(store.written) <= 4


def test_what_is_cleared_leaves_no_parts_behind(small_parts):
    stores = defaultdict(Memory)
    step = process(Collections())
    ran(
        step,
        [([Row("a", ACTIONS.index(what), i) for i in range(20) for what in ("put", "add")], None)],
        groups=1,
        stores=stores,
    )
    assert len(stores[0].pages) > 10
    ran(
        step,
        [([Row("a", ACTIONS.index("clear map"), 0), Row("a", ACTIONS.index("clear list"), 0)], None)],
        groups=1,
        stores=stores,
    )
    assert not stores[0].pages


class Counting(KeyedProcessFunction):
    """A version of the program that has other state, and declares the list only when it needs it."""

    def open(self, context):
        self.context = context
        self.count = context.get_state(ValueStateDescriptor("count", int))

    def process_element(self, value: Row, ctx) -> Iterable[str]:
        self.count.update((self.count.value() or 0) + 1)
        if value.amount == 0:
            yield f"{self.count.value()} {self.context.get_list_state(ListStateDescriptor('items', int)).get()}"


def test_large_state_that_is_declared_late_is_kept_and_read(small_parts):
    stores = defaultdict(Memory)
    ran(
        process(Collections()),
        [([Row("a", ACTIONS.index(what), i) for i in range(9) for what in ("add", "put")], None)],
        groups=1,
        stores=stores,
    )
    ran(process(Counting()), [([Row("a", 0, 1)], None)], groups=1, stores=stores)
    assert ran(process(Counting()), [([Row("a", 0, 0)], None)], groups=1, stores=stores) == [
        "2 [0, 1, 2, 3, 4, 5, 6, 7, 8]"
    ]
    assert ran(process(Collections()), [([Row("a", ACTIONS.index("read"), 3)], None)], groups=1, stores=stores) == [
        f"a 3 is {Row('a', ACTIONS.index('put'), 3)} of 9 and [0, 1, 2, 3, 4, 5, 6, 7, 8]"
    ]
