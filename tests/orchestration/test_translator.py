"""An author's `PipelineTranslator`, and dagster-pyspark's `PySparkResource` in the place of `spark`."""

from dagster import AssetKey, DagsterInstance, IOManager
from dagster_pyspark import PySparkResource
from deltalake import DeltaTable

from dagster_unified.api import Pipeline
from dagster_unified.connectors import CsvSource, DeltaSink
from dagster_unified.orchestration import IntermediatesResource, PipelineTranslator, Stage, unified_definitions
from tests.support import Sale


class Untouched(IOManager):
    """The code location's own IO manager, which has nothing to do with the stages."""

    def handle_output(self, context, obj):
        raise AssertionError(f"{context.asset_key} was stored")

    def load_input(self, context):
        raise AssertionError(f"{context.asset_key} was loaded")


class InFinance(PipelineTranslator):
    def get_asset_spec(self, part):
        spec = super().get_asset_spec(part)
        described = spec.replace_attributes(
            key=spec.key.with_prefix("finance"), group_name="finance", description=f"{part.name} of the ledger"
        )
        return described.merge_attributes(tags={"team": "ledger"}, metadata={"stages": len(part.plan.regions)})


def test_a_translator_changes_keys_groups_tags_kinds_descriptions_and_metadata_and_pyspark_runs_the_stages(
    spark, tmp_path
):
    (tmp_path / "sales.csv").write_text("shop,amount\nnorth,1\nnorth,2\n")
    pipeline = Pipeline("sales")
    sales = pipeline.from_source(CsvSource(str(tmp_path / "sales.csv"), Sale))
    sales.key_by("shop").sum("amount").sink_to(DeltaSink(str(tmp_path / "totals")))
    resources = {
        "spark": PySparkResource(spark_config={}),
        "intermediates": IntermediatesResource(path=str(tmp_path / "store")),
        "io_manager": Untouched(),
    }
    definitions = unified_definitions(pipeline, resources=resources, translator=InFinance())

    graph = definitions.resolve_asset_graph()
    first, last, table = (AssetKey(["finance", "sales", n]) for n in ("sales_stage", "totals_stage", "totals"))
    assert graph.materializable_asset_keys == {first, last, table}
    assert graph.get(first).parent_keys == {AssetKey(["finance", "sales", "sales_source"])}
    assert graph.get(last).parent_keys == {first}
    assert graph.get(table).parent_keys == {last}
    shown = graph.get(table)
    assert (shown.group_name, shown.tags["team"], shown.kinds, shown.description, shown.metadata["stages"]) == (
        "finance",
        "ledger",
        {"table", "deltalake"},
        "totals of the ledger",
        2,
    )

    with DagsterInstance.ephemeral() as instance:
        assert definitions.resolve_job_def("sales_batch").execute_in_process(instance=instance).success
        assert (
            instance.get_latest_materialization_event(table).asset_materialization.metadata["dagster/row_count"].value
            == 1
        )
    assert DeltaTable(str(tmp_path / "totals")).to_pyarrow_table().to_pylist() == [{"shop": "north", "amount": 3}]


def test_a_stage_that_holds_state_of_keys_is_of_the_kind_stateful():
    pipeline = Pipeline("counts")
    pipeline.from_collection([("a", 1)]).key_by(0).sum(1).print()
    plan = pipeline.plan()
    kinds = [PipelineTranslator().get_asset_spec(Stage(plan, region)).kinds for region in plan.regions]
    assert kinds == [{"spark", "stage"}, {"spark", "stage", "stateful"}]
