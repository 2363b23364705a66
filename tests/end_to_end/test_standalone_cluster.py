"""A Spark standalone cluster of a master and two workers.

Code is shipped, both work, and one that is killed in the middle costs a retry; of an iteration, a part of a round.
"""

import os
import shutil
import subprocess
import sys
import venv
from collections import Counter
from pathlib import Path
from unittest.mock import patch

import msgspec
import pyarrow as pa
import pyarrow.parquet as pq
import pyspark
import pytest
from deltalake import DeltaTable

import dagster_unified
from dagster_unified.engine import connect_server
from tests.object_store import served
from tests.ports import free_port
from tests.servers.standalone import Cluster

pytestmark = pytest.mark.spark

ROOT = Path(__file__).parents[2]
COMMAND = str(Path(sys.executable).with_name("dagster-unified"))
RECORDS = 160
PROGRAM = """
import os
import time
from pathlib import Path
from typing import NamedTuple

from dagster_unified.api import MapFunction, Pipeline, RuntimeContext
from dagster_unified.connectors import DeltaSink

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


ROUNDS, IN_A_ROUND = 6, 24
ITERATION = """
import os
import time
from pathlib import Path
from uuid import uuid4

from dagster_unified.api import KeyedProcessFunction, Pipeline, ValueStateDescriptor, iterations
from dagster_unified.connectors import DeltaSink

SEEN = Path("{folder}/seen")


class Added(KeyedProcessFunction[int, tuple[int, int], tuple[int, int]]):
    def open(self, context) -> None:
        self.sum = context.get_state(ValueStateDescriptor("sum", int))

    def process_element(self, value: tuple[int, int], ctx) -> list[tuple[int, int]]:
        time.sleep(0.05)
        (SEEN / f"{{value[1]}}.{{value[0]}}.{{os.getppid()}}.{{uuid4().hex}}").touch()
        self.sum.update((self.sum.value() or 1) + value[1])
        return [(value[0], self.sum.value())]


class Rounds(iterations.IterationBody):
    def process(self, variables, data):
        added = variables[0].key_by(lambda v: v[0], key_type=int).process(Added())
        ends = added.flat_map(iterations.TerminateOnMaxIter({rounds}))
        return iterations.IterationBodyResult([added], [iterations.forward_inputs_of_last_round(added)], ends)


