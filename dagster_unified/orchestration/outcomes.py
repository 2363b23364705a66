"""How a step ends, what is tried again, and the heartbeat by which a dead BATCH run is known."""

from __future__ import annotations

import os
import re
import socket
import threading
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from datetime import datetime, timezone

import msgspec
from dagster import (
    AssetExecutionContext,
    DagsterEvent,
    DagsterEventType,
    DagsterInstance,
    DagsterRun,
    DagsterRunStatus,
    DefaultSensorStatus,
    Failure,
    MetadataValue,
    OpExecutionContext,
    RetryRequested,
    RunsFilter,
    SensorDefinition,
    SensorEvaluationContext,
    SkipReason,
    sensor,
)
from upath import UPath

from dagster_unified.engine import interrupts
from dagster_unified.engine.batch.intermediates import IntermediateStore
from dagster_unified.engine.interrupts import Interrupts
from dagster_unified.engine.restarts import Failure as RestartedFailure
from dagster_unified.engine.restarts import decide, is_asked_for
from dagster_unified.errors import CancelledError, UnifiedError
from dagster_unified.graph.options import Configuration
from dagster_unified.orchestration._dagster_compat import (
    WILL_RETRY_TAG,
    DagsterExecutionInterruptedError,
    StepEventStatus,
    StepInterruptedError,
)
from dagster_unified.orchestration.resources import OBJECT_STORE, store_of


@contextmanager
def as_failure(context: OpExecutionContext | AssetExecutionContext) -> Iterator[None]:
    """Raise an error as Dagster's `Failure`, with its sentence and a link to the log; its type decides about retries.

    An error of the driver's memory is not retried: the next attempt would begin with less.
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
    """Return links to the run and, if Dagster captured it, to what its process wrote to standard error."""
    run_id = context.run.run_id
    run, log = MetadataValue.dagster_run(run_id), log_of(context.instance, run_id)
    if not log:
        return {"run": run}
    return {"run": run, "log": MetadataValue.url(log) if "://" in log else MetadataValue.path(log)}


@contextmanager
def tried_again(context: AssetExecutionContext, options: Configuration) -> Iterator[None]:
    """Retry a stage after a transient error as `restart-strategy` says, if the run sets one.

    Otherwise Dagster's retry policy decides.
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
    """Return the failed attempts of a step, including the one that has just failed."""
    run_id, step = context.run.run_id, context.op_execution_context.get_step_execution_context().step.key
    times: list[tuple[float, float]] = []
    for stats in context.instance.get_run_step_stats(run_id, [step]):
        attempts = ((attempt.start_time, attempt.end_time) for attempt in stats.attempts_list)
        times += [(began, ended) for began, ended in attempts if began and ended]
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
    """End the step and its run when the process is asked to stop; no retry policy takes that for a failure."""
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
    """Raise where somebody has terminated the run.

    Also while Dagster's own handler was installed and the step was to be retried.
    """
    run = instance.get_run_by_id(run_id)
    if run is not None and run.status is DagsterRunStatus.CANCELING:
        raise DagsterExecutionInterruptedError


_CRASHED = re.compile(r"(?:was terminated by signal \d+ \(\w+\)|unexpectedly exited with code -?\d+)")
"""Dagster's note about the process that executed a run."""

_FROM_OUTSIDE = "from outside the execution context"
"""Dagster's words about a run whose process could no longer say anything."""


def why_it_failed(instance: DagsterInstance, run_id: str) -> str:
    """Why a run failed, in one line: what its step said, or how its process died."""
    wanted = {DagsterEventType.STEP_FAILURE, DagsterEventType.RUN_FAILURE, DagsterEventType.ENGINE_EVENT}
    events = [e.dagster_event for e in instance.all_logs(run_id, of_type=wanted) if e.dagster_event is not None]
    for event in events:
        if event.is_step_failure:
            data = event.step_failure_data
            if data.user_failure_data is not None and data.user_failure_data.description:
                return str(data.user_failure_data.description)[:300]
            if data.error is not None:
                return str(data.error.message).strip()[:300]
    failure = next((str(e.message) for e in events if e.event_type is DagsterEventType.RUN_FAILURE and e.message), "")
    return died(events) if _FROM_OUTSIDE in failure else failure[:300]


def error_of(instance: DagsterInstance, run_id: str) -> str:
    """Return the class of the library's error that a run failed with; empty where it was none."""
    entries = instance.all_logs(run_id, of_type=DagsterEventType.STEP_FAILURE)
    failures = [e.dagster_event.step_failure_data.user_failure_data for e in entries if e.dagster_event is not None]
    return next((str(f.metadata["error"].value) for f in failures if f is not None and "error" in f.metadata), "")


def log_of(instance: DagsterInstance, run_id: str) -> str:
    """Where the output of a run's process is, as far as Dagster captured it; empty where it did not."""
    with suppress(Exception):  # of what the storage of logs raises nothing is worth hiding why the run failed
        entries = instance.all_logs(run_id, of_type=DagsterEventType.LOGS_CAPTURED)
        captured = [entry.dagster_event.logs_captured_data for entry in entries if entry.dagster_event is not None]
        if captured:
            last, manager = captured[-1], instance.compute_log_manager
            known = manager.get_log_metadata(manager.build_log_key_for_run(run_id, last.file_key))
            return last.external_stderr_url or last.external_url or known.stderr_location or ""
    return ""


