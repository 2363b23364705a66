"""A schema registry and message classes for the tests of Kafka's formats, and less patience for what is not there."""

import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import unquote

import pytest
from google.protobuf import (
    descriptor_pb2,
    descriptor_pool,
    duration_pb2,
    message_factory,
    timestamp_pb2,
    wrappers_pb2,
)

from dagster_unified.connectors.kafka import cluster, connection


@pytest.fixture
def impatient(monkeypatch):
    """For topics that are not there, and clusters that cannot be reached.

    How long a cluster is waited for by itself is tested in `test_connection.py`.
    """
    monkeypatch.setattr(connection, "PATIENCE", 1.0)
    for module in (cluster, connection):
        monkeypatch.setattr(module, "SETTLING_PATIENCE", 0.5)


@pytest.fixture
def registry():
    """Confluent's interface of a schema registry, as far as the library asks: schemas by number, version and subject.

    It takes every schema but those whose subject begins with `closed`.
    """
    schemas, versions, asked, took = {}, {}, [], threading.Lock()

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self):
            path = self.path.partition("?")[0].strip("/").split("/")
            asked.append(self.path)
            if self.headers.get("Authorization") == "Basic bm9ib2R5Og==":
                return self.answer(401, {"error_code": 401, "message": "no"})
            if path[0] == "schemas":
                found = schemas.get(int(path[2]))
            elif path[3] == "latest":
                found = next(
                    (one for place, one in sorted(versions.items(), reverse=True) if place[0] == path[1]), None
                )
            else:
                found = versions.get((path[1], int(path[3])))
            if found is None:
                return self.answer(404, {"error_code": 40403, "message": "Schema not found"})
            return self.answer(200, found)

        def do_POST(self):
            path = unquote(self.path).partition("?")[0].strip("/").split("/")
            subject, given = "/".join(path[1:]).removesuffix("/versions"), self.content()
            asked.append(self.path)
            if subject.startswith("closed"):
                return self.answer(409, {"error_code": 409, "message": "the new schema lacks the field 'x'"})
            with took:
                return self.answer(200, self.registered(subject, given))

        def registered(self, subject, given):
            for place, one in versions.items():
                if place[0] == subject and one["schema"] == given["schema"]:
                    return one
            number, version = 1 + len(schemas), 1 + sum(place[0] == subject for place in versions)
            schemas[number] = given
            versions[subject, version] = {**given, "subject": subject, "id": number, "version": version}
            return versions[subject, version]

        def content(self):
            return json.loads(self.rfile.read(int(self.headers["Content-Length"])))

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


@pytest.fixture(scope="session")
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


@pytest.fixture(scope="session")
def message():
    """Message classes by name; `Shared` has the fields of `Shared` in `test_round_trips.py`."""
    types = {"double": 1, "float": 2, "int64": 3, "int32": 5, "bool": 8, "string": 9, "bytes": 12, "uint32": 13}
    file = descriptor_pb2.FileDescriptorProto(name="tests/shared.proto", package="shop", syntax="proto3")
    file.dependency.extend(one.DESCRIPTOR.name for one in (timestamp_pb2, duration_pb2, wrappers_pb2))
    size = file.enum_type.add(name="Size")
    size.value.add(name="s", number=0)
    size.value.add(name="l", number=1)
    state = file.enum_type.add(name="State")
    state.options.allow_alias = True
    for name, number in (("new", 0), ("started", 1), ("running", 1)):
        state.value.add(name=name, number=number)

    def add(message, name, kind, optional=False):
        added = message.field.add(name=name, number=len(message.field) + 1, label=1)
        if kind.startswith("map "):
            _, key, value = kind.split()
            entry_name = "".join(map(str.capitalize, name.split("_"))) + "Entry"
            options = descriptor_pb2.MessageOptions(map_entry=True)
            entry = message.nested_type.add(name=entry_name, options=options)
            add(entry, "key", key)
            add(entry, "value", value)
            kind = f"repeated .shop.{message.name}.{entry_name}"
        if kind.startswith("repeated "):
            added.label, kind = 3, kind.removeprefix("repeated ")
        if kind in types:
            added.type = types[kind]
        else:
            added.type, added.type_name = 14 if kind in (".shop.Size", ".shop.State") else 11, kind
        if optional:
            added.proto3_optional, added.oneof_index = True, len(message.oneof_decl)
            message.oneof_decl.add(name=f"_{name}")

    def record(name, optional=(), /, **fields):
        made = file.message_type.add(name=name)
        for one, kind in fields.items():
            add(made, one, kind, one in optional)
        return made

    record("Item", name="string", price="string", size=".shop.Size")
    record("Place", ("y",), x="double", y="double", items="repeated .shop.Item")
    record("Order", ("note",), orderId="string", firstItem=".shop.Item", lastPlace=".shop.Place", note="string")
    record(
        "Shared",
        ("maybe_text", "maybe_size"),
        text="string", number="int64", ratio="double", flag="bool", raw="bytes", at=".google.protobuf.Timestamp",
        local="string", day="string", price="string", took=".google.protobuf.Duration", size=".shop.Size",
        rank="uint32", item=".shop.Item", place=".shop.Place", pair="repeated string", several="repeated int64",
        numbers="repeated int64", items="repeated .shop.Item", counts="map string int64",
        places="map string .shop.Place", by_size="map string double", order=".shop.Order",
        maybe=".google.protobuf.Int64Value", maybe_text="string", maybe_at=".google.protobuf.Timestamp",
        maybe_size=".shop.Size", maybe_place=".shop.Place", more="string",
    )  # fmt: skip
    record("Keyed", by_number="map int64 .shop.Size", by_flag="map bool double")
    record(
        "Spots",
        ("note",),
        note="string", place=".shop.Place", limit=".google.protobuf.Int64Value", several="repeated .shop.Place",
        pair="repeated .shop.Place", by_name="map string .shop.Place",
    )  # fmt: skip
    record("Task", state=".shop.State", states="repeated .shop.State")
    record("Sale", shop="string", amount="int64", closed="bool")
    node = record("Node", value="int32", single="float", small="uint32")
    add(node, "child", ".shop.Node")
    either = record("Either")
    either.oneof_decl.add(name="either")
    for name in ("left", "right"):
        add(either, name, "string")
        either.field[-1].oneof_index = 0
    pool = descriptor_pool.Default()
    pool.Add(file)
    return lambda name: message_factory.GetMessageClass(pool.FindMessageTypeByName(f"shop.{name}"))


@pytest.fixture(scope="session")
def uses(message):
    """A message class whose file imports that of `message`."""
    file = descriptor_pb2.FileDescriptorProto(name="tests/uses.proto", package="uses", syntax="proto3")
    file.dependency.append(message("Item").DESCRIPTOR.file.name)
    file.message_type.add(name="Uses").field.add(name="item", number=1, type=11, type_name=".shop.Item", label=1)
    pool = descriptor_pool.Default()
    pool.Add(file)
    return message_factory.GetMessageClass(pool.FindMessageTypeByName("uses.Uses"))
