"""`dagster-unified record`: the source reads what it is given with the class that was written for it."""

import base64
import gzip
import io
import json
import subprocess
import sys
from datetime import date, datetime, time, timedelta, timezone
from decimal import Decimal
from types import ModuleType

import deltalake
import fastavro
import psycopg
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from google.protobuf import timestamp_pb2
from google.protobuf.descriptor_pb2 import DescriptorProto, FileDescriptorProto
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from upath import UPath

from dagster_unified.cli.record.classes import Names, record_class
from dagster_unified.connectors import (
    AvroFormat,
    CsvSource,
    DeltaSource,
    JsonFormat,
    JsonSource,
    ParquetSource,
    PostgresSource,
    ProtobufFormat,
    SchemaRegistry,
)
from dagster_unified.connectors.kafka.formats.base import framing
from dagster_unified.records import record_type
from tests.object_store import served
from tests.servers.registry import Registry

pytest_plugins = ["tests.servers.postgres"]


def class_of(text):
    """The class that a text of Python ends with."""
    names = {"__name__": "__main__"}  # a module that workers do not have: its classes travel by value
    exec(text, names)
    return list(names.values())[-1]


@pytest.fixture
def written(cli):
    """Runs the command; gives the class that it has written."""

    def run(*arguments):
        code, out, err = cli("record", *arguments)
        assert (code, err) == (0, "")
        return class_of(out)

    return run


# Arrow


NAMES = st.sampled_from(
    ["a", "B", "date", "bytes", "int", "list", "dt", "count", "_x", "Decimal", "NamedTuple", "field", "Record", "größe"]
)
PLAIN = st.sampled_from(
    [
        *(pa.bool_(), pa.int64(), pa.float64(), pa.string(), pa.binary(), pa.date32(), pa.timestamp("us", "UTC")),
        *(pa.decimal128(38, 18), pa.duration("us")),
    ]
)


def members(kinds):
    fields = st.lists(st.tuples(NAMES, kinds, st.booleans()), min_size=1, max_size=4, unique_by=lambda f: f[0].lower())
    return fields.map(lambda fields: [pa.field(*field) for field in fields])


KINDS = st.recursive(
    PLAIN,
    lambda kinds: (
        st.tuples(kinds, st.booleans()).map(lambda item: pa.list_(pa.field("element", *item)))
        | members(kinds).map(pa.struct)
        | st.tuples(PLAIN, kinds).map(lambda pair: pa.map_(pair[0], pa.field("value", pair[1], False)))
    ),
    max_leaves=6,
)


def normal(kind):
    """The type as `records.py` has it: the values of a map say nothing of null."""
    if pa.types.is_map(kind):
        return pa.map_(normal(kind.key_type), normal(kind.item_type))
    if pa.types.is_list(kind):
        return pa.list_(kind.value_field.with_type(normal(kind.value_type)))
    return pa.struct([f.with_type(normal(f.type)) for f in kind]) if pa.types.is_struct(kind) else kind


@given(members(KINDS).map(pa.schema))
def test_a_record_class_has_the_columns_that_it_was_written_for(schema):
    made = class_of(record_class(schema, "Record", "A row.", "it", Names(False, "")))
    assert record_type(made).schema == pa.schema([field.with_type(normal(field.type)) for field in schema])


WIDER = {
    pa.int16(): st.integers(-(2**15), 2**15 - 1),
    pa.int64(): st.integers(-(2**63), 2**63 - 1),
    pa.float32(): st.floats(width=32, allow_nan=False),
    pa.float64(): st.floats(allow_nan=False),
    pa.bool_(): st.booleans(),
    pa.string(): st.text(st.characters(codec="utf-8", exclude_characters="\0"), max_size=5),
    pa.binary(): st.binary(max_size=5),
    pa.date32(): st.dates(date(1900, 1, 1), date(2100, 1, 1)),
    pa.timestamp("us", "UTC"): st.datetimes(datetime(1970, 1, 2), datetime(2100, 1, 1)),
    pa.decimal128(10, 2): st.decimals(-(10**7), 10**7, places=2),
    pa.decimal128(38, 0): st.integers(-(2**63), 2**63 - 1).map(Decimal),
}
"""Types that tables have, with their values; the sources widen some of them to the fields' types."""


