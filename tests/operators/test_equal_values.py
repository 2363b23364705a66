"""Equal keys are one key, however they are written; a NaN is none."""

import math
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, field
from datetime import date, datetime, time, timedelta, timezone
from decimal import Decimal
from enum import Enum, IntEnum
from typing import NamedTuple
from zoneinfo import ZoneInfo

import msgspec
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from dagster_unified.api import (
    BroadcastProcessFunction,
    EventTimeSessionWindows,
    KeyedProcessFunction,
    MapStateDescriptor,
    Pipeline,
    WatermarkStrategy,
)
from dagster_unified.api import functions as F
from dagster_unified.errors import PipelineError, RecordTypeError, StateError
from dagster_unified.operators.keys import has_nan, key_hash, key_hashes, one_form
from dagster_unified.operators.state import chunks
from dagster_unified.testing import run_pipeline
from tests.operators.support import Memory, Row, process, ran
from tests.support import MODES, results

NAN = math.nan


class Point(NamedTuple):
    x: float
    y: float


@dataclass(frozen=True)
class Price:
    amount: Decimal
    currency: str


class Span(msgspec.Struct, frozen=True):
    begin: datetime
    length: timedelta


class Level(IntEnum):
    LOW = 1


class Name(Enum):
    A = "a"


ZONES = [
    timezone.utc,
    timezone(timedelta(hours=5, minutes=30)),
    ZoneInfo("America/New_York"),
    ZoneInfo("Europe/Berlin"),
]

numbers = st.one_of(
    st.integers(-(2**63), 2**63 - 1),
    st.booleans(),
    st.floats(allow_nan=False),
    st.decimals(allow_nan=False),
    st.just(Level.LOW),
)


@st.composite
def written_twice(draw):
    """A value, and one that equals it and may be written in another way."""
    kind = draw(st.sampled_from(["number", "decimal", "moment", "time", "text", "tuple", "record", "set", "dict"]))
    if kind == "number":
        value = draw(st.integers(-(2**53), 2**53))
        return draw(st.sampled_from([value, float(value), Decimal(value)])), float(value)
    if kind == "decimal":
        value = draw(st.decimals(allow_nan=False, allow_infinity=False, places=draw(st.integers(0, 12))))
        return value, value * Decimal("1.000") if abs(value) < 10**12 else value
    if kind == "moment":
        moment = draw(st.datetimes(datetime(1980, 1, 1), datetime(2100, 1, 1))).replace(tzinfo=timezone.utc)
        return moment, moment.astimezone(draw(st.sampled_from(ZONES)))
    if kind == "time":
        moment = draw(st.times())
        return moment.replace(tzinfo=timezone.utc), moment.replace(tzinfo=timezone(timedelta(0), "Zulu"))
    if kind == "text":
        value = draw(st.text())
        return value, value
    if kind == "set":
        values = draw(st.lists(st.one_of(st.text(max_size=3), st.integers(0, 3)), max_size=4))
        return frozenset(values), frozenset(map(float_of, reversed(values)))
    one, other = draw(written_twice())
    if kind == "tuple":
        return (one, "t"), (other, "t")
    if kind == "record":
        return draw(st.sampled_from([(Point(one, 0.0), Point(other, -0.0)), (Price(one, "EUR"), Price(other, "EUR"))]))
    return {"a": one, "b": 0.0}, {"b": -0.0, "a": other}


def float_of(value):
    return float(value) if isinstance(value, int) else value


@given(written_twice())
@example((0.0, -0.0))
@example((Decimal("17"), Decimal("17.00")))
@example((Decimal("0.1"), Decimal("0.10")))
@example((Decimal("0.5"), 0.5))
@example((True, 1.0))
@example((2**63, float(2**63)))
@example((Decimal("1E+400"), Decimal("10E+399")))
@example((Level.LOW, 1))
@example((datetime(2024, 11, 3, 1, 30, tzinfo=ZONES[2]), datetime(2024, 11, 3, 1, 30, tzinfo=ZONES[2], fold=1)))
@example((time(23, 30, tzinfo=timezone(timedelta(hours=-2))), time(22, 30, tzinfo=timezone(timedelta(hours=-3)))))
def test_equal_values_have_one_form_and_one_hash(pair):
    one, other = pair
    if one != other:  # an ambiguous moment equals none in another zone
        return
    assert msgspec.msgpack.encode(one_form(one)) == msgspec.msgpack.encode(one_form(other))
    assert key_hash(one) == key_hash(other) == key_hashes([one])[0] == key_hashes(["x", other])[1]


