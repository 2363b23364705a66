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
def test_the_sensor_goes_on_with_a_query_that_outlives_its_runs(port, dagster):
    def server():
        return json.loads(connect_server._discovery(port).read_text())["pid"]

    def queries():
        found = json.loads((dagster.folder / "checkpoints/sales/running.json").read_text())
        return found["session"], found["queries"]

    def says(pattern):
        return lambda: any(re.search(pattern, message) for message in dagster.said_by_sensor())

    dagster.drop("one", a=1, b=2)
    dagster.start(STREAMING_TEST_CONNECT=str(port))
    dagster.sensor(on=True)
    dagster.until(lambda: dagster.totals() == {"a": 1, "b": 2}, "the first file is in the table")
    killed, before, running = dagster.started(), server(), queries()
    assert running[1].keys() == {"main"}
    os.kill(dagster.worker_of(killed), signal.SIGKILL)
    dagster.drop("two", a=10)  # which the query finds that nobody waits for any more
    dagster.until(says(rf"^run {killed[:8]} failed: .*SIGKILL"), "the sensor says how the run died")
    dagster.until(lambda: dagster.totals() == {"a": 11, "b": 2}, "another run goes on where the killed one was")
    dagster.drop("three", b=20)
    dagster.until(lambda: dagster.totals() == {"a": 11, "b": 22}, "and goes on")
    assert [run["status"] for run in dagster.runs()].count("STARTED") == 1
    assert "goes on with 1 query (main) that the job before has left running on" in dagster.said(dagster.started())

    # A process that is frozen, taken to be dead, and thawed when another one goes on with its query.
    frozen = dagster.started()
    worker = dagster.worker_of(frozen)
    os.kill(worker, signal.SIGSTOP)
    dagster.drop("frozen", a=1000)
    dagster.until(lambda: dagster.totals() == {"a": 1011, "b": 22}, "another run goes on where the frozen one was")
    os.kill(worker, signal.SIGCONT)
    dagster.until(lambda: dagster.has_ended(worker), "the thawed process has ended")
    dagster.drop("thawed", b=1000)
    dagster.until(lambda: dagster.totals() == {"a": 1011, "b": 1022}, "the query goes on without it")
    assert (server(), queries()) == (before, running)

    os.kill(server(), signal.SIGKILL)
    run = dagster.started()
    dagster.until(says(rf"^run {run[:8]} failed: "), "the sensor says that the run has lost its server")
    dagster.drop("four", a=100)
    dagster.until(lambda: dagster.totals() == {"a": 1111, "b": 1022}, "another run starts another server, and goes on")
    assert queries() != running
