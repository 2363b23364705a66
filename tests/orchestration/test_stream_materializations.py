"""Materializations of a stream's tables: each commit is reported once, whatever is killed, and only what was written.

The epochs here come without Spark; `test_stream_downstream.py` has a stream that runs.
"""

import os
from functools import cached_property
from typing import NamedTuple

import pytest
from dagster import AssetKey, DagsterInstance, build_sensor_context

from dagster_unified.api import Pipeline
from dagster_unified.connectors import DeltaSink
from dagster_unified.engine.events import EpochCommitted, Written
from dagster_unified.engine.streaming.checkpoint import CheckpointDirectory, Deployed
from dagster_unified.graph.plan import plan
from dagster_unified.operators.metrics import Metrics
from dagster_unified.orchestration import StreamingDeployment, unified_definitions
from dagster_unified.orchestration.deployments import configuration_of
from dagster_unified.orchestration.stream_materializations import StreamMaterializations, report_rest

TABLE, OTHER = AssetKey(["shops", "sales"]), AssetKey(["shops", "other"])
ASSETS = {"sales": TABLE, "other": OTHER}


class Sale(NamedTuple):
    shop: str
    amount: int


def epoch(number, query="main", version=None, watermark=None, **rows):
    written = {sink: Written(count, count * 10, version) for sink, count in rows.items()}
    return EpochCommitted(query, number, 5, 0.1, watermark, Metrics(), written)


class Stream:
    """A deployment in a folder, and a Dagster instance; its job is a process of its own, or this one."""

    def __init__(self, folder):
        pipeline = Pipeline("shops")
        sales = pipeline.from_collection([Sale("north", 1)])
        sales.sink_to(DeltaSink(str(folder / "sales"), mode="append", name="sales"))
        sales.sink_to(DeltaSink(str(folder / "other"), mode="append", name="other"))
        options = {"execution.checkpointing.dir": str(folder / "checkpoints")}
        self.deployment = StreamingDeployment(pipeline, options=options)
        self.plan = plan(pipeline.graph(), configuration_of(self.deployment))
        (folder / "home").mkdir(exist_ok=True)
        self.home = str(folder / "home")
        self.directory = CheckpointDirectory(str(folder / "checkpoints"), "shops")
        self.deploy()

    def deploy(self, fresh=False, fingerprint="code"):
        code = {"max_parallelism": 4, "tasks": 2, "backend": "ROCKSDB", "lanes": {}, "levels": {}}
        wanted = Deployed(0, "", "shops", fingerprint, 0, **code)
        return self.directory.deploy(wanted, fresh)

    @cached_property
    def instance(self):
        return DagsterInstance.local_temp(self.home)

    def job(self, log=None):
        instance = self.instance
        log = log or instance.report_runless_asset_event
        deployed = self.directory.deployed()
        return StreamMaterializations(self.plan, self.directory, deployed, ASSETS, instance, log)

    def killed(self, run):
        """Run a job in a process of its own, which ends at once where `run` calls what it is given."""
        assert "instance" not in vars(self), "its connections are not for two processes"
        child = os.fork()
        if not child:
            try:
                run(lambda: os._exit(9))
            finally:
                os._exit(1)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 9, "the job was to be killed"

    def tick(self):
        """What the sensor does at its tick, where no job runs."""
        instance = self.instance
        report_rest(self.plan, self.directory, ASSETS, instance, "tick", instance.report_runless_asset_event)

    def made(self, key=TABLE):
        """The materializations of an asset, the oldest first: their rows and their last epoch."""
        found = self.instance.fetch_materializations(key, limit=50).records[::-1]
        shown = [record.asset_materialization.metadata for record in found]
        return [(metadata["rows written"].value, metadata["epoch"].value) for metadata in shown]


@pytest.fixture
def stream(tmp_path):
    return Stream(tmp_path)


def test_rows_of_several_epochs_are_one_report_and_a_table_without_rows_has_none(stream):
    job = stream.job()
    for number, rows in enumerate([3, 0, 4]):
        job.note(epoch(number, version=number, watermark=60_000, sales=rows))
    assert stream.made() == []
    assert (job.report(), job.report()) == (1, 0)
    assert (stream.made(), stream.made(OTHER)) == ([(7, 2)], [])
    job.note(epoch(3, sales=0))
    assert job.report() == 0
    (latest,) = stream.instance.fetch_materializations(TABLE, limit=1).records
    said = latest.asset_materialization.metadata
    assert (said["version"].value, said["watermark"].value) == (2, "1970-01-01 00:01:00+00:00")


