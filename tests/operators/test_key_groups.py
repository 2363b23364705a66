"""The STREAMING driver against the rules.

State outlives micro-batches, however the input is cut and keys are paged.
"""

import re
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import replace
from datetime import datetime, timedelta
from itertools import pairwise
from typing import NamedTuple

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dagster_unified.api import (
    KeyedProcessFunction,
    ListStateDescriptor,
    MapStateDescriptor,
    ReduceFunction,
    ReducingStateDescriptor,
    StateTtlConfig,
    ValueStateDescriptor,
)
from dagster_unified.errors import StateError
from dagster_unified.operators.drivers.key_groups import ControlEvent, GroupInput, KeyGroups, MicroBatch
from dagster_unified.operators.keyed import ReduceOperator
from dagster_unified.operators.keys import key_hash
from dagster_unified.operators.program.step import KeyedStep
from dagster_unified.operators.state.pages import BYTES_PER_PAGE, KEYS_PER_PAGE, decode_page, encode_page
from tests.operators.support import ROWS, TEXTS, Memory, Row, batch, process, program, ran


class Everything(KeyedProcessFunction):
    """Uses each kind of state, and a timer ten after every element."""

    requires_time_sorted_input = False

    def open(self, context):
        self.count = context.get_state(ValueStateDescriptor("count", int))
        self.seen = context.get_list_state(ListStateDescriptor("seen", int, StateTtlConfig(timedelta(days=9))))
        self.by = context.get_map_state(MapStateDescriptor("by", int, Row))
        self.total = context.get_reducing_state(ReducingStateDescriptor("total", lambda a, b: a + b, int))

    def process_element(self, value, ctx) -> Iterable[str]:
        self.count.update((self.count.value() or 0) + 1)
        self.seen.add(value.amount)
        self.by.put(value.amount % 3, value)
        self.total.add(value.amount)
        ctx.timer_service().register_event_time_timer(value.at + 10)
        yield f"{value.key} {self.count.value()} {self.total.get()}"

    def on_timer(self, timestamp, ctx) -> Iterable[str]:
        yield (
            f"{ctx.get_current_key()} at {timestamp}: {self.count.value()} {sorted(self.seen.get())}"
            f" {sorted(self.by.keys())}"
        )


class Sorted(Everything):
    requires_time_sorted_input = True


rows = st.lists(st.builds(Row, st.sampled_from("abcdefg"), st.integers(0, 60), st.integers(0, 9)), max_size=30)


def cut(records, cuts):
    points = sorted({0, len(records), *(c % (len(records) + 1) for c in cuts)})
    return [records[a:b] for a, b in pairwise(points)]


@given(rows, st.lists(st.integers(0, 30), max_size=5))
def test_cuts_and_restarts_change_nothing(records, cuts):
    assert sorted(ran(process(Everything()), [(part, None) for part in cut(records, cuts)])) == sorted(
        ran(process(Everything()), [(records, None)])
    )


@given(rows, st.lists(st.integers(0, 30), max_size=5), st.integers(0, 20))
def test_time_sorted_input_gives_the_same_whatever_the_watermarks(records, cuts, bound):
    ordered = sorted(records, key=lambda r: (r.at, r.key, r.amount))
    moved, seen = [], -1
    for part in cut(ordered, cuts):
        seen = max([seen, *(r.at for r in part)])
        moved.append((part, seen - bound - 1))
    assert sorted(ran(process(Sorted()), moved)) == sorted(ran(process(Sorted()), [(ordered, None)]))


@given(rows, st.lists(st.integers(0, 30), max_size=5), st.sampled_from([1, 2, 32]))
def test_keys_are_found_again_however_many_pages_and_blocks_they_fill(records, cuts, keys_per_page):
    parts = [(part, None) for part in cut(records, cuts)]
    for function in (Everything, Sorted):
        expected = sorted(ran(process(function()), [(records, None)]))
        assert sorted(ran(process(function()), parts, keys_per_page=keys_per_page)) == expected


