"""A stream on a Spark Connect server under Dagster: the server, and the query on it, outlive the run's process."""

import json
import os
import re
import signal

import pytest

from dagster_unified.engine import connect_server
from tests.orchestration.test_connect_server import port_without_server
from tests.orchestration.test_streaming_under_dagster import Dagster

pytestmark = pytest.mark.spark


@pytest.fixture
def port():
    with port_without_server() as port:
        yield port


@pytest.fixture
def dagster(tmp_path):
    running = Dagster(tmp_path)
    yield running
    running.end()


@pytest.mark.rotates("clusters")
def test_the_sensor_goes_on_with_a_query_that_outlives_its_run(port, dagster):
    def server():
        return json.loads(connect_server._discovery(port).read_text())["pid"]

    def says(pattern):
        return lambda: any(re.search(pattern, message) for message in dagster.said_by_sensor())

    dagster.drop("one", a=1, b=2)
    dagster.start(STREAMING_TEST_CONNECT=str(port))
    dagster.sensor(on=True)
    dagster.until(lambda: dagster.totals() == {"a": 1, "b": 2}, "the first file is in the table")
    killed, before = dagster.started(), server()
    os.kill(dagster.worker_of(killed), signal.SIGKILL)
    dagster.drop("two", a=10)  # which the query finds that nobody waits for any more
    dagster.until(says(rf"^run {killed[:8]} failed: .*SIGKILL"), "the sensor says how the run died")
    dagster.until(lambda: dagster.totals() == {"a": 11, "b": 2}, "another run goes on where the killed one was")
    dagster.drop("three", b=20)
    dagster.until(lambda: dagster.totals() == {"a": 11, "b": 22}, "and goes on")
    assert server() == before
    assert [run["status"] for run in dagster.runs()].count("STARTED") == 1

    os.kill(server(), signal.SIGKILL)
    run = dagster.started()
    dagster.until(says(rf"^run {run[:8]} failed: "), "the sensor says that the run has lost its server")
    dagster.drop("four", a=100)
    dagster.until(lambda: dagster.totals() == {"a": 111, "b": 22}, "another run starts another server, and goes on")
