"""Recovery after a failure, and what Dagster costs.

Each of five stages fails in turn, also with the intermediates before it lost. Through Dagster, in one process, with a
warm session. What is compared is the time from the failure to the result: *re-execute from failure*, running the whole
job again stage by stage, and running it again as one Spark job. What Dagster costs is a run's time beyond that of its
stages: also with each step in a process of its own, over a shared Spark Connect server.
"""

from __future__ import annotations

import os
import shutil
import statistics
import tempfile
import time
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from dagster import (
    AssetMaterialization,
    DagsterInstance,
    JobDefinition,
    ReexecutionOptions,
    execute_job,
    in_process_executor,
    reconstructable,
)
from pyspark.sql import functions as F
from rich.console import Console
from rich.table import Table

from benchmarks.bars import Bar, Measurement, Options
from dagster_unified.api import MapFunction, Pipeline, RuntimeContext
from dagster_unified.connectors import DeltaSink, ParquetSource
from dagster_unified.engine import connect_server, session
from dagster_unified.orchestration import (
    BatchDeployment,
    IntermediatesResource,
    SparkResource,
    process_executor,
    unified_definitions,
)

HOME = Path(os.environ.setdefault("RECOVERY_BENCH", tempfile.mkdtemp(prefix="recovery-bench")))
BROKEN = HOME / "broken"
"""Holds the number of the stage that fails."""

STAGES = 5
PORT = 39_474
QUIET = {"loggers": {"console": {"config": {"log_level": "CRITICAL"}}}}


class R(NamedTuple):
    k: str
    v: int
    ts: int


class Step(MapFunction):
    """What every stage does to a record; fails as it opens where its stage is to."""

    def __init__(self, stage: int) -> None:
        self.stage = stage

    def open(self, context: RuntimeContext) -> None:
        if BROKEN.exists() and BROKEN.read_text() == str(self.stage):
            raise OSError("injected")

    def map(self, value: R) -> R:
        return R(value.k, value.v + 1, value.ts)


def pipeline() -> Pipeline:
    built = Pipeline("bench_recovery")
    stream = built.from_source(ParquetSource(str(HOME / "in"), R, name="numbers")).map(Step(1), output_type=R)
    for stage in range(2, STAGES + 1):
        stream = stream.rebalance().map(Step(stage), output_type=R).name(f"stage{stage}")
    stream.sink_to(DeltaSink(str(HOME / "out"), name="out"))
    return built


def _job(connect: int | None) -> JobDefinition:
    resources = {
        "spark": SparkResource(connect=connect),
        "intermediates": IntermediatesResource(path=str(HOME / "store")),
    }
    executor = in_process_executor if connect is None else process_executor(1)
    return unified_definitions(
        BatchDeployment(pipeline(), retry_policy=None), resources=resources, executor=executor
    ).resolve_job_def("bench_recovery_batch")


def job() -> JobDefinition:
    return _job(None)


def shared_job() -> JobDefinition:
    return _job(PORT)


def measure(options: Options) -> tuple[list[Bar], list[Measurement]]:
    spark = session.start()
    keys = F.concat(F.lit("k"), (F.col("id") % options.keys).cast("string"))
    records = spark.range(0, options.records // 5, 1, 4).select(
        keys.alias("k"), F.col("id").alias("v"), F.col("id").alias("ts")
    )
    records.write.mode("overwrite").parquet(str(HOME / "in"))
    try:
        with tempfile.TemporaryDirectory() as folder, DagsterInstance.local_temp(folder) as instance:
            return _measured(instance, options)
    finally:
        shutil.rmtree(HOME, ignore_errors=True)


