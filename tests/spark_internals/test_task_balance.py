"""Over which of Spark's tasks the key groups of a stream are spread."""

from collections import Counter

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from deltalake import DeltaTable
from hypothesis import given
from hypothesis import strategies as st

from dagster_unified.api import Pipeline
from dagster_unified.connectors import DeltaSink, ParquetSource
from dagster_unified.engine.streaming.job import Start, StreamingJob
from dagster_unified.spark_internals.placing import PLACED, spread, spread_of
from tests.support import Sale, committed, streaming

pytestmark = pytest.mark.spark


@pytest.mark.parametrize(("groups", "tasks"), [(128, 64), (127, 64), (128, 4), (100, 7), (5, 16), (1, 3)])
def test_each_task_has_as_many_groups_of_a_lane_as_any_other(spark, groups, tasks):
    rows = [(lane, group) for lane in (-1, 0, 3, 5) for group in range(groups)]
    frame = spread(spark.createDataFrame(rows, "lane int, group int"), (3, 5), groups, tasks).repartition(
        tasks, *PLACED
    )
    found = frame.selectExpr("lane", "group", "spark_partition_id() AS task").collect()
    assert len(found) == len(rows)
    for lane in (3, 5):
        counts = Counter(row["task"] for row in found if row["lane"] == lane)
        assert set(counts.values()) <= {groups // tasks, -(-groups // tasks)}
    alone = {row["task"] for row in found if row["lane"] in (3, 5) and row["group"] == 0}
    assert len(alone) == 2, "operators with one subtask are in one task"


@given(st.integers(0, 50), st.integers(0, 40_000), st.integers(1, 5_000))
def test_what_is_chosen_is_an_integer_of_spark(lane, group, tasks):
    assert -(2**31) <= spread_of(lane, group, tasks) < 2**31


def test_an_exchange_may_have_more_subtasks_than_there_are_key_groups(run_streaming, tmp_path):
    pipeline = Pipeline("copies")
    sales = pipeline.from_collection([Sale("north", 1)], Sale, name="sales")
    copied = sales.broadcast().map(lambda sale: sale._replace(amount=2), output_type=Sale).set_parallelism(5)
    copied.sink_to(DeltaSink(str(tmp_path / "out")))
    run_streaming(pipeline, {"pipeline.max-parallelism": 2})
    assert DeltaTable(str(tmp_path / "out")).to_pyarrow_table()["amount"].to_pylist() == [2] * 5


def test_a_stream_has_its_groups_spread_and_finds_its_state_where_there_are_other_tasks(spark, tmp_path):
    def write(name):
        shops = [f"shop {number}" for number in range(400)]
        pq.write_table(pa.table({"shop": shops, "amount": [1] * 400}), tmp_path / "in" / f"{name}.parquet")

    def run(parallelism):
        pipeline = Pipeline("shops")
        sales = pipeline.from_source(ParquetSource(str(tmp_path / "in"), Sale, name="sales", monitor=True))
        totals = sales.key_by("shop").reduce(lambda a, b: Sale(a.shop, a.amount + b.amount)).uid("totals")
        totals.sink_to(DeltaSink(str(tmp_path / "out"), mode="upsert", key="shop"))
        options = {**streaming(tmp_path, 24), "parallelism.default": parallelism}
        epochs = []
        job = StreamingJob(pipeline.plan(options), spark, Start("test"), committed(epochs))
        job.run(lambda: sum(epoch.rows_in for epoch in epochs) >= 400)
        return Counter(DeltaTable(str(tmp_path / "out")).to_pyarrow_table()["amount"].to_pylist())

    (tmp_path / "in").mkdir()
    write("first")
    assert run(8) == {1: 400}
    place = str(tmp_path / "checkpoints" / "shops" / "spark" / "main")
    state = spark.read.format("statestore").option("stateVarName", "pages").load(place)
    groups = Counter(row["partition_id"] for row in state.select("key.group", "partition_id").distinct().collect())
    assert groups == dict.fromkeys(range(8), 3)
    write("second")
    assert run(3) == {2: 400}
