"""A run of a pipeline's stages: where it runs, as whom, and which state goes on from one partition to the next."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

import msgspec

from dagster_unified.connectors.protocol.positions import ALL
from dagster_unified.connectors.protocol.source import SparkSource
from dagster_unified.engine.batch import intermediates
from dagster_unified.engine.batch.intermediates import Address, IntermediateStore, Manifest
from dagster_unified.engine.dataframe.frames import Frames, key_columns
from dagster_unified.engine.dataframe.native import CarriedAggregate, Natives, Span
from dagster_unified.engine.events import Observer, RecordsWait, ignore_events
from dagster_unified.engine.job_time import JobTime
from dagster_unified.engine.state_tables.savepoints import StartingState
from dagster_unified.errors import CarriedStateError, StateError
from dagster_unified.graph import nodes as g
from dagster_unified.graph.code import field_of
from dagster_unified.graph.connectors import WHOLE, TimeRange
from dagster_unified.graph.event_time import straight_from_source
from dagster_unified.graph.nodes import Port
from dagster_unified.graph.plan import Plan, Region
from dagster_unified.operators.drivers.batch import GROUP, PAGE, STATE
from dagster_unified.operators.drivers.key_groups import ControlEvent, records_waiting, timers_waiting
from dagster_unified.operators.drivers.stages import Report
from dagster_unified.operators.layout import CARRIED, TIMESTAMP, StreamLayout
from dagster_unified.operators.metrics import Metrics, merge
from dagster_unified.operators.operator import BROADCAST
from dagster_unified.operators.program.step import CarryOver
from dagster_unified.operators.time import MAX_TIMESTAMP, MIN_TIMESTAMP, to_millis, wall_clock

if TYPE_CHECKING:
    from pyspark.sql import Column, DataFrame, SparkSession

Lookup = Callable[[Region], Manifest | None]
"""Finds the manifest of a region's intermediate, if its data still stands."""


@dataclass(frozen=True)
class Carrying:
    """Where the state before a partition comes from: nowhere for the first partition.

    `last` says that the input ends with this partition.
    """

    before: Lookup | None
    key_before: str
    last: bool = False
    start: StartingState | None = None
    """The savepoint that the first partition starts from."""

    only_saved: bool = False
    """Whether the state begins empty and goes to a savepoint and nowhere else."""

    def manifest(self, plan: Plan, region: Region) -> Manifest | None:
        """Return the manifest of the partition before, which a stage without state can do without.

        Raises `CarriedStateError` where there is none for a stage with state, and for one that ended.
        """
        if self.before is None:
            return None
        manifest = self.before(region)
        if manifest is None and not region.carried:
            return None
        if manifest is None:
            raise CarriedStateError(
                f"{plan.name}: stage '{region.name}' goes on from the state of partition {self.key_before}, which is"
                " not there: it has not been run, or its state was freed; run a backfill that begins with"
                f" {self.key_before}, or with an earlier partition"
            )
        if manifest.ended:
            raise CarriedStateError(
                f"{plan.name}: stage '{region.name}' goes on from the state of partition {self.key_before}, with which"
                " the input ended when it ran, so that its windows have closed and its timers have fired; run a"
                f" backfill that begins with {self.key_before}"
            )
        return manifest


@dataclass(frozen=True)
class Run:
    """The identity and the place of a run of stages.

    A run, its retries and its re-executions share one `execution`, in which `number` grows from run to run.
    """

    plan: Plan
    spark: SparkSession
    store: IntermediateStore
    run_id: str
    execution: str
    partition: str = WHOLE
    number: int = 0
    partition_end: int | None = None
    """Where a partition in time ends: milliseconds since the epoch."""

    observe: Observer = ignore_events
    carry: Carrying | None = None
    check: Callable[[], None] = lambda: None
    """Raises where the run is to stop; called before anything is written or committed."""

    def address(self, region: Region) -> Address:
        """Return the address of a region's intermediate in this run."""
        return Address(self.plan.name, region.name, self.run_id, self.partition)

    def calling_functions(self) -> Run:
        """Return the same run, in which the function of each operator is called for each record."""
        return replace(self, plan=replace(self.plan, execution=replace(self.plan.execution, lowers=False)))


def only_saved(runs: Sequence[Run]) -> bool:
    """Return whether the state that a job's operators leave goes only to a savepoint, and they start without state."""
    return len(runs) == 1 and runs[0].carry is not None and runs[0].carry.only_saved


