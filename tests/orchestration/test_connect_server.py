"""A Spark Connect server that is started on demand, and shared."""

import json
import os
import shutil
import stat
import subprocess
import sys
from contextlib import contextmanager
from unittest import mock

import pytest
from deltalake import DeltaTable

from dagster_unified.engine import connect_server
from dagster_unified.engine.session import SERVER_DAEMON
from dagster_unified.errors import ConfigurationError, StageError
from dagster_unified.orchestration import SparkResource
from tests.ports import free_port

PROGRAM = """
from dagster import DagsterInstance, execute_job, reconstructable
from tests.orchestration.connect_job import job

with DagsterInstance.get() as instance, execute_job(reconstructable(job), instance) as result:
    assert result.success
"""


pytestmark = pytest.mark.spark


@contextmanager
def port_without_server():
    """A port on which no server runs, before and after."""
    with mock.patch.dict(os.environ):  # Spark tells its clients by the environment
        port = free_port()
        try:
            yield port
        finally:
            connect_server.stop(port)
            shutil.rmtree(connect_server._folder(port))


@pytest.fixture
def port():
    with port_without_server() as port:
        yield port


@pytest.fixture(scope="module")
def running():
    """The port and the address of a server that runs."""
    with port_without_server() as port:
        yield port, connect_server.ensure(port, "local[1]", {})


def test_workers_of_a_server_are_forked_from_a_daemon_that_ends_when_it_is_idle(running):
    _, address = running
    program = f"""
import os
from pathlib import Path

import pyarrow as pa

from dagster_unified.engine import session

def parent(batches):
    for _ in batches:
        yield pa.RecordBatch.from_pydict({{"module": [Path(f"/proc/{{os.getppid()}}/cmdline").read_text()]}})

(row,) = session.start(remote={address!r}).range(1).mapInArrow(parent, "module string").collect()
print(row.module.split(chr(0))[2])
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=600, check=False)
    assert (done.stdout, done.returncode) == (f"{SERVER_DAEMON}\n", 0), done.stderr[-3000:]


def test_steps_in_processes_of_their_own_and_later_runs_share_one_server(port, tmp_path):
    (tmp_path / "home").mkdir()
    environment = {
        **os.environ,
        "CONNECT_TEST_HOME": str(tmp_path),
        "CONNECT_TEST_PORT": str(port),
        "DAGSTER_HOME": str(tmp_path / "home"),
    }
    servers = set()
    for _ in range(2):
        done = subprocess.run(
            [sys.executable, "-c", PROGRAM], env=environment, capture_output=True, text=True, timeout=600, check=False
        )
        assert done.returncode == 0, done.stderr[-3000:]
        assert sorted(DeltaTable(str(tmp_path / "table")).to_pyarrow_table()["value"].to_pylist()) == [4, 8, 12]
        servers.add(json.loads(connect_server._discovery(port).read_text())["pid"])
    assert len(servers) == 1
    assert connect_server.stop(port)
    assert not connect_server.stop(port)


def test_a_server_that_does_not_come_up_says_why(port):
    with pytest.raises(
        StageError, match=rf"the Spark Connect server of port {port} on nonsense did not come up: .* \(its log is in "
    ):
        connect_server.ensure(port, "nonsense", {})


def test_what_cannot_be_is_an_error(port):
    with pytest.raises(ConfigurationError, match="a Spark Connect server's port is from 1024 to 65535, not 80"):
        connect_server.ensure(80, "local", {})
    with pytest.raises(ConfigurationError, match=r"both remote, .*, and connect"):
        SparkResource(remote="sc://host:1", connect=port).spark_session


def test_a_server_takes_nobody_without_its_token(running):
    port, address = running
    assert stat.S_IMODE(connect_server._discovery(port).stat().st_mode) == 0o600
    ask = (
        "from pyspark.sql import SparkSession; print(SparkSession.builder.remote('{}').getOrCreate().range(3).count())"
    )
    tried = {}
    for token in (os.environ["SPARK_CONNECT_AUTHENTICATE_TOKEN"], "guessed"):
        environment = {**os.environ, "SPARK_CONNECT_AUTHENTICATE_TOKEN": token}
        tried[token] = subprocess.run(
            [sys.executable, "-c", ask.format(address)],
            env=environment,
            capture_output=True,
            text=True,
            timeout=600,
            check=False,
        )
    right, wrong = tried.values()
    assert right.stdout == "3\n", right.stderr[-2000:]
    assert wrong.returncode != 0
    assert "UNAUTHENTICATED" in wrong.stderr


def test_processes_share_a_session_and_each_reads_the_files_that_are_there(running, tmp_path):
    _, address = running
    use = f"""
