"""Stages as assets: which need not run again, and the sinks of a stage that writes several."""

import shutil

import pytest
from dagster import AssetKey, DagsterInstance
from deltalake import DeltaTable

from dagster_unified.api import Pipeline
from dagster_unified.connectors import CsvSource, DeltaSink, FileSink
from dagster_unified.orchestration import BatchDeployment, unified_definitions
from tests.orchestration.support import launched_with, resources
from tests.support import Sale


def defined(folder, factor=1, weight=1, options=None, reuse="fingerprint"):
    pipeline = Pipeline("sales")
    sales = (
        pipeline.from_source(CsvSource(str(folder / "in"), Sale, name="sales"))
        .map(lambda s: Sale(s.shop, s.amount * weight), output_type=Sale)
        .name("weighted")
    )
    totals = sales.key_by("shop").reduce(lambda a, b: Sale(a.shop, a.amount + b.amount)).name("totals").rebalance()
    totals.map(lambda s: Sale(s.shop, s.amount * factor), output_type=Sale).sink_to(
        DeltaSink(str(folder / "table"), name="table")
    )
    return unified_definitions(BatchDeployment(pipeline, reuse=reuse), resources=resources(folder)).resolve_job_def(
        "sales_batch"
    )


@pytest.fixture
def run(spark, tmp_path):
    (tmp_path / "in").mkdir()
    (tmp_path / "in" / "1.csv").write_text("shop,amount\na,1\na,2\nb,4\n")
    with DagsterInstance.ephemeral() as instance:

        def go(options=None, **changes):
            """The stages that ran, and what is in the table."""
            config = launched_with(options) if options else {}
            result = defined(tmp_path, **changes).execute_in_process(instance=instance, run_config=config)
            shown = {
                e.asset_key.path[-1].removesuffix("_stage"): e.materialization.metadata
                for e in result.get_asset_materialization_events()
                if e.asset_key.path[-1].endswith("_stage")
            }
            return [name for name, metadata in shown.items() if "reused from run" not in metadata], sorted(
                DeltaTable(str(tmp_path / "table")).to_pyarrow_table()["amount"].to_pylist()
            )

        yield go


ALL = ["weighted", "totals", "table"]


def test_nothing_runs_again_where_nothing_has_changed_or_only_what_was_lost_and_all_where_reuse_is_not_chosen(
    run, tmp_path
):
    assert run() == (ALL, [3, 4])
    assert run() == ([], [3, 4])
    shutil.rmtree(tmp_path / "store" / "sales" / "totals")
    assert run() == (["totals"], [3, 4])
    assert run(reuse="never") == (ALL, [3, 4])


def test_after_a_change_its_stage_runs_and_all_that_follow(run):
    run()
    assert run(factor=10) == (["table"], [30, 40])
    assert run(factor=10) == ([], [30, 40])
    assert run(factor=1) == (["table"], [3, 4])
    assert run(weight=2) == (ALL, [6, 8])


def test_other_input_and_another_configuration_run_again(run, tmp_path):
    run()
    (tmp_path / "in" / "2.csv").write_text("shop,amount\nb,8\n")
    assert run() == (ALL, [3, 12])
    assert run({"parallelism.default": 3}) == (ALL, [3, 12])


def test_a_run_that_is_launched_in_streaming_says_what_to_do_and_materializes_nothing(spark, tmp_path):
    (tmp_path / "in").mkdir()
    launched = launched_with({"execution.runtime-mode": "STREAMING"})
    with DagsterInstance.ephemeral() as instance:
        result = defined(tmp_path).execute_in_process(instance=instance, run_config=launched, raise_on_error=False)
    assert not result.success
    assert result.get_asset_materialization_events() == []
    failure = result.get_step_failure_events()[0]
    assert failure.step_key == "sales__weighted"
    message = failure.step_failure_data.user_failure_data.description
    assert "leave execution.runtime-mode out and read bounded sources" in message


def definitions(folder):
    pipeline = Pipeline("sales")
    totals = pipeline.from_collection([Sale("north", 3)], name="sold").key_by("shop").sum("amount").name("totals")
    totals.sink_to(DeltaSink(f"{folder}/table", name="table"))
    totals.sink_to(FileSink(f"{folder}/files", name="files"))
    return unified_definitions(pipeline, resources=resources(folder))


TABLE, FILES, STAGE = AssetKey(["sales", "table"]), AssetKey(["sales", "files"]), ["sales", "table_stage"]


def test_each_has_kind_schema_and_lineage():
    graph = definitions("/nowhere").resolve_asset_graph()
    for key, kind in ((TABLE, "deltalake"), (FILES, "parquet")):
        assert graph.get(key).parent_keys == {AssetKey(STAGE)}
        assert kind in graph.get(key).kinds
        columns = graph.get(key).metadata["dagster/column_schema"].columns
        assert [column.name for column in columns] == ["shop", "amount"]


def test_a_run_materializes_each(spark, tmp_path):
    with DagsterInstance.ephemeral() as instance:
        done = definitions(tmp_path).resolve_job_def("sales_batch").execute_in_process(instance=instance)
        told = {e.asset_key: e.materialization.metadata for e in done.get_asset_materialization_events()}
    assert told[TABLE]["written to"].value == f"{tmp_path}/table"
    assert told[FILES]["written to"].value == f"{tmp_path}/files"
