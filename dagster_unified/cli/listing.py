"""`list`: the deployments of a code location, and the state of each.

A stream's state is what its checkpoint directory says: Dagster's status of a run can be wrong after `kill -9`. Dagster
is asked for what only it knows, where DAGSTER_HOME is set: why a stream stopped, and what became of runs in BATCH.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import datetime, timezone
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from dagster_unified import settings
from dagster_unified.cli.finding import Declared, declared_in, default_module
from dagster_unified.cli.terminal import Defines, Json, Location, out, say, table, write

if TYPE_CHECKING:
    from dagster import DagsterInstance, RunRecord

    from dagster_unified.engine.streaming.checkpoint import CheckpointDirectory, Deployed, Lease
    from dagster_unified.engine.streaming.desired import Desired
    from dagster_unified.orchestration.deployments import StreamingDeployment


_ALIVE = ("running", "draining", "stopping")
"""The states of a stream whose job gives signs of life."""


@dataclass
class Row:
    """What is known of a deployment."""

    pipeline: str
    mode: Literal["BATCH", "STREAMING"]
    job: str
    state: str
    note: str = ""
    """What more there is to say of its state."""

    phase: str = ""
    """What a stream's job does: `running`, or what it does before its first epoch, such as restoring state."""

    run: str | None = None
    epoch: int | None = None
    """The last epoch that is committed."""

    watermark: datetime | None = None
    lag: float | None = None
    """Seconds that the watermark is behind the clock."""

    seen: datetime | None = None
    """When its job gave its last sign of life; of BATCH when its last run began or ended."""

    sensor: Literal["on", "off"] | None = None
    """Whether its sensor is on; None where there is no DAGSTER_HOME, and in BATCH."""


def list_deployments(module: Location = None, /, *, define: Defines = [], json: Json = False) -> int:
    """List the deployments of a code location with their state, run, epoch, watermark and last sign of life.

    What a run ended with is known where DAGSTER_HOME is set.
    """
    found = declared_in(module or default_module())
    with _instance() as instance:
        rows = [*(_stream(deployment, define, instance) for deployment in found.streaming), *_batch(found, instance)]
    rows.sort(key=lambda row: (row.pipeline, row.mode))
    if json:
        import msgspec

        write(msgspec.json.format(msgspec.json.encode(rows), indent=2).decode())
        return 0
    columns = ("deployment", "mode", "state", "run", "epoch", "watermark", "lag", "sign of life")
    shown = table(columns, map(_cells, rows))
    for column in shown.columns[:4]:
        column.no_wrap = True
    out().print(shown)
    say(*(f"{row.pipeline}: {row.phase}" for row in rows if row.phase not in ("", row.state)))
    say(*(f"{row.pipeline}: {row.note}" for row in rows if row.note))
    return 0


@contextmanager
def _instance() -> Iterator[DagsterInstance | None]:
    """Dagster's instance of DAGSTER_HOME; None where there is none."""
    home = os.environ.get("DAGSTER_HOME")
    if not home or not Path(home).is_dir():
        yield None
        return
    from dagster import DagsterInstance

    with DagsterInstance.get() as instance:
        yield instance


def _stream(deployment: StreamingDeployment, define: list[str], instance: DagsterInstance | None) -> Row:
    from dagster_unified.engine.streaming.desired import read_desired, read_status
    from dagster_unified.errors import UnifiedError
    from dagster_unified.operators.time import wall_clock
    from dagster_unified.orchestration.deployments import directory_of
    from dagster_unified.orchestration.phases import is_starting

    name = deployment.pipeline.name
    row = Row(name, "STREAMING", f"{name}_streaming", "unknown")
    record = _last_run(instance, row.job)
    row.sensor = _sensor(instance, f"{name}_streaming_sensor")
    try:
        directory = directory_of(deployment, settings.command_line(define))
        deployed, lease = directory.deployed(), directory.holder()
        desired, status = read_desired(directory), read_status(directory)
        row.epoch = _last_epoch(directory)
    except UnifiedError as error:
        row.note = str(error)
        return row
    if lease is not None:
        row.run, row.seen = lease.owner, _time(lease.beat / 1000)
    if status is not None and status.watermark is not None:
        row.watermark = _moment(status.watermark)
        row.lag = round((wall_clock() - status.watermark) / 1000, 1)
    ended_as = None if record is None else record.dagster_run.status.value
    row.state, row.note = _state(deployment, deployed, lease, desired, ended_as)
    if status is not None and lease is not None and status.token == lease.token and row.state in _ALIVE:
        row.phase = status.phase
        row.state = "starting" if is_starting(status.phase) else row.state
    if record is not None and row.state == "failed" and not row.note:
        row.note = _why(instance, record)
    if row.sensor == "off" and row.state in ("not started", "stopped", "failed"):
        row.note = f"{row.note}; its sensor is off, and turned on by dagster-unified start".removeprefix("; ")
    return row


