"""The janitor: a job and a schedule that free intermediates which nobody needs any more, within a budget.

It never frees what a running or queued run may read or write, nor what a backfill in progress or a failed run that may
still be executed again needs. What the next partition goes on from is kept until that partition has been run.
"""

# No `from __future__ import annotations` here: Dagster reads the annotations of an op's function as objects.
import time
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import timedelta
from functools import cached_property
from urllib.parse import unquote

from dagster import (
    Config,
    DagsterInstance,
    DagsterRun,
    DagsterRunStatus,
    DefaultScheduleStatus,
    JobDefinition,
    MetadataValue,
    OpExecutionContext,
    RunsFilter,
    ScheduleDefinition,
    TableColumn,
    TableRecord,
    TableSchema,
    TimeWindowPartitionsDefinition,
    in_process_executor,
    job,
    op,
)
from pydantic import Field

from dagster_unified.engine.batch.intermediates import IntermediateStore
from dagster_unified.engine.batch.retention import (
    Budget,
    StoredIntermediate,
    stored_intermediates,
    to_free,
)
from dagster_unified.errors import ConfigurationError
from dagster_unified.graph.plan import Plan
from dagster_unified.orchestration._dagster_compat import BACKFILL_ID_TAG, BulkActionsFilter, BulkActionStatus
from dagster_unified.orchestration.partitions import check_lengths, words
from dagster_unified.orchestration.producers import lineage_of
from dagster_unified.orchestration.resources import OBJECT_STORE, store_of

_UNFINISHED = [
    s
    for s in DagsterRunStatus
    if s not in (DagsterRunStatus.SUCCESS, DagsterRunStatus.FAILURE, DagsterRunStatus.CANCELED)
]
_IN_PROGRESS = [BulkActionStatus.REQUESTED, BulkActionStatus.CANCELING, BulkActionStatus.FAILING]


@dataclass(frozen=True)
class Retention:
    """How long a pipeline's janitor keeps intermediates, and when it comes.

    Intermediates that nobody needs any more are kept for `max_age`, and at most `max_bytes` of them in all; None is no
    limit. Those of a failed or cancelled run are kept for `failed_for`, to be executed again.
    """

    max_age: timedelta | None = timedelta(days=7)
    max_bytes: int | None = 100_000_000_000
    failed_for: timedelta = timedelta(days=3)
    cron: str = "30 3 * * *"
    running: bool = True
    """Whether the schedule is on unless somebody turns it off."""

    def __post_init__(self) -> None:
        check_lengths("Retention", max_age=self.max_age, failed_for=self.failed_for)
        if (self.max_bytes or 0) < 0 or timedelta(0) > min(self.max_age or timedelta(0), self.failed_for):
            raise ConfigurationError("Retention: max_age, max_bytes and failed_for cannot be negative")

    @property
    def budget(self) -> Budget:
        """The limits of what is kept."""
        return Budget(self.max_age, self.max_bytes)

    def describe(self) -> str:
        """Say what is kept, and when the rest goes."""
        if self.max_age is None and self.max_bytes is None:
            return "all intermediates are kept"
        limits = [words(self.max_age)] if self.max_age is not None else []
        limits += [f"{self.max_bytes / 1e9:g} GB in all"] if self.max_bytes is not None else []
        when = f"by its schedule ({self.cron})" if self.running else "where somebody launches it"
        return f"intermediates that nobody needs are kept for {' and up to '.join(limits)}, and then freed {when}"


class JanitorConfig(Config):
    """How the janitor goes about it this time."""

    dry_run: bool = Field(default=False, description="Say what would be freed, and free nothing.")


def janitor_job(
    pipeline: str, loaded: Plan, retention: Retention, carried_over: TimeWindowPartitionsDefinition | None
) -> JobDefinition:
    """`<pipeline>_janitor`."""

    @op(name=f"{pipeline}_free_intermediates", required_resource_keys={"intermediates", OBJECT_STORE})
    def free(context: OpExecutionContext, config: JanitorConfig) -> None:
        store: IntermediateStore = store_of(context.resources.intermediates)
        readers = Readers(
            context.instance,
            loaded.name,
            retention.failed_for,
            carried_over,
            list(stored_intermediates(store, loaded.name)),
        )
        freed = to_free(readers.stored, loaded, retention.budget, time.time(), readers.may_write, readers.needs)
        for intermediate in [] if config.dry_run else freed:
            store.remove(intermediate.address)
        size = sum(s.bytes for s in freed if not s.linked)
        context.log.info(
            f"{'would free' if config.dry_run else 'freed'} {len(freed)} intermediates of {pipeline}, {size} bytes;"
            f" {len(readers.stored) - len(freed)} stay; {retention.describe()}"
        )
        context.add_output_metadata(
            {
                "dry run": config.dry_run,
                "intermediates": len(freed),
                "bytes": size,
                "kept": len(readers.stored) - len(freed),
                "freed": _table(freed),
            }
        )

    @job(
        name=f"{pipeline}_janitor",
        executor_def=in_process_executor,
        description=(
            f"Frees intermediates of {pipeline}: {retention.describe()}. Launch it with dry_run to see which would go."
        ),
    )
    def janitor() -> None:
        free()

    return janitor


