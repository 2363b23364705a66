"""The Kafka sink in whole pipelines, against a real broker."""

import json
import time
from collections import Counter
from typing import NamedTuple

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from deltalake import DeltaTable

from dagster_unified.api import Pipeline
from dagster_unified.connectors import (
    AvroFormat,
    DeliveryGuarantee,
    DeltaSink,
    KafkaConnection,
    KafkaOffsetsInitializer,
    KafkaSink,
    KafkaSource,
    ParquetSource,
    ProtobufFormat,
    RawFormat,
    SchemaRegistry,
)
from dagster_unified.connectors.secrets import Environment
from dagster_unified.engine.streaming.job import Start, StreamingJob
from dagster_unified.errors import ConfigurationError, PipelineError, SinkError, UnavailableError
from dagster_unified.graph.explain import as_mermaid, as_text, dumps
from dagster_unified.records import record_type
from tests.support import MODES, streaming


class Sale(NamedTuple):
    shop: str
    amount: int
    closed: bool = False


SALES = [Sale("a", 1), Sale("b", 2), Sale("a", 3), Sale("b", 4, True), Sale("a", 5)]


def values(broker, topic):
    return sorted(json.loads(value)["amount"] for value in broker.values(topic))


@pytest.mark.a_day(2)
@MODES
@pytest.mark.parametrize("guarantee", DeliveryGuarantee)
def test_every_record_is_a_message(run_in, kafka, mode, guarantee):
    topic = kafka.create_topic()
    pipeline = Pipeline("sales")
    sink = KafkaSink(topic, kafka.address, key="shop", headers={"h": "shop"}, delivery_guarantee=guarantee)
    pipeline.from_collection(SALES, Sale).sink_to(sink)
    run_in[mode](pipeline)
    messages = kafka.read(topic)
    assert sorted(message.value() for message in messages) == sorted(
        json.dumps(sale._asdict(), separators=(",", ":")).encode() for sale in SALES
    )
    assert all(message.headers() == [("h", message.key())] for message in messages)
    assert len({(message.key(), message.partition()) for message in messages}) == 2


@pytest.mark.a_day(1)
@MODES
def test_a_rolling_update_leaves_the_last_message_of_each_key_and_a_tombstone_deletes_it(run_in, kafka, mode):
    topic = kafka.create_topic()
    pipeline = Pipeline("sales")
    totals = (
        pipeline.from_collection(SALES, Sale)
        .key_by("shop")
        .reduce(lambda a, b: Sale(a.shop, a.amount + b.amount, a.closed or b.closed))
    )
    totals.sink_to(KafkaSink(topic, kafka.address, key="shop", mode="upsert", tombstone="closed"))
    run_in[mode](pipeline)
    table = {}
    for message in kafka.read(topic):
        table[message.key()] = message.value()
    assert json.loads(table[b"a"])["amount"] == 9
    assert table[b"b"] is None


AVRO = {
    "type": "record",
    "name": "Sale",
    "fields": [
        {"name": "shop", "type": "string"},
        {"name": "amount", "type": "long"},
        {"name": "closed", "type": ["null", "boolean"]},
    ],
}


def through_a_topic(run_in, kafka, mode, folder, value_format):
    """What a source reads of what a sink wrote, and the messages themselves."""
    topic = kafka.create_topic()
    writing, reading = Pipeline("writing"), Pipeline("reading")
    sink = KafkaSink(topic, kafka.address, key="shop", tombstone=lambda sale: sale.closed, value_format=value_format)
    writing.from_collection(SALES, Sale).sink_to(sink)
    run_in[mode](writing)
    source = KafkaSource(
        topic, Sale, kafka.address, value_format, on_malformed="drop", bounded=KafkaOffsetsInitializer.latest()
    )
    reading.from_source(source).sink_to(DeltaSink(str(folder / "read")))
    run_in[mode](reading, {"execution.checkpointing.dir": str(folder / "reading")} if mode == "STREAMING" else {})
    rows = DeltaTable(str(folder / "read")).to_pyarrow_table().to_pylist()
    return sorted(Sale(**row) for row in rows), kafka.values(topic)


OPEN = sorted(sale for sale in SALES if not sale.closed)


@pytest.mark.a_day(1)
@MODES
def test_avro_in_a_registry_goes_through_a_topic(run_in, kafka, registry, mode, tmp_path):
    form = AvroFormat(AVRO, SchemaRegistry(registry.url))
    read, values = through_a_topic(run_in, kafka, mode, tmp_path, form)
    assert read == OPEN
    assert values.count(None) == 1
    assert {value[:5] for value in values if value is not None} == {b"\0\0\0\0\1"}
    assert sum("/subjects/" in asked for asked in registry.asked) == 1  # the driver registers, and workers do not ask
    assert list(registry.schemas) == [1]


