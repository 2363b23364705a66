"""A stream from a Kafka topic into a table of PostgreSQL and another topic, whose servers come and go."""

import os
from datetime import timedelta
from pathlib import Path
from typing import NamedTuple

from dagster import in_process_executor

from dagster_unified.api import Pipeline
from dagster_unified.connectors import KafkaSink, KafkaSource, PostgresSink
from dagster_unified.orchestration import (
    ExecutionConfig,
    IntermediatesResource,
    SparkResource,
    StreamingDeployment,
    unified_definitions,
)

HERE = Path(os.environ.get("RESTARTED_FOLDER", "/tmp/restarted"))
BROKER = os.environ.get("RESTARTED_BROKER", "127.0.0.1:1")
DATABASE = os.environ.get("RESTARTED_DATABASE", "postgresql://nobody@127.0.0.1:1/none")


class Sale(NamedTuple):
    id: int
    shop: str


pipeline = Pipeline("sales")
sales = pipeline.from_source(KafkaSource("sold", Sale, BROKER)).map(lambda sale: sale, output_type=Sale)
sales.sink_to(PostgresSink("sold", DATABASE, name="table"))
sales.sink_to(KafkaSink("copied", BROKER, name="topic"))

defs = unified_definitions(
    pipeline,
    StreamingDeployment(
        pipeline,
        options={
            "execution.checkpointing.dir": str(HERE / "checkpoints"),
            "parallelism.default": 2,
            "restart-strategy.exponential-delay.initial-backoff": "1 s",
            "restart-strategy.exponential-delay.max-backoff": "3 s",
        },
        tick_every=timedelta(seconds=1),
        executor=in_process_executor,
    ),
    resources={
        "spark": SparkResource(master="local[2]", config={"spark.driver.memory": "1g"}),
        "execution": ExecutionConfig(),
        "intermediates": IntermediatesResource(path=str(HERE / "intermediates")),
    },
)