def janitor_schedule(pipeline: str, retention: Retention, janitor: JobDefinition) -> ScheduleDefinition:
    """`<pipeline>_janitor_schedule`."""
    status = DefaultScheduleStatus.RUNNING if retention.running else DefaultScheduleStatus.STOPPED
    return ScheduleDefinition(
        name=f"{pipeline}_janitor_schedule", job=janitor, cron_schedule=retention.cron, default_status=status
    )


@dataclass
class Readers:
    """Who may still need what, as Dagster's runs and backfills say."""

    instance: DagsterInstance
    pipeline: str
    failed_for: timedelta
    carried_over: TimeWindowPartitionsDefinition | None
    """The partitions, where state is carried."""

    stored: list[StoredIntermediate]
    _runs: dict[str, DagsterRun | None] = field(default_factory=dict)

    def may_write(self, run_id: str) -> bool:
        """Return whether a run is not over."""
        run = self._run(run_id)
        return run is not None and run.status in _UNFINISHED

    def needs(self, intermediate: StoredIntermediate) -> bool:
        """Return whether somebody may still read an intermediate."""
        address = intermediate.address
        run = address.run
        others = [r for r in self._living if r.run_id != run]
        if run in self._ancestors_of_the_living or run in self._to_be_re_executed or self._in_a_living_backfill(run):
            return True
        latest = self._latest.get((address.stage, address.partition)) is intermediate
        # A failed run may have read what other runs wrote, and its re-execution will.
        awaited = bool(others or self._backfills or self._to_be_re_executed)
        return latest and (awaited or address.partition == self._last_partition.get(address.stage))

    @cached_property
    def _living(self) -> list[DagsterRun]:
        """Unfinished runs, which may read what earlier ones wrote; the janitor's and streams do not."""
        runs = self.instance.get_runs(RunsFilter(statuses=_UNFINISHED))
        return [r for r in runs if not r.job_name.endswith("_janitor") and not r.job_name.endswith("_streaming")]

    @cached_property
    def _backfills(self) -> set[str]:
        return {b.backfill_id for b in self.instance.get_backfills(filters=BulkActionsFilter(statuses=_IN_PROGRESS))}

    @cached_property
    def _ancestors_of_the_living(self) -> set[str]:
        return {run_id for run in self._living for run_id in lineage_of(run, self.instance) if run_id != run.run_id}

    @cached_property
    def _to_be_re_executed(self) -> set[str]:
        """Failed runs that nobody has re-executed with success, and the runs that they continued."""
        needed: set[str] = set()
        for run_id in {s.address.run for s in self.stored}:
            run = self._run(run_id)
            if run is None or run.status not in (DagsterRunStatus.FAILURE, DagsterRunStatus.CANCELED):
                continue
            record = self.instance.get_run_record_by_id(run_id)
            ended = record.end_time if record is not None and record.end_time is not None else 0.0
            if time.time() - ended < self.failed_for.total_seconds() and not self._made_good(run):
                needed |= set(lineage_of(run, self.instance))
        return needed

    def _made_good(self, run: DagsterRun) -> bool:
        """Return whether a re-execution of a run, or of a re-execution, has succeeded."""
        pending, seen = [run.run_id], set[str]()
        while pending:
            for child in self.instance.get_runs(RunsFilter(tags={"dagster/parent_run_id": pending.pop()})):
                if child.status is DagsterRunStatus.SUCCESS:
                    return True
                if child.run_id not in seen:
                    seen.add(child.run_id)
                    pending.append(child.run_id)
        return False

    def _in_a_living_backfill(self, run_id: str) -> bool:
        run = self._run(run_id)
        return run is not None and run.tags.get(BACKFILL_ID_TAG) in self._backfills

    @cached_property
    def _latest(self) -> dict[tuple[str, str], StoredIntermediate]:
        newest: dict[tuple[str, str], StoredIntermediate] = {}
        for intermediate in sorted((s for s in self.stored if s.manifest is not None), key=lambda s: s.committed):
            newest[(intermediate.address.stage, intermediate.address.partition)] = intermediate
        return newest

    @cached_property
    def _last_partition(self) -> dict[str, str]:
        """The last partition in time of each stage, where state is carried.

        What a run without partitions wrote is not among them.
        """
        last: dict[str, tuple[float, str]] = {}
        for stage, partition in self._latest if self.carried_over is not None else ():
            with suppress(Exception):  # not a key of theirs
                begins = self.carried_over.time_window_for_partition_key(unquote(partition)).start.timestamp()  # type: ignore[union-attr]
                last[stage] = max(last.get(stage, (begins, partition)), (begins, partition))
        return {stage: partition for stage, (_, partition) in last.items()}

    def _run(self, run_id: str) -> DagsterRun | None:
        if run_id not in self._runs:
            self._runs[run_id] = self.instance.get_run_by_id(run_id)
        return self._runs[run_id]


def _table(freed: list[StoredIntermediate]) -> MetadataValue:
    columns = [TableColumn("stage"), TableColumn("partition"), TableColumn("run"), TableColumn("bytes", "int")]
    records = [
        TableRecord(
            {"stage": s.address.stage, "partition": s.address.partition, "run": s.address.run, "bytes": s.bytes}
        )
        for s in freed[:1000]
    ]
    return MetadataValue.table(records=records, schema=TableSchema(columns))