@given(numbers, numbers)
def test_numbers_have_one_hash_where_they_are_equal(one, other):
    if one == other:
        assert key_hash(one) == key_hash(other)
    elif not isinstance(one, float) or not isinstance(other, float):
        return
    assert (key_hash(one) == key_hash(other)) == (one == other)


@pytest.mark.parametrize(
    "value",
    [0, 1, -1, 2**63 - 1, -(2**63), "", "x", "ü" * 40, b"x", None, date(2024, 2, 29), timedelta(seconds=-1), ("a", 1)],
)
def test_what_has_one_form_is_hashed_as_it_is_encoded(value):
    assert one_form(value) == value


@pytest.mark.parametrize(
    ("value", "has"),
    [
        (NAN, True),
        (Decimal("NaN"), True),
        ((1, NAN), True),
        (Point(0.0, NAN), True),
        (Price(Decimal("NaN"), "EUR"), True),
        (frozenset([NAN]), True),
        (((("a", (NAN,)),),), True),
        (math.inf, False),
        ((1, "nan", 2.0), False),
        (Name.A, False),
        (Span(datetime(2024, 1, 1), timedelta(1)), False),
    ],
)
def test_nan_is_found_at_any_depth(value, has):
    assert has_nan(value) is has


def puts(key_type, keys):
    """A process function that puts the `at`-th key, and says how many there are and which are there."""

    class Puts(KeyedProcessFunction):
        def open(self, context):
            self.by = context.get_map_state(MapStateDescriptor("by", key_type, int))

        def process_element(self, value: Row, ctx) -> Iterable[str]:
            key = keys[value.at]
            there = self.by.contains(key)
            self.by.put(key, value.at)
            yield f"{there} {self.by.get(key)} {len(self.by.keys())}"
            if value.amount:
                self.by.remove(key)
                yield f"{self.by.contains(key)} {len(self.by.keys())}"

    return Puts()


LONDON = ZoneInfo("Europe/London")
TWICE = {
    "Decimal": (Decimal, [Decimal(n) for n in range(6)], [Decimal(f"{n}.00") for n in range(6)]),
    "float": (float, [0.0, 1.0, 2.5, 1e300, -3.0], [-0.0, 1, 2.5, 1e300, -3]),
    "int or float": (int | float, [0, 1, 2.5, 3.0], [-0.0, 1.0, 2.5, 3]),
    "tuple": (tuple[Decimal, str], [(Decimal(n), "a") for n in range(6)], [(Decimal(f"{n}.0"), "a") for n in range(6)]),
    "record": (Point, [Point(0.0, n) for n in (0.0, 1.0, 2.0)], [Point(-0.0, n) for n in (-0.0, 1.0, 2.0)]),
    "dataclass": (Price, [Price(Decimal(n), "") for n in range(6)], [Price(Decimal(f"{n}.0"), "") for n in range(6)]),
    "datetime": (
        datetime,
        [datetime(2024, 7, day, 12, tzinfo=timezone.utc) for day in range(1, 7)],
        [datetime(2024, 7, day, 13, tzinfo=LONDON) for day in range(1, 7)],
    ),
    "time": (
        time,
        [time(hour, tzinfo=timezone.utc) for hour in range(6)],
        [time(hour + 1, tzinfo=timezone(timedelta(hours=1))) for hour in range(6)],
    ),
    "frozenset": (
        frozenset[str],
        [frozenset("abcdef"[:n]) for n in range(6)],
        [frozenset(reversed("abcdef"[:n])) for n in range(6)],
    ),
    "enum": (Name, [Name.A], [Name.A]),
}


@pytest.mark.parametrize("of", TWICE)
def test_a_map_in_parts_finds_an_equal_key_that_is_written_in_another_way(of, monkeypatch):
    key_type, keys, again = TWICE[of]
    step = process(puts(key_type, [*keys, *again]))
    count = len(keys)
    batches = [
        ([Row("a", at, 0) for at in range(count)], None),
        ([Row("a", count + at, 0) for at in range(count)], None),
        ([Row("a", at, 1) for at in range(count)], None),
    ]
    expected = ran(step, batches, groups=1)
    monkeypatch.setattr(chunks, "ENTRIES_PER_CHUNK", 1)
    assert ran(step, batches, groups=1, stores=defaultdict(Memory)) == expected
    assert expected[count : 2 * count] == [f"True {count + at} {count}" for at in range(count)]


@dataclass(frozen=True)
class Noted:
    name: str
    note: str = field(compare=False, default="")


@dataclass(frozen=True, eq=False)
class Alone:
    name: str


