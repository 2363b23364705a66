"""The partitions by which a stream is materialized: windows of its records' event time."""

from __future__ import annotations

from bisect import bisect_right
from dataclasses import replace

from dagster import TimeWindowPartitionsDefinition

from dagster_unified.engine.streaming.reports import ByPartition, Window
from dagster_unified.errors import ConfigurationError
from dagster_unified.graph.plan import Plan, plan
from dagster_unified.graph.queries import NativeQueryPlan, plan_queries
from dagster_unified.graph.topology import Lanes
from dagster_unified.operators.time import MAX_TIMESTAMP, to_millis
from dagster_unified.orchestration.deployments import BatchDeployment, StreamingDeployment, configuration_of
from dagster_unified.orchestration.partitions import window_of

MINUTE, QUARTER = 60_000, 15 * 60_000


def partitions_of_stream(
    streaming: StreamingDeployment, batch: BatchDeployment | None
) -> TimeWindowPartitionsDefinition | None:
    """Return the partitions by which a stream is materialized: its own, or those of its pipeline in BATCH.

    Raises `ConfigurationError` where the two differ, and where the stream's own cannot be told from its records.
    """
    name, own = streaming.pipeline.name, streaming.partitions
    in_batch = None if batch is None else batch.partitions
    if own is None and not isinstance(in_batch, TimeWindowPartitionsDefinition):
        return None
    lacking = _lacking(plan(streaming.pipeline.graph(), configuration_of(streaming)))
    if own is None:
        assert isinstance(in_batch, TimeWindowPartitionsDefinition)
        return None if lacking else in_batch
    if batch is not None and own != in_batch:
        raise ConfigurationError(
            f"{name}: its StreamingDeployment has the partitions {own!r}, and its BatchDeployment"
            f" {'none' if in_batch is None else repr(in_batch)}; a table has one kind of partitions, so give them to"
            " the BatchDeployment only, whose partitions the stream takes"
        )
    if lacking:
        raise ConfigurationError(f"{name}: the stream has partitions, and {lacking}")
    assert isinstance(own, TimeWindowPartitionsDefinition)
    return own


def _lacking(planned: Plan) -> str:
    """Return what a stream lacks to be materialized by partitions, and what to do, in words; '' where it can be."""
    graph = planned.graph
    for sink in graph.sinks:
        before = planned.assigners_before(sink.id)
        if not before:
            return (
                f"its sink '{sink.name}' gets records without event time; assign timestamps, such as with"
                " WatermarkStrategy.for_bounded_out_of_orderness(...).with_timestamp_assigner('at') at the source, or"
                " leave partitions out"
            )
        for node in graph.assigners:
            if node.uid in before and node.max_out_of_orderness_ms is None and node.generator is None:
                return (
                    f"'{node.name}' emits no watermarks, which say when a partition is complete; give its strategy a"
                    " bound, such as WatermarkStrategy.for_bounded_out_of_orderness(...), or leave partitions out"
                )
    if any(isinstance(query, NativeQueryPlan) for query in plan_queries(planned, Lanes())):
        return (
            "state.native-aggregates=SPARK leaves its event time to Spark, which does not count records by it; remove"
            " that option, or leave partitions out"
        )
    return ""


class EventTimeWindows:
    """Partitions in time, by units of event time that none of their bounds divides. For one thread at a time."""

    def __init__(self, definition: TimeWindowPartitionsDefinition) -> None:
        self._definition, self._unit = definition, unit_of(definition)
        self._first = definition.start.timestamp() * 1000
        self._end = definition.end.timestamp() * 1000 if definition.end else MAX_TIMESTAMP
        self._known: list[Window] = []
        """By their starts: Dagster takes a while to find one, and a day has many units."""

        self._outside: set[int] = set()
        """Units between the definition's first and last partition that belong to none."""

    def of(self, number: int) -> Window | None:
        moment = number * self._unit
        if not self._first <= moment < self._end or number in self._outside:
            return None
        place = bisect_right(self._known, moment, key=lambda window: window.start)
        if place and moment < self._known[place - 1].end:
            return self._known[place - 1]
        window = self._found(moment)
        if window is None:
            self._outside.add(number)
        else:
            self._known.insert(place, window)
        return window

    def _found(self, moment: int) -> Window | None:
        try:
            key = self._definition.get_partition_key_for_timestamp(moment / 1000)
            window = window_of(self._definition, key)
        except (OverflowError, ValueError, OSError):  # no calendar has that moment
            return None
        start, end = to_millis(window.start), to_millis(window.end)
        return Window(key, start, end) if start <= moment < end <= self._end else None

    def exists(self, key: str) -> bool:
        return self._definition.has_partition_key(key)


def unit_of(definition: TimeWindowPartitionsDefinition) -> int:
    """Return the milliseconds of a unit: a quarter of an hour, in which time zones differ, or a minute."""
    minute = definition.cron_schedule.split()[0]
    return QUARTER if minute.isdigit() and int(minute) % 15 == 0 else MINUTE


def by_partition(planned: Plan, partitions: TimeWindowPartitionsDefinition | None) -> ByPartition | None:
    """Return how the records of a job belong to partitions, if it has some."""
    if partitions is None:
        return None
    sinks: dict[str, list[str]] = {}
    for sink in planned.graph.sinks:
        for uid in planned.assigners_before(sink.id):
            sinks.setdefault(uid, []).append(sink.name)
    return ByPartition(EventTimeWindows(partitions), sinks)


def counting(planned: Plan, partitions: TimeWindowPartitionsDefinition | None) -> Plan:
    """Return the plan whose jobs count records by event time, where the stream has partitions."""
    if partitions is None:
        return planned
    streaming = replace(planned.execution.streaming, event_time_unit=unit_of(partitions))
    return replace(planned, execution=replace(planned.execution, streaming=streaming))