def test_a_rolling_reduce_emits_per_record_or_per_micro_batch():
    step = KeyedStep(
        "op",
        lambda a, b: b._replace(amount=a.amount + b.amount),
        uid="op",
        output=ROWS.records,
        operator=ReduceOperator,
    )
    one, two, three = Row("a", 1, 1), Row("a", 2, 2), Row("a", 3, 4)
    assert [r.amount for r in ran(step, [([one, two], None), ([three], None)])] == [1, 3, 7]
    assert [r.amount for r in ran(step, [([one, two], None), ([three], None)], updates=False)] == [3, 7]


def test_timers_fire_as_the_watermark_passes_and_not_before():
    stores = defaultdict(Memory)
    assert ran(process(Everything()), [([Row("a", 1, 5)], 10)], stores=stores) == ["a 1 5"]
    assert ran(process(Everything()), [([], 11)], stores=stores) == ["a at 11: 1 [5] [2]"]
    assert ran(process(Everything()), [([], 99)], stores=stores) == []


def test_the_control_event_comes_before_the_records_behind_it_and_the_end_of_input_after_them():
    out = []
    driver = KeyGroups(
        program(process(Everything())),
        lambda number, b: out.extend((driver.before_event, text) for text in TEXTS.records.from_batch(b)),
        lambda: 0,
    )
    event = ControlEvent(watermarks={"op": 11}, end=True)
    given = MicroBatch(GroupInput([batch([Row("a", 1, 1)])]), event, GroupInput([batch([Row("a", 2, 2)])]))
    driver.run(Memory(), given)
    assert out == [(True, "a 1 1"), (True, "a at 11: 1 [1] [1]"), (False, "a 2 3"), (False, "a at 12: 2 [1, 2] [1, 2]")]


def test_a_batch_reads_and_writes_only_the_pages_it_touches():
    step = KeyedStep(
        "op",
        lambda a, b: b._replace(amount=a.amount + b.amount),
        uid="op",
        output=ROWS.records,
        operator=ReduceOperator,
    )
    store = defaultdict(Memory)
    ran(step, [([Row(f"k{i}", 1, 1) for i in range(200)], None)], groups=1, stores=store, keys_per_page=4)
    assert len(store[0].pages) == 64
    store[0].written.clear()
    assert [r.amount for r in ran(step, [([Row("k7", 2, 1)], None)], groups=1, stores=store, keys_per_page=4)] == [2]
    assert len(store[0].written) == 1


def added(a, b):
    return b._replace(amount=a.amount + b.amount)


@given(rows, st.lists(st.integers(0, 30), max_size=5), st.sampled_from([1, 2, 32, KEYS_PER_PAGE]))
def test_a_rolling_reduce_goes_on_whatever_its_pages_and_blocks(records, cuts, keys_per_page):
    step, stores = KeyedStep("op", added, uid="op", output=ROWS.records, operator=ReduceOperator), defaultdict(Memory)
    parts = [(part, None) for part in cut(records, cuts)]
    expected, totals = [], defaultdict(int)
    for row in records:
        totals[row.key] += row.amount
        expected.append(row._replace(amount=totals[row.key]))
    assert sorted(ran(step, parts, stores=stores, keys_per_page=keys_per_page)) == sorted(expected)
    driver = KeyGroups(program(step), lambda number, b: None, lambda: 0, keys_per_page=keys_per_page)
    kept = [content.content().keys for store in stores.values() for content in driver.contents(store)]
    assert {key: state["value"].amount for keys in kept for key, state in keys.items()} == dict(totals)


@given(rows, rows, st.integers(0, 20))
def test_state_in_a_column_and_in_dicts_is_the_same(first, second, watermark):
    """One that gives each key a dict, because it gathers a micro-batch, goes on from one that does not."""
    step, stores = KeyedStep("op", added, uid="op", output=ROWS.records, operator=ReduceOperator), defaultdict(Memory)
    ran(step, [(first, None)], stores=stores, keys_per_page=2)
    ran(step, [(second, watermark)], stores=stores, keys_per_page=2, updates=False)
    ran(step, [(first, watermark)], stores=stores, keys_per_page=2)
    totals = defaultdict(int)
    for row in [*first, *second, *first]:
        totals[row.key] += row.amount
    driver = KeyGroups(program(step), lambda number, b: None, lambda: 0, keys_per_page=2)
    kept = [content.content().keys for store in stores.values() for content in driver.contents(store)]
    assert {key: state["value"].amount for keys in kept for key, state in keys.items()} == dict(totals)


