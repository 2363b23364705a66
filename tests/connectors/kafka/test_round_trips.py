"""What a format writes is what it reads: records of every type, in JSON, Avro and Protobuf."""

import json
import re
from dataclasses import dataclass, field
from datetime import date, datetime, timedelta, timezone
from decimal import Decimal
from enum import Enum, IntEnum
from typing import Annotated, NamedTuple

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from pyspark import cloudpickle

from dagster_unified.connectors.kafka import AvroFormat, JsonFormat, ProtobufFormat, RawFormat, SchemaRegistry
from dagster_unified.connectors.kafka.messages import MessageEncoder, MessageFormat
from dagster_unified.errors import PipelineError, SinkError
from dagster_unified.records import record_type


class Size(Enum):
    SMALL = "s"
    LARGE = "l"


class Rank(IntEnum):
    FIRST = 1
    LAST = 9


class Item(NamedTuple):
    name: str
    price: Decimal
    size: Size


@dataclass
class Place:
    x: float
    y: float | None
    items: list[Item] = field(default_factory=list)


class Order(msgspec.Struct, rename="camel"):
    order_id: str
    first_item: Item
    last_place: Place | None
    note: str | None = None


Naive = Annotated[datetime, msgspec.Meta(tz=False)]


class Shared(NamedTuple):
    """Fields that all formats hold."""

    text: str
    number: int
    ratio: float
    flag: bool
    raw: bytes
    at: datetime
    local: Naive
    day: date
    price: Decimal
    took: timedelta
    size: Size
    rank: Rank
    item: Item
    place: Place
    pair: tuple[str, str]
    several: tuple[int, ...]
    numbers: list[int]
    items: list[Item]
    counts: dict[str, int]
    places: dict[str, Place]
    by_size: dict[Size, float]
    order: Order
    maybe: int | None
    maybe_text: str | None
    maybe_at: datetime | None
    maybe_size: Size | None
    maybe_place: Place | None


numbers = st.integers(-(2**63), 2**63 - 1)
floats = st.floats(allow_nan=False, allow_infinity=False)
moments = st.datetimes(timezones=st.just(timezone.utc))
prices = st.decimals(-(10**18), 10**18, places=18, allow_nan=False)
sizes = st.sampled_from(Size)
items = st.builds(Item, st.text(), prices, sizes)
places = st.builds(Place, floats, st.none() | floats, st.lists(items, max_size=2))
orders = st.builds(
    Order, order_id=st.text(), first_item=items, last_place=st.none() | places, note=st.none() | st.text()
)
shared = st.builds(
    Shared,
    text=st.text(),
    number=numbers,
    ratio=floats,
    flag=st.booleans(),
    raw=st.binary(),
    at=moments,
    local=st.datetimes(),
    day=st.dates(),
    price=prices,
    took=st.timedeltas(timedelta(-99_999), timedelta(99_999)),
    size=sizes,
    rank=st.sampled_from(Rank),
    item=items,
    place=places,
    pair=st.tuples(st.text(), st.text()),
    several=st.lists(numbers).map(tuple),
    numbers=st.lists(numbers),
    items=st.lists(items, max_size=3),
    counts=st.dictionaries(st.text(), numbers, max_size=3),
    places=st.dictionaries(st.text(), places, max_size=2),
    by_size=st.dictionaries(sizes, floats),
    order=orders,
    maybe=st.none() | numbers,
    maybe_text=st.none() | st.text(),
    maybe_at=st.none() | moments,
    maybe_size=st.none() | sizes,
    maybe_place=st.none() | places,
)


def encoded(form, record, *records, prefix=b""):
    kind = record_type(record)
    made = MessageFormat(value_format=form, prefix=prefix)
    made.check(kind, "sink 's'")
    return MessageEncoder(cloudpickle.loads(cloudpickle.dumps(made)), kind, "sink 's'").encode(kind.to_batch(records))


def round_trip(form, record, *records, prefix=b""):
    kind = record_type(record)
    values = encoded(form, record, *records, prefix=prefix).values
    value = form.value_type(kind, kind.names, "here")
    return kind.from_batch(value.to_batch(list(map(form.decoder(value.python), values))))


