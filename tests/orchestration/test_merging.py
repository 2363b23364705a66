"""Pipelines in a code location that has an executor, a Spark session, IO managers and assets of its own."""

from typing import NamedTuple

import pyarrow as pa
from dagster import (
    AssetIn,
    AssetKey,
    AssetSelection,
    DagsterInstance,
    Definitions,
    FilesystemIOManager,
    asset,
    define_asset_job,
    multiprocess_executor,
)
from dagster_pyspark import PySparkResource

from dagster_unified.api import Pipeline
from dagster_unified.connectors import AssetSource, DeltaSink
from dagster_unified.orchestration import IntermediatesResource, unified_definitions


class Order(NamedTuple):
    shop: str
    amount: int


def test_a_job_of_the_location_runs_over_its_own_assets_and_over_pipelines(spark, tmp_path):
    @asset
    def orders() -> list[Order]:
        return [Order("a", 1), Order("b", 2), Order("a", 3)]

    @asset(ins={"totals": AssetIn(AssetKey(["shops", "totals"]))})
    def best(totals: pa.Table) -> list[tuple[str, int]]:
        return sorted((row["shop"], row["amount"]) for row in totals.to_pylist())

    shops = Pipeline("shops")
    sales = shops.from_source(AssetSource("orders", Order))
    sales.key_by("shop").sum("amount").sink_to(DeltaSink(f"{tmp_path}/totals", name="totals"))
    executor, session = multiprocess_executor.configured({"max_concurrent": 2}), PySparkResource(spark_config={})
    location = Definitions.merge(
        Definitions(
            assets=[orders, best],
            jobs=[define_asset_job("everything", AssetSelection.all())],
            executor=executor,
            resources={"spark": session, "io_manager": FilesystemIOManager(base_dir=f"{tmp_path}/values")},
        ),
        unified_definitions(
            shops,
            resources={"spark": None, "intermediates": IntermediatesResource(path=f"{tmp_path}/store")},
            executor=None,
        ),
    )
    Definitions.validate_loadable(location)
    jobs = {name: location.resolve_job_def(name) for name in ("everything", "shops_batch")}
    assert [job.executor_def.name for job in jobs.values()] == ["multiprocess", "multiprocess"]
    assert location.resources["spark"] is session
    with DagsterInstance.local_temp(str(tmp_path)) as instance:
        ran = jobs["everything"].execute_in_process(instance=instance)
        assert ran.success
        assert ran.output_for_node("best") == [("a", 4), ("b", 2)]
        again = location.load_asset_value(AssetKey("best"), instance=instance)
    assert again == [("a", 4), ("b", 2)]
