"""Equal values that differ in form: each function sees the one normal form, wherever its value comes from."""

from collections import OrderedDict, defaultdict
from collections.abc import Iterable
from dataclasses import dataclass
from datetime import date, datetime, timedelta, timezone
from decimal import Decimal
from enum import Enum, IntEnum, StrEnum
from typing import Any, NamedTuple
from zoneinfo import ZoneInfo

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dagster_unified.api import (
    AggregateFunction,
    AggregatingStateDescriptor,
    BroadcastProcessFunction,
    KeyedProcessFunction,
    ListStateDescriptor,
    MapStateDescriptor,
    OutputTag,
    Pipeline,
    ProcessFunction,
    ReducingStateDescriptor,
    TumblingEventTimeWindows,
    ValueStateDescriptor,
    WatermarkStrategy,
    iterations,
)
from dagster_unified.errors import RecordTypeError, StateError
from dagster_unified.operators.state.backend import Declared
from dagster_unified.records import record_type
from dagster_unified.testing import run_pipeline
from tests.support import MODES

NEW_YORK = ZoneInfo("America/New_York")


class Size(IntEnum):
    SMALL = 1


class Word(StrEnum):
    YES = "yes"


class Color(Enum):
    RED = "red"


class Pair(NamedTuple):
    number: float
    at: datetime | None


@dataclass
class Sale:
    amount: Decimal
    at: datetime
    tags: dict[str, float]


@dataclass(frozen=True)
class Also:
    """Has the fields of `Sale`."""

    amount: Decimal
    at: datetime
    tags: dict[str, float]


EVENING = datetime(2024, 7, 1, 20, 30, tzinfo=NEW_YORK)
IN_UTC = datetime(2024, 7, 2, 0, 30, tzinfo=timezone.utc)
HALF = Decimal("1.500000000000000000")

FORMS: dict[str, tuple[Any, Any, Any]] = {
    "zone": (datetime, EVENING, IN_UTC),
    "fold": (datetime, IN_UTC.replace(fold=1), IN_UTC),
    "naive": (datetime, datetime(2024, 7, 1, 20, 30), datetime(2024, 7, 1, 20, 30, tzinfo=timezone.utc)),
    "int for float": (float, 3, 3.0),
    "int for Decimal": (Decimal, 2, Decimal("2.000000000000000000")),
    "digits": (Decimal, Decimal("1.5"), HALF),
    "zero": (Decimal, Decimal("-0.0"), Decimal("0E-18")),
    "bytearray": (bytes, bytearray(b"x"), b"x"),
    "IntEnum": (int, Size.SMALL, 1),
    "StrEnum": (str, Word.YES, "yes"),
    "defaultdict": (dict[str, int], defaultdict(int, a=1), {"a": 1}),
    "OrderedDict": (dict[str, float], OrderedDict(a=1), {"a": 1.0}),
    "list": (list[datetime], [EVENING], [IN_UTC]),
    "tuple": (tuple[float, datetime], (1, EVENING), (1.0, IN_UTC)),
    "tuples": (tuple[float, ...], (1, 2), (1.0, 2.0)),
    "NamedTuple": (Pair, Pair(1, EVENING), Pair(1.0, IN_UTC)),
    "dataclass": (Sale, Sale(Decimal("1.5"), EVENING, defaultdict(float, a=1)), Sale(HALF, IN_UTC, {"a": 1.0})),
    "nested": (list[Pair], [Pair(1, None), Pair(2, EVENING)], [Pair(1.0, None), Pair(2.0, IN_UTC)]),
}


def seen(value: Any) -> str:
    return f"{type(value).__name__} {value!r}"


def stream(of: Any = (1,)):
    strategy = WatermarkStrategy.for_monotonous_timestamps().with_timestamp_assigner(lambda value: 1000 + value)
    return Pipeline("p").from_collection(list(of)).assign_timestamps_and_watermarks(strategy)


class Written(KeyedProcessFunction):
    """Writes a value, and says what is read at once and with the next record."""

    def __init__(self, descriptor, write, read):
        self.descriptor, self.write, self.read = descriptor, write, read

    def open(self, runtime_context):
        self.state = runtime_context.get_state(self.descriptor)

    def process_element(self, value: int, ctx) -> Iterable[str]:
        if value == 1:
            self.write(self.state)
        yield seen(self.read(self.state))


class Latest(AggregateFunction):
    """Its accumulator is what was made last; the result is what it saw in its place."""

    def __init__(self, made):
        self.made = made

    def create_accumulator(self):
        return self.made

    def add(self, value, accumulator):
        assert seen(accumulator) == self.expected
        return self.made

    def get_result(self, accumulator) -> str:
        return seen(accumulator)

    def merge(self, a, b):
        return self.made