def values_of(kind):
    if pa.types.is_list(kind):
        return st.lists(values_of(kind.value_type), max_size=3)
    if pa.types.is_struct(kind):
        return st.fixed_dictionaries({f.name: values_of(f.type) for f in kind})
    if pa.types.is_map(kind):
        return st.dictionaries(st.text("ab", max_size=3), values_of(kind.item_type), max_size=3).map(
            lambda d: list(d.items())
        )
    return WIDER[kind]


PHYSICAL = st.recursive(
    st.sampled_from(list(WIDER)),
    lambda kinds: (
        kinds.map(pa.list_)
        | st.lists(kinds, min_size=1, max_size=3).map(lambda k: pa.struct([(f"m{i}", x) for i, x in enumerate(k)]))
        | kinds.map(lambda kind: pa.map_(pa.string(), kind))
    ),
    max_leaves=4,
)


@st.composite
def tables(draw):
    fields = [
        pa.field(name, draw(PHYSICAL), draw(st.booleans()))
        for name in draw(st.lists(NAMES, min_size=1, max_size=4, unique_by=str.lower))
    ]
    rows = draw(st.lists(st.fixed_dictionaries({f.name: values_of(f.type) for f in fields}), min_size=1, max_size=3))
    naive = pa.array([datetime(2024, 1, 31, 10)] * len(rows), pa.timestamp("us"))
    return pa.Table.from_pylist(rows, pa.schema(fields)).append_column("naive", naive)


@settings(suppress_health_check=list(HealthCheck), max_examples=10, deadline=None)
@given(table=tables())
@pytest.mark.parametrize("kind", ["parquet", "delta"])
def test_parquet_files_and_delta_tables_are_read_with_the_class_written_for_them(
    spark, written, tmp_path_factory, kind, table
):
    place = str(tmp_path_factory.mktemp("table") / "orders")
    if kind == "delta":
        deltalake.write_deltalake(place, table)
    else:
        pq.write_table(table, f"{place}.parquet")
    path = place if kind == "delta" else f"{place}.parquet"
    made = written(path)
    source = DeltaSource(path, made) if kind == "delta" else ParquetSource(path, made)
    read, there = source.read(spark).toArrow(), table.cast(record_type(made).schema)
    assert records_of(source, read) == records_of(source, there)


def records_of(source, table):
    (batch,) = table.cast(source.records.schema).combine_chunks().to_batches()
    return sorted(source.records.from_batch(batch), key=repr)


def test_the_class_of_a_table_is_ready_to_paste(cli, tmp_path):
    lines = pa.struct([pa.field("sku", pa.string(), False), pa.field("price", pa.decimal128(10, 2))])
    fields = [
        pa.field("id", pa.int32(), False, {"comment": 'The number, as the "shop" has it.'}),
        pa.field("day", pa.date32()),
        pa.field("lines", pa.list_(pa.field("element", lines, False))),
    ]
    deltalake.DeltaTable.create(str(tmp_path / "corner_orders"), deltalake.Schema.from_arrow(pa.schema(fields)))
    code, out, err = cli("record", "corner_orders")
    assert (code, err) == (0, "")
    assert (
        out
        == '''\
from datetime import date
from decimal import Decimal
from typing import NamedTuple


class Lines(NamedTuple):
    """A value of lines[]."""

    sku: str
    price: Decimal | None


class CornerOrders(NamedTuple):
    """A row of corner_orders."""

    id: int
    """The number, as the \\"shop\\" has it."""

    day: date | None
    lines: list[Lines] | None
'''
    )


def test_a_type_checker_takes_a_class_whose_columns_have_the_names_of_types(cli, tmp_path):
    names = ["date", "bytes", "count", "other", "field", "raw"]
    kinds = [pa.date32(), pa.int64(), pa.int64(), pa.date32(), pa.string(), pa.binary()]
    pq.write_table(pa.schema(zip(names, kinds, strict=True)).empty_table(), tmp_path / "orders.parquet")
    (tmp_path / "written.py").write_text(cli("record", "orders.parquet", "--name", "Order")[1])
    checked = subprocess.run(
        [sys.executable, "-m", "mypy", "--strict", "written.py"], cwd=tmp_path, capture_output=True
    )
    assert checked.returncode == 0, checked.stdout


