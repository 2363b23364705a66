"""Savepoints as assets: which pipelines have one, what it depends on, what starts from it, and what it shows."""

import time
from contextlib import contextmanager
from threading import Lock, current_thread

import pyarrow as pa
import pytest
from dagster import AssetKey, DagsterInstance
from deltalake import DeltaTable

from dagster_unified.api import Pipeline
from dagster_unified.connectors import CsvSource, DeltaSink
from dagster_unified.orchestration import BatchDeployment, StreamingDeployment, unified_definitions
from dagster_unified.state import Savepoint
from tests.orchestration.support import launched_with
from tests.support import Sale


def add(a: Sale, b: Sale) -> Sale:
    return Sale(a.shop, a.amount + b.amount)


def shops(folder="in", name="shops", monitor=False, keyed=True):
    pipeline = Pipeline(name)
    sales = pipeline.from_source(CsvSource(f"{folder}/sales", Sale, name="sales", monitor=monitor))
    totals = sales.key_by("shop").reduce(add).name("totals").uid("totals") if keyed else sales
    totals.sink_to(DeltaSink(f"{folder}/{name}", mode="upsert", key="shop", name="table"))
    return pipeline


def leaving(pipeline, path, **more):
    return BatchDeployment(pipeline, options={"execution.savepoint.path": str(path), **more})


def lineage(*deployments):
    """The assets that have to do with savepoints, each with what it depends on."""
    graph = unified_definitions(*deployments).resolve_asset_graph()
    found = {
        key.to_user_string(): {p.to_user_string() for p in graph.get(key).parent_keys}
        for key in graph.get_all_asset_keys()
    }
    ours = {name for name in found if name.endswith(("/savepoint", "/stream"))}
    return {name: parents for name, parents in found.items() if name in ours or parents & ours}


def test_a_pipeline_that_leaves_no_savepoint_has_no_asset_for_it():
    stateless = shops("b", "stateless", keyed=False)
    assert lineage(shops(), leaving(stateless, "s"), StreamingDeployment(stateless)) == {}


def test_a_savepoint_depends_on_the_stages_that_leave_it_or_on_the_sources_of_a_stream():
    assert lineage(leaving(shops(), "s")) == {"shops/savepoint": {"shops/table_stage"}}
    assert lineage(shops(monitor=True)) == {"shops/savepoint": {"shops/sales_source"}}


def test_a_stream_depends_on_the_savepoint_that_it_starts_from(tmp_path):
    both = shops("a")
    assert lineage(leaving(both, "a/savepoint"), StreamingDeployment(both, from_savepoint="a/savepoint")) == {
        "shops/savepoint": {"shops/table_stage"},
        "shops/stream": {"shops/savepoint"},
    }
    live = shops("b", "live", monitor=True)
    found = lineage(leaving(both, "a/savepoint"), StreamingDeployment(live, from_savepoint="a/savepoint"))
    assert found["live/table"] == {"live/sales_source", "shops/savepoint"}


def test_a_stream_may_start_from_a_savepoint_that_was_taken_of_another_one(tmp_path):
    first, second = shops("a", monitor=True), shops("b", "again", monitor=True)
    options = {"execution.checkpointing.dir": str(tmp_path)}
    taken = f"{tmp_path}/shops/savepoints/g1-20260101T000000-000"
    found = lineage(StreamingDeployment(first, options=options), StreamingDeployment(second, from_savepoint=taken))
    assert found["again/table"] == {"again/sales_source", "shops/savepoint"}


