"""An iteration of a hundred rounds that is killed in round 50 and goes on, against one that is not.

`python -m benchmarks.resumed_iteration PIPE FOLDER [EPOCH]` is one process of it: it says when its session has run a
first job, and what a round took; with an epoch it is killed when that one is committed.
"""

from __future__ import annotations

import os
import signal
import statistics
import subprocess
import sys
import time
from typing import NamedTuple

from pyspark.sql import SparkSession

from benchmarks.bars import Bar
from dagster_unified.api import Pipeline, iterations
from dagster_unified.connectors import FileSink
from dagster_unified.engine import session
from dagster_unified.engine.batch.intermediates import IntermediateStore
from dagster_unified.engine.batch.run import Run
from dagster_unified.engine.batch.savepoint import run_all
from dagster_unified.engine.events import Event, IterationEpochCommitted

ROUNDS, KILLED = 100, 50
WORK = 0.1
"""The seconds that a subtask works in a round."""


def resumed(folder: str) -> list[Bar]:
    """The bar: no more than one round is lost, besides the start of a session."""
    whole = _process(f"{folder}/whole")
    killed = _process(f"{folder}/killed", KILLED)
    again = _process(f"{folder}/killed")
    took, allowed = killed.seconds + again.seconds, whole.seconds + whole.round + again.start
    print(
        f"{ROUNDS} rounds: {whole.seconds:.1f} s; killed in round {KILLED} and resumed: {killed.seconds:.1f} s and"
        f" {again.seconds:.1f} s; a round {whole.round:.2f} s, the start of a session {again.start:.1f} s"
    )
    return [Bar("iterations.resumed_run", took / allowed, 1.0, at_most=True)]


class _Took(NamedTuple):
    seconds: float
    start: float
    round: float


def _process(folder: str, epoch: int | None = None) -> _Took:
    said, pipe = os.pipe()  # of its own: the JVM has the process's output, and outlives it
    command = [sys.executable, "-m", "benchmarks.resumed_iteration", str(pipe), folder]
    begun = time.perf_counter()
    with os.fdopen(said) as lines:
        running = subprocess.Popen([*command, *([] if epoch is None else [str(epoch)])], pass_fds=[pipe])
        os.close(pipe)
        lines.readline()
        start = time.perf_counter() - begun
        median = lines.readline()
    running.wait()
    seconds = time.perf_counter() - begun
    if running.returncode != (0 if epoch is None else -signal.SIGKILL):
        raise RuntimeError(f"{' '.join(command)} ended with {running.returncode}")
    return _Took(seconds, start, float(median or 0))


def _worked(number: int) -> int:
    time.sleep(WORK)
    return number


class Around(iterations.IterationBody):
    """Hands two records on, each in a subtask of its own."""

    def process(self, variables, data):
        same = variables[0].map(_worked)
        ends = same.flat_map(iterations.TerminateOnMaxIter(ROUNDS))
        return iterations.IterationBodyResult([same], [same.filter(lambda n: n < 0)], ends)


def _run(spark: SparkSession, folder: str, epoch: int | None) -> list[float]:
    pipeline = Pipeline("killed")
    numbers = pipeline.from_collection([1, 2], name="numbers").rebalance().map(lambda n: n, int).set_parallelism(2)
    (out,) = iterations.iterate_bounded_streams_until_termination([numbers], [], Around())
    out.sink_to(FileSink(f"{folder}/out"))
    seconds: list[float] = []

    def observe(event: Event) -> None:
        if isinstance(event, IterationEpochCommitted):
            seconds.append(event.epoch.seconds)
            if event.epoch.number == epoch:
                os.kill(os.getpid(), signal.SIGKILL)

    plan = pipeline.plan({"execution.runtime-mode": "BATCH", "parallelism.default": 2})
    run_all(Run(plan, spark, IntermediateStore(f"{folder}/store"), "run", "execution", observe=observe), again=True)
    return seconds


if __name__ == "__main__":
    given = session.start("local[2]", config={"spark.sql.shuffle.partitions": "2"})
    given.range(0, 2, 1, 2).mapInArrow(lambda batches: batches, "id long").collect()
    os.write(int(sys.argv[1]), b"ready\n")
    rounds = _run(given, sys.argv[2], int(sys.argv[3]) if sys.argv[3:] else None)
    os.write(int(sys.argv[1]), f"{statistics.median(rounds)}\n".encode())
    given.stop()
