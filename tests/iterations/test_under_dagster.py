"""An iteration as a stage of a Dagster run: rounds in its log, what became of them, and re-execution from failure."""

import base64
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import threading
from io import BytesIO

import pytest
from dagster import DagsterInstance, DagsterRunStatus, ReexecutionOptions, execute_job, reconstructable
from deltalake import DeltaTable
from PIL import Image

from dagster_unified.api import Pipeline, iterations
from dagster_unified.connectors import DeltaSink
from dagster_unified.orchestration import (
    BatchDeployment,
    Checks,
    IntermediatesResource,
    SparkResource,
    unified_definitions,
)
from tests.depth import chance
from tests.iterations.dagster_job import BROKEN, HOME, WAITS, job
from tests.iterations.support import Body
from tests.iterations.test_streaming_on_spark import EXPECTED, HOPS, given, hops


@pytest.fixture
def instance(spark, tmp_path):
    for name in ("table", "store"):
        shutil.rmtree(HOME / name, ignore_errors=True)
    BROKEN.unlink(missing_ok=True)
    WAITS.unlink(missing_ok=True)
    with DagsterInstance.local_temp(str(tmp_path)) as instance:
        yield instance


def log(instance, run_id):
    return [entry.user_message for entry in instance.all_logs(run_id)]


def rounds(lines):
    """The rounds that were committed, by a log."""
    found = [line.partition("', epoch ")[2].partition(":")[0] for line in lines if line.startswith("iteration '")]
    return [int(number) for number in found if number]


@pytest.mark.parametrize("input_is_lost", [False, True])
def test_a_re_execution_goes_on_after_the_last_round_unless_its_input_is_made_again(instance, input_is_lost):
    BROKEN.touch()
    first = job().execute_in_process(instance=instance, raise_on_error=False)
    assert not first.success
    assert any("iteration 'Countdown', epoch 3: 2 records fed back" in line for line in log(instance, first.run_id))
    BROKEN.unlink()
    if input_is_lost:
        shutil.rmtree(HOME / "store/countdown/numbers")
    options = ReexecutionOptions.from_failure(first.run_id, instance)
    with execute_job(reconstructable(job), instance, reexecution_options=options) as again:
        assert again.success
        events = [e for e in again.all_events if e.is_step_materialization]
        (shown,) = [
            m
            for m in (e.step_materialization_data.materialization.metadata for e in events)
            if "rounds of Countdown" in m
        ]
        lines = log(instance, again.run_id)
    goes_on = any("iteration 'Countdown' of stage 'table' goes on after epoch 3" in line for line in lines)
    recomputed = any("recomputing stage 'numbers'" in line for line in lines)
    assert (goes_on, recomputed) == (not input_is_lost, input_is_lost)
    assert rounds(lines) == ([*range(7)] if input_is_lost else [4, 5, 6])
    assert shown["rounds of Countdown"].value == 7
    assert shown["why Countdown ended"].value == "the termination criteria had no record in epoch 6"
    assert shown["records by round of Countdown"].value.startswith("![rounds](data:image/png")
    table = DeltaTable(str(HOME / "table")).to_pyarrow_table()
    assert sorted(table.column(0).to_pylist()) == sorted([*range(2, 9), *range(1, 8)])
    assert list((HOME / "store").rglob("iteration-*")) == []


def test_a_run_that_is_cancelled_in_a_round_commits_neither_that_nor_another_one(instance):
    BROKEN.write_text("waits")
    over = threading.Event()

    def terminate():
        """As Dagster's launcher does, once the round has begun."""
        while not WAITS.exists():
            if over.wait(0.1):
                return
        instance.report_run_canceling(instance.get_runs()[0])
        os.kill(os.getpid(), signal.SIGINT)

    thread = threading.Thread(target=terminate)
    thread.start()
    result = job().execute_in_process(instance=instance, raise_on_error=False)
    over.set()
    thread.join()
    assert instance.get_run_by_id(result.run_id).status is DagsterRunStatus.CANCELED
    assert rounds(log(instance, result.run_id)) == [0, 1, 2, 3]
    assert len(list((HOME / "store").rglob("epoch-*.json"))) == 4
    assert not DeltaTable.is_deltatable(str(HOME / "table"))


