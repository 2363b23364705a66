"""What values become: typed records of JSON, Avro and Protobuf, and a reason where they do not fit."""

import io
import json
import re
from dataclasses import dataclass, field
from datetime import date, datetime, timedelta, timezone
from decimal import Decimal
from enum import Enum
from typing import Annotated, NamedTuple

import msgspec
import pytest
from fastavro import parse_schema, schemaless_writer
from pyspark import cloudpickle

from dagster_unified.connectors.kafka import AvroFormat, JsonFormat, ProtobufFormat, RawFormat, SchemaRegistry
from dagster_unified.errors import ConfigurationError, PipelineError, UnavailableError
from dagster_unified.records import record_type
from tests.connectors.kafka.test_round_trips import Size


class Item(NamedTuple):
    name: str
    price: Decimal


class Sale(NamedTuple):
    shop: str
    amount: int
    at: datetime
    items: list[Item]
    size: Size | None
    note: str = "none"


@dataclass
class Point:
    x: float
    y: float | None


class Renamed(msgspec.Struct, rename="camel"):
    shop_name: str


AT = datetime(2024, 1, 2, 3, 4, 5, tzinfo=timezone.utc)


def decoded(form, record, *values):
    """What a worker makes of values: the records that Arrow gives back."""
    records = record_type(record)
    fields = list(records.names)
    form.check(fields if records.shape == "class" else [], "here")
    form = cloudpickle.loads(cloudpickle.dumps(form))
    kind = form.value_type(records, fields, "here")
    assert [f.type for f in kind.schema] == [f.type for f in records.schema]
    return records.from_batch(kind.to_batch(list(map(form.decoder(kind.python), values))))


def test_json_objects_are_records_of_every_kind():
    sale = {"shop": "a", "amount": 3, "at": "2024-01-02T03:04:05Z", "items": [{"name": "pen", "price": "1.5"}], "x": 1}
    assert decoded(JsonFormat(), Sale, json.dumps(sale).encode()) == [
        Sale("a", 3, AT, [Item("pen", Decimal("1.5"))], None, "none")
    ]
    assert decoded(JsonFormat(), Sale, json.dumps({**sale, "size": "l", "note": "x"}).encode())[0].size is Size.LARGE
    assert decoded(JsonFormat(), Point, b'{"x": 1}', b'{"x": 1.5, "y": 2}') == [Point(1.0, None), Point(1.5, 2.0)]
    assert decoded(JsonFormat(), Renamed, b'{"shopName": "a"}') == [Renamed("a")]


def test_json_values_are_plain_records():
    assert decoded(JsonFormat(), int, b"1", b" 2") == [1, 2]
    assert decoded(JsonFormat(), tuple[str, int], b'["a", 1]') == [("a", 1)]
    assert decoded(JsonFormat(framed=True), int, b"\0\0\0\0\x071") == [1]


@pytest.mark.parametrize(
    ("value", "reason"),
    [
        (b"", "Input data was truncated"),
        (b'{"name": "pen"}', "missing required field `price`"),
        (b'{"name": 1, "price": 1}', "Expected `str`, got `int` - at `\\$.name`"),
        (b'{"name": "pen", "price": 1} {', "trailing characters"),
        (b'{"name": "\xff", "price": 1}', "can't decode byte 0xff"),
    ],
)
def test_json_that_does_not_fit_says_why(value, reason):
    with pytest.raises(ValueError, match=reason):
        decoded(JsonFormat(), Item, value)


class Seen(NamedTuple):
    at: datetime
    took: timedelta | None = None
    earlier: dict[datetime, list[tuple[date, datetime]]] = {}
    share: float = 0.0


FINE, FINER = "2024-01-01T00:00:00.123456000Z", "2024-01-01T00:00:00.9999999Z"


@pytest.mark.parametrize(
    ("value", "finer"),
    [
        (f'{{"at": "{FINE}", "share": 0.30000000000000004}}', None),
        (f'{{"at": "{FINE}", "took": "PT1.000001S", "note": "{FINER}"}}', None),  # a field that nobody reads
        (f'{{"at": "{FINER}"}}', FINER),
        (f'{{"at": "{FINE}", "took": "PT0.0000001S"}}', "PT0.0000001S"),
        (f'{{"at": "{FINE}", "earlier": {{"{FINER}": []}}}}', FINER),
        (f'{{"at": "{FINE}", "earlier": {{"{FINE}": [["2024-01-01", "{FINER}"]]}}}}', FINER),
    ],
)
def test_a_time_that_is_finer_than_microseconds_is_not_rounded(value, finer):
    if finer is None:
        assert decoded(JsonFormat(), Seen, value.encode())[0].at.microsecond == 123456
    else:
        with pytest.raises(ValueError, match=f"'{finer}' is finer than microseconds.*declare a str"):
            decoded(JsonFormat(), Seen, value.encode())


