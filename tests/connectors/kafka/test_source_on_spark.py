"""Topics on Spark: both modes give the same, one goes on where the other ended, and nothing is lost or read twice."""

import json
import subprocess
import sys
import time
from datetime import datetime, timedelta, timezone
from pathlib import Path
from typing import NamedTuple

import pytest
from deltalake import DeltaTable

from dagster_unified.api import Pipeline, TumblingEventTimeWindows, WatermarkStrategy
from dagster_unified.connectors import DeltaSink
from dagster_unified.connectors.kafka import (
    KafkaConnection,
    KafkaOffsetsInitializer,
    KafkaSource,
)
from dagster_unified.engine.batch.intermediates import IntermediateStore
from dagster_unified.engine.malformed import in_batch, in_streaming
from dagster_unified.engine.streaming.checkpoint import CheckpointDirectory
from dagster_unified.engine.streaming.job import Start, StreamingJob
from dagster_unified.errors import MalformedInputError, SourceError, UnavailableError
from tests.connectors.kafka.killed_source import build
from tests.connectors.kafka.test_source import JANUARY, PLACES, Placed
from tests.depth import NIGHTLY, SEED
from tests.engine.killed_job import OPTIONS
from tests.support import MODES, streaming

ROOT = Path(__file__).parents[3]
KILLS, MESSAGES = (12, 300) if NIGHTLY else (2, 200)
POINTS = ("before", "staged", "committed")
HOUR = 3_600_000


class Total(NamedTuple):
    shop: str
    amount: int


@pytest.fixture
def topic(kafka):
    return kafka.create_topic(config={"retention.ms": "-1"})  # timestamps are of 2024


def sales(*amounts, hour=0):
    """Sales of two shops, one in each partition, an hour's in the minutes of that hour."""
    return [
        {
            "value": json.dumps({"amount": amount}).encode(),
            "key": "ab"[amount % 2],
            "partition": amount % 2,
            "timestamp": JANUARY + hour * HOUR + amount * 1000,
        }
        for amount in amounts
    ]


def source(kafka, topic, **options):
    return KafkaSource(topic, Placed, kafka.address, metadata=PLACES, name="sales", **options)


def rows(table):
    return sorted(tuple(row.values()) for row in DeltaTable(str(table)).to_pyarrow_table().to_pylist())


def windows(kafka, topic, table, **options):
    """What each shop sold in each hour, by the messages' own times."""
    pipeline = Pipeline("windows")
    by_time = WatermarkStrategy.for_bounded_out_of_orderness(timedelta(minutes=5)).with_timestamp_assigner("sold_at")
    given = {"bounded": KafkaOffsetsInitializer.latest(), **options}
    placed = pipeline.from_source(source(kafka, topic, **given), by_time)
    hours = placed.key_by("shop").window(TumblingEventTimeWindows.of(timedelta(hours=1)))
    totals = hours.reduce(lambda a, b: a._replace(amount=a.amount + b.amount, sold_at=min(a.sold_at, b.sold_at)))
    totals.map(lambda t: (t.shop, t.sold_at, t.amount), tuple[str, datetime, int]).sink_to(DeltaSink(str(table)))
    return pipeline


def test_both_modes_give_the_same_windows_and_a_partition_that_is_behind_holds_the_watermark_back(
    run_on_spark, run_streaming, kafka, topic, tmp_path
):
    kafka.write(topic, sales(2, 4, hour=20))  # of one partition, at once
    for hour in range(10):
        kafka.write(topic, sales(1, 3, hour=hour))  # of the other, in several micro-batches
    run_on_spark(windows(kafka, topic, tmp_path / "batch"))
    run_streaming(windows(kafka, topic, tmp_path / "stream", max_records_per_trigger=6))
    at = datetime(2024, 1, 1, tzinfo=timezone.utc)
    hours = [("b", at + timedelta(hours=hour, seconds=1), 4) for hour in range(10)]
    assert rows(tmp_path / "batch") == [("a", at + timedelta(hours=20, seconds=2), 6), *hours]
    assert rows(tmp_path / "stream") == rows(tmp_path / "batch")


def totals(kafka, topic, table, **options):
    pipeline = Pipeline("totals")
    given = {"bounded": KafkaOffsetsInitializer.latest(), **options}
    sold = pipeline.from_source(source(kafka, topic, **given)).map(lambda s: Total(s.shop, s.amount), Total)
    summed = sold.key_by("shop").reduce(lambda a, b: Total(a.shop, a.amount + b.amount))
    summed.sink_to(DeltaSink(str(table), mode="upsert", key="shop"))
    return pipeline


def test_a_stream_goes_on_at_the_offsets_where_batch_ended(run_on_spark, run_streaming, kafka, topic, tmp_path):
    kafka.write(topic, sales(1, 2, 3, 4))
    saved = str(tmp_path / "saved")
    run_on_spark(totals(kafka, topic, tmp_path / "table"), {"execution.savepoint.path": saved})
    assert rows(tmp_path / "table") == [("a", 6), ("b", 4)]
    kafka.write(topic, sales(5, 6, 8))
    run_streaming(totals(kafka, topic, tmp_path / "table"), {"execution.state-recovery.path": saved})
    assert rows(tmp_path / "table") == [("a", 20), ("b", 9)]


