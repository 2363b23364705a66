"""A stream on a Spark Connect server, for processes of their own: `build`, and `run` with what it is to meet."""

import json
import os
import signal
from collections.abc import Callable, Iterable
from datetime import timedelta
from pathlib import Path
from typing import NamedTuple

import pyarrow as pa
import pyarrow.parquet as pq

from dagster_unified.api import KeyedProcessFunction, Pipeline, ValueStateDescriptor, WatermarkStrategy
from dagster_unified.connectors import DeltaSink, ParquetSource
from dagster_unified.engine.events import EpochCommitted
from dagster_unified.engine.streaming.job import Start, StreamingJob

OPTIONS = {
    "execution.runtime-mode": "STREAMING",
    "pipeline.max-parallelism": 2,
    "parallelism.default": 1,
}
POISON = 1000


class Row(NamedTuple):
    key: str
    at: int
    amount: int


class Silence(KeyedProcessFunction):
    """Says when a key has been silent for ten, with what it had by then."""

    def open(self, context):
        self.total = context.get_state(ValueStateDescriptor("total", int))
        self.timer = context.get_state(ValueStateDescriptor("timer", int))

    def process_element(self, value, ctx) -> Iterable[Row]:
        self.total.update((self.total.value() or 0) + value.amount)
        if self.timer.value() is not None:
            ctx.timer_service().delete_event_time_timer(self.timer.value())
        self.timer.update(value.at + 10)
        ctx.timer_service().register_event_time_timer(value.at + 10)

    def on_timer(self, timestamp, ctx) -> Iterable[Row]:
        yield Row(ctx.get_current_key(), timestamp, self.total.value())


def build(folder: Path, bears: int | None = None) -> Pipeline:
    """The totals of keys that fell silent; one that `bears` so much fails at more."""

    def tasted(row: Row) -> Row:
        if bears is not None and row.amount >= bears:
            raise ValueError("this is poison")
        return row

    pipeline = Pipeline("stream")
    by_at = WatermarkStrategy.for_bounded_out_of_orderness(timedelta(milliseconds=5)).with_timestamp_assigner("at")
    source = ParquetSource(str(folder / "in"), Row, monitor=True)
    silent = pipeline.from_source(source).assign_timestamps_and_watermarks(by_at).key_by("key").process(Silence())
    silent.map(tasted).name("tasting").sink_to(
        DeltaSink(str(folder / "silent"), mode="upsert", key="key", name="silent")
    )
    return pipeline


def add_file(folder: Path, number: int, *rows: Row) -> None:
    (folder / "in").mkdir(exist_ok=True)
    pq.write_table(pa.Table.from_pylist([row._asdict() for row in rows]), folder / "in" / f"{number}.parquet")


def job(folder: Path, spark, bears: int | None = None, **start) -> StreamingJob:
    """A job of it, which says in a file which epochs it has committed."""

    def observe(event):
        if isinstance(event, EpochCommitted):
            with (folder / "epochs").open("a") as file:
                file.write(json.dumps([event.epoch, event.rows_in]) + "\n")

    options = {**OPTIONS, "execution.checkpointing.dir": str(folder / "checkpoints")}
    return StreamingJob(build(folder, bears).plan(options), spark, Start("test", **start), observe)


def read(folder: Path) -> int:
    """How many records have been read in epochs that are committed.

    A job that is killed before Spark has logged an epoch leaves it to the next one, which says it once more.
    """
    lines = (folder / "epochs").read_text().splitlines() if (folder / "epochs").exists() else []
    return sum(dict(map(json.loads, lines)).values())


def queries(job: StreamingJob) -> str:
    """The ids of a job's queries, and of their runs."""
    return ",".join(f"{query.query.id}/{query.query.runId}" for query in job._queries if query.query is not None)


def run_until_killed(
    folder: Path, job: StreamingJob, records: int, meanwhile: Callable[[], None] = lambda: None
) -> None:
    """Run a job until it has read so many records, say which queries it has, and die."""

    def look() -> bool:
        meanwhile()
        if read(folder) >= records:
            print(queries(job), flush=True)
            os.kill(os.getpid(), signal.SIGKILL)
        return False

    job.run(look)
