"""Every shape that a record may have goes through Arrow and comes back."""

import pickle
from dataclasses import dataclass
from datetime import date, datetime, timedelta, timezone
from decimal import Decimal
from typing import Literal, NamedTuple, Optional

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dagster_unified.errors import RecordTypeError
from dagster_unified.records import record_type


class Place(NamedTuple):
    city: str
    floor: Optional[int]  # noqa: UP045 - the older spelling counts as well


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


def round_trip(python, *records):
    kind = record_type(python)
    return kind.from_batch(kind.to_batch(records))


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
        (tuple[int, ...], (1, 2, 3)),
        (dict[str, int], {"a": 1}),
        (list[int | None], [1, None]),
        (datetime, NOON),
        (date, date(2024, 2, 29)),
        (Decimal, Decimal("12345678901234567890.000000000000000001")),
        (bytes, b""),
        (bool, False),
        (int | None, None),
    ],
    ids=str,
)
def test_a_record_comes_back_as_it_went(python, record):
    assert round_trip(python, record) == [record]


@pytest.mark.parametrize("python", [tuple[Size, int], tuple[Tagged, int]], ids=str)
def test_a_dataclass_or_struct_inside_a_record_comes_back(python):
    inner = Size(1, 2) if python == tuple[Size, int] else Tagged(["a"])
    assert round_trip(python, (inner, 1)) == [(inner, 1)]


@pytest.mark.parametrize("python", [KeywordOnly, KeywordOnlyData])
def test_a_class_with_keyword_only_fields_comes_back(python):
    assert round_trip(python, python(a=1)) == [python(a=1)]


def test_a_dict_with_tuples_as_keys_comes_back():
    assert round_trip(dict[tuple[str, int], int], {("a", 1): 2}) == [{("a", 1): 2}]


def test_a_time_of_another_zone_comes_back_as_the_same_moment_in_utc():
    there = datetime(2024, 1, 1, 5, tzinfo=timezone(timedelta(hours=5)))
    (back,) = round_trip(datetime, there)
    assert back == there
    assert back.utcoffset() == timedelta(0)


def test_a_naive_time_is_taken_as_utc():
    assert round_trip(datetime, datetime(2024, 1, 1)) == [datetime(2024, 1, 1, tzinfo=timezone.utc)]


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


def test_a_record_of_another_class_is_named():
    with pytest.raises(
        RecordTypeError,
        match=(r"expected a Size\(width: double, height: double\), got 3 \(int\); convert it"),
    ):
        record_type(Size).to_batch([Size(1, 2), 3])


@pytest.mark.parametrize(
    ("python", "words"),
    [
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
def test_a_type_without_a_column_type_names_its_field(python, words):
    with pytest.raises(RecordTypeError, match=words):
        record_type(python, "p")
