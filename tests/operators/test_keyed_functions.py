"""State of the key in every function that a keyed stream takes, not in `process` only."""

from collections.abc import Iterable
from datetime import timedelta
from typing import NamedTuple

import pytest

from dagster_unified.api import (
    CoFlatMapFunction,
    CoMapFunction,
    CoProcessFunction,
    FilterFunction,
    FlatMapFunction,
    KeyedCoProcessFunction,
    MapFunction,
    Pipeline,
    ProcessFunction,
    StateTtlConfig,
    ValueStateDescriptor,
    WatermarkStrategy,
)
from dagster_unified.errors import PipelineError, UnsupportedError
from dagster_unified.graph import nodes
from dagster_unified.graph.explain import as_json
from dagster_unified.testing import ManualClock, run_pipeline
from tests.support import MODES, Event, results


class CountWindowAverage(FlatMapFunction):
    """The first example of Flink's page on state: the average of every two values of a key."""

    def __init__(self):
        self.sum = None

    def flat_map(self, value: tuple[int, int]) -> Iterable[tuple[int, int]]:
        current = self.sum.value() or (0, 0)
        current = (current[0] + 1, current[1] + value[1])
        self.sum.update(current)
        if current[0] >= 2:
            self.sum.clear()
            yield value[0], current[1] // current[0]

    def open(self, runtime_context):
        self.sum = runtime_context.get_state(ValueStateDescriptor("average", tuple[int, int]))


@MODES
def test_the_first_example_of_flinks_page_on_state(mode):
    pipeline = Pipeline("p")
    values = pipeline.from_collection([(1, 3), (1, 5), (1, 7), (1, 4), (1, 2)], tuple[int, int])
    values.key_by(lambda row: row[0], key_type=int).flat_map(CountWindowAverage()).print()
    # Flink's example has no event times: which values meet is their order's, which an exchange in BATCH does not keep.
    assert run_pipeline(pipeline, mode, seed=None).only() == [(1, 4), (1, 5)]


EVENTS = [Event("a", 3, 30), Event("b", 1, 1), Event("a", 1, 10), Event("b", 2, 2), Event("a", 2, 20)]
IN_ORDER = WatermarkStrategy.for_bounded_out_of_orderness(timedelta(seconds=1)).with_timestamp_assigner("at")


def events(records=EVENTS):
    return Pipeline("p").from_collection(records, Event, "events").assign_timestamps_and_watermarks(IN_ORDER)


def _counter(context, ttl=None):
    return context.get_state(ValueStateDescriptor("count", int, ttl))


class Numbered(MapFunction):
    def open(self, context):
        self.count = _counter(context)

    def map(self, value: Event) -> tuple[str, int, int]:
        self.count.update((self.count.value() or 0) + 1)
        return value.key, value.at, self.count.value()


class NumberedInOrder(Numbered):
    requires_time_sorted_input = True


class FirstOnly(FilterFunction):
    def open(self, context):
        self.count = _counter(context)

    def filter(self, value):
        self.count.update((self.count.value() or 0) + 1)
        return self.count.value() == 1


class Ended(ProcessFunction):
    """The number of a key's records, at its end."""

    def open(self, context):
        self.count = _counter(context)

    def process_element(self, value, ctx) -> Iterable[tuple[str, int]]:
        self.count.update((self.count.value() or 0) + 1)
        ctx.timer_service().register_event_time_timer(1000)
        return []

    def on_timer(self, timestamp, ctx):
        yield ctx.get_current_key(), self.count.value()


def test_in_batch_a_keys_records_come_together_by_event_time():
    expected = [("a", 1, 1), ("a", 2, 2), ("a", 3, 3), ("b", 1, 1), ("b", 2, 2)]
    assert results(events().key_by("key").map(Numbered()), "BATCH") == expected
    assert results(events().key_by(lambda e: e.key + "", key_type=str).map(Numbered()), "BATCH") == expected


def test_in_streaming_they_come_as_they_arrive_or_in_order_where_the_function_asks_for_that():
    assert sorted(results(events().key_by("key").map(Numbered()))) == [
        ("a", 1, 2),
        ("a", 2, 3),
        ("a", 3, 1),
        ("b", 1, 1),
        ("b", 2, 2),
    ]
    assert sorted(results(events().key_by("key").map(NumberedInOrder()))) == [
        ("a", 1, 1),
        ("a", 2, 2),
        ("a", 3, 3),
        ("b", 1, 1),
        ("b", 2, 2),
    ]


def test_a_filter_may_keep_state():
    assert sorted(results(events().key_by("key").filter(FirstOnly()), "BATCH")) == [Event("a", 1, 10), Event("b", 1, 1)]
    assert sorted(results(events().key_by("key").filter(FirstOnly()))) == [Event("a", 3, 30), Event("b", 1, 1)]


