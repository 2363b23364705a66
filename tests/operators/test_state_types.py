"""State holds what its descriptor declares: anything else is an error before it is committed, in every driver."""

import re
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Any, NamedTuple

import numpy as np
import pytest

from dagster_unified.api import (
    AggregateFunction,
    AggregatingStateDescriptor,
    BroadcastProcessFunction,
    KeyedProcessFunction,
    ListStateDescriptor,
    MapStateDescriptor,
    Pipeline,
    ReducingStateDescriptor,
    StateTtlConfig,
    TumblingEventTimeWindows,
    ValueStateDescriptor,
    WatermarkStrategy,
)
from dagster_unified.errors import PipelineError, RecordTypeError, StateError, UnifiedError
from dagster_unified.operators.state.evolution import can_read, shown
from dagster_unified.operators.windows.contents import _StateByWindow
from dagster_unified.testing import KeyedHarness, run_pipeline
from tests.operators.support import Memory, Row, process, ran
from tests.support import MODES, results


class Point(NamedTuple):
    x: int
    y: int | None


@dataclass
class Tally:
    count: int


class Mean(AggregateFunction):
    def create_accumulator(self):
        return 0

    def add(self, value, accumulator):
        return accumulator + value / 2

    def get_result(self, accumulator):
        return accumulator

    def merge(self, a, b):
        return a + b


def halve(a, b):
    return (a + b) / 2


class Write(KeyedProcessFunction):
    """Does something with one state, for each record, and gives the key."""

    def __init__(self, kind: str, descriptor: Any, *actions: Any):
        self.kind, self.descriptor, self.actions = kind, descriptor, actions

    def __getstate__(self):
        return {name: value for name, value in vars(self).items() if name != "state"}  # some tests open it themselves

    def open(self, context):
        self.state = getattr(context, f"get_{self.kind}state")(self.descriptor)

    def process_element(self, value: Row, ctx) -> Iterable[str]:
        for action in self.actions:
            action(self.state, ctx)
        yield value.key


def put_in_place(state, ctx):
    state.update([1])
    state.value().append(None)


