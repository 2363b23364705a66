"""A Spark Connect server that is started on demand, and shared."""

import os
import subprocess
import sys

import pytest
from deltalake import DeltaTable

from dagster_unified.engine import connect_server
from dagster_unified.errors import ConfigurationError, StageError
from dagster_unified.orchestration import SparkResource

PORT = 39_475
PROGRAM = """
from dagster import DagsterInstance, execute_job, reconstructable
from tests.orchestration.connect_job import job

with DagsterInstance.get() as instance, execute_job(reconstructable(job), instance) as result:
    assert result.success
"""


@pytest.fixture
def no_server():
    connect_server.stop(PORT)
    yield
    connect_server.stop(PORT)


def test_steps_in_processes_of_their_own_and_later_runs_share_one_server(no_server, tmp_path):
    (tmp_path / "home").mkdir()
    environment = {**os.environ, "CONNECT_TEST_HOME": str(tmp_path), "DAGSTER_HOME": str(tmp_path / "home")}
    servers = set()
    for _ in range(2):
        done = subprocess.run([sys.executable, "-c", PROGRAM], env=environment, capture_output=True, text=True, timeout=240, check=False)
        assert done.returncode == 0, done.stderr[-3000:]
        assert sorted(DeltaTable(str(tmp_path / "table")).to_pyarrow_table()["value"].to_pylist()) == [8, 16, 24]
        servers.add(connect_server._files(PORT, ".pid").read_text())
    assert len(servers) == 1
    assert connect_server.stop(PORT)
    assert not connect_server.stop(PORT)


def test_a_server_that_does_not_come_up_says_why(no_server):
    with pytest.raises(StageError, match=r"the Spark Connect server at port 39475 did not come up: .* \(its log is "):
        connect_server.ensure(PORT, "nonsense", {})


def test_what_cannot_be_is_an_error():
    with pytest.raises(ConfigurationError, match="a Spark Connect server's port is from 1024 to 65535, not 80"):
        connect_server.ensure(80, "local", {})
    with pytest.raises(ConfigurationError, match=r"both remote, .*, and connect"):
        SparkResource(remote="sc://host:1", connect=PORT).session()
