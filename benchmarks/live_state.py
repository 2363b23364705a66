"""What a savepoint costs the job that goes on, and what the first epoch of a job costs that starts from one.

A job has a value and a timer for each of many keys, and gets a thousand records in each epoch. Epochs are timed from
commit to commit; those that begin while a savepoint is written, against those before it.
"""

from __future__ import annotations

import statistics
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Event as Flag
from typing import Any, NamedTuple, Self

import pyarrow as pa
import pyarrow.parquet as pq
from pyspark.sql import SparkSession

from benchmarks.bars import Bar, Measurement
from dagster_unified.api import KeyedProcessFunction, Pipeline, ValueStateDescriptor
from dagster_unified.connectors import FileSink, ParquetSource
from dagster_unified.engine.events import EpochCommitted, Event
from dagster_unified.engine.streaming.checkpoint import CheckpointDirectory
from dagster_unified.engine.streaming.job import Start, StreamingJob
from dagster_unified.engine.streaming.savepoints.request import take
from dagster_unified.graph.plan import Plan

FAR = 4_000_000_000_000
"""A timer's time that no watermark reaches."""

STEADY = 15
"""Epochs before the savepoint, of which the first five warm up."""

RECORDS = 1_000


class Number(NamedTuple):
    k: int
    v: int


class Touch(KeyedProcessFunction[int, Number, Number]):
    """Counts a key's records, with a timer for each key."""

    def open(self, runtime_context: Any) -> None:
        self._count = runtime_context.get_state(ValueStateDescriptor("count", int))

    def process_element(self, value: Number, ctx: Any) -> None:
        count = self._count.value()
        if count is None:
            ctx.timer_service().register_event_time_timer(FAR + value.k)
        self._count.update((count or 0) + value.v)


class Arriving:
    """Files that arrive one after another, the first with every key."""

    def __init__(self, folder: Path, spark: SparkSession, keys: int) -> None:
        self.folder, self.keys, self.files = folder / "in", keys, 0
        spark.range(0, keys, 1, 1).selectExpr("id k", "id v").write.parquet(str(folder / "all"))
        self.folder.mkdir()
        (first,) = (folder / "all").glob("*.parquet")
        first.rename(self.folder / "all.parquet")

    def one(self) -> None:
        """A thousand records of keys all over."""
        self.files += 1
        numbers = [(self.files * 7919 + n * 104729) % self.keys for n in range(RECORDS)]
        table = pa.table({"k": numbers, "v": numbers}, pa.schema([("k", pa.int64()), ("v", pa.int64())]))
        staged = self.folder / f".{self.files}"
        pq.write_table(table, staged)
        staged.rename(self.folder / f"{self.files:05d}.parquet")


class Running:
    """A job in another thread, and when it has committed its epochs."""

    def __init__(self, plan: Plan, spark: SparkSession) -> None:
        self.commits: list[float] = []
        self.arrived, self.stopped = Flag(), Flag()
        self.job = StreamingJob(plan, spark, Start("benchmark"), self.observe)

    def observe(self, event: Event) -> None:
        if isinstance(event, EpochCommitted):
            self.commits.append(time.perf_counter())
            self.arrived.set()

    def __enter__(self) -> Self:
        self.thread = ThreadPoolExecutor(1)
        self.outcome = self.thread.submit(self.job.run, self.stopped.is_set, 0.02)
        return self

    def __exit__(self, *failure: object) -> None:
        self.stopped.set()
        self.outcome.result()

    def epochs(self, arriving: Arriving, count: int) -> list[float]:
        """The seconds that so many epochs take, each from the arrival of its file to its commit."""
        found = []
        for _ in range(count):
            reached, begun = len(self.commits), time.perf_counter()
            arriving.one()
            self.until(reached + 1)
            found.append(self.commits[reached] - begun)
        return found

    def until(self, commits: int) -> None:
        """Wait for so many commits."""
        while len(self.commits) < commits and not self.outcome.done():
            self.arrived.wait(0.5)
            self.arrived.clear()


def _plan(folder: Path, name: str, **options: Any) -> Plan:
    pipeline = Pipeline("touch")
    source = ParquetSource(str(folder / "in"), Number, name="numbers", monitor=True, max_files_per_trigger=1)
    touched = pipeline.from_source(source).key_by("k").process(Touch(), output_type=Number).uid("touch")
    touched.sink_to(FileSink(str(folder / f"out {name}"), name="out"))
    checkpoints = {"execution.checkpointing.dir": str(folder / f"checkpoints {name}")}
    return pipeline.plan({"execution.runtime-mode": "STREAMING", **checkpoints, **options})


def measured(spark: SparkSession, folder: Path, keys: int) -> tuple[list[Bar], list[Measurement]]:
    """A savepoint of a job that goes on, and a job that starts from it."""
    arriving, plan = Arriving(folder, spark, keys), _plan(folder, "first")
    directory = CheckpointDirectory(plan.execution.streaming.directory, plan.name)
    with Running(plan, spark) as first, ThreadPoolExecutor(1) as asker:
        first.until(1)
        steady = first.epochs(arriving, STEADY)[5:]
        asked = asker.submit(take, plan, directory, "asker", "benchmark", lambda: spark)
        meanwhile = []
        while not asked.done():
            meanwhile += first.epochs(arriving, 1)
    saved = asked.result().tables
    with Running(_plan(folder, "second", **{"execution.state-recovery.path": saved}), spark) as second:
        arriving.one()
        second.until(1)  # it restores the state with this one
        restored = second.epochs(arriving, STEADY)
    usual, afterwards = statistics.median(steady), statistics.median(restored[5:])
    bars = [
        Bar(
            "state.delay: an epoch's time while a savepoint is written, at most, against others",
            max(meanwhile) / usual,
            2.0,
            at_most=True,
        ),
        Bar(
            "state.first: the first epoch after restoring against later ones",
            restored[0] / afterwards,
            3.0,
            at_most=True,
        ),
    ]
    return bars, [
        Measurement("state.epochs, seconds", usual, tuple(round(x, 3) for x in steady)),
        Measurement(
            "state.epochs while a savepoint is written, seconds", max(meanwhile), tuple(round(x, 3) for x in meanwhile)
        ),
        Measurement("state.epochs after restoring, seconds", restored[0], tuple(round(x, 3) for x in restored)),
    ]
