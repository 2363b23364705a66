"""Dagster's partitions as slices of a pipeline's input.

Time zones and days of 23 or 25 hours are those of the partitions definition.
"""

from __future__ import annotations

from collections.abc import Iterator
from datetime import datetime, timedelta

import pendulum
from dagster import (
    AssetDep,
    AssetKey,
    DynamicPartitionsDefinition,
    MultiPartitionKey,
    MultiPartitionsDefinition,
    PartitionsDefinition,
    TimeWindowPartitionMapping,
    TimeWindowPartitionsDefinition,
)

from dagster_unified.connectors.protocol.source import SparkSource
from dagster_unified.errors import ConfigurationError, PipelineError
from dagster_unified.graph.connectors import Dimensions, Slice, TimeRange
from dagster_unified.graph.nodes import Graph
from dagster_unified.operators.time import checked_span


def in_zone(
    pipeline: str, partitions: PartitionsDefinition[str] | None, timezone: str | None
) -> PartitionsDefinition[str] | None:
    """Return the partitions, with time windows in the zone of `timezone`.

    Raises `PipelineError` where they name another zone themselves.
    """
    if timezone is None:
        return partitions
    try:
        pendulum.timezone(timezone)
    except ValueError:
        raise PipelineError(
            f"{pipeline}: timezone={timezone!r} is not the name of a time zone, such as Europe/Vienna"
        ) from None
    if isinstance(partitions, TimeWindowPartitionsDefinition):
        return _moved(pipeline, partitions, timezone)
    if isinstance(partitions, MultiPartitionsDefinition) and any(
        isinstance(d.partitions_def, TimeWindowPartitionsDefinition) for d in partitions.partitions_defs
    ):
        dimensions = {d.name: d.partitions_def for d in partitions.partitions_defs}
        return MultiPartitionsDefinition(
            {
                name: _moved(pipeline, definition, timezone)
                if isinstance(definition, TimeWindowPartitionsDefinition)
                else definition
                for name, definition in dimensions.items()
            }
        )
    raise PipelineError(
        f"{pipeline}: timezone={timezone!r} goes with partitions in time, such as"
        " partitions=DailyPartitionsDefinition(...)"
    )


def _moved(pipeline: str, partitions: TimeWindowPartitionsDefinition, timezone: str) -> TimeWindowPartitionsDefinition:
    """Move partitions in UTC to another zone: the same hours and days there."""
    if partitions.timezone == timezone:
        return partitions
    if partitions.timezone != "UTC":
        raise PipelineError(
            f"{pipeline}: timezone={timezone!r}, and the partitions are in {partitions.timezone}; say it in one place"
        )
    return TimeWindowPartitionsDefinition(
        start=partitions.start,
        fmt=partitions.fmt,
        end=partitions.end,
        timezone=timezone,
        end_offset=partitions.end_offset,
        cron_schedule=partitions.cron_schedule,
        exclusions=[
            e if isinstance(e, str) else pendulum.from_timestamp(e.timestamp) for e in partitions.exclusions or ()
        ],
    )


def dimensions_of(partitions: PartitionsDefinition[str]) -> Dimensions:
    """Return the dimensions of partitions, which are known while the code location loads."""
    by_name = {"": partitions}
    if isinstance(partitions, MultiPartitionsDefinition):
        by_name = {dimension.name: dimension.partitions_def for dimension in partitions.partitions_defs}
    in_time = (name for name, definition in by_name.items() if isinstance(definition, TimeWindowPartitionsDefinition))
    return Dimensions(tuple(by_name), frozenset(in_time))


def check_apart(graph: Graph, partitions: PartitionsDefinition[str], slice_: Slice | None) -> None:
    """Raise `PipelineError` where a source reads the same for two partitions in time that follow each other.

    Without a partition the first ones are looked at, as far as they are known while the code location loads.
    """
    partition = slice_ or _first(partitions)
    if partition is None:
        return
    neighbours = list(_next_to(partitions, partition))
    for node in graph.sources:
        for other in neighbours:
            if isinstance(node.source, SparkSource) and not node.source.distinguishes(partition, other):
                first, second = sorted([partition.key, other.key])
                raise PipelineError(
                    f"{graph.name}: source '{node.name}' reads the same for the partitions {first} and {second}:"
                    f" {node.source.describe()}; put what tells them apart into the path, such as {{key}} or"
                    " {start:%Y-%m-%dT%H%z}, or name the field that says it, with .partitioned_by(field); what is no"
                    " series in time has a path without a template, and .for_every_partition()"
                )


def _first(partitions: PartitionsDefinition[str]) -> Slice | None:
    if not isinstance(partitions, MultiPartitionsDefinition):
        key = _first_key(partitions)
    else:
        keys = {d.name: _first_key(d.partitions_def) for d in partitions.partitions_defs}
        known = {name: key for name, key in keys.items() if key is not None}
        key = MultiPartitionKey(known) if len(known) == len(keys) else None
    return None if key is None else slice_of(partitions, key)


def _first_key(partitions: PartitionsDefinition[str]) -> str | None:
    return None if isinstance(partitions, DynamicPartitionsDefinition) else partitions.get_first_partition_key()


def _next_to(partitions: PartitionsDefinition[str], slice_: Slice) -> Iterator[Slice]:
    """Return the partitions in time before and after one."""
    if not isinstance(partitions, MultiPartitionsDefinition):
        yield from (slice_of(partitions, key) for key in _keys_next_to(partitions, slice_.key))
    else:
        keys = partitions.get_partition_key_from_str(slice_.key)
        assert isinstance(keys, MultiPartitionKey)
        for dimension in partitions.partitions_defs:
            for key in _keys_next_to(dimension.partitions_def, keys.keys_by_dimension[dimension.name]):
                yield slice_of(partitions, MultiPartitionKey({**keys.keys_by_dimension, dimension.name: key}))


