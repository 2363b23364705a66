"""A stream on a standalone cluster under Dagster: the run's log and the sensor name what dies."""

import os
import re
import signal

import pytest

from tests.orchestration.test_streaming_under_dagster import Dagster
from tests.servers.standalone import Cluster

pytestmark = pytest.mark.spark

LOST = r"executor \d+ on host 127\.0\.0\.1 was lost \([^)]+\); (Spark runs its tasks again on|none is left)"


RECOVERY = "-Dspark.deploy.recoveryMode=FILESYSTEM -Dspark.worker.timeout=20"
"""A master that is started again waits 20 seconds for those who do not answer."""


@pytest.fixture
def cluster(tmp_path):
    options = {"SPARK_MASTER_OPTS": f"{RECOVERY} -Dspark.deploy.recoveryDirectory={tmp_path}/recovery"}
    started = Cluster(tmp_path, options)
    yield started
    started.end()


@pytest.fixture
def dagster(cluster, tmp_path):
    folder = tmp_path / "dagster"
    folder.mkdir()
    running = Dagster(folder)
    running.environment = {**cluster.environment, **running.environment}
    yield running
    running.end()


@pytest.mark.rotates("clusters")
def test_the_runs_log_and_the_sensor_name_what_dies(cluster, dagster):
    def says(pattern):
        return lambda: any(re.search(pattern, message) for message in dagster.said_by_sensor())

    def logs(run, pattern, times=1):
        return lambda: len(re.findall(pattern, dagster.said(run))) >= times

    dagster.drop("one", a=1, b=2)
    dagster.start(STREAMING_TEST_MASTER=cluster.url)
    dagster.sensor(on=True)
    dagster.until(lambda: dagster.totals() == {"a": 1, "b": 2}, "the first file is in the table")
    run = dagster.started()

    os.kill(cluster.executor(cluster.workers[0]), signal.SIGKILL)
    dagster.until(logs(run, LOST), "the run's log names the executor")
    dagster.until(says(rf"^run {run[:8]} of sales is started; at \d\d:\d\d:\d\d UTC {LOST}"), "the sensor does")
    cluster.kill(cluster.workers.pop(1))
    dagster.until(logs(run, LOST, times=2), "the run's log names the executor of a worker")
    dagster.drop("two", a=10)
    dagster.until(lambda: dagster.totals() == {"a": 11, "b": 2}, "the stream goes on")

    cluster.kill(cluster.master)
    away = rf"the Spark master {cluster.url} cannot be reached \(Connection refused\); the executors go on"
    dagster.until(logs(run, away), "the run's log names the master")
    dagster.drop("three", b=20)
    dagster.until(lambda: dagster.totals() == {"a": 11, "b": 22}, "the stream goes on without a master")

    os.kill(dagster.worker_of(run), signal.SIGKILL)
    dagster.until(says(rf"^run {run[:8]} failed: .*SIGKILL"), "the sensor names the driver")
    dagster.until(
        says(rf"failed: no Spark master can be reached at {cluster.url}: Connection refused"), "and the master"
    )
    cluster.start_master()
    dagster.drop("four", a=100)
    dagster.until(lambda: dagster.totals() == {"a": 111, "b": 22}, "another run goes on")
