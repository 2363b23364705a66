"""Reads the event log: the latest materialization of each partition, and why a run failed."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from contextlib import suppress
from typing import Any

from dagster import AssetKey, AssetRecordsFilter, DagsterEvent, DagsterEventType, DagsterInstance

_CRASHED = re.compile(r"(?:was terminated by signal \d+ \(\w+\)|unexpectedly exited with code -?\d+)")
"""What Dagster notes of the process that executed a run."""

_FROM_OUTSIDE = "from outside the execution context"
"""What Dagster says of a run whose process could no longer say anything."""

_PER_QUERY = 500
"""Events per query."""


def latest_metadata(
    instance: DagsterInstance, asset: AssetKey, partitions: Iterable[str] | None = None
) -> dict[str, Mapping[str, Any]]:
    """The metadata of each partition's latest materialization, by partition key.

    For all partitions or some, in no order.
    """
    by_partition = instance.get_latest_storage_id_by_partition(
        asset, DagsterEventType.ASSET_MATERIALIZATION, None if partitions is None else set(partitions)
    )
    ids = sorted(by_partition.values())
    found = {}
    for first in range(0, len(ids), _PER_QUERY):
        batch = ids[first : first + _PER_QUERY]
        for record in instance.fetch_materializations(
            AssetRecordsFilter(asset_key=asset, storage_ids=batch), limit=len(batch)
        ).records:
            if record.partition_key is not None and record.asset_materialization is not None:
                found[record.partition_key] = record.asset_materialization.metadata
    return found


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
    said = next((str(e.message) for e in events if e.event_type is DagsterEventType.RUN_FAILURE and e.message), "")
    return died(events) if _FROM_OUTSIDE in said else said[:300]


def error_of(instance: DagsterInstance, run_id: str) -> str:
    """The class of the library's error that a run failed with; empty where it was none."""
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
    """How the process of a run died, as far as Dagster noted it."""
    how = next(
        (
            found[0]
            for e in events
            if e.event_type is DagsterEventType.ENGINE_EVENT and (found := _CRASHED.search(str(e.message)))
        ),
        "died",
    )
    guess = "; by hand, or by the operating system for want of memory" if "SIGKILL" in how else ""
    return f"the process that executed it {how}{guess}. What it had committed stands"
