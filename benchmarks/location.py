"""A code location of 500 pipelines, half of them streams: how long it loads, and how long a sensor's tick takes in it.

Loading is what a code server does before it answers: the definitions, and each of their 1,000 jobs. Then it tells the
daemon and the web server of each job, by a snapshot of Dagster's.
"""

from __future__ import annotations

import shutil
import statistics
import tempfile
import time
from pathlib import Path
from typing import NamedTuple

from dagster import DagsterInstance, Definitions, build_sensor_context

from benchmarks.bars import Bar, Measurement, Options
from dagster_unified.api import Pipeline
from dagster_unified.connectors import DeltaSink, ParquetSource
from dagster_unified.orchestration import BatchDeployment, StreamingDeployment, unified_definitions

PIPELINES, TICKS = 500, 20


class Order(NamedTuple):
    shop: str
    amount: int


def measure(options: Options) -> tuple[list[Bar], list[Measurement]]:
    folder = Path(tempfile.mkdtemp(prefix="bench"))
    try:
        loaded, told = [], []
        for _ in range(options.rounds):
            begun = time.perf_counter()
            definitions = unified_definitions(*[_deployment(folder, number) for number in range(PIPELINES)])
            jobs = definitions.resolve_all_job_defs()
            loaded.append(time.perf_counter() - begun)
            for job in jobs:
                job.get_job_snapshot_id()
            told.append(time.perf_counter() - begun - loaded[-1])
        tick = _tick(definitions, folder)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    bars = [
        Bar("location.loaded_seconds", min(loaded), 8, at_most=True),
        Bar("location.told_seconds", min(told), 8, at_most=True),
        Bar("location.tick_seconds", tick, 1, at_most=True),
    ]
    return bars, []


def _deployment(folder: Path, number: int) -> BatchDeployment | StreamingDeployment:
    streaming = bool(number % 2)
    pipeline = Pipeline(f"pipeline_{number}")
    orders = pipeline.from_source(ParquetSource(f"{folder}/in/{number}", Order, name="orders", monitor=streaming))
    orders.key_by("shop").sum("amount").sink_to(DeltaSink(f"{folder}/out/{number}", name="totals"))
    if not streaming:
        return BatchDeployment(pipeline)
    return StreamingDeployment(pipeline, options={"execution.checkpointing.dir": f"{folder}/checkpoints"})


def _tick(definitions: Definitions, folder: Path) -> float:
    """Seconds that a tick of a stream takes, whose job does not run."""
    sensor, taken = definitions.resolve_sensor_def("pipeline_1_streaming_sensor"), []
    with DagsterInstance.local_temp(str(folder)) as instance:
        for _ in range(TICKS):
            context = build_sensor_context(instance, repository_def=definitions.get_repository_def())
            begun = time.perf_counter()
            sensor(context)
            taken.append(time.perf_counter() - begun)
    return statistics.median(taken)
