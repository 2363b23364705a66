"""Savepoints of jobs that run: asked for by another process, taken where a job stops, and made at every interval."""

import os
import subprocess
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from threading import Event

import msgspec
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from deltalake import DeltaTable
from pyspark.sql.streaming.query import StreamingQuery

from dagster_unified.api import Pipeline
from dagster_unified.connectors import DeltaSink, ParquetSource
from dagster_unified.engine.events import EpochCommitted, PhaseBegun, QueriesStopped, SavepointTaken
from dagster_unified.engine.streaming.checkpoint import CheckpointDirectory
from dagster_unified.engine.streaming.desired import read_desired
from dagster_unified.engine.streaming.job import Start, StreamingJob
from dagster_unified.engine.streaming.savepoints.copy import savepoints
from dagster_unified.engine.streaming.savepoints.request import take
from dagster_unified.errors import StateError
from dagster_unified.state import Savepoint
from tests.engine.savepoints.killed import POINTS, command
from tests.support import Sale, run_stages

ROOT = Path(__file__).parents[3]

SALES = [Sale("ab"[n % 2], n) for n in range(60)]


class Shops:
    """Running totals of a folder of files, read one by one: each record adds a row to the table."""

    def __init__(self, spark, folder, checkpoints=None):
        self.spark, self.folder = spark, folder
        self.checkpoints = checkpoints or f"{folder}/checkpoints"
        self.directory = CheckpointDirectory(self.checkpoints, "shops")
        (folder / "in").mkdir(exist_ok=True)

    def arrive(self, numbers):
        for number in numbers:
            staged = self.folder / f"in/.{number}"
            pq.write_table(pa.Table.from_pylist([SALES[number]._asdict()]), staged)
            os.rename(staged, self.folder / f"in/{number:03}.parquet")

    def pipeline(self, table="table", monitor=True):
        pipeline = Pipeline("shops")
        limit = {"max_files_per_trigger": 1} if monitor else {}
        source = ParquetSource(f"{self.folder}/in", Sale, name="sales", monitor=monitor, **limit)
        totals = pipeline.from_source(source).key_by("shop").reduce(lambda a, b: Sale(a.shop, a.amount + b.amount))
        totals.uid("totals").sink_to(DeltaSink(f"{self.folder}/{table}", mode="append", name="table"))
        return pipeline

    def plan(self, table="table", monitor=True, **options):
        return self.pipeline(table, monitor).plan(
            {
                "execution.runtime-mode": "STREAMING" if monitor else "BATCH",
                "execution.checkpointing.dir": self.checkpoints,
                "pipeline.max-parallelism": 2,
                **options,
            }
        )

    @contextmanager
    def running(self, fresh=False, **options):
        """A job in another thread; gives the events that it reports, and waits for its end."""
        job = Job(StreamingJob(self.plan(**options), self.spark, Start("job", fresh, patience=0.5)))
        with ThreadPoolExecutor(1) as thread:
            job.outcome = thread.submit(job.run)
            try:
                yield job
            finally:
                job.stopped.set()

    def take(self, **how):
        return take(self.plan(), self.directory, "asker", "test", lambda: self.spark, **how)

    def totals(self, path):
        return {row["shop"]: row["value"]["amount"] for row in Savepoint.read(str(path)).rows("totals")}

    def run_on(self, path, table):
        """A BATCH run over all files that starts from a savepoint."""
        plan = self.plan(table, monitor=False, **{"execution.state-recovery.path": str(path)})
        run_stages(plan, self.spark, self.folder, table)
        return self.rows(table)

    def rows(self, table="table"):
        found = DeltaTable(f"{self.folder}/{table}").to_pyarrow_table().to_pylist()
        return sorted(tuple(row.values()) for row in found)


class Job:
    """What runs in the other thread."""

    def __init__(self, job):
        self.job, self.stopped, self.events, self.arrived = job, Event(), [], Event()
        self.job.observe = self.observe

    def observe(self, event):
        if isinstance(event, QueriesStopped):
            assert not self.job.activity()[1]
        self.events.append(event)
        self.arrived.set()

    def run(self):
        return self.job.run(self.stopped.is_set, poll=0.02)

    def until(self, enough):
        """Wait until the events are enough."""
        ended = False
        while not enough(self.events):
            assert not ended, self.outcome.result()
            ended = self.outcome.done()
            self.arrived.wait(1)
            self.arrived.clear()

    def savepoints(self):
        """The savepoints that it has taken, or has tried to."""
        return [one for one in self.events if isinstance(one, SavepointTaken)]

    def until_epochs(self, count):
        self.until(lambda events: sum(isinstance(one, EpochCommitted) for one in events) >= count)