pipeline = Pipeline("rounds")
numbers = pipeline.from_collection([(n, 1) for n in range({records})], tuple[int, int], name="numbers")
config = iterations.IterationConfig(parallelism=2)
(out,) = iterations.iterate_bounded_streams_until_termination([numbers], [], Rounds(), config)
out.sink_to(DeltaSink("{folder}/table", name="table"))
"""


@pytest.fixture
def bucket():
    """The environment in which `s3://lake` is there, of all that is started from now on."""
    with served("lake") as environment, pytest.MonkeyPatch.context() as patch:
        for name, value in environment.items():
            patch.setenv(name, value)
        yield "s3://lake"


@pytest.fixture
def cluster(tmp_path):
    started = Cluster(tmp_path)
    yield started
    started.end()


def run_and_kill(cluster, folder, program, begun, what, *options):
    """Runs a program, and kills a worker with its executor once a look at the files of `seen` says so: its rows."""
    seen = folder / "seen"
    seen.mkdir()
    (folder / "program.py").write_text(program)
    with (folder / "run.log").open("w") as log:
        running = subprocess.Popen(
            [COMMAND, "run", "program.py", "--master", cluster.url, *options],
            cwd=folder,
            env=cluster.environment,
            stdout=log,
            stderr=subprocess.STDOUT,
        )
    try:
        cluster.until(lambda: running.poll() is not None or begun([f.name.split(".") for f in seen.iterdir()]), what)
        assert running.poll() is None, (folder / "run.log").read_text()
        cluster.kill(cluster.workers[0])
        assert running.wait(600) == 0, (folder / "run.log").read_text()
    finally:
        running.kill()
    return DeltaTable(str(folder / "table")).to_pyarrow_table().to_pylist()


@pytest.mark.rotates("clusters")
def test_workers_without_what_the_driver_has_are_named_before_anything_runs_there(cluster, tmp_path):
    venv.create(tmp_path / "bare", symlinks=True)
    (tmp_path / "spread.py").write_text(PROGRAM.format(folder=tmp_path, records=1))
    jar = next((Path(pyspark.__file__).parent / "jars").glob("slf4j-api-*.jar"))  # as spark.jars.packages leaves it
    (tmp_path / "spark-defaults.conf").write_text(f"spark.submit.pyFiles {jar}\n")
    for interpreter, told in (("bare", "no pyarrow ("), ("absent", "has no interpreter ")):
        ran = subprocess.run(
            [COMMAND, "run", "spread.py", "--master", cluster.url],
            cwd=tmp_path,
            env={
                **cluster.environment,
                "SPARK_CONF_DIR": str(tmp_path),
                "PYSPARK_PYTHON": f"{tmp_path}/{interpreter}/bin/python",
                "COLUMNS": "500",
            },
            capture_output=True,
            text=True,
        )
        assert ran.returncode == 1, ran.stderr
        line = next(line for line in (ran.stdout + ran.stderr).splitlines() if told in line)
        assert "host " in line
        assert "name another one in PYSPARK_PYTHON" in line
    assert not (tmp_path / "table").exists()


@pytest.mark.rotates("clusters")
def test_a_worker_that_is_killed_in_the_middle_of_a_stage_costs_a_retry_and_not_the_run(cluster, tmp_path):
    def begun(seen):
        return len({worker for _, worker in seen}) == 2 and len(seen) >= RECORDS // 4

    program = PROGRAM.format(folder=tmp_path, records=RECORDS)
    rows = run_and_kill(cluster, tmp_path, program, begun, "both workers have begun, and a quarter is done")
    assert sorted(r["number"] for r in rows) == list(range(RECORDS))
    assert {r["attempt"] for r in rows} == {0, 1}


@pytest.mark.rotates("clusters")
@pytest.mark.parametrize("mode", ["BATCH", "STREAMING"])
def test_an_executor_that_is_killed_in_the_middle_of_a_round_costs_a_part_of_that_round(
    bucket, cluster, tmp_path, mode
):
    """In BATCH its rounds are in a bucket: the other executor reads what it has not written itself."""

    def begun(seen):
        """Both executors are in the third round: each record doubles the sum of its key."""
        return len({executor for value, _, executor, _ in seen if int(value) == 4}) == 2

    program = ITERATION.format(folder=tmp_path, records=IN_A_ROUND, rounds=ROUNDS)
    given = ["--storage", bucket, "-D", f"execution.runtime-mode={mode}"]
    if mode == "STREAMING":
        given += ["-D", f"execution.checkpointing.dir={tmp_path}/checkpoints"]
    rows = run_and_kill(cluster, tmp_path, program, begun, "both are in the third round", *given)
    assert sorted(tuple(row.values()) for row in rows) == [(n, 2**ROUNDS) for n in range(IN_A_ROUND)]
    computed = Counter(tuple(f.name.split(".")[:2]) for f in (tmp_path / "seen").iterdir())
    assert len({value for (value, _), times in computed.items() if times > 1}) <= 1  # the round that it died in
    assert max(computed.values()) <= 2


@pytest.mark.rotates("clusters")
def test_subtasks_of_a_round_run_where_they_ran_in_the_one_before(bucket, cluster, tmp_path):
    (tmp_path / "seen").mkdir()
    (tmp_path / "program.py").write_text(ITERATION.format(folder=tmp_path, records=8, rounds=12))
    command = [COMMAND, "run", "program.py", "--master", cluster.url, "--storage", bucket]
    run = [*command, "-D", "execution.runtime-mode=BATCH"]
    ran = subprocess.run(run, cwd=tmp_path, env=cluster.environment, check=False, capture_output=True, text=True)
    assert ran.returncode == 0, ran.stdout + ran.stderr
    seen = {tuple(f.name.split(".")[:3]) for f in (tmp_path / "seen").iterdir()}
    assert len(seen) == 8 * 12  # in each round each number in one executor
    assert len({executor for _, _, executor in seen}) == 2
    assert len({(number, executor) for _, number, executor in seen}) == 8


SHIPPED = """
import sys
from typing import NamedTuple