def state_of(descriptor, write, read):
    return lambda: stream((1, 2)).key_by(lambda v: 0, key_type=int).process(Written(descriptor, write, read))


def reads(python, value, expected) -> dict[str, Any]:
    """Pipelines whose functions see a value, and that emit how they see it."""
    made = lambda v: value  # noqa: E731
    tell = lambda v: seen(v)  # noqa: E731
    aggregate = Latest(value)
    aggregate.expected = seen(expected)

    class Side(ProcessFunction):
        tag = OutputTag("side", python)

        def process_element(self, value_: int, ctx) -> Iterable[str]:
            ctx.output(self.tag, value)
            return []

    class Keyed(KeyedProcessFunction):
        def process_element(self, value_: int, ctx):
            yield value

    class Rules(BroadcastProcessFunction):
        rules = MapStateDescriptor("rules", str, python)

        def process_element(self, value_: int, ctx) -> Iterable[str]:
            yield seen(ctx.get_broadcast_state(self.rules).get("rule"))

        def process_broadcast_element(self, value_: int, ctx) -> None:
            ctx.get_broadcast_state(self.rules).put("rule", value)

    numbers = lambda: stream().map(lambda v: v, int)  # noqa: E731
    by_zero = lambda s: s.key_by(lambda v: 0, key_type=int)  # noqa: E731
    hour = TumblingEventTimeWindows.of(timedelta(hours=1))
    return {
        "chained": lambda: numbers().map(made, python).map(tell, str),
        "behind a filter": lambda: numbers().map(made, python).filter(lambda v: True).map(tell, str),
        "behind flat_map": lambda: numbers().flat_map(lambda v: [value], python).map(tell, str),
        "not chained": lambda: numbers().map(made, python).rebalance().map(tell, str),
        "key": lambda: numbers().map(made, python).key_by(tell, key_type=str).map(lambda v: v, python).map(tell, str),
        "behind process": lambda: by_zero(numbers()).process(Keyed(), output_type=python).map(tell, str),
        "side output": lambda: numbers().process(Side()).get_side_output(Side.tag).map(tell, str),
        "broadcast": lambda: (
            both := stream(),
            both.connect(both.filter(lambda v: True).broadcast(Rules.rules)).process(Rules()),
        )[1],
        "reduce": lambda: by_zero(stream((1, 2, 3)).map(made, python)).reduce(lambda a, b: value).map(tell, str),
        "window reduce": lambda: (
            by_zero(stream((1, 2, 3)).map(made, python)).window(hour).reduce(lambda a, b: value).map(tell, str)
        ),
        "window aggregate": lambda: (
            by_zero(stream((1, 2, 3))).window(hour).aggregate(aggregate, accumulator_type=python, output_type=str)
        ),
        "value state": state_of(ValueStateDescriptor("s", python), lambda s: s.update(value), lambda s: s.value()),
        "list state": state_of(ListStateDescriptor("s", python), lambda s: s.add(value), lambda s: s.get()[0]),
        "whole list state": state_of(
            ListStateDescriptor("s", python), lambda s: s.update([value]), lambda s: s.get()[0]
        ),
        "map state": state_of(MapStateDescriptor("s", int, python), lambda s: s.put(1, value), lambda s: s.get(1)),
        "reducing state": state_of(
            ReducingStateDescriptor("s", lambda a, b: value, python),
            lambda s: (s.add(value), s.add(value)),
            lambda s: s.get(),
        ),
        "aggregating state": state_of(
            AggregatingStateDescriptor("s", aggregate, python), lambda s: s.add(1), lambda s: s.get()
        ),
    }


PLACES = list(reads(int, 1, 1))


@MODES
@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("form", FORMS)
def test_a_function_sees_the_normal_form_of_a_value_wherever_it_comes_from(form, place, mode):
    python, value, expected = FORMS[form]
    built = reads(python, value, expected)[place]()
    built.print("out")
    found = run_pipeline(built._pipeline, mode, micro_batch=1).only()
    told = seen(expected) if place != "aggregating state" else f"str {seen(expected)!r}"
    assert set(found) == {told}


BEYOND: dict[str, tuple[Any, Any, str]] = {
    "int": (int, 2**63, "an int has 64 bits"),
    "list of ints": (list[int], [1, -(2**63) - 1], r"\[\].* is declared int"),
    "surrogate": (str, "\ud800", "surrogate pair"),
    "surrogate in a dict": (dict[str, str], {"a": "\udfff"}, r"\.values\(\).* is declared str"),
    "surrogate as a key": (dict[str, int], {"\ud800": 1}, r"\.keys\(\).* is declared str"),
    "surrogate in a record": (tuple[int, str], (1, "\ud83d"), r"(\[1\]|f1).* is declared str"),
    "NaN": (Decimal, Decimal("NaN"), "18 digits"),
    "infinity": (Decimal, Decimal("-Infinity"), "18 digits"),
    "many digits": (Decimal, Decimal("1e-19"), "18 digits"),
    "large": (list[Decimal], [Decimal("1e20")], r"\[\].* is declared Decimal"),
    "timedelta": (timedelta, timedelta.max, "microseconds of 64 bits"),
    "before year 1": (datetime, datetime(1, 1, 1, tzinfo=ZoneInfo("Asia/Tokyo")), "years 1 to 9999"),
}