ITEM = {
    "type": "record",
    "name": "Item",
    "namespace": "shop",
    "fields": [
        {"name": "name", "type": "string"},
        {"name": "price", "type": {"type": "bytes", "logicalType": "decimal", "precision": 38, "scale": 18}},
        {"name": "size", "type": {"type": "enum", "name": "Size", "symbols": ["s", "l"]}},
    ],
}
PLACE = {
    "type": "record",
    "name": "Place",
    "namespace": "shop",
    "fields": [
        {"name": "x", "type": "double"},
        {"name": "y", "type": ["null", "double"]},
        {"name": "items", "type": {"type": "array", "items": "Item"}},
    ],
}
ORDER = {
    "type": "record",
    "name": "Order",
    "namespace": "shop",
    "fields": [
        {"name": "orderId", "type": "string"},
        {"name": "firstItem", "type": "Item"},
        {"name": "lastPlace", "type": ["Place", "null"]},
        {"name": "note", "type": ["null", "string"]},
    ],
}
AVRO = {
    "text": "string",
    "number": "long",
    "ratio": "double",
    "flag": "boolean",
    "raw": "bytes",
    "at": {"type": "long", "logicalType": "timestamp-micros"},
    "local": {"type": "long", "logicalType": "local-timestamp-micros"},
    "day": {"type": "int", "logicalType": "date"},
    "price": {"type": "fixed", "name": "Price", "size": 16, "logicalType": "decimal", "precision": 38, "scale": 18},
    "took": "string",
    "item": ITEM,
    "size": "shop.Size",
    "rank": "int",
    "place": PLACE,
    "pair": {"type": "array", "items": ["long", "string"]},
    "several": {"type": "array", "items": "long"},
    "numbers": {"type": "array", "items": "long"},
    "items": {"type": "array", "items": "shop.Item"},
    "counts": {"type": "map", "values": "long"},
    "places": {"type": "map", "values": "shop.Place"},
    "by_size": {"type": "map", "values": "double"},
    "order": ORDER,
    "maybe": ["null", "string", "long"],
    "maybe_text": ["string", "null"],
    "maybe_at": ["null", {"type": "long", "logicalType": "timestamp-micros"}],
    "maybe_size": ["null", "shop.Size"],
    "maybe_place": ["null", "shop.Place"],
    "more": {"type": "string", "default": "m"},
}


def avro(**fields):
    return {"type": "record", "name": "R", "fields": [{"name": name, **_field(of)} for name, of in fields.items()]}


def _field(of):
    return {"type": of["type"], "default": of["default"]} if isinstance(of, dict) and "default" in of else {"type": of}


FORMATS = {
    "json": lambda message: JsonFormat(),
    "avro": lambda message: AvroFormat(avro(**AVRO)),
    "protobuf": lambda message: ProtobufFormat(message("Shared")),
}


@pytest.mark.parametrize("form", FORMATS)
@given(records=st.lists(shared, max_size=3))
def test_what_is_written_is_read(message, form, records):
    assert round_trip(FORMATS[form](message), Shared, *records) == records


class ByKey(NamedTuple):
    by_number: dict[int, Size]
    by_flag: dict[bool, float]


@given(
    records=st.lists(
        st.builds(ByKey, st.dictionaries(numbers, sizes, max_size=3), st.dictionaries(st.booleans(), floats)),
        max_size=3,
    )
)
def test_maps_of_protobuf_have_keys_that_are_no_texts(message, records):
    assert round_trip(ProtobufFormat(message("Keyed")), ByKey, *records) == records


@given(st.lists(st.tuples(st.text(), st.none() | numbers, items)))
def test_a_tuple_is_an_array_in_json_and_in_avro(records):
    kind, schema = tuple[str, int | None, Item], {"type": "array", "items": ["null", "string", "long", ITEM]}
    assert round_trip(JsonFormat(), kind, *records) == records
    assert round_trip(AvroFormat(schema), kind, *records) == records


@given(st.lists(numbers), st.lists(orders), st.lists(st.none() | st.binary()))
def test_plain_values_and_renamed_fields_are_read_as_they_were_written(integers, records, contents):
    assert round_trip(JsonFormat(), int, *integers) == integers
    assert round_trip(AvroFormat('"long"'), int, *integers) == integers
    assert round_trip(JsonFormat(), Order, *records) == records
    own = {"firstItem": ITEM, "lastPlace": [PLACE, "null"]}
    fields = [{**of, "type": own.get(of["name"], of["type"])} for of in ORDER["fields"]]
    schema = {**ORDER, "fields": fields}
    assert round_trip(AvroFormat(schema), Order, *records) == records
    assert round_trip(RawFormat(), bytes | None, *contents) == contents


