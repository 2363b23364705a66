"""How much goes to a worker at a time: small rows are not measured, and a session's own limit is obeyed."""

import pyarrow as pa
import pytest

from dagster_unified.api import MapFunction, Pipeline
from dagster_unified.connectors import CollectionSource, FileSink
from dagster_unified.engine.dataframe.passes import MAX_BYTES, UNLIMITED, may_be_large, small_rows
from dagster_unified.engine.streaming.job import Start, StreamingJob

NUMBER, BYTES = pa.schema([("n", pa.int64())]), pa.schema([("tags", pa.list_(pa.struct([("data", pa.binary())])))])


def test_rows_with_bytes_anywhere_may_be_large():
    assert not may_be_large([NUMBER, pa.schema([("words", pa.map_(pa.string(), pa.list_(pa.float64())))])])
    assert may_be_large([NUMBER, BYTES])


@pytest.mark.spark
def test_the_limit_is_gone_only_while_small_rows_are_moved(spark):
    with small_rows(spark):
        assert spark.conf.get(MAX_BYTES) == UNLIMITED
    assert spark.conf.get(MAX_BYTES, None) is None


@pytest.mark.spark
def test_a_limit_that_the_session_sets_is_obeyed(spark):
    spark.conf.set(MAX_BYTES, "1m")
    try:
        with small_rows(spark):
            assert spark.conf.get(MAX_BYTES) == "1m"
    finally:
        spark.conf.unset(MAX_BYTES)


class Limit(MapFunction[int, str]):
    """Says what limit a worker's task was planned with."""

    def map(self, value: int) -> str:
        from pyspark import TaskContext

        return str(TaskContext.get().getLocalProperty(MAX_BYTES))


@pytest.mark.a_day(1)
@pytest.mark.spark
@pytest.mark.parametrize(("kind", "limit"), [(int, UNLIMITED), (bytes, "None")])
def test_a_stage_is_planned_by_its_records(spark, run_on_spark, tmp_path, kind, limit):
    one = kind()
    pipeline = Pipeline("limits")
    source = CollectionSource([one], kind, "one")
    pipeline.from_source(source).map(Limit(), output_type=str).sink_to(FileSink(str(tmp_path / "out")))
    run_on_spark(pipeline)
    assert [row[0] for row in spark.read.parquet(str(tmp_path / "out")).collect()] == [limit]


@pytest.mark.a_day(1)
@pytest.mark.spark
@pytest.mark.parametrize(("kind", "limit"), [(int, UNLIMITED), (bytes, "None")])
def test_a_stream_is_started_by_its_records(spark, tmp_path, kind, limit):
    pipeline = Pipeline("limits")
    source = CollectionSource([kind()], kind, "one")
    pipeline.from_source(source).map(Limit(), output_type=str).sink_to(FileSink(str(tmp_path / "out")))
    options = {"execution.runtime-mode": "STREAMING", "execution.checkpointing.dir": str(tmp_path / "checkpoints")}
    StreamingJob(pipeline.plan(options), spark, Start("test")).run()
    assert [row[0] for row in spark.read.parquet(str(tmp_path / "out")).collect()] == [limit]
    assert spark.conf.get(MAX_BYTES, None) is None
