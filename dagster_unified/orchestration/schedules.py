"""A schedule of a pipeline's partitions: the newest one that is complete, and those before it that were missed."""

# No `from __future__ import annotations` here: Dagster reads the annotations of a schedule's function as objects.
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta

import pendulum
from dagster import (
    AssetKey,
    DagsterInstance,
    DefaultScheduleStatus,
    JobDefinition,
    MultiPartitionKey,
    MultiPartitionsDefinition,
    PartitionsDefinition,
    RunRequest,
    ScheduleDefinition,
    ScheduleEvaluationContext,
    SkipReason,
    TimeWindowPartitionsDefinition,
    schedule,
)

from dagster_unified.errors import ConfigurationError
from dagster_unified.operators.time import to_span
from dagster_unified.orchestration._dagster_compat import (
    ASSET_PARTITION_RANGE_END_TAG,
    ASSET_PARTITION_RANGE_START_TAG,
    AssetPartitionStatus,
    ScheduleType,
    UnresolvedAssetJobDefinition,
)
from dagster_unified.orchestration.partitions import check_lengths, earlier_on_the_clock, words


@dataclass(frozen=True)
class BatchSchedule:
    """When a pipeline runs in BATCH.

    With partitions in time, `offset` after the end of each, so that late data is there. A tick also runs the `catch_up`
    partitions before that one, as far as they have not been materialized and are not on their way. `retries` is how
    often Dagster executes a run again, from its failure, by its run retries, whatever the error was unless
    `dagster.yaml` says `retry_on_asset_or_op_failure: false`. Without partitions in time, `cron` says when; so it does
    with an `offset` of partitions that are no hours, days, weeks or months. Once the partitions have come to their end,
    a tick runs only what was missed.
    """

    offset: timedelta = timedelta(0)
    catch_up: int = 0
    retries: int | None = None
    cron: str | None = None
    running: bool = False
    """Whether the schedule is on unless somebody turns it off."""

    def __post_init__(self) -> None:
        check_lengths("BatchSchedule", offset=self.offset)
        if self.offset < timedelta(0) or self.catch_up < 0 or (self.retries is not None and self.retries < 0):
            raise ConfigurationError("a schedule's offset, catch_up and retries cannot be negative")
        if self.offset.total_seconds() % 60:
            raise ConfigurationError(f"a schedule's offset is in whole minutes, and is {self.offset}")


def batch_schedule(
    pipeline: str,
    declared: BatchSchedule,
    job: JobDefinition | UnresolvedAssetJobDefinition,
    partitions: PartitionsDefinition[str] | None,
    in_order: bool,
    stages: Sequence[AssetKey],
) -> ScheduleDefinition:
    """`<pipeline>_schedule`.

    With `in_order` what was missed is run as one range, whose partitions come one after another.
    """
    time = time_dimension(partitions)
    irregular = time is not None and time.schedule_type is None and bool(declared.offset)
    if time is not None and irregular and declared.cron is None:
        raise ConfigurationError(
            f"{pipeline}: partitions of '{time.cron_schedule}' have no cadence that an offset moves; say by cron= when"
            f" the schedule ticks, {words(declared.offset)} after the end of each"
        )
    if not irregular and (time is None) == (declared.cron is None):
        raise ConfigurationError(
            f"{pipeline}: the partitions say when the schedule ticks; leave cron= out, or use offset="
            if time is not None
            else f"{pipeline}: a schedule without partitions in time needs cron=, such as '0 3 * * *'"
        )
    if time is None and (declared.offset or declared.catch_up):
        raise ConfigurationError(
            f"{pipeline}: offset and catch_up are those of partitions in time; leave them out with cron="
        )
    cron = declared.cron if time is None or irregular else cron_of(pipeline, time, declared.offset)
    tags = {} if declared.retries is None else {"dagster/max_retries": str(declared.retries)}

    @schedule(
        name=f"{pipeline}_schedule",
        cron_schedule=str(cron),
        job=job,
        execution_timezone=time.timezone if time is not None else None,
        default_status=DefaultScheduleStatus.RUNNING if declared.running else DefaultScheduleStatus.STOPPED,
        description=f"Runs {pipeline} in BATCH"
        + (f" for each partition, {_after(declared.offset)} its end." if time is not None else "."),
    )
    def tick(context: ScheduleEvaluationContext) -> list[RunRequest] | SkipReason:
        if partitions is None:
            return [RunRequest(tags=tags)]
        wanted = due(partitions, context.scheduled_execution_time, declared, stages, context.instance, in_order)
        if not wanted:
            return SkipReason(f"no partition of {pipeline} is complete, or those that are are on their way")
        at = context.scheduled_execution_time.isoformat()
        if in_order and len(wanted) > 1:
            return [
                RunRequest(
                    run_key=f"{wanted[0]}...{wanted[-1]} {at}",
                    tags={
                        **tags,
                        ASSET_PARTITION_RANGE_START_TAG: wanted[0],
                        ASSET_PARTITION_RANGE_END_TAG: wanted[-1],
                    },
                )
            ]
        return [RunRequest(run_key=f"{key} {at}", partition_key=key, tags=tags) for key in wanted]

    return tick


def _after(offset: timedelta) -> str:
    return f"{words(offset)} after" if offset else "at"


