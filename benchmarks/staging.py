"""What materializing a stage costs against one Spark job.

It is measured for narrow and for wide records, by codec, by the number of tasks that write, and where the next stage
reads what Spark still has in memory. A Python function, `key_by`, a keyed reduce. Rounds are interleaved, the best of
each counts.
"""

from __future__ import annotations

import shutil
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F
from rich.console import Console
from rich.table import Table

from benchmarks.bars import Bar, Measurement, Options
from dagster_unified.api import Pipeline
from dagster_unified.connectors import FileSink, ParquetSource
from dagster_unified.engine import session
from dagster_unified.engine.batch import intermediates
from dagster_unified.engine.batch.intermediates import IntermediateStore, Manifest
from dagster_unified.engine.batch.run import Run
from dagster_unified.engine.batch.savepoint import run_all
from dagster_unified.operators.layout import StreamLayout

PARTITIONS = 4
CODECS = ("lz4_raw", "uncompressed", "snappy", "zstd")
TEXTS, NUMBERS = 10, 20
"""Further columns of a wide record."""


class Narrow(NamedTuple):
    k: str
    v: int
    ts: int


Wide = NamedTuple(
    "Wide",
    [
        ("k", str),
        ("v", int),
        ("ts", int),
        *((f"s{i}", str) for i in range(TEXTS)),  # type: ignore[misc]
        *((f"n{i}", float) for i in range(NUMBERS)),
    ],
)


def first(r: Any) -> Any:
    return r._replace(v=r.v + 1)


def combine(a: Any, b: Any) -> Any:
    return b._replace(v=a.v + b.v)


def measure(options: Options) -> tuple[list[Bar], list[Measurement]]:
    folder = tempfile.mkdtemp(prefix="staging")
    config = {
        "spark.driver.memory": "4g",
        "spark.sql.shuffle.partitions": str(PARTITIONS),
        "spark.python.worker.reuse": "true",
    }
    spark = session.start("local[2]", config=config)
    try:
        found = _rates(spark, folder, "narrow", Narrow, options.records // 2, options.rounds) + _rates(
            spark, folder, "wide", Wide, options.records // 10, options.rounds
        )
    finally:
        spark.stop()
        shutil.rmtree(folder, ignore_errors=True)
    return [], found


def _rates(spark: SparkSession, folder: str, shape: str, records: Any, count: int, rounds: int) -> list[Measurement]:
    source = f"{folder}/{shape}"
    _numbers(spark.range(0, count, 1, 4), records).write.parquet(source)
    many = f"{folder}/{shape}-many"
    _numbers(spark.range(0, count, 1, 16), records).write.parquet(many)

    def library(mode: str, codec: str = CODECS[0], read: str = source) -> Callable[[], None]:
        built = Pipeline("bench")
        mapped = built.from_source(ParquetSource(read, records, name="numbers")).map(first, output_type=records)
        mapped.key_by("k").reduce(combine).set_parallelism(PARTITIONS).sink_to(FileSink(f"{folder}/out", name="out"))
        plan = built.plan({"execution.batch-shuffle-mode": mode})

        def run() -> None:
            intermediates.CODEC = codec
            run_all(Run(plan, spark, IntermediateStore(f"{folder}/store"), "run", "run"))

        return run

    variants = {
        "one Spark job": library("ALL_EXCHANGES_PIPELINED"),
        **{f"staged, {codec}": library("ALL_EXCHANGES_BLOCKING", codec) for codec in CODECS},
    }
    variants["one Spark job, many small files"] = library("ALL_EXCHANGES_PIPELINED", read=many)
    variants["staged, many small files"] = library("ALL_EXCHANGES_BLOCKING", read=many)
    variants["staged, read back from Spark's memory"] = _in_memory()(library("ALL_EXCHANGES_BLOCKING"))
    seconds: dict[str, list[float]] = {name: [] for name in variants}
    for number in range(rounds + 1):  # the first round warms up
        for name, run in variants.items():
            begun = time.perf_counter()
            run()
            if number:
                seconds[name].append(time.perf_counter() - begun)
    intermediates.CODEC = CODECS[0]
    table = Table(f"{shape}, {len(records._fields)} columns", "seconds, best", "against one Spark job")
    for name, taken in seconds.items():
        base = "one Spark job, many small files" if "many" in name else "one Spark job"
        table.add_row(name, f"{min(taken):.2f}", f"{min(seconds[base]) / min(taken):.2f}")
    Console().print(table)
    return [
        Measurement(f"{shape}, {n}", count / min(s) / 1e6, tuple(round(count / x / 1e6, 3) for x in s))
        for n, s in seconds.items()
    ]


@contextmanager
def _in_memory() -> Iterator[None]:
    """Stages read what the one before wrote from Spark's memory, where it is kept as it is written."""
    write, read = intermediates.write, intermediates.read
    kept: dict[str, DataFrame] = {}

    def writing(frame: DataFrame, attempt: Any) -> None:
        kept[attempt.name] = frame.persist()
        write(kept[attempt.name], attempt)

    def reading(
        spark: SparkSession,
        store: IntermediateStore,
        manifests: Sequence[Manifest],
        uid: str,
        tag: str | None,
        layout: StreamLayout,
        further: Sequence[str] = (),
    ) -> DataFrame:
        return kept[manifests[0].data].select(*layout.schema.names, *further)

    intermediates.write, intermediates.read = writing, reading
    try:
        yield
    finally:
        intermediates.write, intermediates.read = write, read
        for frame in kept.values():
            frame.unpersist()


def _numbers(ids: DataFrame, records: Any) -> DataFrame:
    known = [(F.col("id") % 10_000).cast("string").alias("k"), F.col("id").alias("v"), (F.col("id") * 1000).alias("ts")]
    texts = [
        F.concat(F.lit(f"text {i} "), ((F.col("id") * (i + 7919)) % 100_003).cast("string")).alias(f"s{i}")
        for i in range(TEXTS)
    ]
    numbers = [F.sqrt(F.col("id") + i).alias(f"n{i}") for i in range(NUMBERS)]
    return ids.select(*known, *((texts + numbers) if records is Wide else []))
