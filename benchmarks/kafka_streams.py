"""Kafka to Kafka in STREAMING: a rolling sum per key, and how long a record takes.

By hand the sum is Spark's Kafka connector, `from_json`, `transformWithState` with a value state per key and the
connector's own sink, which is at-least-once; the library writes in transactions. Both give every update.
"""

from __future__ import annotations

import multiprocessing
import shutil
import statistics
import time
from pathlib import Path
from typing import NamedTuple

import msgspec
from pyspark.sql import SparkSession
from pyspark.sql import functions as F

from benchmarks.bars import Bar, Measurement
from benchmarks.stream import PerKey, plain_session, rates_of_batches, streaming_session
from dagster_unified.api import Pipeline
from dagster_unified.connectors.kafka import KafkaOffsetsInitializer, KafkaSink, KafkaSource
from dagster_unified.engine.streaming.job import Start, StreamingJob
from tests.servers.kafka import Broker

RECORDS, KEYS, PARTITIONS, BATCH = 600_000, 5_000, 2, 100_000
RATE, SECONDS, WARM = 1_000, 40, 15


class Reading(NamedTuple):
    k: str
    v: int


class Sent(NamedTuple):
    number: int
    at: float


def add(a: Reading, b: Reading) -> Reading:
    return Reading(a.k, a.v + b.v)


def same(sent: Sent) -> Sent:
    return sent


def measure(broker: Broker, folder: Path, jars: str) -> tuple[list[Bar], list[Measurement]]:
    """Throughput against Spark's connector, and latency at 1,000 records a second."""
    topic = broker.create_topic("readings", PARTITIONS, {"compression.type": "lz4"})
    broker.write(
        topic,
        (
            {"value": msgspec.json.encode(Reading(str(n % KEYS), n)._asdict()), "partition": n % PARTITIONS}
            for n in range(RECORDS)
        ),
    )
    with streaming_session(**{"spark.jars": jars}) as spark:
        library = _library(spark, broker, folder, topic)
        by_hand = _by_hand(plain_session(spark), broker, folder, topic)
        latencies = _latencies(spark, broker, folder)
    rates = [
        Measurement(name, statistics.median(rounds), tuple(round(rate, 3) for rate in rounds))
        for name, rounds in (("Kafka to Kafka", library), ("Kafka to Kafka by hand", by_hand))
    ]
    last = sorted(latencies)[int(len(latencies) * 0.99)]
    return [
        Bar("connectors.kafka_stream_vs_spark", rates[0].best / rates[1].best, 1.0),
        Bar("connectors.kafka_latency_median_s", statistics.median(latencies), 0.7, at_most=True),
        Bar("connectors.kafka_latency_p99_s", last, 1.5, at_most=True),
    ], rates


def _library(spark: SparkSession, broker: Broker, folder: Path, topic: str) -> tuple[float, ...]:
    target = broker.create_topic("library", PARTITIONS)
    pipeline = Pipeline("bench")
    source = KafkaSource(
        topic, Reading, broker.address, bounded=KafkaOffsetsInitializer.latest(), max_records_per_trigger=BATCH
    )
    pipeline.from_source(source).key_by("k").reduce(add).sink_to(KafkaSink(target, broker.address, key="k"))
    checkpoints = folder / "library"
    plan = pipeline.plan({"execution.runtime-mode": "STREAMING", "execution.checkpointing.dir": str(checkpoints)})
    StreamingJob(plan, spark, Start("bench")).run()
    shutil.rmtree(checkpoints)
    _check(broker, target)
    return rates_of_batches(RECORDS)