def test_a_text_of_avro_that_is_finer_than_microseconds_is_not_rounded():
    form = AvroFormat({"type": "record", "name": "Moment", "fields": [{"name": "at", "type": "string"}]})
    assert decoded(form, Moment, avro(form.schema, {"at": FINE}))[0].at.microsecond == 123456
    with pytest.raises(ValueError, match=f"'{FINER}' is finer than microseconds"):
        decoded(form, Moment, avro(form.schema, {"at": FINER}))


class Moment(NamedTuple):
    at: datetime


class Length(NamedTuple):
    seconds: int
    nanos: int


class Exact(NamedTuple):
    at: Length
    took: Length | None


def test_times_of_protobuf_that_are_finer_than_microseconds_are_read_in_parts(measured):
    full = measured(sensor="a", at={"seconds": 5, "nanos": 123456789}, took={"seconds": -1, "nanos": -7})
    value = full.SerializeToString()
    with pytest.raises(ValueError, match="a Timestamp with 123456789 nanoseconds is finer than microseconds"):
        decoded(ProtobufFormat(measured), Moment, value)
    with pytest.raises(ValueError, match="a Duration with -7 nanoseconds is finer"):
        decoded(ProtobufFormat(measured), NamedTuple("Took", [("took", timedelta)]), value)
    form, kind = ProtobufFormat(measured), record_type(Exact, "here")
    assert decoded(form, Exact, value) == [Exact(Length(5, 123456789), Length(-1, -7))]
    spelled = form.value_type(kind, kind.names, "here")
    written = form.encoder(spelled)([[{"seconds": 5, "nanos": 123456789}], [{"seconds": -1, "nanos": -7}]])
    assert measured.FromString(written[0]) == measured(at=full.at, took=full.took)


def test_raw_values_are_bytes_or_text():
    assert decoded(RawFormat(), bytes, b"\xff") == [b"\xff"]
    assert decoded(RawFormat(), str, "ü".encode()) == ["ü"]
    assert decoded(RawFormat(), str | None, None, b"a") == [None, "a"]
    with pytest.raises(PipelineError, match="a raw value is bytes or str, and not int"):
        decoded(RawFormat(), int, b"")
    with pytest.raises(PipelineError, match="a raw value is one field, and there are name, price"):
        decoded(RawFormat(), Item, b"")


class Reading(NamedTuple):
    sensor: str
    value: float
    at: datetime
    day: date
    cost: Decimal
    raw: bytes
    tags: dict[str, int]
    near: list[Point]
    size: Size
    note: str | None


SCHEMA = {
    "type": "record",
    "name": "Reading",
    "fields": [
        {"name": "sensor", "type": "string"},
        {"name": "value", "type": "int"},
        {"name": "at", "type": {"type": "long", "logicalType": "timestamp-millis"}},
        {"name": "day", "type": {"type": "int", "logicalType": "date"}},
        {"name": "cost", "type": {"type": "bytes", "logicalType": "decimal", "precision": 10, "scale": 2}},
        {"name": "raw", "type": "bytes"},
        {"name": "tags", "type": {"type": "map", "values": "long"}},
        {
            "name": "near",
            "type": {
                "type": "array",
                "items": {
                    "type": "record",
                    "name": "Point",
                    "fields": [{"name": "x", "type": "double"}, {"name": "y", "type": ["null", "double"]}],
                },
            },
        },
        {"name": "size", "type": {"type": "enum", "name": "Size", "symbols": ["s", "l"]}},
        {"name": "note", "type": ["null", "string"]},
        {"name": "more", "type": "string"},
    ],
}
READING = {
    "sensor": "a", "value": 3, "at": AT, "day": date(2024, 1, 2), "cost": Decimal("1.50"), "raw": b"\0",
    "tags": {"k": 1}, "near": [{"x": 1.0, "y": None}], "size": "l", "note": None, "more": "m",
}  # fmt: skip
EXPECTED = Reading(
    "a", 3.0, AT, date(2024, 1, 2), Decimal("1.50"), b"\0", {"k": 1}, [Point(1.0, None)], Size.LARGE, None
)


