"""New code beside the old code's job: how far it reads, what it leaves alone, and what is found where it differs."""

import os
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from datetime import datetime, timedelta, timezone
from threading import Event
from typing import NamedTuple

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from deltalake import DeltaTable

from dagster_unified.api import Pipeline, TumblingEventTimeWindows, WatermarkStrategy
from dagster_unified.connectors import CollectionSource, DeltaSink, FileSink, ForeachSink, ParquetSource
from dagster_unified.engine.events import EpochCommitted
from dagster_unified.engine.streaming import shadow
from dagster_unified.engine.streaming.checkpoint import CheckpointDirectory
from dagster_unified.engine.streaming.desired import read_desired
from dagster_unified.engine.streaming.job import Start, StreamingJob
from dagster_unified.engine.streaming.savepoints.copy import savepoints
from dagster_unified.engine.streaming.shadow import Shadow, accept, last_round
from dagster_unified.errors import ConfigurationError, StateError, UnsupportedError
from dagster_unified.graph.options import Configuration
from dagster_unified.graph.plan import plan

NOON = datetime(2026, 1, 1, 12, tzinfo=timezone.utc)


class Sale(NamedTuple):
    shop: str
    amount: int
    at: datetime


def larger(sale: Sale) -> bool:
    return sale.amount > 0


class Shops:
    """Totals, windows and a filter over a folder of files: into tables of each kind."""

    def __init__(self, spark, folder):
        self.spark, self.folder, self.count = spark, folder, 0
        self.checkpoints = str(folder / "checkpoints")
        self.directory = CheckpointDirectory(self.checkpoints, "shops")
        (folder / "in").mkdir()

    def arrive(self, count):
        for number in range(self.count, self.count + count):
            rows = [Sale("ab"[number % 2], number + 1, NOON + timedelta(minutes=number))]
            staged = self.folder / f"in/.{number}"
            schema = pa.schema([("shop", pa.string()), ("amount", pa.int64()), ("at", pa.timestamp("us", "UTC"))])
            pq.write_table(pa.Table.from_pylist([row._asdict() for row in rows], schema), staged)
            os.rename(staged, self.folder / f"in/{number:03}.parquet")
        self.count += count

    def graph(self, combine=lambda a, b: Sale(a.shop, a.amount + b.amount, b.at), more=None):
        pipeline = Pipeline("shops")
        source = ParquetSource(f"{self.folder}/in", Sale, name="sales", monitor=True, max_files_per_trigger=2)
        strategy = WatermarkStrategy.for_monotonous_timestamps().with_timestamp_assigner("at")
        sales = pipeline.from_source(source).assign_timestamps_and_watermarks(strategy).uid("times")
        totals = sales.key_by("shop").reduce(combine).uid("totals")
        totals.sink_to(DeltaSink(f"{self.folder}/totals", mode="upsert", key="shop", name="totals")).uid("to totals")
        windows = sales.key_by("shop").window(TumblingEventTimeWindows.of(timedelta(minutes=4))).reduce(combine)
        windows.uid("windows").sink_to(DeltaSink(f"{self.folder}/windows", mode="append", name="windows"))
        sales.filter(larger).uid("large").sink_to(FileSink(f"{self.folder}/files", name="files"))
        if more is not None:
            more(pipeline, sales)
        return pipeline.graph()

    @property
    def options(self):
        return Configuration.of(
            {
                "execution.runtime-mode": "STREAMING",
                "execution.checkpointing.dir": self.checkpoints,
                "pipeline.max-parallelism": 2,
                "parallelism.default": 2,
            }
        )

    def shadow(self, **graph):
        session = self.spark.newSession()  # a query has a name of its own in a session
        return Shadow(self.graph(**graph), self.options, lambda: session, "shadow")

    @contextmanager
    def running(self, fresh=False):
        """The job of the old code in another thread; gives a function that waits until it has read all files."""
        stopped, committed = Event(), []
        job = StreamingJob(plan(self.graph(), self.options), self.spark, Start("job", fresh, patience=0.5))
        job.observe = lambda event: committed.append(event) if isinstance(event, EpochCommitted) else None

        def logged(epoch):
            return (self.directory.last_epoch("main") or 0) >= epoch

        def until_read():
            while sum(epoch.rows_in for epoch in committed) < self.count or not logged(committed[-1].epoch):
                assert not outcome.done(), outcome.result()
                stopped.wait(0.05)

        with ThreadPoolExecutor(1) as thread:
            outcome = thread.submit(lambda: job.run(stopped.is_set, poll=0.02))
            try:
                yield until_read
            finally:
                stopped.set()

    def table(self, name):
        return sorted(map(str, DeltaTable(f"{self.folder}/{name}").to_pyarrow_table().to_pylist()))


@pytest.fixture
def shops(spark, tmp_path, monkeypatch):
    monkeypatch.setattr(shadow, "_FOLLOWS", 2.0)
    return Shops(spark, tmp_path)


