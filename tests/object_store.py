"""A server on this machine that speaks S3, and the environment of a process that reaches it."""

import logging
from collections.abc import Iterator
from contextlib import contextmanager

import boto3
import s3fs
from moto.server import ThreadedMotoServer


@contextmanager
def served(bucket: str) -> Iterator[dict[str, str]]:
    """The environment in which `s3://<bucket>` is there."""
    logging.getLogger("werkzeug").setLevel(logging.ERROR)
    server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    url = "http://{}:{}".format(*server.get_host_and_port())
    client(url).create_bucket(Bucket=bucket)
    yield {
        "AWS_ACCESS_KEY_ID": "key",
        "AWS_SECRET_ACCESS_KEY": "secret",
        "AWS_REGION": "us-east-1",
        "AWS_DEFAULT_REGION": "us-east-1",
        "AWS_ENDPOINT_URL": url,
        "AWS_ALLOW_HTTP": "true",
    }
    server.stop()
    # or the next server's clients in this process would look for this one
    s3fs.S3FileSystem.clear_instance_cache()


def client(url: str):
    return boto3.client(
        "s3", endpoint_url=url, aws_access_key_id="key", aws_secret_access_key="secret", region_name="us-east-1"
    )