@pytest.fixture
def shops(spark, tmp_path):
    return Shops(spark, tmp_path)


def sums(count):
    """The rows of the table after so many records."""
    found, totals = [], {}
    for shop, amount in SALES[:count]:
        totals[shop] = totals.get(shop, 0) + amount
        found.append((shop, totals[shop]))
    return sorted(found)


def test_a_busy_job_is_suspended_with_a_savepoint_of_exactly_where_it_stops(shops):
    shops.arrive(range(60))
    path = shops.folder / "handed over"
    with shops.running() as job:
        job.until_epochs(2)
        taken = shops.take(path=str(path), then="suspended")
        assert job.outcome.result() == "stopped"
        assert isinstance(job.events[-2], QueriesStopped)  # the sensor does not take what follows for an epoch
    assert (taken.tables, taken.error, read_desired(shops.directory).state) == (str(path), "", "suspended")
    assert taken.savepoint.describe().endswith(f"(test), tables in {path}")
    done = len(shops.rows())
    assert 2 <= done < 60
    assert shops.rows() == sums(done)
    assert shops.totals(path) == dict(sums(done))
    assert shops.run_on(path, "after") == sorted(dict(sums(60)).items())


def test_a_busy_job_that_was_suspended_leaves_state_for_a_savepoint(shops):
    shops.arrive(range(60))
    with shops.running() as job:
        job.until_epochs(2)
    assert job.outcome.result() == "stopped"
    taken = shops.take()
    assert (taken.tables, taken.error) == (taken.location, "")
    assert shops.totals(taken.location) == dict(sums(len(shops.rows())))
    with pytest.raises(StateError, match=r"there is a savepoint in .* already; give another path, or remove it"):
        shops.take(path=taken.location)
    assert len(savepoints(shops.directory)) == 1


def test_a_savepoint_is_taken_of_an_idle_job_whose_spark_always_asks_for_more(shops, monkeypatch):
    told = StreamingQuery.status.fget
    always = property(lambda query: {**told(query), "isTriggerActive": True})  # as over a bucket, where asking is slow
    monkeypatch.setattr(StreamingQuery, "status", always)
    shops.arrive(range(2))
    with shops.running() as job:
        job.until_epochs(2)
        taken = shops.take()
    assert job.outcome.result() == "stopped"
    assert shops.totals(taken.location) == dict(sums(2))


def test_a_job_takes_a_savepoint_to_start_from_where_it_has_no_state_and_no_other_one_after_that(shops, caplog):
    empty, starts = Savepoint.new(shops.pipeline()), {}
    for amount in (100, 1000):
        made = pa.table({"shop": ["a"], "value": [{"shop": "a", "amount": amount}]})
        empty.with_state("totals", made).write(str(shops.folder / str(amount)))
        starts[amount] = {"execution.state-recovery.path": str(shops.folder / str(amount))}
    found = []
    for number, (fresh, options) in enumerate(
        [(False, starts[100]), (False, starts[1000]), (True, starts[1000]), (True, {})]
    ):
        shops.arrive([2 * number])
        with shops.running(fresh, **options) as job:
            job.until_epochs(number + 1 if fresh else 1)
        assert job.outcome.result() == "stopped"
        found.append(shops.directory.deployed().start.rpartition("/")[2])
    assert found == ["100", "100", "1000", ""]
    said = [one.getMessage() for one in caplog.records if "goes on from its own state" in one.getMessage()]
    assert [f"does not start from the savepoint in {shops.folder}/1000 " in one for one in said] == [True]
    kept, anew, without = [100, 102], [1000, 1002, 1006], [0, 2, 6, 12]
    assert shops.rows() == sorted(("a", amount) for amount in kept + anew + without)


OFTEN = {"execution.savepoint.interval": "1 ms"}


