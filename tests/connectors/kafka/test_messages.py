import json
import re
import time
from datetime import datetime, timedelta, timezone
from decimal import Decimal
from enum import Enum
from typing import NamedTuple

import pytest

from dagster_unified.connectors.kafka.messages import MessageEncoder, MessageFormat, Messages, joined
from dagster_unified.errors import PipelineError, SinkError, UserFunctionError
from dagster_unified.records import record_type


class Colour(Enum):
    RED = "red"


class Timed(NamedTuple):
    at: datetime


class Part(NamedTuple):
    name: str
    colour: Colour


class Sale(NamedTuple):
    shop: str
    amount: int
    at: datetime | None = None
    gone: bool = False
    code: bytes | None = None


class Rich(NamedTuple):
    price: Decimal
    part: Part
    parts: list[Part]
    colour: Colour
    took: timedelta
    tags: dict[str, int]
    missing: float | None


NOON = datetime(2024, 1, 1, 12, tzinfo=timezone.utc)
SALES = [Sale("north", 3, NOON, False, b"\x00"), Sale("süd", 4, None, True, None)]


def encoded(records, **made):
    kind = record_type(type(records[0]), "test")
    form = MessageFormat(**made)
    form.check(kind, "test")
    return MessageEncoder(form, kind, "p: sink 's'").encode(kind.to_batch(records))


def test_a_record_is_a_json_object_and_has_no_key_unless_asked():
    messages = encoded(SALES)
    assert messages.keys is None
    assert [json.loads(value) for value in messages.values] == [
        {"shop": "north", "amount": 3, "at": "2024-01-01T12:00:00Z", "gone": False, "code": "AA=="},
        {"shop": "süd", "amount": 4, "at": None, "gone": True, "code": None},
    ]


def test_every_type_has_its_json():
    part = Part("wheel", Colour.RED)
    rich = Rich(Decimal("1.50"), part, [part], Colour.RED, timedelta(seconds=90), {"a": 1}, None)
    (value,) = encoded([rich]).values
    wheel = {"name": "wheel", "colour": "red"}
    assert json.loads(value) | {"price": ""} == {
        "price": "", "part": wheel, "parts": [wheel], "colour": "red",
        "took": "PT90S", "tags": {"a": 1}, "missing": None,
    }  # fmt: skip
    assert Decimal(json.loads(value)["price"]) == Decimal("1.5")


@pytest.mark.parametrize(
    ("key", "keys"),
    [
        (("shop",), [b"north", "süd".encode()]),
        (("amount",), [b"3", b"4"]),
        (("code",), [b"\x00", None]),
        (("shop", "amount"), [b'{"shop":"north","amount":3}', '{"shop":"süd","amount":4}'.encode()]),
        (lambda sale: f"{sale.shop}/{sale.amount}", [b"north/3", "süd/4".encode()]),
    ],
)
def test_a_key_is_a_field_several_or_a_function(key, keys):
    assert encoded(SALES, key=key).keys == keys


def test_a_value_is_a_field_or_a_function_whose_none_is_a_message_without_one():
    assert encoded(SALES, value="shop").values == [b"north", "süd".encode()]
    assert encoded(SALES, value="code").values == [b"\x00", None]
    assert encoded(SALES, value=lambda sale: None if sale.gone else b"there").values == [b"there", None]


class Tallied(NamedTuple):
    shop: str
    by_place: dict[tuple[int, int], int]


def test_a_field_in_no_part_may_have_a_type_that_no_format_holds():
    records = [Tallied("north", {(1, 2): 3})]
    assert encoded(records, value="shop").values == [b"north"]
    assert encoded(records, key=("shop",), value=lambda tallied: str(tallied.by_place)).values == [b"{(1, 2): 3}"]
    with pytest.raises(PipelineError, match="test: key: the field 'by_place' is a dict whose keys are not texts"):
        encoded(records, key=("by_place",), value="shop")
    with pytest.raises(PipelineError, match="test: key: the field 'by_place' is a dict whose keys are not texts"):
        encoded(records, key=("shop", "by_place"), value="shop")


@pytest.mark.parametrize("tombstone", ["gone", lambda sale: sale.gone])
def test_a_tombstone_has_a_key_and_no_value(tombstone):
    messages = encoded(SALES, key=("shop",), value="shop", tombstone=tombstone)
    assert list(zip(messages.keys, messages.values, strict=True)) == [(b"north", b"north"), ("süd".encode(), None)]


def test_headers_partition_and_time_come_from_fields_or_functions():
    messages = encoded(SALES, headers={"h": "shop", "c": "code"}, partition="amount", timestamp="at")
    assert messages.headers == [[("h", b"north"), ("c", b"\x00")], [("h", "süd".encode()), ("c", None)]]
    assert messages.places == [3, 4]
    assert messages.timestamps == [1704110400000, 0]
    messages = encoded(SALES, headers=lambda sale: {"a": str(sale.amount)}, partition=lambda sale: sale.amount * 2)
    assert messages.headers == [[("a", b"3")], [("a", b"4")]]
    assert messages.places == [6, 8]


