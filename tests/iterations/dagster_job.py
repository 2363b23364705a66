"""A pipeline whose iteration fails in a round as long as a file exists; at module scope, as re-execution imports it."""

import os
import tempfile
from pathlib import Path

from dagster_unified.api import DeltaSink, Pipeline, iterations
from dagster_unified.orchestration import BatchDeployment, IntermediatesResource, SparkResource, unified_definitions

HOME = Path(os.environ.get("ITERATIONS_HOME") or tempfile.mkdtemp(prefix="iterations"))
BROKEN = HOME / "broken"


def less(value: int) -> int:
    if value == 4 and BROKEN.exists():
        raise OSError("the service is away")
    return value - 1


class Countdown(iterations.IterationBody):
    def process(self, variables, data):
        fewer = variables[0].map(less).filter(lambda n: n > 0)
        ends = fewer.flat_map(iterations.TerminateOnMaxIter(7))
        return iterations.IterationBodyResult([fewer], [fewer], ends)


pipeline = Pipeline("countdown")
numbers = pipeline.from_collection([9, 8], int, name="numbers").rebalance().map(lambda n: n, int).name("begin")
(counted,) = iterations.iterate_bounded_streams_until_termination([numbers], [], Countdown())
counted.map(lambda n: (n,), tuple[int]).sink_to(DeltaSink(str(HOME / "table"), name="table", mode="overwrite"))

defs = unified_definitions(
    BatchDeployment(pipeline, retry_policy=None),
    resources={
        "spark": SparkResource(master="local[2]"),
        "intermediates": IntermediatesResource(path=str(HOME / "store")),
    },
)


def job():
    return defs.resolve_job_def("countdown_batch")
