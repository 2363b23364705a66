"""Runs whose process has died, with the server that would have noticed.

The silence of a stage in the middle gives them away.
"""

import subprocess
import sys
import time

import msgspec
import pytest
from dagster import DagsterInstance, DagsterRunStatus, job, op
from dagster._core.events import DagsterEvent, DagsterEventType
from dagster._core.execution.plan.objects import StepSuccessData

from dagster_unified.engine.batch.intermediates import IntermediateStore
from dagster_unified.orchestration.outcomes import Beat, beating, fail_dead_runs, last_beat, why_it_failed

KILLED = """
import os, signal, time
from dagster_unified.engine.batch.intermediates import IntermediateStore
from dagster_unified.orchestration.outcomes import beating, last_beat
store = IntermediateStore({folder!r})
with beating(store, "p", {run!r}):
    while last_beat(store, "p", {run!r}) is None:
        time.sleep(0.05)
    os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.fixture
def instance(tmp_path):
    (tmp_path / "home").mkdir()
    with DagsterInstance.local_temp(str(tmp_path / "home")) as instance:
        yield instance


@pytest.fixture
def store(tmp_path):
    return IntermediateStore(str(tmp_path / "store"))


def started(instance, *events):
    """A run that has begun, with these events of its step `p__stage`."""

    @op
    def p__stage():
        pass

    @job
    def p_batch():
        p__stage()

    run = instance.create_run_for_job(p_batch, status=DagsterRunStatus.STARTED)
    for event in events:
        data = StepSuccessData(1.0) if event is DagsterEventType.STEP_SUCCESS else None
        instance.report_dagster_event(
            DagsterEvent(
                event.value, "p_batch", step_key="p__stage", step_kind_value="COMPUTE", event_specific_data=data
            ),
            run.run_id,
        )
    return instance.get_run_by_id(run.run_id)


def test_a_process_that_is_killed_in_the_middle_of_a_stage_leaves_a_run_that_is_marked_failed(instance, store):
    run = started(instance, DagsterEventType.STEP_START)
    assert (
        subprocess.run(
            [sys.executable, "-c", KILLED.format(folder=str(store.root), run=run.run_id)], check=False
        ).returncode
        == -9
    )
    assert fail_dead_runs(instance, store, "p", {"p__stage"}) == []
    (said,) = fail_dead_runs(instance, store, "p", {"p__stage"}, patience=0)
    assert f"run {run.run_id[:8]}: process" in said
    assert "re-execute from failure" in said
    assert instance.get_run_by_id(run.run_id).status is DagsterRunStatus.FAILURE
    assert fail_dead_runs(instance, store, "p", {"p__stage"}, patience=0) == []


def test_a_run_that_lives_or_is_between_its_stages_is_left_alone(instance, store):
    silent = Beat(1, "here", time.time() - 3600)
    for events in ([DagsterEventType.STEP_START, DagsterEventType.STEP_SUCCESS], []):
        run = started(instance, *events)
        path = store.root / "p" / ".runs" / f"{run.run_id}.json"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(msgspec.json.encode(silent))
    living = started(instance, DagsterEventType.STEP_START)
    with beating(store, "p", living.run_id):
        while last_beat(store, "p", living.run_id) is None:
            time.sleep(0.01)
        assert fail_dead_runs(instance, store, "p", {"p__stage"}) == []
    assert last_beat(store, "p", living.run_id) is None


def test_a_run_whose_process_dagster_saw_die_is_told_what_died_and_what_comes_next(instance, store):
    run = started(instance, DagsterEventType.STEP_START)
    assert (
        subprocess.run(
            [sys.executable, "-c", KILLED.format(folder=str(store.root), run=run.run_id)], check=False
        ).returncode
        == -9
    )
    instance.report_engine_event(
        f"Run execution process for {run.run_id} was terminated by signal 9 (SIGKILL). This usually indicates", run
    )
    instance.report_run_failed(run)  # as Dagster's code server does
    died = (
        "the process that executed it was terminated by signal 9 (SIGKILL); by hand, or by the operating system for"
        " want of memory. What it had committed stands"
    )
    assert why_it_failed(instance, run.run_id) == died
    (said,) = fail_dead_runs(instance, store, "p", {"p__stage"})
    assert said == f"run {run.run_id[:8]}: {died}. Re-execute it from failure: it goes on from where it was"
    assert fail_dead_runs(instance, store, "p", {"p__stage"}) == []
