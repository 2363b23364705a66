"""A pipeline over a watched folder, for tests that run it under Dagster: totals per key, in a Delta table."""

import os
import time
from datetime import timedelta
from pathlib import Path
from typing import NamedTuple

from dagster import in_process_executor, multiprocess_executor

from dagster_unified.api import Pipeline
from dagster_unified.connectors import CsvSource, DeltaSink
from dagster_unified.orchestration import (
    ExecutionConfig,
    IntermediatesResource,
    SparkResource,
    StreamingDeployment,
    unified_definitions,
)

HERE = Path(os.environ.get("STREAMING_TEST_FOLDER", "/tmp/streaming-test"))
OPTIONS = {
    "execution.checkpointing.dir": str(HERE / "checkpoints"),
    "pipeline.max-parallelism": 4,
    "parallelism.default": 2,
    "restart-strategy.exponential-delay.initial-backoff": "1 s",
}
FACTOR = int(os.environ.get("STREAMING_TEST_FACTOR", "1"))
TERMS = range(int(os.environ.get("STREAMING_TEST_TERMS", "1")))
"""More of them compute the same in another way."""


class Sale(NamedTuple):
    shop: str
    amount: int


def add(a: Sale, b: Sale) -> Sale:
    return Sale(a.shop, a.amount + b.amount)


def scaled(sale: Sale) -> Sale:
    while sale.shop == "stuck" and not (HERE / "go on").exists():
        time.sleep(0.1)
    return Sale(sale.shop, sum(sale.amount * FACTOR // len(TERMS) for _ in TERMS))


pipeline = Pipeline("sales")
sales = pipeline.from_source(CsvSource(str(HERE / "in"), Sale, name="incoming", monitor=True, max_files_per_trigger=1))
sales.map(scaled).uid("scaled").key_by("shop").reduce(add).uid("totals").sink_to(
    DeltaSink(str(HERE / "totals"), mode="upsert", key="shop", name="totals")
)

defs = unified_definitions(
    pipeline,
    StreamingDeployment(
        pipeline,
        options=OPTIONS,
        observe_every=timedelta(seconds=2),
        tick_every=timedelta(seconds=1),
        stall_after=timedelta(seconds=40),
        upgrade_mode=os.environ.get("STREAMING_TEST_UPGRADE", "last-state"),
        executor=multiprocess_executor
        if os.environ.get("STREAMING_TEST_EXECUTOR") == "multiprocess"
        else in_process_executor,
    ),
    resources={
        "spark": SparkResource(
            master=os.environ.get("STREAMING_TEST_MASTER", "local[2]"),
            connect=int(os.environ["STREAMING_TEST_CONNECT"]) if "STREAMING_TEST_CONNECT" in os.environ else None,
            config={"spark.driver.memory": "1g", "spark.executor.memory": "700m"},
        ),
        "execution": ExecutionConfig(),
        "intermediates": IntermediatesResource(path=str(HERE / "intermediates")),
    },
)