@pytest.mark.spark
def test_equal_code_is_equal_round_for_round_while_the_old_job_goes_on(shops):
    shops.arrive(4)
    beside = shops.shadow(combine=lambda a, b: Sale(b.shop, b.amount + a.amount, b.at))
    with shops.running() as until_read:
        until_read()
        first = beside.round()
        shops.arrive(9)
        second = beside.round()
        until_read()
        last = beside.round()
    for compared in (first, second, last):
        assert not any(sink.different or sink.not_compared for sink in compared.sinks.values()), compared.describe()
    assert last.is_equal
    assert last.number == 3
    assert {name: sink.rows for name, sink in last.sinks.items()} == {"totals": 2, "windows": 6, "files": 9}
    assert last_round(shops.directory, beside.code) == last
    assert savepoints(shops.directory) == [], "the copy of the savepoint is not kept"
    accept(shops.directory, beside.code)
    assert read_desired(shops.directory).accepted == beside.code
    assert beside.is_over()
    beside.remove()
    assert not (shops.directory.path / "shadow").exists() or not any((shops.directory.path / "shadow").iterdir())


@pytest.mark.spark
def test_code_that_differs_is_found_and_accepted_only_by_who_says_so(shops):
    shops.arrive(4)  # the window of all of them has not closed

    def more(pipeline, sales):
        sales.map(lambda sale: sale.shop, str).sink_to(FileSink(f"{shops.folder}/new", name="new"))
        sales.sink_to(ForeachSink(lambda sales: None, name="service"))

    beside = shops.shadow(combine=lambda a, b: Sale(a.shop, a.amount + b.amount + 1, b.at), more=more)
    with shops.running() as until_read:
        until_read()
        beside.round()
        shops.arrive(6)
        until_read()
        before = shops.table("totals")
        found = beside.round()
    assert not found.is_equal
    assert found.sinks["totals"].different == 2
    assert found.sinks["windows"].different > 0
    assert (found.sinks["files"].different, found.sinks["files"].rows) == (0, 6)
    assert found.sinks["new"].not_compared == "it is new"
    assert "cannot be read back; its rows are in" in found.sinks["service"].not_compared
    row = found.sinks["totals"].first[0]
    assert row.new != row.old
    assert shops.table("totals") == before, "the table is the old code's"
    assert not (shops.folder / "new").exists()
    with pytest.raises(
        ConfigurationError, match=r"are not equal to those of the old code\. round 2: totals: 2 rows, 2"
    ):
        accept(shops.directory, beside.code)
    assert read_desired(shops.directory).accepted == ""
    accept(shops.directory, beside.code, differences=True)
    assert beside.is_over()


@pytest.mark.spark
def test_it_begins_anew_where_the_old_job_has_and_where_there_are_too_many_rows(shops, monkeypatch):
    shops.arrive(3)
    beside = shops.shadow(combine=lambda a, b: Sale(b.shop, b.amount + a.amount, b.at))
    with shops.running() as until_read:
        until_read()
        beside.round()
        shops.arrive(2)
        until_read()
        assert beside.round().sinks["files"].rows == 2
    with shops.running(fresh=True) as until_read:
        until_read()
        assert beside.round().sinks["files"].rows == 0
        shops.arrive(3)
        until_read()
        again = beside.round()
        assert again.is_equal
        assert again.sinks["files"].rows == 3
        monkeypatch.setattr(shadow, "MOST_ROWS", 2)
        assert beside.round().sinks["files"].rows == 3, "which is more than it compares"
        assert beside.round().sinks["files"].rows == 0, "it has begun anew"
        left = [path.name for path in (shops.directory.path / "shadow").iterdir()]
        assert left == [beside.code]
        other = shops.shadow(combine=lambda a, b: Sale(a.shop, a.amount - b.amount, b.at))
        other.round()
        assert [path.name for path in (shops.directory.path / "shadow").iterdir()] == [other.code]


def test_where_nothing_was_started_there_is_nothing_to_run_beside(shops):
    with pytest.raises(StateError, match=r"shops: no job was started in .*/checkpoints/shops, and there is nothing"):
        shops.shadow().round()
    with pytest.raises(ConfigurationError, match=r"shops: no job was started in .* could take the place of"):
        accept(shops.directory, "code")


@pytest.mark.spark
def test_a_source_that_the_old_code_does_not_read_has_no_end(shops):
    shops.arrive(1)
    with shops.running() as until_read:
        until_read()

    def more(pipeline, sales):
        other = pipeline.from_source(CollectionSource([1], int, "others"))
        other.sink_to(FileSink(f"{shops.folder}/others", name="others"))

    with pytest.raises(UnsupportedError, match="shops: source 'others' is new, and nothing says how far it is to be"):
        shops.shadow(more=more).round()
