"""A real stream under Dagster, in this process, which is drained."""

from collections.abc import Iterable
from typing import NamedTuple

import pytest
from dagster import AssetKey, DagsterInstance, Failure
from deltalake import DeltaTable

from dagster_unified.api import KeyedProcessFunction, Pipeline, ValueStateDescriptor, WatermarkStrategy
from dagster_unified.connectors import CsvSource, DeltaSink
from dagster_unified.engine.streaming.checkpoint import CheckpointDirectory
from dagster_unified.engine.streaming.desired import read_desired
from dagster_unified.orchestration import SparkResource, StreamingDeployment, unified_definitions
from dagster_unified.orchestration.streaming import UPDATED


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
    launched = {"resources": {"execution": {"config": {"execution.checkpointing.dir": str(folder / "launched")}}}}
    with DagsterInstance.ephemeral() as instance:
        drain = {"ops": {"shops_action": {"config": {"action": "drain"}}}}
        assert (
            definitions.resolve_job_def("shops_control")
            .execute_in_process(instance=instance, run_config={**launched, **drain})
            .success
        )
        assert (
            definitions.resolve_job_def("shops_streaming")
            .execute_in_process(instance=instance, run_config=launched)
            .success
        )
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


def test_options_of_the_launch_go_before_those_of_the_deployment(drained):
    folder, _, _ = drained
    assert not (folder / "declared").exists()
    held = CheckpointDirectory(str(folder / "launched"), "shops").deployed()
    assert (held.finished, held.max_parallelism) == (True, 4)


def test_a_drained_job_does_not_read_its_input_once_more(drained):
    folder, instance, definitions = drained
    launched = {"resources": {"execution": {"config": {"execution.checkpointing.dir": str(folder / "launched")}}}}
    actions = [{"ops": {"shops_action": {"config": {"action": a}}}} for a in ("resume", "suspend", "stop")]
    asked = [("shops_control", {**launched, **action}) for action in actions]
    for name, config in (*asked, ("shops_streaming", launched)):
        with pytest.raises(Failure, match="shops was drained: its input has ended"):
            definitions.resolve_job_def(name).execute_in_process(instance=instance, run_config=config)
    assert read_desired(CheckpointDirectory(str(folder / "launched"), "shops")).state == "drained"
    rows = DeltaTable(str(folder / "totals")).to_pyarrow_table().to_pylist()
    assert sorted(tuple(r.values()) for r in rows) == [("north", 5), ("south", 2)]
