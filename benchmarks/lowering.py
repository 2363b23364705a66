"""Functions that are read, against the same functions called: what `execution.lowering` is worth.

Three functions into Parquet, and three functions, `key_by` and a keyed reduce, both in one Spark job. The rounds of the
variants are interleaved, since the machine is shared; the best round of each counts.
"""

from __future__ import annotations

import shutil
import tempfile
import time

from pyspark.sql import SparkSession

from benchmarks.bars import Bar, Measurement, Options
from benchmarks.batch import R, first, keep, last, numbers, pipeline, spark_session
from dagster_unified.api import Pipeline
from dagster_unified.connectors import FileSink, ParquetSource
from dagster_unified.engine.batch.intermediates import IntermediateStore
from dagster_unified.engine.batch.run import Run
from dagster_unified.engine.batch.savepoint import run_all


def three_functions(source: str, target: str) -> Pipeline:
    """Return a pipeline without a key."""
    p = Pipeline("functions")
    stream = p.from_source(ParquetSource(source, R, name="numbers")).map(first).filter(keep).map(last)
    stream.sink_to(FileSink(target, name="out"))
    return p


CASES = {"three functions": three_functions, "three functions, keyed reduce": pipeline}


def measure(options: Options) -> tuple[list[Bar], list[Measurement]]:
    folder = tempfile.mkdtemp(prefix="bench")
    try:
        with spark_session() as spark:
            rates = _rates(spark, folder, options)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    best = {m.name: m.best for m in rates}
    bars = [
        Bar(f"lowering.{case.replace(', ', '_').replace(' ', '_')}", best[f"{case}, AUTO"] / best[f"{case}, OFF"], 1.8)
        for case in CASES
    ]
    return bars, rates


def _rates(spark: SparkSession, folder: str, options: Options) -> list[Measurement]:
    source = numbers(spark, folder, options)
    seconds: dict[str, list[float]] = {}
    for number in range(options.rounds + 1):  # the first round warms up
        for case, build in CASES.items():
            for lowering in ("AUTO", "OFF"):
                settings = {"execution.batch-shuffle-mode": "ALL_EXCHANGES_PIPELINED", "execution.lowering": lowering}
                plan = build(source, f"{folder}/{lowering}").plan(settings)
                run = Run(
                    plan,
                    spark,
                    IntermediateStore(f"{folder}/store"),
                    f"{list(CASES).index(case)}-{lowering}-{number}",
                    "run",
                )
                begun = time.perf_counter()
                run_all(run)
                if number:
                    seconds.setdefault(f"{case}, {lowering}", []).append(time.perf_counter() - begun)
                shutil.rmtree(f"{folder}/{lowering}", ignore_errors=True)
    return [
        Measurement(n, options.records / min(s) / 1e6, tuple(round(options.records / x / 1e6, 3) for x in s))
        for n, s in seconds.items()
    ]
