"""Functions that are read, as curves: rates against the number of functions, and against the width of a record.

`python -m benchmarks.lowering_curves` draws docs/images/lowering.svg. Each point is the best of two BATCH jobs into
Parquet after one that warms up.
"""

from __future__ import annotations

import shutil
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import matplotlib as mpl
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from pyspark.sql import SparkSession
from pyspark.sql import functions as F

from benchmarks.batch import R, first, keep, last
from benchmarks.stream import streaming_session
from dagster_unified.api import DataStream, KeyedProcessFunction, Pipeline
from dagster_unified.connectors import FileSink, ParquetSource
from dagster_unified.engine.batch.intermediates import IntermediateStore
from dagster_unified.engine.batch.run import Run
from dagster_unified.engine.batch.savepoint import run_all

RECORDS, ROUNDS = 2_000_000, 2
LENGTHS, WIDTHS = (1, 2, 4, 8, 16), (3, 6, 12, 25, 50)
PICTURE = Path(__file__).parents[1] / "docs/images/lowering.svg"

Build = Callable[[DataStream[Any]], DataStream[Any]]
FUNCTIONS = (("map", first), ("filter", keep), ("map", last))


def has_digits(r: R) -> bool:
    """All have. Only Python says what a digit is."""
    return r.k.isdigit()


class Counted(KeyedProcessFunction[int, Any, int]):
    """Reads two fields."""

    def process_element(self, value: Any, ctx: KeyedProcessFunction.Context[int]) -> Any:
        if value.a0 % 100 == 0:
            yield value.a1


def chain(length: int, in_python: bool) -> Build:
    """So many functions of one record each."""

    def build(stream: DataStream[R]) -> DataStream[Any]:
        for number in range(length - in_python):
            kind, function = FUNCTIONS[number % len(FUNCTIONS)]
            stream = getattr(stream, kind)(function)
        return stream.filter(has_digits) if in_python else stream

    return build


def keyed(stream: DataStream[Any]) -> DataStream[Any]:
    return stream.key_by("a0").process(Counted(), int)


def wide(width: int) -> Any:
    """A record of so many integers."""
    return NamedTuple("Wide", [(f"a{number}", int) for number in range(width)])


def rate(spark: SparkSession, folder: Path, records: Any, source: Path, build: Build, lowering: str) -> float:
    """Millions of records a second, in the best of some rounds."""
    best = 0.0
    for number in range(ROUNDS + 1):
        pipeline = Pipeline("curves")
        stream = pipeline.from_source(ParquetSource(str(source), records, name="records"))
        build(stream).sink_to(FileSink(str(folder / "out"), name="out"))
        options = {"execution.batch-shuffle-mode": "ALL_EXCHANGES_PIPELINED", "execution.lowering": lowering}
        plan = pipeline.plan(options)
        begun = time.perf_counter()
        run_all(Run(plan, spark, IntermediateStore(str(folder / "store")), f"run-{number}", "run"))
        if number:
            best = max(best, RECORDS / (time.perf_counter() - begun) / 1e6)
        shutil.rmtree(folder / "out")
    return best


def measured() -> tuple[dict[str, list[float]], dict[str, list[float]]]:
    """Rates by what runs the functions: against the length of a chain, and against the width of a record."""
    lengths: dict[str, list[float]] = {"called": [], "read, in Python": [], "read, in Catalyst": []}
    widths: dict[str, list[float]] = {"called with whole records": [], "called with the two fields it reads": []}
    folder = Path(tempfile.mkdtemp(prefix="bench"))
    try:
        with streaming_session() as spark:
            ids, numbers = spark.range(0, RECORDS, 1, 4), folder / "numbers"
            k, v = (F.col("id") % 10_000).cast("string").alias("k"), F.col("id").alias("v")
            ids.select(k, v, v.alias("ts")).write.parquet(str(numbers))
            for length in LENGTHS:
                for name, in_python, lowering in (
                    ("called", False, "OFF"),
                    ("read, in Python", True, "AUTO"),
                    ("read, in Catalyst", False, "AUTO"),
                ):
                    lengths[name].append(rate(spark, folder, R, numbers, chain(length, in_python), lowering))
            for width in WIDTHS:
                records, source = wide(width), folder / f"wide-{width}"
                columns = [(F.col("id") % 10_000 + number).alias(f"a{number}") for number in range(width)]
                ids.select(*columns).write.parquet(str(source))
                for name, lowering in zip(widths, ("OFF", "AUTO"), strict=True):
                    widths[name].append(rate(spark, folder, records, source, keyed, lowering))
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    return lengths, widths


def drawn(axes: Axes, x: tuple[int, ...], curves: dict[str, list[float]], label: str) -> None:
    for name, y in curves.items():
        axes.plot(x, y, marker="o", label=name)
    axes.set_xlabel(label)
    axes.set_ylabel("million records a second")
    axes.set_xscale("log", base=2)
    axes.set_xticks(x, [str(each) for each in x])
    axes.set_ylim(bottom=0)
    axes.grid(visible=True, alpha=0.3)
    axes.legend()


def main() -> None:
    mpl.rcParams["svg.hashsalt"] = "lowering"
    lengths, widths = measured()
    figure = Figure(figsize=(11, 4), layout="constrained")
    left, right = figure.subplots(1, 2)
    drawn(left, LENGTHS, lengths, "functions in a chain")
    drawn(right, WIDTHS, widths, "fields of a record; a keyed process function reads two")
    figure.savefig(PICTURE, metadata={"Date": None})
    for x, curves in ((LENGTHS, lengths), (WIDTHS, widths)):
        for name, y in curves.items():
            print(name, dict(zip(x, (round(each, 2) for each in y), strict=True)))


if __name__ == "__main__":
    main()
