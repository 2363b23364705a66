"""Windows in both modes: tumbling ones in Python and natively, and one window of ten million records.

Those in Python are compared with PyFlink, native ones with Spark by hand. All sum a number over windows of 10,000 ms of
event time, a thousand keys. The Spark side reads Parquet; PyFlink makes its records.
"""

from __future__ import annotations

import shutil
import statistics
import tempfile
import time
from collections.abc import Iterable
from datetime import timedelta
from pathlib import Path
from typing import NamedTuple

from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F

from benchmarks.bars import Bar, Measurement, Options
from benchmarks.batch import memory_mb
from benchmarks.flink import flink_rate
from benchmarks.stream import Nowhere, plain_session, rates_of_batches, streaming_session
from dagster_unified.api import (
    AggregateFunction,
    Pipeline,
    ProcessWindowFunction,
    TumblingEventTimeWindows,
    WatermarkStrategy,
    functions,
)
from dagster_unified.connectors import FileSink, ParquetSource
from dagster_unified.engine.batch.intermediates import IntermediateStore
from dagster_unified.engine.batch.run import Run
from dagster_unified.engine.batch.savepoint import run_all
from dagster_unified.engine.streaming.job import Start, StreamingJob

WINDOW = timedelta(milliseconds=10_000)
KEYS = 1000
BATCH = 1_000_000


class R(NamedTuple):
    k: str
    v: int
    ts: int


class Sum(AggregateFunction):
    def create_accumulator(self) -> int:
        return 0

    def add(self, value: R, accumulator: int) -> int:
        return accumulator + value.v

    def get_result(self, accumulator: int) -> int:
        return accumulator

    def merge(self, a: int, b: int) -> int:
        return a + b


class Memory(ProcessWindowFunction):
    """How far the worker's memory went up until the window was over, in MB."""

    def open(self, runtime_context):
        self.idle = memory_mb("VmRSS")

    def process(self, key, context, elements) -> Iterable[int]:
        yield int(memory_mb("VmHWM") - self.idle)


class Total(NamedTuple):
    k: str
    window_start: int
    total: int


def pipeline(
    source: Path, sink, window: timedelta = WINDOW, function=None, files: int | None = None, native: bool = False
) -> Pipeline:
    p = Pipeline("windows")
    by_ts = WatermarkStrategy.for_bounded_out_of_orderness(timedelta(seconds=1)).with_timestamp_assigner("ts")
    numbers = p.from_source(
        ParquetSource(str(source), R, name="numbers", max_files_per_trigger=files)
    ).assign_timestamps_and_watermarks(by_ts)
    windows = numbers.key_by("k").window(TumblingEventTimeWindows.of(window))
    summed = (
        windows.agg(functions.sum("v").alias("total"), output_type=Total)
        if native
        else windows.aggregate(Sum(), function)
    )
    summed.sink_to(sink)
    return p


def by_hand(frame: DataFrame) -> DataFrame:
    """The native windows in plain PySpark, where `frame` has the moments in `at`."""
    found = frame.groupBy("k", F.window("at", "10 seconds").alias("w")).agg(F.sum("v").alias("total"))
    return found.select("k", F.unix_millis("w.start").alias("window_start"), "total")


