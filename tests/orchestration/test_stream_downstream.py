"""Assets that follow a stream by automation alone: a real job, its Delta table, and Dagster's own evaluation."""

import os
import signal
import subprocess
import sys
import time
from datetime import datetime, timedelta
from pathlib import Path
from threading import Thread
from typing import NamedTuple

import pytest
from dagster import (
    AssetKey,
    AutomationCondition,
    DagsterInstance,
    DagsterRunStatus,
    DailyPartitionsDefinition,
    Definitions,
    asset,
    build_sensor_context,
    evaluate_automation_conditions,
)
from dagster._core.test_utils import create_run_for_test
from deltalake import DeltaTable

from dagster_unified.api import Pipeline, TumblingEventTimeWindows, WatermarkStrategy
from dagster_unified.connectors import CsvSource, DeltaSink
from dagster_unified.engine.streaming.checkpoint import CheckpointDirectory
from dagster_unified.engine.streaming.desired import ask
from dagster_unified.engine.streaming.reports import read_settled
from dagster_unified.orchestration import BatchDeployment, StreamingDeployment, unified_definitions
from tests.orchestration.support import resources

pytestmark = pytest.mark.spark

TABLE = AssetKey(["shops", "sales"])


class Sale(NamedTuple):
    shop: str
    amount: int


def until(look, what, seconds=300):
    end = time.monotonic() + seconds
    while not (found := look()):
        assert time.monotonic() < end, f"not within {seconds} s: {what}"
        time.sleep(0.2)
    return found


class Shops:
    """A stream from a watched folder to a table, and an asset behind it; `happens` goes on while the job runs."""

    def __init__(self, folder, build, table=TABLE, in_batch=None, **declared):
        self.folder, self.instance, self.cursor = folder, DagsterInstance.local_temp(str(folder)), None
        self.table = table
        (folder / "in").mkdir()
        second = timedelta(seconds=1)
        options = {"execution.checkpointing.dir": str(folder / "checkpoints"), "parallelism.default": 2}
        every = {"observe_every": second, "materialize_every": second}
        pipeline = build(folder)
        deployments = [StreamingDeployment(pipeline, options=options, **every, **declared)]
        if in_batch is not None:
            deployments.append(BatchDeployment(pipeline, **in_batch))
        condition, partitions = AutomationCondition.eager(), declared.get("partitions")
        if partitions is not None:
            condition = condition.without(AutomationCondition.in_latest_time_window())

        @asset(deps=[table], automation_condition=condition, partitions_def=partitions)
        def report():
            pass

        stream = unified_definitions(*deployments, resources=resources(folder))
        self.definitions = Definitions.merge(stream, Definitions(assets=[report]))

    def drop(self, name, header, *rows):
        (self.folder / f"{name}.csv").write_text("\n".join([header, *rows, ""]))
        (self.folder / f"{name}.csv").rename(self.folder / "in" / f"{name}.csv")

    def materialized(self, key=None):
        """A table's materializations, the oldest first."""
        found = self.instance.fetch_materializations(key or self.table, limit=50).records[::-1]
        return [record.asset_materialization for record in found]

    def days(self, key=None):
        return [materialization.partition for materialization in self.materialized(key)]

    def observed(self):
        """The metadata of the table's observations, the oldest first."""
        found = self.instance.fetch_observations(self.table, limit=50).records[::-1]
        return [record.asset_observation.metadata for record in found]

    def asked_for(self):
        """How many runs of the asset behind the table automation asks for now, or of which partitions."""
        result = evaluate_automation_conditions(self.definitions, self.instance, cursor=self.cursor)
        self.cursor = result.cursor
        requested = result.get_requested_partitions(AssetKey("report"))
        return result.total_requested if requested <= {None} else requested

    def run(self, happens):
        failed = []

        def meanwhile():
            try:
                happens()
            except BaseException as error:
                failed.append(error)
            finally:
                ask(CheckpointDirectory(str(self.folder / "checkpoints"), "shops"), state="suspended")

        ask(CheckpointDirectory(str(self.folder / "checkpoints"), "shops"), state="running")
        beside = Thread(target=meanwhile)
        beside.start()
        job = self.definitions.resolve_job_def("shops_streaming")
        assert job.execute_in_process(instance=self.instance).success
        beside.join()
        if failed:
            raise failed[0]


def plain(folder):
    pipeline = Pipeline("shops")
    sales = pipeline.from_source(CsvSource(str(folder / "in"), Sale, name="incoming", monitor=True))
    sales.sink_to(DeltaSink(str(folder / "sales"), mode="append"))
    return pipeline


