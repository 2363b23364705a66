"""A store that does not answer is named in one sentence, and the job that needs it may be started again."""

import pytest
import s3fs

from dagster_unified.api import Pipeline
from dagster_unified.engine.streaming.job import Start, StreamingJob
from dagster_unified.errors import UnavailableError
from tests.ports import free_port


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


def test_a_job_says_which_store_does_not_answer_and_may_be_started_again(away, spark):
    pipeline = Pipeline("shops")
    pipeline.from_collection([1]).print()
    options = {"execution.runtime-mode": "STREAMING", "execution.checkpointing.dir": "s3://lake/checkpoints"}
    with pytest.raises(UnavailableError, match=r"shops: the store of s3://lake/checkpoints/shops does not answer"):
        StreamingJob(pipeline.plan(options), spark, Start("job")).run()