def test_of_a_page_only_the_blocks_that_a_batch_touches_are_decoded_and_encoded():
    step, stores = KeyedStep("op", added, uid="op", output=ROWS.records, operator=ReduceOperator), defaultdict(Memory)
    ran(step, [([Row(f"k{i}", 1, 1) for i in range(300)], None)], groups=1, stores=stores, keys_per_page=256)
    number = (key_hash("k7") >> 12) & 1
    page = decode_page(stores[0].pages[number])
    assert len(page.data) > 8
    mine = page.block_of(key_hash("k7"))
    unreadable = msgspec.Raw(msgspec.msgpack.encode("no block"))
    page.data = [data if block == mine else unreadable for block, data in enumerate(page.data)]
    stores[0].pages[number] = encode_page(page)
    again = ran(step, [([Row("k7", 2, 1)], None)], groups=1, stores=stores, keys_per_page=256)
    assert [r.amount for r in again] == [2]
    left = decode_page(stores[0].pages[number])
    assert [data == unreadable for data in left.data] == [block != mine for block in range(len(page.data))]
    with pytest.raises(msgspec.ValidationError):
        ran(step, [([Row(f"k{i}", 2, 1) for i in range(300)], None)], groups=1, stores=stores, keys_per_page=256)


def test_pages_of_many_bytes_are_split_and_one_large_key_does_not_split_them():
    step, stores = KeyedStep("op", added, uid="op", output=ROWS.records, operator=ReduceOperator), defaultdict(Memory)
    large = [Row("k" * 500 + str(i), 1, 1) for i in range(1000)]
    ran(step, [(large, None), (large[:1], None)], groups=1, stores=stores)
    assert len(stores[0].pages) == 8  # of 125 keys, where a page of 4,096 would have a megabyte
    assert max(map(len, stores[0].pages.values())) < 2 * BYTES_PER_PAGE
    assert {r.amount for r in ran(step, [(large[1:], None)], groups=1, stores=stores)} == {2}
    other = defaultdict(Memory)
    one = [Row("k" * 1_000_000, 1, 1), *(Row(str(i), 1, 1) for i in range(1000))]
    ran(step, [(one, None), (one, None)], groups=1, stores=other)
    assert not other[0].pages  # all in one page, which the index holds


def test_a_batch_that_changes_nothing_writes_nothing():
    step, stores = KeyedStep("op", max, uid="op", output=ROWS.records, operator=ReduceOperator), defaultdict(Memory)
    some = [Row(f"k{i}", 1, 1) for i in range(200)]
    ran(step, [(some, None)], groups=1, stores=stores, keys_per_page=4)
    stores[0].written.clear()
    before = stores[0].index
    ran(step, [(some, None)], groups=1, stores=stores, keys_per_page=4)
    assert (stores[0].written, stores[0].index) == ([], before)


def test_a_rolling_reduce_with_state_of_its_own_sees_that_of_its_key():
    class Counting(ReduceFunction):
        def open(self, runtime_context):
            self.count = runtime_context.get_state(ValueStateDescriptor("count", int))

        def reduce(self, value1, value2):
            self.count.update((self.count.value() or 0) + 1)
            return value2._replace(amount=self.count.value())

    step = KeyedStep("op", Counting(), uid="op", output=ROWS.records, operator=ReduceOperator)
    parts = [([Row("a", 1, 9), Row("a", 2, 9), Row("b", 1, 9), Row("b", 2, 9), Row("b", 3, 9)], None)] * 2
    found = ran(step, parts, groups=1)
    assert sorted((r.key, r.amount) for r in found) == sorted(
        [("a", 9), *(("a", n) for n in (1, 2, 3)), ("b", 9), *(("b", n) for n in (1, 2, 3, 4, 5))]
    )


class Pair(NamedTuple):
    a: int
    b: int