def test_rounds_run_again_only_where_their_body_has_changed_and_the_table_they_fill_is_checked(instance, tmp_path):
    def run(step, added):
        pipeline = Pipeline("falling")
        numbers = pipeline.from_collection([9], int, name="numbers")

        def build(variables, data):
            fewer = variables[0].map(lambda n: n - step, int).filter(lambda n: n > 0)
            return iterations.IterationBodyResult([fewer], [fewer])

        (fewer,) = iterations.iterate_bounded_streams_until_termination([numbers], [], Body(build))
        visited = fewer.map(lambda n: (n,), tuple[int]).name("visited")
        visited.sink_to(DeltaSink(str(tmp_path / "all"), name="all"))
        more = visited.rebalance().map(lambda row: (row[0] + added,), tuple[int])
        more.sink_to(DeltaSink(str(tmp_path / "more"), name="more"))
        checks = Checks(schema=False, unique_keys=False, rows_within=0.5)
        definitions = unified_definitions(
            BatchDeployment(pipeline, reuse="fingerprint", checks=checks, retry_policy=None),
            resources={
                "spark": SparkResource(master="local[2]"),
                "intermediates": IntermediatesResource(path=str(tmp_path / "store")),
            },
        )
        result = definitions.resolve_job_def("falling_batch").execute_in_process(instance=instance)
        shown = [e.materialization for e in result.get_asset_materialization_events()]
        stages = {one.asset_key.path[-1].removesuffix("_stage"): one for one in shown if "job_graph" in one.metadata}
        ran = [name for name, one in stages.items() if "reused from run" not in one.metadata]
        (said,) = [e.description for e in result.get_asset_check_evaluations() if e.asset_key.path[-1] == "all"]
        table = DeltaTable(str(tmp_path / "more")).to_pyarrow_table()
        return ran, rounds(log(instance, result.run_id)), said, sorted(table.column(0).to_pylist())

    assert run(1, 0) == (["visited", "more"], [*range(9)], "there is no history yet", [*range(1, 9)])
    assert run(1, 10) == (["more"], [], "8 rows, and 8 in the median of the 1 before", [*range(11, 19)])
    assert run(4, 10) == (["visited", "more"], [0, 1, 2], "2 rows, and 8 in the median of the 2 before", [11, 15])


def test_what_a_body_measures_is_told_and_drawn_by_round(instance, tmp_path):
    pipeline = Pipeline("halves")
    numbers = pipeline.from_collection([100], float, name="numbers")

    def build(variables, data):
        half = variables[0].map(lambda n: n / 2, float)
        ends = half.filter(lambda n: n < 50).flat_map(iterations.TerminateOnMaxIterOrTol(9, 20)).name("ends")
        return iterations.IterationBodyResult([half], [half], ends)

    (half,) = iterations.iterate_bounded_streams_until_termination([numbers], [], Body(build))
    half.map(lambda n: (n,), tuple[float]).name("visited").sink_to(DeltaSink(str(tmp_path / "table"), name="table"))
    store = tmp_path / "store"
    resources = {"spark": SparkResource(master="local[2]"), "intermediates": IntermediatesResource(path=str(store))}
    definitions = unified_definitions(BatchDeployment(pipeline, retry_policy=None), resources=resources)
    result = definitions.resolve_job_def("halves_batch").execute_in_process(instance=instance)
    told = [line.partition("epoch ")[2] for line in log(instance, result.run_id) if "records fed back" in line]
    assert [re.sub(r"in \d+\.\d+ s", "in s", line) for line in told] == [
        "0: 1 records fed back, 1 of the termination criteria, in s",  # which had no value yet
        "1: 1 records fed back, 1 of the termination criteria, ends.value 25, in s",
        "2: 1 records fed back, ends.value 12.5, in s; it ends: the termination criteria had no record in epoch 2",
    ]
    manifests = [json.loads(path.read_text()) for path in store.rglob("manifest.json")]
    (summary,) = [one for manifest in manifests for one in manifest["iterations"].values()]
    assert summary["gauges"] == {"ends.value": [None, 25.0, 12.5]}
    (drawn,) = [
        e.materialization.metadata["records by round of Body"]
        for e in result.get_asset_materialization_events()
        if "records by round of Body" in e.materialization.metadata
    ]
    picture = Image.open(BytesIO(base64.b64decode(drawn.value.partition("base64,")[2])))
    assert picture.height > 300  # with a chart below that of the records


