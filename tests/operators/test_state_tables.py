"""The state of an operator as a typed table: through Parquet and back it is what it was, whatever its types are."""

import dataclasses
from datetime import date, datetime, timedelta, timezone
from decimal import Decimal
from enum import Enum
from io import BytesIO
from typing import Annotated, NamedTuple

import msgspec
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from dagster_unified.api import (
    AggregatingStateDescriptor,
    ListStateDescriptor,
    MapStateDescriptor,
    ReducingStateDescriptor,
    StateTtlConfig,
    TimeWindow,
    ValueStateDescriptor,
)
from dagster_unified.errors import StateError
from dagster_unified.operators.state.chunks import SpilledList, SpilledMap
from dagster_unified.operators.state.pages import Content
from dagster_unified.operators.state.table import ENCODED, HELD, KeyShape, StateTable
from dagster_unified.operators.time import MAX_TIMESTAMP, MIN_TIMESTAMP


class Color(Enum):
    RED = "red"
    BLUE = "blue"


class Level(Enum):
    LOW = 1
    HIGH = 2


class Inner(NamedTuple):
    name: str | None
    at: datetime | None
    tags: list[str]


class Outer(NamedTuple):
    inner: Inner
    maybe: Inner | None
    pair: tuple[int, str]
    color: Color


@dataclasses.dataclass(frozen=True)
class Point:
    x: int
    y: float | None = None


class Shape(msgspec.Struct, frozen=True):
    points: list[Point]
    area: Decimal | None


class Empty(NamedTuple):
    pass


INT = st.integers(-(2**63), 2**63 - 1)
BIG = st.integers(-(2**63), 2**64 - 1)
"""msgpack has ints of 64 bits, with a sign or without; Arrow's column has a sign."""
TEXT = st.text(max_size=5)
FLOAT = st.floats(allow_nan=False)
NAIVE = st.datetimes()
AWARE = st.datetimes(timezones=st.just(timezone.utc))
MIXED = NAIVE | AWARE
DECIMAL = st.decimals(allow_nan=False, allow_infinity=False)
WINDOW = st.builds(TimeWindow, INT, INT)
INNER = st.builds(Inner, st.none() | TEXT, st.none() | MIXED, st.lists(TEXT, max_size=2))
OUTER = st.builds(Outer, INNER, st.none() | INNER, st.tuples(BIG, TEXT), st.sampled_from(Color))
POINT = st.builds(Point, INT, st.none() | FLOAT)
SHAPE = st.builds(Shape, st.lists(POINT, max_size=2), st.none() | DECIMAL)

TYPES = [
    (int, BIG),
    (str, TEXT),
    (float, FLOAT),
    (bool, st.booleans()),
    (bytes, st.binary(max_size=4)),
    (date, st.dates()),
    (datetime, MIXED),
    (timedelta, st.timedeltas()),
    (Decimal, DECIMAL),
    (Color, st.sampled_from(Color)),
    (Level, st.sampled_from(Level)),
    (int | str, INT | TEXT),
    (int | None, st.none() | INT),
    (list[int], st.lists(BIG, max_size=3)),
    (list[int | None], st.lists(st.none() | INT, max_size=3)),
    (list[datetime], st.lists(MIXED, max_size=3)),
    (list[list[str]], st.lists(st.lists(TEXT, max_size=2), max_size=2)),
    (tuple[int, ...], st.lists(INT, max_size=3).map(tuple)),
    (tuple[str, int | None], st.tuples(TEXT, st.none() | INT)),
    (set[int], st.sets(INT, max_size=3)),
    (frozenset[str], st.frozensets(TEXT, max_size=3)),
    (dict[str, int | None], st.dictionaries(TEXT, st.none() | INT, max_size=3)),
    (dict[TimeWindow, list[int]], st.dictionaries(WINDOW, st.lists(INT, max_size=2), max_size=3)),
    (dict[tuple[str, int], Point], st.dictionaries(st.tuples(TEXT, INT), POINT, max_size=2)),
    (dict[Color, Level], st.dictionaries(st.sampled_from(Color), st.sampled_from(Level))),
    (dict[int, dict[str, datetime]], st.dictionaries(INT, st.dictionaries(TEXT, MIXED, max_size=2), max_size=2)),
    (TimeWindow, WINDOW),
    (Outer, OUTER),
    (Point, POINT),
    (Shape, SHAPE),
    (Empty, st.just(Empty())),
]
KEYS = [
    (("key",), str, TEXT),
    (("key",), int, INT),
    (("key",), tuple[str, int], st.tuples(TEXT, INT)),
    (("key",), date, st.dates()),
    (("key",), Color, st.sampled_from(Color)),
    (("shop", "day"), tuple[str, date], st.tuples(TEXT, st.dates())),
    (("color", "at"), tuple[Color, datetime], st.tuples(st.sampled_from(Color), AWARE)),
]


