"""Sinks of a stage that writes several are assets of their own."""

from typing import NamedTuple

from dagster import AssetKey, DagsterInstance

from dagster_unified.api import Pipeline
from dagster_unified.connectors import DeltaSink, FileSink
from dagster_unified.orchestration import IntermediatesResource, SparkResource, unified_definitions


class Sale(NamedTuple):
    shop: str
    amount: int


def definitions(folder):
    pipeline = Pipeline("sales")
    totals = pipeline.from_collection([Sale("north", 3)], name="sold").key_by("shop").sum("amount").name("totals")
    totals.sink_to(DeltaSink(f"{folder}/table", name="table"))
    totals.sink_to(FileSink(f"{folder}/files", name="files"))
    resources = {
        "spark": SparkResource(master="local[2]"),
        "intermediates": IntermediatesResource(path=f"{folder}/store"),
    }
    return unified_definitions(pipeline, resources=resources)


TABLE, FILES, STAGE = AssetKey(["sales", "sinks", "table"]), AssetKey(["sales", "sinks", "files"]), ["sales", "table"]


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
