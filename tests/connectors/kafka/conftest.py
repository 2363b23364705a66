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


TYPES = {"double": 1, "float": 2, "int64": 3, "int32": 5, "bool": 8, "string": 9, "bytes": 12, "uint32": 13}


class Messages:
    """Message classes as `protoc` generates them from a file."""

    def __init__(self, file, package, *imports):
        self.file = descriptor_pb2.FileDescriptorProto(name=file, package=package, syntax="proto3")
        self.file.dependency.extend(imports)
        self.enums = set()

    def enum(self, name, values, within=None):
        """An enum of the file, or of a message; names that share a number are aliases."""
        made = (self.file if within is None else within).enum_type.add(name=name)
        made.options.allow_alias = len(set(values.values())) < len(values)
        for value, number in values.items():
            made.value.add(name=value, number=number)
        self.enums.add(".".join(["", self.file.package, *([within.name] if within is not None else []), name]))

    def record(self, name, optional=(), /, **fields):
        made = self.file.message_type.add(name=name)
        for field, kind in fields.items():
            self.add(made, field, kind, field in optional)
        return made

    def add(self, message, name, kind, optional=False):
        added = message.field.add(name=name, number=len(message.field) + 1, label=1)
        if kind.startswith("map "):
            _, key, value = kind.split()
            entry_name = "".join(map(str.capitalize, name.split("_"))) + "Entry"
            options = descriptor_pb2.MessageOptions(map_entry=True)
            entry = message.nested_type.add(name=entry_name, options=options)
            self.add(entry, "key", key)
            self.add(entry, "value", value)
            kind = f"repeated .{self.file.package}.{message.name}.{entry_name}"
        if kind.startswith("repeated "):
            added.label, kind = 3, kind.removeprefix("repeated ")
        if kind in TYPES:
            added.type = TYPES[kind]
        else:
            added.type, added.type_name = 14 if kind in self.enums else 11, kind
        if optional:
            added.proto3_optional, added.oneof_index = True, len(message.oneof_decl)
            message.oneof_decl.add(name=f"_{name}")

    def classes(self):
        """Gives message classes by name."""
        pool = descriptor_pool.Default()
        pool.Add(self.file)
        found = f"{self.file.package}.{{}}".format
        return lambda name: message_factory.GetMessageClass(pool.FindMessageTypeByName(found(name)))


WELL_KNOWN = [one.DESCRIPTOR.name for one in (timestamp_pb2, duration_pb2, wrappers_pb2)]


@pytest.fixture(scope="session")
def measured():
    messages = Messages("tests/measured.proto", "tests", *WELL_KNOWN)
    messages.record("Other", x="double")
    made = messages.record("Measured")
    messages.enum("Kind", {"SMALL": 0, "LARGE": 1}, within=made)
    fields = {
        "sensor": "string", "value": "int32", "at": ".google.protobuf.Timestamp", "took": ".google.protobuf.Duration",
        "near": "repeated .tests.Other", "kind": ".tests.Measured.Kind", "tags": "map string int64", "note": "string",
        "limit": ".google.protobuf.Int64Value", "raw": "bytes",
    }  # fmt: skip
    for name, kind in fields.items():
        messages.add(made, name, kind, optional=name == "note")
    return messages.classes()("Measured")


@pytest.fixture(scope="session")
def message():
    """Message classes by name; `Shared` has the fields of `Shared` in `test_round_trips.py`."""
    messages = Messages("tests/shared.proto", "shop", *WELL_KNOWN)
    messages.enum("Size", {"s": 0, "l": 1})
    messages.enum("State", {"new": 0, "started": 1, "running": 1})
    record = messages.record
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
    messages.add(record("Node", value="int32", single="float", small="uint32"), "child", ".shop.Node")
    either = record("Either", left="string", right="string")
    either.oneof_decl.add(name="either")
    for field in either.field:
        field.oneof_index = 0
    return messages.classes()


@pytest.fixture(scope="session")
def uses(message):
    """A message class whose file imports that of `message`."""
    messages = Messages("tests/uses.proto", "uses", message("Item").DESCRIPTOR.file.name)
    messages.record("Uses", item=".shop.Item")
    return messages.classes()("Uses")
