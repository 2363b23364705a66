"""`@unified_assets`: what it gives stands in a module of assets."""

from types import ModuleType

import pytest
from dagster import (
    AssetKey,
    AssetSelection,
    DagsterInstance,
    DagsterInvalidDefinitionError,
    Definitions,
    StaticPartitionsDefinition,
    define_asset_job,
    load_assets_from_modules,
)
from deltalake import DeltaTable

from dagster_unified.connectors import DeltaSink, PostgresSource, ResourceKey
from dagster_unified.errors import ConfigurationError
from dagster_unified.orchestration import IntermediatesResource, unified_assets, unified_resources
from tests.support import Sale


def revenue_of(folder, **deployment):
    @unified_assets(**deployment)
    def revenue(pipeline):
        sales = pipeline.from_collection([Sale("a", 1), Sale("b", 2), Sale("a", 3)], Sale, "sales")
        sales.key_by("shop").sum("amount").sink_to(DeltaSink(f"{folder}/totals", name="totals"))

    return revenue


def test_a_module_of_assets_has_the_pipelines_and_a_job_of_the_location_runs_them(spark, tmp_path):
    module = ModuleType("shop_assets")
    module.revenue = revenue_of(tmp_path)
    definitions = Definitions(
        assets=load_assets_from_modules([module]),
        jobs=[define_asset_job("everything", AssetSelection.all())],
        resources={**unified_resources(), "intermediates": IntermediatesResource(path=f"{tmp_path}/store")},
    )
    keys = {key.to_user_string() for key in definitions.resolve_asset_graph().get_all_asset_keys()}
    assert keys == {"revenue/sales_source", "revenue/sales_stage", "revenue/totals_stage", "revenue/totals"}
    with DagsterInstance.ephemeral() as instance:
        assert definitions.resolve_job_def("everything").execute_in_process(instance=instance).success
        assert instance.get_latest_materialization_event(AssetKey(["revenue", "totals"])) is not None
    rows = DeltaTable(f"{tmp_path}/totals").to_pyarrow_table().to_pylist()
    assert sorted((row["shop"], row["amount"]) for row in rows) == [("a", 4), ("b", 2)]


def test_the_arguments_are_those_of_a_batch_deployment(tmp_path):
    partitions = StaticPartitionsDefinition(["a", "b"])
    with pytest.raises(TypeError, match="partition_def"):
        revenue_of(tmp_path, partition_def=partitions)
    with pytest.raises(ConfigurationError, match="revenue: checks makes more than assets"):
        revenue_of(tmp_path, checks=None)
    with pytest.raises(ConfigurationError, match="revenue: pool is a str"):
        revenue_of(tmp_path, pool=3)


def test_a_pipeline_that_names_resources_is_for_unified_definitions():
    with pytest.raises(ConfigurationError, match="revenue: its sources and sinks name the resources warehouse, and"):

        @unified_assets()
        def revenue(pipeline):
            pipeline.from_source(PostgresSource("sales", Sale, ResourceKey("warehouse"))).print()


@pytest.mark.parametrize("missing", ["spark", "execution", "intermediates", "unified_tables"])
def test_a_location_without_a_resource_does_not_load_and_says_which(tmp_path, missing):
    resources = {key: value for key, value in unified_resources().items() if key != missing}
    with pytest.raises(DagsterInvalidDefinitionError, match=rf"key '{missing}' required by .*revenue__"):
        Definitions.validate_loadable(Definitions(assets=revenue_of(tmp_path), resources=resources))
