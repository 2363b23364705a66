"""A stream starts where the machine is busy, though Spark waits ten seconds for some of its Python processes."""

import os
import subprocess
import sys
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import pytest

from dagster_unified.api import Pipeline
from dagster_unified.engine.events import EpochCommitted
from dagster_unified.engine.streaming.job import Start, StreamingJob

PROGRAM = """
from dagster_unified.api import Pipeline

if __name__ == "__main__":
    pipeline = Pipeline("numbers")
    pipeline.from_collection([3, 4], int).key_by(lambda n: 0, key_type=int).sum().print("out")
    options = {"execution.runtime-mode": "STREAMING", "execution.checkpointing.dir": "checkpoints"}
    pipeline.execute({**options, "pipeline.max-parallelism": 1}, master="local[1]", progress=True).result()
"""

SLOW = """
import pathlib, sys, time
left = pathlib.Path({left!r})
if "pyspark.sql.streaming.transform_with_state_driver_worker" in sys.orig_argv and (starts := int(left.read_text())):
    left.write_text(str(starts - 1))
    time.sleep(11)
"""
"""Python runs it at the start of every process: some take longer than Spark waits."""


@contextmanager
def busy(processes):
    """Give a function that ends them before the context does."""
    running = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(processes)]

    def end():
        for process in running:
            process.kill()
            process.wait()

    try:
        yield end
    finally:
        end()


@pytest.mark.rotates("processes")
@pytest.mark.spark
def test_a_stream_starts_again_when_one_of_its_processes_was_slow(tmp_path):
    (tmp_path / "job.py").write_text(PROGRAM)
    left = tmp_path / "left"
    left.write_text("1")
    (tmp_path / "sitecustomize.py").write_text(SLOW.format(left=str(left)))
    done = subprocess.run(
        [sys.executable, "job.py"],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(tmp_path), "COLUMNS": "400"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert left.read_text() == "0", done.stderr
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == ["out> 3", "out> 7"]
    delayed = [line for line in done.stderr.splitlines() if "did not answer within Spark's ten seconds" in line]
    assert len(delayed) == 1
    assert delayed[0].startswith("numbers: 'main' could not start")
    assert delayed[0].endswith("starting again in 1 s (attempt 2 of 8)")
    assert "Traceback" not in done.stderr


def test_a_stream_starts_beside_eight_busy_processes(spark, tmp_path):
    pipeline = Pipeline("numbers")
    pipeline.from_collection([3, 4], int).key_by(lambda n: 0, key_type=int).sum().print("out")
    options = {"execution.runtime-mode": "STREAMING", "execution.checkpointing.dir": str(tmp_path)}
    plan = pipeline.plan({**options, "pipeline.max-parallelism": 1})
    with busy(processes=8) as end:
        started = partial(_when_started, end)
        assert StreamingJob(plan, spark, Start("test"), started).run() == "finished"


def _when_started(then, event):
    if isinstance(event, EpochCommitted):
        then()


def test_sparks_python_processes_find_no_zipped_copy_of_pyspark(spark):
    path = spark.sparkContext._jvm.org.apache.spark.api.python.PythonUtils.sparkPythonPath()
    zipped = [entry for entry in path.split(os.pathsep) if entry.endswith(".zip")]
    assert len(zipped) == 2
    assert not any(Path(entry).exists() for entry in zipped)