@pytest.mark.a_day(1)
@MODES
def test_protobuf_goes_through_a_topic(run_in, kafka, registry, mode, tmp_path, message):
    form = ProtobufFormat(message("Sale"), registry=SchemaRegistry(registry.url))
    assert through_a_topic(run_in, kafka, mode, tmp_path, form)[0] == OPEN


@pytest.mark.a_day(1)
@MODES
def test_what_a_registry_does_not_take_ends_the_run_before_anything_is_written(run_in, kafka, registry, mode):
    topic, where = kafka.create_topic(), SchemaRegistry(registry.url)
    shops = {**AVRO, "fields": [{"name": "shop", "type": "long"}, *AVRO["fields"][1:]]}
    where.register("shops", json.dumps(shops), "AVRO")
    for form, said in (
        (AvroFormat(registry=where), f"the subject '{topic}-value' is not in the registry"),
        (AvroFormat(AVRO, where, subject="closed"), "does not take the schema for the subject 'closed'"),
        (AvroFormat(registry=where, subject="shops"), "field 'shop' is str, which the Avro type long does not hold"),
    ):
        pipeline = Pipeline("sales")
        pipeline.from_collection(SALES, Sale).sink_to(KafkaSink(topic, kafka.address, value_format=form))
        with pytest.raises(SinkError, match=rf"sink '{topic}' \(topic '{topic}'\): .*{said}"):
            run_in[mode](pipeline)
    assert kafka.values(topic, committed=False) == []


def test_a_run_that_is_repeated_writes_nothing_and_another_run_adds(run_on_spark, kafka, tmp_path, spark):
    from dagster_unified.engine.batch.intermediates import IntermediateStore
    from dagster_unified.engine.batch.run import Run
    from dagster_unified.engine.batch.savepoint import run_all

    topic = kafka.create_topic()
    pipeline = Pipeline("sales")
    pipeline.from_collection(SALES, Sale).sink_to(KafkaSink(topic, kafka.address))
    plan = pipeline.plan({"execution.runtime-mode": "BATCH"})
    for execution in ("one", "one", "two"):
        run_all(Run(plan, spark, IntermediateStore(str(tmp_path / "store")), execution, execution))
    assert values(kafka, topic) == sorted([1, 2, 3, 4, 5] * 2)
    assert not list((tmp_path / "store").rglob("*.messages"))


def test_a_job_that_is_started_again_goes_on_after_its_last_epoch(spark, kafka, tmp_path):
    topic, folder = kafka.create_topic(), tmp_path / "sales"
    pipeline = Pipeline("sales")
    pipeline.from_source(ParquetSource(str(folder), Sale, name="files", monitor=True)).sink_to(
        KafkaSink(topic, kafka.address, key="shop")
    )
    options = streaming(tmp_path, 4)
    kind = record_type(Sale, "test")
    folder.mkdir()
    for number in range(3):
        pq.write_table(pa.Table.from_batches([kind.to_batch([Sale("a", number)])]), folder / f"{number}.parquet")
        deadline = time.monotonic() + 60
        StreamingJob(pipeline.plan(options), spark, Start("test")).run(
            lambda: len(kafka.values(topic)) > number or time.monotonic() > deadline
        )
        assert values(kafka, topic) == list(range(number + 1))


@pytest.mark.a_day(1)
@MODES
def test_over_tls_no_secret_is_in_plans_logs_results_or_files(run_in, kafka, mode, monkeypatch, tmp_path, capfd):
    topic, password = kafka.create_topic(), kafka.security()["sasl.password"]
    monkeypatch.setenv("KAFKA_PASSWORD", password)
    options = {**kafka.security(), "sasl.password": Environment("KAFKA_PASSWORD")}
    pipeline = Pipeline("sales")
    sink = KafkaSink(topic, KafkaConnection(kafka.secure_address, options), key="shop")
    pipeline.from_collection(SALES, Sale).sink_to(sink)
    result = run_in[mode](pipeline)
    assert values(kafka, topic) == [1, 2, 3, 4, 5]
    plan = pipeline.plan({"execution.runtime-mode": "BATCH"})
    seen = [
        repr(sink),
        repr(result),
        as_text(plan),
        dumps(plan),
        as_mermaid(plan),
        *capfd.readouterr(),
    ]
    assert not [text for text in seen if password in text]
    files = [file for file in tmp_path.rglob("*") if file.is_file()]
    assert files or mode == "BATCH"
    assert not [file for file in files if password.encode() in file.read_bytes()]


