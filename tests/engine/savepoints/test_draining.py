"""Savepoints of jobs that are drained: the input ends, all timers fire, and the savepoint is what is left."""

import os
import time
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from itertools import count
from pathlib import Path
from threading import Event
from typing import NamedTuple

import msgspec
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from deltalake import DeltaTable
from pyspark.sql import functions as F

from dagster_unified.api import Pipeline, TumblingEventTimeWindows, WatermarkStrategy
from dagster_unified.connectors import DeltaSink, ParquetSource
from dagster_unified.engine.events import EpochCommitted
from dagster_unified.engine.streaming.checkpoint import CheckpointDirectory
from dagster_unified.engine.streaming.control import ControlFile
from dagster_unified.engine.streaming.desired import read_desired
from dagster_unified.engine.streaming.draining import Draining
from dagster_unified.engine.streaming.job import Start, StreamingJob
from dagster_unified.engine.streaming.query import Query
from dagster_unified.engine.streaming.savepoints.copy import restore_stopped, savepoints
from dagster_unified.engine.streaming.savepoints.request import take
from dagster_unified.errors import StateError, UnifiedError
from dagster_unified.state import Savepoint
from tests.engine.savepoints.shops import FIRST, MORE, Sale
from tests.engine.savepoints.shops import shops as pipeline_of_shops


class Total(NamedTuple):
    shop: str
    amount: int


WINDOWS = {("a", 5), ("b", 2), ("a", 8)}


class Shops:
    """Totals of windows, and running totals beside them, of a folder of files."""

    def __init__(self, spark, folder):
        self.spark, self.folder = spark, folder
        (folder / "in").mkdir(exist_ok=True)

    def directory(self, name):
        return CheckpointDirectory(f"{self.folder}/{name}", "shops")

    def arrive(self, name, sales):
        staged = self.folder / f"in/.{name}"
        pq.write_table(pa.Table.from_pylist([sale._asdict() for sale in sales]), staged)
        os.rename(staged, self.folder / f"in/{name}.parquet")

    def plan(self, name, **options):
        return pipeline_of_shops(str(self.folder), name).plan(
            {
                "execution.runtime-mode": "STREAMING",
                "execution.checkpointing.dir": f"{self.folder}/{name}",
                "pipeline.max-parallelism": 2,
                **options,
            }
        )

    def drained(self, name, path, **options):
        """Run a job, drain it with a savepoint once it has committed an epoch with rows, and give that."""
        stopped, read = Event(), Event()

        def observe(event):
            if isinstance(event, EpochCommitted) and event.rows_in:
                read.set()

        job = StreamingJob(self.plan(name, **options), self.spark, Start("job", patience=0.5), observe)
        with ThreadPoolExecutor(1) as thread:
            running = thread.submit(job.run, stopped.is_set, 0.02)
            try:
                while not read.wait(0.2):
                    assert not running.done(), running.result()
                taken = self.take(name, path)
                assert running.result() == "finished"
            finally:
                stopped.set()
        return taken

    def drained_while_busy(self, name):
        """Run a job into whose folder another file comes with each epoch, and drain it."""
        numbers = count()
        stops = time.monotonic() + 120

        def observe(event):
            if isinstance(event, EpochCommitted):
                number = next(numbers)
                self.arrive(f"{name} {number}", [Sale("a", 6_000 + number * 700, 16 << number)])
                if number == 3:
                    job.drain()

        self.arrive(f"{name} first", FIRST)
        job = StreamingJob(self.plan(name), self.spark, Start("job", patience=0.5), observe)
        assert job.run(lambda: time.monotonic() > stops, 0.02) == "finished"

    def take(self, name, path):
        return take(self.plan(name), self.directory(name), "asker", "test", lambda: self.spark, path, "drained")

    def rows(self, table):
        found = DeltaTable(f"{self.folder}/{table}").to_pyarrow_table().to_pylist()
        rows = {(row["shop"], row["amount"]) for row in found}
        assert len(rows) == len(found)  # nothing is there twice
        return rows


@pytest.fixture
def shops(spark, tmp_path):
    return Shops(spark, tmp_path)


def totals(path):
    return {row["shop"]: row["value"]["amount"] for row in Savepoint.read(path).rows("totals")}


