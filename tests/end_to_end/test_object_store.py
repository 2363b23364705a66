"""What the library keeps in a bucket of an S3-compatible server."""

import logging

import boto3
import pytest
from moto.server import ThreadedMotoServer

from dagster_unified.engine.streaming.checkpoint import CheckpointDirectory
from dagster_unified.errors import LeaseLostError


def client(url):
    return boto3.client("s3", endpoint_url=url, aws_access_key_id="key", aws_secret_access_key="secret", region_name="us-east-1")


@pytest.fixture(scope="module")
def bucket():
    """The environment of a process that reaches the bucket `lake`."""
    logging.getLogger("werkzeug").setLevel(logging.ERROR)
    server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    url = "http://{}:{}".format(*server.get_host_and_port())
    access = {"AWS_ACCESS_KEY_ID": "key", "AWS_SECRET_ACCESS_KEY": "secret", "AWS_REGION": "us-east-1", "AWS_DEFAULT_REGION": "us-east-1"}
    client(url).create_bucket(Bucket="lake")
    yield {**access, "AWS_ENDPOINT_URL": url, "AWS_ALLOW_HTTP": "true"}
    server.stop()


def test_a_job_sees_that_another_process_took_its_lease(bucket, monkeypatch):
    for name, value in bucket.items():
        monkeypatch.setenv(name, value)
    directory = CheckpointDirectory("s3://lake/leases", "job")
    held = directory.take("one", patience=60)
    with pytest.raises(LeaseLostError, match="another job, one, is writing"):
        directory.take("two", patience=60)
    held.check()
    client(bucket["AWS_ENDPOINT_URL"]).put_object(Bucket="lake", Key="leases/job/lease/2.json", Body=b"{}")
    with pytest.raises(LeaseLostError, match="another job has taken over"):
        held.check()
    held.release()
