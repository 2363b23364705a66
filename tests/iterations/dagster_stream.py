"""A streaming deployment of `hopping`, one of whose processes is killed in a round; at module scope, as runs import it.

It is for processes of its own, whose environment says what is killed: STREAM_VICTIM is one of `victims`, where a record
takes hop STREAM_HOP for the first time. In the folder STREAM_HOME are its files, and in `rounds` of it the rounds that
were begun to be computed.
"""

import os
from datetime import timedelta
from functools import partial
from pathlib import Path

from dagster import in_process_executor, multiprocess_executor

from dagster_unified.engine.streaming.job import Start
from dagster_unified.orchestration import SparkResource, StreamingDeployment, streaming, unified_definitions
from tests.iterations.killed_stream import Killing, hopping, noting, options
from tests.iterations.test_streaming_on_spark import HOPS

HOME = Path(os.environ["STREAM_HOME"])

RESTARTED_ONCE = {
    "restart-strategy.type": "FIXED-DELAY",
    "restart-strategy.fixed-delay.attempts": 1,
    "restart-strategy.fixed-delay.delay": "10 ms",
}

noting(HOME / "rounds")
streaming.Start = partial(Start, patience=2.0)  # of the lease of a process that was killed, which else takes 20 s

killing = Killing(HOME, os.environ["STREAM_VICTIM"], int(os.environ["STREAM_HOP"]))
pipeline = hopping(HOME, HOPS, os.environ["STREAM_KIND"], lambda seen: seen.map(killing))

defs = unified_definitions(
    pipeline,
    StreamingDeployment(
        pipeline,
        options={**options(HOME), **RESTARTED_ONCE},
        tick_every=timedelta(seconds=1),
        executor=multiprocess_executor if os.environ["STREAM_EXECUTOR"] == "multiprocess" else in_process_executor,
    ),
    resources={"spark": SparkResource(master="local[2,3]", config={"spark.sql.shuffle.partitions": "2"})},
)


def job():
    return defs.resolve_job_def("hopping_streaming")


def sensor():
    return defs.resolve_sensor_def("hopping_streaming_sensor")
