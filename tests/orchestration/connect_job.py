"""A pipeline whose steps, each in a process of its own, share a Spark Connect server.

At module scope, since the processes import it.
"""

import os
from pathlib import Path

from dagster_unified.api import Pipeline
from dagster_unified.connectors import DeltaSink
from dagster_unified.orchestration import IntermediatesResource, SparkResource, process_executor, unified_definitions

HOME = Path(os.environ.get("CONNECT_TEST_HOME", "/tmp/connect-test"))
PORT = int(os.environ.get("CONNECT_TEST_PORT", "39475"))


def doubled(number: int) -> int:
    return 2 * number


pipeline = Pipeline("shared")
numbers = pipeline.from_collection([1, 2, 3]).map(doubled).name("once").rebalance()
numbers.map(doubled).sink_to(DeltaSink(str(HOME / "table"), name="table"))
resources = {
    "spark": SparkResource(master="local[2]", connect=PORT),
    "intermediates": IntermediatesResource(path=str(HOME / "store")),
}
defs = unified_definitions(pipeline, resources=resources, executor=process_executor())


def job():
    return defs.resolve_job_def("shared_batch")
