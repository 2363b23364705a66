"""BATCH: three Python functions, `key_by` and a keyed reduce; and one key of 20 million records.

They run staged, in one job, written by hand, and in PyFlink. All Spark variants read the same Parquet, call the same
functions on the same NamedTuples, shuffle into four partitions and write Parquet. Rounds are interleaved, since the
machine is shared; the best round of each counts.
"""

from __future__ import annotations

import shutil
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

import pyarrow as pa
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F

from benchmarks.bars import Bar, Measurement, Options
from benchmarks.flink import flink_rate
from dagster_unified.api import KeyedProcessFunction, Pipeline
from dagster_unified.connectors import FileSink, ParquetSource
from dagster_unified.engine import session
from dagster_unified.engine.batch.intermediates import IntermediateStore
from dagster_unified.engine.batch.run import Run
from dagster_unified.engine.batch.savepoint import run_all

PARTITIONS = 4
SCHEMA = "k string, v long, ts long"


class R(NamedTuple):
    k: str
    v: int
    ts: int


def first(r: R) -> R:
    return R(r.k, r.v + 1, r.ts)


def keep(r: R) -> bool:
    return r.v % 2 == 0


def last(r: R) -> R:
    return R(r.k, r.v * 2, r.ts)


def combine(a: R, b: R) -> R:
    return R(a.k, a.v + b.v, b.ts)


def pipeline(source: str, target: str) -> Pipeline:
    p = Pipeline("bench")
    stream = p.from_source(ParquetSource(source, R, name="numbers")).map(first).filter(keep).map(last)
    stream.key_by(lambda r: r.k).reduce(combine).set_parallelism(PARTITIONS).sink_to(FileSink(target, name="sums"))
    return p