@given(st.lists(st.dictionaries(st.integers(-(2**63), 2**63 - 1), st.none() | moments)))
def test_json_has_keys_that_are_numbers(records):
    assert round_trip(JsonFormat(), dict[int, datetime | None], *records) == records


def test_the_names_of_a_renamed_class_are_in_the_value_and_in_the_key():
    order = Order("o", Item("pen", Decimal("1.5"), Size.SMALL), None)
    (value,) = encoded(JsonFormat(), Order, order).values
    assert list(json.loads(value)) == ["orderId", "firstItem", "lastPlace", "note"]
    kind = record_type(Order)
    keys = MessageEncoder(MessageFormat(key=("note", "order_id")), kind, "s").encode(kind.to_batch([order])).keys
    assert keys == [b'{"note":null,"orderId":"o"}']


def record_of(kind):
    return NamedTuple("Record", [("x", kind)])


One, Float, Count, Time, Price = map(record_of, (int | None, float, int, datetime, Decimal))
Sized, Text, Raw, Since, Day = map(record_of, (Size, str, bytes, timedelta, date))
Keyed, Nested = map(record_of, (dict[tuple[int, int], int], list[Item]))

MILLIS_OF_DAY = {"type": "int", "logicalType": "time-millis"}
MICROS_OF_DAY = {"type": "long", "logicalType": "time-micros"}


class Pair(NamedTuple):
    x: int
    y: int


@pytest.mark.parametrize(
    ("record", "kind", "said"),
    [
        (One, "long", "field 'x' may be None, and in the Avro schema it may not; make its type there a union"),
        (One, ["long", "string"], "field 'x' may be None, and the Avro schema's union has no null"),
        (Float, "long", "field 'x' is float, which the Avro type long does not hold; change the schema or the record"),
        (Count, "double", "field 'x' is int, which the Avro type double does not hold"),
        (Count, MILLIS_OF_DAY, "field 'x' is int, which the Avro type time-millis"),
        (Time, "long", "field 'x' is datetime, which the Avro type long does not hold"),
        (Time, {"type": "long", "logicalType": "local-timestamp-micros"}, "field 'x' is datetime, which the Avro"),
        (Sized, {"type": "enum", "name": "E", "symbols": ["s"]}, "field 'x' may be l, which the Avro enum E does not"),
        (Keyed, {"type": "map", "values": "long"}, "field 'x' is dict[tuple[int, int], int], which the Avro type map"),
        (Count, ["null", "string"], "field 'x' is int, which the Avro type string does not hold"),
        (Nested, {"type": "array", "items": {**avro(name="string"), "name": "I"}}, "field 'x[].price' is not in the"),
        (Nested, {"type": "array", "items": "string"}, "field 'x[]' is Item, which the Avro type string does not hold"),
        (Pair, "int", "the Avro schema has no field 'y'; it has x"),
    ],
)  # fmt: skip
def test_an_avro_schema_that_cannot_hold_the_record_is_refused_when_the_pipeline_is_made(record, kind, said):
    with pytest.raises(PipelineError, match=re.escape(f"sink 's': {said}")):
        encoded(AvroFormat(avro(x=kind)), record)


def test_a_field_that_only_the_schema_has_needs_a_default():
    with pytest.raises(PipelineError, match="field 'y' of the Avro schema has no default, and the record has no such"):
        encoded(AvroFormat(avro(x="long", y="int")), Count)


@pytest.mark.parametrize(
    ("record", "kind", "said"),
    [
        (Count(2**31), "int", "field 'x' is 2147483648, and the schema's type takes 32 bits; declare one of 64"),
        (Float(0.1), "float", "field 'x' is 0.1, and the schema's float of 32 bits cannot hold it exactly"),
        (Float(1e300), "float", "field 'x' is 1e+300, and the schema's float"),
        (Price(Decimal("1.555")), {"type": "bytes", "logicalType": "decimal", "precision": 9, "scale": 2},
         "and the schema's decimal has 9 digits, 2 of them after the point; round it"),
        (Price(Decimal(10**8)), {"type": "bytes", "logicalType": "decimal", "precision": 9, "scale": 2},
         "and the schema's decimal has 9 digits"),
        (Time(datetime(2024, 1, 1, 0, 0, 0, 1)), {"type": "long", "logicalType": "timestamp-millis"},
         "and the schema's type has only milliseconds; cut it"),
        (Since(timedelta(microseconds=1)), MILLIS_OF_DAY,
         "and the schema's type is a time of day, in whole milliseconds; change the schema"),
        (Since(timedelta(days=1)), MICROS_OF_DAY, "and the schema's type is a time of day, in microseconds"),
        (Text("x"), {"type": "enum", "name": "E", "symbols": ["a"]}, "field 'x' is 'x', and the Avro enum E has a"),
        (Raw(b"abc"), {"type": "fixed", "name": "F", "size": 2}, "{'x': b'abc'} does not fit the Avro schema"),
    ],
)  # fmt: skip
def test_a_value_that_the_avro_type_cannot_hold_exactly_is_an_error_that_names_its_field(record, kind, said):
    with pytest.raises(SinkError, match=f"^sink 's': .*{re.escape(said)}"):
        encoded(AvroFormat(avro(x=kind)), type(record), record)


