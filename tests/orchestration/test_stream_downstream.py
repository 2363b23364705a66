"""Assets that follow a stream by automation alone: a real job, its Delta table, and Dagster's own evaluation."""

import os
import signal
import subprocess
import sys
import time
from datetime import timedelta
from pathlib import Path
from threading import Thread
from typing import NamedTuple

import pytest
from dagster import (
    AssetKey,
    AutomationCondition,
    DagsterInstance,
    Definitions,
    asset,
    evaluate_automation_conditions,
)
from deltalake import DeltaTable

from dagster_unified.api import Pipeline
from dagster_unified.connectors import CsvSource, DeltaSink
from dagster_unified.engine.streaming.checkpoint import CheckpointDirectory
from dagster_unified.engine.streaming.desired import ask
from dagster_unified.orchestration import SparkResource, StreamingDeployment, unified_definitions

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

    def __init__(self, folder):
        self.folder, self.instance, self.cursor = folder, DagsterInstance.local_temp(str(folder)), None
        (folder / "in").mkdir()
        pipeline = Pipeline("shops")
        sales = pipeline.from_source(CsvSource(str(folder / "in"), Sale, name="incoming", monitor=True))
        sales.sink_to(DeltaSink(str(folder / "sales"), mode="append"))
        second = timedelta(seconds=1)
        options = {"execution.checkpointing.dir": str(folder / "checkpoints"), "parallelism.default": 2}
        deployment = StreamingDeployment(pipeline, observe_every=second, materialize_every=second, options=options)

        @asset(deps=[TABLE], automation_condition=AutomationCondition.eager())
        def report():
            pass

        stream = unified_definitions(deployment, resources={"spark": SparkResource(master="local[2]")})
        self.definitions = Definitions.merge(stream, Definitions(assets=[report]))

    def drop(self, name, *sales):
        rows = "".join(f"{shop},{amount}\n" for shop, amount in sales)
        (self.folder / f"{name}.csv").write_text(f"shop,amount\n{rows}")
        (self.folder / f"{name}.csv").rename(self.folder / "in" / f"{name}.csv")

    def materialized(self):
        """The metadata of the table's materializations, the oldest first."""
        found = self.instance.fetch_materializations(TABLE, limit=50).records[::-1]
        return [record.asset_materialization.metadata for record in found]

    def observed(self):
        return len(self.instance.fetch_observations(TABLE, limit=50).records)

    def asked_for(self):
        """How many runs of the asset behind the table automation asks for now."""
        result = evaluate_automation_conditions(self.definitions, self.instance, cursor=self.cursor)
        self.cursor = result.cursor
        return result.total_requested

    def run(self, happens):
        failed = []

        def meanwhile():
            try:
                happens()
            except BaseException as error:
                failed.append(error)
            finally:
                ask(CheckpointDirectory(str(self.folder / "checkpoints"), "shops"), state="suspended")

        beside = Thread(target=meanwhile)
        beside.start()
        job = self.definitions.resolve_job_def("shops_streaming")
        assert job.execute_in_process(instance=self.instance).success
        beside.join()
        if failed:
            raise failed[0]


def test_an_eager_asset_follows_a_stream_and_nothing_is_said_where_nothing_was_written(spark, tmp_path):
    shops = Shops(tmp_path)
    assert shops.asked_for() == 0
    shops.drop("one", ("north", 1), ("south", 2))

    def happens():
        until(lambda: len(shops.materialized()) == 1, "the first rows are reported while the job runs")
        assert (shops.asked_for(), shops.asked_for()) == (1, 0)
        until(lambda: shops.observed() >= 1, "an observation")
        observed = shops.observed()
        time.sleep(3)
        assert (len(shops.materialized()), shops.observed()) == (1, observed)
        shops.drop("two", ("west", 3))
        until(lambda: len(shops.materialized()) == 2, "the next row")
        assert shops.asked_for() == 1

    shops.run(happens)
    said = shops.materialized()
    assert [metadata["rows written"].value for metadata in said] == [2, 1]
    versions = [metadata["version"].value for metadata in said]
    assert [DeltaTable(str(tmp_path / "sales"), version=v).to_pyarrow_table().num_rows for v in versions] == [2, 3]
    assert [metadata["read"].data["incoming"]["files"] for metadata in said] == [1, 2]


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
