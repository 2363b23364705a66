"""The cost of reporting a stream's materializations, beside the time of its epochs.

`python -m benchmarks.stream_reports` notes the epochs of five minutes, one a second, of a stream with two tables, as
its job does after each commit; and then reports them to a Dagster instance. With days as partitions an epoch counts
records by event time as well. It also prints what that count costs a record: where a block's records are all in one
quarter of an hour, and where they are spread over a day. Nothing of Spark runs.
"""

from __future__ import annotations

import random
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import NamedTuple

from dagster import AssetKey, DagsterInstance, DailyPartitionsDefinition

from dagster_unified.api import Pipeline, WatermarkStrategy
from dagster_unified.connectors import DeltaSink
from dagster_unified.engine.events import EpochCommitted, Written
from dagster_unified.engine.streaming.checkpoint import CheckpointDirectory, Deployed
from dagster_unified.graph.plan import plan
from dagster_unified.operators.event_times import by_unit
from dagster_unified.operators.metrics import Metrics
from dagster_unified.orchestration import StreamingDeployment
from dagster_unified.orchestration.deployments import configuration_of
from dagster_unified.orchestration.stream_materializations import JobAssets, StreamMaterializations
from dagster_unified.orchestration.stream_partitions import QUARTER

SECONDS = 300
"""Five minutes, in which a job has an epoch a second."""

DAYS = DailyPartitionsDefinition("2026-01-01")
FIRST_DAY = 20_454
"""That day's number since 1970."""

TABLES = ("sales", "totals")
BLOCK = 10_000
"""Records in a block of Arrow's, as Spark hands it to Python."""

BAR = 0.01
"""The part of the time of its epochs that a stream may spend on reports."""


class Sale(NamedTuple):
    """A record."""

    shop: str
    at: int


def job(folder: Path, instance: DagsterInstance, days: DailyPartitionsDefinition | None) -> StreamMaterializations:
    """Return what a job with two tables, in a folder, reports with."""
    pipeline = Pipeline("shops")
    in_time = WatermarkStrategy.for_bounded_out_of_orderness(timedelta(minutes=1)).with_timestamp_assigner("at")
    sales = pipeline.from_collection([Sale("north", 0)]).assign_timestamps_and_watermarks(in_time).uid("timed")
    for table in TABLES:
        sales.sink_to(DeltaSink(str(folder / table), mode="append", name=table))
    options = {"execution.checkpointing.dir": str(folder / "checkpoints")}
    deployment = StreamingDeployment(pipeline, options=options, partitions=days)
    planned = plan(pipeline.graph(), configuration_of(deployment))
    directory = CheckpointDirectory(str(folder / "checkpoints"), "shops")
    deployed = directory.deploy(Deployed(0, "", "shops", "", 0, 128, 2, "ROCKSDB", {}, {}))
    keys = {table: AssetKey(["shops", table]) for table in TABLES}
    assets = JobAssets(keys, {}, AssetKey("savepoint"), partitions=days)
    return StreamMaterializations(planned, directory, deployed, assets, instance, instance.report_runless_asset_event)


def epoch(number: int) -> EpochCommitted:
    """Return an epoch of a stream which passes midnight on its way."""
    unit = (FIRST_DAY + number // (SECONDS - 10)) * 96 + number % 96
    written = {table: Written(1_000, 50_000, number) for table in TABLES}
    complete = dict.fromkeys(TABLES, (unit // 96) * 96 * QUARTER)
    return EpochCommitted(
        "main",
        number,
        1_000,
        0.5,
        None,
        Metrics(),
        written,
        event_times={"timed": {unit: 1_000}},
        complete_until=complete,
    )


def spent(days: DailyPartitionsDefinition | None) -> float:
    """Return the seconds that a job spends on the reports of five minutes, and print them."""
    with tempfile.TemporaryDirectory() as name, DagsterInstance.local_temp(name) as instance:
        reporting = job(Path(name), instance, days)
        reporting.note(epoch(0))
        notes = []
        for number in range(1, SECONDS):
            begun = time.perf_counter()
            reporting.note(epoch(number))
            notes.append(time.perf_counter() - begun)
        begun = time.perf_counter()
        made = reporting.report()
        reports = time.perf_counter() - begun
    seconds = sum(notes) + reports
    sys.stdout.write(
        f"{'by day' if days else 'whole tables'}: {statistics.median(notes) * 1e3:.2f} ms an epoch, {made} reports in"
        f" {reports * 1e3:.0f} ms; {seconds:.2f} s of {SECONDS}: {seconds / SECONDS:.2%}\n"
    )
    return seconds


def fastest(run: Callable[[], object]) -> float:
    """Return the nanoseconds that a record of a block takes."""
    seconds = []
    for _ in range(300):
        begun = time.perf_counter()
        run()
        seconds.append(time.perf_counter() - begun)
    return min(seconds) / BLOCK * 1e9


def main() -> int:
    """Measure, and return 1 where the bar does not hold."""
    parts = [spent(days) / SECONDS for days in (None, DAYS)]
    for spread, what in ((QUARTER, "one quarter of an hour"), (96 * QUARTER, "a day")):
        first = FIRST_DAY * 96 * QUARTER
        times = [first + random.randrange(spread) for _ in range(BLOCK)]
        extra = fastest(partial(by_unit, times, QUARTER)) - fastest(partial(max, times))
        sys.stdout.write(f"counting records of {what}: {extra:.0f} ns a record more than their latest\n")
    return int(max(parts) > BAR)


if __name__ == "__main__":
    sys.exit(main())