def test_values_that_a_narrow_type_holds_exactly_come_back():
    assert round_trip(AvroFormat(avro(x="int")), Count, Count(-(2**31))) == [Count(-(2**31))]
    assert round_trip(AvroFormat(avro(x=["float", "int"])), Float, Float(0.5), Float(float("inf"))) == [
        Float(0.5), Float(float("inf")),
    ]  # fmt: skip
    millis = avro(x=["null", {"type": "long", "logicalType": "timestamp-millis"}])
    at = datetime(2024, 1, 1, 0, 0, 0, 7000, tzinfo=timezone.utc)
    assert round_trip(AvroFormat(millis), Time, Time(at)) == [Time(at)]
    for kind, since in ((MILLIS_OF_DAY, timedelta(hours=23)), (MICROS_OF_DAY, timedelta(microseconds=1))):
        assert round_trip(AvroFormat(avro(x=kind)), Since, Since(since)) == [Since(since)]


SHORT = {"type": "bytes", "logicalType": "decimal", "precision": 4, "scale": 2}
FULL = {"type": "fixed", "name": "P", "size": 16, "logicalType": "decimal", "precision": 38, "scale": 18}
LETTERS = {"type": "enum", "name": "E", "symbols": ["s", "l", "x"]}
CODE = {"type": "fixed", "name": "F", "size": 2}
DATE = {"type": "int", "logicalType": "date"}


