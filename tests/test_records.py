"""Record types: from annotations to Arrow columns and back."""

from dataclasses import dataclass
from datetime import date, datetime, timedelta, timezone
from decimal import Decimal
from typing import NamedTuple

import msgspec
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dagster_unified.errors import RecordTypeError
from dagster_unified.operators.layout import declared
from dagster_unified.records import record_type


class Inner(NamedTuple):
    a: int
    b: str | None


class Everything(NamedTuple):
    text: str
    number: int
    maybe: int | None
    real: float
    flag: bool
    raw: bytes
    at: datetime
    day: date
    money: Decimal
    span: timedelta
    items: list[Inner]
    table: dict[str, float]
    pair: tuple[int, str]
    inner: Inner


@dataclass
class Point:
    x: int
    y: int


class Struct(msgspec.Struct):
    x: int
    name: str | None = None


def round_trip(python, records):
    kind = record_type(python)
    return kind.from_batch(kind.to_batch(records))


def test_every_supported_type_comes_back_as_it_went():
    record = Everything(
        "a",
        1,
        None,
        1.5,
        True,
        b"x",
        datetime(2020, 1, 1, tzinfo=timezone.utc),
        date(2020, 1, 2),
        Decimal("1.5"),
        timedelta(seconds=3),
        [Inner(1, None)],
        {"k": 2.0},
        (1, "p"),
        Inner(2, "z"),
    )
    assert round_trip(Everything, [record]) == [record]


@pytest.mark.parametrize(
    ("python", "records"),
    [
        (Point, [Point(1, 2)]),
        (Struct, [Struct(1), Struct(2, "n")]),
        (int, [1, 2]),
        (str, ["a"]),
        (tuple[str, int], [("a", 1)]),
        (list[int], [[1, 2], []]),
    ],
)
def test_classes_tuples_and_plain_values_are_records(python, records):
    assert round_trip(python, records) == records


@given(st.lists(st.builds(Inner, st.integers(-(2**63), 2**63 - 1), st.none() | st.text())))
def test_any_records_round_trip(records):
    assert round_trip(Inner, records) == records


@pytest.mark.parametrize(
    ("python", "words"),
    [
        (dict, "says nothing about the columns"),
        (object, "says nothing"),
        (int | str, "union of several types"),
        (None, "None is not a record type"),
    ],
)
def test_a_type_without_columns_is_an_error_that_says_what_to_use(python, words):
    with pytest.raises(RecordTypeError, match=words):
        record_type(python, "p: operator 'x'")


def test_a_value_that_does_not_fit_names_the_field_and_the_record():
    with pytest.raises(
        RecordTypeError, match=r"field 'a' of Inner is declared int, and is 'one' \(str\) in Inner\(a='one', b=None\)"
    ):
        record_type(Inner).to_batch([Inner("one", None)])


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


def test_none_in_a_field_that_does_not_allow_it_says_how_to_allow_it():
    with pytest.raises(RecordTypeError, match=r"annotate it as '\| None'"):
        record_type(Inner).to_batch([Inner(None, None)])


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