WRONG = {
    "value": (
        Write("", ValueStateDescriptor("mean", int), lambda s, c: s.update(1.5)),
        r"state 'mean' of key 'a' is declared int, and was given 1.5 \(float\); round it",
    ),
    "bool for int": (
        Write("", ValueStateDescriptor("s", int), lambda s, c: s.update(True)),
        r"state 's' of key 'a' is declared int, and was given True \(bool\)",
    ),
    "numpy": (
        Write("", ValueStateDescriptor("s", float), lambda s, c: s.update(np.float64(1.5))),
        r"is declared float, and was given np.float64\(1.5\) \(float64\)",
    ),
    "int for datetime": (
        Write("", ValueStateDescriptor("s", datetime), lambda s, c: s.update(5)),
        r"is declared datetime, and was given 5 \(int\)",
    ),
    "record": (
        Write("", ValueStateDescriptor("s", Point), lambda s, c: s.update(Point(1.5, None))),
        r"state 's\.x' of key 'a' is declared int, and was given 1.5 \(float\) in Point\(x=1.5",
    ),
    "list for tuple": (
        Write("", ValueStateDescriptor("s", tuple[int, int]), lambda s, c: s.update([1, 2])),
        r"is declared tuple\[int, int\], and was given \[1, 2\] \(list\)",
    ),
    "changed in its place": (
        Write("", ValueStateDescriptor("s", list[int]), put_in_place),
        r"state 's\[\]' of key 'a' is declared int, and was given None \(NoneType\) in \[1, None\]",
    ),
    "a field that is set": (
        Write(
            "",
            ValueStateDescriptor("s", Tally),
            lambda s, c: s.update(Tally(1)),
            lambda s, c: setattr(s.value(), "count", "x"),
        ),
        r"state 's\.count' .* was given 'x' \(str\)",
    ),
    "list": (
        Write("list_", ListStateDescriptor("s", int), lambda s, c: s.add(None)),
        r"state 's' of key 'a' is declared int, and was given None \(NoneType\)",
    ),
    "add_all": (
        Write("list_", ListStateDescriptor("s", int), lambda s, c: s.add_all([1, "x"])),
        r"is declared int, and was given 'x' \(str\)",
    ),
    "whole list": (
        Write("list_", ListStateDescriptor("s", Point), lambda s, c: s.update([Point(1, "x")])),
        r"state 's\.y' of key 'a' is declared int \| None, and was given 'x' \(str\)",
    ),
    "map": (
        Write("map_", MapStateDescriptor("s", str, int), lambda s, c: s.put("k", b"x")),
        r"state 's' of key 'a' is declared int \| None, and was given b'x' \(bytes\)",
    ),
    "map key": (
        Write("map_", MapStateDescriptor("s", str, int), lambda s, c: s.put(1, 1)),
        r"a key in state 's' of key 'a' is declared str, and was given 1 \(int\)",
    ),
    "put_all": (
        Write("map_", MapStateDescriptor("s", str, int), lambda s, c: s.put_all({"k": 1.5})),
        r"was given 1.5 \(float\)",
    ),
    "reducing": (
        Write("reducing_", ReducingStateDescriptor("s", halve, int), lambda s, c: s.add(1), lambda s, c: s.add(2)),
        r"state 's' of key 'a' is declared int, and was given 1.5 \(float\)",
    ),
    "aggregating": (
        Write("aggregating_", AggregatingStateDescriptor("s", Mean(), int), lambda s, c: s.add(1)),
        r"is declared int, and was given 0.5 \(float\)",
    ),
    "any": (
        Write("", ValueStateDescriptor("s", dict[str, Any]), lambda s, c: s.update({"k": (1, 2)})),
        r"state 's\.values\(\)' of key 'a' is declared Any.*, and was given \(1, 2\) \(tuple\)",
    ),
    "float timer": (
        Write("", ValueStateDescriptor("s", int), lambda s, c: c.timer_service().register_event_time_timer(1.5)),
        r"a timer's time is an int, in milliseconds since the epoch, and was given 1.5 \(float\)",
    ),
    "datetime timer": (
        Write(
            "",
            ValueStateDescriptor("s", int),
            lambda s, c: c.timer_service().register_processing_time_timer(datetime(2024, 1, 1)),
        ),
        r"and was given datetime.datetime\(2024, 1, 1, 0, 0\)",
    ),
    "timer beyond time": (
        Write("", ValueStateDescriptor("s", int), lambda s, c: c.timer_service().delete_event_time_timer(2**63)),
        "a timer's time is an int of 64 bits",
    ),
}

ROWS = [Row("a", 1, 1)]


def in_memory(mode):
    def run(function):
        made = Pipeline("p").from_collection(ROWS).key_by("key").process(function).name("op")
        results(made, mode)

    return run


DRIVERS = {
    "BATCH": in_memory("BATCH"),
    "STREAMING": in_memory("STREAMING"),
    "key groups": lambda function: ran(process(function), [(ROWS, None)]),
}


@pytest.mark.parametrize("driver", DRIVERS)
@pytest.mark.parametrize("mistake", WRONG)
def test_a_value_of_another_type_is_an_error_that_names_operator_state_key_and_types(mistake, driver):
    function, words = WRONG[mistake]
    with pytest.raises(StateError, match=f"operator 'op'.*{words}"):
        DRIVERS[driver](function)


@pytest.mark.parametrize("mistake", WRONG)
def test_the_keyed_harness_says_the_same(mistake):
    function, words = WRONG[mistake]
    harness = KeyedHarness(function)
    with pytest.raises(StateError, match=words):
        harness.element("a", Row("a", 1, 1))


@pytest.mark.parametrize("mistake", WRONG)
def test_nothing_is_written_of_a_micro_batch_with_a_mistake(mistake):
    stores = defaultdict(Memory)
    with pytest.raises(UnifiedError):
        ran(process(WRONG[mistake][0]), [(ROWS, None)], groups=1, stores=stores)
    assert not stores[0].pages
    assert stores[0].index is None


def test_the_line_that_wrote_the_value_is_named():
    with pytest.raises(StateError, match=r"\(at .*test_state_types\.py:\d+ in "):
        in_memory("BATCH")(WRONG["value"][0])


RIGHT = {
    "int for float": (float, 3, 3.0),
    "set": (set[int], {1, 2}, {1, 2}),
    "several types": (int | str, "x", "x"),
    "anything": (dict[str, Any], {"a": [1, "x", None]}, {"a": [1, "x", None]}),
    "nested": (dict[str, list[Point]], {"a": [Point(1, 2)]}, {"a": [Point(1, 2)]}),
}


