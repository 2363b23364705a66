"""STREAMING: a rolling reduce in large and small micro-batches; a large state; latency.

The reduce is compared with `transformWithState` per key by hand, and with PyFlink. All Spark variants read the same
Parquet files, two per micro-batch, since there are two cores, and write to Spark's `noop` sink. The first micro-batch,
which starts workers and state stores, does not count.
"""

from __future__ import annotations

import shutil
import statistics
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from threading import Thread
from typing import Any, NamedTuple

import pyarrow as pa
import pyarrow.parquet as pq
from pyspark.sql import DataFrame, Row, SparkSession
from pyspark.sql import functions as F
from pyspark.sql.streaming.listener import StreamingQueryListener
from pyspark.sql.streaming.stateful_processor import StatefulProcessor

from benchmarks.bars import Bar, Measurement, Options
from benchmarks.flink import flink_rate
from dagster_unified.api import Pipeline, functions
from dagster_unified.connectors import DeltaSink, ParquetSource
from dagster_unified.connectors.protocol.commits import Committable, NoCommitter, Ship, SparkSink, WriteAttempt
from dagster_unified.engine import session
from dagster_unified.engine.events import EpochCommitted, Event
from dagster_unified.engine.streaming.job import Start, StreamingJob
from dagster_unified.graph.connectors import Capabilities

LARGE, SMALL = 2_000_000, 250_000


class S(NamedTuple):
    k: str
    v: int


def combine(a: S, b: S) -> S:
    return S(a.k, a.v + b.v)


class Nowhere(SparkSink[object, Committable]):
    """Takes every row and keeps none."""

    name, capabilities, upserts = "nowhere", Capabilities(), True

    def describe(self) -> str:
        return "nowhere"

    def check(self, records: Any) -> None:
        """Anything will do."""

    def committer(self, schema: pa.Schema) -> NoCommitter[Committable]:
        return NoCommitter()

    def stage(self, frame: DataFrame, attempts: Sequence[WriteAttempt], ship: Ship) -> list[list[Committable]]:
        frame.write.format("noop").mode("overwrite").save()
        return [[] for _ in attempts]

    def preview(self, spark: SparkSession, rows: int) -> None:
        return None


class PerKey(StatefulProcessor):
    """What one writes by hand: a value state per key."""

    def init(self, handle: Any) -> None:
        self.state = handle.getValueState("s", "total long")

    def handleInputRows(self, key: Any, rows: Any, timerValues: Any) -> Iterator[Row]:  # noqa: N802
        held = self.state.get()
        total = held[0] if held is not None else 0
        for row in rows:
            total += row.v
            yield Row(k=key[0], v=total)
        self.state.update((total,))

    def close(self) -> None:
        pass


class PerKeyInPandas(PerKey):
    """The same, over pandas."""

    def handleInputRows(self, key: Any, rows: Any, timerValues: Any) -> Iterator[Any]:  # noqa: N802
        import pandas as pd

        held = self.state.get()
        total = held[0] if held is not None else 0
        for frame in rows:
            sums = frame["v"].cumsum() + total
            total = int(sums.iloc[-1])
            yield pd.DataFrame({"k": key[0], "v": sums})
        self.state.update((total,))


def measure(options: Options) -> tuple[list[Bar], list[Measurement]]:
    folder = Path(tempfile.mkdtemp(prefix="bench"))
    try:
        with streaming_session() as spark:
            rates = {
                "small": _library(
                    spark, folder, options.stream_records, options.keys, SMALL
                ),  # first, so that the JVM is warm for the others, as for those by hand
                "large": _library(spark, folder, options.stream_records, options.keys, LARGE),
                "million keys": _library(spark, folder, options.stream_records, 1_000_000, LARGE),
            }
            for form in ("SPARK", "PORTABLE"):
                rates[f"aggregates, {form}"] = _aggregated(spark, folder, options.stream_records, options.keys, form)
            hand: dict[str, tuple[float, ...]] = {}
            plain = plain_session(spark)
            for size, count in ((LARGE, 2 * LARGE), (SMALL, 5 * SMALL)):
                for name, processor in (("row", PerKey), ("pandas", PerKeyInPandas)):
                    hand[f"{size} {name}"] = _by_hand(plain, folder, count, options.keys, size, processor)
            touch = {keys: _touching(spark, folder, keys) for keys in (1_000, 1_000_000)}
            latencies = _latencies(spark, folder)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    middle = {name: statistics.median(r) for name, r in {**rates, **hand}.items()}
    best_hand = {size: max(middle[f"{size} row"], middle[f"{size} pandas"]) for size in (LARGE, SMALL)}
    bars = [
        Bar("stream.large_batches_vs_per_key", middle["large"] / best_hand[LARGE], 4.5),
        Bar("stream.small_batches_vs_per_key", middle["small"] / best_hand[SMALL], 4),
        Bar("stream.million_keys_vs_10000", middle["million keys"] / middle["large"], 0.8),
        Bar("stream.touching_1000_of_a_million_keys", touch[1_000_000] / touch[1_000], 2, at_most=True),
        Bar("stream.latency_median_s", statistics.median(latencies), 1.5, at_most=True),
        Bar("stream.latency_p99_s", sorted(latencies)[int(len(latencies) * 0.99)], 4, at_most=True),
    ]
    measured = [Measurement(n, middle[n], tuple(round(x, 3) for x in r)) for n, r in {**rates, **hand}.items()]
    if options.flink:
        flink = flink_rate("STREAMING", options.stream_records, options.keys)
        measured.append(Measurement("PyFlink STREAMING", flink, (flink,)))
        bars.append(Bar("stream.large_batches_vs_pyflink", middle["large"] / flink, 12))
    return bars, measured


