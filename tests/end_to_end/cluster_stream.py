"""A STREAMING job on a cluster whose machines share nothing but a bucket: state, timers, windows and a join.

`python -m tests.end_to_end.cluster_stream FOLDER URL MASTER`; it is drained once FOLDER/end is there. FOLDER is the
driver's own. MASTER can be the address of a Spark Connect server on the cluster.
"""

import sys
from collections.abc import Iterable, Iterator
from datetime import timedelta
from pathlib import Path
from typing import NamedTuple

from dagster_unified.api import (
    DataStream,
    KeyedProcessFunction,
    Pipeline,
    ProcessJoinFunction,
    RuntimeContext,
    TumblingEventTimeWindows,
    ValueStateDescriptor,
    WatermarkStrategy,
)
from dagster_unified.connectors import DeltaSink, ParquetSource
from dagster_unified.engine import session
from dagster_unified.engine.streaming.job import Start, StreamingJob
from dagster_unified.storage import object_store
from tests.object_store import s3a

BUCKET = "s3://lake/cluster"
OPTIONS = {
    "execution.runtime-mode": "STREAMING",
    "execution.checkpointing.dir": f"{BUCKET}/checkpoints",
    "pipeline.max-parallelism": 2,
    "parallelism.default": 2,
}


class Sale(NamedTuple):
    shop: str
    at: int
    amount: int


class Out(NamedTuple):
    branch: str
    shop: str
    at: int
    value: int


class Sums(KeyedProcessFunction[str, Sale, Out]):
    """The sum of a shop so far, at the end of every second in which it sold."""

    requires_time_sorted_input = True

    def open(self, runtime_context: RuntimeContext) -> None:
        self.sum = runtime_context.get_state(ValueStateDescriptor("sum", int))

    def process_element(self, value: Sale, ctx: KeyedProcessFunction.Context) -> None:
        self.sum.update((self.sum.value() or 0) + value.amount)
        ctx.timer_service().register_event_time_timer(value.at // 1000 * 1000 + 999)

    def on_timer(self, timestamp: int, ctx: KeyedProcessFunction.OnTimerContext) -> Iterator[Out]:
        yield Out("sum", ctx.get_current_key(), timestamp, self.sum.value() or 0)


class Pairs(ProcessJoinFunction[Sale, Sale, Out]):
    """Two sales of one shop in two folders."""

    def process_element(self, left: Sale, right: Sale, ctx: ProcessJoinFunction.Context) -> Iterable[Out]:
        yield Out("pair", left.shop, left.at, left.amount * right.amount)


def add(a: Sale, b: Sale) -> Sale:
    return Sale(a.shop, max(a.at, b.at), a.amount + b.amount)


def build(read) -> tuple[Pipeline, DataStream[Out]]:
    """The pipeline over the stream that `read` gives of each side, and its results."""
    pipeline = Pipeline("cluster")
    strategy = WatermarkStrategy.for_monotonous_timestamps().with_timestamp_assigner("at")
    left, right = (
        read(pipeline, side).assign_timestamps_and_watermarks(strategy).key_by("shop") for side in ("left", "right")
    )
    sums = left.process(Sums()).name("sums")
    windows = left.window(TumblingEventTimeWindows.of(timedelta(seconds=1))).reduce(add).name("windows")
    totals = windows.map(lambda sale: Out("window", sale.shop, sale.at, sale.amount), output_type=Out)
    pairs = left.interval_join(right).between(timedelta(seconds=0), timedelta(seconds=0)).process(Pairs()).name("pairs")
    return pipeline, sums.union(totals, pairs)


def stream() -> Pipeline:
    """The pipeline that reads folders of the bucket."""
    read = lambda pipeline, side: pipeline.from_source(  # noqa: E731
        ParquetSource(f"{BUCKET}/{side}", Sale, name=side, monitor=True)
    )
    pipeline, results = build(read)
    results.sink_to(DeltaSink(f"{BUCKET}/table", mode="append", name="table"))
    return pipeline


if __name__ == "__main__":
    folder, url, master = sys.argv[1:]
    config = {"spark.driver.memory": "1g", "spark.executor.memory": "700m", **s3a(Path(folder))}
    object_store.use(object_store.Store(url, "us-east-1", "key", "secret"))
    spark = session.start(remote=master) if master.startswith("sc://") else session.start(master, config=config)
    job = StreamingJob(stream().plan(OPTIONS), spark, Start("job", patience=3), lambda event: print(event, flush=True))

    def ended() -> bool:
        if Path(folder, "end").exists():
            job.drain()
        return False

    print(job.run(ended), flush=True)