IN_STATE = [place for place in PLACES if "state" in place or "window" in place or place in ("broadcast", "reduce")]


@MODES
@pytest.mark.parametrize("place", IN_STATE)
@pytest.mark.parametrize("case", BEYOND)
def test_a_value_beyond_its_type_is_an_error_where_it_is_written(case, place, mode):
    python, value, words = BEYOND[case]
    built = reads(python, value, value)[place]().name("op")
    built.print("out")
    with pytest.raises((StateError, RecordTypeError), match=f"(?s)operator '.*{words}"):
        run_pipeline(built._pipeline, mode, seed=None)


@MODES
def test_a_sum_that_goes_beyond_64_bits_and_back_is_an_error_whatever_lies_between(mode):
    numbers = Pipeline("p").from_collection([2**62, 2**62, -(2**62)])
    numbers.key_by(lambda v: 0, key_type=int).reduce(lambda a, b: a + b).name("sum").print("out")
    with pytest.raises(RecordTypeError, match=r"operator 'sum': the value is declared int.* 9223372036854775808"):
        run_pipeline(numbers._pipeline, mode, micro_batch=1, seed=None)


@MODES
def test_a_function_of_a_chain_is_given_no_value_of_another_type(mode):
    built = stream().map(lambda v: "x", int).name("wrong").map(lambda v: len(v), int)
    built.print("out")
    with pytest.raises(RecordTypeError, match=r"operator 'wrong': the value is declared int, and is 'x' \(str\)"):
        run_pipeline(built._pipeline, mode)


@MODES
def test_a_record_of_a_chain_is_of_its_class(mode):
    built = stream().map(lambda v: Also(Decimal(1), EVENING, {}), Sale).map(seen, str)
    built.print("out")
    one = Sale(Decimal("1.000000000000000000"), IN_UTC, {})
    assert run_pipeline(built._pipeline, mode).only() == [seen(one)]


class Item(NamedTuple):
    name: str
    count: int | None
    color: Color


@dataclass
class Count:
    count: int
    at: datetime | None = None


@MODES
def test_records_of_plain_fields_have_their_normal_form_within_a_chain(mode):
    built = stream().map(lambda v: Item(Word.YES, Size.SMALL, Color.RED), Item)
    built = built.map(lambda item: Count(item.count, EVENING) if type(item.name) is str else Count(0), Count)
    built = built.filter(lambda count: type(count.count) is int).map(seen, str)
    built.print("out")
    assert run_pipeline(built._pipeline, mode).only() == [seen(Count(1, IN_UTC))]


@MODES
@pytest.mark.parametrize(
    ("made", "words"),
    [
        (Item(1, 1, Color.RED), r"field 'name' of Item is declared str, and is 1 \(int\)"),
        (Item("x", True, Color.RED), r"field 'count' of Item is declared int \| None, and is True \(bool\)"),
        (Item("x", None, "red"), r"field 'color' of Item is declared Color, and is 'red' \(str\)"),
        (("x", None), r"expected a Item.*, got \('x', None\) \(tuple\)"),
        (Count(1), r"expected a Item.*, got Count"),
        (None, r"expected a Item.*, got None"),
    ],
)
def test_a_record_of_plain_fields_within_a_chain_is_held_to_its_types(made, words, mode):
    built = stream().map(lambda v: made, Item).name("wrong").map(lambda item: 1, int)
    built.print("out")
    with pytest.raises(RecordTypeError, match=f"operator 'wrong': {words}"):
        run_pipeline(built._pipeline, mode)


@MODES
def test_the_least_int_and_text_in_any_script_are_accumulated(mode):
    pairs = [("Zürich", -(2**62)), ("Århus", -(2**62)), ("東京", 0)]
    built = Pipeline("p").from_collection(pairs, tuple[str, int]).key_by(lambda pair: 0, key_type=int)
    built.reduce(lambda a, b: (b[0], a[1] + b[1])).print("out")
    assert run_pipeline(built._pipeline, mode, seed=None).only()[-1] == ("東京", -(2**63))


@MODES
def test_what_a_record_has_besides_its_fields_is_not_emitted(mode):
    def noted(v: int) -> Sale:
        sale = Sale(Decimal(1), IN_UTC, {})
        sale.note = "x"  # type: ignore[attr-defined]
        return sale

    built = stream().map(noted).map(lambda sale: hasattr(sale, "note"), bool)
    built.print("out")
    assert run_pipeline(built._pipeline, mode).only() == [False]