@pytest.mark.a_day(1)
@pytest.mark.parametrize("mode", ["batch", "streaming"])
def test_a_run_that_leaves_a_savepoint_reports_what_is_in_it(spark, tmp_path, mode):
    (tmp_path / "sales").mkdir()
    (tmp_path / "sales" / "first.csv").write_text("shop,amount\nnorth,1\nsouth,2\nnorth,4\n")
    pipeline, path = shops(str(tmp_path)), str(tmp_path / "savepoint")
    options = {"execution.savepoint.path": path, "pipeline.max-parallelism": 2}
    stream = StreamingDeployment(
        pipeline, options={**options, "execution.checkpointing.dir": str(tmp_path / "checkpoints")}
    )
    definitions = unified_definitions(BatchDeployment(pipeline, options=options), stream)
    with DagsterInstance.ephemeral() as instance:
        assert definitions.resolve_job_def(f"shops_{mode}").execute_in_process(instance=instance).success
        (event,) = instance.fetch_materializations(AssetKey(["shops", "savepoint"]), limit=5).records
    shown = {name: value.value for name, value in event.asset_materialization.metadata.items()}
    (operator,) = shown["operators"].records
    assert (shown["path"], shown["mode"], shown["dagster/row_count"], shown["key groups"]) == (path, mode.upper(), 2, 2)
    assert (operator.data["operator"], operator.data["keys"], operator.data["bytes"]) == ("totals", 2, shown["bytes"])
    assert operator.data["keys per group (least / median / most)"] in ("1 / 1 / 1", "0 / 0 / 2")
    assert shown["keys per group"].startswith("![keys per key group](data:image/png;base64,")
    assert [one.data["read"] for one in shown["sources"].records] == [f"1 file in {tmp_path}/sales"]


def test_all_stages_of_a_run_start_from_the_savepoint_that_its_launch_names(spark, tmp_path):
    (tmp_path / "sales").mkdir()
    (tmp_path / "sales" / "first.csv").write_text("shop,amount\nnorth,1\nsouth,2\n")
    job = unified_definitions(shops(str(tmp_path))).resolve_job_def("shops_batch")
    savepoint = str(tmp_path / "savepoint")
    with DagsterInstance.ephemeral() as instance:
        for option in ("execution.savepoint.path", "execution.state-recovery.path"):
            config = launched_with({option: savepoint})
            assert job.execute_in_process(instance=instance, run_config=config).success
            (tmp_path / "sales" / "second.csv").write_text("shop,amount\nnorth,4\n")
    table = DeltaTable(str(tmp_path / "shops")).to_pyarrow_table().to_pylist()
    assert sorted((row["shop"], row["amount"]) for row in table) == [("north", 5), ("south", 2)]


class Turns:
    """Who uses the storage of runs of an instance in memory, whose threads lock each other out."""

    def __init__(self, storage):
        self._connect, self._used = storage.connect, Lock()
        self.taken, self.met = 0, []

    @contextmanager
    def connect(self):
        if not self._used.acquire(blocking=False):
            self.met.append(current_thread().name)
            self._used.acquire()
        try:
            self.taken += 1
            time.sleep(0.1)  # long enough for another thread to come
            with self._connect() as connection:
                yield connection
        finally:
            self._used.release()


@contextmanager
def used_by_turns(instance):
    with pytest.MonkeyPatch.context() as patch:
        turns = Turns(instance.run_storage)
        patch.setattr(instance.run_storage, "connect", turns.connect)
        yield turns


def test_the_savepoint_that_a_launch_names_goes_before_that_of_the_deployment(spark, tmp_path):
    """The stream is of files that are there: it ends, and each launch begins it anew."""
    (tmp_path / "sales").mkdir()
    (tmp_path / "sales" / "first.csv").write_text("shop,amount\nnorth,1\n")
    pipeline, other = shops(str(tmp_path)), str(tmp_path / "other")
    for place, factor in (("own", 1), ("other", 10)):
        made = pa.table({"shop": ["north"], "value": [{"shop": "north", "amount": 100 * factor}]})
        Savepoint.new(pipeline).with_state("totals", made).write(str(tmp_path / place))
    options = {"execution.checkpointing.dir": str(tmp_path / "checkpoints"), "pipeline.max-parallelism": 2}
    deployment = StreamingDeployment(pipeline, from_savepoint=str(tmp_path / "own"), options=options)
    job = unified_definitions(deployment).resolve_job_def("shops_streaming")
    with DagsterInstance.ephemeral() as instance, used_by_turns(instance) as turns:
        for launched, amount in (({"execution.state-recovery.path": other}, 1001), ({}, 101)):
            config = launched_with(launched)
            assert job.execute_in_process(instance=instance, run_config=config).success
            table = DeltaTable(str(tmp_path / "shops")).to_pyarrow_table().to_pylist()
            assert [(row["shop"], row["amount"]) for row in table] == [("north", amount)]
    assert turns.taken > 0
    assert not turns.met