from deltalake import DeltaTable

from dagster_unified.api import Pipeline
from dagster_unified.connectors import DeltaSink
from dagster_unified.orchestration import SparkResource


class Seen(NamedTuple):
    number: int
    interpreter: str


def seen(number: int) -> Seen:
    return Seen(number % 4, sys.executable)


def pipeline(mode):
    made = Pipeline(mode)
    by_number = made.from_collection(range(20)).map(seen).key_by("number")
    counted = by_number.reduce(lambda a, b: Seen(a.number, b.interpreter))
    counted.sink_to(DeltaSink("{folder}/" + mode, mode="upsert", key="number"))
    return made


if __name__ == "__main__":
    resource = SparkResource(master="{master}", connect={connect}, environment="{folder}/packed.tar.gz")
    spark = resource.spark_session
    for mode in ("BATCH", "STREAMING"):
        options = {{"execution.runtime-mode": mode, "execution.checkpointing.dir": "{folder}/checkpoints"}}
        pipeline(mode).execute(options, spark=spark).result()
"""


def packed(folder):
    """A virtual environment with what workers need, and nothing else, in one file."""
    venv.create(folder / "environment", symlinks=True)
    here, there = (next(Path(p).glob("lib/python*/site-packages")) for p in (sys.prefix, folder / "environment"))
    for name in ("pyarrow", "msgspec", "dagster_unified"):
        for found in here.glob(f"{name}-*.dist-info"):
            shutil.copytree(found, there / found.name)
    for package in (pa, msgspec, dagster_unified):
        shutil.copytree(Path(package.__file__).parent, there / package.__name__)
    for name in ("protobuf", "_upb"):  # Spark's keyed state in Python has it
        shutil.copytree(here / "google" / name, there / "google" / name)
    subprocess.run(["tar", "-C", "environment", "-czf", "packed.tar.gz", "."], cwd=folder, check=True)


@pytest.mark.rotates("clusters")
@pytest.mark.parametrize("connects", [False, True])
def test_workers_whose_interpreter_has_nothing_use_an_environment_that_is_shipped(connects, tmp_path):
    """In a session of the program's own, and on a Connect server that it starts on the cluster."""
    packed(tmp_path)
    port = free_port() if connects else None
    has = {"SPARK_HOME": str(Path(pyspark.__file__).parent), "PYSPARK_PYTHON": "/usr/bin/python3"}
    cluster = Cluster(tmp_path, has)
    try:
        (tmp_path / "shipped.py").write_text(SHIPPED.format(folder=tmp_path, master=cluster.url, connect=port))
        ran = subprocess.run(
            [sys.executable, "shipped.py"], cwd=tmp_path, env=cluster.environment, capture_output=True, text=True
        )
        assert ran.returncode == 0, ran.stdout + ran.stderr
    finally:
        with patch.dict(os.environ):  # Spark tells its clients by the environment
            if port is not None:
                connect_server.stop(port)
        cluster.end()
    for mode in ("BATCH", "STREAMING"):
        rows = DeltaTable(str(tmp_path / mode)).to_pyarrow_table().to_pylist()
        assert sorted(row["number"] for row in rows) == [0, 1, 2, 3]
        assert all("environment/bin/python" in row["interpreter"] for row in rows), rows


