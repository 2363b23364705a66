"""Every shape that a record may have goes through Arrow and comes back, and what cannot is refused."""

import pickle
from dataclasses import dataclass
from datetime import date, datetime, timedelta, timezone
from decimal import Decimal
from enum import Enum
from typing import Annotated, Literal, NamedTuple, Optional

import msgspec
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dagster_unified.errors import RecordTypeError
from dagster_unified.operators.layout import declared
from dagster_unified.records import record_type


class Place(NamedTuple):
    city: str
    floor: Optional[int]  # noqa: UP045 - the older spelling counts as well


class Color(Enum):
    RED = "red"


@dataclass
class Size:
    width: float
    height: float


class Tagged(msgspec.Struct):
    tags: list[str]


class KeywordOnly(msgspec.Struct, kw_only=True):
    a: int


@dataclass(kw_only=True)
class KeywordOnlyData:
    a: int


class Order(NamedTuple):
    place: Place
    at: datetime
    day: date
    price: Decimal
    raw: bytes
    lines: list[tuple[str, int]]
    notes: dict[str, Place | None]
    numbers: tuple[int, ...]
    wait: timedelta | None


Note = msgspec.Meta(description="what it is for")


class Noted(NamedTuple):
    floor: Annotated[int | None, Note]
    sizes: Annotated[list[Size], Note]
    color: Annotated[Color | None, Note]


def round_trip(python, *records):
    kind = record_type(python)
    return kind.from_batch(kind.to_batch(records))


def test_a_note_on_a_field_says_nothing_of_its_type():
    records = [Noted(3, [Size(1.0, 2.0)], Color.RED), Noted(None, [], None)]
    assert round_trip(Noted, *records) == records


NOON = datetime(2024, 2, 29, 12, 0, 0, 123456, tzinfo=timezone.utc)


@pytest.mark.parametrize(
    ("python", "record"),
    [
        (
            Order,
            Order(
                Place("Rome", None),
                NOON,
                date(1, 1, 1),
                Decimal("-0.5"),
                b"\x00",
                [("a", 1)],
                {"x": Place("Bern", 2), "y": None},
                (1, 2),
                None,
            ),
        ),
        (Size, Size(1.5, -0.0)),
        (Tagged, Tagged(["a", "b"])),
        (tuple[str, Place], ("a", Place("Rome", 1))),
        (tuple[int], (1,)),
        (Decimal, Decimal("12345678901234567890.000000000000000001")),
        (bytes, b""),
        (tuple[Size, int], (Size(1, 2), 1)),
        (tuple[Tagged, int], (Tagged(["a"]), 1)),
        (KeywordOnly, KeywordOnly(a=1)),
        (KeywordOnlyData, KeywordOnlyData(a=1)),
        (dict[tuple[str, int], int], {("a", 1): 2}),
    ],
    ids=str,
)
def test_a_record_comes_back_as_it_went(python, record):
    assert round_trip(python, record) == [record]


def test_a_time_of_another_zone_comes_back_as_the_same_moment_in_utc():
    there = datetime(2024, 1, 1, 5, tzinfo=timezone(timedelta(hours=5)))
    (back,) = round_trip(datetime, there)
    assert back == there
    assert back.utcoffset() == timedelta(0)


def test_no_records_come_back_as_none():
    assert round_trip(Order) == []


places = st.builds(Place, st.text(), st.none() | st.integers(-(2**63), 2**63 - 1))
moments = st.datetimes(datetime(1, 1, 2), datetime(9999, 12, 30), timezones=st.just(timezone.utc))
prices = st.decimals(-(10**18), 10**18, places=18, allow_nan=False)
orders = st.builds(
    Order,
    places,
    moments,
    st.dates(),
    prices,
    st.binary(),
    st.lists(st.tuples(st.text(), st.integers(0, 9))),
    st.dictionaries(st.text(), st.none() | places),
    st.lists(st.integers(-9, 9)).map(tuple),
    st.none() | st.timedeltas(timedelta(-999), timedelta(999)),
)


@given(st.lists(orders, max_size=5))
def test_any_order_comes_back_as_it_went(records):
    assert round_trip(Order, *records) == records


def test_a_record_type_survives_pickling():
    assert pickle.loads(pickle.dumps(record_type(Order))) == record_type(Order)


@pytest.mark.parametrize(
    ("python", "words"),
    [
        (dict, "p: .*says nothing about the columns"),
        (object, "p: .*says nothing"),
        (int | str, "p: .*union of several types"),
        (None, "p: None is not a record type"),
        (NamedTuple("A", [("x", complex)]), "p: field 'x' of A: no column type for complex; use one of str, int"),
        (NamedTuple("A", [("x", int | str)]), "p: field 'x' of A: a union of several types"),
        (
            NamedTuple("A", [("x", Literal["one"])]),
            "p: field 'x' of A: a Literal has no column type; declare an Enum, or str or int",
        ),
        (
            NamedTuple("A", [("x", list)]),
            "p: field 'x' of A: Any has no column type, nor has a dict, a list",
        ),
        (tuple[int, set[int]], r"p: item 1 of tuple\[int, set\[int\]\]: no column type for set"),
        (
            NamedTuple("A", [("place", NamedTuple("B", [("z", set[int])]))]),
            "p: field 'place' of A.z: no column type for set",
        ),
    ],
)
def test_a_type_without_columns_is_an_error_that_names_its_field(python, words):
    with pytest.raises(RecordTypeError, match=words):
        record_type(python, "p")