StateBefore = Callable[[Port], "DataFrame | None"]
"""Gives the state that the partition before left of an operator, or None where there is none."""


@dataclass(frozen=True)
class PartitionStart:
    """Where one partition's run of a region starts.

    That is the plan, the last event time of each input and, with carried state, the control events before and after it.
    """

    plan: Plan
    upstream: Metrics = field(default_factory=Metrics)
    """From the manifests of the inputs."""

    begin: ControlEvent = field(default_factory=ControlEvent)
    end: ControlEvent = field(default_factory=ControlEvent)

    def over(self, node: g.Node) -> CarryOver:
        """Return how one operator begins and ends."""
        return CarryOver(self.watermark(node), msgspec.json.encode(self.end))

    def watermark(self, node: g.Node) -> int:
        """Return an operator's watermark before the partition."""
        return self.begin.watermarks.get(node.uid, MIN_TIMESTAMP)

    def last_watermark(self, node: g.Node) -> int:
        """Return an operator's watermark after the partition."""
        return MAX_TIMESTAMP if self.end.end else self.end.watermarks.get(node.uid, MIN_TIMESTAMP)


def seen_before(run: Run, before: Manifest | None) -> Metrics:
    """Return the event times that the partition before, or the savepoint that the run starts from, has seen."""
    if before is not None:
        return Metrics(last_event_times=before.last_event_times)
    start = run.carry.start if run.carry is not None else None
    return Metrics(last_event_times=dict(start.manifest.event.assigned)) if start is not None else Metrics()


def partition_starts(
    runs: Sequence[Run], region: Region, inputs: Sequence[Mapping[int, Manifest]], seen: Metrics
) -> list[PartitionStart]:
    """Return where the partitions start; with carried state, each goes on from what all before it have seen."""
    starts = []
    for run, manifests in zip(runs, inputs, strict=True):
        upstream = merge(Metrics(last_event_times=manifests[i].last_event_times) for i in region.inputs)
        if run.carry is None:
            starts.append(PartitionStart(run.plan, upstream))
            continue
        begin, seen = time_before(run.plan, seen), merge([seen, upstream])
        starts.append(PartitionStart(run.plan, seen, begin, time_after(run.plan, upstream, run.carry.last)))
    return starts


def time_before(plan: Plan, seen: Metrics) -> ControlEvent:
    """Return the control event before a partition, after all records of those before it."""
    return _at_end(plan, seen, wall_clock(), {uid: first - 1 for uid, (first, _) in _partition_of(plan).items()})[1]


def time_after(plan: Plan, seen: Metrics, last: bool = False) -> ControlEvent:
    """Return the control event after all records so far: watermarks or, after the last partition, the end of input."""
    now = wall_clock()
    time, event = _at_end(plan, seen, now, _reached(plan))
    return time.end(now) if last else event


def _reached(plan: Plan) -> dict[str, int]:
    """Return the watermarks, at the end of a partition, of the assigners whose event time tells the partition."""
    return {uid: end - 1 for uid, (_, end) in _partition_of(plan).items()}


def _partition_of(plan: Plan) -> dict[str, tuple[int, int]]:
    """Return where the partition begins and ends, for each assigner whose event time tells its source's partition.

    No record of such a source in a later partition is from before that end.
    """
    bounds = {}
    for node in plan.graph.assigners:
        before = straight_from_source(plan.graph, node)
        source = before[-1].source if before and isinstance(before[-1], g.SourceNode) else None
        if not isinstance(source, SparkSource) or source.slice is None or not all(n.keeps_records for n in before[:-1]):
            continue
        fields = (node.assigner,) if isinstance(node.assigner, str) else field_of(node.assigner)
        for dimension, moments in source.slice.dimensions.items():
            field = source.partition_columns.get(dimension)
            if isinstance(moments, TimeRange) and field is not None and fields == (field,):
                bounds[node.uid] = to_millis(moments.start), to_millis(moments.end)
    return bounds


def _at_end(plan: Plan, seen: Metrics, now: int, reached: Mapping[str, int]) -> tuple[JobTime, ControlEvent]:
    """Return the time at which all sources were read to the end of a partition that another one follows."""
    time = JobTime(plan, None, now, native_windows=True, goes_on=True, reached=reached)
    time.ended({node.uid: {ALL} for node in plan.graph.sources})
    return time, time.after(Report(seen), now) or ControlEvent(now=now)