class Careless(NamedTuple):
    name: str

    def __eq__(self, other):
        return self.name.lower() == other.name.lower()

    def __hash__(self):
        return hash(self.name.lower())


class CarelessStruct(msgspec.Struct, frozen=True):
    name: str

    def __eq__(self, other):
        return self.name.lower() == other.name.lower()

    def __hash__(self):
        return hash(self.name.lower())


@dataclass(frozen=True)
class CarelessData:
    name: str

    def __eq__(self, other):
        return self.name.lower() == other.name.lower()

    def __hash__(self):
        return 0


@pytest.mark.parametrize("kind", [Noted, Alone, Careless, CarelessStruct, CarelessData])
def test_a_class_that_is_equal_by_other_than_its_fields_is_no_key(kind):
    with pytest.raises(PipelineError, match=f"state 'by': {kind.__name__} is not equal by all its fields"):
        MapStateDescriptor("by", tuple[str, kind], int)
    with pytest.raises(RecordTypeError, match=f"since {kind.__name__} is not equal by all its fields"):
        Pipeline("p").from_collection(["a"]).key_by(lambda text: kind(text), key_type=kind)


@pytest.mark.parametrize("kind", [Point, Price, Span])
def test_a_class_that_is_equal_by_its_fields_is_a_key(kind):
    MapStateDescriptor("by", kind, int)
    Pipeline("p").from_collection(["a"]).key_by(lambda text: kind(0, 0), key_type=kind)


class PutsOne(KeyedProcessFunction):
    """Puts a key into a map."""

    def __init__(self, key_type, key):
        self.key_type, self.key = key_type, key

    def open(self, context):
        self.by = context.get_map_state(MapStateDescriptor("by", self.key_type, int))

    def process_element(self, value, ctx) -> Iterable[int]:
        self.by.put_all({self.key: 1})
        yield len(self.by.keys())


NAN_KEYS = {
    "float": (float, NAN),
    "int or float": (int | float, NAN),
    "tuple": (tuple[str, float], ("a", NAN)),
    "record": (Point, Point(0.0, NAN)),
    "nested": (tuple[Point, int], (Point(NAN, 0.0), 1)),
    "frozenset": (frozenset[float], frozenset([NAN])),
}


@MODES
@pytest.mark.parametrize("of", NAN_KEYS)
def test_nan_is_no_key_of_a_map(mode, of):
    keyed = Pipeline("p").from_collection(["a"]).key_by(str.upper, key_type=str)
    with pytest.raises(StateError, match=r"operator 'op': a key in state 'by' (is|has) nan, which equals nothing, in"):
        results(keyed.process(PutsOne(*NAN_KEYS[of])).name("op"), mode)


class Broadcasts(BroadcastProcessFunction[str, float, str]):
    def process_element(self, value, ctx) -> Iterable[str]:
        return []

    def process_broadcast_element(self, value, ctx) -> None:
        ctx.get_broadcast_state(RULES).put(value, "rule")


RULES = MapStateDescriptor("rules", float, str)


@MODES
def test_nan_is_no_key_of_a_broadcast_map(mode):
    pipeline = Pipeline("p")
    rules = pipeline.from_collection([NAN], float, "rules").broadcast(RULES)
    pipeline.from_collection(["a"]).connect(rules).process(Broadcasts()).name("op").print()
    with pytest.raises(StateError, match=r"operator 'op': a key in broadcast state 'rules' is nan, which equals"):
        run_pipeline(pipeline, mode)


class Measured(NamedTuple):
    key: float
    at: Point
    amount: int


class Total(NamedTuple):
    key: float
    total: int


class TotalAt(NamedTuple):
    at: Point
    total: int


def totals(rows, field, output):
    pipeline = Pipeline("p")
    keyed = pipeline.from_collection(rows, Measured).key_by(field)
    keyed.agg(F.sum("amount").alias("total"), output_type=output).name("op").print()
    return pipeline


@MODES
@pytest.mark.parametrize(("field", "output", "verb"), [("key", Total, "is"), ("at", TotalAt, "has")])
def test_nan_is_no_key_of_a_native_aggregate(mode, field, output, verb):
    rows = [Measured(NAN, Point(0.0, NAN), 1)]
    with pytest.raises(RecordTypeError, match=f"operator 'op': the key '{field}' {verb} nan, which equals nothing"):
        run_pipeline(totals(rows, field, output), mode)


@MODES
def test_zeros_of_both_signs_are_one_key_of_a_native_aggregate(mode):
    rows = [Measured(zero, Point(zero, zero), 1) for zero in (0.0, -0.0)]
    assert run_pipeline(totals(rows, "key", Total), mode).only() == [Total(0.0, 2)]
    assert run_pipeline(totals(rows, "at", TotalAt), mode).only() == [TotalAt(Point(0.0, 0.0), 2)]


