"""Sales by shop and day, in daily partitions of New York's days. At module scope, since re-execution imports it."""

import os
import tempfile
from pathlib import Path
from typing import NamedTuple

from dagster import (
    AssetDep,
    AssetSpec,
    BackfillPolicy,
    DailyPartitionsDefinition,
    Definitions,
    DynamicPartitionsDefinition,
    TimeWindowPartitionMapping,
    WeeklyPartitionsDefinition,
    asset,
)

from dagster_unified.api import Pipeline
from dagster_unified.connectors import CsvSource, DeltaSink
from dagster_unified.orchestration import BatchDeployment, unified_definitions
from tests.orchestration.support import resources

HOME = Path(os.environ.get("PARTITIONED_HOME") or tempfile.mkdtemp(prefix="partitioned"))
BROKEN = HOME / "broken"
"""Holds the day for which the last stage fails, or after `adding` the one before."""

DAILY = DailyPartitionsDefinition("2013-03-09", timezone="America/New_York")


class Sale(NamedTuple):
    shop: str
    at: str
    amount: int


class Total(NamedTuple):
    shop: str
    first: str
    amount: int


def as_total(sale: Sale) -> Total:
    return Total(sale.shop, sale.at, sale.amount)


def add(a: Total, b: Total) -> Total:
    if BROKEN.exists() and BROKEN.read_text() == f"adding {b.first[:10]}":
        raise OSError("the service is away")
    return Total(a.shop, min(a.first, b.first), a.amount + b.amount)


def checked(total: Total) -> Total:
    if BROKEN.exists() and total.first.startswith(BROKEN.read_text()):
        raise OSError("the service is away")
    return total


def build() -> Pipeline:
    pipeline = Pipeline("sales")
    sales = pipeline.from_source(CsvSource(str(HOME / "in"), Sale, name="incoming").partitioned_by("at")).map(as_total)
    totals = sales.key_by("shop").reduce(add).name("totals").rebalance().map(checked).name("checked")
    totals.sink_to(DeltaSink(str(HOME / "table"), name="table", mode="append"))
    return pipeline


@asset(deps=[AssetDep(["sales", "table"])], partitions_def=DAILY)
def report() -> None:
    """What somebody else makes of the pipeline's table."""


def definitions(carry_state: bool = False) -> Definitions:
    ours = unified_definitions(
        BatchDeployment(
            build(),
            retry_policy=None,
            partitions=DAILY,
            carry_state=carry_state,
            backfill_policy=BackfillPolicy.single_run(),
            upstream={"incoming": AssetDep("exports", partition_mapping=TimeWindowPartitionMapping())},
        ),
        resources=resources(HOME),
    )
    exports = AssetSpec("exports", partitions_def=WeeklyPartitionsDefinition("2013-01-06", timezone="America/New_York"))
    return Definitions.merge(ours, Definitions(assets=[exports, report]))


def by_shop() -> Definitions:
    pipeline = Pipeline("shops")
    pipeline.from_source(CsvSource(f"{HOME}/in/{{key}}.csv", Sale, name="shop")).map(as_total).sink_to(
        DeltaSink(str(HOME / "table"), name="table")
    )
    return unified_definitions(
        BatchDeployment(pipeline, partitions=DynamicPartitionsDefinition(name="shops")), resources=resources(HOME)
    )


defs = definitions()
carrying = definitions(carry_state=True)


def job():
    return defs.resolve_job_def("sales_batch")


def carrying_job():
    return carrying.resolve_job_def("sales_batch")


def shops_job():
    return by_shop().resolve_job_def("shops_batch")