# Texts


def test_columns_of_csv_keep_what_they_say(spark, written, tmp_path):
    (tmp_path / "day=2024-01-31").mkdir()
    (tmp_path / "day=2024-02-01").mkdir()
    header = "number,code,amount,exact,at,ok,note,mixed,id\n"
    (tmp_path / "day=2024-01-31/a.csv").write_text(
        header
        + "1,007,1.5,12345678901234567.25,2024-01-31 10:00:00,true,,1,1\n"
        + '2,1e5,3,0.1,2024-01-31T10:00:00Z,FALSE,"x, ""y""",a,2\n'
    )
    (tmp_path / "day=2024-02-01/b.csv").write_text(
        header + "-3,12,1e3,7,2024-02-01,true,z,2024-01-01,99999999999999999999\n"
    )
    made = written(".", "--format", "csv", "--name", "Sale")
    fields = {field.name: (str(field.type), field.nullable) for field in record_type(made).schema}
    assert fields == {
        "number": ("int64", False),
        "code": ("string", False),
        "amount": ("double", False),
        "exact": ("decimal128(38, 18)", False),
        "at": ("timestamp[us, tz=UTC]", False),
        "ok": ("bool", False),
        "note": ("string", True),
        "mixed": ("string", False),
        "id": ("decimal128(38, 18)", False),
        "day": ("date32[day]", False),
    }
    rows = sorted(CsvSource(str(tmp_path), made).read(spark).toArrow().to_pylist(), key=lambda row: row["number"])
    assert [(r["code"], r["note"], r["mixed"], r["day"]) for r in rows] == [
        ("12", "z", "2024-01-01", date(2024, 2, 1)),
        ("007", None, "1", date(2024, 1, 31)),
        ("1e5", 'x, "y"', "a", date(2024, 1, 31)),
    ]


def test_objects_of_json_become_classes_and_dicts(spark, written, tmp_path):
    rows = [
        {"id": 1, "at": "2024-01-31T10:00:00Z", "by": {"2024-01": 3, "x y": None}, "place": {"lat": 1, "name": "a"}},
        {"id": 2, "at": None, "by": {}, "place": {"lat": 2.5}, "tags": [{"n": 1}, {"n": None}], "mixed": 7},
        {"id": 3, "at": "2024-01-31", "by": {"z": 1}, "place": {"lat": 0}, "tags": [], "mixed": "x"},
    ]
    (tmp_path / "events.jsonl").write_text("\n".join(map(json.dumps, rows)))
    made = written("events.jsonl")
    source = JsonSource("events.jsonl", made)
    first, second, third = sorted(records_of(source, source.read(spark).toArrow()), key=lambda record: record.id)
    at = datetime(2024, 1, 31, 10, tzinfo=timezone.utc)
    assert (first.at, first.by, first.place.lat, first.tags) == (at, {"2024-01": 3, "x y": None}, 1.0, None)
    assert (second.at, second.by, second.place.name, second.mixed) == (None, {}, None, "7")
    assert ([tag.n for tag in second.tags], third.tags, third.mixed) == ([1, None], [], "x")


def test_files_and_tables_in_a_bucket(cli, monkeypatch):
    with served("lake") as environment:
        for name, value in environment.items():
            monkeypatch.setenv(name, value)
        UPath("s3://lake/sales/1.csv.gz").write_bytes(gzip.compress(b"zip,amount\n007,3\n"))
        deltalake.write_deltalake("s3://lake/orders", pa.table({"id": [1]}))
        code, out, err = cli("record", "s3://lake/sales/*.csv.gz")
        assert (code, err) == (0, "")
        assert out.endswith('    """A row of s3://lake/sales/*.csv.gz."""\n\n    zip: str\n    amount: int\n')
        assert "class Sales(NamedTuple):" in out
        assert "class Orders(NamedTuple):" in cli("record", "s3://lake/orders")[1]


# Tables of PostgreSQL