def test_a_job_is_drained_with_a_savepoint_from_which_another_starts(shops):
    shops.arrive("1", FIRST)
    path = f"{shops.folder}/drained"
    taken = shops.drained("first", path)
    directory = shops.directory("first")
    assert (taken.tables, taken.error) == (path, "")
    assert (read_desired(directory).state, directory.deployed().finished) == ("drained", True)
    assert shops.rows("first windows") == WINDOWS
    assert totals(path) == {"a": 13, "b": 2}
    assert list(Savepoint.read(path).rows("windows")) == []
    assert Savepoint.read(path).positions["sales"].count == 1

    (made,) = savepoints(directory)
    assert made == taken.savepoint
    assert made.describe().endswith(f"(test), drained, tables in {path}")
    with pytest.raises(StateError, match=r"was taken where the input had come to its end, .* start another job from"):
        restore_stopped(directory, "asker", None)

    spark_log = directory.path / "spark" / "main"
    begun = spark_log / "offsets" / str(directory.last_epoch("main") + 1)
    begun.write_bytes((spark_log / "offsets" / str(directory.last_epoch("main"))).read_bytes())
    again = shops.take("first", "")  # as after a crash before the answer, with an epoch begun and not run
    assert totals(again.tables) == {"a": 13, "b": 2}

    shops.arrive("2", MORE)
    shops.drained("second", "", **{"execution.state-recovery.path": path})
    assert shops.rows("second totals") == {("a", 29), ("b", 34)}
    assert shops.rows("second windows") == {("a", 16), ("b", 32)}


def test_the_end_of_the_input_comes_also_where_the_end_of_the_data_was_to_leave_a_savepoint(shops):
    shops.arrive("1", FIRST)
    left = f"{shops.folder}/left"
    taken = shops.drained("first", "", **{"execution.savepoint.path": left})
    assert shops.rows("first windows") == WINDOWS
    for path in (left, taken.tables):
        assert totals(path) == {"a": 13, "b": 2}
        assert list(Savepoint.read(path).rows("windows")) == []


def test_a_job_is_drained_though_records_never_cease_to_come_and_what_it_has_read_is_in_its_windows(shops):
    shops.drained_while_busy("first")
    taken = shops.take("first", "")
    read = totals(taken.tables)
    windows = shops.rows("first windows")
    assert sum(amount for shop, amount in windows if shop == "a") == read["a"] >= 13 + 16 + 32 + 64 + 128
    shops.arrive("end", [Sale("a", 10_000_000, 0)])
    shops.drained("second", "", **{"execution.state-recovery.path": taken.tables})
    left = sum(amount for shop, amount in shops.rows("second windows") if shop == "a")
    came = sum(row["amount"] for row in pq.read_table(f"{shops.folder}/in").to_pylist() if row["shop"] == "a")
    assert read["a"] + left == came


@pytest.mark.rotates("kills")
def test_a_job_that_was_killed_after_the_end_of_its_input_reads_no_more(shops, monkeypatch):
    shops.arrive("1", FIRST)

    def killed(directory):
        raise OSError("killed")

    with monkeypatch.context() as patched:
        patched.setattr(CheckpointDirectory, "finish", killed)
        job = StreamingJob(shops.plan("first"), shops.spark, Start("job", patience=0.5))
        job.drain()
        with pytest.raises(OSError, match="killed"):
            job.run()
    directory = shops.directory("first")
    directory.settle(False)
    ended = directory.last_epoch("main")
    shops.arrive("2", MORE)
    assert StreamingJob(shops.plan("first"), shops.spark, Start("job", patience=0.5)).run() == "finished"
    assert (directory.deployed().finished, directory.last_epoch("main")) == (True, ended)
    taken = shops.take("first", "")
    assert Savepoint.read(taken.tables).positions["sales"].count == 1
    assert shops.rows("first windows") == WINDOWS


@pytest.mark.rotates("kills")
def test_a_job_that_was_killed_before_the_epoch_of_the_end_of_its_input_runs_that_one(shops):
    shops.arrive("1", FIRST)
    stopped = Event()

    def observe(event):
        if isinstance(event, EpochCommitted) and event.rows_in:
            stopped.set()

    job = StreamingJob(shops.plan("first"), shops.spark, Start("job", patience=0.5), observe)
    assert job.run(stopped.is_set, 0.02) == "stopped"
    control = ControlFile(f"{shops.directory('first').path}/control/main")
    before = control.read()
    control.write(msgspec.structs.replace(before, number=before.number + 1, end=True))
    shops.arrive("2", MORE)
    assert StreamingJob(shops.plan("first"), shops.spark, Start("job", patience=0.5)).run() == "finished"
    taken = shops.take("first", "")
    more = {("a", 16), ("b", 32)} if Savepoint.read(taken.tables).positions["sales"].count == 2 else set()
    assert shops.rows("first windows") == WINDOWS | more