@MODES
def test_a_process_function_on_a_keyed_stream_has_state_and_timers(mode):
    assert sorted(results(events().key_by("key").process(Ended()), mode)) == [("a", 3), ("b", 2)]


def test_what_comes_of_a_record_carries_its_event_time():
    class Times(ProcessFunction):
        def process_element(self, value, ctx) -> Iterable[int]:
            yield ctx.timestamp()

    assert sorted(results(events().key_by("key").map(Numbered()).process(Times()))) == [1, 1, 2, 2, 3]


def test_state_with_a_time_to_live_expires_in_streaming():
    class Expiring(Numbered):
        def open(self, context):
            self.count = _counter(context, StateTtlConfig(timedelta(seconds=1)))

    clock = ManualClock()

    def later(event: Event) -> Event:
        clock.advance(600)
        return event

    once = [Event("a", n, n) for n in range(4)]
    counted = results(events(once).map(later).key_by("key").map(Expiring()), clock=clock)
    assert [n for _, _, n in counted] == [1, 2, 3, 4]

    def much_later(event: Event) -> Event:
        clock.advance(2000)
        return event

    counted = results(events(once).map(much_later).key_by("key").map(Expiring()), clock=clock)
    assert [n for _, _, n in counted] == [1, 1, 1, 1]


def kinds(stream):
    stream.print("out")
    return [
        type(n)
        for n in stream._pipeline.plan().graph.nodes
        if not isinstance(n, (nodes.SourceNode, nodes.SinkNode, nodes.AssignTimestampsNode))
    ]


def test_functions_without_open_stay_in_their_fused_chain():
    class Plain(MapFunction):
        def map(self, value: Event) -> Event:
            return value

    keyed = events().key_by("key")
    assert kinds(keyed.map(Plain()).filter(lambda e: e.value > 0).flat_map(lambda e: [e], Event)) == [
        nodes.MapNode,
        nodes.FilterNode,
        nodes.FlatMapNode,
    ]
    assert kinds(events().key_by("key").map(Numbered())) == [nodes.KeyedProcessNode]


def test_explain_and_lint_know_the_authors_function():
    stream = events().key_by("key").map(Numbered())
    stream.print("out")
    plan = stream._pipeline.plan()
    assert any("'Numbered' gets a key's records in event-time order" in f.message for f in plan.findings)

    class Expiring(MapFunction):
        descriptor = ValueStateDescriptor("last", int, StateTtlConfig(timedelta(seconds=1)))

        def __init__(self):
            self.kept = self.descriptor

        def open(self, context):
            self.last = context.get_state(self.kept)

        def map(self, value: Event) -> Event:
            return value

    expiring = events().key_by("key").map(Expiring())
    expiring.print("out")
    assert any("'Expiring' has state with a time to live" in f.message for f in expiring._pipeline.plan().findings)


def test_explain_shows_the_state_of_a_map():
    stream = events().key_by("key").flat_map(CountWindowAverage(), tuple[int, int])
    stream.print("out")
    assert '"average"' in str(as_json(stream._pipeline.plan())).replace("'", '"')


@MODES
def test_an_error_names_the_authors_operator_and_line(mode):
    class Broken(MapFunction):
        def open(self, context):
            self.count = _counter(context)

        def map(self, value: Event) -> int:
            return value.value // 0

    with pytest.raises(
        Exception, match=r"operator 'Broken': ZeroDivisionError.*test_keyed_functions.py:\d+ in map, on"
    ):
        results(events().key_by("key").map(Broken()), mode)


# Two streams


class Joined(CoMapFunction):
    """What a key has had of the first stream, and of the second."""

    def open(self, context):
        self.count = _counter(context)

    def _next(self, side, value):
        self.count.update((self.count.value() or 0) + 1)
        return f"{value.key}{side}", value.at, self.count.value()

    def map1(self, value) -> tuple[str, int, int]:
        return self._next("-first", value)

    def map2(self, value) -> tuple[str, int, int]:
        return self._next("-second", value)


class JoinedFlat(CoFlatMapFunction):
    def __init__(self):
        self.joined = Joined()

    def open(self, context):
        self.joined.open(context)

    def flat_map1(self, value) -> Iterable[tuple[str, int, int]]:
        yield self.joined.map1(value)

    def flat_map2(self, value) -> Iterable[tuple[str, int, int]]:
        yield self.joined.map2(value)


class JoinedProcess(CoProcessFunction):
    def __init__(self):
        self.joined = Joined()

    def open(self, context):
        self.joined.open(context)

    def process_element1(self, value, ctx) -> Iterable[tuple[str, int, int]]:
        yield self.joined.map1(value)

    def process_element2(self, value, ctx) -> Iterable[tuple[str, int, int]]:
        yield self.joined.map2(value)


