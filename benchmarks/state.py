"""What savepoints cost: a value and a timer for each of many keys, written by a STREAMING job, by BATCH, and restored.

Keys are read once. Rates are of keys, over what is done beside reading and processing them: writing the tables of a
stopped job, and the first epoch of a job that starts from them, against one that starts without. No worker may need
much memory for either. Then what a savepoint costs a job that goes on, with an eighth of the keys (`live_state.py`).
"""

from __future__ import annotations

import shutil
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from pyspark.sql import SparkSession

from benchmarks.bars import Bar, Measurement, Options
from benchmarks.live_state import FAR, Number, measured
from benchmarks.worker_memory import peak_of_workers
from dagster_unified.api import KeyedProcessFunction, Pipeline, ValueStateDescriptor
from dagster_unified.connectors import CollectionSource, FileSink, ParquetSource
from dagster_unified.engine import session
from dagster_unified.engine.batch.intermediates import IntermediateStore
from dagster_unified.engine.batch.run import Run
from dagster_unified.engine.batch.savepoint import run_all
from dagster_unified.engine.streaming.job import Start, StreamingJob
from dagster_unified.state import manifest as manifests


class Remember(KeyedProcessFunction[int, Number, Number]):
    """Keeps a value and a timer of each key, and emits nothing."""

    def open(self, runtime_context: Any) -> None:
        self._value = runtime_context.get_state(ValueStateDescriptor("value", int))

    def process_element(self, value: Number, ctx: Any) -> None:
        self._value.update(value.v)
        ctx.timer_service().register_event_time_timer(FAR + value.k)


def measure(options: Options) -> tuple[list[Bar], list[Measurement]]:
    """Save, restore, and a BATCH run with its savepoint against one without, in one session."""
    keys, folder = 2 * options.records, tempfile.mkdtemp(prefix="state")
    config = {"spark.driver.memory": "4g", "spark.sql.shuffle.partitions": "4"}
    spark = session.start("local[2]", config=config)
    try:
        of_savepoints, of_live_job = _measured(spark, folder, keys), measured(spark, Path(folder) / "live", keys // 8)
        return of_savepoints[0] + of_live_job[0], of_savepoints[1] + of_live_job[1]
    finally:
        spark.stop()
        shutil.rmtree(folder, ignore_errors=True)


def _measured(spark: SparkSession, folder: str, keys: int) -> tuple[list[Bar], list[Measurement]]:
    spark.range(0, keys, 1, 4).selectExpr("id k", "id * 3 v").write.parquet(f"{folder}/numbers")
    _batch(spark, folder, "warm up", {})
    plain = _timed(lambda: _batch(spark, folder, "plain", {}))
    leaving = _timed(lambda: _batch(spark, folder, "leaving", {"execution.savepoint.path": f"{folder}/of batch"}))
    saved, saving = _saved(spark, folder)
    empty = _timed(lambda: _started(spark, folder, "without", {}))
    with peak_of_workers() as restoring:
        full = _timed(lambda: _started(spark, folder, "from it", {"execution.state-recovery.path": f"{folder}/saved"}))
    rates = {
        "state.save, M keys/s": keys / saved / 1e6,
        "state.restore, M keys/s": keys / max(full - empty, 1e-3) / 1e6,
    }
    size = sum(one.bytes for one in manifests.read(f"{folder}/saved")[1].operators)
    bars = [
        Bar("state.save: M keys/s", rates["state.save, M keys/s"], 1.0),
        Bar("state.restore: M keys/s", rates["state.restore, M keys/s"], 0.5),
        Bar("state.batch: a BATCH run against one that also writes its state", plain / leaving, 1 / 1.25),
        Bar("state.save: MB of a worker", saving, 300, at_most=True),
        Bar("state.restore: MB of a worker", restoring.megabytes, 300, at_most=True),
    ]
    found = [Measurement(name, rate, (round(rate, 3),)) for name, rate in rates.items()]
    return bars, [*found, Measurement("state.size, bytes a key", size / keys, (round(size / keys, 1),))]


def _timed(run: Callable[[], object]) -> float:
    begun = time.perf_counter()
    run()
    return time.perf_counter() - begun


def _pipeline(source: Any, out: str) -> Pipeline:
    pipeline = Pipeline("remember")
    remembered = pipeline.from_source(source).key_by("k").process(Remember(), output_type=Number).uid("remember")
    remembered.sink_to(FileSink(out, name="out"))
    return pipeline


def _batch(spark: SparkSession, folder: str, name: str, options: dict[str, Any]) -> None:
    pipeline = _pipeline(ParquetSource(f"{folder}/numbers", Number, name="numbers"), f"{folder}/out {name}")
    plan = pipeline.plan({"execution.runtime-mode": "BATCH", **options})
    run_all(Run(plan, spark, IntermediateStore(f"{folder}/store {name}"), name.replace(" ", "-"), name))


class _Job(StreamingJob):
    """A job that measures how long it takes to write its tables, or leaves them out."""

    seconds = megabytes = 0.0
    writes = True

    def _save_tables(self, path: str, reason: str) -> None:
        if self.writes:
            with peak_of_workers() as peak:
                self.seconds = _timed(lambda: StreamingJob._save_tables(self, path, reason))
            self.megabytes = peak.megabytes


def _streaming(pipeline: Pipeline, spark: SparkSession, checkpoints: str, options: dict[str, Any]) -> _Job:
    launched = {"execution.runtime-mode": "STREAMING", "execution.checkpointing.dir": checkpoints, **options}
    return _Job(pipeline.plan(launched), spark, Start("benchmark"))


def _saved(spark: SparkSession, folder: str) -> tuple[float, float]:
    """Seconds to write the tables of a STREAMING job that has read all keys, and the megabytes that a worker needs."""
    pipeline = _pipeline(ParquetSource(f"{folder}/numbers", Number, name="numbers"), f"{folder}/out streaming")
    job = _streaming(pipeline, spark, f"{folder}/checkpoints", {"execution.savepoint.path": f"{folder}/saved"})
    job.run()
    return job.seconds, job.megabytes


def _started(spark: SparkSession, folder: str, name: str, options: dict[str, Any]) -> None:
    """A job over ten records, from its start to the end of its data; its timers do not fire."""
    ten = CollectionSource([Number(n, n) for n in range(10)], Number, "ten")
    options = {
        "execution.savepoint.ignore-unclaimed-state": True,  # of the position: this is another source
        "execution.savepoint.path": f"{folder}/after {name}",
        **options,
    }
    job = _streaming(_pipeline(ten, f"{folder}/out {name}"), spark, f"{folder}/checkpoints {name}", options)
    job.writes = False
    job.run()


if __name__ == "__main__":
    for one in measure(Options(int(sys.argv[1]) // 2, 0, 0, 0, False, 0, 0))[0]:
        print(one)