def _keys_next_to(partitions: PartitionsDefinition[str], key: str) -> Iterator[str]:
    """Return the keys before and after a key, if the partitions are in time."""
    if isinstance(partitions, TimeWindowPartitionsDefinition):
        neighbours = (key_before(partitions, key), key_after(partitions, key))
        yield from (neighbour for neighbour in neighbours if neighbour is not None)


def slice_of(partitions: PartitionsDefinition[str], key: str) -> Slice:
    """Return a partition as sources know it."""
    if isinstance(partitions, MultiPartitionsDefinition):
        several = partitions.get_partition_key_from_str(key)
        assert isinstance(several, MultiPartitionKey)
        by_name = several.keys_by_dimension
        return Slice(key, {d.name: _part(d.partitions_def, by_name[d.name]) for d in partitions.partitions_defs})
    return Slice(key, {"": _part(partitions, key)})


def _part(partitions: PartitionsDefinition[str], key: str) -> TimeRange | str:
    return window_of(partitions, key) if isinstance(partitions, TimeWindowPartitionsDefinition) else key


def window_of(partitions: TimeWindowPartitionsDefinition, key: str) -> TimeRange:
    """Return the window that Dagster gives a partition, as moments of its time zone.

    Dagster writes a window on the clock of the zone, also where the clock skips that hour or day. Of such a time only
    the moment is certain. A day that the zone skips has no moment: Dagster gives it the window of the next day, whose
    records are not its own.
    """
    window = partitions.time_window_for_partition_key(key)
    start, end = (
        pendulum.from_timestamp(bound.timestamp(), partitions.timezone) for bound in (window.start, window.end)
    )
    return TimeRange(start, start if _is_skipped(partitions, key, start) else end)


def _is_skipped(partitions: TimeWindowPartitionsDefinition, key: str, start: pendulum.DateTime) -> bool:
    """Return whether a partition's day is one that the time zone has not had, as 2011-12-30 in Samoa."""
    if partitions.get_partition_key_for_timestamp(start.timestamp()) == key:
        return False
    try:
        return datetime.strptime(key, partitions.fmt) < start.naive()
    except (ValueError, TypeError):  # the key says its offset: the time is there, maybe twice
        return False


def key_before(partitions: TimeWindowPartitionsDefinition, key: str) -> str | None:
    """Return the partition before this one, or None for the first."""
    first, start = partitions.get_first_partition_window(), window_of(partitions, key).start.timestamp()
    if first is None or start <= first.start.timestamp():
        return None
    return partitions.get_partition_key_for_timestamp(start, end_closed=True)


def key_after(partitions: TimeWindowPartitionsDefinition, key: str) -> str | None:
    """Return the partition after this one, or None for the last of a definition that ends."""
    following = partitions.get_next_partition_window(window_of(partitions, key).end, respect_bounds=False)
    if following is None or (partitions.end is not None and following.end.timestamp() > partitions.end.timestamp()):
        return None
    return partitions.get_partition_key_for_timestamp(following.start.timestamp())


def partition_before(key: AssetKey) -> AssetDep:
    """Return an asset's dependency on its own partition before."""
    return AssetDep(key, partition_mapping=TimeWindowPartitionMapping(start_offset=-1, end_offset=-1))


def checked_carrying(pipeline: str, partitions: PartitionsDefinition[str] | None) -> None:
    """Raise where state is to be carried over partitions that have no order in time."""
    if not isinstance(partitions, TimeWindowPartitionsDefinition):
        kind = "no partitions" if partitions is None else f"a {type(partitions).__name__}"
        raise PipelineError(
            f"{pipeline}: carry_state hands state on from one partition in time to the next, and there is {kind}; give"
            " partitions=DailyPartitionsDefinition(...), or another in time"
        )


def now() -> pendulum.DateTime:
    """Return the moment that it is, in UTC."""
    return pendulum.now("UTC")


def utc(timestamp: float) -> pendulum.DateTime:
    """Return a moment, from seconds since the epoch."""
    return pendulum.from_timestamp(timestamp)


def as_text(millis: int) -> str:
    """Return a moment as people read it, from milliseconds since the epoch; as its number where no calendar has it."""
    try:
        return utc(millis / 1000).replace(microsecond=0).isoformat(sep=" ")
    except (OverflowError, ValueError, OSError):
        return str(millis)


def check_lengths(where: str, at_least: timedelta | None = None, /, **lengths: timedelta | None) -> None:
    """Raise `ConfigurationError` where one of these is no length of time, or is too short; None says nothing."""
    for name, value in lengths.items():
        if value is None:
            continue
        try:
            checked_span(f"{where}: {name}", value)
        except PipelineError as error:
            raise ConfigurationError(str(error)) from None
        if at_least is not None and value < at_least:
            raise ConfigurationError(f"{where}: {name} is at least {words(at_least)}, and {value} was given")


def earlier_on_the_clock(moment: datetime, by: timedelta) -> pendulum.DateTime:
    """Return the moment at which the clocks of its zone showed so much less.

    Six hours before six in the morning is midnight, on every day.
    """
    zoned = pendulum.instance(moment)
    return (zoned.timezone or pendulum.UTC).convert(zoned.naive() - by)


def words(length: timedelta) -> str:
    """Return a length as people say it: 2 hours 30 minutes."""
    seconds = round(length.total_seconds())
    return pendulum.duration(seconds=seconds).in_words() if seconds else "less than a second"