def by_hand(spark: SparkSession, source: str, target: str) -> None:
    """The same in plain PySpark, as `mapInArrow` + sort + `mapInArrow`."""

    def rows_of(b: pa.RecordBatch) -> Iterator[R]:
        return map(R._make, zip(*[c.to_pylist() for c in b.columns], strict=True))

    def batch(rows: list[R]) -> pa.RecordBatch:
        k, v, ts = zip(*rows, strict=True)
        return pa.RecordBatch.from_arrays(
            [pa.array(k, pa.string()), pa.array(v, pa.int64()), pa.array(ts, pa.int64())], names=["k", "v", "ts"]
        )

    def chain(batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        for b in batches:
            out = [last(r) for r in map(first, rows_of(b)) if keep(r)]
            if out:
                yield batch(out)

    def keyed(batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        key, acc = None, None
        out: list[R] = []
        for b in batches:
            for r in rows_of(b):
                if r[0] != key:
                    if acc is not None:
                        out.append(acc)
                    key, acc = r[0], r
                else:
                    acc = combine(acc, r)  # type: ignore[arg-type]
        if acc is not None:
            out.append(acc)
        if out:
            yield batch(out)

    mapped = spark.read.parquet(source).mapInArrow(chain, SCHEMA)
    mapped.repartition(PARTITIONS, "k").sortWithinPartitions("k").mapInArrow(keyed, SCHEMA).write.mode(
        "overwrite"
    ).parquet(target)


class OneKey(KeyedProcessFunction):
    """Holds nothing but a sum, and says how far the worker's memory went up meanwhile."""

    def open(self, context):
        self.idle = memory_mb("VmRSS")
        self.n = 0

    def process_element(self, value: R, ctx) -> Iterable[int]:
        self.n += 1
        if self.n == 1:
            ctx.timer_service().register_event_time_timer(1)
        return ()

    def on_timer(self, timestamp, ctx):
        yield int(memory_mb("VmHWM") - self.idle)


def memory_mb(field: str) -> float:
    """VmRSS (now) or VmHWM (the most there was) of this process."""
    line = next(x for x in Path("/proc/self/status").read_text().splitlines() if x.startswith(field))
    return int(line.split()[1]) / 1024


def measure(options: Options) -> tuple[list[Bar], list[Measurement]]:
    folder = tempfile.mkdtemp(prefix="bench")
    try:
        fresh = {"spark.python.worker.reuse": "false"}  # nothing that ran before counts
        with spark_session(**fresh) as spark:
            memory = _one_key(spark, folder, options)
        with spark_session() as spark:
            rates = _rates(spark, folder, options)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    best = {m.name: m.best for m in rates}
    bars = [
        Bar("batch.pipelined_vs_by_hand", best["pipelined"] / best["by hand"], 0.9),
        Bar("batch.staged_vs_pipelined", best["staged"] / best["pipelined"], 0.9),
        Bar("batch.one_key_memory_mb", memory, 150, at_most=True),
    ]
    if options.flink:
        flink = flink_rate("BATCH", options.flink_records, options.keys)
        rates.append(Measurement("PyFlink", flink, (flink,)))
        bars.append(Bar("batch.pipelined_vs_pyflink", best["pipelined"] / flink, 15))
    return bars, rates


@contextmanager
def spark_session(**config: str) -> Iterator[SparkSession]:
    spark = session.start(
        "local[2]",
        config={
            "spark.driver.memory": "4g",
            "spark.sql.shuffle.partitions": str(PARTITIONS),
            "spark.python.worker.reuse": "true",
            **config,
        },
    )
    try:
        yield spark
    finally:
        spark.stop()


def numbers(spark: SparkSession, folder: str, options: Options) -> str:
    path = f"{folder}/numbers"
    ids = spark.range(options.records)
    ids.select(
        (F.col("id") % options.keys).cast("string").alias("k"), F.col("id").alias("v"), (F.col("id") * 1000).alias("ts")
    ).write.parquet(path)
    return path


def _rates(spark: SparkSession, folder: str, options: Options) -> list[Measurement]:
    source = numbers(spark, folder, options)

    def library(mode: str) -> Callable[[], None]:
        def run() -> None:
            plan = pipeline(source, f"{folder}/{mode}").plan({"execution.batch-shuffle-mode": mode})
            run_all(Run(plan, spark, IntermediateStore(f"{folder}/store"), "run", "run"))

        return run

    variants = {
        "staged": library("ALL_EXCHANGES_BLOCKING"),
        "pipelined": library("ALL_EXCHANGES_PIPELINED"),
        "by hand": lambda: by_hand(spark, source, f"{folder}/by_hand"),
    }
    seconds: dict[str, list[float]] = {name: [] for name in variants}
    for number in range(options.rounds + 1):  # the first round warms up
        for name, run in variants.items():
            begun = time.perf_counter()
            run()
            if number:
                seconds[name].append(time.perf_counter() - begun)
    _agree(spark, folder)
    return [
        Measurement(n, options.records / min(s) / 1e6, tuple(round(options.records / x / 1e6, 3) for x in s))
        for n, s in seconds.items()
    ]


def _agree(spark: SparkSession, folder: str) -> None:
    """All variants gave the same result, or their rates say nothing."""

    def total(frame: DataFrame) -> tuple[int, int]:
        row = frame.agg(F.count("*"), F.sum("v")).collect()[0]
        return row[0], row[1]

    results = {
        total(spark.read.parquet(f"{folder}/{name}"))
        for name in ("by_hand", "ALL_EXCHANGES_BLOCKING", "ALL_EXCHANGES_PIPELINED")
    }
    if len(results) != 1:
        raise AssertionError(f"the variants disagree: {results}")


def _one_key(spark: SparkSession, folder: str, options: Options) -> float:
    """Megabytes by which a worker grows over one key, in one partition; in a fresh worker."""
    count = options.one_key_records
    source = f"{folder}/one_key"
    spark.range(count).select(
        F.lit("a").alias("k"), F.col("id").alias("v"), ((F.col("id") * 7919) % count).alias("ts")
    ).write.parquet(source)
    p = Pipeline("one_key")
    p.from_source(ParquetSource(source, R, name="numbers")).key_by("k").process(OneKey()).set_parallelism(1).sink_to(
        FileSink(f"{folder}/memory", name="memory")
    )
    plan = p.plan({"execution.batch-shuffle-mode": "ALL_EXCHANGES_PIPELINED"})
    run_all(Run(plan, spark, IntermediateStore(f"{folder}/store"), "run", "run"))
    return float(spark.read.parquet(f"{folder}/memory").collect()[0][0])
