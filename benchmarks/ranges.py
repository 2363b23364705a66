"""A range of daily partitions: stages that run 32 of them in one Spark job, against a job for each.

With and without carried state. Days are small, as backfills have them: what is measured is what a partition costs
beyond its records.
"""

from __future__ import annotations

import tempfile
import time
from datetime import datetime, timedelta, timezone
from pathlib import Path

import pyarrow.parquet as pq
from pyspark.sql import SparkSession
from pyspark.sql import functions as F
from rich.console import Console
from rich.table import Table

from benchmarks.bars import Bar, Measurement, Options
from benchmarks.batch import R, combine, first
from dagster_unified.api import KeyedProcessFunction, Pipeline, RuntimeContext, ValueStateDescriptor, WatermarkStrategy
from dagster_unified.connectors import DeltaSink, ParquetSource
from dagster_unified.engine import session
from dagster_unified.engine.batch.intermediates import Address, IntermediateStore
from dagster_unified.engine.batch.run import Carrying, Run
from dagster_unified.engine.batch.stage import run_partitions
from dagster_unified.graph.connectors import Slice, TimeRange
from dagster_unified.graph.options import Configuration
from dagster_unified.graph.plan import plan

DAYS = 64
RECORDS = 2_000
"""A day's."""

KEYS = 500
DAY = timedelta(days=1)
FIRST = datetime(2024, 1, 1, tzinfo=timezone.utc)
TOGETHER = 32


class Count(KeyedProcessFunction):
    """How often a key has come so far, with each record."""

    def open(self, context: RuntimeContext) -> None:
        self.count = context.get_state(ValueStateDescriptor("count", int))

    def process_element(self, value: R, ctx: KeyedProcessFunction.Context) -> list[R]:
        self.count.update((self.count.value() or 0) + 1)
        return [R(value.k, self.count.value() or 0, value.ts)]


def pipeline(folder: str, table: str) -> Pipeline:
    built = Pipeline("bench_ranges")
    strategy = WatermarkStrategy.for_bounded_out_of_orderness(timedelta(0)).with_timestamp_assigner("ts")
    stream = (
        built.from_source(ParquetSource(f"{folder}/{{key}}.parquet", R, name="numbers"))
        .map(first)
        .assign_timestamps_and_watermarks(strategy)
    )
    counted = stream.key_by("k").process(Count(), output_type=R).uid("count")
    counted.key_by("k").reduce(combine).uid("sum").sink_to(DeltaSink(table, name="sums", mode="append"))
    return built


def measure(options: Options) -> tuple[list[Bar], list[Measurement]]:
    """Reports, holds nothing to a bar."""
    spark = session.start("local[2]")
    table = Table("64 small days, 3 stages", "seconds per stage and day", "against a job for each day")
    found = []
    with tempfile.TemporaryDirectory(prefix="ranges-bench") as folder:
        _write(spark, folder)
        for carry in (False, True):
            seconds = {}
            for together in (TOGETHER, 1):
                run = f"{'carried' if carry else 'alone'}-{together}"
                _run(spark, folder, f"{run}-warm-up", 2 * together, together, carry)
                seconds[together] = _run(spark, folder, run, DAYS, together, carry) / DAYS
                rate = RECORDS / seconds[together] / 1e6
                found.append(
                    Measurement(
                        f"days {'with carried state' if carry else 'by themselves'}, {together} in a job",
                        rate,
                        (round(rate, 3),),
                    )
                )
            for together, taken in seconds.items():
                what = f"{together} in one Spark job" if together > 1 else "a job for each"
                table.add_row(
                    f"{what}, {'with carried state' if carry else 'without'}",
                    f"{taken / 3:.3f}",
                    f"{seconds[1] / taken:.1f}",
                )
    Console().print(table)
    return [], found


def _write(spark: SparkSession, folder: str) -> None:
    for day in range(DAYS):
        begin = int((FIRST + day * DAY).timestamp() * 1000)
        rows = spark.range(0, RECORDS, 1, 1).select(
            (F.col("id") % KEYS).cast("string").alias("k"),
            F.col("id").alias("v"),
            (F.col("id") * 1000 + begin).alias("ts"),
        )
        pq.write_table(rows.toArrow(), Path(folder) / f"{_slice(day).key}.parquet")


def _slice(day: int) -> Slice:
    return Slice((FIRST + day * DAY).date().isoformat(), {"": TimeRange(FIRST + day * DAY, FIRST + (day + 1) * DAY)})


def _run(spark: SparkSession, folder: str, name: str, days: int, together: int, carry: bool) -> float:
    """Seconds for so many days, so many at a time."""
    store = IntermediateStore(f"{folder}/store")
    built = pipeline(folder, f"{folder}/tables/{name}")

    def run(day: int) -> Run:
        part, before = _slice(day), _slice(day - 1)
        carrying = Carrying(
            (lambda region: store.find(Address(built.name, region.name, name, before.name))) if day else None,
            before.key,
        )
        planned = plan(
            built.graph().bounded_to(part), Configuration.of({"execution.runtime-mode": "BATCH"}), carry_state=carry
        )
        return Run(planned, spark, store, name, f"{name} {day}", part.name, carry=carrying if carry else None)

    begun = time.perf_counter()
    for start in range(0, days, together):
        runs = [run(day) for day in range(start, start + together)]
        finds = [lambda region, of=of: store.find(of.address(region)) for of in runs]
        for region in runs[0].plan.regions:
            run_partitions(runs, region.name, finds)
    return time.perf_counter() - begun
