"""Running totals by shop over daily partitions that hand their state on, and sales doubled day by day.

The stages have a pool. For the tests under `dagster dev`, and at module scope, since runs import it.
"""

import os
import tempfile
from pathlib import Path
from typing import NamedTuple

from dagster import BackfillPolicy, DailyPartitionsDefinition

from dagster_unified.api import KeyedProcessFunction, Pipeline, ValueStateDescriptor
from dagster_unified.connectors import CsvSource, DeltaSink
from dagster_unified.orchestration import (
    BatchDeployment,
    ExecutionConfig,
    IntermediatesResource,
    SparkResource,
    unified_definitions,
)

HOME = Path(os.environ.get("BACKFILL_TEST_FOLDER") or tempfile.mkdtemp(prefix="backfill"))
CONNECT = os.environ.get("BACKFILL_TEST_CONNECT")
"""The port of the Spark Connect server that the runs share."""

DAYS = DailyPartitionsDefinition("2024-01-01", end_date="2024-01-09")


class Sale(NamedTuple):
    shop: str
    amount: int


class Total(NamedTuple):
    shop: str
    number: int
    total: int


class Running(KeyedProcessFunction):
    """The total after each sale."""

    def open(self, context):
        self.number = context.get_state(ValueStateDescriptor("number", int))
        self.total = context.get_state(ValueStateDescriptor("total", int))

    def process_element(self, value, ctx):
        self.number.update((self.number.value() or 0) + 1)
        self.total.update((self.total.value() or 0) + value.amount)
        yield Total(value.shop, self.number.value(), self.total.value())


def same(total: Total) -> Total:
    return total


def doubled(sale: Sale) -> Sale:
    return Sale(sale.shop, 2 * sale.amount)


pipeline = Pipeline("totals")
sales = pipeline.from_source(CsvSource(f"{HOME}/in/{{key}}.csv", Sale, name="sales"))
running = sales.key_by("shop").process(Running(), output_type=Total).name("running").uid("running")
running.rebalance().map(same).name("same").sink_to(DeltaSink(str(HOME / "table"), name="table", mode="append"))

doubles = Pipeline("doubles")
incoming = doubles.from_source(CsvSource(f"{HOME}/in/{{key}}.csv", Sale, name="incoming")).map(doubled).name("doubled")
incoming.rebalance().map(doubled).sink_to(DeltaSink(str(HOME / "doubles"), name="written", mode="append"))

defs = unified_definitions(
    BatchDeployment(pipeline, partitions=DAYS, carry_state=True, retry_policy=None),
    BatchDeployment(doubles, partitions=DAYS, backfill_policy=BackfillPolicy.multi_run(1), pool="spark"),
    resources={
        "spark": SparkResource(master="local[2]", connect=int(CONNECT) if CONNECT else None),
        "intermediates": IntermediatesResource(path=str(HOME / "store")),
        "execution": ExecutionConfig(**{"execution.batch.partitions-per-job": 2}),
    },
)
