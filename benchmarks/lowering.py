"""Functions that are read, against the same functions called: what `execution.lowering` is worth.

In BATCH each case is one Spark job that writes Parquet; the rounds of the variants are interleaved, since the machine
is shared, and the best round of each counts. In STREAMING micro-batches of two million records go nowhere; the first
one, which starts workers, does not count, and neither does the first job. Rates are of records, or of words.
"""

from __future__ import annotations

import shutil
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any, NamedTuple, get_type_hints

from pyspark.sql import SparkSession
from pyspark.sql import functions as F

from benchmarks.bars import Bar, Measurement, Options
from benchmarks.batch import PARTITIONS, R, combine, first, keep, last
from benchmarks.stream import Nowhere, rates_of_batches, streaming_session
from dagster_unified.api import (
    AggregateFunction,
    DataStream,
    KeyedProcessFunction,
    Pipeline,
    RuntimeContext,
    TumblingEventTimeWindows,
    ValueStateDescriptor,
    WatermarkStrategy,
    functions,
)
from dagster_unified.connectors import FileSink, ParquetSource
from dagster_unified.engine.batch.intermediates import IntermediateStore
from dagster_unified.engine.batch.run import Run
from dagster_unified.engine.batch.savepoint import run_all
from dagster_unified.engine.streaming.job import Start, StreamingJob

FILES_AT_ONCE, FILE, KEYS = 4, 500_000, 10_000
ROUNDS_OF_STREAMING = 2


class Word(NamedTuple):
    """Of a text."""

    word: str
    n: int


def words(line: str) -> Iterator[Word]:
    """Those of a line."""
    for word in line.lower().split():
        yield Word(word, 1)


def counted(a: Word, b: Word) -> Word:
    return Word(a.word, a.n + b.n)


class Wide(NamedTuple):
    """Nineteen fields, as those of the flights."""

    a0: int
    a1: str
    a2: float
    a3: int | None
    a4: int
    a5: str
    a6: float
    a7: int | None
    a8: int
    a9: str
    a10: float
    a11: int | None
    a12: int
    a13: str
    a14: float
    a15: int | None
    a16: int
    a17: str
    a18: float


class Longest(KeyedProcessFunction[int, Wide, float]):
    """Reads three fields, and has state."""

    def open(self, context: RuntimeContext) -> None:
        self.longest = context.get_state(ValueStateDescriptor("longest", float))

    def process_element(self, value: Wide, ctx: KeyedProcessFunction.Context[int]) -> Iterator[float]:
        longest = self.longest.value()
        if len(value.a1) > 1 and (longest is None or value.a2 > longest):
            self.longest.update(value.a2)
            if value.a0 % 100 == 0:
                yield value.a2


class Mean(AggregateFunction[R, tuple[int, int], float]):
    """Of a sum and a count."""

    def create_accumulator(self) -> tuple[int, int]:
        return 0, 0

    def add(self, value: R, accumulator: tuple[int, int]) -> tuple[int, int]:
        return accumulator[0] + value.v, accumulator[1] + 1

    def get_result(self, accumulator: tuple[int, int]) -> float:
        return accumulator[0] / accumulator[1]

    def merge(self, a: tuple[int, int], b: tuple[int, int]) -> tuple[int, int]:
        return a[0] + b[0], a[1] + b[1]


def three_functions(numbers: DataStream[R]) -> DataStream[Any]:
    return numbers.map(first).filter(keep).map(last)


def keyed_reduce(numbers: DataStream[R]) -> DataStream[Any]:
    """Three functions before it. In STREAMING it rolls."""
    return three_functions(numbers).key_by(lambda r: r.k).reduce(combine).set_parallelism(PARTITIONS)


def by_hand(numbers: DataStream[R]) -> DataStream[Any]:
    """What `keyed_reduce` does, as columns."""
    added = numbers.with_columns({"v": "v + 1"}, R).where("v % 2 = 0").with_columns({"v": "v * 2"}, R)
    sums = functions.sum("v").alias("v"), functions.last("ts").alias("ts")
    return added.key_by("k").agg(*sums, output_type=R).set_parallelism(PARTITIONS)


