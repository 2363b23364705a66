"""An epoch of a job beside one of another that no longer holds the lease, but has not noticed yet."""

import pytest
from deltalake import DeltaTable

from dagster_unified.api import Pipeline
from dagster_unified.connectors import DeltaSink
from dagster_unified.engine.streaming.checkpoint import CheckpointDirectory
from dagster_unified.engine.streaming.epoch import EpochWriter
from dagster_unified.errors import LeaseLostError
from dagster_unified.graph.execution_graph import ExecutionGraph


def test_the_rows_that_another_job_stages_for_the_same_epoch_are_not_written(spark, tmp_path):
    """Through Connect a query outlives its job, and may compute an epoch that the next job computes as well."""
    pipeline = Pipeline("numbers")
    numbers = pipeline.from_collection(range(4))
    for name in ("left", "right"):
        numbers.sink_to(DeltaSink(str(tmp_path / name), name=name))
    plan = pipeline.plan({"execution.runtime-mode": "STREAMING", "execution.checkpointing.dir": str(tmp_path / "c")})
    directory = CheckpointDirectory(str(tmp_path / "c"), "numbers")
    tail = ExecutionGraph(plan, "main", (), sinks=tuple(node.id for node in plan.graph.sinks))

    def writer(token):
        return EpochWriter(plan, spark, tail, "job", 0, directory.path / "epochs", lambda: None, token, "log")

    def commit(one, first, meanwhile=lambda: False):
        rows = spark.range(first, first + 4).selectExpr("id AS value", "CAST(NULL AS BIGINT) AS __ts")
        return one.commit(rows, 1, lambda frame, port: frame, is_empty=meanwhile)

    def lose():
        raise LeaseLostError("another job has taken over")

    def zombie():
        with pytest.raises(LeaseLostError):
            commit(writer(6), first=10, meanwhile=lose)
        return False

    commit(writer(7), first=0, meanwhile=zombie)
    for name in ("left", "right"):
        assert sorted(DeltaTable(str(tmp_path / name)).to_pyarrow_table()["value"].to_pylist()) == [0, 1, 2, 3]
    left = {path.name for path in (directory.path / "epochs").iterdir()}
    assert {name for name in left if name.startswith("epoch-")} == {"epoch-1-6"}
    commit(writer(8), first=0)
    assert not list((directory.path / "epochs").glob("epoch-*"))