def test_two_queries_count_their_epochs_apart(stream):
    job = stream.job()
    job.note(epoch(4, "main", sales=3))
    job.note(epoch(0, "other", other=2))
    assert job.report() == 2
    assert (stream.made(), stream.made(OTHER)) == ([(3, 4)], [(2, 0)])


def before_it_is_noted(stream):
    return lambda kill: (stream.job().note(epoch(0, sales=3)), kill())


def before_it_is_reported(stream):
    def run(kill):
        job = stream.job(log=lambda materialization: kill())
        job.note(epoch(0, sales=3))
        job.report()

    return run


def before_the_report_is_taken_off(stream):
    def run(kill):
        job = stream.job(log=lambda m: (stream.instance.report_runless_asset_event(m), kill()))
        job.note(epoch(0, sales=3))
        job.report()

    return run


@pytest.mark.parametrize("killed", [before_it_is_noted, before_it_is_reported, before_the_report_is_taken_off])
@pytest.mark.parametrize("goes_on", ["the next job", "the sensor"])
def test_a_kill_between_commit_and_report_leaves_one_report(stream, killed, goes_on):
    stream.killed(killed(stream))
    if goes_on == "the sensor":
        stream.tick()
        assert stream.made() == [(3, 0)]
    job = stream.job()
    assert job.are_left == (goes_on == "the next job")
    job.report()
    job.note(epoch(0, sales=3))  # Spark had not logged it, and runs it again: the sink has it already
    job.note(epoch(1, sales=2))
    job.report()
    stream.tick()
    assert stream.made() == [(3, 0), (2, 1)]


def test_what_is_noted_while_a_report_is_made_belongs_to_the_next(stream):
    meanwhile = [epoch(1, sales=5)]

    def log(materialization):
        stream.instance.report_runless_asset_event(materialization)
        while meanwhile:
            job.note(meanwhile.pop())

    job = stream.job(log)
    job.note(epoch(0, sales=3))
    job.report()
    job.report()
    assert stream.made() == [(3, 0), (5, 1)]


def test_the_sensor_reports_nothing_while_a_job_holds_the_lease(stream):
    with stream.directory.take("a job", 20):
        stream.job().note(epoch(0, sales=3))
        stream.tick()
        assert stream.made() == []
    stream.tick()
    assert stream.made() == [(3, 0)]


def test_a_start_without_state_reports_what_was_before_and_counts_epochs_anew(stream):
    stream.job().note(epoch(7, sales=3))
    stream.deploy(fresh=True)
    job = stream.job()
    job.note(epoch(0, sales=2))
    job.report()
    assert stream.made() == [(3, 7), (2, 0)]


def test_epochs_after_going_back_to_a_savepoint_are_reported_again(stream):
    job = stream.job()
    job.note(epoch(0, sales=3))
    job.report()
    job.note(epoch(1, sales=2))
    job.report()
    taken = stream.directory.path / "reports"
    kept = {file.name: file.read_bytes() for file in taken.iterdir()}
    job.note(epoch(2, sales=4))
    job.report()
    for name, content in kept.items():
        (taken / name).write_bytes(content)
    stream.directory.go_back(stream.directory.deployed(), 0)
    job = stream.job()
    job.note(epoch(2, sales=5))
    job.report()
    assert stream.made() == [(3, 0), (2, 1), (4, 2), (5, 2)]


def test_a_tick_of_the_sensor_reports_what_a_killed_job_has_left(stream):
    lease = stream.directory.take("a job", 20)
    stream.job().note(epoch(0, sales=3))
    lease.release()
    definitions = unified_definitions(stream.deployment)
    sensor = definitions.resolve_sensor_def("shops_streaming_sensor")
    for _ in range(2):
        with build_sensor_context(stream.instance, repository_def=definitions.get_repository_def()) as context:
            sensor.evaluate_tick(context)
    assert stream.made() == [(3, 0)]