def windows_of_ten(numbers: DataStream[R]) -> DataStream[Any]:
    """Ten records of a key in each window."""
    return _windows(numbers, timedelta(seconds=100))


def windows_of_hundred(numbers: DataStream[R]) -> DataStream[Any]:
    """A hundred records of a key in each window."""
    return _windows(numbers, timedelta(seconds=1000))


def _windows(numbers: DataStream[R], size: timedelta) -> DataStream[Any]:
    by_ts = WatermarkStrategy.for_bounded_out_of_orderness(timedelta(seconds=1)).with_timestamp_assigner("ts")
    timed = numbers.assign_timestamps_and_watermarks(by_ts).key_by("k")
    return timed.window(TumblingEventTimeWindows.of(size)).aggregate(Mean())


def word_count(lines: DataStream[str]) -> DataStream[Any]:
    return lines.flat_map(words, Word).key_by("word").reduce(counted).set_parallelism(PARTITIONS)


def keyed_process(records: DataStream[Wide]) -> DataStream[Any]:
    return records.key_by("a4").process(Longest()).set_parallelism(PARTITIONS)


def one_in_twenty(record: Wide) -> bool:
    return record.a8 % 20 == 7


def filter_and_keyed_process(records: DataStream[Wide]) -> DataStream[Any]:
    """One record in twenty goes on."""
    return keyed_process(records.filter(one_in_twenty))


Case = Callable[[DataStream[Any]], DataStream[Any]]
CASES: dict[str, tuple[str, Case, float]] = {
    "three functions": ("BATCH", three_functions, 1.8),
    "three functions, keyed reduce": ("BATCH", keyed_reduce, 6),
    "word count": ("BATCH", word_count, 2),
    "keyed process, 3 of 19 fields": ("BATCH", keyed_process, 1.7),
    "filter, keyed process, 3 of 19 fields": ("BATCH", filter_and_keyed_process, 2.5),
    "windows of 10 records": ("BATCH", windows_of_ten, 1.5),
    "windows of 100 records": ("BATCH", windows_of_hundred, 1.5),
    "three functions, rolling reduce": ("STREAMING", keyed_reduce, 1.8),
    "windows of 10 records, STREAMING": ("STREAMING", windows_of_ten, 1.5),
    "windows of 100 records, STREAMING": ("STREAMING", windows_of_hundred, 1.5),
}


AS_COLUMNS: dict[str, tuple[Case, float]] = {"three functions, keyed reduce": (by_hand, 0.85)}
"""By case, the same by hand, and how much of its rate the functions reach."""


def measure(options: Options) -> tuple[list[Bar], list[Measurement]]:
    folder = Path(tempfile.mkdtemp(prefix="bench"))
    try:
        with streaming_session() as spark:
            sources = {
                kind: write(spark, folder / write.__name__, options.records)
                for kind, write in ((R, _numbers), (str, _lines), (Wide, _wide))
            }
            rates = {
                name: _in_batch(spark, folder, sources[_kind(case)], _variants(name), options)
                if mode == "BATCH"
                else _in_streaming(spark, folder, sources[_kind(case)], case, options)
                for name, (mode, case, _) in CASES.items()
            }
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    bars, measured = [], []
    for name, (mode, _, bar) in CASES.items():
        middle = max if mode == "BATCH" else statistics.median
        best = {lowering: middle(found) for lowering, found in rates[name].items()}
        short = f"lowering.{name.replace(',', '').replace(' ', '_')}"
        bars.append(Bar(short, best["AUTO"] / best["OFF"], bar))
        if name in AS_COLUMNS:
            bars.append(Bar(f"{short}_of_columns", best["AUTO"] / best["columns"], AS_COLUMNS[name][1]))
        measured += [
            Measurement(f"{name}, {lowering}", best[lowering], found) for lowering, found in rates[name].items()
        ]
    return bars, measured