@pytest.mark.parametrize("case", RIGHT)
def test_what_is_read_from_a_checkpoint_equals_what_was_written(case):
    python, value, back = RIGHT[case]

    class Keep(KeyedProcessFunction):
        def open(self, context):
            self.state = context.get_state(ValueStateDescriptor("s", python))

        def process_element(self, value_: Row, ctx) -> Iterable[str]:
            held = self.state.value()
            if held is None:
                self.state.update(value)
            else:
                yield f"{held == back} {type(held) is type(back)}"

    stores = defaultdict(Memory)
    ran(process(Keep()), [(ROWS, None)], stores=stores)
    assert ran(process(Keep()), [(ROWS, None)], stores=stores) == ["True True"]


class Nulls(KeyedProcessFunction):
    def __init__(self, ttl=None):
        self.ttl = ttl

    def open(self, context):
        self.map = context.get_map_state(MapStateDescriptor("m", str, int, self.ttl))

    def process_element(self, value: Row, ctx) -> Iterable[str]:
        if value.amount == 0:
            self.map.put("k", None)
        yield (
            f"{self.map.contains('k')} {'k' in self.map} {self.map.get('k')} {self.map.items()} {self.map.is_empty()}"
            f" {self.map.contains('z')}"
        )


KEPT = "True True None [('k', None)] False False"


def test_a_map_keeps_a_null_value_and_contains_its_key():
    stores = defaultdict(Memory)
    assert ran(process(Nulls()), [([Row("a", 1, 0)], None)], stores=stores) == [KEPT]
    assert ran(process(Nulls()), [([Row("a", 1, 1)], None)], stores=stores) == [KEPT]


@MODES
def test_a_map_keeps_a_null_value_in_both_modes(mode):
    made = Pipeline("p").from_collection([Row("a", 1, 0), Row("a", 2, 1)]).key_by("key").process(Nulls())
    assert results(made, mode) == [KEPT, KEPT]


class Twice(KeyedProcessFunction):
    def __init__(self, first, second):
        self.both = (first, second)

    def open(self, context):
        for kind, descriptor in self.both:
            getattr(context, kind)(descriptor)

    def process_element(self, value: Row, ctx) -> Iterable[str]:
        return []


@pytest.mark.parametrize(
    ("second", "words"),
    [
        (
            ("get_state", ValueStateDescriptor("s", str)),
            "state 's' is declared as value state of int and as value state of str; give one of them another name",
        ),
        (("get_list_state", ListStateDescriptor("s", int)), "declared as value state of int and as list state of int"),
    ],
)
def test_two_states_of_one_name_and_different_types_are_an_error_when_the_function_is_opened(second, words):
    with pytest.raises(PipelineError, match=words):
        in_memory("BATCH")(Twice(("get_state", ValueStateDescriptor("s", int)), second))


def test_one_state_may_be_asked_for_twice():
    in_memory("BATCH")(
        Twice(("get_state", ValueStateDescriptor("s", int)), ("get_state", ValueStateDescriptor("s", int)))
    )


def timed(rows):
    strategy = WatermarkStrategy.for_monotonous_timestamps().with_timestamp_assigner("at")
    return Pipeline("p").from_collection(rows).assign_timestamps_and_watermarks(strategy).key_by("key")


class Half(AggregateFunction):
    def create_accumulator(self) -> tuple[int, int]:
        return 0, 0

    def add(self, value, accumulator):
        return accumulator[0] + 1, accumulator[1] + value.amount / 2

    def get_result(self, accumulator) -> int:
        return accumulator[0]

    def merge(self, a, b):
        return a[0] + b[0], a[1] + b[1]


@MODES
@pytest.mark.parametrize(
    ("build", "words"),
    [
        (
            lambda w: w.aggregate(Half()),
            (
                r"operator 'Half': the accumulator of a window\[1\] of key 'a' is declared int, and was given \d.5"
                r" \(float\) in \(\d, \d.5\)"
            ),
        ),
        (
            lambda w: w.reduce(lambda a, b: Row(a.key, a.at, (a.amount + b.amount) / 2)),
            r"the reduced value of a window\.amount of key 'a' is declared int, and was given 1.5 \(float\)",
        ),
    ],
)
def test_what_a_window_holds_is_checked(mode, build, words):
    windows = timed([Row("a", 1, 1), Row("a", 2, 2)]).window(TumblingEventTimeWindows.of(timedelta(seconds=1)))
    stream = build(windows)
    stream.print("out")
    with pytest.raises(StateError, match=words):
        run_pipeline(stream._pipeline, mode)


