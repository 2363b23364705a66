"""Materializations of a stream's tables: each commit is reported once, whatever is killed, and only what was written.

The epochs here come without Spark; `test_stream_downstream.py` has a stream that runs.
"""

import os
import random
import signal
import time
from dataclasses import replace
from datetime import datetime
from functools import cached_property
from typing import NamedTuple

import pytest
from dagster import AssetKey, DagsterInstance, DailyPartitionsDefinition, build_sensor_context

from dagster_unified.api import Pipeline, WatermarkStrategy
from dagster_unified.connectors import DeltaSink
from dagster_unified.engine.events import EpochCommitted, Written
from dagster_unified.engine.streaming.atomic import write_atomically
from dagster_unified.engine.streaming.checkpoint import CheckpointDirectory, Deployed
from dagster_unified.graph.plan import plan
from dagster_unified.operators.metrics import Metrics
from dagster_unified.orchestration import StreamingDeployment, unified_definitions
from dagster_unified.orchestration.deployments import configuration_of
from dagster_unified.orchestration.stream_materializations import JobAssets, StreamMaterializations, report_rest
from dagster_unified.orchestration.stream_partitions import QUARTER
from tests.depth import examples

TABLE, OTHER = AssetKey(["shops", "sales"]), AssetKey(["shops", "other"])
DAYS = DailyPartitionsDefinition("2026-01-01")
ASSETS = JobAssets({"sales": TABLE, "other": OTHER}, {}, AssetKey("savepoint"))


class Sale(NamedTuple):
    shop: str
    amount: int
    at: int


