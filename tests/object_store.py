"""A server on this machine that speaks S3, and how a process and its Spark session reach it."""

import logging
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from threading import Lock

import boto3
import s3fs
from moto.server import ThreadedMotoServer

HADOOP, AWS = "3.5.0", "2.35.4"
"""The versions that Spark 4.3 was built with.

See `pyspark/jars/hadoop-client-api-3.5.0.jar`, and what its hadoop-aws asks for.
"""

MODULES = ("s3", "sts", "s3-transfer-manager", "apache-client", "netty-nio-client")
"""What hadoop-aws needs of `software.amazon.awssdk:bundle`, which has 600 MB."""

IVY = """<ivysettings>
<settings defaultResolver="central"/>
<resolvers><ibiblio name="central" m2compatible="true"/></resolvers>
</ivysettings>"""


CONDITIONS = ("HTTP_IF_MATCH", "HTTP_IF_NONE_MATCH")


class Conditions:
    """Makes moto compare and write in one, as S3 does; or ignore the conditions of writes, as older stores do."""

    def __init__(self, app, ignored: bool) -> None:
        self._app, self._ignored, self._writing = app, ignored, Lock()

    def __call__(self, environ, start_response):
        conditional = environ["REQUEST_METHOD"] == "PUT" and any(name in environ for name in CONDITIONS)
        if conditional and self._ignored:
            environ = {name: value for name, value in environ.items() if name not in CONDITIONS}
        with self._writing if conditional else nullcontext():
            return self._app(environ, start_response)


@contextmanager
def served(bucket: str, ignores_conditions: bool = False) -> Iterator[dict[str, str]]:
    """The environment in which `s3://<bucket>` is there."""
    s3fs.S3FileSystem.clear_instance_cache()  # or clients of this process would look for another server
    logging.getLogger("werkzeug").setLevel(logging.ERROR)
    server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    server._server.app = Conditions(server._server.app, ignores_conditions)
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
    s3fs.S3FileSystem.clear_instance_cache()


def client(url: str):
    return boto3.client(
        "s3", endpoint_url=url, aws_access_key_id="key", aws_secret_access_key="secret", region_name="us-east-1"
    )


def s3a(folder: Path, url: str) -> dict[str, str]:
    """The settings of a Spark session that reaches the server at `url`; `folder` is for a file that they name."""
    (folder / "ivy.xml").write_text(IVY)
    packages = [f"software.amazon.awssdk:{module}:{AWS}" for module in MODULES]
    return {
        "spark.jars.packages": ",".join([f"org.apache.hadoop:hadoop-aws:{HADOOP}", *packages]),
        "spark.jars.excludes": "software.amazon.awssdk:bundle,org.wildfly.openssl:wildfly-openssl",
        "spark.jars.ivySettings": str(folder / "ivy.xml"),
        "spark.hadoop.fs.s3a.endpoint": url,
        "spark.hadoop.fs.s3a.endpoint.region": "us-east-1",
        "spark.hadoop.fs.s3a.path.style.access": "true",
        # its asynchronous client cannot talk to moto's server
        "spark.hadoop.fs.s3a.optimized.copy.from.local.enabled": "false",
    }