def test_a_savepoint_of_a_stream_knows_of_which_topics_its_offsets_are(run_streaming, kafka, topic, tmp_path):
    kafka.write(topic, sales(1, 2))
    saved = str(tmp_path / "saved")
    run_streaming(totals(kafka, topic, tmp_path / "table"), {"execution.savepoint.path": saved})
    kafka.delete_topic(topic)
    kafka.create_topic(topic, partitions=2)
    kafka.write(topic, sales(3, 4, 5, 6))
    with pytest.raises(SourceError, match=f"{topic} was deleted and made again since it was read"):
        run_streaming(totals(kafka, topic, tmp_path / "table"), {"execution.state-recovery.path": saved})


def test_messages_that_do_not_fit_are_set_aside_in_both_modes(run_on_spark, run_streaming, kafka, topic, tmp_path):
    kafka.write(topic, [*sales(1, 2), {"value": b'{"amount":', "key": "a", "partition": 0}, *sales(4)])
    pipeline = totals(kafka, topic, tmp_path / "batch", on_malformed="divert")
    run_on_spark(pipeline)
    run_streaming(totals(kafka, topic, tmp_path / "stream", on_malformed="divert"))
    assert rows(tmp_path / "batch") == rows(tmp_path / "stream") == [("a", 6), ("b", 1)]
    (node,) = pipeline.plan({"execution.runtime-mode": "BATCH"}).graph.sources
    for diverted in (
        in_batch(IntermediateStore(str(tmp_path / "store")), "totals", node),
        in_streaming(CheckpointDirectory(str(tmp_path / "checkpoints"), "totals"), node),
    ):
        (row,) = diverted.table(10).to_pylist()
        assert (row["file"], row["line"], row["content"]) == (f"{topic}[0]@1", None, '{"amount":')
        assert row["reason"] == "Input data was truncated"
    with pytest.raises(MalformedInputError, match=rf"totals: source 'sales': {topic}\[0\]@1: Input data was truncated"):
        run_on_spark(totals(kafka, topic, tmp_path / "failed"))


@pytest.mark.a_day(1)
@MODES
def test_what_is_wrong_at_the_start_is_one_sentence(run_in, kafka, impatient, tmp_path, mode):
    run = run_in[mode]
    with pytest.raises(SourceError, match=r"totals: source 'sales': Kafka at .* has no topic 'nothing'"):
        run(totals(kafka, "nothing", tmp_path / "table"))
    group = KafkaOffsetsInitializer.committed_offsets("nobody")
    topic = kafka.create_topic()
    with pytest.raises(SourceError, match=r"totals: source 'sales': starting_offsets: consumer group 'nobody' has com"):
        run(totals(kafka, topic, tmp_path / "table", starting_offsets=group))
    pipeline = Pipeline("away")
    away = KafkaSource("sales", Total, KafkaConnection("127.0.0.1:1"), bounded=KafkaOffsetsInitializer.latest())
    pipeline.from_source(away).print()
    with pytest.raises(UnavailableError, match=r"away: source 'sales': Kafka at 127.0.0.1:1 does not answer"):
        run(pipeline)


def test_a_stream_whose_broker_was_away_goes_on(spark, kafka, topic, tmp_path):
    table = tmp_path / "table"
    options = streaming(tmp_path, 4)
    plan = totals(kafka, topic, table, bounded=None).plan(options)
    kafka.write(topic, sales(1, 2))

    def there():
        return DeltaTable.is_deltatable(str(table)) and len(rows(table)) == 2

    stopped = {"broker": False}

    def step():
        if there() and not stopped["broker"]:
            kafka.stop()
            stopped["broker"] = True
        return False

    try:
        with pytest.raises(UnavailableError, match=r"totals: source 'sales': Kafka at .* does not answer"):
            StreamingJob(plan, spark, Start("first")).run(step)
    finally:
        if stopped["broker"]:
            kafka.start()
    kafka.write(topic, sales(3, 4))
    seen, more_is_written, deadline = [], [], time.monotonic() + 300

    def more():
        found = rows(table)
        if found == [("a", 6), ("b", 4)] and not more_is_written:
            kafka.write(topic, sales(6, 7))
            more_is_written.append(True)
        assert time.monotonic() < deadline, found
        return found == [("a", 12), ("b", 11)]

    assert StreamingJob(plan, spark, Start("second"), seen.append).run(more) == "stopped"
    assert seen[-1].backlog == {"sales": 0}


@pytest.mark.rotates("kills")
def test_a_job_that_is_killed_goes_on_at_its_offsets(spark, kafka, topic, tmp_path):
    sent = [{"key": "abc"[n % 3], "at": n, "value": n * 7 % 100} for n in range(MESSAGES)]
    kafka.write(topic, [{"value": json.dumps(row).encode(), "partition": row["at"] % 2} for row in sent])
    for killed in range(KILLS):
        point = POINTS[(SEED + killed) % 3]
        module = "tests.connectors.kafka.killed_source"
        command = [sys.executable, "-m", module, str(tmp_path), "2", point, kafka.address, topic]
        done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, timeout=600, check=False)
        assert done.returncode == -9, done.stderr[-2000:]
    plan = build(tmp_path, kafka.address, topic).plan(
        {**OPTIONS, "execution.checkpointing.dir": str(tmp_path / "checkpoints")}
    )
    assert StreamingJob(plan, spark, Start("last", patience=0.5)).run() == "finished"
    found = DeltaTable(str(tmp_path / "all")).to_pyarrow_table().to_pylist()
    assert sorted(found, key=lambda row: row["at"]) == sent
    totals = {row["key"]: row["value"] for row in DeltaTable(str(tmp_path / "totals")).to_pyarrow_table().to_pylist()}
    assert totals == {key: sum(row["value"] for row in sent if row["key"] == key) for key in "abc"}