def test_a_table_of_postgres_is_read_with_the_class_written_for_it(written, postgres):
    with psycopg.connect(postgres, autocommit=True) as client:
        client.execute("CREATE TYPE colour AS ENUM ('red', 'blue'); CREATE DOMAIN code AS varchar(3)")
        client.execute("CREATE TYPE place AS (city text, floor int)")
        client.execute(
            "CREATE TABLE orders (id bigserial PRIMARY KEY, small int2 NOT NULL, price numeric(10,2), rough float4,"
            " ok bool,"
            " note text, c code, colour colour, colours colour[], raw bytea, day date, at timestamptz NOT NULL,"
            " naive timestamp, wait interval, tags text[], grid int[][], days date[], doc jsonb, at_place place,"
            " places place[], uid uuid)"
        )
        client.execute("COMMENT ON COLUMN orders.price IS 'Before tax.'")
        client.execute(
            "INSERT INTO orders VALUES (1, 2, 1.50, 1.5, true, 'x', 'abc', 'red', '{red,blue}', '\\x01',"
            " '2024-01-31', '2024-01-31 10:00Z', '2024-01-31 10:00', '1 day 2 seconds', '{a,NULL}', '{{1,2},{3,4}}',"
            " '{2024-01-31}', '{\"a\": 1}', ('Rome', 2), ARRAY[('Oslo', NULL)::place],"
            " 'a0eebc99-9c0b-4ef8-bb6d-6bb9bd380a11')"
        )
    made = written("public.orders", "--postgres", postgres)
    source = PostgresSource("public.orders", made, postgres)
    (order,) = source.records.from_batch(source.rows().to_batches()[0])
    at = datetime(2024, 1, 31, 10, tzinfo=timezone.utc)
    assert (order.id, order.small, order.price, order.rough, order.ok) == (1, 2, Decimal("1.5"), 1.5, True)
    assert (order.note, order.c, order.colour, order.colours, order.raw) == ("x", "abc", "red", ["red", "blue"], b"\1")
    assert (order.day, order.at, order.naive) == (date(2024, 1, 31), at, at)
    assert (order.wait, order.tags, order.grid) == (timedelta(1, 2), ["a", None], [[1, 2], [3, 4]])
    assert (order.days, order.doc, order.uid) == (
        [date(2024, 1, 31)],
        '{"a": 1}',
        "a0eebc99-9c0b-4ef8-bb6d-6bb9bd380a11",
    )
    assert (order.at_place.city, order.places[0].city, order.places[0].floor) == ("Rome", "Oslo", None)
    schema = record_type(made).schema
    assert [schema.field(name).nullable for name in ("id", "at", "naive")] == [False, False, True]


def test_a_query_of_postgres_and_a_column_that_is_not_read(cli, written, postgres):
    with psycopg.connect(postgres, autocommit=True) as client:
        client.execute('CREATE TABLE shapes (id int NOT NULL, at point, "class" text)')
    code, out, err = cli("record", "shapes", "--postgres", postgres)
    assert (code, out) == (2, "")
    assert "table shapes: no field of a record can have the name of column 'class'; give a query in place" in err
    err = cli("record", "shapes", "--postgres", postgres, "--without", "class")[2]
    assert "column 'at' is point, which no field of a record holds" in err
    query = 'SELECT id, at::text AS at, "class" AS kind FROM shapes'
    made = written(query, "--postgres", postgres, "--name", "Shape")
    assert PostgresSource(query, made, postgres).rows().num_rows == 0
    assert written("shapes", "--postgres", postgres, "--without", "at", "--without", "class")._fields == ("id",)


# Topics


@pytest.fixture(scope="module")
def registry(tmp_path_factory):
    server = Registry(tmp_path_factory.mktemp("registry")).start()
    yield server
    server.kill()


SALE = {
    "type": "record",
    "name": "Sale",
    "namespace": "shop",
    "fields": [
        {"name": "class", "type": "string", "doc": "What is sold."},
        {"name": "at", "type": {"type": "long", "logicalType": "timestamp-millis"}},
        {"name": "price", "type": {"type": "bytes", "logicalType": "decimal", "precision": 10, "scale": 2}},
        {"name": "since", "type": ["null", {"type": "int", "logicalType": "time-millis"}]},
        {"name": "colour", "type": {"type": "enum", "name": "Colour", "symbols": ["RED"]}},
        {
            "name": "lines",
            "type": {
                "type": "array",
                "items": {"type": "record", "name": "Line", "fields": [{"name": "n", "type": "int"}]},
            },
        },
        {"name": "last", "type": ["null", "Line"]},
        {"name": "notes", "type": {"type": "map", "values": ["string", "null"]}},
    ],
}


