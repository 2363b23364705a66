"""How a step ends, what is tried again, and what is said of runs whose process has died.

An interrupt, and what would come again, are not tried again whatever the retry policy says. The silence of a stage in
the middle gives a dead run away.
"""

import os
import signal
import subprocess
import sys
import time

import msgspec
import pytest
from dagster import DagsterInstance, DagsterRunStatus, RetryPolicy, job, op
from dagster._core.events import DagsterEvent, DagsterEventType
from dagster._core.execution.plan.objects import StepSuccessData

from dagster_unified.engine import interrupts
from dagster_unified.engine.batch.intermediates import IntermediateStore
from dagster_unified.errors import SinkError, StageError
from dagster_unified.orchestration.outcomes import (
    Beat,
    as_failure,
    beating,
    fail_dead_runs,
    interruptible,
    last_beat,
    why_it_failed,
)


def run(body, instance=None):
    """Runs a step with a retry policy, and another one beside it; gives the result and the names of what was called."""
    called = []

    @op(retry_policy=RetryPolicy(max_retries=2))
    def first(context):
        called.append("first")
        with interruptible(context.instance, context.run_id) as asked, as_failure(context):
            body(asked)

    @op(retry_policy=RetryPolicy(max_retries=2))
    def other(context):
        with interruptible(context.instance, context.run_id):
            called.append("other")

    @job
    def both():
        first()
        other()

    return both.execute_in_process(raise_on_error=False, instance=instance), called


def raising(error):
    def body(asked):
        raise error

    return body


def signalled(number):
    def body(asked):
        os.kill(os.getpid(), number)
        raise StageError("what Spark says of a job that was cancelled")

    return body


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_step_that_is_interrupted_ends_the_run(number):
    before = signal.getsignal(signal.SIGINT)
    result, called = run(signalled(number))
    assert not result.success
    assert called == ["first"]
    assert signal.getsignal(signal.SIGINT) is before


def test_the_run_of_a_process_that_listens_is_cancelled():
    with DagsterInstance.ephemeral() as instance, interrupts.listening() as asked:
        asked.on_stop = lambda: instance.report_run_canceling(instance.get_runs()[0])
        _, called = run(signalled(signal.SIGINT), instance)
        assert called == ["first"]
        assert instance.get_runs()[0].status is DagsterRunStatus.CANCELED
        assert asked.exit_code == 130


def test_what_is_to_be_committed_is_not_after_a_signal():
    committed = []

    def body(asked):
        os.kill(os.getpid(), signal.SIGINT)
        asked.check()
        committed.append(1)

    run(body)
    assert committed == []


@pytest.mark.parametrize(
    ("error", "attempts"),
    [
        (StageError("a worker was lost"), 3),
        (SinkError("another schema"), 1),
        (MemoryError(), 1),
        (SystemExit(3), 1),
        (KeyboardInterrupt(), 1),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, BaseException) else "",
)
def test_only_what_may_succeed_is_tried_again(error, attempts):
    _, called = run(raising(error))
    assert called.count("first") == attempts


def test_signals_are_listened_for_once_however_deep():
    with interrupts.listening() as outer:
        with interrupts.listening() as inner:
            assert inner is outer
        os.kill(os.getpid(), signal.SIGTERM)
        assert outer.received
        assert outer.exit_code == 143


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
def instance():
    with DagsterInstance.ephemeral() as instance:
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


def killed(store, run):
    """Lets a process work on a run until it has said so, and die."""
    program = KILLED.format(folder=str(store.root), run=run.run_id)
    assert subprocess.run([sys.executable, "-c", program], check=False).returncode == -9


def test_a_process_that_is_killed_in_the_middle_of_a_stage_leaves_a_run_that_is_marked_failed(instance, store):
    run = started(instance, DagsterEventType.STEP_START)
    killed(store, run)
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
    killed(store, run)
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