def _by_hand(spark: SparkSession, broker: Broker, folder: Path, topic: str) -> tuple[float, ...]:
    target = broker.create_topic("by-hand", PARTITIONS)
    servers = {"kafka.bootstrap.servers": broker.address}
    reader = spark.readStream.format("kafka").options(**servers, subscribe=topic, startingOffsets="earliest")
    parsed = F.from_json(F.col("value").cast("string"), "k string, v long").alias("reading")
    rows = reader.option("maxOffsetsPerTrigger", BATCH).load().select(parsed).select("reading.*")
    sums = rows.groupBy("k").transformWithState(PerKey(), "k string, v long", "Append", "None")
    query = (
        sums.select(F.col("k").alias("key"), F.to_json(F.struct("k", "v")).alias("value"))
        .writeStream.format("kafka")
        .options(**servers, topic=target, checkpointLocation=str(folder / "by-hand"))
        .trigger(availableNow=True)
        .start()
    )
    query.awaitTermination()
    _check(broker, target)
    return rates_of_batches(RECORDS)


def _check(broker: Broker, topic: str) -> None:
    """All updates are there, or a rate says nothing."""
    values = broker.values(topic)
    if len(values) != RECORDS:
        raise AssertionError(f"{topic} has {len(values)} messages, not {RECORDS}")


def _latencies(spark: SparkSession, broker: Broker, folder: Path) -> list[float]:
    """Seconds from when a record is sent until a reader of committed messages has it."""
    arriving, committed = broker.create_topic("arriving", PARTITIONS), broker.create_topic("committed", PARTITIONS)
    pipeline = Pipeline("latency")
    source = KafkaSource(arriving, Sent, broker.address, starting_offsets=KafkaOffsetsInitializer.latest())
    pipeline.from_source(source).map(same).sink_to(KafkaSink(committed, broker.address))
    plan = pipeline.plan(
        {"execution.runtime-mode": "STREAMING", "execution.checkpointing.dir": str(folder / "latency")}
    )
    processes = multiprocessing.get_context("spawn")
    found = processes.Queue()
    others = [
        processes.Process(target=_feed, args=(broker.address, arriving), daemon=True),
        processes.Process(target=_watch, args=(broker.address, committed, found), daemon=True),
    ]
    for process in others:
        process.start()
    StreamingJob(plan, spark, Start("bench")).run(lambda: not found.empty())
    latencies: list[float] = found.get()
    for process in others:
        process.kill()
    return latencies


def _feed(address: str, topic: str) -> None:
    from confluent_kafka import Producer

    producer = Producer({"bootstrap.servers": address, "linger.ms": 0})
    begun, sent = time.time(), 0
    while True:
        due = int((time.time() - begun) * RATE)
        while sent < due:
            value = msgspec.json.encode({"number": sent, "at": time.time()})
            producer.produce(topic, value, partition=sent % PARTITIONS)
            sent += 1
        producer.poll(0)
        time.sleep(0.001)


def _watch(address: str, topic: str, found: multiprocessing.Queue[list[float]]) -> None:
    """Gather latencies for a time, after the first seconds, while the query starts."""
    from confluent_kafka import Consumer, TopicPartition

    consumer = Consumer(
        {"bootstrap.servers": address, "group.id": "watch", "isolation.level": "read_committed", "fetch.wait.max.ms": 5}
    )
    consumer.assign([TopicPartition(topic, partition, 0) for partition in range(PARTITIONS)])
    latencies: list[float] = []
    first = None
    while first is None or time.time() < first + SECONDS:
        for message in consumer.consume(1000, 0.01):
            now = time.time()
            if message.error() is None:
                first = first or now
                if now > first + WARM:
                    latencies.append(now - msgspec.json.decode(message.value() or b"")["at"])
    found.put(latencies)


def main() -> None:
    """Run these alone."""
    import sys
    import tempfile

    folder = Path(tempfile.mkdtemp(prefix="bench"))
    broker = Broker(folder / "broker").start()
    try:
        bars, rates = measure(broker, folder, ",".join(map(str, (Path(sys.prefix) / "spark-kafka").glob("*.jar"))))
        for line in (*bars, *rates):
            print(line)
    finally:
        broker.stop()
        shutil.rmtree(folder, ignore_errors=True)


if __name__ == "__main__":
    main()
