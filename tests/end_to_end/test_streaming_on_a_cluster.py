"""A STREAMING job on a standalone cluster whose workers share nothing but a bucket, and lose what they have."""

import io
import os
import signal
import subprocess
import sys
import time
from collections import Counter
from contextlib import suppress
from pathlib import Path
from unittest.mock import patch

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from deltalake import DeltaTable

from dagster_unified.engine import connect_server
from dagster_unified.testing import collect
from tests.depth import chance
from tests.end_to_end.cluster_stream import BUCKET, Out, Sale, build
from tests.object_store import client, s3a, served
from tests.orchestration.test_connect_server import port_without_server
from tests.servers.standalone import Cluster

pytestmark = pytest.mark.spark

ROOT = Path(__file__).parents[2]
SHOPS = [f"shop {number}" for number in range(12)]


@pytest.fixture
def cluster(tmp_path):
    """Its processes know no store: the job tells them."""
    started = Cluster(tmp_path)
    yield started
    started.end()


@pytest.fixture
def bucket(cluster, monkeypatch):
    with served("lake") as environment:
        for name, value in environment.items():
            monkeypatch.setenv(name, value)
        yield environment


@pytest.fixture
def connect(cluster, bucket, tmp_path):
    """The address of a Spark Connect server on the cluster."""
    with port_without_server() as port:
        config = {"spark.executor.memory": "700m", **s3a(tmp_path, bucket["AWS_ENDPOINT_URL"])}
        with patch.dict(os.environ, cluster.environment | bucket):
            yield connect_server.ensure(port, cluster.url, config)


class Stream:
    """The job, started again where it was killed, and what it is given to read."""

    def __init__(self, folder, cluster, url, remote=""):
        self.folder, self.cluster, self.url, self.remote = folder, cluster, url, remote
        self.sales = {"left": [], "right": []}
        self.files = 0
        self.chance = chance("streaming on a cluster")
        self.process = None

    def start(self):
        self.log = (self.folder / f"job {time.monotonic()}.log").open("w+")
        command = [
            sys.executable,
            "-m",
            "tests.end_to_end.cluster_stream",
            str(self.folder),
            self.url,
            self.remote or self.cluster.url,
        ]
        environment = os.environ | self.cluster.environment  # with the token of a Connect server
        self.process = subprocess.Popen(
            command, cwd=ROOT, env=environment, stdout=self.log, stderr=self.log, start_new_session=True
        )

    def arrive(self):
        """A second's sales in both folders."""
        self.files += 1
        for side, sales in self.sales.items():
            made = [
                Sale(shop, self.files * 1000 + at, self.chance.randrange(1, 100))
                for at in range(0, 1000, 100)
                for shop in self.chance.sample(SHOPS, 6)
            ]
            sales += made
            data = io.BytesIO()
            pq.write_table(pa.Table.from_pylist([sale._asdict() for sale in made]), data)
            key = f"{BUCKET.removeprefix('s3://lake/')}/{side}/{self.files}.parquet"
            client(self.url).put_object(Bucket="lake", Key=key, Body=data.getvalue())

    def until_written(self):
        """Wait until the windows before the last second are in the table."""
        self.cluster.until(lambda: self.alive() and self.windows() >= self.files - 1, "the windows are written")

    def alive(self):
        assert self.process.poll() is None, (self.log.flush(), Path(self.log.name).read_text()[-8000:])
        return True

    def windows(self):
        return len({row.at // 1000 for row in table() if row.branch == "window"})

    def kill(self):
        with suppress(ProcessLookupError):  # it has ended, and has left no JVM
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()

    def expected(self):
        """What the harness computes of all sales."""
        return collect(build(lambda pipeline, side: pipeline.from_collection(self.sales[side], Sale))[1])


def table():
    if not DeltaTable.is_deltatable(f"{BUCKET}/table"):
        return []
    return [Out(**row) for row in DeltaTable(f"{BUCKET}/table").to_pyarrow_table().to_pylist()]


def told(stream, cluster, what):
    """Wait until the job says what it has lost, which it cannot know through Connect."""
    if not stream.remote:
        cluster.until(lambda: stream.alive() and what in Path(stream.log.name).read_text(), f"the job says {what}")


def executor(stream, cluster):
    cluster.until(lambda: cluster.executor(cluster.workers[0]) is not None, "the first worker has an executor")
    os.kill(cluster.executor(cluster.workers[0]), signal.SIGKILL)
    told(stream, cluster, "host='127.0.0.1', reason='")


def worker(stream, cluster):
    cluster.kill(cluster.workers[0])
    told(stream, cluster, "ExecutorLost(executor='")


def driver(stream, cluster):
    stream.kill()
    stream.start()


def master(stream, cluster):
    """The one that is started again has to give the job another executor."""
    cluster.kill(cluster.master)
    told(stream, cluster, f"MasterAway(master='{cluster.url}', reason='Connection refused')")
    cluster.start_master()
    told(stream, cluster, "MasterBack(")
    executor(stream, cluster)


@pytest.mark.rotates("clusters")
@pytest.mark.parametrize("kill", [executor, worker, driver, master])
def test_nothing_is_lost_or_doubled_where_a_process_of_the_cluster_is_killed(kill, cluster, bucket, tmp_path):
    loses_a_process(Stream(tmp_path, cluster, bucket["AWS_ENDPOINT_URL"]), kill)


@pytest.mark.rotates("clusters")
@pytest.mark.parametrize("kill", [executor, worker, driver])
def test_nothing_is_lost_or_doubled_through_connect(kill, cluster, bucket, connect, tmp_path):
    """The server's query outlives the driver, and its executors load their state from the bucket."""
    loses_a_process(Stream(tmp_path, cluster, bucket["AWS_ENDPOINT_URL"], connect), kill)


def loses_a_process(stream, kill):
    try:
        stream.start()
        stream.arrive()
        stream.arrive()
        stream.until_written()
        stream.arrive()
        kill(stream, stream.cluster)
        stream.arrive()
        stream.until_written()
        (stream.folder / "end").touch()
        assert stream.process.wait(300) == 0, Path(stream.log.name).read_text()[-8000:]
    finally:
        stream.kill()
    assert Counter(table()) == Counter(stream.expected())