@st.composite
def cases(draw):
    """A table's columns and content, of any types."""
    names, key_type, keys = draw(st.sampled_from(KEYS))
    kinds = draw(st.lists(st.sampled_from(TYPES), max_size=4))
    states, values = {}, {}
    for number, (python, strategy) in enumerate(kinds):
        name = draw(st.sampled_from([f"state{number}", "key" if number == 0 else f"__s{number}"]))
        if draw(st.booleans()):
            states[name], values[name] = ValueStateDescriptor(name, python), strategy.filter(lambda v: v is not None)
        else:
            states[name] = ListStateDescriptor(name, python)
            values[name] = st.lists(strategy, max_size=3)
    record, records = draw(st.sampled_from(TYPES))
    moments = st.sampled_from([MIN_TIMESTAMP, MAX_TIMESTAMP]) | INT
    timers = st.lists(st.tuples(moments, keys, st.integers(0, 3)), max_size=4, unique_by=lambda t: t[:2])
    cells = st.fixed_dictionaries({}, optional=values)
    content = Content(
        draw(st.dictionaries(keys, cells, max_size=4)),
        event_timers=draw(timers),
        processing_timers=draw(timers),
        held_back=draw(st.lists(st.tuples(moments, keys, records), max_size=4)),
    )
    return StateTable("p: operator 'o'", KeyShape(names, key_type), record, states, {}), content


def through_parquet(batch):
    file = BytesIO()
    pq.write_table(pa.Table.from_batches([batch]), file, store_schema=False)
    file.seek(0)
    found = pq.read_table(file).cast(batch.schema).combine_chunks()
    return found.to_batches()[0] if found.num_rows else batch.slice(0, 0)


def by_key(entries):
    return sorted(entries, key=lambda entry: repr(entry[1]))


def states_of(content):
    return {key: {name: exact(value) for name, value in state.items()} for key, state in content.keys.items() if state}


def exact(value):
    """The value with its type, so that True is not 1, nor a list a tuple."""
    if isinstance(value, (list, tuple)):
        return type(value), [exact(v) for v in value]
    if isinstance(value, dict):
        return dict, [(exact(k), exact(v)) for k, v in value.items()]
    return type(value), value


@settings(suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large], deadline=None)
@given(cases())
def test_state_is_what_it_was_after_a_way_through_parquet(case):
    table, content = case
    back = table.content(through_parquet(table.rows(content)))
    assert states_of(back) == states_of(content)
    assert by_key(back.event_timers) == by_key(content.event_timers)
    assert by_key(back.processing_timers) == by_key(content.processing_timers)
    assert exact(by_key(back.held_back)) == exact(by_key(content.held_back))


def table_of(**states):
    return StateTable("p: operator 'o'", KeyShape(("key",), str), int, states, {})


def test_what_arrow_has_a_type_for_is_in_columns_and_the_rest_beside_them():
    table = table_of(
        n=ValueStateDescriptor("n", int),
        at=ValueStateDescriptor("at", datetime),
        any=ValueStateDescriptor("any", int | str),
    )
    naive, aware = datetime(2026, 1, 1), datetime(2026, 1, 1, tzinfo=timezone.utc)
    rows = table.rows(Content({"a": {"n": 1, "at": aware, "any": "x"}, "b": {"n": 2**63, "at": naive}}))
    first, second = rows.select(["key", "n", "at", ENCODED]).to_pylist()
    assert first == {"key": "a", "n": 1, "at": aware, ENCODED: [("any", msgspec.msgpack.encode("x"))]}
    assert (second["n"], second["at"]) == (None, None)
    encoded = {name: msgspec.msgpack.decode(data) for name, data in second[ENCODED]}
    assert encoded == {"n": 2**63, "at": "2026-01-01T00:00:00"}


def test_a_number_that_nothing_holds_is_an_error_that_names_the_state():
    table = table_of(n=ValueStateDescriptor("n", int))
    says = rf"p: operator 'o': state 'n' cannot be stored: .*; it was given {2**70}$"
    with pytest.raises(StateError, match=says):
        table.rows(Content({"a": {"n": 1}, "b": {"n": 2**70}}))


