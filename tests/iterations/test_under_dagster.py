"""An iteration as a stage of a Dagster run: rounds in its log, what became of them, and re-execution from failure."""

import os
import signal
import subprocess
import sys

import pytest
from dagster import DagsterInstance, ReexecutionOptions, execute_job, reconstructable
from deltalake import DeltaTable

from tests.depth import chance
from tests.iterations.dagster_job import BROKEN, HOME, job


@pytest.fixture
def instance(spark, tmp_path):
    with DagsterInstance.local_temp(str(tmp_path)) as instance:
        yield instance


def log(instance, run_id):
    return [entry.user_message for entry in instance.all_logs(run_id)]


def test_a_re_execution_goes_on_after_the_last_round(instance):
    BROKEN.touch()
    first = job().execute_in_process(instance=instance, raise_on_error=False)
    assert not first.success
    assert any("iteration 'Countdown', epoch 3: 2 records fed back" in line for line in log(instance, first.run_id))
    BROKEN.unlink()
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
    assert any("iteration 'Countdown' of stage 'table' goes on after epoch 3" in line for line in lines)
    assert not any("epoch 3: " in line for line in lines)
    assert shown["rounds of Countdown"].value == 7
    assert shown["why Countdown ended"].value == "the termination criteria had no record in epoch 6"
    assert shown["records by round of Countdown"].value.startswith("![records by round](data:image/png")
    table = DeltaTable(str(HOME / "table")).to_pyarrow_table()
    assert sorted(table.column(0).to_pylist()) == sorted([*range(2, 9), *range(1, 8)])
    assert list((HOME / "store").rglob("iteration-*")) == []


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
    rounds = [line.partition("'Countdown', epoch ")[2].partition(":")[0] for line in lines]
    assert [int(number) for number in rounds if number] == list(range(7))
    table = DeltaTable(str(tmp_path / "table")).to_pyarrow_table()
    assert sorted(table.column(0).to_pylist()) == sorted([*range(2, 9), *range(1, 8)])
    assert list((tmp_path / "store").rglob("iteration-*")) == []
