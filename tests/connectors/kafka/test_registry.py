"""Values whose schemas are in a real registry, which Confluent's own serializers write and read as well."""

import json
from decimal import Decimal
from typing import NamedTuple
from uuid import uuid4

import pytest
from confluent_kafka.schema_registry import Schema, SchemaReference, SchemaRegistryClient
from confluent_kafka.schema_registry.avro import AvroDeserializer, AvroSerializer
from confluent_kafka.schema_registry.protobuf import ProtobufDeserializer, ProtobufSerializer
from confluent_kafka.serialization import MessageField, SerializationContext

from dagster_unified.connectors.kafka import AvroFormat, ProtobufFormat, SchemaRegistry
from dagster_unified.errors import ConfigurationError, UnavailableError
from dagster_unified.records import record_type
from tests.connectors.kafka.test_round_trips import (
    ITEM,
    PLACE,
    Count,
    Item,
    Place,
    Size,
    avro,
    encoded,
    round_trip,
)
from tests.servers.registry import Registry


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    registry = Registry(tmp_path_factory.mktemp("registry")).start()
    yield registry
    registry.kill()


@pytest.fixture
def where(server):
    return SchemaRegistry(server.url)


@pytest.fixture
def client(server):
    return SchemaRegistryClient({"url": server.url})


@pytest.fixture
def topic():
    return f"topic-{uuid4().hex[:12]}"


def value_of(topic):
    return SerializationContext(topic, MessageField.VALUE)


def read(form, record, *values):
    kind = record_type(record)
    value = form.value_type(kind, kind.names, "here")
    return kind.from_batch(value.to_batch(list(map(form.decoder(value.python), values))))


class Counted(NamedTuple):
    x: int
    note: str


def test_avro_is_what_confluents_serializers_write_and_read(where, client, topic):
    schema = avro(x="long")
    written, prefix = AvroFormat(schema, where).registered(topic)
    assert AvroFormat(schema, where).registered(topic)[1] == prefix
    assert client.get_latest_version(f"{topic}-value").schema_id == int.from_bytes(prefix[1:], "big")
    (ours,) = encoded(written, Count, Count(3), prefix=prefix).values
    assert AvroDeserializer(client)(ours, value_of(topic)) == {"x": 3}
    theirs = AvroSerializer(client, json.dumps(schema))({"x": 4}, value_of(topic))
    assert theirs[:5] == prefix
    assert read(AvroFormat(registry=where), Count, ours, theirs) == [Count(3), Count(4)]


def test_a_schema_that_changes_under_a_stream_is_read_and_one_that_does_not_fit_is_refused(where, client, topic):
    subject = f"{topic}-value"
    old, prefix = AvroFormat(avro(x="long"), where).registered(topic)
    client.set_compatibility(subject, level="BACKWARD")
    noted = avro(x="long", note={"type": "string", "default": "none"})
    new, new_prefix = AvroFormat(noted, where).registered(topic)
    assert new_prefix != prefix
    assert AvroFormat(registry=where).registered(topic)[1] == new_prefix
    values = encoded(old, Count, Count(1), prefix=prefix).values
    values += encoded(new, Counted, Counted(2, "late"), prefix=new_prefix).values
    assert read(AvroFormat(noted, where), Counted, *values) == [Counted(1, "none"), Counted(2, "late")]
    assert read(AvroFormat(registry=where), Count, *values) == [Count(1), Count(2)]
    with pytest.raises(ValueError, match=f"does not take the schema for the subject '{subject}': "):
        AvroFormat(avro(x="long", needed="string"), where).registered(topic)


def test_an_avro_schema_refers_to_others(where, client, topic):
    item = client.register_schema(f"{topic}-item", Schema(json.dumps(ITEM), "AVRO"))
    assert item
    reference = SchemaReference("shop.Item", f"{topic}-item", 1)
    client.register_schema(f"{topic}-value", Schema(json.dumps(PLACE), "AVRO", [reference]))
    written, prefix = AvroFormat(registry=where).registered(topic)
    place = Place(1.0, None, [Item("pen", Decimal("1.5"), Size.LARGE)])
    assert round_trip(written, Place, place, prefix=prefix) == [place]
    (value,) = encoded(written, Place, place, prefix=prefix).values
    assert AvroDeserializer(client)(value, value_of(topic))["items"][0]["name"] == "pen"


def test_protobuf_is_what_confluents_serializers_write_and_read(where, client, topic, message, uses):
    config = {"use.deprecated.format": False}
    written, prefix = ProtobufFormat(message("Place"), registry=where).registered(topic)
    place = Place(1.0, None, [Item("pen", Decimal("1.5"), Size.LARGE)])
    (ours,) = encoded(written, Place, place, prefix=prefix).values
    theirs = ProtobufDeserializer(message("Place"), config, client)(ours, value_of(topic))
    assert (theirs.x, theirs.items[0].name) == (1.0, "pen")
    again = ProtobufSerializer(message("Place"), client, config)(theirs, value_of(topic))
    assert again == ours
    assert read(ProtobufFormat(message("Place"), framed=True), Place, ours, again) == [place, place]

    class Using(NamedTuple):
        item: Item

    using, prefix = ProtobufFormat(uses, registry=where).registered(f"{topic}-uses")
    (ours,) = encoded(using, Using, Using(place.items[0]), prefix=prefix).values
    assert ProtobufDeserializer(uses, config, client)(ours, value_of(f"{topic}-uses")).item.name == "pen"
    found = client.get_latest_version(f"{topic}-uses-value")
    assert [reference.subject for reference in found.schema.references] == ["tests/shared.proto"]
    theirs = ProtobufSerializer(uses, client, config)(uses(item={"name": "pen"}), value_of(f"{topic}-uses"))
    assert theirs[:6] == ours[:6]


def test_what_is_not_there_is_one_sentence(where, topic, server, tmp_path):
    with pytest.raises(ValueError, match=f"the subject '{topic}-value' is not in the registry at {server.url}"):
        AvroFormat(registry=where).registered(topic)
    with pytest.raises(ValueError, match=f"schema 99999 is not in the registry at {server.url}"):
        read(AvroFormat(registry=where), Count, b"\0\0\1\x86\x9fx")
    with pytest.raises(ValueError, match="does not take the schema for the subject"):
        where.register(f"{topic}-value", '{"type": "nothing"}', "AVRO")
    elsewhere = SchemaRegistry(f"{server.url}/nowhere")
    for ask in (lambda: elsewhere.avro(1), lambda: elsewhere.latest(topic)):
        with pytest.raises(ConfigurationError, match=r"nowhere answers as no registry does .*; correct its url"):
            ask()
    away = Registry(tmp_path)
    with pytest.raises(UnavailableError, match=f"the schema registry at {away.url} does not answer"):
        AvroFormat(avro(x="long"), SchemaRegistry(away.url)).registered(topic)
