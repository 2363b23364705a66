"""Windows: tumbling ones with a Python `AggregateFunction`, in both modes, against PyFlink; and one window of ten million records.

Both sum a number over windows of 10,000 ms of event time, a thousand keys. The Spark side reads Parquet; PyFlink makes its records.
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

from pyspark.sql import SparkSession
from pyspark.sql import functions as F

from benchmarks.bars import Bar, Measurement, Options
from benchmarks.batch import memory_mb
from benchmarks.flink import flink_rate
from benchmarks.stream import Nowhere, rates_of_batches, streaming_session
from dagster_unified.api import (
    AggregateFunction,
    FileSink,
    ParquetSource,
    Pipeline,
    ProcessWindowFunction,
    TumblingEventTimeWindows,
    WatermarkStrategy,
)
from dagster_unified.engine.batch.stage import Run, run_all
from dagster_unified.engine.batch.store import IntermediateStore
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


def pipeline(source: Path, sink, keys: str = "k", window: timedelta = WINDOW, function=None, files: int | None = None) -> Pipeline:
    p = Pipeline("windows")
    by_ts = WatermarkStrategy.for_bounded_out_of_orderness(timedelta(seconds=1)).with_timestamp_assigner("ts")
    numbers = p.from_source(ParquetSource(str(source), R, name="numbers", max_files_per_trigger=files)).assign_timestamps_and_watermarks(by_ts)
    numbers.key_by(keys).window(TumblingEventTimeWindows.of(window)).aggregate(Sum(), function).sink_to(sink)
    return p


def measure(options: Options) -> tuple[list[Bar], list[Measurement]]:
    folder = Path(tempfile.mkdtemp(prefix="bench"))
    try:
        with streaming_session(**{"spark.python.worker.reuse": "false"}) as spark:
            memory = _one_window(spark, folder)
        with streaming_session() as spark:
            source = _numbers(spark, folder / "in", options.records, KEYS, options.records // (BATCH // 2))
            batch = tuple(_batch(spark, folder, source, options.records) for _ in range(options.rounds))
            stream = _stream(spark, folder, source, options.records)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    measured = [Measurement("windows, BATCH", max(batch), batch), Measurement("windows, STREAMING", statistics.median(stream), stream)]
    bars = [Bar("windows.one_window_memory_mb", memory, 150, at_most=True)]
    if options.flink:
        for mode, ours, bar in (("BATCH", max(batch), 10), ("STREAMING", statistics.median(stream), 5)):
            flink = flink_rate(mode, options.flink_records, KEYS, windows=True)
            measured.append(Measurement(f"PyFlink windows, {mode}", flink, (flink,)))
            bars.append(Bar(f"windows.{mode.lower()}_vs_pyflink", ours / flink, bar))
    return bars, measured


def _numbers(spark: SparkSession, path: Path, records: int, keys: int, files: int) -> Path:
    ids = spark.range(0, records, 1, files)  # each file a stretch of time, as files arrive
    ids.select((F.col("id") % keys).cast("string").alias("k"), F.col("id").alias("v"), F.col("id").alias("ts")).write.parquet(str(path))
    return path


def _batch(spark: SparkSession, folder: Path, source: Path, records: int) -> float:
    plan = pipeline(source, FileSink(str(folder / "out"), name="out")).plan({"execution.batch-shuffle-mode": "ALL_EXCHANGES_PIPELINED"})
    begun = time.monotonic()
    run_all(Run(plan, spark, IntermediateStore(str(folder / "store")), f"run{begun}", f"run{begun}"))
    return round(records / (time.monotonic() - begun) / 1e6, 3)


def _stream(spark: SparkSession, folder: Path, source: Path, records: int) -> tuple[float, ...]:
    plan = pipeline(source, Nowhere(), files=2).plan({"execution.runtime-mode": "STREAMING", "execution.checkpointing.dir": str(folder / "checkpoints")})
    StreamingJob(plan, spark, Start("bench")).run()
    return tuple(round(r, 3) for r in rates_of_batches(records))


def _one_window(spark: SparkSession, folder: Path) -> float:
    source = _numbers(spark, folder / "one", 10_000_000, 1, 8)
    target = folder / "memory"
    plan = pipeline(source, FileSink(str(target), name="out"), window=timedelta(days=9), function=Memory()).plan()
    run_all(Run(plan, spark, IntermediateStore(str(folder / "store")), "memory", "memory"))
    return float(spark.read.parquet(str(target)).collect()[0][0])