from dagster_unified.engine import session
spark = session.start(remote={address!r}, session_id="6ba7b810-9dad-41d1-80b4-00c04fd430c8")
lines = spark.read.schema("line string").text({str(tmp_path / "in")!r}).count()
print(spark.conf.get("of.this.session", "nothing"), lines)
spark.conf.set("of.this.session", "kept")
"""
    said = []
    (tmp_path / "in").mkdir()
    for number in range(2):
        (tmp_path / "in" / f"{number}.txt").write_text("a line")
        said.append(
            subprocess.run([sys.executable, "-c", use], capture_output=True, text=True, timeout=600, check=True).stdout
        )
    assert said == ["nothing 1\n", "kept 2\n"]


def test_days_carry_aggregates_on_the_server(running, tmp_path):
    _, address = running
    program = f"""
from pathlib import Path

from dagster_unified.engine import session
from dagster_unified.testing import run_pipeline
from tests.engine.test_carried_state import DAYS, EVENTS, Days, native_windows, table

pipeline = native_windows(EVENTS, {str(tmp_path / "table")!r})
Days(session.start(remote={address!r}), Path({str(tmp_path / "stages")!r})).run(pipeline, *DAYS)
assert table({str(tmp_path / "table")!r}) == sorted(map(tuple, run_pipeline(pipeline, "BATCH").only())) != []
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=600, check=False)
    assert done.returncode == 0, done.stderr[-3000:]


def test_a_source_of_splits_is_read_in_batch_and_its_stream_needs_a_classic_session(running, tmp_path):
    _, address = running
    program = f"""
from pathlib import Path

from dagster_unified.api import DeltaSink, Pipeline
from dagster_unified.engine import session
from dagster_unified.engine.batch.intermediates.store import IntermediateStore
from dagster_unified.engine.batch.run import Run
from dagster_unified.engine.batch.savepoint import run_all
from dagster_unified.engine.streaming.job import Start, StreamingJob
from dagster_unified.errors import UnsupportedError
from tests.connectors.log_source import Event, LogSource, append

folder = Path({str(tmp_path)!r})
append(folder / "logs", "left", *[Event("a", n, n) for n in range(5)], "no event")
append(folder / "logs", "right", *[Event("b", n, n) for n in range(3)])
pipeline = Pipeline("lines")
events = pipeline.from_source(LogSource(folder / "logs", on_malformed="divert"))
events.key_by("key").sum("number").sink_to(DeltaSink(str(folder / "table"), name="table"))
spark = session.start(remote={address!r})
store = IntermediateStore(str(folder / "store"))
run_all(Run(pipeline.plan({{"execution.runtime-mode": "BATCH"}}), spark, store, "run", "run"))
options = {{"execution.runtime-mode": "STREAMING", "execution.checkpointing.dir": str(folder / "checkpoints")}}
try:
    StreamingJob(pipeline.plan(options), spark, Start("test"))
except UnsupportedError as error:
    print(error)
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=600, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    assert "lines: STREAMING needs a classic Spark session, and this one is Spark Connect's; give" in done.stdout
    summed = DeltaTable(str(tmp_path / "table")).to_pyarrow_table().to_pylist()
    assert sorted((row["key"], row["number"]) for row in summed) == [("a", 10), ("b", 3)]