def test_an_eager_asset_follows_a_stream_and_nothing_is_said_where_nothing_was_written(spark, tmp_path):
    shops = Shops(tmp_path, plain)
    assert shops.asked_for() == 0
    shops.drop("one", "shop,amount", "north,1", "south,2")

    def happens():
        until(lambda: len(shops.materialized()) == 1, "the first rows are reported while the job runs")
        assert (shops.asked_for(), shops.asked_for()) == (1, 0)
        until(shops.observed, "an observation")
        observed = len(shops.observed())
        time.sleep(3)
        assert (len(shops.materialized()), len(shops.observed())) == (1, observed)
        shops.drop("two", "shop,amount", "west,3")
        until(lambda: len(shops.materialized()) == 2, "the next row")
        assert shops.asked_for() == 1

    shops.run(happens)
    said = [materialization.metadata for materialization in shops.materialized()]
    assert [metadata["rows written"].value for metadata in said] == [2, 1]
    versions = [metadata["version"].value for metadata in said]
    assert [DeltaTable(str(tmp_path / "sales"), version=v).to_pyarrow_table().num_rows for v in versions] == [2, 3]
    assert [metadata["read"].data["incoming"]["files"] for metadata in said] == [1, 2]


class Timed(NamedTuple):
    shop: str
    at: datetime
    amount: int


HOURS = AssetKey(["shops", "hours"])
DAYS = DailyPartitionsDefinition("2026-01-01", timezone="Europe/Vienna")


def by_hour(folder):
    pipeline = Pipeline("shops")
    in_time = WatermarkStrategy.for_bounded_out_of_orderness(timedelta(minutes=1)).with_timestamp_assigner("at")
    sales = pipeline.from_source(CsvSource(str(folder / "in"), Timed, name="incoming", monitor=True), in_time)
    sales.sink_to(DeltaSink(str(folder / "sales"), mode="append"))
    hours = sales.key_by("shop").window(TumblingEventTimeWindows.of(timedelta(hours=1))).sum("amount")
    hours.sink_to(DeltaSink(str(folder / "hours"), mode="append"))
    return pipeline


def test_a_daily_asset_follows_day_by_day_as_the_watermark_passes(spark, tmp_path):
    shops, header = Shops(tmp_path, by_hour, partitions=DAYS), "shop,at,amount"
    assert shops.asked_for() == 0

    def rows():
        table = tmp_path / "sales"
        return DeltaTable(str(table)).to_pyarrow_table().num_rows if table.exists() else 0

    def happens():
        # the last of them is on the second in UTC, and on the third in Vienna
        shops.drop("one", header, "north,2026-01-02T10:00:00Z,1", "south,2026-01-02T22:59:00Z,2")
        until(lambda: rows() == 2, "the first rows are in the table")
        time.sleep(2)
        assert (shops.days(), shops.days(HOURS)) == ([], [])
        shops.drop("two", header, "north,2026-01-02T23:30:00Z,4")
        until(lambda: shops.days() and shops.days(HOURS), "the first day has ended")
        assert shops.asked_for() == {"2026-01-02"}
        shops.drop("three", header, "north,2026-01-05T09:00:00Z,8")
        until(lambda: len(shops.days()) == len(shops.days(HOURS)) == 2, "the next day with rows has ended")
        assert shops.asked_for() == {"2026-01-03"}
        shops.drop("four", header, "west,2026-01-02T12:00:00Z,16", "west,2026-01-05T09:30:00Z,32")
        until(lambda: rows() == 6, "the last rows are in the table")

    shops.run(happens)
    assert shops.days() == shops.days(HOURS) == ["2026-01-02", "2026-01-03"]
    assert [materialization.metadata["records"].value for materialization in shops.materialized()] == [2, 1]
    hours = DeltaTable(str(tmp_path / "hours"), version=shops.materialized(HOURS)[0].metadata["version"].value)
    assert sorted(hours.to_pyarrow_table()["amount"].to_pylist()) == [1, 2]
    assert shops.observed()[-1]["late records by partition"].data == {"2026-01-02": 1}


class Hour(NamedTuple):
    shop: str
    hour: datetime
    day: str
    amount: int


def hour_of(sale: Timed) -> Hour:
    return Hour(sale.shop, sale.at.replace(minute=0), f"{sale.at:%Y-%m-%d}", sale.amount)


def replaceable(name, source, tables):
    """Tables in which a run of a day replaces what the stream wrote of it: by key, and by the table's own partition."""
    pipeline = Pipeline(name)
    in_time = WatermarkStrategy.for_bounded_out_of_orderness(timedelta(minutes=1)).with_timestamp_assigner("at")
    hours = pipeline.from_source(source, in_time).map(hour_of)
    hours.sink_to(DeltaSink(str(tables / "sales"), partition_by="day"))
    totals = hours.key_by("shop", "hour").window(TumblingEventTimeWindows.of(timedelta(hours=1))).sum("amount")
    totals.sink_to(DeltaSink(str(tables / "hours"), mode="upsert", key=("shop", "hour")))
    return pipeline


