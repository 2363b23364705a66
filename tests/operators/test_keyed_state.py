"""State of every kind under a time to live, and what clearing does."""

from collections.abc import Iterable
from datetime import timedelta

import pytest

from dagster_unified.api import (
    AggregateFunction,
    AggregatingStateDescriptor,
    KeyedProcessFunction,
    ListStateDescriptor,
    MapStateDescriptor,
    Pipeline,
    ReducingStateDescriptor,
    StateTtlConfig,
    StateVisibility,
    UpdateType,
    ValueStateDescriptor,
)
from dagster_unified.errors import PipelineError
from dagster_unified.testing import KeyedHarness, ManualClock, run_pipeline


class Total(AggregateFunction):
    def create_accumulator(self):
        return 0

    def add(self, value, accumulator):
        return accumulator + value

    def get_result(self, accumulator):
        return f"total {accumulator}"

    def merge(self, a, b):
        return a + b


def add(a, b):
    return a + b


KINDS = {
    "value": (
        lambda c, ttl: c.get_state(ValueStateDescriptor("s", int, ttl)),
        lambda s, v: s.update(v),
        lambda s: s.value(),
        1,
        None,
    ),
    "list": (
        lambda c, ttl: c.get_list_state(ListStateDescriptor("s", int, ttl)),
        lambda s, v: s.add(v),
        lambda s: s.get(),
        [1],
        [],
    ),
    "map": (
        lambda c, ttl: c.get_map_state(MapStateDescriptor("s", str, int, ttl)),
        lambda s, v: s.put("k", v),
        lambda s: s.items(),
        [("k", 1)],
        [],
    ),
    "reducing": (
        lambda c, ttl: c.get_reducing_state(ReducingStateDescriptor("s", add, int, ttl)),
        lambda s, v: s.add(v),
        lambda s: s.get(),
        1,
        None,
    ),
    "aggregating": (
        lambda c, ttl: c.get_aggregating_state(AggregatingStateDescriptor("s", Total(), int, ttl)),
        lambda s, v: s.add(v),
        lambda s: s.get(),
        "total 1",
        None,
    ),
}


class Keep(KeyedProcessFunction):
    """Writes a number, reads on 'read', forgets on 'clear'."""

    def __init__(self, kind, ttl=None):
        self.make, self.write, self.read = KINDS[kind][:3]
        self.ttl = ttl

    def open(self, context):
        self.state = self.make(context, self.ttl)

    def process_element(self, value, ctx):
        if value == "read":
            yield self.read(self.state)
        elif value == "clear":
            self.state.clear()
        else:
            self.write(self.state, value)


@pytest.mark.parametrize("kind", KINDS)
def test_cleared_state_is_as_if_never_written(kind):
    held, empty = KINDS[kind][3:]
    harness = KeyedHarness(Keep(kind))
    assert harness.element("a", "read") == [empty]
    harness.element("a", 1)
    assert harness.element("a", "read") == [held]
    harness.element("a", "clear")
    assert harness.element("a", "read") == [empty]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    ("update", "renewed"), [(UpdateType.ON_CREATE_AND_WRITE, False), (UpdateType.ON_READ_AND_WRITE, True)]
)
def test_an_entry_lives_for_its_time_and_a_read_renews_it_where_asked(kind, update, renewed):
    held, empty = KINDS[kind][3:]
    harness = KeyedHarness(Keep(kind, StateTtlConfig(timedelta(seconds=10), update)), clock := ManualClock())
    harness.element("a", 1)
    clock.advance(9_999)
    assert harness.element("a", "read") == [held]
    clock.advance(1)
    assert harness.element("a", "read") == [held if renewed else empty]
    clock.advance(10_000)
    assert harness.element("a", "read") == [empty]


@pytest.mark.parametrize("kind", ["list", "map"])
def test_every_entry_of_a_list_or_map_has_its_own_time_to_live(kind):
    function = Keep(kind, StateTtlConfig(timedelta(seconds=10)))
    function.write = (lambda s, v: s.put(str(v), v)) if kind == "map" else function.write
    harness = KeyedHarness(function, clock := ManualClock())
    harness.element("a", 1)
    clock.advance(6_000)
    harness.element("a", 2)
    clock.advance(6_000)
    assert harness.element("a", "read") == [[("2", 2)] if kind == "map" else [2]]


@pytest.mark.parametrize("kind", KINDS)
def test_an_expired_entry_is_given_once_more_where_that_is_asked_for(kind):
    held, empty = KINDS[kind][3:]
    harness = KeyedHarness(
        Keep(kind, StateTtlConfig(timedelta(seconds=10), visibility=StateVisibility.RETURN_EXPIRED_IF_NOT_CLEANED_UP)),
        clock := ManualClock(),
    )
    harness.element("a", 1)
    clock.advance(10_000)
    assert harness.element("a", "read") == [held]
    assert harness.element("a", "read") == [empty]


