"""The Kafka sink in whole pipelines, against a real broker."""

import json
import time
from collections import Counter
from typing import NamedTuple

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from dagster_unified.api import DeliveryGuarantee, KafkaConnection, KafkaSink, ParquetSource, Pipeline
from dagster_unified.connectors.secrets import Environment
from dagster_unified.engine.streaming.job import Start, StreamingJob
from dagster_unified.errors import ConfigurationError, PipelineError, SinkError, UnavailableError
from dagster_unified.graph.explain import as_mermaid, as_text, dumps
from dagster_unified.records import record_type

MODES = pytest.mark.parametrize("mode", ["BATCH", "STREAMING"])


class Sale(NamedTuple):
    shop: str
    amount: int
    closed: bool = False


SALES = [Sale("a", 1), Sale("b", 2), Sale("a", 3), Sale("b", 4, True), Sale("a", 5)]


@pytest.fixture
def run(run_on_spark, run_streaming):
    return lambda pipeline, mode, options=None: (run_on_spark if mode == "BATCH" else run_streaming)(pipeline, options)


def values(broker, topic):
    return sorted(json.loads(value)["amount"] for value in broker.values(topic))


@MODES
@pytest.mark.parametrize("guarantee", DeliveryGuarantee)
def test_every_record_is_a_message(run, kafka, mode, guarantee):
    topic = kafka.create_topic()
    pipeline = Pipeline("sales")
    sink = KafkaSink(topic, kafka.address, key="shop", headers={"h": "shop"}, delivery_guarantee=guarantee)
    pipeline.from_collection(SALES, Sale).sink_to(sink)
    run(pipeline, mode)
    messages = kafka.read(topic)
    assert sorted(message.value() for message in messages) == sorted(
        json.dumps(sale._asdict(), separators=(",", ":")).encode() for sale in SALES
    )
    assert all(message.headers() == [("h", message.key())] for message in messages)
    assert len({(message.key(), message.partition()) for message in messages}) == 2


@MODES
def test_a_rolling_update_leaves_the_last_message_of_each_key_and_a_tombstone_deletes_it(run, kafka, mode):
    topic = kafka.create_topic()
    pipeline = Pipeline("sales")
    totals = (
        pipeline.from_collection(SALES, Sale)
        .key_by("shop")
        .reduce(lambda a, b: Sale(a.shop, a.amount + b.amount, a.closed or b.closed))
    )
    totals.sink_to(KafkaSink(topic, kafka.address, key="shop", mode="upsert", tombstone="closed"))
    run(pipeline, mode)
    table = {}
    for message in kafka.read(topic):
        table[message.key()] = message.value()
    assert json.loads(table[b"a"])["amount"] == 9
    assert table[b"b"] is None


def test_a_run_that_is_repeated_writes_nothing_and_another_run_adds(run_on_spark, kafka, tmp_path, spark):
    from dagster_unified.engine.batch.intermediates.store import IntermediateStore
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
    options = {
        "execution.runtime-mode": "STREAMING",
        "execution.checkpointing.dir": str(tmp_path / "checkpoints"),
        "pipeline.max-parallelism": 4,
    }
    kind = record_type(Sale, "test")
    folder.mkdir()
    for number in range(3):
        pq.write_table(pa.Table.from_batches([kind.to_batch([Sale("a", number)])]), folder / f"{number}.parquet")
        deadline = time.monotonic() + 60
        StreamingJob(pipeline.plan(options), spark, Start("test")).run(
            lambda: len(kafka.values(topic)) > number or time.monotonic() > deadline
        )
        assert values(kafka, topic) == list(range(number + 1))


@MODES
def test_over_tls_no_secret_is_in_plans_logs_results_or_files(run, kafka, mode, monkeypatch, tmp_path, capfd):
    topic, password = kafka.create_topic(), kafka.security()["sasl.password"]
    monkeypatch.setenv("KAFKA_PASSWORD", password)
    options = {**kafka.security(), "sasl.password": Environment("KAFKA_PASSWORD")}
    pipeline = Pipeline("sales")
    sink = KafkaSink(topic, KafkaConnection(kafka.secure_address, options), key="shop")
    pipeline.from_collection(SALES, Sale).sink_to(sink)
    result = run(pipeline, mode)
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


@MODES
def test_a_topic_that_is_not_there_ends_the_run_at_once_and_a_cluster_that_is_away_is_tried_again(run, kafka, mode):
    pipeline = Pipeline("sales")
    pipeline.from_collection(SALES, Sale).sink_to(KafkaSink("nowhere", kafka.address))
    with pytest.raises(SinkError, match=r"there is no such topic or partition .*create the topic"):
        run(pipeline, mode)
    away = Pipeline("sales")
    away.from_collection(SALES, Sale).sink_to(KafkaSink("sales", "127.0.0.1:1"))
    with pytest.raises(UnavailableError, match="does not answer"):
        run(away, mode, {"restart-strategy.type": "none"})


def test_what_it_promises_is_in_the_plan():
    def explained(**options):
        pipeline = Pipeline("sales")
        pipeline.from_collection(SALES, Sale).sink_to(KafkaSink("sales", "broker:9092", **options))
        return as_text(pipeline.plan({"execution.runtime-mode": "BATCH"}))

    assert "Kafka at broker:9092, topic 'sales', append" in explained()
    assert "exactly-once" in explained()
    assert "at-least-once" in explained(delivery_guarantee=DeliveryGuarantee.AT_LEAST_ONCE)
    assert "upsert by shop" in explained(mode="upsert", key="shop")


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"mode": "upsert"}, "upsert needs key="),
        ({"mode": "merge"}, "mode is 'append' or 'upsert', not 'merge'"),
        ({"tombstone": "closed"}, "a tombstone deletes a key"),
        ({"key": "shp"}, "no field 'shp' .*did you mean 'shop'"),
        ({"partitioner": "shop"}, "partition: the field 'shop' is string"),
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