def test_late_records_have_batch_run_their_day_again_and_no_other(spark, tmp_path):
    days = DailyPartitionsDefinition("2026-01-01")
    header, sales = "shop,at,amount", str(tmp_path / "in")

    def monitored(folder):
        source = CsvSource(sales, Timed, name="incoming", monitor=True).partitioned_by("at")
        return replaceable("shops", source, folder)

    shops = Shops(tmp_path, monitored, HOURS, in_batch={"partitions": days}, rerun_late=True)
    sensor = shops.definitions.resolve_sensor_def("shops_late_sensor")

    def asked_to_run():
        with build_sensor_context(shops.instance, repository_def=shops.definitions.get_repository_def()) as context:
            return [(asked.run_key, asked.partition_key) for asked in sensor.evaluate_tick(context).run_requests]

    def happens():
        shops.drop("one", header, "north,2026-01-01T10:00:00Z,1", "north,2026-01-02T10:00:00Z,2")
        shops.drop("two", header, "north,2026-01-03T10:00:00Z,4")
        until(lambda: len(shops.days()) == 2, "two days have ended")
        assert asked_to_run() == []
        shops.drop("three", header, "north,2026-01-01T10:30:00Z,8", "west,2026-01-01T11:00:00Z,16")
        until(lambda: "late records by partition" in shops.observed()[-1], "the late records are counted")

    shops.run(happens)
    assert shops.observed()[-1]["late records by partition"].data == {"2026-01-01": 2}
    asked = asked_to_run()
    assert [partition for _, partition in asked] == ["2026-01-01"]
    assert asked_to_run() == asked  # under the same key, for which Dagster launches one run
    running = create_run_for_test(
        shops.instance,
        job_name="shops_batch",
        status=DagsterRunStatus.STARTED,
        tags={"dagster/partition": "2026-01-01"},
    )
    assert asked_to_run() == []
    shops.instance.report_run_failed(running)
    job = shops.definitions.resolve_job_def("shops_batch")
    assert job.execute_in_process(partition_key="2026-01-01", instance=shops.instance).success
    assert asked_to_run() == []
    assert read_settled(CheckpointDirectory(str(tmp_path / "checkpoints"), "shops")).partitions.keys() == {"2026-01-01"}

    together = replaceable("together", CsvSource(sales, Timed, name="incoming"), tmp_path / "together")
    definitions = unified_definitions(BatchDeployment(together), resources=resources(tmp_path))
    assert definitions.resolve_job_def("together_batch").execute_in_process(instance=shops.instance).success

    def rows(table):
        return sorted(
            map(str, DeltaTable(str(table)).to_pyarrow_table().select(["shop", "hour", "amount"]).to_pylist())
        )

    assert rows(tmp_path / "sales") == rows(tmp_path / "together" / "sales")
    ended = [row for row in rows(tmp_path / "together" / "hours") if "2026, 1, 3" not in row]
    assert rows(tmp_path / "hours") == ended
    shops.drop("four", header, "north,2026-01-03T10:30:00Z,32")
    table = tmp_path / "sales"
    shops.run(lambda: until(lambda: len(rows(table)) == 6, "the next row is in the table"))
    assert "late records by partition" not in shops.observed()[-1]


def test_what_a_killed_job_has_committed_is_reported_by_the_sensor_and_the_next_job_goes_on(tmp_path):
    home = tmp_path / "home"
    home.mkdir()
    environment = {**os.environ, "STREAMING_TEST_FOLDER": str(tmp_path), "DAGSTER_HOME": str(home)}
    (tmp_path / "in").mkdir()

    def drop(name, text):
        (tmp_path / name).write_text(f"shop,amount\n{text}")
        (tmp_path / name).rename(tmp_path / "in" / name)

    def start():
        run = (
            "from dagster import DagsterInstance; from tests.orchestration.streaming_job import defs;"
            " defs.resolve_job_def('sales_streaming').execute_in_process(instance=DagsterInstance.get())"
        )
        root = Path(__file__).parents[2]
        return subprocess.Popen([sys.executable, "-c", run], env=environment, cwd=root, start_new_session=True)

    def amounts():
        table = tmp_path / "totals"
        return DeltaTable(str(table)).to_pyarrow_table()["amount"].to_pylist() if table.exists() else []

    def reported():
        with DagsterInstance.from_config(str(home)) as instance:
            found = instance.fetch_materializations(AssetKey(["sales", "totals"]), limit=50).records[::-1]
            return [record.asset_materialization.metadata["rows written"].value for record in found]

    drop("one.csv", "a,1\nb,2\n")
    job = start()
    directory = CheckpointDirectory(str(tmp_path / "checkpoints"), "sales")
    until(lambda: directory.last_epoch("main") is not None and sorted(amounts()) == [1, 2], "the table has two rows")
    os.killpg(job.pid, signal.SIGKILL)
    job.wait()
    assert reported() == []
    until(lambda: not directory.holder().is_alive(20), "the lease has expired")
    tick = (
        "from dagster import DagsterInstance, build_sensor_context; from tests.orchestration.streaming_job import defs;"
        " sensor = defs.resolve_sensor_def('sales_streaming_sensor');"
        " context = build_sensor_context(DagsterInstance.get(), repository_def=defs.get_repository_def());"
        " print(sensor.evaluate_tick(context))"
    )
    subprocess.run([sys.executable, "-c", tick], env=environment, check=True, cwd=Path(__file__).parents[2])
    assert reported() == [2]
    drop("two.csv", "a,10\n")
    ask(directory, state="drained")
    assert start().wait(300) == 0
    assert sorted(amounts()) == [2, 11]
    assert reported() == [2, 1]