def _measured(instance: DagsterInstance, options: Options) -> tuple[list[Bar], list[Measurement]]:
    _run(instance)  # warms the session
    whole, alone, overhead, one_job = [], [], [], []
    for _ in range(options.rounds):
        seconds, stages = _run(instance)
        whole.append(seconds)
        alone.append(list(stages.values())[-1])
        overhead.append((seconds - sum(stages.values())) / STAGES)
        one_job.append(_run(instance, {"execution.batch-shuffle-mode": "ALL_EXCHANGES_PIPELINED"})[0])
    restart, last, single = (statistics.median(x) for x in (whole, alone, one_job))
    table = Table(
        "failure in",
        "re-executed from failure",
        "stages run",
        "and its intermediates lost",
        "stages run",
        "all stages again",
        "as one Spark job again",
    )
    ratio = 0.0
    for stage in range(1, STAGES + 1):
        row, cells = [], []
        for lost in (False, True):
            found = [_recovered(instance, stage, lost) for _ in range(options.rounds)]
            row.append(statistics.median(seconds for seconds, _ in found))
            cells += [f"{row[-1]:.2f} s", str(found[0][1])]
        ratio = row[0] / last
        table.add_row(f"stage {stage}", *cells, f"{restart:.2f} s", f"{single:.2f} s")
    Console().print(table)
    built = time.perf_counter()
    unified_definitions(_long(200)).get_repository_def()
    definitions = time.perf_counter() - built
    bars = [
        Bar("recovery.last_stage_vs_alone", ratio, 1.3, at_most=True),
        Bar("recovery.overhead_per_stage_s", statistics.median(overhead), 0.4, at_most=True),
        Bar("recovery.definitions_of_200_stages_s", definitions, 3.0, at_most=True),
        Bar("recovery.overhead_per_stage_in_processes_s", _in_processes(instance, options), 1.5, at_most=True),
    ]
    return bars, []


def _in_processes(instance: DagsterInstance, options: Options) -> float:
    """Seconds per stage beyond the stages' own, where each step has a process of its own.

    All share one Spark Connect server.
    """
    found = []
    try:
        for number in range(options.rounds + 1):  # the first round starts the server
            begun = time.perf_counter()
            with execute_job(reconstructable(shared_job), instance, run_config=QUIET) as result:
                assert result.success
                seconds = time.perf_counter() - begun
                stages = _durations(e.materialization for e in result.get_asset_materialization_events())
            if number:
                found.append((seconds - sum(stages.values())) / STAGES)
    finally:
        connect_server.stop(PORT)
    return statistics.median(found)


def _run(instance: DagsterInstance, options: Mapping[str, Any] | None = None) -> tuple[float, dict[str, float]]:
    """A whole run's seconds, and those of its stages."""
    config = {"resources": {"execution": {"config": dict(options or {})}}, **QUIET}
    begun = time.perf_counter()
    result = job().execute_in_process(instance=instance, run_config=config)
    seconds = time.perf_counter() - begun
    return seconds, _durations(e.materialization for e in result.get_asset_materialization_events())


def _durations(shown: Iterable[AssetMaterialization]) -> dict[str, float]:
    """The seconds that each stage says it took."""
    values = {
        m.asset_key.path[-1]: m.metadata["duration_seconds"].value for m in shown if "duration_seconds" in m.metadata
    }
    return {name: value for name, value in values.items() if isinstance(value, (int, float))}


def _recovered(instance: DagsterInstance, stage: int, lost: bool) -> tuple[float, int]:
    """Seconds from a failure to the result, and how many stages ran."""
    BROKEN.write_text(str(stage))
    failed = job().execute_in_process(instance=instance, raise_on_error=False, run_config=QUIET)
    BROKEN.unlink()
    assert not failed.success
    if lost:
        shutil.rmtree(HOME / "store", ignore_errors=True)
    begun = time.perf_counter()
    with execute_job(
        reconstructable(job),
        instance,
        run_config=QUIET,
        reexecution_options=ReexecutionOptions.from_failure(failed.run_id, instance),
    ) as again:
        assert again.success
        seconds = time.perf_counter() - begun
        finished = [
            e
            for e in instance.all_logs(again.run_id)
            if " rows, " in e.user_message and e.user_message.startswith("stage ")
        ]
    return seconds, len(finished)


def _long(stages: int) -> Pipeline:
    built = Pipeline("long")
    stream = built.from_source(ParquetSource(str(HOME / "in"), R, name="numbers"))
    for _ in range(stages - 1):
        stream = stream.rebalance().map(Step(0), output_type=R)
    stream.print()
    return built
