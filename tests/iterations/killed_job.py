"""A BATCH run of a program with an iteration, in a process of its own that is killed at a point.

`python -m tests.iterations.killed_job FOLDER PROGRAM POINT EPOCH STORE` runs it under one execution. POINT is
`level`, where the driver is killed when a level of the epoch has run, `committed`, where it is when the epoch is, or
`never`. It prints the epoch of each level that it ran, and the result.
"""

import json
import os
import signal
import sys

import pyarrow.parquet as pq

from dagster_unified.connectors import FileSink
from dagster_unified.engine import session
from dagster_unified.engine.batch.intermediates import IntermediateStore
from dagster_unified.engine.batch.run import Run
from dagster_unified.engine.batch.savepoint import run_all
from dagster_unified.engine.events import IterationEpochCommitted, IterationResumed
from dagster_unified.engine.iterations.levels import SparkLevels
from tests.iterations.programs import PROGRAMS


def die():
    os.kill(os.getpid(), signal.SIGKILL)


def run(folder, spark, pipeline, stream, observe=lambda event: None, run_id="run", store=None, **options):
    """The sorted records of an iteration's output, under an execution of that folder."""
    stream.sink_to(FileSink(f"{folder}/out", name="out"))
    plan = pipeline.plan({"execution.runtime-mode": "BATCH", "parallelism.default": 2, **options})
    run_all(Run(plan, spark, IntermediateStore(store or f"{folder}/store"), run_id, "execution", observe=observe))
    rows = pq.read_table(f"{folder}/out").to_pylist()
    return sorted(tuple(row.values()) for row in rows)


def main(folder, program, point, epoch, store):
    run_level, settle = SparkLevels.run, SparkLevels.settle

    def computed(of):
        print("computed", of, flush=True)
        if point == "level" and of == epoch:
            die()

    def run_one(self, level, of, *given):
        found = run_level(self, level, of, *given)
        computed(of)
        return found

    def settle_one(self, of):
        computed(of)
        settle(self, of)

    def observe(event):
        if isinstance(event, IterationEpochCommitted) and point == "committed" and event.epoch.number == epoch:
            die()
        if isinstance(event, IterationResumed):
            print("resumed", event.epoch, flush=True)

    SparkLevels.run, SparkLevels.settle = run_one, settle_one
    spark = session.start("local[2,3]", config={"spark.sql.shuffle.partitions": "2"})
    build, _ = PROGRAMS[program]
    found = run(folder, spark, *build(), observe, store=store)
    print("result", json.dumps(found), flush=True)
    spark.stop()


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], sys.argv[3], int(sys.argv[4]), sys.argv[5])
