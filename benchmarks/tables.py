"""Tables, against the files that they consist of.

Read in BATCH: a Delta table through three Python functions into Parquet, against `ParquetSource` over the same files.
Planned: an epoch of a stream that stands behind 1,000 versions.
"""

from __future__ import annotations

import shutil
import statistics
import tempfile
import time
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
from deltalake import DeltaTable, convert_to_deltalake, write_deltalake

from benchmarks.bars import Bar, Measurement, Options
from benchmarks.connectors import Seen, half, later, positive
from dagster_unified.api import Pipeline
from dagster_unified.connectors import DeltaSource, FileSink, ParquetSource
from dagster_unified.engine import session
from dagster_unified.engine.batch.intermediates import IntermediateStore
from dagster_unified.engine.batch.run import Run
from dagster_unified.engine.batch.savepoint import run_all
from dagster_unified.graph.plan import Plan

FILES, VERSIONS, ASKED = 16, 1000, 20


def measure(options: Options) -> tuple[list[Bar], list[Measurement]]:
    folder = Path(tempfile.mkdtemp(prefix="bench"))
    try:
        rates = _read(folder, options)
        planned = _planned(folder / "versions")
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    best = {rate.name: rate.best for rate in rates}
    bars = [
        Bar("tables.delta_read_vs_parquet", best["Delta"] / best["Parquet"], 0.9),
        Bar("tables.delta_epoch_planned_ms", planned, 50, at_most=True),
    ]
    return bars, rates


def _read(folder: Path, options: Options) -> list[Measurement]:
    _written(folder / "files", options.records)
    shutil.copytree(folder / "files", folder / "table")
    convert_to_deltalake(str(folder / "table"))
    spark = session.start("local[2]", config={"spark.driver.memory": "3g", "spark.python.worker.reuse": "true"})
    try:
        plans = {
            "Delta": _plan(DeltaSource(f"{folder}/table", Seen), folder),
            "Parquet": _plan(ParquetSource(f"{folder}/files", Seen), folder),
        }
        rates: dict[str, list[float]] = {name: [] for name in plans}
        for number in range(options.rounds + 1):
            for name, plan in plans.items():
                begun = time.perf_counter()
                run_all(Run(plan, spark, IntermediateStore(f"{folder}/store"), _name(), _name()))
                if number:
                    rates[name].append(options.records / (time.perf_counter() - begun) / 1e6)
    finally:
        spark.stop()
    return [Measurement(n, max(found), tuple(round(rate, 3) for rate in found)) for n, found in rates.items()]


def _plan(source: DeltaSource[Seen] | ParquetSource[Seen], folder: Path) -> Plan:
    pipeline = Pipeline("bench")
    seen = pipeline.from_source(source).map(later).filter(positive).map(half)
    seen.sink_to(FileSink(f"{folder}/{type(source).__name__}", name="seen"))
    return pipeline.plan({"execution.runtime-mode": "BATCH"})


def _name() -> str:
    """A run of its own: one that has written already does not write again."""
    return f"run-{time.monotonic_ns()}"


def _written(folder: Path, records: int) -> None:
    folder.mkdir(parents=True)
    each = records // FILES
    for number in range(FILES):
        ids = range(number * each, (number + 1) * each)
        columns = {"id": pa.array(ids), "name": [f"aircraft-{n % 5000}" for n in ids], "x": [n * 0.5 for n in ids]}
        pq.write_table(pa.table(columns), folder / f"{number}.parquet")


def _planned(path: Path) -> float:
    """Milliseconds that it takes to plan an epoch of one version, behind many others."""
    for number in range(VERSIONS):
        write_deltalake(str(path), pa.table({"id": [number], "name": ["a"], "x": [0.5]}), mode="append")
    assert DeltaTable(str(path)).version() == VERSIONS - 1
    source = DeltaSource(str(path), Seen, bounded=False)
    taken = []
    for _ in range(ASKED):
        begun = time.perf_counter()
        end = source.available({"version": VERSIONS - 1})
        source.splits({"version": VERSIONS - 1}, end)
        taken.append(1000 * (time.perf_counter() - begun))
    return statistics.median(taken)