class _Progress(StreamingQueryListener):
    """Collects the micro-batches' sizes and durations."""

    def __init__(self) -> None:
        self.batches: list[tuple[int, float]] = []

    def onQueryStarted(self, event: Any) -> None:  # noqa: N802
        self.batches.clear()

    def onQueryProgress(self, event: Any) -> None:  # noqa: N802
        if event.progress.numInputRows:
            self.batches.append((event.progress.numInputRows, event.progress.durationMs["triggerExecution"] / 1000))

    def onQueryIdle(self, event: Any) -> None:  # noqa: N802
        pass

    def onQueryTerminated(self, event: Any) -> None:  # noqa: N802
        pass


_progress = _Progress()


@contextmanager
def streaming_session(master: str = "local[2]", **config: str) -> Iterator[SparkSession]:
    """A session whose micro-batches are timed."""
    spark = session.start(
        master,
        config={
            "spark.driver.memory": "6g",
            "spark.sql.shuffle.partitions": "2",
            "spark.python.worker.reuse": "true",
            **config,
        },
    )
    spark.streams.addListener(_progress)
    try:
        yield spark
    finally:
        spark.stop()


def plain_session(spark: SparkSession) -> SparkSession:
    """A session without the library's settings, for what is written by hand.

    Its state is in RocksDB with a changelog too.
    """
    plain = spark.newSession()
    plain.conf.set(
        "spark.sql.streaming.stateStore.providerClass",
        "org.apache.spark.sql.execution.streaming.state.RocksDBStateStoreProvider",
    )
    plain.conf.set("spark.sql.streaming.stateStore.rocksdb.changelogCheckpointing.enabled", "true")
    plain.streams.addListener(_progress)
    return plain


def batches(expected: int) -> list[tuple[int, float]]:
    """The batches, once the listener, which lags behind, has heard of all."""
    deadline = time.monotonic() + 20
    while sum(rows for rows, _ in _progress.batches) < expected and time.monotonic() < deadline:
        time.sleep(0.1)
    return list(_progress.batches)


def rates_of_batches(expected: int) -> tuple[float, ...]:
    """Millions of records a second, of each micro-batch but the first.

    Those that came of control events alone do not count.
    """
    return tuple(rows / seconds / 1e6 for rows, seconds in batches(expected)[1:] if rows > 1000)


