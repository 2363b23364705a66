"""A pipeline whose iteration fails in a round as long as a file exists; at module scope, as re-execution imports it.

Where the file has the name of one of the processes of `victims`, that one is killed in the round, once. Where it has
`waits`, the round takes long.
"""

import os
import tempfile
import time
from pathlib import Path

from dagster import RetryPolicy, in_process_executor, multiprocess_executor

from dagster_unified.api import Pipeline, iterations
from dagster_unified.connectors import DeltaSink
from dagster_unified.orchestration import BatchDeployment, IntermediatesResource, SparkResource, unified_definitions
from tests.iterations.victims import kill

HOME = Path(os.environ.get("ITERATIONS_HOME") or tempfile.mkdtemp(prefix="iterations"))
BROKEN = HOME / "broken"
WAITS = HOME / "waits"
"""There once a round waits."""

BREAKS_AT = int(os.environ.get("ITERATIONS_BREAKS_AT", "4"))


def less(value: int) -> int:
    if value == BREAKS_AT and BROKEN.exists():
        if (victim := BROKEN.read_text()) == "waits":
            WAITS.touch()
            time.sleep(20)
            return value - 1
        if victim:
            BROKEN.unlink()
            kill(victim)
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
    BatchDeployment(pipeline, retry_policy=RetryPolicy(max_retries=1) if "ITERATIONS_RETRIES" in os.environ else None),
    resources={
        "spark": SparkResource(master="local[2]"),
        "intermediates": IntermediatesResource(path=str(HOME / "store")),
    },
    executor=multiprocess_executor if "ITERATIONS_EXECUTOR" in os.environ else in_process_executor,
)


def job():
    return defs.resolve_job_def("countdown_batch")
