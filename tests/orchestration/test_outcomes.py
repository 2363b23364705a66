"""How a step ends: an interrupt, and what would come again, are not tried again whatever the retry policy says."""

import os
import signal

import pytest
from dagster import DagsterInstance, DagsterRunStatus, RetryPolicy, job, op

from dagster_unified.engine import interrupts
from dagster_unified.errors import SinkError, StageError
from dagster_unified.orchestration.outcomes import as_failure, interruptible


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
