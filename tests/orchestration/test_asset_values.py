"""What other assets return, as records of a pipeline: whole, by partition, and as Dagster's partition mappings say."""

from typing import NamedTuple

import pandas as pd
import pyarrow as pa
import pytest
from dagster import (
    AssetDep,
    AssetKey,
    BackfillPolicy,
    DagsterInstance,
    DailyPartitionsDefinition,
    Definitions,
    Failure,
    HourlyPartitionsDefinition,
    TimeWindowPartitionMapping,
    asset,
)
from deltalake import DeltaTable

from dagster_unified.api import Pipeline
from dagster_unified.connectors import AssetSource, DeltaSink
from dagster_unified.errors import ConfigurationError
from dagster_unified.orchestration import BatchDeployment, unified_definitions
from tests.orchestration.support import resources, whole_range


class Order(NamedTuple):
    shop: str
    amount: int


DAILY = DailyPartitionsDefinition("2024-01-01", end_date="2024-01-04")
AMOUNTS = {"2024-01-01": 1, "2024-01-02": 2, "2024-01-03": 3}


class Shop:
    def __init__(self, folder, instance):
        self.folder, self.instance = folder, instance

    def definitions(self, *assets, source=None, **options):
        """Orders of an asset, summed up by shop in a second stage."""
        pipeline = Pipeline("shops")
        orders = pipeline.from_source(source or AssetSource("orders", Order))
        totals = orders.key_by("shop").sum("amount")
        totals.sink_to(DeltaSink(str(self.folder / "totals"), name="totals", mode="append"))
        ours = unified_definitions(BatchDeployment(pipeline, **options), resources=resources(self.folder))
        return Definitions.merge(ours, Definitions(assets=assets))

    def run(self, definitions, **options):
        job = definitions.resolve_implicit_global_asset_job_def()
        return job.execute_in_process(instance=self.instance, **options)

    def totals(self):
        rows = DeltaTable(str(self.folder / "totals")).to_pyarrow_table().to_pylist()
        return sorted((row["shop"], row["amount"]) for row in rows)


@pytest.fixture
def shop(spark, tmp_path):
    with DagsterInstance.ephemeral() as instance:
        yield Shop(tmp_path, instance)


@asset(partitions_def=DAILY)
def orders(context) -> pd.DataFrame:
    return pd.DataFrame({"shop": ["a"], "amount": [AMOUNTS[context.partition_key]]})


def test_a_pipeline_reads_what_an_asset_before_it_returns_in_the_same_run(shop):
    @asset
    def orders() -> pa.Table:
        return pa.table({"shop": ["a", "b", "a"], "amount": [1, 2, 3]})

    shop.run(shop.definitions(orders))
    assert shop.totals() == [("a", 4), ("b", 2)]


def test_an_asset_of_another_folder_gives_records(shop):
    @asset(key_prefix="raw")
    def orders() -> list:
        return [Order("a", 1), Order("a", 2)]

    shop.run(shop.definitions(orders, source=AssetSource("raw/orders", Order, name="in")))
    assert shop.totals() == [("a", 3)]


def test_a_run_of_a_partition_reads_the_value_of_that_partition(shop):
    definitions = shop.definitions(orders, partitions=DAILY)
    for day in AMOUNTS:
        shop.run(definitions, partition_key=day)
    assert shop.totals() == [("a", 1), ("a", 2), ("a", 3)]


def test_a_run_of_several_partitions_gives_each_its_own(shop):
    definitions = shop.definitions(orders, partitions=DAILY, backfill_policy=BackfillPolicy.single_run())
    job = definitions.resolve_implicit_global_asset_job_def()
    for day in AMOUNTS:
        job.execute_in_process(instance=shop.instance, partition_key=day, asset_selection=[AssetKey("orders")])
    written = [AssetKey(["shops", name]) for name in ("totals", "totals_stage", "orders_stage")]
    known = {key for key in written if definitions.resolve_asset_graph().has(key)}
    tags = whole_range("2024-01-01", "2024-01-03")
    shop.run(definitions, asset_selection=sorted(known), tags=tags)
    assert shop.totals() == [("a", 1), ("a", 2), ("a", 3)]