def measure(options: Options) -> tuple[list[Bar], list[Measurement]]:
    folder = Path(tempfile.mkdtemp(prefix="bench"))
    try:
        with streaming_session(**{"spark.python.worker.reuse": "false"}) as spark:
            memory = _one_window(spark, folder)
        with streaming_session() as spark:
            source = _numbers(spark, folder / "in", options.records, KEYS, options.records // (BATCH // 2))
            batch = tuple(_batch(spark, folder, source, options.records) for _ in range(options.rounds))
            stream = _stream(spark, folder, source, options.records)
            pairs = [
                (
                    _batch(spark, folder, source, options.records, native=True),
                    _batch_by_hand(spark, folder, source, options.records),
                )
                for _ in range(2 * options.rounds)
            ]
            native, hand = zip(*pairs, strict=True)
            plain = plain_session(spark)
            rounds = [
                (
                    _steady(_stream(spark, folder, source, options.records, native=True, files=4)),
                    _steady(_stream_by_hand(plain, folder, source, options.records)),
                )
                for _ in range(options.rounds)  # in turns, since the machine is shared
            ]
            native_stream, hand_stream = zip(*rounds, strict=True)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    measured = [
        Measurement("windows, BATCH", max(batch), batch),
        Measurement("windows, STREAMING", statistics.median(stream), stream),
        Measurement("native windows, BATCH", max(native), native),
        Measurement("native windows by hand, BATCH", max(hand), hand),
        Measurement("native windows, STREAMING", statistics.median(native_stream), native_stream),
        Measurement("native windows by hand, STREAMING", statistics.median(hand_stream), hand_stream),
    ]
    bars = [
        Bar("windows.one_window_memory_mb", memory, 150, at_most=True),
        Bar("windows.native_batch_vs_by_hand", max(native) / max(hand), 0.9),
        Bar(
            "windows.native_streaming_vs_by_hand",
            statistics.median(native_stream) / statistics.median(hand_stream),
            0.9,
        ),
    ]
    if options.flink:
        for mode, ours, bar in (("BATCH", max(batch), 10), ("STREAMING", statistics.median(stream), 5)):
            flink = flink_rate(mode, options.flink_records, KEYS, windows=True)
            measured.append(Measurement(f"PyFlink windows, {mode}", flink, (flink,)))
            bars.append(Bar(f"windows.{mode.lower()}_vs_pyflink", ours / flink, bar))
    return bars, measured


def _numbers(spark: SparkSession, path: Path, records: int, keys: int, files: int) -> Path:
    ids = spark.range(0, records, 1, files)  # each file a stretch of time, as files arrive
    ids.select(
        (F.col("id") % keys).cast("string").alias("k"), F.col("id").alias("v"), F.col("id").alias("ts")
    ).write.parquet(str(path))
    return path


def _steady(rates: tuple[float, ...]) -> float:
    """The rate of all micro-batches but the first together: they differ, as windows begin to close."""
    return round(statistics.harmonic_mean(rates), 3)


def _batch(spark: SparkSession, folder: Path, source: Path, records: int, native: bool = False) -> float:
    plan = pipeline(source, FileSink(str(folder / "out"), name="out"), native=native).plan(
        {"execution.batch-shuffle-mode": "ALL_EXCHANGES_PIPELINED"}
    )
    begun = time.monotonic()
    run_all(Run(plan, spark, IntermediateStore(str(folder / "store")), f"run{begun}", f"run{begun}"))
    return round(records / (time.monotonic() - begun) / 1e6, 3)


def _batch_by_hand(spark: SparkSession, folder: Path, source: Path, records: int) -> float:
    begun = time.monotonic()
    by_hand(spark.read.parquet(str(source)).withColumn("at", F.timestamp_millis("ts"))).write.mode("overwrite").parquet(
        str(folder / "by-hand")
    )
    return round(records / (time.monotonic() - begun) / 1e6, 3)


def _stream(
    spark: SparkSession, folder: Path, source: Path, records: int, native: bool = False, files: int = 2
) -> tuple[float, ...]:
    checkpoints = folder / "checkpoints"
    options = {"execution.runtime-mode": "STREAMING", "execution.checkpointing.dir": str(checkpoints)}
    StreamingJob(pipeline(source, Nowhere(), files=files, native=native).plan(options), spark, Start("bench")).run()
    shutil.rmtree(checkpoints)
    return tuple(round(r, 3) for r in rates_of_batches(records))


def _stream_by_hand(spark: SparkSession, folder: Path, source: Path, records: int) -> tuple[float, ...]:
    read = spark.readStream.schema("k string, v long, ts long").option("maxFilesPerTrigger", 4).parquet(str(source))
    timed = read.withColumn("at", F.timestamp_millis("ts")).withWatermark("at", "1 second")
    checkpoints = folder / "by-hand-checkpoints"
    query = (
        by_hand(timed)
        .writeStream.format("noop")
        .option("checkpointLocation", str(checkpoints))
        .trigger(availableNow=True)
        .start()
    )
    query.awaitTermination()
    shutil.rmtree(checkpoints)
    return tuple(round(r, 3) for r in rates_of_batches(records))


def _one_window(spark: SparkSession, folder: Path) -> float:
    source = _numbers(spark, folder / "one", 10_000_000, 1, 8)
    target = folder / "memory"
    plan = pipeline(source, FileSink(str(target), name="out"), window=timedelta(days=9), function=Memory()).plan()
    run_all(Run(plan, spark, IntermediateStore(str(folder / "store")), "memory", "memory"))
    return float(spark.read.parquet(str(target)).collect()[0][0])
