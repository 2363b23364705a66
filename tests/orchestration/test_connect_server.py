"""A Spark Connect server that is started on demand, and shared."""

import json
import os
import shutil
import signal
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
from dagster_unified.storage import object_store
from dagster_unified.storage.object_store import Store
from tests.connectors.log_source import Event, append
from tests.ports import free_port

PROGRAM = """
from dagster import DagsterInstance, execute_job, reconstructable
from tests.orchestration.connect_job import job

with DagsterInstance.get() as instance, execute_job(reconstructable(job), instance) as result:
    assert result.success
"""


pytestmark = pytest.mark.spark


def program(text, *arguments, ends=0, **environment):
    """What a program prints that runs in a process of its own."""
    done = subprocess.run(
        [sys.executable, "-c", text, *arguments],
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    assert done.returncode == ends, done.stderr[-3000:]
    return done.stdout


def on_server(address, text, ends=0):
    """What a program prints that is given a session of the server, as `spark`."""
    begin = f"from dagster_unified.engine import session\nspark = session.start(remote={address!r})\n"
    return program(begin + text, ends=ends)


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
    """The port and the address of a server that runs, where there is an object store."""
    store = mock.patch.object(object_store, "_in_use", [Store("http://127.0.0.1:9")])
    with store, port_without_server() as port:
        yield port, connect_server.ensure(port, "local[1]", {})


@pytest.mark.rotates("clusters")
def test_workers_of_a_server_are_forked_from_its_daemon_and_it_knows_the_object_store(running):
    parents = """
import os
from pathlib import Path

import pyarrow as pa

def parent(batches):
    for _ in batches:
        yield pa.RecordBatch.from_pydict({"module": [Path(f"/proc/{os.getppid()}/cmdline").read_text()]})

(row,) = spark.range(1).mapInArrow(parent, "module string").collect()
print(row.module.split(chr(0))[2], spark.conf.get("spark.hadoop.fs.s3a.endpoint"))
"""
    assert on_server(running[1], parents) == f"{SERVER_DAEMON} http://127.0.0.1:9\n"


@pytest.mark.rotates("clusters")
def test_steps_in_processes_of_their_own_and_later_runs_share_one_server(port, tmp_path):
    (tmp_path / "home").mkdir()
    places = {"CONNECT_TEST_HOME": str(tmp_path), "CONNECT_TEST_PORT": str(port), "DAGSTER_HOME": f"{tmp_path}/home"}
    servers = set()
    for _ in range(2):
        program(PROGRAM, **places)
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


@pytest.mark.rotates("clusters")
def test_a_server_takes_nobody_without_its_token(running):
    port, address = running
    assert stat.S_IMODE(connect_server._discovery(port).stat().st_mode) == 0o600
    ask = f"""
from pyspark.sql import SparkSession
try:
    print(SparkSession.builder.remote({address!r}).getOrCreate().range(3).count())
except Exception as error:
    print("UNAUTHENTICATED" in str(error) or error)
"""
    assert program(ask) == "3\n"
    assert program(ask, SPARK_CONNECT_AUTHENTICATE_TOKEN="guessed") == "True\n"


@pytest.mark.rotates("clusters")
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
        said.append(program(use))
    assert said == ["nothing 1\n", "kept 2\n"]


@pytest.mark.rotates("clusters")
def test_days_carry_aggregates_on_the_server(running, tmp_path):
    days = f"""
from pathlib import Path

from dagster_unified.testing import run_pipeline
from tests.engine.test_carried_state import DAYS, EVENTS, Days, native_windows, table

pipeline = native_windows(EVENTS, {str(tmp_path / "table")!r})
Days(spark, Path({str(tmp_path / "stages")!r})).run(pipeline, *DAYS)
assert table({str(tmp_path / "table")!r}) == sorted(map(tuple, run_pipeline(pipeline, "BATCH").only())) != []
"""
    on_server(running[1], days)


@pytest.mark.rotates("clusters")
def test_a_stream_fails_is_suspended_and_killed_and_its_query_goes_on_until_the_code_changes(running, tmp_path):
    begin = f"""
import json
import os
import signal
from pathlib import Path

from dagster_unified.engine.streaming.savepoints.request import request
from dagster_unified.errors import UserFunctionError
from tests.orchestration.connect_stream import POISON, Row, add_file, job, queries, read, run_until_killed

folder = Path({str(tmp_path)!r})
"""
    killed = """
add_file(folder, 0, Row("a", 1, 1), Row("b", 2, POISON), Row("c", 30, 4))
try:
    job(folder, spark, bears=POISON).run()
except UserFunctionError as error:
    print(str(error).replace(chr(10), " "))
print(job(folder, spark).run(lambda: read(folder) == 3), flush=True)
add_file(folder, 1, Row("a", 31, 8))
run_until_killed(folder, job(folder, spark), 4)
"""
    failed, stopped, before = on_server(running[1], begin + killed, -signal.SIGKILL).splitlines()
    assert failed.startswith("stream: stage 'sinks', operator 'tasting': ValueError: this is poison, at ")
    assert failed.endswith("on Row(key='b', at=12, amount=1000)")
    assert stopped == "stopped"
    attached = """
goes_on = job(folder, spark, patience=5)
wanted = []

def saved():
    if not wanted:
        wanted.append(request(goes_on.directory, goes_on.token, "a test"))
    elif list((folder / "checkpoints/stream/answers").glob("*.json")) and not (folder / "in/2.parquet").exists():
        print(*[json.loads(one.read_text())["error"] for one in (folder / "checkpoints/stream/answers").iterdir()])
        add_file(folder, 2, Row("b", 32, 16))

run_until_killed(folder, goes_on, 5, saved)
"""
    assert on_server(running[1], begin + attached, -signal.SIGKILL) == f"\n{before}\n"
    changed = """
last = job(folder, spark, bears=2 * POISON, patience=5)
seen = set()
print(last.run(lambda: seen.add(queries(last)) or last.drain()), *seen)
"""
    finished, after = on_server(running[1], begin + changed).split()
    assert finished == "finished"
    query, run = before.split("/")
    assert (after.split("/")[0], after.split("/")[1] != run) == (query, True)
    silent = DeltaTable(str(tmp_path / "silent")).to_pyarrow_table().to_pylist()
    assert sorted((row["key"], row["at"], row["amount"]) for row in silent) == [
        ("a", 41, 9),
        ("b", 42, 1016),
        ("c", 40, 4),
    ]


@pytest.mark.rotates("clusters")
def test_a_process_that_exits_with_open_sessions_has_closed_them(running):
    """PySpark asks the server for more at the exit otherwise, and the process hangs now and then."""
    open_sessions = """
import uuid
sessions = [session.prepared(spark), session.in_session(spark, str(uuid.uuid4()))]
for one in sessions:
    one.client._cleanup_ml_cache = lambda: print("asked for more")
print(*(one.client.is_closed for one in sessions))
"""
    assert on_server(running[1], open_sessions) == "False False\n"


AUTHOR = """
from tests.connectors.log_source import Event

def scaled(event: Event) -> Event:
    return event._replace(number=event.number * {factor})
"""

EITHER_MODE = """
import sys
from pathlib import Path

from dagster_unified.api import Pipeline
from dagster_unified.connectors import DeltaSink
from dagster_unified.engine import session
from dagster_unified.engine.batch.intermediates import IntermediateStore
from dagster_unified.engine.batch.run import Run
from dagster_unified.engine.batch.savepoint import run_all
from dagster_unified.engine.streaming.job import Start, StreamingJob
from tests.connectors.log_source import LogSource

address, folder, mode = sys.argv[1], Path(sys.argv[2]), sys.argv[3]
sys.path.insert(0, str(folder))
from author import scaled

pipeline = Pipeline("lines")
events = pipeline.from_source(LogSource(folder.parent / "logs", on_malformed="divert")).map(scaled)
table = DeltaSink(str(folder / mode), mode="upsert", key="key", name="table")
events.key_by("key").sum("number").map(scaled).sink_to(table)
options = {"execution.checkpointing.dir": str(folder / "checkpoints")} if mode == "STREAMING" else {}
plan = pipeline.plan({"execution.runtime-mode": mode, **options})
spark = session.start(remote=address)
if mode == "BATCH":
    run_all(Run(plan, spark, IntermediateStore(str(folder / "store")), "run", "run"))
else:
    assert StreamingJob(plan, spark, Start("test")).run() == "finished"
"""


@pytest.mark.rotates("clusters")
def test_two_streams_and_two_batch_runs_at_once_each_have_their_own_module_of_one_name(running, tmp_path):
    append(tmp_path / "logs", "left", *[Event("a", n, n) for n in range(5)], "no event")
    append(tmp_path / "logs", "right", *[Event("b", n, n) for n in range(3)])
    runs = []
    for factor in (1, 10):
        folder = tmp_path / str(factor)
        folder.mkdir()
        (folder / "author.py").write_text(AUTHOR.format(factor=factor))
        for mode in ("BATCH", "STREAMING"):
            command = [sys.executable, "-c", EITHER_MODE, running[1], str(folder), mode]
            runs.append(subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True))
    said = [run.communicate(timeout=600)[1] for run in runs]
    assert [run.returncode for run in runs] == [0, 0, 0, 0], said
    for factor in (1, 10):
        for mode in ("BATCH", "STREAMING"):
            summed = DeltaTable(str(tmp_path / str(factor) / mode)).to_pyarrow_table().to_pylist()
            assert sorted((row["key"], row["number"]) for row in summed) == [
                ("a", 10 * factor**2),
                ("b", 3 * factor**2),
            ]