def avro(schema, value, number=None):
    stream = io.BytesIO()
    schemaless_writer(stream, parse_schema(schema), value)
    return (b"" if number is None else b"\0" + number.to_bytes(4, "big")) + stream.getvalue()


def test_avro_records_of_one_schema():
    assert decoded(AvroFormat(SCHEMA), Reading, avro(SCHEMA, READING)) == [EXPECTED]
    assert decoded(AvroFormat(json.dumps(SCHEMA)), Reading, avro(SCHEMA, READING)) == [EXPECTED]


def test_avro_that_does_not_fit_says_why():
    value = avro(SCHEMA, READING)
    for broken, reason in (
        (value[:-1], "ends before its schema"),
        (value + b"x", "does not end where its schema does"),
    ):
        with pytest.raises(ValueError, match=reason):
            decoded(AvroFormat(SCHEMA), Reading, broken)
    with pytest.raises(PipelineError, match="here: the Avro schema has no field 'name'; it has sensor, value"):
        decoded(AvroFormat(SCHEMA), Item, value)
    with pytest.raises(PipelineError, match="AvroFormat: there is no schema"):
        AvroFormat()


class Named(NamedTuple):
    id: str
    others: list[str | None]


def test_a_uuid_of_avro_is_text(registry):
    uuid = {"type": "string", "logicalType": "uuid"}
    others = {"type": "array", "items": ["null", uuid]}
    fields = [{"name": "id", "type": uuid}, {"name": "others", "type": others}]
    schema = {"type": "record", "name": "Named", "fields": fields}
    one, other = "0B2D4D8A-6F0F-4E3A-9A55-0A8E8C3F3B11", "2f1f7a1e-7c0b-4f54-8d2b-5f3e8e1a9c77"
    record = {"id": one, "others": [None, other]}
    assert decoded(AvroFormat(schema), Named, avro(schema, record)) == [Named(one, [None, other])]
    registry.schemas[1] = {"schema": json.dumps(schema)}
    in_registry = AvroFormat(registry=SchemaRegistry(registry.url))
    assert decoded(in_registry, Named, avro(schema, record, 1)) == [Named(one, [None, other])]


def test_avro_values_name_their_schema_in_a_registry(registry):
    old = {"type": "record", "name": "S", "fields": [{"name": "x", "type": "int"}]}
    new = {"type": "record", "name": "S", "fields": [{"name": "y", "type": "float"}, {"name": "x", "type": "double"}]}
    registry.schemas |= {1: {"schema": json.dumps(old)}, 2: {"schema": json.dumps(new), "schemaType": "AVRO"}}
    values = [avro(old, {"x": 1}, 1), avro(new, {"x": 2.5, "y": 0.5}, 2), avro(old, {"x": 3}, 1)]
    form = AvroFormat(registry=SchemaRegistry(registry.url))
    assert decoded(form, Point, *values) == [Point(1.0, None), Point(2.5, 0.5), Point(3.0, None)]
    assert len(registry.asked) == 2
    reader = {**new, "fields": [{"name": "x", "type": "double"}, {"name": "y", "type": "double", "default": 9}]}
    assert decoded(AvroFormat(reader, SchemaRegistry(registry.url)), Point, values[0]) == [Point(1.0, 9.0)]


def test_a_default_of_bytes_in_the_readers_schema_is_read(registry):
    class Coded(NamedTuple):
        x: int
        code: bytes

    x, wrong = {"name": "x", "type": "int"}, {"name": "z", "type": "bytes", "default": "\u1234"}
    old = {"type": "record", "name": "S", "fields": [x, wrong]}  # the writer's default is not what is read
    new = {**old, "fields": [x, {"name": "code", "type": "bytes", "default": "\u00ff"}]}
    registry.schemas[1] = {"schema": json.dumps(old)}
    form = AvroFormat(new, SchemaRegistry(registry.url))
    assert decoded(form, Coded, avro(old, {"x": 1, "z": b"z"}, 1)) == [Coded(1, b"\xff")]


class Dated(NamedTuple):
    day: date
    at: datetime
    millis: datetime
    local: Annotated[datetime, msgspec.Meta(tz=False)]
    since: timedelta
    until: timedelta
    maybe: datetime | None
    days: list[date]
    by_name: dict[str, datetime]