def died(events: Iterable[DagsterEvent]) -> str:
    """Return how the process of a run died, as far as Dagster noted it."""
    how = next(
        (
            match[0]
            for e in events
            if e.event_type is DagsterEventType.ENGINE_EVENT and (match := _CRASHED.search(str(e.message)))
        ),
        "died",
    )
    guess = "; by hand, or by the operating system for want of memory" if "SIGKILL" in how else ""
    return f"the process that executed it {how}{guess}. What it had committed stands"


# Heartbeats


BEAT = 2.0
"""Seconds between heartbeats."""

PATIENCE = 30.0
"""Seconds without one after which a process is taken to be dead."""


class Beat(msgspec.Struct, frozen=True):
    """A heartbeat: which process, where, and when, in seconds since the epoch."""

    process: int
    host: str
    at: float


@contextmanager
def beating(store: IntermediateStore, pipeline: str, run_id: str) -> Iterator[None]:
    """Renew the heartbeat while a stage is executed."""
    path = _path(store, pipeline, run_id)
    path.parent.mkdir(parents=True, exist_ok=True)
    stopped = threading.Event()

    def beat() -> None:
        while not stopped.is_set():
            with suppress(
                Exception
            ):  # one that is lost does no harm; a thread that has ended would have the run marked failed
                path.write_bytes(msgspec.json.encode(Beat(os.getpid(), socket.gethostname(), time.time())))
            stopped.wait(BEAT)

    thread = threading.Thread(target=beat, name="heartbeats", daemon=True)
    thread.start()
    try:
        yield
    finally:
        stopped.set()
        thread.join()
        with suppress(Exception):
            path.unlink(missing_ok=True)


def last_beat(store: IntermediateStore, pipeline: str, run_id: str) -> Beat | None:
    """Return the last heartbeat of a run that is, or was, in the middle of a stage."""
    try:
        return msgspec.json.decode(_path(store, pipeline, run_id).read_bytes(), type=Beat)
    except (FileNotFoundError, msgspec.DecodeError):
        return None


def heartbeat_sensor(pipeline: str, ops: set[str]) -> SensorDefinition:
    """`<pipeline>_heartbeat_sensor`: marks runs failed whose process is dead, so that they are retried."""

    @sensor(
        name=f"{pipeline}_heartbeat_sensor",
        minimum_interval_seconds=10,
        default_status=DefaultSensorStatus.RUNNING,
        required_resource_keys={"intermediates", OBJECT_STORE},
        description=(
            f"Reports BATCH runs of {pipeline} as failed whose process has died, so that Dagster's run retries, or a"
            " person, can re-execute them from where they were."
        ),
    )
    def watch(context: SensorEvaluationContext) -> SkipReason:
        reported = fail_dead_runs(context.instance, store_of(context.resources.intermediates), pipeline, ops)
        return SkipReason("; ".join(reported) or f"no run of {pipeline} has died")

    return watch


def fail_dead_runs(
    instance: DagsterInstance, store: IntermediateStore, pipeline: str, ops: set[str], patience: float = PATIENCE
) -> list[str]:
    """Report dead runs as failed; return which, also those that Dagster has reported meanwhile."""
    reported = _failed_by_dagster(instance, store, pipeline)
    for run in instance.get_runs(RunsFilter(statuses=[DagsterRunStatus.STARTED, DagsterRunStatus.CANCELING])):
        beat = last_beat(store, pipeline, run.run_id)
        if beat is None or time.time() - beat.at <= patience or not _is_in_a_stage(instance, run, ops):
            continue
        message = (
            f"process {beat.process} on {beat.host} has given no sign of life for {time.time() - beat.at:.0f} s; it is"
            " taken to be dead. What was finished is kept: re-execute from failure"
        )
        if run.status is DagsterRunStatus.CANCELING:
            instance.report_run_canceled(run, message)
        else:
            instance.report_run_failed(run, message)
        _path(store, pipeline, run.run_id).unlink(missing_ok=True)
        reported.append(f"run {run.run_id[:8]}: {message}")
    return reported


def _failed_by_dagster(instance: DagsterInstance, store: IntermediateStore, pipeline: str) -> list[str]:
    """Report runs that Dagster saw die in the middle of a stage, whose last heartbeat is left, also to their logs."""
    reported = []
    for path in (store.root / pipeline / ".runs").glob("*.json"):
        run = instance.get_run_by_id(path.stem)
        if run is None or not run.is_finished:
            continue
        path.unlink(missing_ok=True)
        if run.status is DagsterRunStatus.FAILURE:
            will_retry = run.tags.get(WILL_RETRY_TAG) == "true"
            advice = (
                "Dagster executes it again from where it was"
                if will_retry
                else "Re-execute it from failure: it goes on from where it was"
            )
            message = f"{why_it_failed(instance, run.run_id)}. {advice}"
            instance.report_engine_event(message, run)
            reported.append(f"run {run.run_id[:8]}: {message}")
    return reported


def _is_in_a_stage(instance: DagsterInstance, run: DagsterRun, ops: set[str]) -> bool:
    return any(
        s.step_key in ops and s.status is StepEventStatus.IN_PROGRESS for s in instance.get_run_step_stats(run.run_id)
    )


def _path(store: IntermediateStore, pipeline: str, run_id: str) -> UPath:
    return store.root / pipeline / ".runs" / f"{run_id}.json"