@pytest.mark.parametrize("kind", ["reducing", "aggregating"])
def test_nothing_is_combined_with_what_has_expired(kind):
    harness = KeyedHarness(
        Keep(kind, StateTtlConfig(timedelta(seconds=10), visibility=StateVisibility.RETURN_EXPIRED_IF_NOT_CLEANED_UP)),
        clock := ManualClock(),
    )
    harness.element("a", 5)
    clock.advance(10_000)
    harness.element("a", 1)
    assert harness.element("a", "read") == [KINDS[kind][3]]


@pytest.mark.parametrize("kind", KINDS)
def test_in_batch_nothing_expires_however_long_a_key_takes(kind):
    moments = iter(range(0, 10**9, 10**6))
    pipeline = Pipeline("p")
    # Both modes: two elements of one key, a thousand seconds apart by the clock.
    pipeline.from_collection([("a", "1"), ("a", "read")], tuple[str, str]).key_by(0).process(
        ReadLater(kind, StateTtlConfig(timedelta(seconds=10)))
    ).print("out")
    held, empty = KINDS[kind][3:]
    assert run_pipeline(pipeline, "BATCH", clock=lambda: next(moments)).only() == [repr(held)]
    assert run_pipeline(pipeline, "STREAMING", clock=lambda: next(moments)).only() == [repr(empty)]


class ReadLater(Keep):
    def process_element(self, value, ctx) -> Iterable[str]:
        if value[1] == "read":
            yield repr(self.read(self.state))
        else:
            self.write(self.state, int(value[1]))


LASTING = ValueStateDescriptor("lasting", int)
FLEETING = ValueStateDescriptor("fleeting", int, StateTtlConfig(timedelta(seconds=1)))


class Global(KeyedProcessFunction):
    def open(self, context):
        self.state = context.get_state(FLEETING)

    def process_element(self, value, ctx) -> Iterable[str]:
        return []


class Without(KeyedProcessFunction):
    def open(self, context):
        self.state = context.get_state(LASTING)

    def process_element(self, value, ctx) -> Iterable[str]:
        return []


@pytest.mark.parametrize(
    ("function", "warned"),
    [(Global(), True), (ReadLater("value", StateTtlConfig(timedelta(seconds=10))), True), (Without(), False)],
)
def test_the_lint_says_where_time_to_live_makes_modes_differ(function, warned):
    pipeline = Pipeline("p")
    pipeline.from_collection([("a", "1")], tuple[str, str]).key_by(0).process(function).print("out")
    found = [f.message for f in pipeline.plan().findings if f.rule == "expiry"]
    assert ["forget by event-time timers" in m for m in found] == [True] * warned


def test_reading_one_entry_of_a_map_does_not_renew_the_others():
    class Read(KeyedProcessFunction):
        def open(self, context):
            self.map = context.get_map_state(
                MapStateDescriptor("s", str, int, StateTtlConfig(timedelta(seconds=10), UpdateType.ON_READ_AND_WRITE))
            )

        def process_element(self, value, ctx):
            if value == "put":
                self.map.put_all({"x": 1, "y": 2})
            else:
                yield self.map.get(value)

    harness = KeyedHarness(Read(), clock := ManualClock())
    harness.element("a", "put")
    clock.advance(9_000)
    assert harness.element("a", "x") == [1]
    clock.advance(9_000)
    assert harness.element("a", "y") == [None]


def test_a_list_or_map_can_be_replaced_and_searched():
    class Many(KeyedProcessFunction):
        def open(self, context):
            self.list, self.map = (
                context.get_list_state(ListStateDescriptor("l", int)),
                context.get_map_state(MapStateDescriptor("m", str, int)),
            )

        def process_element(self, value, ctx):
            self.list.add_all([1, 2])
            self.list.update([3])
            self.map.put_all({"x": 1, "y": 2})
            self.map.remove("x")
            self.map.remove("z")
            yield (
                list(self.list),
                list(self.map),
                self.map.values(),
                "y" in self.map,
                self.map.contains("x"),
                self.map.is_empty(),
            )

    assert KeyedHarness(Many()).element("a", 0) == [([3], ["y"], [2], True, False, False)]


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: ValueStateDescriptor("", int), "needs a name"),
        (lambda: ValueStateDescriptor("s", object), "state 's': .*state is stored typed"),
        (lambda: ValueStateDescriptor("s", 3), "state 's': .*state is stored typed"),
        (lambda: StateTtlConfig(timedelta(0)), "the time to live has to be at least 1 ms"),
    ],
)
def test_a_descriptor_that_says_too_little_is_an_error(make, words):
    with pytest.raises(PipelineError, match=words):
        make()
