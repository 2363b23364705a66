"""One Spark session per test process; small data; nothing outside tmp_path."""

import os
import sys

os.environ.setdefault("PYSPARK_PYTHON", sys.executable)
os.environ.setdefault("DAGSTER_DISABLE_TELEMETRY", "yes")

import pytest

from dagster_unified.engine import session
from dagster_unified.engine.batch.stage import Run, run_all
from dagster_unified.engine.batch.store import IntermediateStore
from dagster_unified.engine.streaming.job import Start, StreamingJob


@pytest.fixture(scope="session")
def spark():
    running = session.start("local[2]", config={"spark.driver.memory": "2g", "spark.sql.shuffle.partitions": "2"})
    yield running
    running.stop()


@pytest.fixture
def run_on_spark(spark, tmp_path):
    """Runs a pipeline's stages on Spark and gives the records of each sink, read back from Parquet."""

    def run(pipeline, options=None):
        plan = pipeline.plan({"execution.runtime-mode": "BATCH", **(options or {})})
        return run_all(Run(plan, spark, IntermediateStore(str(tmp_path / "store")), "run", "run"))

    return run


@pytest.fixture
def run_streaming(spark, tmp_path):
    """Runs a pipeline in STREAMING to the end of its input, in a checkpoint directory of its own."""

    def run(pipeline, options=None, start=None):
        launched = {"execution.runtime-mode": "STREAMING", "execution.checkpointing.dir": str(tmp_path / "checkpoints"), "pipeline.max-parallelism": 4, **(options or {})}
        return StreamingJob(pipeline.plan(launched), spark, start or Start("test")).run()

    return run