def due(
    partitions: PartitionsDefinition[str],
    now: datetime,
    declared: BatchSchedule,
    stages: Sequence[AssetKey],
    instance: DagsterInstance,
    in_order: bool,
) -> list[str]:
    """Return the partitions to run at a tick, oldest first: the newest complete one, and those missed before it.

    With `in_order` all from the first that is missing, and none while one of them is on its way.
    """
    time = time_dimension(partitions)
    # An hour is an hour; six in the morning is six in the morning, also on the day on which clocks change.
    hourly = time is not None and time.schedule_type is ScheduleType.HOURLY
    now = pendulum.instance(now) - declared.offset if hourly else earlier_on_the_clock(now, declared.offset)
    keys = partitions.get_partition_keys(current_time=now, dynamic_partitions_store=instance)
    if isinstance(partitions, MultiPartitionsDefinition):
        newest, missed = _by_window(partitions, keys, now, declared.catch_up)
    elif isinstance(partitions, TimeWindowPartitionsDefinition):
        newest, missed = list(keys[-1:]), list(keys[-1 - declared.catch_up : -1])
    else:
        newest, missed = list(keys), []
    if time is not None and not _has_come(time, now):
        newest, missed = [], [*missed, *newest]
    known = [instance.get_status_by_partition(stage, [*missed, *newest], partitions) or {} for stage in stages]

    def is_at(key: str, *statuses: AssetPartitionStatus) -> list[bool]:
        return [statuses_of.get(key) in statuses for statuses_of in known]

    on_the_way = {key for key in (*missed, *newest) if any(is_at(key, AssetPartitionStatus.IN_PROGRESS))}
    materialized = {key for key in missed if all(is_at(key, AssetPartitionStatus.MATERIALIZED))}
    if in_order:
        wanted = [key for key in (*missed, *newest) if key not in materialized]
        return [] if on_the_way else [*missed, *newest][[*missed, *newest].index(wanted[0]) :] if wanted else []
    return [key for key in missed if key not in on_the_way | materialized] + [
        key for key in newest if key not in on_the_way
    ]


def _has_come(partitions: TimeWindowPartitionsDefinition, now: datetime) -> bool:
    """Return whether the last window that ended is a partition: windows after the end and excluded ones are not."""
    if partitions.end is not None and partitions.end < now:
        return False
    keys = partitions.get_partition_keys(current_time=now)
    if not keys or not partitions.exclusions:
        return bool(keys)
    end = partitions.time_window_for_partition_key(keys[-1]).end
    following = partitions.time_window_for_partition_key(partitions.get_partition_key_for_timestamp(end.timestamp()))
    return following.end > now


def time_dimension(partitions: PartitionsDefinition[str] | None) -> TimeWindowPartitionsDefinition | None:
    """Return the partitions in time, or the dimension of several that is."""
    if isinstance(partitions, MultiPartitionsDefinition):
        return next(
            (
                d.partitions_def
                for d in partitions.partitions_defs
                if isinstance(d.partitions_def, TimeWindowPartitionsDefinition)
            ),
            None,
        )
    return partitions if isinstance(partitions, TimeWindowPartitionsDefinition) else None


def cron_of(pipeline: str, partitions: TimeWindowPartitionsDefinition, offset: timedelta) -> str:
    """When partitions are complete, and `offset` has passed: the partitions' own cadence, moved."""
    kind = partitions.schedule_type
    if kind is None or not offset:
        return partitions.cron_schedule
    at = (
        timedelta(
            hours=partitions.hour_offset if kind is not ScheduleType.HOURLY else 0, minutes=partitions.minute_offset
        )
        + offset
    )
    days, minutes = divmod(to_span(at) // 60_000, 24 * 60)
    minute, hour = minutes % 60, minutes // 60
    if kind is ScheduleType.HOURLY:
        return partitions.get_cron_schedule(minute_of_hour=minute)
    if kind is ScheduleType.DAILY:
        return partitions.get_cron_schedule(minute_of_hour=minute, hour_of_day=hour)
    if kind is ScheduleType.WEEKLY:
        return partitions.get_cron_schedule(
            minute_of_hour=minute, hour_of_day=hour, day_of_week=(partitions.day_offset + days) % 7
        )
    if partitions.day_offset + days > 28:
        raise ConfigurationError(
            f"{pipeline}: an offset of {words(offset)} ends on day {partitions.day_offset + days} of the month, which"
            f" not every month has; use at most {28 - partitions.day_offset} days"
        )
    return partitions.get_cron_schedule(
        minute_of_hour=minute, hour_of_day=hour, day_of_month=partitions.day_offset + days
    )


def _by_window(
    partitions: MultiPartitionsDefinition, keys: Sequence[str], now: datetime, catch_up: int
) -> tuple[list[str], list[str]]:
    """Return the keys of the newest window of the dimension in time, and of the windows before it."""
    dimension = next(
        (d for d in partitions.partitions_defs if isinstance(d.partitions_def, TimeWindowPartitionsDefinition)), None
    )
    if dimension is None:
        return list(keys), []
    windows = dimension.partitions_def.get_partition_keys(current_time=now)[-1 - catch_up :]
    by_window: dict[str, list[str]] = {w: [] for w in windows}
    for key in keys:
        several = partitions.get_partition_key_from_str(key)
        assert isinstance(several, MultiPartitionKey)
        by_window.get(several.keys_by_dimension[dimension.name], []).append(key)
    return (by_window[windows[-1]] if windows else []), [key for w in windows[:-1] for key in by_window[w]]
