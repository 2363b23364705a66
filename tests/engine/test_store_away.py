"""A store that does not answer is named in one sentence, and the job that needs it may be started again."""

import pytest
import s3fs
from dagster import DagsterInstance, build_sensor_context

from dagster_unified.api import Pipeline
from dagster_unified.engine.streaming.job import Start, StreamingJob
from dagster_unified.errors import UnavailableError
from dagster_unified.orchestration import (
    BatchDeployment,
    IntermediatesResource,
    SparkResource,
    StreamingDeployment,
    unified_definitions,
)
from tests.orchestration.support import ticked
from tests.ports import free_port

OPTIONS = {"execution.runtime-mode": "STREAMING", "execution.checkpointing.dir": "s3://lake/checkpoints"}


@pytest.fixture
def away(monkeypatch):
    """This process looks for buckets where nobody answers."""
    given = {
        "AWS_ACCESS_KEY_ID": "key",
        "AWS_SECRET_ACCESS_KEY": "secret",
        "AWS_ENDPOINT_URL": f"http://127.0.0.1:{free_port()}",
        "AWS_MAX_ATTEMPTS": "1",
    }
    for name, value in given.items():
        monkeypatch.setenv(name, value)
    s3fs.S3FileSystem.clear_instance_cache()
    yield
    s3fs.S3FileSystem.clear_instance_cache()


def shops():
    pipeline = Pipeline("shops")
    pipeline.from_collection([1]).print()
    return pipeline


def test_a_job_says_which_store_does_not_answer_and_may_be_started_again(away, spark):
    with pytest.raises(UnavailableError, match=r"shops: the store of s3://lake/checkpoints/shops does not answer"):
        StreamingJob(shops().plan(OPTIONS), spark, Start("job")).run()


def test_the_sensor_says_it_and_looks_again(away):
    deployment = StreamingDeployment(shops(), options=OPTIONS)
    sensor = unified_definitions(deployment).resolve_sensor_def("shops_streaming_sensor")
    with DagsterInstance.ephemeral() as instance:
        said = ticked(sensor, build_sensor_context(instance)).skip_message
    assert said.startswith("shops: the store of s3://lake/checkpoints/shops does not answer (")
    assert said.endswith("); once it does, the sensor looks again")


def test_a_stage_says_it(away, spark):
    resources = {
        "spark": SparkResource(master="local[2]"),
        "intermediates": IntermediatesResource(path="s3://lake/intermediates"),
    }
    definitions = unified_definitions(BatchDeployment(shops(), retry_policy=None), resources=resources)
    result = definitions.resolve_job_def("shops_batch").execute_in_process(raise_on_error=False)
    failed = next(e for e in result.all_node_events if e.is_step_failure)
    said = failed.step_failure_data.user_failure_data.description
    assert said.startswith("shops: the store of s3://lake/intermediates does not answer (")
    assert said.endswith("); once it does, another attempt goes on from the stages that are finished")
