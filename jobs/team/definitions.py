"""The code location of the project: a table of an IO manager, a pipeline, a dbt model and an asset in polars.

Nobody says who reads whose table but dbt's source, in two lines. All of it is by days, and follows by automation:
`orders` is materialized, or a stream commits, and what is behind it runs.
"""

# No `from __future__ import annotations` here: Dagster reads the annotations of assets' functions as objects.
import json
import os
from collections.abc import Iterator, Mapping
from datetime import date, timedelta
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import polars as pl
import pyarrow as pa
from dagster import (
    AssetExecutionContext,
    AssetIn,
    AssetKey,
    AutomationCondition,
    AutomationConditionSensorDefinition,
    BackfillPolicy,
    ConfigurableIOManager,
    DailyPartitionsDefinition,
    DefaultSensorStatus,
    Definitions,
    InputContext,
    OutputContext,
    asset,
)
from dagster_dbt import DagsterDbtTranslator, DbtCliResource, DbtProject, dbt_assets
from deltalake import DeltaTable, write_deltalake
from msgspec import Meta

from dagster_unified.api import Pipeline, TumblingEventTimeWindows, WatermarkStrategy
from dagster_unified.connectors import DeltaSink, DeltaSource
from dagster_unified.orchestration import (
    BatchDeployment,
    IntermediatesResource,
    SparkResource,
    StreamingDeployment,
    unified_definitions,
)
from jobs.team.orders import Order, orders_of

HOME = Path(os.environ["TEAM_HOME"])
LAKE = HOME / "lake"
DAYS = DailyPartitionsDefinition("2024-03-01", timezone="UTC")
EACH_DAY = AutomationCondition.eager().without(AutomationCondition.in_latest_time_window())


# A table of an IO manager, as the project had it before


class DeltaFolder(ConfigurableIOManager):  # type: ignore[type-arg]
    """The team's own IO manager: a Delta table for each asset, of which a run replaces its day."""

    folder: str

    def handle_output(self, context: OutputContext, obj: pa.Table) -> None:
        day = context.partition_key
        path = f"{self.folder}/{context.asset_key.path[-1]}"
        predicate = f"day = '{day}'" if DeltaTable.is_deltatable(path) else None
        write_deltalake(path, obj, mode="overwrite", partition_by=["day"], predicate=predicate)

    def load_input(self, context: InputContext) -> pa.Table:
        table = DeltaTable(f"{self.folder}/{context.asset_key.path[-1]}").to_pyarrow_table()
        return table.filter(pa.compute.field("day") == context.partition_key)


@asset(
    partitions_def=DAYS,
    io_manager_key="lake",
    metadata={"dagster/table_name": str(LAKE / "orders")},
    group_name="revenue",
    kinds={"deltalake"},
)
def orders(context: AssetExecutionContext) -> pa.Table:
    """What the shops sold on a day."""
    return orders_of(context.partition_key)


# The pipeline, by days in BATCH and as a stream


class Revenue(NamedTuple):
    """What a shop sold on a day."""

    shop: Annotated[str, Meta(description="The shop's name.")]
    day: Annotated[date, Meta(description="The day in UTC.")]
    amount: Annotated[int, Meta(description="What was paid, in cents.")]


def revenue_of(order: Order) -> Revenue:
    """What an order adds."""
    return Revenue(order.shop, order.at.date(), order.amount)


def is_paid(order: Order) -> bool:
    """Whether something was paid."""
    return order.amount > 0


def build() -> Pipeline:
    """Revenue by shop and day, of the orders in the lake."""
    pipeline = Pipeline("revenue")
    in_time = WatermarkStrategy.for_bounded_out_of_orderness(timedelta(minutes=5)).with_timestamp_assigner("at")
    source = DeltaSource(str(LAKE / "orders"), Order, name="orders", bounded=False).partitioned_by("at")
    paid = pipeline.from_source(source, in_time).filter(is_paid).name("paid").map(revenue_of)
    by_day = paid.key_by("shop", "day").window(TumblingEventTimeWindows.of(timedelta(days=1))).sum("amount")
    by_day.name("by day").uid("by-day").sink_to(
        DeltaSink(str(LAKE / "revenue"), mode="upsert", key=("shop", "day"), asset=AssetKey(["lake", "revenue"]))
    )
    return pipeline


pipeline = build()
every = timedelta(seconds=2)
stream = StreamingDeployment(
    pipeline,
    rerun_late=True,
    options={"execution.checkpointing.dir": str(HOME / "checkpoints"), "parallelism.default": 2},
    observe_every=every,
    tick_every=every,
)
days = BatchDeployment(
    pipeline, partitions=DAYS, backfill_policy=BackfillPolicy.single_run(), automation_condition=EACH_DAY
)


# What comes behind it


class FromLake(DagsterDbtTranslator):
    """dbt's source is the pipeline's table, and its models follow each day."""

    def get_asset_key(self, dbt_resource_props: Mapping[str, Any]) -> AssetKey:
        if dbt_resource_props["resource_type"] == "source":
            return AssetKey(["lake", dbt_resource_props["name"]])
        return super().get_asset_key(dbt_resource_props)

    def get_group_name(self, dbt_resource_props: Mapping[str, Any]) -> str:
        return "revenue"

    def get_automation_condition(self, dbt_resource_props: Mapping[str, Any]) -> AutomationCondition[AssetKey] | None:
        return EACH_DAY


project = DbtProject(Path(__file__).with_name("dbt"), target_path=HOME / "dbt")
project.preparer.prepare(project)


@dbt_assets(
    manifest=project.manifest_path,
    partitions_def=DAYS,
    backfill_policy=BackfillPolicy.multi_run(),
    dagster_dbt_translator=FromLake(),
)
def models(context: AssetExecutionContext, dbt: DbtCliResource) -> Iterator[Any]:
    """The models of a day."""
    command = ["build", "--vars", json.dumps({"day": context.partition_key})]
    yield from dbt.cli(command, context=context, target_path=HOME / "dbt" / context.run_id).stream()


@asset(
    partitions_def=DAYS,
    automation_condition=EACH_DAY,
    group_name="revenue",
    kinds={"polars"},
    ins={"revenue": AssetIn(AssetKey(["lake", "revenue"]), metadata={"partition_expr": "day"})},
)
def best_shop(context: AssetExecutionContext, revenue: pl.DataFrame) -> None:
    """The shop with the highest revenue of a day."""
    best = revenue.sort("amount", "shop", descending=[True, False]).head(1)
    (HOME / "best").mkdir(exist_ok=True)
    best.write_csv(HOME / "best" / f"{context.partition_key}.csv")
    context.add_output_metadata({"shop": best["shop"][0]})


defs = Definitions.merge(
    unified_definitions(
        days,
        stream,
        resources={
            "spark": SparkResource(master="local[2]"),
            "intermediates": IntermediatesResource(path=str(HOME / "intermediates")),
        },
    ),
    Definitions(
        assets=[orders, models, best_shop],
        sensors=[
            AutomationConditionSensorDefinition(
                "follow", target="*", default_status=DefaultSensorStatus.RUNNING, minimum_interval_seconds=2
            )
        ],
        resources={"lake": DeltaFolder(folder=str(LAKE)), "dbt": DbtCliResource(project_dir=project)},
    ),
)
