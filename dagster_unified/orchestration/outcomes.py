"""How a step ends: what is tried again and what is not, and how it ends where the process was asked to stop."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import datetime, timezone

from dagster import (
    AssetExecutionContext,
    DagsterInstance,
    DagsterRunStatus,
    Failure,
    MetadataValue,
    OpExecutionContext,
    RetryRequested,
)

from dagster_unified.engine import interrupts
from dagster_unified.engine.interrupts import Interrupts
from dagster_unified.engine.restarts import Failure as RestartedFailure
from dagster_unified.engine.restarts import decide, is_asked_for
from dagster_unified.errors import CancelledError, UnifiedError
from dagster_unified.graph.options import Configuration
from dagster_unified.orchestration._dagster_compat import DagsterExecutionInterruptedError, StepInterruptedError
from dagster_unified.orchestration.history import log_of


@contextmanager
def as_failure(context: OpExecutionContext | AssetExecutionContext) -> Iterator[None]:
    """An error as a failure with its sentence and a link to the log, that is tried again where its type says so.

    An error of the driver's memory is not: the next attempt would begin with less.
    """
    try:
        yield
    except CancelledError:
        raise
    except UnifiedError as error:
        kind = {"error": MetadataValue.text(type(error).__name__)}
        raise Failure(str(error), metadata={**kind, **_logs(context)}, allow_retries=error.retryable) from error
    except MemoryError as error:
        raise Failure(
            "the driver ran out of memory; give the process more, or read less at once",
            metadata=_logs(context),
            allow_retries=False,
        ) from error
    except SystemExit as error:
        raise Failure(
            f"something called sys.exit({error.code!r}) in the driver",
            metadata=_logs(context),
            allow_retries=False,
        ) from error


def _logs(context: OpExecutionContext | AssetExecutionContext) -> dict[str, MetadataValue]:
    """Where to read on: the run and, where Dagster has captured it, what its process wrote to standard error."""
    run_id = context.run.run_id
    run, log = MetadataValue.dagster_run(run_id), log_of(context.instance, run_id)
    if not log:
        return {"run": run}
    return {"run": run, "log": MetadataValue.url(log) if "://" in log else MetadataValue.path(log)}


@contextmanager
def tried_again(context: AssetExecutionContext, options: Configuration) -> Iterator[None]:
    """Has a stage tried again after an error that may pass, as `restart-strategy` says, where one is set for the run.

    Else Dagster's retry policy says it.
    """
    try:
        yield
    except UnifiedError as error:
        if not error.retryable or not is_asked_for(options, "BATCH"):
            raise
        verdict = decide(_failures(context), options)
        if verdict.at is None:
            raise Failure(
                f"{error}. It is not tried again: {verdict.reason}",
                metadata={
                    "error": MetadataValue.text(type(error).__name__),
                    **_logs(context),
                },
                allow_retries=False,
            ) from error
        seconds = max(0.0, (verdict.at - datetime.now(timezone.utc)).total_seconds())
        context.log.warning(f"{error}; attempt {verdict.attempt} to run the stage again begins in {seconds:.1f} s")
        raise RetryRequested(context.retry_number + 1, seconds) from error


def _failures(context: AssetExecutionContext) -> list[RestartedFailure]:
    """The attempts of a step that have failed, with the one that has just done so."""
    run_id, step = context.run.run_id, context.op_execution_context.get_step_execution_context().step.key
    times: list[tuple[float, float]] = []
    for stats in context.instance.get_run_step_stats(run_id, [step]):
        times += [(one.start_time, one.end_time) for one in stats.attempts_list if one.start_time and one.end_time]
        times.append((stats.partial_attempt_start or stats.start_time or time.time(), time.time()))
    return [
        RestartedFailure(
            datetime.fromtimestamp(began, timezone.utc),
            datetime.fromtimestamp(ended, timezone.utc),
            f"{run_id}/{step}/{number}",
        )
        for number, (began, ended) in enumerate(times)
    ]


@contextmanager
def interruptible(instance: DagsterInstance, run_id: str) -> Iterator[Interrupts]:
    """Ends the step, and its run, where the process is asked to stop. No retry policy takes that for a failure."""
    with interrupts.listening() as asked:
        try:
            _check_run(instance, run_id)
            asked.check()
            yield asked
        except (Exception, KeyboardInterrupt, DagsterExecutionInterruptedError) as error:
            if not asked.received and isinstance(error, Exception):
                raise
            asked.stopping()
            raise StepInterruptedError("the process was asked to stop; what had not been committed is not") from error


def _check_run(instance: DagsterInstance, run_id: str) -> None:
    """Raises where somebody has terminated the run.

    Also while Dagster's own handler was installed and the step was to be retried.
    """
    run = instance.get_run_by_id(run_id)
    if run is not None and run.status is DagsterRunStatus.CANCELING:
        raise DagsterExecutionInterruptedError