def test_values_in_avro_are_read_with_the_class_written_for_their_topic(written, registry):
    known, value = SchemaRegistry(registry.url), io.BytesIO()
    number = known.register("sales-value", json.dumps(SALE), "AVRO")
    at = datetime(2024, 1, 31, tzinfo=timezone.utc)
    sale = {
        "class": "tea", "at": at, "price": Decimal("1.50"), "since": time(0, 0, 1), "colour": "RED",
        "lines": [{"n": 1}], "last": None, "notes": {"a": None},
    }  # fmt: skip
    fastavro.schemaless_writer(value, fastavro.parse_schema(SALE), sale)
    made = written("sales", "--registry", registry.url, "--name", "Sale")
    read = _read(AvroFormat(registry=known), made, framing(number) + value.getvalue())
    assert (read.class_, read.at, read.price, read.since) == ("tea", at, Decimal("1.5"), timedelta(seconds=1))
    assert (read.colour, read.lines[0].n, read.last, read.notes) == ("RED", 1, None, {"a": None})


def test_values_in_protobuf_are_read_with_the_class_written_for_their_topic(written, registry, monkeypatch):
    described = FileDescriptorProto.FromString(timestamp_pb2.DESCRIPTOR.serialized_pb)
    file = FileDescriptorProto(name="record_sales.proto", package="record_shop", syntax="proto3")
    file.dependency.append(described.name)
    sale = file.message_type.add(name="Sale")
    sale.field.add(name="shop", number=1, label=1, type=9)
    sale.field.add(name="at", number=2, label=1, type=11, type_name=".google.protobuf.Timestamp")
    sale.field.add(name="counts", number=3, label=3, type=4)
    sale.nested_type.append(DescriptorProto(name="Line"))
    sale.nested_type[0].field.add(name="sku", number=1, label=1, type=9)
    sale.field.add(name="lines", number=4, label=3, type=11, type_name=".record_shop.Sale.Line")
    SchemaRegistry(registry.url).register(
        "messages-value", base64.b64encode(file.SerializeToString()).decode(), "PROTOBUF"
    )
    made = written("messages", "--registry", registry.url)
    from google.protobuf import descriptor_pool, message_factory

    descriptor_pool.Default().Add(file)
    message = message_factory.GetMessageClass(descriptor_pool.Default().FindMessageTypeByName("record_shop.Sale"))
    module = ModuleType("record_sales_pb2")
    module.Sale = message
    monkeypatch.setitem(sys.modules, "record_sales_pb2", module)
    again = written("record_sales_pb2:Sale", "--name", "Messages")
    assert record_type(again).schema == record_type(made).schema
    value = message(shop="north", counts=[1, 2], lines=[{"sku": "tea"}]).SerializeToString()
    read = _read(ProtobufFormat(message), made, value)
    assert (read.shop, read.at, read.counts, read.lines[0].sku) == ("north", None, [1, 2], "tea")


JSON_SALE = {
    "type": "object",
    "properties": {
        "from": {"type": "string", "description": "Where it came from."},
        "at": {"type": "string", "format": "date-time"},
        "price": {"oneOf": [{"type": "null"}, {"type": "number"}]},
        "lines": {"type": "array", "items": {"$ref": "#/definitions/Line"}},
        "notes": {"type": "object", "additionalProperties": {"type": ["integer", "null"]}},
    },
    "required": ["from", "at", "price", "lines"],
    "definitions": {"Line": {"properties": {"sku": {"enum": ["a", "b"]}}, "required": ["sku"]}},
}