class Measure(NamedTuple):
    at: str
    value: float | None = None
    each: list[float] = []
    by_name: dict[str, float] = {}
    point: tuple[float, int] = (0.0, 0)


@pytest.mark.parametrize("number", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize(
    ("field", "path"), [("value", "value"), ("each", "each[]"), ("by_name", "by_name[]"), ("point", "point.f0")]
)
def test_a_number_that_json_does_not_have_is_an_error_that_names_its_field(number, field, path):
    wrong = {"value": number, "each": [1.0, number], "by_name": {"a": number}, "point": (number, 1)}[field]
    record = Measure("a")._replace(**{field: wrong})
    said = f"p: sink 's': field '{path}' is {number}, and JSON has no such number; write None in its place"
    with pytest.raises(SinkError, match=re.escape(said)):
        encoded([Measure("b"), record])
    with pytest.raises(SinkError, match=re.escape(said)):
        encoded([record], key=("at", field), value="at")
    assert encoded([record], value="at").values == [b"a"]
    kind = record_type(Measure)
    part = kind.to_batch([record, Measure("b", by_name={"x": 1.0})]).slice(1)
    assert len(MessageEncoder(MessageFormat(), kind, "s").encode(part)) == 1  # what is sliced off does not count


def test_a_plain_value_is_its_json():
    kind = record_type(int, "test")
    assert MessageEncoder(MessageFormat(), kind, "s").encode(kind.to_batch([1, 2])).values == [b"1", b"2"]


def test_of_each_key_the_last_message_is_kept_in_their_order():
    messages = Messages([b"a", b"b", b"a"], [b"1", b"2", None], places=[1, 2, 3])
    kept = Messages([b"b", b"a"], [b"2", None], places=[2, 3])
    assert messages.last_of_each_key() == kept
    assert joined([messages, messages]).last_of_each_key() == kept


def test_an_upsert_for_which_the_function_gives_no_key_is_an_error():
    def key(sale):
        return None if sale.gone else sale.shop

    assert encoded(SALES, key=key).keys == [b"north", None]
    with pytest.raises(SinkError, match=r"sink 's': the key function gave None for Sale.*'süd'.*replaces none; give a"):
        encoded(SALES, key=key, replaces=True)


def test_a_time_without_a_zone_is_in_utc_and_is_cut_to_milliseconds(monkeypatch):
    monkeypatch.setenv("TZ", "EST5")
    time.tzset()
    try:
        kind = record_type(Timed)
        encoded = MessageEncoder(MessageFormat(timestamp="at"), kind, "s")
        assert encoded.encode(kind.to_batch([Timed(datetime(1970, 1, 1, 0, 0, 1, 999))])).timestamps == [1000]
    finally:
        monkeypatch.undo()
        time.tzset()


@pytest.mark.parametrize("at", [datetime(1970, 1, 1, tzinfo=timezone.utc), datetime(1969, 1, 1, tzinfo=timezone.utc)])
def test_a_time_that_kafka_would_replace_by_the_present_is_an_error_that_names_its_field(at):
    with pytest.raises(SinkError, match=r"p: sink 's': field 'at' is datetime.datetime\(19.*after 1970 began"):
        encoded([Sale("a", 1, at)], timestamp="at")


def test_an_empty_batch_makes_no_messages():
    kind = record_type(Sale, "test")
    made = MessageFormat(("shop",), None, {"h": "shop"}, "amount", "at", "gone")
    assert len(MessageEncoder(made, kind, "s").encode(kind.to_batch([]))) == 0


@pytest.mark.parametrize(
    ("made", "said"),
    [
        ({"key": ("shp",)}, "no field 'shp' in .*did you mean 'shop'"),
        ({"value": "amount"}, "value: the field 'amount' is int64, and str or bytes is needed"),
        ({"headers": {"h": "amount"}}, "headers: the field 'amount' is int64"),
        ({"partition": "shop"}, "partition: the field 'shop' is string, and int is needed"),
        ({"timestamp": "shop"}, "timestamp: the field 'shop' is string"),
        ({"tombstone": "shop"}, "tombstone: the field 'shop' is string, and bool is needed"),
    ],
)
def test_a_field_that_does_not_fit_is_refused_before_anything_runs(made, said):
    with pytest.raises(PipelineError, match=said):
        encoded(SALES, **made)


def test_a_function_that_fails_or_gives_something_else_names_the_record():
    with pytest.raises(UserFunctionError, match=r"p: sink 's': ZeroDivisionError.*süd"):
        encoded(SALES, key=lambda sale: str(1 // (4 - sale.amount)))
    with pytest.raises(SinkError, match=r"a message's key is bytes, str or None, and the function gave 3 \(int\)"):
        encoded(SALES, key=lambda sale: sale.amount)
    with pytest.raises(
        SinkError, match=r"p: sink 's': the partitioner gave None \(NoneType\) for Sale.*a partition is an"
    ):
        encoded(SALES, partition=lambda sale: None if sale.gone else 1)
