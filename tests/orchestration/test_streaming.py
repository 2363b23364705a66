"""A stream under Dagster: what an observation of a sink's asset says, and one in this process that is drained."""

from base64 import b64decode
from collections.abc import Iterable
from dataclasses import replace
from typing import NamedTuple

import pytest
from dagster import AssetKey, DagsterInstance, Failure
from deltalake import DeltaTable

from dagster_unified.api import KeyedProcessFunction, Pipeline, ValueStateDescriptor, WatermarkStrategy
from dagster_unified.connectors import CsvSource, DeltaSink
from dagster_unified.engine.events import EpochCommitted, Written
from dagster_unified.engine.streaming.checkpoint import CheckpointDirectory
from dagster_unified.engine.streaming.desired import read_desired, read_status
from dagster_unified.operators.metrics import Metrics
from dagster_unified.orchestration import SparkResource, StreamingDeployment, unified_definitions
from dagster_unified.orchestration.phases import PHASE
from dagster_unified.orchestration.stream_materializations import UPDATED
from dagster_unified.orchestration.streaming import Trend
from tests.orchestration.support import launched_with


def epoch(number, rows, seconds, sink="a", late=0, watermark=None):
    metrics = Metrics({"late records": late} if late else {})
    return EpochCommitted(
        "main",
        number,
        rows,
        seconds,
        watermark,
        metrics,
        {sink: Written(3, 10)},
        7,
        700,
    )


def test_rates_state_watermark_and_late_records():
    now = [10_000]
    trend = Trend({}, lambda: now[0])
    assert trend.metadata("a") is None
    trend.add(epoch(0, 100, 1.0))
    assert trend.metadata("a")["late records"] == 0
    now[0] = 18_000
    trend.add(epoch(1, 800, 1.0, late=3, watermark=15_000))
    trend.add(epoch(0, 5_000, 9.0, sink="b"))
    now[0] = 19_000
    said = trend.metadata("a")
    assert (said["epoch"], said["input rows per second"], said["processed rows per second"]) == (1, 90.0, 450.0)
    assert (
        said["late records"],
        said["rows written"],
        said["bytes written"],
        said["state rows"],
        said["state bytes"],
        said["watermark lag (s)"],
    ) == (3, 6, 20, 7, 700, 4.0)
    assert said["watermark"].value == "1970-01-01 00:00:15+00:00"
    assert said["batch durations"].value == "▁▁█"


def test_the_files_that_lack_a_column_are_named_for_every_sink_as_long_as_the_job_runs():
    trend = Trend({}, lambda: 10_000)
    trend.add(epoch(0, 100, 1.0))
    assert "files of sales without column 'amount'" not in trend.metadata("a")
    trend.add(replace(epoch(0, 100, 1.0, sink="b"), lacking={"files of sales without column 'amount'": "1: 0.parquet"}))
    for sink in ("a", "b"):
        assert trend.metadata(sink)["files of sales without column 'amount'"] == "1: 0.parquet"


def test_of_state_nothing_is_said_before_it_is_known():
    trend = Trend({}, lambda: 10_000)
    trend.add(replace(epoch(0, 100, 1.0), state_rows=None, state_bytes=None))
    assert {"state rows", "state bytes"}.isdisjoint(trend.metadata("a"))


def test_an_observation_says_when_rows_were_last_written_also_by_an_earlier_run():
    now = [10_000]
    trend = Trend({"a": 4_000, "b": 5_000}, lambda: now[0])
    trend.add(replace(epoch(0, 0, 1.0), written={"a": Written(0, 0)}))
    assert trend.metadata("a")[UPDATED].value == 4.0
    now[0] = 11_000
    trend.add(epoch(1, 100, 1.0))
    now[0] = 19_000
    assert (trend.metadata("a")[UPDATED].value, trend.metadata("b")[UPDATED].value) == (11.0, 5.0)
    assert UPDATED not in trend.metadata("c")


class Sale(NamedTuple):
    shop: str
    at: int
    amount: int


class Total(NamedTuple):
    shop: str
    amount: int


class AtTheEnd(KeyedProcessFunction):
    """Gives a shop's total when its timer fires, an hour after its first sale."""

    def open(self, context):
        self.total = context.get_state(ValueStateDescriptor("total", int))
        group = context.get_metrics_group()
        self.sales, self.amounts = group.counter("sales"), group.distribution("amounts")
        group.gauge("attempt", context.get_attempt_number)

    def process_element(self, value: Sale, ctx) -> Iterable[Total]:
        self.sales.inc()
        self.amounts.update(value.amount)
        ctx.timer_service().register_event_time_timer(3_600_000)
        self.total.update((self.total.value() or 0) + value.amount)
        return []

    def on_timer(self, timestamp, ctx) -> Iterable[Total]:
        yield Total(ctx.get_current_key(), self.total.value())


