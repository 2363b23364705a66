"""Sources of Spark's own whose position a savepoint holds: a job that starts from it reads what comes after."""

import time
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from threading import Event, current_thread, main_thread
from typing import NamedTuple

import msgspec
import pyarrow.parquet as pq
import pytest
from pyspark.sql.datasource import DataSource, SimpleDataSourceStreamReader
from pyspark.sql.streaming.query import StreamingQuery

from dagster_unified.api import Pipeline, TumblingEventTimeWindows, WatermarkStrategy
from dagster_unified.connectors import FileSink, RateSource, StructuredSource
from dagster_unified.engine.streaming.checkpoint import CheckpointDirectory
from dagster_unified.engine.streaming.job import Start, StreamingJob
from dagster_unified.engine.streaming.savepoints.request import take
from dagster_unified.errors import StateError, UnsupportedError
from dagster_unified.state import Savepoint
from tests.depth import rotated


class Number(NamedTuple):
    value: int


def register(spark):
    """Registers a source that counts from its option `start`, ten numbers at a time."""

    class Counting(SimpleDataSourceStreamReader):
        def __init__(self, start):
            self.start = start

        def initialOffset(self):
            return {"next": self.start}

        def read(self, start):
            return self.readBetweenOffsets(start, {"next": start["next"] + 10}), {"next": start["next"] + 10}

        def readBetweenOffsets(self, start, end):
            return iter([(n,) for n in range(start["next"], end["next"])])

        def commit(self, end):
            pass

    class Source(DataSource):
        @classmethod
        def name(cls):
            return "counting"

        def schema(self):
            return "value bigint"

        def simpleStreamReader(self, schema):
            return Counting(int(self.options["start"]))

    spark.dataSource.register(Source)


def counting():
    def after(offset):
        return {"start": str(msgspec.json.decode(offset)["next"])}

    return StructuredSource("counting", Number, {"start": "0"}, name="numbers", starting_options=after)


SOURCES = {"rate": lambda: RateSource(50, name="numbers"), "any, with options to start with": counting}


def planned(source, folder, name, **options):
    pipeline = Pipeline("numbers")
    numbers = pipeline.from_source(source).map(lambda number: Number(number.value), Number)
    numbers.sink_to(FileSink(f"{folder}/out {name}", name="out"))
    total = numbers.key_by(lambda number: 0, key_type=int).reduce(lambda a, b: Number(a.value + b.value))
    total.uid("total").sink_to(FileSink(f"{folder}/totals {name}", name="totals"))
    return pipeline.plan({"execution.checkpointing.dir": f"{folder}/{name}", "pipeline.max-parallelism": 2, **options})


def values(folder, name):
    """The values that a job has written, in order."""
    out = folder / f"out {name}"
    # the folder and its marker are there before the files, which are renamed into it
    return sorted(pq.read_table(out)["value"].to_pylist()) if any(out.glob("*.parquet")) else []


def saved(spark, source, folder, name, path, **options):
    """Runs a job until it has written something, and stops it with a savepoint."""
    stopped = Event()
    job = StreamingJob(planned(source(), folder, name, **options), spark, Start("job", patience=0.5))
    with ThreadPoolExecutor(1) as thread:
        running = thread.submit(job.run, stopped.is_set, 0.02)
        try:
            while not values(folder, name):
                assert not running.done(), running.result()
                time.sleep(0.1)
            directory = CheckpointDirectory(f"{folder}/{name}", "numbers")
            plan = planned(source(), folder, name)
            assert take(plan, directory, "asker", "test", lambda: spark, str(path), "suspended").error == ""
            assert running.result() == "stopped"
        finally:
            stopped.set()


@pytest.mark.parametrize("source", rotated(list(SOURCES), 1))
def test_a_job_goes_on_after_what_was_read_before_its_savepoint(spark, tmp_path, source):
    register(spark)
    saved(spark, SOURCES[source], tmp_path, "first", tmp_path / "one")
    again = {"execution.state-recovery.path": str(tmp_path / "one")}
    saved(spark, SOURCES[source], tmp_path, "second", tmp_path / "two", **again)
    first, second = (values(tmp_path, name) for name in ("first", "second"))
    assert first
    assert second
    read = first + second
    assert read == list(range(len(read)))
    (row,) = Savepoint.read(str(tmp_path / "two")).rows("total")
    assert row["value"]["value"] == sum(read)


def test_what_comes_with_the_end_of_the_input_is_in_its_windows_and_nothing_is_read_after_it(
    spark, tmp_path, monkeypatch
):
    is_active, stale = StreamingQuery.isActive.fget, []

    def was_active(query):
        """What the job's thread is told when the query ends at that moment."""
        if is_active(query) or current_thread() is not main_thread() or stale:
            return is_active(query)
        stale.append(query)
        return True

    monkeypatch.setattr(StreamingQuery, "isActive", property(was_active))
    register(spark)
    pipeline = Pipeline("numbers")
    strategy = WatermarkStrategy.for_monotonous_timestamps().with_timestamp_assigner("value")
    numbers = pipeline.from_source(counting()).assign_timestamps_and_watermarks(strategy)
    windows = numbers.key_by(lambda number: 0, key_type=int).window(TumblingEventTimeWindows.of(timedelta(seconds=1)))
    sums = windows.reduce(lambda a, b: Number(a.value + b.value)).uid("windows")
    sums.sink_to(FileSink(f"{tmp_path}/out first", name="out"))
    plan = pipeline.plan({"execution.checkpointing.dir": f"{tmp_path}/first", "pipeline.max-parallelism": 2})
    stops = time.monotonic() + 120
    job = StreamingJob(plan, spark, Start("job", patience=0.5), lambda event: job.drain())
    assert job.run(lambda: time.monotonic() > stops, 0.02) == "finished"  # there is always another number
    directory = CheckpointDirectory(f"{tmp_path}/first", "numbers")
    taken = take(plan, directory, "asker", "test", lambda: spark, "", "drained")
    read = msgspec.json.decode(Savepoint.read(taken.tables).positions["numbers"].offset)["next"]
    assert sum(values(tmp_path, "first")) == sum(range(read))


def test_where_a_position_cannot_be_given_back_it_is_an_error_before_anything_is_written(spark, tmp_path):
    def plan(**options):
        source = StructuredSource("rate-micro-batch", Number, {"rowsPerBatch": "7"}, name="numbers")
        return planned(source, tmp_path, "first", **options)

    said = r"numbers: source 'numbers' \(Spark source rate-micro-batch\) cannot go on after what has been read of it"
    directory = CheckpointDirectory(f"{tmp_path}/first", "numbers")
    for path, then in ((f"{tmp_path}/one", "suspended"), ("", "drained")):
        with pytest.raises(UnsupportedError, match=said):
            take(plan(), directory, "asker", "test", lambda: spark, path, then)
    for option, value in (("execution.savepoint.interval", "1 h"), ("execution.savepoint.path", f"{tmp_path}/one")):
        with pytest.raises(UnsupportedError, match=said):
            StreamingJob(plan(**{option: value}), spark, Start("job"))
    register(spark)
    saved(spark, counting, tmp_path, "other", tmp_path / "one")
    with pytest.raises(StateError, match="numbers: source 'numbers': it cannot go on after Spark's counting up to"):
        StreamingJob(plan(**{"execution.state-recovery.path": f"{tmp_path}/one"}), spark, Start("job")).run()