def test_times_that_differ_in_their_zone_only_are_not_lost_from_a_set_of_keys():
    python = dict[datetime, int]
    with pytest.raises(StateError, match="two of its values are one"):
        Declared("state", "s", python).normal({IN_UTC: 1, IN_UTC.replace(tzinfo=None): 2})


zones = st.sampled_from([None, timezone.utc, NEW_YORK, ZoneInfo("UTC"), timezone(timedelta(minutes=-75))])
SCALARS: list[tuple[Any, st.SearchStrategy[Any]]] = [
    (int, st.integers(-(2**63), 2**63 - 1) | st.just(Size.SMALL)),
    (float, st.floats() | st.integers(-(2**53), 2**53)),
    (str, st.text() | st.just(Word.YES)),
    (bool, st.booleans()),
    (bytes, st.binary() | st.binary().map(bytearray)),
    (date, st.dates()),
    (datetime, st.datetimes(datetime(2, 1, 1), datetime(9998, 1, 1), timezones=zones)),
    (timedelta, st.timedeltas(timedelta(days=-(10**8)), timedelta(days=10**8))),
    (
        Decimal,
        st.decimals(-(10**19), 10**19, places=18) | st.integers(-(10**19), 10**19) | st.decimals(-9, 9, places=1),
    ),
    (Color, st.sampled_from(Color)),
]


@st.composite
def typed_values(draw, depth: int = 2) -> tuple[Any, Any]:
    """A type, and one of its values in any form."""
    kind = draw(st.sampled_from(["scalar", "optional", "list", "tuple", "dict"] if depth else ["scalar"]))
    if kind == "scalar":
        python, values = draw(st.sampled_from(SCALARS))
        return python, draw(values)
    inner, value = draw(typed_values(depth - 1))
    if kind == "optional":
        return inner | None, draw(st.sampled_from([None, value]))
    if kind == "list":
        return list[inner], [value] * draw(st.integers(0, 2))
    if kind == "tuple":
        return tuple[inner, int], (value, 1)
    return dict[str, inner], draw(st.sampled_from([dict, OrderedDict]))(a=value)


@given(typed_values())
def test_the_normal_form_is_what_arrow_makes_of_a_value(given_value):
    python, value = given_value
    kind = record_type(python)
    (back,) = kind.from_batch(kind.to_batch([value]))
    assert seen(kind.normal(value)) == seen(back)
    assert seen(Declared("state", "s", python).normal(value)) == seen(back)
    assert kind.all_normal([back]) == [back] or "nan" in repr(back)
    assert kind.normal(back) is back or not kind.fit.are_normal([back])


class Place(NamedTuple):
    name: str
    visits: int


class Counted(iterations.DeltaFunction[Place, str]):
    def update(self, solution, workset):
        return solution._replace(visits=2 * solution.visits), []


@MODES
def test_a_change_of_a_solution_set_is_held_to_its_range(mode):
    pipeline = Pipeline("p")
    places = pipeline.from_collection([Place("a", 2**62)], name="places")
    visits = pipeline.from_collection(["a"], name="visits")
    iterations.iterate_delta(places.key_by("name"), visits.key_by(str, key_type=str), Counted()).print("out")
    with pytest.raises(RecordTypeError, match=r"Counted': field 'visits' of Place is declared int, and cannot hold 92"):
        run_pipeline(pipeline, mode)


class Added(KeyedProcessFunction):
    """Adds to a list that it was given, and that so is in its state."""

    def open(self, runtime_context):
        self.state = runtime_context.get_state(ValueStateDescriptor("s", list[int]))

    def process_element(self, value: int, ctx) -> Iterable[int]:
        numbers = self.state.value() or []
        numbers.append(value)
        self.state.update(numbers)
        yield len(numbers)


@MODES
def test_a_list_that_is_changed_in_its_place_is_held_to_its_range(mode):
    built = Pipeline("p").from_collection([1, 2**62, 3]).key_by(lambda v: 0, key_type=int).process(Added())
    built.print("out")
    assert run_pipeline(built._pipeline, mode, seed=None, micro_batch=1).only() == [1, 2, 3]

    class Beyond(Added):
        def process_element(self, value: int, ctx) -> Iterable[int]:
            list(super().process_element(4 * value, ctx))
            yield value

    built = Pipeline("p").from_collection([1, 2**62, 3]).key_by(lambda v: 0, key_type=int).process(Beyond()).name("op")
    built.print("out")
    with pytest.raises(StateError, match=r"operator 'op': state 's\[\]' of key 0 is declared int, and was given 1844"):
        run_pipeline(built._pipeline, mode, seed=None, micro_batch=1)