def test_a_day_has_the_values_of_all_its_hours(shop):
    @asset(partitions_def=HourlyPartitionsDefinition("2024-01-01-00:00", end_date="2024-01-04-00:00"))
    def orders(context) -> list:
        return [Order("a", int(context.partition_key[-5:-3]))]

    definitions = shop.definitions(orders, partitions=DAILY)
    job = definitions.resolve_implicit_global_asset_job_def()
    hours = [f"2024-01-01-{hour:02}:00" for hour in range(24)]
    for hour in hours:
        job.execute_in_process(instance=shop.instance, partition_key=hour, asset_selection=[AssetKey("orders")])
    definitions.resolve_job_def("shops_batch").execute_in_process(instance=shop.instance, partition_key="2024-01-01")
    assert shop.totals() == [("a", sum(range(24)))]


def test_a_partition_mapping_of_the_deployment_says_which_partitions_belong_together(shop):
    day_before = TimeWindowPartitionMapping(start_offset=-1, end_offset=-1)
    definitions = shop.definitions(
        orders, partitions=DAILY, upstream={"orders": AssetDep("orders", partition_mapping=day_before)}
    )
    job = definitions.resolve_implicit_global_asset_job_def()
    job.execute_in_process(instance=shop.instance, partition_key="2024-01-01", asset_selection=[AssetKey("orders")])
    definitions.resolve_job_def("shops_batch").execute_in_process(instance=shop.instance, partition_key="2024-01-02")
    assert shop.totals() == [("a", 1)]


def test_an_asset_without_partitions_has_to_say_which_records_belong_to_one(shop):
    @asset
    def orders() -> list:
        return [Order("2024-01-01", 1), Order("2024-01-02", 2)]

    static = DailyPartitionsDefinition("2024-01-01", end_date="2024-01-03")
    source = AssetSource("orders", Order)
    job = shop.definitions(orders, partitions=static).resolve_implicit_global_asset_job_def()
    job.execute_in_process(instance=shop.instance, asset_selection=[AssetKey("orders")])

    def day(source):
        batch = shop.definitions(orders, source=source, partitions=static).resolve_job_def("shops_batch")
        batch.execute_in_process(instance=shop.instance, partition_key="2024-01-02")

    with pytest.raises(Failure, match=r"source 'orders' .*: the asset has no partitions, and does not say which"):
        day(source)
    day(source.partitioned_by("shop"))
    assert shop.totals() == [("2024-01-02", 2)]
    day(source.for_every_partition())
    assert shop.totals() == [("2024-01-01", 1), ("2024-01-02", 2)]


def test_a_value_that_does_not_fit_names_asset_source_and_column(shop):
    @asset
    def orders() -> pa.Table:
        return pa.table({"shop": ["a"], "amount": ["1"]})

    words = (
        "^shops: source 'orders': what asset orders returned has a column 'amount' of string, and a value of it could"
    )
    with pytest.raises(Failure, match=words):
        shop.run(shop.definitions(orders))


def test_upstream_may_not_name_another_asset(shop):
    with pytest.raises(ConfigurationError, match="source 'orders' reads what asset orders returns, and upstream names"):
        shop.definitions(upstream={"orders": "others"})


def test_a_run_of_a_table_without_its_stage_waits_for_the_value(shop):
    @asset
    def orders() -> list:
        return [Order("a", 1)]

    pipeline = Pipeline("shops")
    sink = DeltaSink(str(shop.folder / "totals"), name="copies")
    pipeline.from_source(AssetSource("orders", Order)).sink_to(sink)
    ours = unified_definitions(pipeline, resources=resources(shop.folder))
    selected = [AssetKey("orders"), AssetKey(["shops", "copies"])]
    shop.run(Definitions.merge(ours, Definitions(assets=[orders])), asset_selection=selected)
    assert shop.totals() == [("a", 1)]