def waiting(plan: Plan, region: Region, manifest: Manifest) -> list[RecordsWait]:
    """Return the records and timers that wait at the end of a run because a source holds the watermark back.

    The run is of a partition that others follow, or leaves a savepoint.
    """
    now = wall_clock()
    time, event = _at_end(plan, Metrics(last_event_times=manifest.last_event_times), now, _reached(plan))
    waits = []
    for node in (plan.graph.node(port.node) for port in region.carried):
        records = manifest.counters.get(records_waiting(node.uid), 0)
        timers = manifest.counters.get(timers_waiting(node.uid), 0)
        holding = time.holding_back(node.uid, now) if records or timers else ()
        assigners = [n.id for n in plan.graph.assigners if n.uid in holding]
        sources = tuple(n.name for n in plan.graph.sources if n.id in plan.graph.upstream(*assigners))
        if sources:
            watermark = event.watermarks.get(node.uid, MIN_TIMESTAMP)
            waits.append(RecordsWait(region.name, node.name, records, timers, sources, watermark))
    return waits


def state_before(run: Run, manifest: Manifest | None, port: Port) -> DataFrame | None:
    """The state of an operator in the manifest of the partition before; raises `StateError` where it does not fit."""
    node = run.plan.graph.node(port.node)
    groups = run.plan.execution.streaming.max_parallelism
    if manifest is None:
        return _in_savepoint(run, node, groups)
    if not manifest.groups:
        raise StateError(
            f"{run.plan.name}: the partition before has left its state in a savepoint only, as carry_state was off; run"
            " a backfill from the first partition"
        )
    if manifest.groups != groups:
        raise StateError(
            f"{run.plan.name}: the state of the partition before is in {manifest.groups} key groups, and"
            f" pipeline.max-parallelism is {groups}; set it as it was, or run a backfill from the first partition"
        )
    subtasks = run.plan.subtasks_with_state(node)
    if subtasks is not None and manifest.subtasks.get(node.uid, subtasks) != subtasks:
        raise StateError(
            f"{run.plan.name}: operator '{node.name}' has {subtasks} subtasks, and its state of the partition before is"
            f" of {manifest.subtasks[node.uid]}; set the parallelism that it had, start from a savepoint, which splits"
            " the state anew, or run a backfill from the first partition"
        )
    _check_form(run, node, manifest)
    if all((s.uid, s.tag) != (node.uid, port.tag) for s in manifest.streams):
        raise StateError(
            f"{run.plan.name}: the partition before has no state of operator '{node.name}' (uid '{node.uid}'); give it"
            " the uid that it had, or run a backfill from the first partition"
        )
    return intermediates.read(run.spark, run.store, [manifest], node.uid, port.tag, run.plan.layout(port))


def _check_form(run: Run, node: g.Node, manifest: Manifest) -> None:
    """Raise `StateError` where the aggregate's state from the partition before has another form than this run's."""
    local_global = node.uid in manifest.local_global
    if (node.merges_partials and not local_global) or (node.aggregates_natively and local_global):
        forms = ("Catalyst's form", "the local-global form")
        raise StateError(
            f"{run.plan.name}: the partition before has left the state of the aggregates of '{node.name}' in"
            f" {forms[local_global]}, and this run takes {forms[not local_global]}, as its options of savepoints and"
            " state.native-aggregates say; launch it with the options of the partition before, or run a backfill from"
            " the first partition with state.native-aggregates=PORTABLE, which all may share"
        )


def _in_savepoint(run: Run, node: g.Node, groups: int) -> DataFrame | None:
    """Return an operator's state from the savepoint that a run starts from, if there is one."""
    start = run.carry.start if run.carry is not None else None
    if start is None:
        return None
    if node.holds_subtask_state:
        return start.pages(node.uid, groups)
    computed = node.key is not None and node.key.computed is not None
    keys = ["key"] if computed else _key_columns(node, run.plan)
    return start.pages(node.uid, groups, lambda: _group(keys, groups))


def _key_columns(node: g.Node, plan: Plan) -> list[str]:
    """Return the columns of an operator's key; none where it has only broadcast state."""
    return [] if node.key == g.Key() else key_columns(plan.graph.main_inputs(node.id)[0])