@pytest.fixture(scope="module")
def drained(spark, tmp_path_factory):
    """The folder and the instance of a job that was drained."""
    folder = tmp_path_factory.mktemp("drained")
    (folder / "in").mkdir()
    (folder / "in" / "1.csv").write_text("shop,at,amount\nnorth,1000,1\nsouth,2000,2\nnorth,61000,4\n")
    pipeline = Pipeline("shops")
    in_time = WatermarkStrategy.for_monotonous_timestamps().with_timestamp_assigner("at")
    sales = pipeline.from_source(CsvSource(str(folder / "in"), Sale, monitor=True), in_time)
    sales.key_by("shop").process(AtTheEnd()).sink_to(DeltaSink(str(folder / "totals"), mode="append"))
    declared = {
        "execution.checkpointing.dir": str(folder / "declared"),
        "pipeline.max-parallelism": 4,
        "parallelism.default": 2,
    }
    definitions = unified_definitions(
        pipeline, StreamingDeployment(pipeline, options=declared), resources={"spark": SparkResource(master="local[2]")}
    )
    launched = launched_with({"execution.checkpointing.dir": str(folder / "launched")})
    with DagsterInstance.ephemeral() as instance:
        drain = {"ops": {"shops_action": {"config": {"action": "drain"}}}}
        for job, config in (("shops_control", {**launched, **drain}), ("shops_streaming", launched)):
            done = definitions.resolve_job_def(job).execute_in_process(instance=instance, run_config=config)
            assert done.success
        yield folder, instance, definitions


def test_draining_processes_what_has_arrived_fires_the_timers_and_ends_the_job(drained):
    folder, _, _ = drained
    rows = DeltaTable(str(folder / "totals")).to_pyarrow_table().to_pylist()
    assert sorted(tuple(r.values()) for r in rows) == [("north", 5), ("south", 2)]


def test_the_event_log_says_what_the_job_does_until_its_first_epoch(drained):
    _, instance, _ = drained
    (run,) = [run for run in instance.get_runs() if run.job_name == "shops_streaming"]
    messages = [entry.user_message for entry in instance.all_logs(run.run_id)]
    phases = [
        "starting Spark",
        "restoring state: there is none yet",
        "starting query main",
        "query main is working on epoch 0",
    ]
    assert [message for message in messages if message in phases] == phases


def test_a_run_says_in_its_tag_and_in_the_status_file_in_which_phase_it_is(drained):
    folder, instance, _ = drained
    (run,) = [run for run in instance.get_runs() if run.job_name == "shops_streaming"]
    status = read_status(CheckpointDirectory(str(folder / "launched"), "shops"))
    assert (run.tags[PHASE], status.phase) == ("draining", "draining")


def test_the_event_log_has_observations_of_the_sinks_asset(drained):
    _, instance, _ = drained
    observed = instance.fetch_observations(AssetKey(["shops", "totals"]), limit=1).records[0].asset_observation.metadata
    assert observed["late records"].value == 0
    assert {n: observed[f"AtTheEnd.{n}"].value for n in ("sales", "amounts (count)", "amounts (max)", "attempt")} == {
        "sales": 3,
        "amounts (count)": 3,
        "amounts (max)": 4.0,
        "attempt": 0,
    }
    assert {
        "input rows per second",
        "batch duration (s)",
        "batch durations",
        "watermark",
        "watermark lag (s)",
        "state rows",
        "bytes written",
        UPDATED,
    } <= observed.keys()
    assert observed["phase"].value == "draining"
    drawn = b64decode(observed["operators"].value.partition("base64,")[2].rstrip(")")).decode()
    below_source = drawn.partition("source ")[2].splitlines()[1]
    assert "/s read" in below_source
    rows = [record.data["rows in"] for record in observed["last epochs"].records]
    assert sum(rows) == 3


def test_options_of_the_launch_go_before_those_of_the_deployment(drained):
    folder, _, _ = drained
    assert not (folder / "declared").exists()
    held = CheckpointDirectory(str(folder / "launched"), "shops").deployed()
    assert (held.finished, held.max_parallelism) == (True, 4)


def test_a_drained_job_does_not_read_its_input_once_more(drained):
    folder, instance, definitions = drained
    launched = launched_with({"execution.checkpointing.dir": str(folder / "launched")})
    actions = [{"ops": {"shops_action": {"config": {"action": a}}}} for a in ("resume", "suspend", "stop")]
    asked = [("shops_control", {**launched, **action}) for action in actions]
    for name, config in (*asked, ("shops_streaming", launched)):
        with pytest.raises(Failure, match="shops was drained: its input has ended"):
            definitions.resolve_job_def(name).execute_in_process(instance=instance, run_config=config)
    assert read_desired(CheckpointDirectory(str(folder / "launched"), "shops")).state == "drained"
    rows = DeltaTable(str(folder / "totals")).to_pyarrow_table().to_pylist()
    assert sorted(tuple(r.values()) for r in rows) == [("north", 5), ("south", 2)]