def test_a_job_takes_savepoints_by_itself_and_keeps_the_last_of_them(shops):
    shops.arrive(range(2))
    with shops.running(**OFTEN) as job:
        job.until_epochs(1)  # from then on it is the job that takes the savepoint, and not who asks
        asked = shops.take()
        for number in range(2, 5):
            before = len(job.savepoints())
            shops.arrive([number])
            job.until(lambda _, before=before: len(job.savepoints()) > before)
        job.until(lambda _: reached(shops) == 4)
    assert job.outcome.result() == "stopped"
    made = savepoints(shops.directory)
    assert {one.name for one in made if not one.periodic} == {asked.savepoint.name}
    assert len([one for one in made if one.periodic]) == 2
    assert not [one for one in job.savepoints() if one.error]
    for one in made:
        assert shops.totals(shops.directory.path / "savepoints" / one.name) == dict(sums(one.epochs["main"] + 1))

    for one in made:
        aged = msgspec.structs.replace(one, taken=one.taken - 3_600_000)
        (shops.directory.path / "savepoints" / one.name / "savepoint.json").write_bytes(msgspec.json.encode(aged))
    shops.arrive([5])
    with shops.running(**{"execution.savepoint.interval": "1 h", "execution.savepoint.retained": 1}) as job:
        job.until(lambda _: job.savepoints())  # an hour after the one of the job before
    (left,) = [one for one in savepoints(shops.directory) if one.periodic]
    assert left.epochs == {"main": 5}
    shops.arrive([6])
    with shops.running(**{"execution.savepoint.interval": "1 h"}) as job:
        job.until_epochs(1)
    assert job.outcome.result() == "stopped"
    assert job.savepoints() == []


def reached(shops):
    """The epoch of the last savepoint that an interval made."""
    return [one.epochs["main"] for one in savepoints(shops.directory) if one.periodic][-1]


def test_a_savepoint_that_fails_stops_no_job_and_is_tried_again(shops):
    shops.arrive([0])
    folder, aside = shops.directory.path / "savepoints", shops.directory.path / "aside"
    with shops.running(**OFTEN) as job:
        job.until(lambda _: job.savepoints())
        asked = shops.take(path="/proc/nowhere")
        assert "/proc/nowhere" in asked.error
        assert asked.tables == ""
        assert asked.savepoint in savepoints(shops.directory)  # one can go back to it
        folder.rename(aside)
        folder.write_text("no folder")
        shops.arrive([1])
        job.until(lambda _: "savepoint (execution.savepoint.interval) failed: " in job.savepoints()[-1].describe())
        folder.unlink()
        aside.rename(folder)
        job.until(lambda _: not job.savepoints()[-1].error)
    assert job.outcome.result() == "stopped"
    assert shops.totals(job.savepoints()[-1].location) == dict(sums(2))


@pytest.mark.rotates("kills")
@pytest.mark.parametrize("point", POINTS["take"])
def test_a_job_is_killed_while_it_takes_a_savepoint(shops, point):
    shops.arrive(range(3))
    killing = command("take", shops.folder, point, calls=2 if point == "committed" else 1)
    with ThreadPoolExecutor(1) as thread, subprocess.Popen(killing, cwd=ROOT) as killed:
        while shops.directory.last_epoch("main") is None:
            assert killed.poll() in (None, -9)
            time.sleep(0.05)
        asked = thread.submit(shops.take) if point != "committed" else None
        assert killed.wait() == -9
        shops.arrive([3])
        with shops.running(**OFTEN) as job:
            if asked is not None:
                with pytest.raises(StateError, match="was killed or replaced before it had taken the savepoint; ask"):
                    asked.result()
            job.until(lambda _: job.savepoints() and shops.rows() == sums(4))
    first = Savepoint.read(job.savepoints()[0].location)
    assert shops.totals(first.path) == dict(sums(first.epochs["main"] + 1))
    if point == "committed":
        assert first.epochs["main"] >= 1  # what was begun has run again before
    made = {one.name for one in savepoints(shops.directory)}
    assert {path.name for path in (shops.directory.path / "savepoints").iterdir()} == made
    assert shops.rows() == sums(4)


def test_a_job_says_what_it_does_until_its_first_epoch_and_a_savepoint_what_its_checkpoint_lacks(spark, tmp_path):
    shops = Shops(spark, tmp_path)
    shops.arrive(range(2))
    with shops.running() as job:
        job.until_epochs(2)
    first = next(number for number, event in enumerate(job.events) if isinstance(event, EpochCommitted))
    phases = [event.phase for event in job.events[:first]]
    assert phases[:2] == ["restoring state: there is none yet", "starting query main"]
    assert "query main is working on epoch 0" in phases
    with shops.running() as job:
        shops.arrive([2])
        job.until_epochs(1)
    restoring = next(event.phase for event in job.events if isinstance(event, PhaseBegun))
    assert restoring == f"restoring state: from epoch 1 in {shops.directory.path}"
    for lost in ("state/0/_metadata", "state/0/0"):
        path = Path(str(shops.directory.path)) / "spark" / "main" / lost
        path.rename(tmp_path / "lost")
        taken = shops.take()
        assert "the state of query 'main' at epoch 2 cannot be read, since" in taken.error
        assert f"has no {lost}" in taken.error
        (tmp_path / "lost").rename(path)
    assert shops.take().error == ""
