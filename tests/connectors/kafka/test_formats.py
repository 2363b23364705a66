"""What values become: typed records of JSON, Avro and Protobuf, and a reason where they do not fit."""

import io
import json
import threading
from dataclasses import dataclass
from datetime import date, datetime, timedelta, timezone
from decimal import Decimal
from enum import Enum
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import NamedTuple

import msgspec
import pytest
from fastavro import parse_schema, schemaless_writer
from google.protobuf import (
    descriptor_pb2,
    descriptor_pool,
    duration_pb2,
    message_factory,
    timestamp_pb2,
    wrappers_pb2,
)
from pyspark import cloudpickle

from dagster_unified.connectors.kafka import AvroFormat, JsonFormat, ProtobufFormat, RawFormat, SchemaRegistry
from dagster_unified.errors import ConfigurationError, PipelineError, UnavailableError
from dagster_unified.records import record_type


class Size(Enum):
    SMALL = "s"
    LARGE = "l"


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


@pytest.fixture
def registry():
    """Confluent's interface of a schema registry, as far as a reader asks: a schema by number, and by version."""
    schemas, versions, asked = {}, {}, []

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self):
            path = self.path.partition("?")[0].strip("/").split("/")
            asked.append(self.path)
            if self.headers.get("Authorization") == "Basic bm9ib2R5Og==":
                return self.answer(401, {"error_code": 401, "message": "no"})
            found = schemas.get(int(path[2])) if path[0] == "schemas" else versions.get((path[1], int(path[3])))
            if found is None:
                return self.answer(404, {"error_code": 40403, "message": "Schema not found"})
            return self.answer(200, found)

        def answer(self, status, content):
            data = json.dumps(content).encode()
            self.send_response(status)
            self.send_header("Content-Type", "application/vnd.schemaregistry.v1+json")
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

        def log_message(self, *arguments):
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    server.url, server.asked = f"http://127.0.0.1:{server.server_port}", asked
    server.schemas, server.versions = schemas, versions
    yield server
    server.shutdown()
    server.server_close()


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


@pytest.fixture(scope="module")
def measured():
    """A message class as `protoc` generates it from a file."""
    file = descriptor_pb2.FileDescriptorProto(name="tests/measured.proto", package="tests", syntax="proto3")
    file.dependency.extend(one.DESCRIPTOR.name for one in (timestamp_pb2, duration_pb2, wrappers_pb2))
    other = file.message_type.add(name="Other")
    other.field.add(name="x", number=1, type=1, label=1)
    message = file.message_type.add(name="Measured")
    kinds = message.enum_type.add(name="Kind")
    kinds.value.add(name="SMALL", number=0)
    kinds.value.add(name="LARGE", number=1)
    entry = message.nested_type.add(name="TagsEntry", options=descriptor_pb2.MessageOptions(map_entry=True))
    entry.field.add(name="key", number=1, type=9, label=1)
    entry.field.add(name="value", number=2, type=3, label=1)
    message.oneof_decl.add(name="_note")
    add = message.field.add
    add(name="sensor", number=1, type=9, label=1)
    add(name="value", number=2, type=5, label=1)
    add(name="at", number=3, type=11, type_name=".google.protobuf.Timestamp", label=1)
    add(name="took", number=4, type=11, type_name=".google.protobuf.Duration", label=1)
    add(name="near", number=5, type=11, type_name=".tests.Other", label=3)
    add(name="kind", number=6, type=14, type_name=".tests.Measured.Kind", label=1)
    add(name="tags", number=7, type=11, type_name=".tests.Measured.TagsEntry", label=3)
    add(name="note", number=8, type=9, label=1, proto3_optional=True, oneof_index=0)
    add(name="limit", number=9, type=11, type_name=".google.protobuf.Int64Value", label=1)
    add(name="raw", number=10, type=12, label=1)
    pool = descriptor_pool.Default()
    pool.Add(file)
    return message_factory.GetMessageClass(pool.FindMessageTypeByName("tests.Measured"))


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
    with pytest.raises(ValueError, match=r"another message of its schema, the one at \[0\]"):
        decoded(ProtobufFormat(measured, framed=True), Measured, b"\0\0\0\0\x07\0")
    with pytest.raises(PipelineError, match=r"the message tests.Measured has no field 'name'; it has sensor"):
        decoded(ProtobufFormat(measured), Item, b"")
    with pytest.raises(Exception, match="Error parsing message"):
        decoded(ProtobufFormat(measured), Measured, b"\xff")
