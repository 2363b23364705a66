"""Sales doubled, day by day, with a pool for the stages; for the test under `dagster dev`.

At module scope, since runs import it.
"""

import os
import tempfile
from pathlib import Path
from typing import NamedTuple

from dagster import BackfillPolicy, DailyPartitionsDefinition

from dagster_unified.api import CsvSource, DeltaSink, Pipeline
from dagster_unified.orchestration import BatchDeployment, IntermediatesResource, SparkResource, unified_definitions

HOME = Path(os.environ.get("POOL_TEST_FOLDER") or tempfile.mkdtemp(prefix="pool"))
DAYS = DailyPartitionsDefinition("2024-01-01", end_date="2024-01-05")


class Sale(NamedTuple):
    shop: str
    amount: int


def doubled(sale: Sale) -> Sale:
    return Sale(sale.shop, 2 * sale.amount)


pipeline = Pipeline("doubles")
sales = pipeline.from_source(CsvSource(f"{HOME}/in/{{key}}.csv", Sale, name="sales")).map(doubled).name("doubled")
sales.rebalance().map(doubled).sink_to(DeltaSink(str(HOME / "table"), name="table", mode="append"))

defs = unified_definitions(
    BatchDeployment(pipeline, partitions=DAYS, backfill_policy=BackfillPolicy.multi_run(1), pool="spark"),
    resources={
        "spark": SparkResource(master="local[1]", config={"spark.driver.memory": "512m"}),
        "intermediates": IntermediatesResource(path=str(HOME / "store")),
    },
)
