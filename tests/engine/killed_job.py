"""A streaming job that kills itself at a point of an epoch, as `kill -9` would.

`python -m tests.engine.killed_job FOLDER EPOCH POINT`; POINT is `before` a sink writes, `staged` when its files are
written and not committed, `committed` when they are, or `never`.
"""

import os
import signal
import sys
from datetime import timedelta
from pathlib import Path
from typing import NamedTuple

from dagster_unified.api import Pipeline, WatermarkStrategy
from dagster_unified.connectors import DeltaSink, ParquetSource
from dagster_unified.engine import session
from dagster_unified.engine.streaming.job import Start, StreamingJob


class Row(NamedTuple):
    key: str
    at: int
    value: int


def add(a: Row, b: Row) -> Row:
    return Row(a.key, max(a.at, b.at), a.value + b.value)


def die():
    os.kill(os.getpid(), signal.SIGKILL)


class KillingSink(DeltaSink):
    """A Delta sink whose process dies."""

    epoch, point, seen = 0, "never", 0

    @property
    def now(self):
        return self.point if KillingSink.seen >= self.epoch else "never"

    def stage(self, frame, attempts, ship):
        KillingSink.seen += 1
        if self.now == "before":
            die()
        staged = super().stage(frame, attempts, ship)
        if self.now == "staged":
            die()
        return staged

    def committer(self, schema):
        committer = super().committer(schema)
        commit = committer.commit

        def commit_and_die(commits):
            commit(commits)
            if self.now == "committed":
                die()

        committer.commit = commit_and_die
        return committer


OPTIONS = {"execution.runtime-mode": "STREAMING", "pipeline.max-parallelism": 4}


def build(folder: Path, target: Path) -> Pipeline:
    pipeline = Pipeline("killed")
    by_at = WatermarkStrategy.for_bounded_out_of_orderness(timedelta(milliseconds=100)).with_timestamp_assigner("at")
    rows = pipeline.from_source(
        ParquetSource(str(folder / "in"), Row, name="rows", max_files_per_trigger=1)
    ).assign_timestamps_and_watermarks(by_at)
    rows.sink_to(KillingSink(str(target / "all"), mode="append", name="all"))
    rows.key_by("key").reduce(add).uid("totals").sink_to(
        KillingSink(str(target / "totals"), mode="upsert", key="key", name="totals")
    )
    return pipeline


if __name__ == "__main__":
    folder = Path(sys.argv[1])
    KillingSink.epoch, KillingSink.point = int(sys.argv[2]), sys.argv[3]
    spark = session.start("local[2]", config={"spark.driver.memory": "1g", "spark.sql.shuffle.partitions": "2"})
    options = {**OPTIONS, "execution.checkpointing.dir": str(folder / "checkpoints")}
    sys.stdout.write(
        StreamingJob(build(folder, folder).plan(options), spark, Start(f"job {os.getpid()}", patience=0.5)).run()
    )