class Far(NamedTuple):
    at: datetime | None
    days: list[date]


@pytest.mark.parametrize(("field", "values"), [("at", (2**58, [0])), ("days", (None, [0, 2**30]))])
def test_a_time_that_python_does_not_have_names_the_field(field, values):
    kind = record_type(Far)
    at, days = values
    times = pa.array([at], pa.int64()).cast(pa.timestamp("us", "UTC"))
    lists = pa.ListArray.from_arrays([0, len(days)], pa.array(days, pa.int32()).cast(pa.date32()))
    batch = pa.RecordBatch.from_arrays([times, lists], kind.names)
    with pytest.raises(
        RecordTypeError, match=f"field '{field}' of Far: a value is a time outside of the years 1 to 9999"
    ):
        kind.from_batch(batch)


def test_names_of_the_library_are_reserved():
    reserved = dataclass(type("Reserved", (), {"__annotations__": {"__ts": int}}))
    with pytest.raises(RecordTypeError, match="are reserved"):
        record_type(reserved)


class Part(NamedTuple):
    a: int


class Whole(NamedTuple):
    value: int
    part: Part | None = None
    several: list[int] = []
    parts: list[Part] = []
    by_name: dict[str, int] = {}
    lists: dict[str, list[int]] = {}
    counts: dict[str, int | None] = {}
    maybe: list[int | None] | None = None


@pytest.mark.parametrize(
    ("row", "path"),
    [
        ({"value": None}, "value"),
        ({"part": {"a": None}}, "part.a"),
        ({"several": [1, None]}, r"several\[\]"),
        ({"parts": [{"a": 1}, None]}, r"parts\[\]"),
        ({"parts": [{"a": 1}, {"a": None}]}, r"parts\[\].a"),
        ({"by_name": {"a": 1, "b": None}}, r"by_name\[\]"),
        ({"lists": {"a": [1, None]}}, r"lists\[\]\[\]"),
        ({"several": None}, "several"),
    ],
)
def test_a_null_that_the_type_does_not_allow_is_an_error_where_it_is_read(row, path):
    records = record_type(Whole)
    whole = {"value": 1, "part": None, "several": [], "parts": [], "by_name": {"k": 1}, "lists": {"k": [1]}}
    whole |= {"counts": {"k": None}, "maybe": [None, 1]}
    loose = pa.schema([_loose(field) for field in records.schema])
    batch = pa.RecordBatch.from_pylist([{**whole, "part": {"a": 1}}, whole, {**whole, **row}], loose)
    typed = declared(batch.columns, records.schema)
    assert records.from_batch(typed.slice(0, 2))[1] == Whole(**whole)
    for each in (typed, typed.slice(1), typed.slice(2)):
        with pytest.raises(
            RecordTypeError, match=rf"^field '{path}' of Whole is null, and its type does not allow None"
        ):
            records.from_batch(each)


def _loose(field):
    kind = field.type
    if pa.types.is_struct(kind):
        kind = pa.struct([_loose(member) for member in kind])
    elif pa.types.is_map(kind):
        kind = pa.map_(kind.key_type, _loose(kind.item_field))
    elif pa.types.is_list(kind):
        kind = pa.list_(_loose(kind.value_field))
    return pa.field(field.name, kind)


def test_a_null_outside_of_a_slice_is_not_of_it():
    column = pa.array([{"a": None}, {"b": 1}, None, {"c": 2}, {"d": None}], pa.map_(pa.string(), pa.int64()))
    records = record_type(tuple[dict[str, int] | None])
    batch = pa.record_batch([column], records.names)
    assert records.from_batch(batch.slice(1, 3)) == [({"b": 1},), (None,), ({"c": 2},)]
    assert records.from_batch(batch.slice(0, 0)) == []
    for place in (0, 4):
        with pytest.raises(RecordTypeError, match=r"field 'f0\[\]' of .* is null"):
            records.from_batch(batch.slice(place, 1))


class Plain(NamedTuple):
    text: str
    number: int
    ratio: float | None
    flag: bool


class Word(str):
    pass


@given(
    st.lists(
        st.builds(
            Plain,
            st.one_of(st.text(max_size=3), st.sampled_from([Word("a"), "\ud800", None])),
            st.one_of(st.integers(-(2**63), 2**63 - 1), st.sampled_from([2**63, -(2**63) - 1, True, 2.0])),
            st.one_of(st.none(), st.floats(allow_nan=False), st.just(1)),
            st.one_of(st.booleans(), st.just(1)),
        )
        | st.just(("a", 1, None, True)),
        min_size=1,
        max_size=3,
    )
)
def test_records_that_are_encoded_at_once_are_in_normal_form(records):
    kind = record_type(Plain)
    found = kind.plain_batch(records)
    if found is not None:
        assert kind.all_normal(records) is records
        assert found.equals(kind.to_batch(records))


@pytest.mark.parametrize(
    ("python", "record"),
    [
        (Plain, Plain("a", 1, None, True)),
        (Plain, Plain("b", -(2**63), 0.5, False)),
        (Size, Size(1.0, 2.0)),
        (tuple[str, int], ("a", 1)),
        (int, 1),
    ],
)
def test_plain_records_are_encoded_at_once(python, record):
    found = record_type(python).plain_batch([record, record])
    assert record_type(python).from_batch(found) == [record, record]


def test_a_record_with_more_than_its_fields_is_not_encoded_at_once():
    size = Size(1.0, 2.0)
    size.color = "red"
    assert record_type(Size).plain_batch([size]) is None