def test_lists_and_maps_of_every_kind_of_state_are_columns():
    ttl = StateTtlConfig(timedelta(hours=1))
    table = table_of(
        seen=MapStateDescriptor("seen", TimeWindow, int),
        sum=ReducingStateDescriptor("sum", max, float),
        mean=AggregatingStateDescriptor("mean", max, tuple[int, float]),
        kept=ListStateDescriptor("kept", int, ttl),
    )
    types = {name: str(table.schema.field(name).type) for name in ("seen", "sum", "mean", "kept")}
    assert types["seen"].startswith("map<struct<start: int64 not null, end: int64 not null>, int64")
    assert (types["sum"], types["mean"]) == ("double", "struct<f0: int64 not null, f1: double not null>")
    assert types["kept"] == "list<element: struct<value: int64 not null, renewed: int64 not null> not null>"


def test_a_large_list_and_a_large_map_are_written_whole():
    table = table_of(values=ListStateDescriptor("values", int), seen=MapStateDescriptor("seen", str, int))
    values, seen = SpilledList([0], 2, [3], lambda _: [1, 2]), SpilledMap([0], 1, lambda _: {"x": 1})
    back = table.content(through_parquet(table.rows(Content({"a": {"values": values, "seen": seen}}))))
    assert back.keys == {"a": {"values": [1, 2, 3], "seen": {"x": 1}}}


def test_a_state_that_nobody_declared_yet_is_kept_as_it_was_stored():
    undeclared = Content({"a": {"n": 1, "later": msgspec.Raw(msgspec.msgpack.encode([1, 2]))}})
    table = table_of(n=ValueStateDescriptor("n", int))
    back = table.content(through_parquet(table.rows(undeclared)))
    assert (back.keys["a"]["n"], bytes(back.keys["a"]["later"])) == (1, msgspec.msgpack.encode([1, 2]))


def test_broadcast_state_has_a_row_without_a_key():
    broadcast = {"rules": MapStateDescriptor("rules", str, int | str), "n": MapStateDescriptor("n", str, int)}
    states = {"n": ValueStateDescriptor("n", int)}
    table = StateTable("p: operator 'o'", KeyShape(("key",), str), int, states, broadcast)
    maps = {"rules": {"a": 1, "b": "x"}, "n": {"c": 3}}
    row = through_parquet(table.broadcast_row(maps))
    assert (row["key"].to_pylist(), row["n (broadcast state)"].to_pylist()) == ([None], [[("c", 3)]])
    assert table.broadcast_of(row) == maps


def test_elements_that_are_held_back_are_a_list_of_records():
    table = table_of()
    rows = table.rows(Content(held_back=[(5, "a", 1), (6, "b", 2), (4, "a", 3)]))
    assert dict(zip(rows["key"].to_pylist(), rows[HELD].to_pylist(), strict=True)) == {
        "a": [{"timestamp": 5, "record": 1}, {"timestamp": 4, "record": 3}],
        "b": [{"timestamp": 6, "record": 2}],
    }


# What of a type may change


HOUR = StateTtlConfig(timedelta(hours=1))


class Before(NamedTuple):
    a: int
    b: str


class Added(NamedTuple):
    a: int
    b: str
    c: float = 0.5


class AddedList(msgspec.Struct):
    a: int
    b: str
    c: list[int] = []


class Dropped(NamedTuple):
    b: str


class Widened(NamedTuple):
    a: float
    b: str


class MadeOptional(NamedTuple):
    a: int | None
    b: str


class Reordered(NamedTuple):
    b: str
    a: int


class Required(NamedTuple):
    a: int
    b: str
    c: float


class Retyped(NamedTuple):
    a: str
    b: str


class Stricter(NamedTuple):
    name: str


class Looser(NamedTuple):
    name: str | None


def migrated(before, after, value):
    """What a value that was stored as one type is as another."""
    old, new = table_of(s=ValueStateDescriptor("s", before)), table_of(s=ValueStateDescriptor("s", after))
    rows = through_parquet(old.rows(Content({"a": {"s": value}})))
    new.check(old.schema)
    return new.content(rows).keys["a"]["s"]