def _numbers(spark: SparkSession, folder: Path, records: int, keys: int, size: int) -> Path:
    path = folder / f"in-{records}-{keys}-{size}"
    if not path.exists():
        ids = spark.range(records)
        rows = ids.select((F.col("id") % keys).cast("string").alias("k"), F.col("id").alias("v"))
        rows.repartition(2 * max(records // size, 1)).write.parquet(str(path))
    return path


def _run(spark: SparkSession, folder: Path, source: Path, files: int = 2) -> None:
    pipeline = Pipeline("bench")
    stream = pipeline.from_source(ParquetSource(str(source), S, name="numbers", max_files_per_trigger=files))
    stream.key_by("k").reduce(combine).sink_to(Nowhere())
    _ended(spark, folder, pipeline, {})


def _ended(spark: SparkSession, folder: Path, pipeline: Pipeline, options: dict[str, str]) -> None:
    """Runs a stream to the end of its input."""
    checkpoints = folder / f"checkpoints-{time.monotonic_ns()}"
    places = {"execution.runtime-mode": "STREAMING", "execution.checkpointing.dir": str(checkpoints)}
    StreamingJob(pipeline.plan({**places, **options}), spark, Start("bench")).run()
    shutil.rmtree(checkpoints)


def _library(spark: SparkSession, folder: Path, records: int, keys: int, size: int) -> tuple[float, ...]:
    _run(spark, folder, _numbers(spark, folder, records, keys, size))
    return rates_of_batches(records)


def _aggregated(spark: SparkSession, folder: Path, records: int, keys: int, form: str) -> tuple[float, ...]:
    """The rates of aggregates on columns, whose state Spark keeps, or the library in key groups."""
    source = _numbers(spark, folder, records, keys, LARGE)
    pipeline = Pipeline("aggregates")
    stream = pipeline.from_source(ParquetSource(str(source), S, name="numbers", max_files_per_trigger=2))
    stream.key_by("k").agg(functions.sum("v").alias("v"), output_type=S).sink_to(Nowhere())
    _ended(spark, folder, pipeline, {"state.native-aggregates": form})
    return rates_of_batches(records)


def _by_hand(
    spark: SparkSession, folder: Path, records: int, keys: int, size: int, processor: type[PerKey]
) -> tuple[float, ...]:
    source = (
        spark.readStream.schema("k string, v long")
        .option("maxFilesPerTrigger", 2)
        .parquet(str(_numbers(spark, folder, records, keys, size)))
    )
    grouped = source.groupBy("k")
    apply = grouped.transformWithStateInPandas if processor is PerKeyInPandas else grouped.transformWithState
    out = apply(processor(), "k string, v long", "Append", "None")
    checkpoint = folder / f"by-hand-{time.monotonic_ns()}"
    query = (
        out.writeStream.format("noop").option("checkpointLocation", str(checkpoint)).trigger(availableNow=True).start()
    )
    query.awaitTermination()
    shutil.rmtree(checkpoint)
    return rates_of_batches(records)


def _touching(spark: SparkSession, folder: Path, keys: int) -> float:
    """Seconds of a micro-batch that touches 1,000 keys of a state of `keys` keys."""
    source = folder / f"touching-{keys}"
    source.mkdir()
    step = keys // 1000

    def write(number: int, wanted: list[int]) -> None:
        table = pa.table({"k": [str(k) for k in wanted], "v": pa.array(wanted, pa.int64())})
        pq.write_table(table, source / f"{number:03d}.parquet")
        time.sleep(0.02)

    write(0, list(range(keys)))
    for number in range(1, 8):
        write(number, [k * step + number for k in range(1000)])
    _run(spark, folder, source, files=1)
    return statistics.median(seconds for rows, seconds in batches(keys + 7000) if rows == 1000)


def _latencies(
    spark: SparkSession, folder: Path, files: int = 150, records: int = 1000, every: float = 0.2
) -> list[float]:
    """Seconds from a file's arrival to its commit in a Delta table, at 5,000 records a second.

    The first seconds, while the query starts, do not count.
    """
    source = folder / "arriving"
    source.mkdir()
    arrived: list[float] = []
    latencies: list[float] = []
    done = [0]

    def committed(event: Event) -> None:
        if isinstance(event, EpochCommitted):
            now = time.time()
            done[0] += event.rows_in
            while len(latencies) < done[0] // records:
                latencies.append(now - arrived[len(latencies)])

    pipeline = Pipeline("latency")
    stream = pipeline.from_source(ParquetSource(str(source), S, name="arriving", monitor=True))
    stream.key_by("k").reduce(combine).sink_to(DeltaSink(str(folder / "latency"), mode="upsert", key="k"))
    plan = pipeline.plan({"execution.checkpointing.dir": str(folder / "latency-checkpoints")})
    job = StreamingJob(plan, spark, Start("bench"), committed)

    def feed() -> None:
        for number in range(files):
            table = pa.table(
                {
                    "k": [str(k % 10_000) for k in range(number * records, (number + 1) * records)],
                    "v": pa.array(range(records), pa.int64()),
                }
            )
            pq.write_table(table, source / f".{number:04d}")
            (source / f".{number:04d}").rename(source / f"{number:04d}.parquet")
            arrived.append(time.time())
            time.sleep(every)

    feeder = Thread(target=feed, daemon=True)
    feeder.start()
    deadline = time.monotonic() + files * every + 60
    job.run(lambda: len(latencies) >= files or time.monotonic() > deadline)
    return latencies[files // 3 :]