def _group(keys: Sequence[str], groups: int) -> Column:
    """Return the group of a record by its key; without a key any group will do."""
    from pyspark.sql import functions as F

    return F.pmod(F.hash(*keys) if keys else F.monotonically_increasing_id(), F.lit(groups)).cast("int")


def exports_rows(node: g.Node) -> bool:
    """Return whether an operator may leave rows of its table instead of pages: all its state is of single keys."""
    single = node.key != g.Key() and not node.has_broadcast_input and not node.holds_subtask_state
    return node.runs_by_key and single


class CarriedState:
    """The keyed operators of a region that start from the state of the partition before."""

    def __init__(
        self,
        frames: Frames,
        natives: Natives,
        starts: Sequence[PartitionStart],
        before: StateBefore,
    ) -> None:
        self._frames, self._natives, self._starts, self._before = frames, natives, starts, before
        self._aggregates: dict[int, CarriedAggregate] = {}

    def records(self, node: g.Node, layout: StreamLayout) -> DataFrame:
        """Return a keyed node's records by key group, each group after its state."""
        from pyspark.sql import functions as F

        plan, axis, state = self._frames.plan, self._frames.axis, self._before(Port(node.id, CARRIED))
        groups = plan.execution.streaming.max_parallelism
        keys = [] if node.holds_subtask_state else _key_columns(node, plan)
        if keys:
            rows, group = self._frames.united(plan.graph.main_inputs(node.id), layout), _group(keys, groups)
        else:
            rows, group = self._in_subtasks(node, layout, plan.subtasks_with_state(node) or groups)
        records = rows.select(*layout.schema.names, group.alias(GROUP), *axis.columns)
        if state is None:
            frame = records.withColumns({PAGE: F.lit(None).cast("bigint"), STATE: F.lit(None).cast("binary")})
        else:
            columns = (F.col("group").cast("int").alias(GROUP), F.col("page").alias(PAGE), F.col("state").alias(STATE))
            first = state.select(*columns, *(F.lit(0).alias(name) for name in axis.columns))
            frame = records.unionByName(first, allowMissingColumns=True)
        if node.has_broadcast_input:
            # The broadcast records are taken into every group, also into one without records and state.
            spark = self._natives.spark
            every = spark.range(groups).select(
                F.col("id").cast("int").alias(GROUP),
                F.lit(BROADCAST).cast("bigint").alias(PAGE),
                *(F.lit(0).alias(name) for name in axis.columns),
            )
            frame = frame.unionByName(every, allowMissingColumns=True)
        count = self._frames.parallelism(node)
        if axis.enabled and not count:
            # Adaptive execution goes by bytes, and every partition has its state to write, however few its records are.
            count = int(self._natives.spark.conf.get("spark.sql.shuffle.partitions") or 1)
        spread = frame.repartition(count, GROUP) if count else frame.repartition(GROUP)
        time = [TIMESTAMP] if layout.timestamped else []
        return spread.sortWithinPartitions(GROUP, *axis.columns, F.col(PAGE).asc_nulls_last(), *keys, *time)

    def _in_subtasks(self, node: g.Node, layout: StreamLayout, subtasks: int) -> tuple[DataFrame, Column]:
        """Return a node's records with the subtask of each: the one that an exchange chose, or any."""
        from pyspark.sql import functions as F

        plan = self._frames.plan
        if node.id in plan.subtasks:
            return self._frames.input_of(node.id), F.pmod(F.spark_partition_id(), F.lit(subtasks))
        return self._frames.united(plan.graph.main_inputs(node.id), layout), _group([], subtasks)

    def aggregate(self, node: g.Node, port: Port) -> DataFrame:
        """Return a partition's aggregates, of its keys or of the windows that it closes; or the state after it."""
        merged = self._aggregates.get(node.id)
        if merged is None:
            aggregate = self._merged(node)
            merged = self._aggregates[node.id] = replace(aggregate, frame=self._frames.persist(aggregate.frame))
        if port.tag == CARRIED:
            return merged.state()
        return self._natives.finished(node, merged)

    def _merged(self, node: g.Node) -> CarriedAggregate:
        frame, before = self._frames.input_of(node.id), self._before(Port(node.id, CARRIED))
        time = Span(self._starts[0].watermark(node), [start.last_watermark(node) for start in self._starts])
        return self._natives.carried(node, frame, before, time, self._frames.axis)