@pytest.mark.a_day(1)
@pytest.mark.parametrize("planned", [True, False])
def test_a_native_window_has_fired_though_draining_fails_between_the_end_and_the_epoch_in_which_it_closes(
    shops, monkeypatch, planned
):
    pipeline = Pipeline("native")
    source = ParquetSource(f"{shops.folder}/in", Sale, name="sales", monitor=True)
    strategy = WatermarkStrategy.for_monotonous_timestamps().with_timestamp_assigner("at")
    sales = pipeline.from_source(source).assign_timestamps_and_watermarks(strategy).key_by("shop")
    windows = sales.window(TumblingEventTimeWindows.of(timedelta(seconds=1)))
    totals = windows.agg(F.sum("amount").alias("amount"), output_type=Total)
    totals.sink_to(DeltaSink(f"{shops.folder}/native", mode="append", name="table"))
    options = {"execution.runtime-mode": "STREAMING", "execution.checkpointing.dir": f"{shops.folder}/checkpoints"}
    plan = pipeline.plan({**options, "state.native-aggregates": "SPARK"})
    sent, ended = Event(), Event()

    def unreachable(draining):
        sent.set()
        assert ended.wait(120)
        raise OSError("the bucket cannot be reached")

    def observe(event):
        if sent.is_set():
            ended.set()
            time.sleep(2)  # so that the job hears of the failure before the next epoch

    shops.arrive("1", FIRST)
    with monkeypatch.context() as patched:
        patched.setattr(Draining, "_await_end", unreachable)
        job = StreamingJob(plan, shops.spark, Start("job", patience=0.5), observe)
        job.drain()
        with pytest.raises(UnifiedError, match="the bucket cannot be reached"):
            job.run(lambda: False, 0.01)
    if not planned:  # as of a job that was killed before Spark had planned the next epoch
        logs = Path(shops.folder) / "checkpoints" / "native" / "spark" / "agg"
        ended = max(int(entry.name) for entry in (logs / "commits").iterdir() if entry.name.isdigit())
        for entry in (logs / "offsets").glob(f"*{ended + 1}*"):
            entry.unlink()
    stops = time.monotonic() + 120
    job = StreamingJob(plan, shops.spark, Start("job", patience=0.5))
    assert job.run(lambda: time.monotonic() > stops) == "finished"  # it knows that its end was sent
    assert shops.rows("native") == WINDOWS


def test_what_does_not_run_is_not_drained(shops):
    with pytest.raises(StateError, match=r"shops: its input has not come to its end, and no job runs that could drain"):
        shops.take("first", "")
    assert read_desired(shops.directory("first")).state is None


def test_a_savepoint_that_fails_is_an_error_and_can_be_taken_again(shops):
    shops.arrive("1", FIRST)
    with pytest.raises(StateError, match=r"/proc/nowhere.*The input has come to its end all the same: ask again$"):
        shops.drained("first", "/proc/nowhere")
    directory = shops.directory("first")
    assert (directory.deployed().finished, savepoints(directory)) == (True, [])
    assert totals(shops.take("first", "").tables) == {"a": 13, "b": 2}


def test_a_job_whose_last_epoch_spark_did_not_log_has_not_finished(shops, monkeypatch):
    shops.arrive("1", FIRST)
    monkeypatch.setattr(Query, "settled", lambda query: False)
    job = StreamingJob(shops.plan("first"), shops.spark, Start("job", patience=0.5))
    job.drain()
    with pytest.raises(StateError, match=r"last epoch of query 'main' .* no end was recorded; start the job again"):
        job.run()
    assert not shops.directory("first").deployed().finished


def test_a_job_whose_sink_failed_after_the_end_has_not_finished(shops, monkeypatch):
    shops.arrive("1", FIRST)
    stop = Query.stop

    def stop_after_failure(query):
        query.failure = query.failure or ValueError("the disk is full")
        stop(query)

    monkeypatch.setattr(Query, "stop", stop_after_failure)
    job = StreamingJob(shops.plan("first"), shops.spark, Start("job", patience=0.5))
    job.drain()
    with pytest.raises(UnifiedError, match="the disk is full"):
        job.run()
    assert not shops.directory("first").deployed().finished
