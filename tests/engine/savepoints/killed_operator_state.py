"""A STREAMING job with operator state that kills itself at a point of an epoch, as `kill -9` would.

`python -m tests.engine.savepoints.killed_operator_state FOLDER EPOCH POINT CORES SINKS`; POINT is one of
`tests.engine.killed_job`. With one sink the rows of an epoch go straight to it, with two they are staged.
"""

import os
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

from dagster_unified.api import CheckpointedFunction, FlatMapFunction, ListStateDescriptor, MapFunction, Pipeline
from dagster_unified.connectors import ParquetSource
from dagster_unified.engine import session
from dagster_unified.engine.streaming.job import Start, StreamingJob
from tests.engine.killed_job import KillingSink


class Number(NamedTuple):
    value: int


class Buffered(FlatMapFunction, CheckpointedFunction):
    """Emits its subtask's numbers seven at a time; those that wait are its state."""

    def initialize_state(self, context):
        store = context.get_operator_state_store()
        self.state = store.get_list_state(ListStateDescriptor("waiting", int))
        self.waiting = self.state.get()

    def snapshot_state(self, context):
        self.state.update(self.waiting)

    def flat_map(self, value: Number) -> Iterable[Number]:
        self.waiting.append(value.value)
        if len(self.waiting) < 7:
            return []
        found, self.waiting = self.waiting, []
        return [Number(one) for one in found]


class Seen(MapFunction, CheckpointedFunction):
    """Keeps all numbers that its subtask has seen."""

    def initialize_state(self, context):
        self.seen = context.get_operator_state_store().get_union_list_state(ListStateDescriptor("seen", int))

    def snapshot_state(self, context):
        pass

    def map(self, value: Number) -> Number:
        self.seen.add(value.value)
        return value


def build(folder: Path, sinks: int) -> Pipeline:
    pipeline = Pipeline("buffering")
    numbers = pipeline.from_source(
        ParquetSource(str(folder / "in"), Number, name="numbers", max_files_per_trigger=1)
    ).uid("numbers")
    buffered = numbers.flat_map(Buffered()).uid("buffered").set_parallelism(3)
    emitted = buffered.map(Seen()).uid("seen").set_parallelism(2)
    emitted.sink_to(KillingSink(str(folder / "all"), mode="append", name="all"))
    if sinks == 2:
        totals = emitted.map(lambda n: (n.value % 3, n.value), output_type=tuple[int, int]).key_by("f0").sum("f1")
        totals.uid("totals").sink_to(KillingSink(str(folder / "totals"), mode="upsert", key="f0", name="totals"))
    return pipeline


if __name__ == "__main__":
    folder, cores, sinks = Path(sys.argv[1]), sys.argv[4], int(sys.argv[5])
    KillingSink.epoch, KillingSink.point = int(sys.argv[2]), sys.argv[3]
    config = {
        "spark.driver.memory": "1g",
        "spark.sql.shuffle.partitions": "2",
        "spark.sql.files.openCostInBytes": "1",  # so that small files are split as large ones are
    }
    spark = session.start(f"local[{cores}]", config=config)
    options = {
        "execution.runtime-mode": "STREAMING",
        "execution.checkpointing.dir": str(folder / "checkpoints"),
        "execution.savepoint.path": str(folder / "savepoint"),
        "pipeline.max-parallelism": 4,
    }
    plan = build(folder, sinks).plan(options)
    sys.stdout.write(StreamingJob(plan, spark, Start(f"job {os.getpid()}", patience=0.5)).run())