OTHERS = [Event("b", 9, 0), Event("a", 2, 0)]
FORMS = pytest.mark.parametrize(
    "apply",
    [lambda c: c.map(Joined()), lambda c: c.flat_map(JoinedFlat()), lambda c: c.process(JoinedProcess())],
    ids=["map", "flat_map", "process"],
)


def two():
    first = events(EVENTS[:3])
    return first, first._pipeline.from_collection(OTHERS, Event, "others").assign_timestamps_and_watermarks(IN_ORDER)


@FORMS
@pytest.mark.parametrize(
    "connect",
    [lambda a, b: a.connect(b).key_by("key", "key"), lambda a, b: a.key_by("key").connect(b.key_by("key"))],
    ids=["after", "before"],
)
def test_functions_of_two_keyed_streams_share_state_of_the_key(apply, connect):
    expected = [("a-first", 1, 1), ("a-first", 3, 3), ("a-second", 2, 2), ("b-first", 1, 1), ("b-second", 9, 2)]
    assert sorted(results(apply(connect(*two())), "BATCH")) == expected
    counts = [(name[0], count) for name, _, count in results(apply(connect(*two())))]
    assert sorted(counts) == [("a", 1), ("a", 2), ("a", 3), ("b", 1), ("b", 2)]


class OneSided(CoFlatMapFunction):
    """Numbers a key's records of the first stream; lets those of the second through."""

    def open(self, context):
        self.count = _counter(context)

    def flat_map1(self, value) -> Iterable[tuple[str, int, int]]:
        self.count.update((self.count.value() or 0) + 1)
        yield value.key, value.at, self.count.value()

    def flat_map2(self, value) -> Iterable[tuple[str, int, int]]:
        yield "plain", value.at, 0


def test_in_batch_a_stream_without_a_key_comes_before_the_keyed_one():
    first, second = two()
    found = results(first.key_by("key").connect(second).flat_map(OneSided()), "BATCH")
    assert sorted(found[:2]) == [("plain", 2, 0), ("plain", 9, 0)]
    assert found[2:] == [("a", 1, 1), ("a", 3, 2), ("b", 1, 1)]


def test_in_streaming_the_keyed_one_of_two_streams_has_its_state():
    first, second = two()
    assert sorted(results(first.key_by("key").connect(second).flat_map(OneSided()))) == [
        ("a", 1, 2),
        ("a", 3, 1),
        ("b", 1, 1),
        ("plain", 2, 0),
        ("plain", 9, 0),
    ]


@MODES
def test_keys_of_several_fields_beside_a_stream_without_a_key(mode):
    class Mirrored(OneSided):
        def flat_map1(self, value) -> Iterable[tuple[str, int, int]]:
            return super().flat_map2(value)

        def flat_map2(self, value) -> Iterable[tuple[str, int, int]]:
            return super().flat_map1(value)

    first, second = two()
    found = results(second.connect(first.key_by("key", "at")).flat_map(Mirrored()), mode)
    assert sorted(found) == [("a", 1, 1), ("a", 3, 1), ("b", 1, 1), ("plain", 2, 0), ("plain", 9, 0)]


@MODES
def test_a_record_without_a_key_has_no_state(mode):
    first, second = two()
    with pytest.raises(
        UnsupportedError, match="operator 'Joined': a record of a stream without a key has no keyed state"
    ):
        results(first.key_by("key").connect(second).map(Joined()), mode)


@MODES
def test_there_are_no_timers_where_one_of_two_streams_is_keyed(mode):
    class Timed(CoProcessFunction):
        def process_element1(self, value, ctx) -> Iterable[int]:
            ctx.timer_service().register_event_time_timer(5)

        def process_element2(self, value, ctx) -> Iterable[int]:
            return []

    first, second = two()
    with pytest.raises(
        UnsupportedError,
        match="operator 'Timed': timers need a keyed stream; call key_by before this process function, on both streams",
    ):
        results(first.key_by("key").connect(second).process(Timed()), mode)


def test_a_keyed_function_needs_both_streams_keyed():
    class Keyed(KeyedCoProcessFunction):
        def process_element1(self, value, ctx) -> Iterable[int]:
            return []

        def process_element2(self, value, ctx) -> Iterable[int]:
            return []

    first, second = two()
    with pytest.raises(
        PipelineError,
        match=r"expected a CoProcessFunction, got .*; it needs both streams keyed, so call key_by on the other one too",
    ):
        first.key_by("key").connect(second).process(Keyed())


@MODES
def test_a_key_that_is_none_beside_a_stream_without_a_key_is_an_error(mode):
    class Loose(NamedTuple):
        key: str | None
        at: int

    pipeline = Pipeline("p")
    keyed, other = (
        pipeline.from_collection([Loose(None, 1)], Loose, "loose"),
        pipeline.from_collection(OTHERS, Event, "others"),
    )
    with pytest.raises(PipelineError, match="None"):
        results(keyed.key_by("key").connect(other).flat_map(OneSided()), mode)