def _state(
    deployment: StreamingDeployment,
    deployed: Deployed | None,
    lease: Lease | None,
    desired: Desired,
    run: str | None,
) -> tuple[str, str]:
    """The state of a stream, and what more there is to say of it; `run` is Dagster's status of its last run."""
    from dagster_unified.engine.streaming.checkpoint import PATIENCE

    wanted = desired.state or deployment.state
    if lease is not None and lease.is_alive(PATIENCE):
        if wanted == "suspended" or desired.stop >= lease.token:
            return "stopping", desired.reason
        return ("draining", "") if wanted == "drained" else ("running", "")
    if deployed is not None and deployed.finished:
        return ("drained" if desired.state == "drained" else "finished"), ""
    if run in ("QUEUED", "NOT_STARTED", "STARTING", "STARTED") and wanted != "suspended":
        return "starting", ""
    if wanted == "suspended":
        return "suspended", ""
    if deployed is None and lease is None and run is None:
        return "not started", ""
    if run == "FAILURE":
        return "failed", ""
    if lease is not None and not lease.released:
        return "failed", "its job gives no sign of life any more"
    return ("terminated", "its run was terminated by hand") if run == "CANCELED" else ("stopped", "")


def _why(instance: DagsterInstance | None, record: RunRecord) -> str:
    from dagster_unified.orchestration.outcomes import why_it_failed

    assert instance is not None
    return why_it_failed(instance, record.dagster_run.run_id)


def _batch(found: Declared, instance: DagsterInstance | None) -> Iterator[Row]:
    for name in found.batch:
        row = Row(name, "BATCH", f"{name}_batch", "unknown" if instance is None else "not started")
        record = _last_run(instance, row.job)
        if record is not None:
            row.state = _STATES.get(record.dagster_run.status.value, "running")
            row.run = record.dagster_run.run_id
            at = record.end_time or record.start_time or record.create_timestamp.timestamp()
            row.seen = _time(at)
            row.note = _why(instance, record) if row.state == "failed" else ""
        yield row


_STATES = {"SUCCESS": "finished", "FAILURE": "failed", "CANCELED": "terminated", "QUEUED": "starting"}
"""The states of a last run in BATCH, by Dagster's status; while it is another one, the run goes on."""


def _last_run(instance: DagsterInstance | None, job: str) -> RunRecord | None:
    from dagster import RunsFilter

    records = () if instance is None else instance.get_run_records(RunsFilter(job_name=job), limit=1)
    return records[0] if records else None


def _sensor(instance: DagsterInstance | None, name: str) -> Literal["on", "off"] | None:
    if instance is None:
        return None
    running = [state for state in instance.all_instigator_state() if state.instigator_name == name and state.is_running]
    return "on" if running else "off"


def _last_epoch(directory: CheckpointDirectory) -> int | None:
    """The last epoch that is committed, of the query that is furthest."""
    from dagster_unified.storage.paths import children

    epochs = (directory.last_epoch(query) for query in children(directory.path / "spark"))
    return max((epoch for epoch in epochs if epoch is not None), default=None)


def _time(timestamp: float) -> datetime:
    return datetime.fromtimestamp(timestamp, timezone.utc)


def _moment(millis: int) -> datetime | None:
    """A watermark as a time; None where no calendar has it, as at the end of the input."""
    from dagster_unified.operators.time import to_datetime

    try:
        return to_datetime(millis)
    except OverflowError:
        return None


def _cells(row: Row) -> Sequence[str]:
    lag = "" if row.lag is None or row.watermark is None else _span(row.lag)
    run, epoch = (row.run or "")[:8], "" if row.epoch is None else f"{row.epoch:,}"
    return (row.pipeline, row.mode, row.state, run, epoch, _shown(row.watermark), lag, _ago(row.seen))


def _shown(moment: datetime | None) -> str:
    return "" if moment is None else f"{moment:%Y-%m-%d %H:%M:%S}"


def _ago(moment: datetime | None) -> str:
    from dagster_unified.operators.time import wall_clock

    return "" if moment is None else f"{_span(wall_clock() / 1000 - moment.timestamp())} ago"


def _span(seconds: float) -> str:
    """A length of time in its largest unit, cut off."""
    units = (("d", 86_400), ("h", 3_600), ("min", 60))
    unit, size = next(((unit, size) for unit, size in units if seconds >= size), ("s", 1))
    return f"{max(seconds, 0) // size:.0f} {unit}"