@pytest.mark.a_day(1)
@MODES
def test_a_topic_that_is_not_there_ends_the_run_at_once_and_a_cluster_that_is_away_is_tried_again(
    run_in, kafka, impatient, mode
):
    pipeline = Pipeline("sales")
    pipeline.from_collection(SALES, Sale).sink_to(KafkaSink("nowhere", kafka.address))
    with pytest.raises(SinkError, match=r"there is no such topic or partition .*create the topic"):
        run_in[mode](pipeline)
    away = Pipeline("sales")
    away.from_collection(SALES, Sale).sink_to(KafkaSink("sales", "127.0.0.1:1"))
    with pytest.raises(UnavailableError, match="does not answer"):
        run_in[mode](away)
    unregistered = Pipeline("sales")
    form = AvroFormat(AVRO, SchemaRegistry("http://127.0.0.1:1"))
    unregistered.from_collection(SALES, Sale).sink_to(KafkaSink("sales", kafka.address, value_format=form))
    with pytest.raises(UnavailableError, match=r"sales: sink 'sales' .*: the schema registry at .* does not answer"):
        run_in[mode](unregistered)


def test_what_it_promises_is_in_the_plan():
    def explained(**options):
        pipeline = Pipeline("sales")
        pipeline.from_collection(SALES, Sale).sink_to(KafkaSink("sales", "broker:9092", **options))
        return as_text(pipeline.plan({"execution.runtime-mode": "BATCH"}))

    assert "Kafka at broker:9092, topic 'sales', append" in explained()
    assert "exactly-once" in explained()
    assert "at-least-once" in explained(delivery_guarantee=DeliveryGuarantee.AT_LEAST_ONCE)
    assert "upsert by shop" in explained(mode="upsert", key="shop")
    assert "topic 'sales', append as avro" in explained(value_format=AvroFormat(AVRO))


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"mode": "upsert"}, "upsert needs key="),
        ({"mode": "merge"}, "mode is 'append' or 'upsert', not 'merge'"),
        ({"tombstone": "closed"}, "a tombstone deletes a key"),
        ({"key": "shp"}, "sink 'sales': no field 'shp' .*did you mean 'shop'"),
        ({"partitioner": "shop"}, "sink 'sales': partition: the field 'shop' is string"),
        (
            {"value_format": AvroFormat('"long"')},
            "sink 'sales': the record has fields, and the Avro schema is no record",
        ),
        ({"value": "shop", "value_format": RawFormat()}, "value= gives the value itself, and value_format= encodes"),
    ],
)
def test_what_cannot_be_written_is_refused_when_the_pipeline_is_made(options, said):
    with pytest.raises(PipelineError, match=said):
        Pipeline("sales").from_collection(SALES, Sale).sink_to(KafkaSink("sales", "broker:9092", **options))


class Noted(NamedTuple):
    shop: str
    note: str | None


def test_a_key_of_upserts_that_may_be_none_is_refused_when_the_pipeline_is_made():
    noted = Pipeline("sales").from_collection([Noted("a", None)], Noted)
    with pytest.raises(PipelineError, match="field 'note' is in its key and may be None, and a message without a key"):
        noted.sink_to(KafkaSink("sales", "broker:9092", mode="upsert", key=("shop", "note")))
    noted.sink_to(KafkaSink("sales", "broker:9092", key="note"))


class Placed(NamedTuple):
    shop: str
    place: int | None


def test_a_partition_that_may_be_none_is_refused_when_the_pipeline_is_made():
    placed = Pipeline("sales").from_collection([Placed("a", None)], Placed)
    with pytest.raises(
        PipelineError, match="sink 'sales': partition: the field 'place' may be None, and None is no part"
    ):
        placed.sink_to(KafkaSink("sales", "broker:9092", partitioner="place"))
    placed.sink_to(KafkaSink("sales", "broker:9092", partitioner=lambda record: record.place or 0))


@pytest.mark.parametrize(
    ("option", "advice"),
    [
        ("transactional.id", "the library names transactions"),
        ("bootstrap.servers", "give it as bootstrap_servers"),
        ("transaction.timeout.ms", "give it as transaction_timeout"),
        ("partitioner", "give it as partitioner"),
        ("enable.idempotence", "without it, messages come twice or out of order"),
        ("on_delivery", "the library explains what the client reports"),
    ],
)
def test_an_option_that_the_library_sets_itself_is_refused(option, advice):
    with pytest.raises(ConfigurationError, match=rf"sink 'sales': the option {option} cannot be set: {advice}"):
        KafkaSink("sales", "broker:9092", options={option: "x"})


@pytest.mark.a_day(1)
@pytest.mark.parametrize("guarantee", DeliveryGuarantee)
def test_many_records_arrive_once(run_on_spark, spark, kafka, tmp_path, guarantee):
    topic = kafka.create_topic(partitions=3)
    spark.range(200_000).selectExpr(
        "concat('shop-', id % 100) AS shop", "id AS amount", "false AS closed"
    ).write.parquet(str(tmp_path / "sales"))
    pipeline = Pipeline("sales")
    pipeline.from_source(ParquetSource(str(tmp_path / "sales"), Sale, name="files")).sink_to(
        KafkaSink(topic, kafka.address, key="shop", value=lambda sale: str(sale.amount), delivery_guarantee=guarantee)
    )
    run_on_spark(pipeline)
    assert Counter(map(int, kafka.values(topic))) == Counter(range(200_000))