@pytest.mark.spark
@pytest.mark.rotates("kills")
@pytest.mark.parametrize(
    ("victim", "executor", "runs"),
    [
        ("worker", "in_process", [0]),
        ("jvm", "in_process", [0]),
        ("jvm", "multiprocess", [0]),
        ("step", "multiprocess", [0]),
        ("step", "in_process", [-signal.SIGKILL, 0]),  # which is the run's process
    ],
)
def test_a_run_whose_processes_are_killed_in_a_round_goes_on_after_the_one_before(tmp_path, victim, executor, runs):
    epoch = chance(f"iteration {victim} {executor}").randrange(1, 6)
    (tmp_path / "broken").write_text(victim)
    (tmp_path / "instance").mkdir()
    env = {**os.environ, "ITERATIONS_HOME": str(tmp_path), "ITERATIONS_BREAKS_AT": str(8 - epoch)}
    env |= {"ITERATIONS_RETRIES": "1"} | ({"ITERATIONS_EXECUTOR": "1"} if executor == "multiprocess" else {})
    command = [sys.executable, "-m", "tests.iterations.dagster_run", str(tmp_path / "instance")]
    for code in runs:
        done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=300, env=env)
        assert done.returncode == code, done.stderr[-5000:]
    assert not (tmp_path / "broken").exists()
    with DagsterInstance.local_temp(str(tmp_path / "instance")) as instance:
        lines = [line for run in instance.get_runs()[::-1] for line in log(instance, run.run_id)]
    assert [f"goes on after epoch {epoch - 1}" in line for line in lines if "goes on after epoch" in line] == [True]
    assert rounds(lines) == list(range(7))
    table = DeltaTable(str(tmp_path / "table")).to_pyarrow_table()
    assert sorted(table.column(0).to_pylist()) == sorted([*range(2, 9), *range(1, 8)])
    assert list((tmp_path / "store").rglob("iteration-*")) == []


@pytest.mark.spark
@pytest.mark.rotates("kills")
@pytest.mark.parametrize("kind", ["bounded", "unbounded"])
@pytest.mark.parametrize(
    ("victim", "executor", "processes"),
    [
        ("jvm", "in_process", [0]),
        ("step", "multiprocess", [0]),
        ("step", "in_process", [-signal.SIGKILL, 0]),  # which is the run's process
    ],
)
def test_a_stream_whose_processes_are_killed_in_a_round_is_started_again_by_its_sensor(
    tmp_path, kind, victim, executor, processes
):
    given(tmp_path)
    hop = chance(f"stream {kind} {victim} {executor}").randint(1, HOPS)
    (tmp_path / "instance").mkdir()
    env = {**os.environ, "STREAM_HOME": str(tmp_path), "STREAM_KIND": kind, "STREAM_VICTIM": victim}
    env |= {"STREAM_HOP": str(hop), "STREAM_EXECUTOR": executor}
    command = [sys.executable, "-m", "tests.iterations.dagster_stream_run", str(tmp_path / "instance")]
    said = []
    for code in processes:
        done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=300, env=env)
        assert done.returncode == code, done.stderr[-5000:]
        said += done.stdout.splitlines()
    assert (tmp_path / "died").exists()
    assert [re.sub("run [0-9a-f]+ failed: .+; attempt", "attempt", line) for line in said] == [
        "starting hopping",
        "attempt 1",
        "hopping has come to the end of its input",
    ]
    with DagsterInstance.local_temp(str(tmp_path / "instance")) as instance:
        failed, ended = reversed(instance.get_runs())
        lines = log(instance, ended.run_id)
    assert (failed.status, ended.status) == (DagsterRunStatus.FAILURE, DagsterRunStatus.SUCCESS)
    began = [int(number) for number in (tmp_path / "rounds").read_text().split()]
    (twice,) = [number for number in set(began) if began.count(number) > 1]
    assert began == sorted([*range(max(began) + 1), twice])
    assert any(f"goes on after epoch {twice - 1}" in line for line in lines)
    assert hops(tmp_path) == EXPECTED