@MODES
def test_zeros_of_both_signs_are_in_one_session_of_a_native_window(mode):
    pipeline = Pipeline("p")
    at = WatermarkStrategy.for_monotonous_timestamps().with_timestamp_assigner("amount")
    rows = pipeline.from_collection([Measured(0.0, Point(0.0, 0.0), 1), Measured(-0.0, Point(-0.0, 0.0), 4)])
    sessions = EventTimeSessionWindows.with_gap(timedelta(milliseconds=5))
    windows = rows.assign_timestamps_and_watermarks(at).key_by("at").window(sessions)
    windows.agg(F.sum("amount").alias("total"), output_type=TotalAt).print()
    assert run_pipeline(pipeline, mode).only() == [TotalAt(Point(0.0, 0.0), 5)]


NEW_YORK = ZoneInfo("America/New_York")
LOOKED_UP = {
    "naive": (datetime, datetime(2024, 7, 1, 12), [datetime(2024, 7, 1, 12, tzinfo=timezone.utc)]),
    "ambiguous": (
        datetime,
        datetime(2024, 11, 3, 1, 30, tzinfo=NEW_YORK),
        [datetime(2024, 11, 3, 5, 30, tzinfo=timezone.utc), datetime(2024, 11, 3, 1, 30, tzinfo=NEW_YORK)],
    ),
    "in a tuple": (
        tuple[datetime, str],
        (datetime(2024, 11, 3, 1, 30, tzinfo=NEW_YORK, fold=1), "a"),
        [(datetime(2024, 11, 3, 6, 30, tzinfo=timezone.utc), "a")],
    ),
}
OTHER_HOUR = datetime(2024, 11, 3, 1, 30, tzinfo=NEW_YORK, fold=1)


class LooksUp(KeyedProcessFunction):
    def __init__(self, key_type, key, others):
        self.key_type, self.key, self.others = key_type, key, others

    def open(self, context):
        self.by = context.get_map_state(MapStateDescriptor("by", self.key_type, int))

    def process_element(self, value, ctx) -> Iterable[bool]:
        self.by.put(self.key, 7)
        for other in (self.key, *self.others):
            yield self.by.contains(other) and self.by.get(other) == 7 and other in self.by
        self.by.remove(self.others[0])
        yield self.by.is_empty()
        yield not self.by.contains("no key of this map")


@MODES
@pytest.mark.parametrize("of", LOOKED_UP)
def test_an_entry_of_a_map_is_found_by_the_form_in_which_it_was_put(mode, of):
    made = Pipeline("p").from_collection(["a"]).key_by(str.upper, key_type=str).process(LooksUp(*LOOKED_UP[of]))
    assert all(results(made, mode))


@MODES
def test_the_two_hours_of_a_clock_that_is_set_back_are_two_keys(mode):
    pipeline = Pipeline("p")
    function = PutsBoth()
    pipeline.from_collection(["a"]).key_by(str.upper, key_type=str).process(function).print()
    assert run_pipeline(pipeline, mode).only() == [2]


class PutsBoth(KeyedProcessFunction):
    def open(self, context):
        self.by = context.get_map_state(MapStateDescriptor("by", datetime, int))

    def process_element(self, value, ctx) -> Iterable[int]:
        self.by.put(OTHER_HOUR.replace(fold=0), 1)
        self.by.put(OTHER_HOUR, 2)
        yield len(self.by.keys())


class RulesByTime(BroadcastProcessFunction[str, datetime, str]):
    def process_element(self, value, ctx) -> Iterable[str]:
        rules = ctx.get_broadcast_state(BY_TIME)
        naive = datetime(2024, 7, 1, 12)
        yield f"{rules.get(naive)} {rules.contains(naive)} {naive in rules}"

    def process_broadcast_element(self, value, ctx) -> None:
        ctx.get_broadcast_state(BY_TIME).put(datetime(2024, 7, 1, 12), "rule")


BY_TIME = MapStateDescriptor("rules", datetime, str)


@MODES
def test_an_entry_of_a_broadcast_map_is_found_by_the_form_in_which_it_was_put(mode):
    pipeline = Pipeline("p")
    rules = pipeline.from_collection([datetime(2024, 7, 1)], datetime, "rules").broadcast(BY_TIME)
    pipeline.from_collection(["a"]).connect(rules).process(RulesByTime()).print()
    assert run_pipeline(pipeline, mode, micro_batch=None).only() == ["rule True True"]