@MODES
def test_what_a_reduce_holds_is_checked(mode):
    pipeline = Pipeline("p")
    reduced = pipeline.from_collection(ROWS * 2).key_by("key").reduce(lambda a, b: Row(a.key, a.at, b.amount / 2))
    reduced.map(lambda r: r.key, str).print("out")
    with pytest.raises(
        RecordTypeError, match=r"operator 'reduce': field 'amount' of Row is declared int, and is 0.5 \(float\)"
    ):
        run_pipeline(pipeline, mode)


RULES = MapStateDescriptor("rules", str, int)


class Rules(BroadcastProcessFunction):
    def __init__(self, put):
        self.put = put

    def process_element(self, value: Row, ctx) -> Iterable[str]:
        return []

    def process_broadcast_element(self, value: Row, ctx) -> Iterable[str]:
        self.put(ctx)
        return []


@MODES
@pytest.mark.parametrize(
    ("put", "kind", "words"),
    [
        (
            lambda c: c.get_broadcast_state(RULES).put("a", 1.5),
            StateError,
            r"broadcast state 'rules' is declared int \| None, and was given 1.5 \(float\)",
        ),
        (
            lambda c: c.get_broadcast_state(RULES).put(1, 1),
            StateError,
            r"a key in broadcast state 'rules' is declared str, and was given 1 \(int\)",
        ),
        (
            lambda c: c.get_broadcast_state(MapStateDescriptor("rules", str, str)),
            PipelineError,
            "declared as map state of str and int and as map state of str and str",
        ),
    ],
)
def test_broadcast_state_is_checked(mode, put, kind, words):
    pipeline = Pipeline("p")
    rows = pipeline.from_collection(ROWS)
    rows.connect(pipeline.from_collection(ROWS, name="rules").broadcast(RULES)).process(Rules(put)).print("out")
    with pytest.raises(kind, match=f"operator 'Rules'.*{words}"):
        run_pipeline(pipeline, mode)


@pytest.mark.parametrize(
    ("made", "says"),
    [
        (
            lambda: StateTtlConfig(timedelta(hours=1), "ON_READ_AND_WRITE"),
            "update_type is UpdateType.ON_CREATE_AND_WRITE or UpdateType.ON_READ_AND_WRITE, not 'ON_READ_AND_WRITE'",
        ),
        (
            lambda: StateTtlConfig.new_builder(timedelta(hours=1)).set_state_visibility("never"),
            "visibility is StateVisibility.NEVER_RETURN_EXPIRED or StateVisibility.RETURN_EXPIRED_IF_NOT_CLEANED_UP,",
        ),
        (
            lambda: ValueStateDescriptor("count", int, timedelta(hours=1)),
            "state 'count': its time to live is a StateTtlConfig, such as StateTtlConfig(timedelta(hours=1)), not",
        ),
        (
            lambda: ListStateDescriptor("all", int).enable_time_to_live(StateTtlConfig.new_builder(timedelta(hours=1))),
            "state 'all': its time to live is a StateTtlConfig",
        ),
    ],
)
def test_a_time_to_live_of_another_type_is_an_error(made, says):
    with pytest.raises(PipelineError, match=re.escape(says)):
        made()


def test_state_of_windows_has_a_time_to_live_or_has_not():
    """As that of keys: a pair of a value and the time of its renewal is no tuple."""
    hour = StateTtlConfig(timedelta(hours=1))
    window = tuple[int, int]
    timed, pair, plain = (
        _StateByWindow("state", window, ValueStateDescriptor("state", *given))
        for given in ((int, hour), (tuple[int, int],), (int,))
    )
    assert not can_read(timed.stored_layout, pair.stored_layout)
    assert not can_read(pair.stored_layout, timed.stored_layout)
    assert not timed.stores_as(pair)
    assert not can_read(plain.stored_layout, timed.stored_layout)
    assert timed.stores_as(timed)
    assert shown(timed.stored_layout) == "dict[tuple[int, int], int with a time to live]"