@pytest.mark.rotates("clusters")
def test_eight_workers_run_the_flights(tmp_path):
    """The year of real flights, on more workers than this machine has cores."""
    (tmp_path / "spark-defaults.conf").write_text("spark.executor.memory 512m\n")
    places = {"DAGSTER_UNIFIED_DATA": f"{tmp_path}/data", "DAGSTER_UNIFIED_OUTPUT": f"{tmp_path}/tables"}
    cluster = Cluster(tmp_path, {"SPARK_CONF_DIR": str(tmp_path), **places}, workers=8)
    try:
        subprocess.run([sys.executable, "-m", "jobs.data"], cwd=ROOT, env=cluster.environment, check=True)
        command = [COMMAND, "run", "jobs.flight_delays", "-D", "execution.runtime-mode=BATCH", "--rows", "0"]
        where = ["--master", cluster.url, "--storage", f"{tmp_path}/store"]
        running = subprocess.Popen([*command, *where], cwd=ROOT, env=cluster.environment)
        cluster.until(
            lambda: running.poll() is not None or all(cluster.executor(worker) for worker in cluster.workers),
            "all workers have an executor",
        )
        assert running.wait(600) == 0
    finally:
        cluster.end()
    totals = DeltaTable(f"{tmp_path}/tables/carrier_delays").to_pyarrow_table().to_pylist()
    assert sum(row["flights"] for row in totals) == 327_346  # those that have arrived


DYNAMIC = """
spark.dynamicAllocation.enabled true
spark.dynamicAllocation.minExecutors 0
spark.dynamicAllocation.executorIdleTimeout 1s
spark.dynamicAllocation.shuffleTracking.timeout 1s
spark.dynamicAllocation.schedulerBacklogTimeout 1s
"""
COUNTED = """
import os
from pathlib import Path
from typing import NamedTuple

from dagster_unified.api import Pipeline
from dagster_unified.connectors import DeltaSink, ParquetSource

SEEN = Path("{folder}/seen")


class Number(NamedTuple):
    key: str
    value: int


def seen(number: Number) -> Number:
    (SEEN / f"{{number.value}}.{{os.getppid()}}").touch()
    return number


def add(a: Number, b: Number) -> Number:
    return Number(a.key, a.value + b.value)


pipeline = Pipeline("counted")
numbers = pipeline.from_source(ParquetSource("{folder}/in", Number, name="numbers", monitor=True))
totals = numbers.map(seen).key_by("key").reduce(add).name("totals")
totals.sink_to(DeltaSink("{folder}/table", mode="upsert", key="key", name="table"))
"""


@pytest.mark.rotates("clusters")
def test_executors_that_dynamic_allocation_takes_away_between_epochs_take_no_state_with_them(cluster, tmp_path):
    (tmp_path / "spark-defaults.conf").write_text(DYNAMIC)
    for folder in ("in", "seen"):
        (tmp_path / folder).mkdir()
    (tmp_path / "program.py").write_text(COUNTED.format(folder=tmp_path))
    table, expected = tmp_path / "table", {"a": 0, "b": 0}

    def held():
        rows = DeltaTable(str(table)).to_pyarrow_table().to_pylist() if DeltaTable.is_deltatable(str(table)) else []
        return {row["key"]: row["value"] for row in rows}

    with (tmp_path / "run.log").open("w") as log:
        command = [COMMAND, "run", "program.py", "--master", cluster.url]
        environment = {**cluster.environment, "SPARK_CONF_DIR": str(tmp_path)}
        running = subprocess.Popen(command, cwd=tmp_path, env=environment, stdout=log, stderr=log)
    try:
        for number in range(3):
            rows = pa.table({"key": ["a", "b"], "value": [2 * number, 2 * number + 1]})
            pq.write_table(rows, tmp_path / "next")
            (tmp_path / "next").rename(tmp_path / f"in/{number}.parquet")
            expected = {"a": expected["a"] + 2 * number, "b": expected["b"] + 2 * number + 1}
            cluster.until(lambda: running.poll() is not None or held() == expected, "the table has the sums")
            assert running.poll() is None, (tmp_path / "run.log").read_text()
            cluster.until(lambda: not any(map(cluster.executor, cluster.workers)), "no executor is left")
    finally:
        running.terminate()
        running.wait(60)
    assert len({file.name.split(".")[1] for file in (tmp_path / "seen").iterdir()}) == 3  # each epoch has its own
    assert "executor" not in (tmp_path / "run.log").read_text()  # nobody is told of what was asked for