class Swapped(NamedTuple):
    b: int
    a: int


class Between(NamedTuple):
    a: int
    c: int = 9
    b: int = 0


class Longer(NamedTuple):
    a: int
    b: int
    c: int = 9


@pytest.mark.parametrize("late", [False, True])
@pytest.mark.parametrize(
    ("stored", "value", "declared", "found"),
    [
        (Pair, Pair(1, 2), Longer, Longer(1, 2, 9)),
        (Pair, Pair(1, 2), Swapped, "{a: int, b: int}, and {b: int, a: int} is declared"),
        (Pair, Pair(1, 2), Between, "{a: int, b: int}, and {a: int, c: int, b: int} is declared"),
        (list[Pair], [Pair(1, 2)], list[Swapped], r"list[{a: int, b: int}], and list[{b: int, a: int}] is declared"),
        (int, 2**53 + 1, float, "int, and float is declared"),
        (str, "2024-01-01T00:00:00Z", datetime, "str, and datetime is declared"),
        (int, 1, int | None, 1),
        (list[int], [1, 2], tuple[int, ...], (1, 2)),
    ],
)
def test_state_is_never_read_as_something_else(stored, value, declared, found, late):
    class Keeps(KeyedProcessFunction):
        def __init__(self, python):
            self.descriptor = ValueStateDescriptor("state", python)

        def open(self, context):
            self.context = context
            if not late:
                context.get_state(self.descriptor)

        def process_element(self, element, ctx) -> Iterable[str]:
            state = self.context.get_state(self.descriptor)
            seen.append(state.value())
            if seen == [None]:
                state.update(value)
            return ()

    seen: list[object] = []
    stores = defaultdict(Memory)
    ran(process(Keeps(stored)), [([Row("a", 1, 1)], None)], stores=stores)
    if isinstance(found, str):
        said = f"operator 'op': the type of state 'state' has changed: the checkpoint has {found}"
        with pytest.raises(StateError, match=re.escape(said)):
            ran(process(Keeps(declared)), [([Row("a", 1, 1)], None)], stores=stores)
    else:
        ran(process(Keeps(declared)), [([Row("a", 1, 1)], None)] * 2, stores=stores)
        assert seen == [None, found, found]


HOUR = StateTtlConfig(timedelta(hours=1))


@pytest.mark.parametrize(
    ("stored", "declared", "found"),
    [
        (("state", int), ("state", int, HOUR), "int, and int with a time to live is declared"),
        (("state", int, HOUR), ("state", tuple[int, int]), "int with a time to live, and tuple[int, int] is declared"),
        (("state", tuple[int, int]), ("state", int, HOUR), "tuple[int, int], and int with a time to live is declared"),
        (
            ("state", int, HOUR),
            ("state", str, HOUR),
            "int with a time to live, and str with a time to live is declared",
        ),
    ],
)
@pytest.mark.parametrize("kind", [ValueStateDescriptor, ListStateDescriptor])
def test_a_value_with_a_time_to_live_is_no_pair(kind, stored, declared, found):
    class Keeps(KeyedProcessFunction):
        def __init__(self, descriptor, value=None):
            self.descriptor, self.value = descriptor, value

        def open(self, context):
            self.state = (context.get_state if kind is ValueStateDescriptor else context.get_list_state)(
                self.descriptor
            )

        def process_element(self, element, ctx) -> Iterable[str]:
            (self.state.update if kind is ValueStateDescriptor else self.state.add)(self.value)
            return ()

    stores = defaultdict(Memory)
    ran(process(Keeps(kind(*stored), 1 if stored[1] is int else (1, 2))), [([Row("a", 1, 1)], None)], stores=stores)
    if kind is ListStateDescriptor:
        found = re.sub(r"(.*), and (.*) is declared", r"list[\1], and list[\2] is declared", found)
    with pytest.raises(
        StateError, match=re.escape(f"the type of state 'state' has changed: the checkpoint has {found}")
    ):
        ran(process(Keeps(kind(*declared))), [([Row("a", 1, 1)], None)], stores=stores)