@pytest.mark.parametrize(
    ("union", "records", "branch"),
    [
        (["null", LETTERS, "string"], [Text("s"), Text("zzz")], 2),
        ([CODE, "bytes"], [Raw(b"ab"), Raw(b"abcd")], 1),
        ([SHORT, "string"], [Price(Decimal("1.5")), Price(Decimal("1.234"))], 1),
        ([SHORT, FULL], [Price(Decimal("1.5")), Price(Decimal(10**19))], 1),
        ([{"type": "long", "logicalType": "timestamp-millis"}, "string"],
         [Time(datetime(2024, 1, 1, 0, 0, 0, 1, tzinfo=timezone.utc))], 1),
        (["int", "long"], [Count(1), Count(2**31)], 1),
        (["string", LETTERS], [Sized(Size.LARGE)], 0),
        ([LETTERS, "string"], [Sized(Size.LARGE)], 0),
        ([FULL, "string"], [Price(Decimal("1.5"))], 0),
        ([DATE, "string"], [Day(date(2024, 1, 1))], 0),
        ([MICROS_OF_DAY, "string"], [Since(timedelta(1)), Since(timedelta(days=-1))], 1),
    ],
)  # fmt: skip
def test_of_a_union_the_first_type_that_holds_all_values_is_written(union, records, branch):
    form = AvroFormat(avro(x=union))
    assert round_trip(form, type(records[0]), *records) == records
    assert {value[0] // 2 for value in encoded(form, type(records[0]), *records).values} == {branch}


def test_a_type_of_a_union_may_be_named_before():
    form = AvroFormat(avro(e={"type": LETTERS, "default": "s"}, x=["null", "E", "string"]))
    assert round_trip(form, Text, Text("s"), Text("zzz")) == [Text("s"), Text("zzz")]


class Node(NamedTuple):
    value: int
    single: float
    small: int


class Within(NamedTuple):
    child: Node | None


class Either(NamedTuple):
    left: str | None
    right: str | None


class Shifted(NamedTuple):
    at: Naive


class Outer(NamedTuple):
    value: int
    single: float
    small: int
    child: Within | None


def test_a_message_within_one_of_its_own_type_is_a_record(message):
    records = [Outer(1, 0.5, 2, Within(Node(3, 1.5, 4))), Outer(1, 0.5, 2, Within(None)), Outer(1, 0.5, 2, None)]
    assert round_trip(ProtobufFormat(message("Node")), Outer, *records) == records


@pytest.mark.parametrize(
    ("name", "record", "said"),
    [
        ("Node", Count, "the message shop.Node has no field 'x'; it has value, single, small, child"),
        ("Node", NamedTuple("R", [("value", int | None)]), "field 'value' may be None, which the message's field"),
        ("Node", NamedTuple("R", [("value", float)]), "field 'value' is float, which the message's int32 does not"),
        ("Shared", NamedTuple("R", [("numbers", list[int | None])]), "field 'numbers[]' may be None, and Protobuf's"),
        ("Shared", NamedTuple("R", [("counts", dict[int, int])]), "field 'counts' is int, which the message's string"),
        ("Shared", NamedTuple("R", [("counts", list[int])]), "field 'counts' is list[int], which the message's"),
        ("Shared", NamedTuple("R", [("place", Item)]), "field 'place.name' is not in the message shop.Place"),
        ("Shared", Shifted, "field 'at' is datetime, which the message's google.protobuf.Timestamp does not"),
        ("Shared", NamedTuple("R", [("size", Enum("E", {"A": "a"}))]), "field 'size' may be a, which the enum"),
        ("Shared", NamedTuple("R", [("size", int)]), "field 'size' is int, which the message's shop.Size"),
    ],
)  # fmt: skip
def test_a_message_that_cannot_hold_the_record_is_refused_when_the_pipeline_is_made(message, name, record, said):
    with pytest.raises(PipelineError, match=re.escape(f"sink 's': {said}")):
        encoded(ProtobufFormat(message(name)), record)
    with pytest.raises(PipelineError, match=r"sink 's': a Protobuf message has fields, and int\(.*\) has none"):
        encoded(ProtobufFormat(message(name)), int)


@pytest.mark.parametrize(
    ("record", "said"),
    [
        (Node(2**31, 0.0, 0), "field 'value' is 2147483648, and the schema's type takes 32 bits"),
        (Node(0, 0.1, 0), "field 'single' is 0.1, and the schema's float"),
        (Node(0, 0.0, -1), "{'value': 0, 'single': 0.0, 'small': -1} does not fit its message"),
        (Either("a", "b"), "left and right are of one oneof, and only one may be given"),
    ],
)
def test_a_value_that_a_message_cannot_hold_exactly_is_an_error(message, record, said):
    with pytest.raises(SinkError, match=f"^sink 's': .*{re.escape(said)}"):
        encoded(ProtobufFormat(message(type(record).__name__)), type(record), record)


class Spot(NamedTuple):
    x: float
    y: float | None = 1.5


class Spots(NamedTuple):
    """Fields whose None is not their default."""

    several: list[Spot]
    pair: tuple[Spot, Spot]
    by_name: dict[str, Spot]
    note: str | None = "none"
    place: Spot | None = Spot(0.0)
    limit: int | None = 5


def test_none_in_a_message_is_read_as_none_and_not_as_the_default(message):
    none, some = Spot(1.0, None), Spot(2.0)
    records = [
        Spots([none, some], (none, some), {"a": none, "b": some}, None, None, None),
        Spots([], (some, none), {}, "x", none, 0),
    ]
    form = ProtobufFormat(message("Spots"))
    assert round_trip(form, Spots, *records) == records
    (two,) = encoded(form, Spots, records[1]).values
    kind = record_type(NamedTuple("Three", [("pair", tuple[Spot, Spot, Spot])]))
    with pytest.raises(ValueError, match=r"Expected `array` of length 3, got 2 - at `\$.pair`"):
        form.decoder(form.value_type(kind, kind.names, "here").python)(two)


class Both(Enum):
    NEW = "new"
    STARTED = "started"
    RUNNING = "running"


class Later(Enum):
    NEW = "new"
    RUNNING = "running"


class Task(NamedTuple):
    state: Later
    states: list[Later]


class Named(NamedTuple):
    state: str


def test_of_the_names_that_an_enum_of_a_message_has_for_one_number_a_record_has_one(message):
    form = ProtobufFormat(message("Task"))
    records = [Task(Later.NEW, [Later.RUNNING]), Task(Later.RUNNING, [])]
    assert round_trip(form, Task, *records) == records
    assert round_trip(form, Named, Named("new"), Named("started")) == [Named("new"), Named("started")]
    with pytest.raises(SinkError, match=r"field 'state' is 'running', and the enum shop\.State, .* has new, started"):
        encoded(form, Named, Named("running"))
    for both in (NamedTuple("R", [("state", Both)]), NamedTuple("R", [("states", list[Both])])):
        with pytest.raises(PipelineError, match="may be started and running, which are one number in the enum"):
            encoded(form, both)


def test_of_a_oneof_one_field_comes_back(message):
    records = [Either("a", None), Either(None, "b"), Either(None, None)]
    assert round_trip(ProtobufFormat(message("Either")), Either, *records) == records


def test_json_refuses_keys_that_it_does_not_have():
    with pytest.raises(PipelineError, match="sink 's': field 'x' is a dict whose keys are not texts, numbers or times"):
        encoded(JsonFormat(), Keyed)
    with pytest.raises(PipelineError, match="a raw value is one field, and there are x, y"):
        encoded(RawFormat(), Pair)


def test_an_avro_schema_is_registered_once_and_its_number_is_in_each_value(registry):
    form = AvroFormat(avro(x="long"), SchemaRegistry(registry.url))
    written, prefix = form.registered("sales")
    assert form.registered("sales")[1] == prefix == b"\0\0\0\0\1"
    assert json.loads(registry.versions["sales-value", 1]["schema"]) == avro(x="long")
    del registry.asked[:]
    assert encoded(written, Count, Count(3), prefix=prefix).values == [b"\0\0\0\0\1\6"]
    assert registry.asked == []
    assert round_trip(written, Count, Count(3), Count(4), prefix=prefix) == [Count(3), Count(4)]
    named = AvroFormat(avro(x="long"), SchemaRegistry(registry.url), subject="numbers")
    named.registered("sales")
    assert ("numbers", 1) in registry.versions


def test_without_a_schema_the_latest_of_the_subject_is_written(registry):
    form = AvroFormat(registry=SchemaRegistry(registry.url))
    with pytest.raises(ValueError, match=r"the subject 'sales-value' is not in the registry at .*; register it, or"):
        form.registered("sales")
    for schema in (avro(x="string"), avro(y={"type": "string", "default": "n"}, x=["null", "long"])):
        AvroFormat(schema, form.registry).registered("sales")
    written, prefix = form.registered("sales")
    assert prefix == b"\0\0\0\0\2"
    form.check_writing(record_type(Text), "nobody can tell yet")
    assert round_trip(written, Count, Count(3), prefix=prefix) == [Count(3)]
    with pytest.raises(ValueError, match="field 'x' is str, which the Avro type long does not hold"):
        written.encoder(record_type(Text))


def test_the_latest_schema_of_a_subject_may_be_a_plain_type_and_may_refer_to_others(registry):
    form = AvroFormat(registry=SchemaRegistry(registry.url))
    item = {**ITEM, "fields": [*ITEM["fields"][:2], {"name": "size", "type": "Size"}]}
    last_place = {"name": "lastPlace", "type": [PLACE, "null"]}

    def add(number, subject, schema, *names):
        references = [{"name": f"shop.{name}", "subject": name, "version": 1} for name in names]
        found = {"subject": subject, "id": number, "version": 1, "schema": json.dumps(schema), "references": references}
        registry.schemas[number] = registry.versions[subject, 1] = found

    add(1, "numbers-value", "long")
    add(2, "Size", {**ITEM["fields"][2]["type"], "namespace": "shop"})
    add(3, "Item", item, "Size")
    add(4, "items-value", "shop.Item", "Item")
    add(5, "places-value", {"type": "map", "values": {"type": "array", "items": PLACE}}, "Item")
    add(6, "orders-value", {**ORDER, "fields": [*ORDER["fields"][:2], last_place, ORDER["fields"][3]]}, "Item")
    pen = Item("pen", Decimal("1.5"), Size.LARGE)
    for topic, kind, record in (
        ("numbers", int, 3),
        ("items", Item, pen),
        ("places", dict[str, list[Place]], {"a": [Place(1.0, None, [pen, pen])]}),
        ("orders", Order, Order("o", pen, Place(1.0, 2.0, [pen]))),
    ):
        written, prefix = form.registered(topic)
        assert written.fingerprint() == form.registered(topic)[0].fingerprint()
        assert round_trip(written, kind, record, prefix=prefix) == [record]


@pytest.mark.parametrize(
    ("schema", "said"),
    [
        ("not json", "the schema 'not json' is not JSON"),
        ("long", r"""the schema 'long' is not JSON .*such as '"long"' for a type by its name"""),
        ({"type": "record", "name": "R"}, "the Avro schema cannot be used (the record R has no fields); correct it"),
        ('{"type": "record", "name": "R"}', "the Avro schema cannot be used (the record R has no fields)"),
        ({"fields": []}, "the Avro schema cannot be used (it has no 'type')"),
        (avro(x="nope"), "the Avro schema cannot be used (there is no type 'nope')"),
        (
            avro(x={"type": "bytes", "default": "\u1234"}),
            "the default of field 'x' is 'ሴ', and bytes are the first 256",
        ),
        (avro(x={"type": CODE, "default": "a"}), "the default of field 'x' is 'a', and fixed F has 2 bytes"),
    ],
)
def test_a_schema_that_is_none_is_refused_where_the_format_is_made(schema, said):
    with pytest.raises(PipelineError, match="^AvroFormat: .*" + (said if ".*" in said else re.escape(said))):
        AvroFormat(schema)


class Filled(NamedTuple):
    x: int
    raw: bytes
    code: bytes
    price: Decimal
    maybe: bytes | None
    all: list[bytes]
    by_name: dict[str, bytes]


def test_defaults_of_bytes_in_a_schema_are_written_and_read():
    fields = {
        "raw": ("bytes", "\u00ff"),
        "code": (CODE, "a\u0080"),
        "price": (SHORT, "\u0001\u0002"),
        "maybe": (["null", "long", "bytes"], "a"),
        "all": ({"type": "array", "items": "bytes"}, ["a", "\u00ff"]),
        "by_name": ({"type": "map", "values": "F"}, {"k": "ab"}),
    }
    schema = avro(x="long")
    full = {**schema, "fields": schema["fields"] + [
        {"name": name, "type": kind, "default": default} for name, (kind, default) in fields.items()
    ]}  # fmt: skip
    expected = Filled(1, b"\xff", b"a\x80", Decimal("2.58"), b"a", [b"a", b"\xff"], {"k": b"ab"})
    (value,) = encoded(AvroFormat(full), Count, Count(1)).values
    form, kind = AvroFormat(full), record_type(Filled)
    read = form.decoder(form.value_type(kind, kind.names, "here").python)
    assert kind.from_batch(form.value_type(kind, kind.names, "here").to_batch([read(value)])) == [expected]
    inner = avro(x="long", inner={"type": {**full, "name": "Inner"}, "default": {"x": 1, "raw": "\u00fe"}})
    (value,) = encoded(AvroFormat(inner), Count, Count(1)).values
    assert b"\xfe" in value
    assert b"a\x80" in value


def test_a_message_is_registered_with_what_it_imports(message, uses, registry):
    form = ProtobufFormat(message("Place"), registry=SchemaRegistry(registry.url))
    written, prefix = form.registered("places")
    assert prefix == b"\0\0\0\0\1\2\2"  # of the messages of its file the second
    assert registry.versions["places-value", 1]["schemaType"] == "PROTOBUF"
    record = Place(1.0, None, [Item("pen", Decimal("1.5"), Size.LARGE)])
    assert round_trip(written, Place, record, prefix=prefix) == [record]
    assert ProtobufFormat(uses, registry=form.registry).registered("uses")[1][-1:] == b"\0"
    reference = {"name": "tests/shared.proto", "subject": "tests/shared.proto", "version": 1}
    assert registry.versions["uses-value", 1]["references"] == [reference]


def test_what_a_registry_refuses_is_one_sentence(message, registry):
    where = SchemaRegistry(registry.url)
    for form in (AvroFormat(avro(x="long"), where), ProtobufFormat(message("Node"), registry=where)):
        with pytest.raises(ValueError, match=r"does not take the schema for .*'closed-value': .*lacks the field"):
            form.registered("closed")
    with pytest.raises(PipelineError, match="give ProtobufFormat the registry"):
        encoded(ProtobufFormat(message("Node"), framed=True), Node)
    with pytest.raises(PipelineError, match=r"JsonFormat\(framed=True\) does not say which schema"):
        encoded(JsonFormat(framed=True), Count)