@pytest.mark.parametrize(
    ("before", "after", "value", "expected"),
    [
        (Before, Added, Before(1, "x"), Added(1, "x", 0.5)),
        (Before, AddedList, Before(1, "x"), AddedList(1, "x", [])),
        (Before, Dropped, Before(1, "x"), Dropped("x")),
        (Before, Widened, Before(1, "x"), Widened(1.0, "x")),
        (Before, MadeOptional, Before(1, "x"), MadeOptional(1, "x")),
        (Before, Reordered, Before(1, "x"), Reordered("x", 1)),
        (Looser, Stricter, Looser("x"), Stricter("x")),
        (int, float, 3, 3.0),
        (int, int | None, 3, 3),
        (str, Color, "red", Color.RED),
        (list[Before], list[Added], [Before(1, "x")], [Added(1, "x")]),
        (list[int], tuple[float, ...], [1, 2], (1.0, 2.0)),
        (list[int], set[int], [1, 2], {1, 2}),
        (dict[str, Before], dict[str, Added], {"k": Before(1, "x")}, {"k": Added(1, "x")}),
        (dict[Before, int], dict[Reordered, float], {Before(1, "x"): 1}, {Reordered("x", 1): 1.0}),
        (tuple[int, Before], tuple[float, Added | None], (1, Before(2, "x")), (1.0, Added(2, "x"))),
        (Outer, Outer, *[Outer(Inner(None, None, []), None, (1, "x"), Color.RED)] * 2),
    ],
)
def test_fields_may_be_added_with_a_default_dropped_widened_and_made_optional(before, after, value, expected):
    assert exact(migrated(before, after, value)) == exact(expected)


@pytest.mark.parametrize(
    ("declared", "stored"),
    [
        (datetime, datetime(2026, 1, 1, tzinfo=timezone.utc)),
        (Annotated[datetime, msgspec.Meta(tz=False)], datetime(2026, 1, 1)),
        (datetime | None, datetime(2026, 1, 1, tzinfo=timezone.utc)),
    ],
)
@pytest.mark.parametrize("kind", [pa.timestamp("us"), pa.timestamp("us", "UTC")], ids=str)
def test_a_datetime_without_a_time_zone_is_in_utc(declared, stored, kind):
    column = pa.array([datetime(2026, 1, 1, tzinfo=timezone.utc)], pa.timestamp("us", "UTC")).cast(kind)
    rows = pa.RecordBatch.from_pydict({"key": ["a"], "s": column})
    assert table_of(s=ValueStateDescriptor("s", declared)).content(rows).keys == {"a": {"s": stored}}


@pytest.mark.parametrize(
    ("before", "after", "value", "what"),
    [
        (Looser, Stricter, Looser(None), "field 'name' may not be None any more, and is None 1 times"),
        (list[Looser], list[Stricter], [Looser("x"), Looser(None)], "field 'name' may not be None any more"),
        (list[int | None], list[int], [1, None], "a list's element may not be None any more"),
        (list[int | None], list[float], [1, None], "a list's element may not be None any more"),
        (dict[str, int | None], dict[str, int], {"k": None}, "a map's value may not be None any more"),
        (dict[str, int | None], dict[str, float], {"k": None}, "a map's value may not be None any more"),
        (tuple[int | None, int], tuple[float, float], (None, 1), "item 0 of a tuple may not be None any more"),
        (MadeOptional, Widened, MadeOptional(None, "x"), "field 'a' may not be None any more"),
    ],
)
def test_a_none_where_none_is_no_longer_allowed_is_an_error(before, after, value, what):
    with pytest.raises(StateError, match=f"p: operator 'o': state 's': {what}"):
        migrated(before, after, value)


@pytest.mark.parametrize(
    ("names", "python", "message"),
    [
        (
            ("shop",),
            str,
            "p: operator 'o' is keyed by shop, and the savepoint's columns are key, s, __event_timers,"
            " __processing_timers, __held_back, __encoded; key it as it was, or give it another uid",
        ),
        (
            ("key", "day"),
            tuple[str, date],
            "p: operator 'o' is keyed by key, day, and the savepoint's columns are key, s, __event_timers,"
            " __processing_timers, __held_back, __encoded; key it as it was, or give it another uid",
        ),
        (
            ("key",),
            int,
            "p: operator 'o': key 'key' is declared int, and the savepoint has string; fields may be added with a"
            " default, dropped, widened or made optional; otherwise keep the type as it was",
        ),
    ],
)
def test_another_key_is_an_error(names, python, message):
    old = table_of(s=ValueStateDescriptor("s", int))
    new = StateTable("p: operator 'o'", KeyShape(names, python), int, {"s": ValueStateDescriptor("s", int)}, {})
    with pytest.raises(StateError) as raised:
        new.check(old.schema)
    assert str(raised.value) == message