def test_state_that_batch_has_left_says_when_it_was_renewed_and_does_not_expire_there():
    class Keeps(KeyedProcessFunction):
        def open(self, context):
            self.state = context.get_state(ValueStateDescriptor("state", int, HOUR))

        def process_element(self, element, ctx) -> Iterable[str]:
            yield str(self.state.value())
            self.state.update(element.amount)

    stores, seen = defaultdict(Memory), []
    hours = [(1, False), (4, False), (4.5, True), (6, True)]  # two partitions in BATCH, and a stream that goes on
    for number, (hour, expiry) in enumerate(hours):
        given = program(process(Keeps()))
        given = replace(given, options=replace(given.options, expiry=expiry))
        driver = KeyGroups(
            given, lambda _, b: seen.extend(TEXTS.records.from_batch(b)), lambda at=hour: int(at * 3600_000)
        )
        driver.run(stores[0], MicroBatch(GroupInput([batch([Row("a", 1, number)])]), ControlEvent()))
        driver.close()
    assert seen == ["None", "0", "1", "None"]


def test_state_that_is_no_longer_declared_is_kept():
    class Less(Everything):
        def open(self, context):
            self.count = context.get_state(ValueStateDescriptor("count", int))

        def process_element(self, value, ctx) -> Iterable[str]:
            yield f"{self.count.value()}"

    stores = defaultdict(Memory)
    ran(process(Everything()), [([Row("a", 1, 5)], None)], stores=stores)
    assert ran(process(Less()), [([Row("a", 2, 1)], None)], stores=stores) == ["1"]
    assert ran(process(Everything()), [([Row("a", 3, 1)], None)], stores=stores) == ["a 2 6"]


class Fleeting(KeyedProcessFunction):
    """Each kind of entry, for ten milliseconds."""

    def open(self, context):
        ttl = StateTtlConfig(timedelta(milliseconds=10))
        self.value = context.get_state(ValueStateDescriptor("value", int, ttl))
        self.list = context.get_list_state(ListStateDescriptor("list", int, ttl))
        self.map = context.get_map_state(MapStateDescriptor("map", int, int, ttl))

    def process_element(self, value, ctx) -> Iterable[str]:
        self.value.update(value.amount)
        self.list.add(value.amount)
        self.map.put(value.amount, value.amount)
        return []


def test_what_has_expired_goes_with_the_next_micro_batch_of_its_page():
    store, now = Memory(), [0]
    driver = KeyGroups(program(process(Fleeting())), lambda number, b: None, lambda: now[0])
    driver.run(store, MicroBatch(GroupInput([batch([Row("a", 0, 1)])])))
    assert [len(page.keys) for page in driver.contents(store)] == [1]
    now[0] = 5
    driver.run(store, MicroBatch(GroupInput([batch([Row("b", 0, 2)])])))
    now[0] = 10
    driver.run(store, MicroBatch(GroupInput([batch([Row("c", 0, 3)])])))
    assert [set(page.keys) for page in driver.contents(store)] == [{"b", "c"}]


def test_what_has_expired_goes_from_large_lists_and_maps_too():
    store, now = Memory(), [0]
    driver = KeyGroups(program(process(Fleeting())), lambda number, b: None, lambda: now[0])
    for moment in range(0, 60, 10):
        now[0] = moment
        driver.run(store, MicroBatch(GroupInput([batch([Row("a", 0, moment * 1000 + i) for i in range(1500)])])))
    (content,) = driver.contents(store)
    assert len(content.keys["a"]["map"]) == 1500
    assert len(content.keys["a"]["list"]) < 3000  # the last part of what has expired may have some that live
    assert len([n for n in store.pages if n < 0]) == len(content.chunks())  # and nothing of it is left in the store


def test_large_lists_of_keys_that_are_not_touched_are_not_read():
    store = Memory()
    driver = KeyGroups(program(process(Fleeting())), lambda number, b: None, lambda: 0)
    driver.run(store, MicroBatch(GroupInput([batch([Row("a", 0, i) for i in range(3000)])])))
    store.read.clear()
    driver.run(store, MicroBatch(GroupInput([batch([Row("b", 0, 1)])])))
    assert store.read == []
