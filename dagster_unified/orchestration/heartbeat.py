"""Heartbeats of BATCH runs.

After `kill -9` Dagster takes a run to be alive for ever. A sensor marks it failed, and finished stages stay.

A process that executes a stage renews a small file next to the intermediates. Only a run that is in the middle of a
stage is judged by it: what a run does between stages is not ours to know.
"""

# No `from __future__ import annotations` here: Dagster reads the annotations of a sensor's function as objects.
import os
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress

import msgspec
from dagster import (
    DagsterInstance,
    DagsterRun,
    DagsterRunStatus,
    DefaultSensorStatus,
    RunsFilter,
    SensorDefinition,
    SensorEvaluationContext,
    SkipReason,
    sensor,
)
from upath import UPath

from dagster_unified.engine.batch.intermediates.store import IntermediateStore
from dagster_unified.orchestration._dagster_compat import WILL_RETRY_TAG, StepEventStatus
from dagster_unified.orchestration.outcomes import why_it_failed
from dagster_unified.orchestration.resources import store_of

BEAT = 2.0
"""Seconds between signs of life."""

PATIENCE = 30.0
"""Seconds without one after which a process is taken to be dead."""


class Beat(msgspec.Struct, frozen=True):
    """A sign of life: which process, where, and when, in seconds since the epoch."""

    process: int
    host: str
    at: float


@contextmanager
def beating(store: IntermediateStore, pipeline: str, run_id: str) -> Iterator[None]:
    """Renews the sign of life while a stage is executed."""
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

    thread = threading.Thread(target=beat, name="signs of life", daemon=True)
    thread.start()
    try:
        yield
    finally:
        stopped.set()
        thread.join()
        with suppress(Exception):
            path.unlink(missing_ok=True)


def last_beat(store: IntermediateStore, pipeline: str, run_id: str) -> Beat | None:
    """The last sign of life of a run that is, or was, in the middle of a stage."""
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
        required_resource_keys={"intermediates"},
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
    """Reports dead runs as failed; says which, also those that Dagster has reported meanwhile."""
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
    """Report runs that Dagster saw die in the middle of a stage: their last sign of life is left.

    The report goes to their logs as well.
    """
    reported = []
    for path in (store.root / pipeline / ".runs").glob("*.json"):
        run = instance.get_run_by_id(path.stem)
        if run is None or not run.is_finished:
            continue
        path.unlink(missing_ok=True)
        if run.status is DagsterRunStatus.FAILURE:
            again = run.tags.get(WILL_RETRY_TAG) == "true"
            then = (
                "Dagster executes it again from where it was"
                if again
                else "Re-execute it from failure: it goes on from where it was"
            )
            message = f"{why_it_failed(instance, run.run_id)}. {then}"
            instance.report_engine_event(message, run)
            reported.append(f"run {run.run_id[:8]}: {message}")
    return reported


def _is_in_a_stage(instance: DagsterInstance, run: DagsterRun, ops: set[str]) -> bool:
    return any(
        s.step_key in ops and s.status is StepEventStatus.IN_PROGRESS for s in instance.get_run_step_stats(run.run_id)
    )


def _path(store: IntermediateStore, pipeline: str, run_id: str) -> UPath:
    return store.root / pipeline / ".runs" / f"{run_id}.json"
