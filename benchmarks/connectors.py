"""Connectors, against what one would write by hand with Spark's own.

Kafka in BATCH: JSON of three fields from four partitions through three Python functions into Parquet. By hand that is
Spark's Kafka connector, `from_json` and `mapInArrow`, with the same functions on the same NamedTuples.

`delta.py` has Delta tables, `postgres.py` PostgreSQL.
"""

from __future__ import annotations

import shutil
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import NamedTuple

import msgspec
import pyarrow as pa
from pyspark.sql import SparkSession
from pyspark.sql import functions as F

from benchmarks import delta, kafka_streams, postgres
from benchmarks.bars import Bar, Measurement, Options
from dagster_unified.api import Pipeline
from dagster_unified.connectors import FileSink
from dagster_unified.connectors.kafka import KafkaOffsetsInitializer, KafkaSource
from dagster_unified.engine import session
from dagster_unified.engine.batch.intermediates import IntermediateStore
from dagster_unified.engine.batch.run import Run
from dagster_unified.engine.batch.savepoint import run_all
from tests.servers.kafka import Broker

PARTITIONS = 4
RECORDS = 2_000_000
SCHEMA = "id long, name string, x double"
JARS = Path(sys.prefix) / "spark-kafka"


class Seen(NamedTuple):
    id: int
    name: str
    x: float


def later(seen: Seen) -> Seen:
    return Seen(seen.id + 1, seen.name, seen.x)


def positive(seen: Seen) -> bool:
    return seen.x >= 0


def half(seen: Seen) -> Seen:
    return Seen(seen.id, seen.name, seen.x / 2)


def measure(options: Options) -> tuple[list[Bar], list[Measurement]]:
    folder = Path(tempfile.mkdtemp(prefix="bench"))
    broker = Broker(folder / "broker").start()
    try:
        rates = _kafka_batch(broker, folder, options)
        streaming, streams = kafka_streams.measure(broker, folder, _jars())
    finally:
        broker.stop()
        shutil.rmtree(folder, ignore_errors=True)
    best = {m.name: m.best for m in rates}
    bars = [Bar("connectors.kafka_json_batch_vs_spark", best["Kafka"] / best["Kafka by hand"], 1.8)]
    bars, rates = bars + streaming, rates + streams
    for family in (delta, postgres):
        further, measured = family.measure(options)
        bars, rates = bars + further, rates + measured
    return bars, rates


def _jars() -> str:
    """Those of all connectors: a JVM finds on its class path only what its first session was started with."""
    return ",".join([*map(str, JARS.glob("*.jar")), postgres.driver()])


def _kafka_batch(broker: Broker, folder: Path, options: Options) -> list[Measurement]:
    topic = _filled(broker)
    spark = session.start(
        "local[2]",
        config={
            "spark.driver.memory": "3g",
            "spark.python.worker.reuse": "true",
            "spark.jars": _jars(),
        },
    )
    try:
        library = Pipeline("bench")
        source = KafkaSource(topic, Seen, broker.address, bounded=KafkaOffsetsInitializer.latest())
        seen = library.from_source(source).map(later).filter(positive).map(half)
        seen.sink_to(FileSink(f"{folder}/library", name="seen"))
        plan = library.plan({"execution.runtime-mode": "BATCH"})
        variants: dict[str, Callable[[], object]] = {
            "Kafka": lambda: run_all(Run(plan, spark, IntermediateStore(f"{folder}/store"), _name(), _name())),
            "Kafka by hand": lambda: _by_hand(spark, broker.address, topic, f"{folder}/by_hand"),
        }
        rounds = _timed(variants, options.rounds)
        _agree(spark, [f"{folder}/library", f"{folder}/by_hand"])
    finally:
        spark.stop()
    return [Measurement(n, max(rates), tuple(round(rate, 3) for rate in rates)) for n, rates in rounds.items()]


def _by_hand(spark: SparkSession, address: str, topic: str, target: str) -> None:
    def chain(batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        for batch in batches:
            rows = map(Seen._make, zip(*[column.to_pylist() for column in batch.columns], strict=True))
            kept = list(map(half, filter(positive, map(later, rows))))
            ids, names, values = zip(*kept, strict=True)
            columns = [pa.array(ids, pa.int64()), pa.array(names, pa.string()), pa.array(values, pa.float64())]
            yield pa.RecordBatch.from_arrays(columns, names=["id", "name", "x"])

    reader = spark.read.format("kafka").option("kafka.bootstrap.servers", address).option("subscribe", topic)
    parsed = F.from_json(F.col("value").cast("string"), SCHEMA).alias("seen")
    read = reader.option("kafka.isolation.level", "read_committed").load().select(parsed).select("seen.*")
    read.mapInArrow(chain, SCHEMA).write.mode("overwrite").parquet(target)


def _filled(broker: Broker) -> str:
    topic = broker.create_topic("seen", PARTITIONS, {"compression.type": "lz4"})
    broker.write(
        topic,
        (
            {
                "value": msgspec.json.encode({"id": number, "name": f"aircraft-{number % 5000}", "x": number * 0.5}),
                "partition": number % PARTITIONS,
            }
            for number in range(RECORDS)
        ),
    )
    return topic


def _name() -> str:
    """A run of its own: one that has written already does not write again."""
    return f"run-{time.monotonic_ns()}"


def _timed(variants: dict[str, Callable[[], object]], rounds: int) -> dict[str, list[float]]:
    """Millions of records per second, after a first round that warms up."""
    rates: dict[str, list[float]] = {name: [] for name in variants}
    for number in range(rounds + 1):
        for name, run in variants.items():
            begun = time.perf_counter()
            run()
            if number:
                rates[name].append(RECORDS / (time.perf_counter() - begun) / 1e6)
    return rates


def _agree(spark: SparkSession, paths: list[str]) -> None:
    """All variants wrote the same, or their rates say nothing."""
    frames = [spark.read.parquet(path) for path in paths]
    found = {tuple(frame.agg(F.count("*"), F.sum("id"), F.sum("x")).first() or ()) for frame in frames}
    if len(found) != 1 or next(iter(found))[0] != RECORDS:
        raise AssertionError(f"the variants disagree: {found}")