def test_defaults_of_dates_and_times_in_the_readers_schema_are_read(registry):
    def logical(avro, name):
        return {"type": avro, "logicalType": name}

    micros = logical("long", "timestamp-micros")
    fields = {
        "day": (logical("int", "date"), 1),
        "at": (micros, 10**6),
        "millis": (logical("long", "timestamp-millis"), 2000),
        "local": (logical("long", "local-timestamp-micros"), 3 * 10**6),
        "since": (logical("int", "time-millis"), 4000),
        "until": (logical("long", "time-micros"), 5 * 10**6),
        "maybe": (["null", "boolean", "string", micros], 6 * 10**6),
        "days": ({"type": "array", "items": logical("int", "date")}, [2, 3]),
        "by_name": ({"type": "map", "values": micros}, {"k": 0}),
    }
    start = datetime(1970, 1, 1, tzinfo=timezone.utc)
    expected = Dated(
        date(1970, 1, 2), start + timedelta(seconds=1), start + timedelta(seconds=2), datetime(1970, 1, 1, 0, 0, 3),
        timedelta(seconds=4), timedelta(seconds=5), start + timedelta(seconds=6), [date(1970, 1, 3), date(1970, 1, 4)],
        {"k": start},
    )  # fmt: skip
    old = {"type": "record", "name": "S", "fields": [{"name": "x", "type": "int"}]}
    new = [{"name": name, "type": kind, "default": default} for name, (kind, default) in fields.items()]
    registry.schemas[1] = {"schema": json.dumps(old)}
    form = AvroFormat({**old, "fields": new}, SchemaRegistry(registry.url))
    assert decoded(form, Dated, avro(old, {"x": 1}, 1)) == [expected]
    written = {**old, "fields": [{"name": name, "type": kind} for name, (kind, _) in fields.items()]}
    values = {name: default for name, (_, default) in fields.items()} | {"maybe": None}
    assert decoded(AvroFormat(written), Dated, avro(written, values)) == [expected._replace(maybe=None)]
    with pytest.raises(PipelineError, match="the default of field 'day' is 1000000000, and"):
        AvroFormat({**old, "fields": [{"name": "day", "type": logical("int", "date"), "default": 10**9}]})


def test_a_schema_in_a_registry_may_refer_to_others(registry):
    point = SCHEMA["fields"][7]["type"]["items"]
    schema = {"type": "record", "name": "S", "fields": [{"name": "near", "type": {"type": "array", "items": "Point"}}]}
    registry.versions["point", 1] = {"subject": "point", "id": 7, "version": 1, "schema": json.dumps(point)}
    reference = {"name": "Point", "subject": "point", "version": 1}
    registry.schemas[3] = {"schema": json.dumps(schema), "references": [reference]}

    class Near(NamedTuple):
        near: list[Point]

    stream = io.BytesIO()
    parsed = {}
    parse_schema(point, named_schemas=parsed)
    schemaless_writer(stream, parse_schema(schema, named_schemas=parsed), {"near": [{"x": 1.0, "y": 2.0}]})
    found = decoded(AvroFormat(registry=SchemaRegistry(registry.url)), Near, b"\0\0\0\0\3" + stream.getvalue())
    assert found == [Near([Point(1.0, 2.0)])]


def test_what_is_wrong_with_a_registry_is_one_sentence(registry):
    registry.schemas[4] = {"schema": "{}", "schemaType": "JSON"}
    where = SchemaRegistry(registry.url)
    for value, reason in (
        (b"{}", "it does not begin with the number of a schema in a registry"),
        (b"\0\0\0\0\x09x", f"schema 9 is not in the registry at {registry.url}"),
        (b"\0\0\0\0\x04x", "schema 4 in the registry is JSON, and not Avro"),
    ):
        with pytest.raises(ValueError, match=reason):
            decoded(AvroFormat(registry=where), Point, value)
    refused = SchemaRegistry(registry.url, {"basic.auth.user.info": "nobody:"})
    with pytest.raises(
        ConfigurationError, match=r"registry at .* refused this client \(status 401\); check its option"
    ):
        refused.avro(1)
    with pytest.raises(UnavailableError, match=r"registry at http://127.0.0.1:1 does not answer"):
        SchemaRegistry("http://127.0.0.1:1").avro(1)
    with pytest.raises(ConfigurationError, match="the url has a login in it"):
        SchemaRegistry("http://me:secret@registry")
    assert "nobody" not in repr(refused)


class Kind(Enum):
    SMALL = "SMALL"
    LARGE = "LARGE"


class X(NamedTuple):
    x: float


class Measured(NamedTuple):
    sensor: str
    value: int
    at: datetime | None
    took: timedelta | None
    near: list[X]
    kind: Kind
    tags: dict[str, int]
    note: str | None
    limit: int | None
    raw: bytes