def test_a_key_of_fewer_columns_is_an_error():
    old = StateTable("p: operator 'o'", KeyShape(("key", "day"), tuple[str, date]), int, {}, {})
    with pytest.raises(StateError, match="is keyed by key, and the savepoint's key also has day; key it as it was"):
        table_of().check(old.schema)


def test_a_state_that_is_no_longer_declared_is_an_error():
    old, new = table_of(count=ValueStateDescriptor("count", int)), table_of(counts=ValueStateDescriptor("counts", int))
    with pytest.raises(StateError) as raised:
        new.check(old.schema)
    assert str(raised.value) == (
        "p: operator 'o' declares no state 'count', which the savepoint has; did you mean 'counts'? Or declare it in"
        " open(), or drop it with execution.savepoint.ignore-unclaimed-state=true"
    )


@pytest.mark.parametrize(
    ("plain", "kept"),
    [
        (ValueStateDescriptor("s", tuple[int, int]), ValueStateDescriptor("s", int, HOUR)),
        (ListStateDescriptor("s", tuple[str, int]), ListStateDescriptor("s", str, HOUR)),
        (MapStateDescriptor("s", str, tuple[Before | None, int]), MapStateDescriptor("s", str, Before | None, HOUR)),
        (MapStateDescriptor("s", str, tuple[Before | None, int]), MapStateDescriptor("s", str, Before, HOUR)),
    ],
)
def test_a_time_to_live_is_no_part_of_a_tuple_and_a_tuple_is_none(plain, kept):
    with pytest.raises(StateError, match=r"state 's' is declared \w+ state of .* with a time to live, and .*<f0: "):
        table_of(s=kept).check(table_of(s=plain).schema)
    with pytest.raises(
        StateError, match=r"state 's' is declared \w+\[.*\], and the savepoint has .*<value: .*, renewed: "
    ):
        table_of(s=plain).check(table_of(s=kept).schema)


@pytest.mark.parametrize(
    ("descriptor", "stored"),
    [
        (ValueStateDescriptor("s", tuple[int, int], HOUR), ((1, 2), 3)),
        (ValueStateDescriptor("s", Before, HOUR), (Before(1, "x"), 3)),
        (ValueStateDescriptor("s", datetime, HOUR), (datetime(2026, 1, 1), 3)),  # which its column cannot hold
        (ValueStateDescriptor("s", int | str, HOUR), ("x", 3)),
        (ListStateDescriptor("s", Decimal, HOUR), [(Decimal("1.50"), 3), (Decimal(2), 4)]),
        (
            MapStateDescriptor("s", Before, Before, HOUR),
            {Before(1, "x"): (Before(2, "y"), 3), Before(3, "z"): (None, 4)},
        ),
    ],
)
def test_values_with_a_time_to_live_come_back_as_they_were(descriptor, stored):
    table = table_of(s=descriptor)
    assert table.content(through_parquet(table.rows(Content({"a": {"s": stored}})))).keys == {"a": {"s": stored}}


@pytest.mark.parametrize(
    ("before", "after", "declared", "stored"),
    [
        (str, int, "int", "string"),
        (float, int, "int", "double"),
        (Before, Required, "Required", "struct<a: int64 not null, b: string not null>"),
        (Before, Retyped, "Retyped", "struct<a: int64 not null, b: string not null>"),
        (Before, int, "int", "struct<a: int64 not null, b: string not null>"),
        (list[str], list[int], "list[int]", "list<element: string not null>"),
        (dict[str, int], dict[int, int], "dict[int, int]", "map<string, int64>"),
        (
            tuple[int, int],
            tuple[int, int, int],
            "tuple[int, int, int]",
            "struct<f0: int64 not null, f1: int64 not null>",
        ),
    ],
)
def test_any_other_change_of_a_type_is_an_error_that_names_the_state_and_both_types(before, after, declared, stored):
    old, new = table_of(s=ValueStateDescriptor("s", before)), table_of(s=ValueStateDescriptor("s", after))
    with pytest.raises(StateError) as raised:
        new.check(old.schema)
    assert str(raised.value) == (
        f"p: operator 'o': state 's' is declared {declared}, and the savepoint has {stored}; fields may be added with a"
        " default, dropped, widened or made optional; otherwise keep the type as it was"
    )
