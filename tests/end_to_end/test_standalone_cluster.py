"""A Spark standalone cluster of a master and two workers.

Code is shipped, both work, and one that is killed in the middle costs a retry.
"""

import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pyspark
import pytest
from deltalake import DeltaTable

from tests.ports import free_port

pytestmark = pytest.mark.spark

SPARK_CLASS = Path(pyspark.__file__).parent / "bin" / "spark-class"
COMMAND = str(Path(sys.executable).with_name("dagster-unified"))
RECORDS = 160
PROGRAM = """
import os
import time
from pathlib import Path
from typing import NamedTuple

from dagster_unified.api import DeltaSink, MapFunction, Pipeline, RuntimeContext

SEEN = Path("{folder}/seen")


class Done(NamedTuple):
    number: int
    worker: int
    attempt: int


class Slow(MapFunction):
    def open(self, context: RuntimeContext) -> None:
        self.attempt = context.get_attempt_number()

    def map(self, number: int) -> Done:
        time.sleep(0.05)
        (SEEN / f"{{number}}.{{os.getppid()}}").touch()
        return Done(number, os.getppid(), self.attempt)


pipeline = Pipeline("spread")
numbers = pipeline.from_collection(range({records})).rebalance().map(Slow()).set_parallelism(8).name("slow")
numbers.key_by("number").reduce(lambda a, b: a).set_parallelism(4).sink_to(DeltaSink("{folder}/table", name="table"))
"""


class Cluster:
    def __init__(self, folder):
        self.folder = folder
        self.port = free_port()
        self.url = f"spark://127.0.0.1:{self.port}"
        self.environment = {
            **os.environ,
            "SPARK_LOCAL_IP": "127.0.0.1",
            "PYSPARK_PYTHON": sys.executable,
            "JDK_JAVA_OPTIONS": os.environ["SPARK_SUBMIT_OPTS"],
        }
        self.processes = [self.start("master.Master", "--port", str(self.port))]
        self.until(self.listening, "the master listens")
        self.workers = [
            self.start("worker.Worker", "-c", "1", "-m", "1g", "-d", str(folder / f"work{n}"), self.url) for n in (1, 2)
        ]
        self.processes += self.workers

    def start(self, role, *arguments):
        with (self.folder / f"{role}.log").open("ab") as log:
            command = [
                str(SPARK_CLASS),
                f"org.apache.spark.deploy.{role}",
                "--host",
                "127.0.0.1",
                "--webui-port",
                "0",
                *arguments,
            ]
            return subprocess.Popen(command, env=self.environment, stdout=log, stderr=log, start_new_session=True)

    def listening(self):
        with socket.socket() as probe:
            return probe.connect_ex(("127.0.0.1", self.port)) == 0

    def until(self, look, what):
        end = time.monotonic() + 600
        while not look():
            assert time.monotonic() < end, f"not within 600 s: {what}"
            time.sleep(0.1)

    def kill(self, worker):
        """The worker and the executor that it started, which are one process group."""
        os.killpg(worker.pid, signal.SIGKILL)

    def end(self):
        for process in self.processes:
            if process.poll() is None:
                self.kill(process)
                process.wait()


@pytest.fixture
def cluster(tmp_path):
    started = Cluster(tmp_path)
    yield started
    started.end()


def test_a_worker_that_is_killed_in_the_middle_of_a_stage_costs_a_retry_and_not_the_run(cluster, tmp_path):
    seen = tmp_path / "seen"
    seen.mkdir()
    (tmp_path / "spread.py").write_text(PROGRAM.format(folder=tmp_path, records=RECORDS))
    with (tmp_path / "run.log").open("w") as log:
        running = subprocess.Popen(
            [COMMAND, "run", "spread.py", "--master", cluster.url],
            cwd=tmp_path,
            env=cluster.environment,
            stdout=log,
            stderr=subprocess.STDOUT,
        )
    try:
        both = lambda: len({f.name.split(".")[1] for f in seen.iterdir()}) == 2  # noqa: E731
        cluster.until(
            lambda: running.poll() is not None or (both() and len(list(seen.iterdir())) >= RECORDS // 4),
            "both workers have begun, and a quarter of the records are done",
        )
        assert running.poll() is None, (tmp_path / "run.log").read_text()
        cluster.kill(cluster.workers[0])
        assert running.wait(600) == 0, (tmp_path / "run.log").read_text()
    finally:
        running.kill()
    rows = DeltaTable(str(tmp_path / "table")).to_pyarrow_table().to_pylist()
    assert sorted(r["number"] for r in rows) == list(range(RECORDS))
    assert {r["attempt"] for r in rows} == {0, 1}