def test_protobuf_messages_of_a_generated_class(measured):
    full = measured(sensor="a", value=3, near=[{"x": 1.5}], kind="LARGE", tags={"k": 1}, note="n", raw=b"\0")
    full.at.FromDatetime(AT)
    full.took.FromTimedelta(timedelta(seconds=2))
    full.limit.value = 9
    expected = Measured("a", 3, AT, timedelta(seconds=2), [X(1.5)], Kind.LARGE, {"k": 1}, "n", 9, b"\0")
    empty = Measured("", 0, None, None, [], Kind.SMALL, {}, None, None, b"")
    form = ProtobufFormat(measured)
    assert decoded(form, Measured, full.SerializeToString(), b"") == [expected, empty]
    framed = b"\0\0\0\0\x07" + b"\x02\x02" + full.SerializeToString()  # one number, 1: the second message of its file
    assert decoded(ProtobufFormat(measured, framed=True), Measured, framed) == [expected]


def test_protobuf_that_does_not_fit_says_why(measured):
    with pytest.raises(ValueError, match=r"another message of its schema, and no \w+"):
        decoded(ProtobufFormat(measured, framed=True), Measured, b"\0\0\0\0\x07\0")
    with pytest.raises(PipelineError, match=r"the message tests.Measured has no field 'name'; it has sensor"):
        decoded(ProtobufFormat(measured), Item, b"")
    with pytest.raises(Exception, match="Error parsing message"):
        decoded(ProtobufFormat(measured), Measured, b"\xff")


class Spot(msgspec.Struct, rename="camel"):
    mean_height: float
    note: str | None = None


@dataclass
class Area:
    middle: Spot
    near: list[Spot] = field(default_factory=lambda: [Spot(0.5)])


class Visit(NamedTuple):
    shop: str
    item: Item = Item("pen", Decimal("1.5"))
    spot: Spot | None = Spot(1.0, "here")
    area: Area = Area(Spot(2.0))
    items: list[Item] = [Item("ink", Decimal(2))]
    spots: dict[str, Spot] = {"a": Spot(3.0)}
    pair: tuple[Spot, int] = (Spot(4.0), 1)
    several: tuple[Spot, ...] = (Spot(5.0), Spot(6.0))
    tags: list[str] = ["x"]
    none: Item | None = None


class Ordered(NamedTuple):
    orderId: str
    lastPlace: Point = Point(1.0, 2.0)


def test_a_default_may_be_a_record_or_hold_records(registry, message):
    visit = Visit("a")
    assert decoded(JsonFormat(), Visit, b'{"shop": "a"}') == [visit]
    inner = b'{"shop": "a", "area": {"middle": {"meanHeight": 9}}}'
    assert decoded(JsonFormat(), Visit, inner) == [visit._replace(area=Area(Spot(9.0)))]
    schema = {"type": "record", "name": "Visit", "fields": [{"name": "shop", "type": "string"}]}
    registry.schemas[1] = {"schema": json.dumps(schema)}
    form = AvroFormat(registry=SchemaRegistry(registry.url))
    assert decoded(form, Visit, avro(schema, {"shop": "a"}, 1)) == [visit]
    order = message("Order")(orderId="o").SerializeToString()
    assert decoded(ProtobufFormat(message("Order")), Ordered, order) == [Ordered("o")]


@pytest.mark.parametrize(
    ("record", "value", "said"),
    [
        (float, 2**53 + 1, "9007199254740993 is a whole number that a float cannot hold; declare the field"),
        (list[float | None], [2**53, 2**53 + 1], "9007199254740993 is a whole number that a float cannot hold"),
        (dict[str, float], {"a": 2**53 + 1}, "9007199254740993 is a whole number that a float cannot hold"),
        (bytes, "abcd", "Expected `bytes`, got `str`"),
    ],
)
def test_a_value_that_would_be_another_one_does_not_fit(record, value, said):
    kind = "long" if isinstance(value, int) else "string"
    schema = {list: {"type": "array", "items": "long"}, dict: {"type": "map", "values": "long"}}.get(type(value), kind)
    whole = {"type": "record", "name": "Whole", "fields": [{"name": "f0", "type": schema}]}
    content = io.BytesIO()
    schemaless_writer(content, parse_schema(whole), {"f0": value})
    with pytest.raises(ValueError, match=re.escape(said)):
        decoded(AvroFormat(whole), NamedTuple("Named", [("f0", record)]), content.getvalue())