def test_values_in_json_are_read_with_the_class_written_for_their_topic(written, registry):
    SchemaRegistry(registry.url).register("objects-value", json.dumps(JSON_SALE), "JSON")
    made = written("objects", "--registry", registry.url)
    value = {"from": "x", "at": "2024-01-31T00:00:00Z", "price": None, "lines": [{"sku": "a"}]}
    decoded = _read(JsonFormat(), made, json.dumps(value).encode())
    assert (decoded.from_, decoded.price, decoded.lines[0].sku, decoded.notes) == ("x", None, "a", None)
    assert [record_type(made).schema.field(name).nullable for name in ("at", "price", "notes")] == [False, True, True]


def _read(format_, made, value):
    kind = format_.value_type(record_type(made), record_type(made).names, "it")
    return format_.decoder(kind.python)(value)


# Mistakes


MISTAKES = {
    "no file": (["nowhere.csv"], "there are no files at"),
    "no ending": (["plain"], "files that end in '' do not say what they are; give --format csv, json or parquet"),
    "a name": (["named.parquet"], "no field of a record can have the name of column 'order id'; write the files anew"),
    "a keyword": (["named.parquet", "--without", "order id"], "can have the name of column 'class'"),
    "a type": (["typed.parquet"], "column 'at' is time64[us], which no field of a record holds"),
    "nanoseconds": (["typed.parquet", "--without", "at"], "column 'lines[].n' is timestamp[ns], which no field"),
    "case": (["cases.parquet"], "columns 'Id' and 'ID' are one column to Spark, which ignores case"),
    "no column": (["typed.parquet", "--without", "lins"], "has no column 'lins' to leave out; did you mean 'lines'?"),
    "header": (["header.csv"], "the name of column 'order id'; a field has the name of its column, and CSV is read"),
    "whole csv": (["header.csv", "--without", "order id"], "a record of CSV has all columns of its files"),
    "no objects": (["list.json"], "has no line with an object"),
    "class": (["header.csv", "--name", "a b"], "'a b' is not the name of a class"),
    "url first": (["postgresql://h/db"], "give the table, and its server behind --postgres"),
    "password": (["t", "--postgres", "postgresql://u:secret@h/db"], "the URL has a password"),
    "both": (["t", "--postgres", "postgresql://h/db", "--registry", "http://r"], "and not both"),
    "no message": (["nowhere_pb2:Sale"], "nowhere_pb2:Sale is no class of a Protobuf message"),
    "iceberg": (["lake/data"], "is a table of Iceberg"),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_mistake_is_one_sentence(cli, tmp_path, mistake):
    (tmp_path / "plain").write_text("x")
    (tmp_path / "header.csv").write_text("order id,n\n1,2\n")
    (tmp_path / "list.json").write_text("[1, 2]\n")
    pq.write_table(pa.table({"order id": [1], "class": [1], "n": [1]}), tmp_path / "named.parquet")
    pq.write_table(pa.table({"Id": [1], "ID": [1]}), tmp_path / "cases.parquet")
    lines = pa.list_(pa.struct([("n", pa.timestamp("ns"))]))
    typed = pa.schema([("at", pa.time64("us")), ("lines", lines), ("n", pa.int64())])
    pq.write_table(typed.empty_table(), tmp_path / "typed.parquet")
    (tmp_path / "lake/metadata").mkdir(parents=True)
    (tmp_path / "lake/data").mkdir()
    (tmp_path / "lake/metadata/v1.metadata.json").write_text("{}")
    pq.write_table(pa.table({"n": [1]}), tmp_path / "lake/data/0.parquet")
    arguments, words = MISTAKES[mistake]
    code, out, err = cli("record", *arguments)
    assert (code, out) == (2, "")
    assert words in err
    assert "secret" not in err


def test_a_schema_that_is_only_a_text_of_protobuf_needs_the_generated_class(cli, registry):
    SchemaRegistry(registry.url).register(
        "texts-value", 'syntax = "proto3"; message Sale { string shop = 1; }', "PROTOBUF"
    )
    code, _, err = cli("record", "texts", "--registry", registry.url)
    assert code == 2
    assert "give the message's generated class, such as `dagster-unified record sales_pb2:Sale`" in err
    assert cli("record", "nothing", "--registry", registry.url)[2].startswith(
        "dagster-unified: record: the subject 'nothing-value' is not in the registry"
    )