def _variants(name: str) -> dict[str, tuple[Case, str]]:
    """By the name of what is measured, the case and the value of `execution.lowering`."""
    case = CASES[name][1]
    columns = {"columns": (AS_COLUMNS[name][0], "AUTO")} if name in AS_COLUMNS else {}
    return {"AUTO": (case, "AUTO"), "OFF": (case, "OFF"), **columns}


def _kind(case: Case) -> Any:
    """The records that a case takes."""
    return {word_count: str, keyed_process: Wide, filter_and_keyed_process: Wide}.get(case, R)


def _numbers(spark: SparkSession, path: Path, records: int) -> str:
    """Records in the order of their event time, each file a stretch of it; 10,000 keys follow one another."""
    ids = spark.range(0, records, 1, max(1, records // FILE))
    ids.select(
        (F.col("id") % KEYS).cast("string").alias("k"), F.col("id").alias("v"), F.col("id").alias("ts")
    ).write.parquet(str(path))
    return str(path)


def _lines(spark: SparkSession, path: Path, records: int) -> str:
    """Lines of ten words, of which there are 10,000."""
    found = [F.concat(F.lit("Word"), F.pmod(F.hash("id", F.lit(n)), F.lit(10_000)).cast("string")) for n in range(10)]
    spark.range(records // 10).select(F.concat_ws(" ", *found).alias("value")).write.parquet(str(path))
    return str(path)


def _wide(spark: SparkSession, path: Path, records: int) -> str:
    """Of three in five as many records, which takes long enough."""
    number = F.col("id")
    made = {
        int: number % KEYS,
        str: F.concat(F.lit("text "), number % 100),
        float: number / 7,
        int | None: F.when(number % 3 > 0, number),
    }
    fields = [made[kind].alias(name) for name, kind in get_type_hints(Wide).items()]
    spark.range(records * 3 // 5).select(*fields).write.parquet(str(path))
    return str(path)


def _pipeline(source: str, case: Case, sink: Any) -> Pipeline:
    pipeline = Pipeline("lowering")
    files = ParquetSource(source, _kind(case), name="records", max_files_per_trigger=FILES_AT_ONCE)
    case(pipeline.from_source(files)).sink_to(sink)
    return pipeline


def _in_batch(
    spark: SparkSession, folder: Path, source: str, variants: dict[str, tuple[Case, str]], options: Options
) -> dict[str, tuple[float, ...]]:
    rates: dict[str, tuple[float, ...]] = dict.fromkeys(variants, ())
    for number in range(options.rounds + 1):  # the first round warms up
        for variant, (case, lowering) in variants.items():
            settings = {"execution.batch-shuffle-mode": "ALL_EXCHANGES_PIPELINED", "execution.lowering": lowering}
            plan = _pipeline(source, case, FileSink(str(folder / variant), name="out")).plan(settings)
            name = f"{case.__name__}-{variant}-{number}"
            begun = time.perf_counter()
            run_all(Run(plan, spark, IntermediateStore(str(folder / "store")), name, "run"))
            if number:
                rates[variant] += (round(options.records / (time.perf_counter() - begun) / 1e6, 3),)
            shutil.rmtree(folder / variant, ignore_errors=True)
    return rates


def _in_streaming(
    spark: SparkSession, folder: Path, source: str, case: Case, options: Options
) -> dict[str, tuple[float, ...]]:
    rates: dict[str, tuple[float, ...]] = {"AUTO": (), "OFF": ()}
    for number in range(ROUNDS_OF_STREAMING + 1):
        for lowering in rates:
            checkpoints = folder / "checkpoints"
            settings = {
                "execution.runtime-mode": "STREAMING",
                "execution.checkpointing.dir": str(checkpoints),
                "execution.lowering": lowering,
            }
            StreamingJob(_pipeline(source, case, Nowhere()).plan(settings), spark, Start("bench")).run()
            shutil.rmtree(checkpoints)
            if number:
                rates[lowering] += tuple(round(rate, 3) for rate in rates_of_batches(options.records))
    return rates
