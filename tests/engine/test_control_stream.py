"""The control stream, in the JVM and, where that has no class for it, in a Python process."""

import logging
from datetime import timedelta

import pyarrow.parquet as pq
import pytest

from dagster_unified.api import Pipeline, TumblingEventTimeWindows, WatermarkStrategy
from dagster_unified.connectors import FileSink, ParquetSource
from dagster_unified.engine.streaming import control
from dagster_unified.engine.streaming.job import Start, StreamingJob
from dagster_unified.spark_internals.java_class import JavaClass
from tests.engine.test_streaming_on_spark import Row, add
from tests.support import arrive, committed, streaming

PARTS = [[Row("a", 10 * n + 1, 1), Row("ä", 10 * n + 2, 100)] for n in range(6)]


@pytest.mark.a_day(1)
@pytest.mark.parametrize("first", [True, False])
def test_a_job_goes_on_with_the_events_of_one_that_had_them_from_the_other_source(
    spark, tmp_path, first, monkeypatch, caplog
):
    broken = JavaClass("dagster_unified.Broken", tmp_path / "Broken.java")
    broken.source.write_text("class {")
    arrive(tmp_path / "in", *PARTS)
    pipeline = Pipeline("p")
    rows = pipeline.from_source(ParquetSource(str(tmp_path / "in"), Row, name="rows", max_files_per_trigger=1))
    strategy = WatermarkStrategy.for_monotonous_timestamps().with_timestamp_assigner("at")
    windows = rows.assign_timestamps_and_watermarks(strategy).key_by("key")
    windows.window(TumblingEventTimeWindows.of(timedelta(milliseconds=10))).reduce(add).sink_to(
        FileSink(str(tmp_path / "out"), name="out")
    )
    plan = pipeline.plan(streaming(tmp_path, 2))
    in_python = first
    for epochs in (2, 2, None):
        seen = []

        def enough(seen=seen, epochs=epochs):
            return epochs is not None and len(seen) >= epochs

        with monkeypatch.context() as changed, caplog.at_level(logging.WARNING, "dagster_unified"):
            if in_python:  # as in a JVM that does not let the class be defined
                changed.setattr(control, "_CLASS", broken)
            caplog.clear()
            ended = StreamingJob(plan, spark, Start("test"), committed(seen)).run(enough)
        said = [line for line in caplog.messages if "control events" in line]
        assert len(said) == in_python
        in_python = not in_python
    assert ended == "finished"
    found = [
        Row(**row) for file in sorted((tmp_path / "out").glob("epoch-*")) for row in pq.read_table(file).to_pylist()
    ]
    assert sorted(found) == sorted(row for part in PARTS for row in part)
    windows = [row.at // 10 for row in found]
    assert windows == sorted(windows)  # each comes once its own records have been followed by others