def epoch(number, query="main", version=None, watermark=None, read=None, until=None, **rows):
    """An epoch that has read records of some moments, and after which the tables are complete until a moment."""
    written = {sink: Written(count, count * 10, version) for sink, count in rows.items()}
    units = {millis(moment) // QUARTER: count for moment, count in (read or {}).items()}
    complete = {} if until is None else dict.fromkeys(ASSETS.sinks, millis(until))
    counted = {"event_times": {"timed": units}, "complete_until": complete}
    return EpochCommitted(query, number, 5, 0.1, watermark, Metrics(), written, **counted)


def millis(moment):
    return int(datetime.fromisoformat(f"{moment}+00:00").timestamp() * 1000)


class Stream:
    """A deployment in a folder, and a Dagster instance; its job is a process of its own, or this one."""

    def __init__(self, folder, partitions=None):
        pipeline = Pipeline("shops")
        in_time = WatermarkStrategy.for_monotonous_timestamps().with_timestamp_assigner("at")
        sales = pipeline.from_collection([Sale("north", 1, 0)]).assign_timestamps_and_watermarks(in_time).uid("timed")
        sales.sink_to(DeltaSink(str(folder / "sales"), mode="append", name="sales"))
        sales.sink_to(DeltaSink(str(folder / "other"), mode="append", name="other"))
        options = {"execution.checkpointing.dir": str(folder / "checkpoints")}
        self.deployment = StreamingDeployment(pipeline, options=options, partitions=partitions)
        self.assets = replace(ASSETS, partitions=partitions)
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
        return StreamMaterializations(self.plan, self.directory, deployed, self.assets, instance, log)

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
        report_rest(self.plan, self.directory, self.assets, instance, "tick", instance.report_runless_asset_event)

    def made(self, key=TABLE):
        """The materializations of an asset, the oldest first: their rows and their last epoch."""
        found = self.instance.fetch_materializations(key, limit=50).records[::-1]
        shown = [record.asset_materialization.metadata for record in found]
        return [(metadata["rows written"].value, metadata["epoch"].value) for metadata in shown]

    def days(self, key=TABLE):
        """The partitions of an asset that are materialized, in the order in which they were, and their records."""
        found = self.instance.fetch_materializations(key, limit=50).records[::-1]
        made = [record.asset_materialization for record in found]
        return [(materialization.partition, materialization.metadata["records"].value) for materialization in made]


@pytest.fixture
def stream(tmp_path):
    return Stream(tmp_path)


@pytest.fixture
def daily(tmp_path):
    return Stream(tmp_path, DAYS)


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


def test_a_partition_is_materialized_once_event_time_has_passed_its_end_and_only_where_it_has_rows(daily):
    job = daily.job()
    job.note(epoch(0, read={"2026-01-01T23:59": 2, "2026-01-03T00:00": 1}, until="2026-01-02T00:00", sales=3))
    job.note(epoch(1, read={"2026-01-01T12:00": 4}, until="2026-01-01T20:00"))  # a watermark does not go back
    assert job.report() == 1
    assert (daily.days(), daily.days(OTHER)) == ([("2026-01-01", 6)], [])
    job.note(epoch(2, until="2026-01-09T00:00"))
    assert job.report() == 1
    assert (daily.days(), job.report()) == ([("2026-01-01", 6), ("2026-01-03", 1)], 0)


def test_partitions_that_are_passed_together_are_materialized_in_order(daily):
    job = daily.job()
    read = {f"2026-01-0{day}T08:00": day for day in (5, 2, 4)}
    job.note(epoch(0, read=read, until="2026-02-01T00:00", sales=9))
    job.report()
    assert daily.days() == [("2026-01-02", 2), ("2026-01-04", 4), ("2026-01-05", 5)]


def test_a_partition_that_is_not_there_yet_and_records_outside_all_partitions_wait_or_do_not_count(daily):
    job = daily.job()
    read = {"2025-12-31T23:00": 1, "2026-01-01T08:00": 1, "9999-12-30T00:00": 1}
    job.note(epoch(0, read=read, until="9999-12-31T12:00", sales=3))
    job.report()
    assert (daily.days(), job.late("sales")) == ([("2026-01-01", 1)], {})


def test_records_behind_a_materialized_partition_are_late_and_those_of_one_without_rows_are_not(daily):
    job = daily.job()
    job.note(epoch(0, read={"2026-01-01T08:00": 2}, until="2026-01-04T00:00", sales=2))
    job.report()
    job.note(epoch(1, read={"2026-01-01T09:00": 3, "2026-01-02T09:00": 1}, sales=4))
    job.report()
    assert (daily.days(), job.late("sales")) == ([("2026-01-01", 2), ("2026-01-02", 1)], {"2026-01-01": 3})
    job.note(epoch(2, read={"2026-01-01T09:00": 1}, sales=1))
    assert daily.job().late("sales") == {"2026-01-01": 4}  # as the next job finds it


def test_at_the_end_of_the_input_every_partition_is_complete(daily):
    job = daily.job()
    job.note(epoch(0, read={"2026-01-01T08:00": 2}, until="2026-01-01T07:00", sales=2))
    assert job.report() == 0
    daily.directory.finish()
    daily.tick()
    assert daily.days() == [("2026-01-01", 2)]


def day_before_it_is_reported(kill, daily):
    job = daily.job(log=lambda materialization: kill())
    job.note(epoch(0, read={"2026-01-01T08:00": 2}, until="2026-01-02T00:00", sales=2))
    job.report()


def day_before_it_is_taken_off(kill, daily):
    job = daily.job(log=lambda m: (daily.instance.report_runless_asset_event(m), kill()))
    job.note(epoch(0, read={"2026-01-01T08:00": 2}, until="2026-01-02T00:00", sales=2))
    job.report()


@pytest.mark.parametrize("killed", [day_before_it_is_reported, day_before_it_is_taken_off])
def test_a_kill_leaves_one_materialization_of_a_day(daily, killed):
    daily.killed(lambda kill: killed(kill, daily))
    daily.tick()
    daily.job().note(epoch(0, read={"2026-01-01T08:00": 2}, until="2026-01-02T00:00", sales=2))
    daily.tick()
    assert daily.days() == [("2026-01-01", 2)]


def test_after_going_back_to_a_savepoint_days_behind_it_are_materialized_again(daily):
    job = daily.job()
    job.note(epoch(0, read={"2026-01-01T08:00": 2, "2026-01-02T08:00": 1}, until="2026-01-02T00:00", sales=3))
    job.report()
    folder = daily.directory.path / "reports"
    kept = {file.name: file.read_bytes() for file in folder.iterdir()}
    job.note(epoch(1, until="2026-01-03T00:00"))
    job.report()
    for name, content in kept.items():
        (folder / name).write_bytes(content)
    daily.directory.go_back(daily.directory.deployed(), 0)
    job = daily.job()
    job.note(epoch(1, read={"2026-01-02T09:00": 4}, until="2026-01-03T00:00", sales=4))
    job.report()
    assert daily.days() == [("2026-01-01", 2), ("2026-01-02", 1), ("2026-01-02", 5)]


def test_a_start_without_state_materializes_the_days_that_it_reads_again(daily):
    job = daily.job()
    job.note(epoch(0, read={"2026-01-01T08:00": 2}, until="2026-01-02T00:00", sales=2))
    job.report()
    daily.deploy(fresh=True)
    job = daily.job()
    job.note(epoch(0, read={"2026-01-01T08:00": 2}, until="2026-01-02T00:00", sales=2))
    job.report()
    assert (daily.days(), job.late("sales")) == ([("2026-01-01", 2), ("2026-01-01", 2)], {})


def test_whenever_jobs_are_killed_each_committed_epoch_is_in_one_report(stream):
    """The table and Spark's log are two files here; what is in the first and not in the second runs again."""
    table, log = stream.directory.path / "table", stream.directory.path / "log"
    table.write_text("")
    log.write_text("-1")

    def run():
        job = stream.job()
        while True:
            number = int(log.read_text()) + 1
            committed = table.read_text().split()
            if str(number) not in committed:
                write_atomically(table, " ".join([*committed, str(number)]).encode())
            job.note(epoch(number, sales=1))
            write_atomically(log, str(number).encode())
            if number % 3 == 0:
                job.report()

    for _ in range(examples(6)):
        before = len(table.read_text().split())
        child = os.fork()
        if not child:
            try:
                run()
            finally:
                os._exit(1)
        while len(table.read_text().split()) < before + 3:  # it has started
            time.sleep(0.01)
        time.sleep(random.random() / 5)
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
    last = int(table.read_text().split()[-1])
    stream.job().note(epoch(last, sales=1))  # as the next job does where Spark had not logged it
    stream.tick()
    made = stream.made()
    assert sum(rows for rows, _ in made) == last + 1
    assert [number for _, number in made] == sorted({number for _, number in made})
