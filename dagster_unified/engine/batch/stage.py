"""Runs one stage: its region's Spark job, its output into the intermediate store, its sinks.

A stage with a single sink writes it directly. A stage with several streams leaving it materializes them once, and its
sinks are written from that, so that nothing is computed twice and a retry of a sink computes nothing again.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import TYPE_CHECKING, Any, cast

import msgspec

from dagster_unified.connectors.base import SparkSource, WriteContext, WriteResult, spark_schema
from dagster_unified.connectors.paths import remove_tree
from dagster_unified.engine import malformed
from dagster_unified.engine.batch.intermediates import dataframes
from dagster_unified.engine.batch.intermediates.store import Address, IntermediateStore, Manifest, StoredStream, now
from dagster_unified.engine.dataframe.regions import Part, RegionFrames, observed
from dagster_unified.engine.events import Observer, StageFinished, StageStarted, nobody
from dagster_unified.engine.failures import translated
from dagster_unified.engine.job_time import JobTime
from dagster_unified.engine.shipping import by_value_afresh
from dagster_unified.engine.translate import input_layout
from dagster_unified.engine.writing import write, write_parts
from dagster_unified.errors import (
    CarriedStateError,
    IntermediateLostError,
    PipelineError,
    StateError,
    UnifiedError,
    UnsupportedError,
)
from dagster_unified.graph.failover import regions_to_recompute
from dagster_unified.graph.nodes import (
    ExchangeKind,
    SinkNode,
)
from dagster_unified.graph.plan import Plan, Port, Region
from dagster_unified.graph.slices import WHOLE
from dagster_unified.operators.drivers.key_groups import ControlEvent
from dagster_unified.operators.drivers.report import Report
from dagster_unified.operators.layout import (
    CARRIED,
    EMITTED,
    OUTPUT,
    PART,
    StreamLayout,
    combined_schema,
    output_column,
)
from dagster_unified.operators.metrics import Metrics, merge
from dagster_unified.operators.time import wall_clock

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, Observation, SparkSession
    from upath import UPath


@dataclass(frozen=True)
class Run:
    """Where and as whom stages run. `execution` is shared by a run, its retries and its re-executions."""

    plan: Plan
    spark: SparkSession
    store: IntermediateStore
    run_id: str
    execution: str
    partition: str = WHOLE
    observe: Observer = nobody
    carry: Carrying | None = None
    check: Callable[[], None] = lambda: None
    """Raises where the run is to stop; called before anything is written or committed."""

    def address(self, region: Region) -> Address:
        """Where this run puts a region's intermediate."""
        return Address(self.plan.name, region.name, self.run_id, self.partition)


Lookup = Callable[[Region], Manifest | None]
"""Finds a region's intermediate, as far as it still stands."""


@dataclass(frozen=True)
class Carrying:
    """Where the state that a partition begins with comes from, or None where it is the first; and whether the input
    ends with it.
    """

    before: Lookup | None
    key_before: str
    last: bool = False

    def manifest(self, plan: Plan, region: Region) -> Manifest | None:
        """What the partition before left; raises `CarriedStateError` where that is not there."""
        if self.before is None:
            return None
        found = self.before(region)
        if found is None:
            raise CarriedStateError(
                f"{plan.name}: stage '{region.name}' goes on from the state of partition {self.key_before}, which is"
                " not there: it has not been run, or its state was freed; run a backfill that begins with"
                f" {self.key_before}, or with an earlier partition"
            )
        return found


def run_stage(run: Run, region: Region, find: Lookup) -> Manifest:
    """Runs a stage; where an intermediate that it needs is gone or damaged, first recomputes from the nearest ancestors
    that stand.
    """
    return run_range([run], region.name, [find])[0]


def run_range(runs: Sequence[Run], stage: str, finds: Sequence[Lookup]) -> list[Manifest]:
    """Runs a stage for several partitions in one Spark job; gives each one's manifest, as if each had been run by
    itself, in their order.

    With carried state they are consecutive. After a failure that trying again cannot mend they are run one by one:
    those before it are finished, and the error is of one partition.
    """
    region, begun = runs[0].plan.region(stage), now()
    try:
        return _run_together(runs, region.id, _inputs(runs, region, finds))
    except UnifiedError as error:
        if error.retryable or len(runs) == 1:
            raise
    return [
        _made_since(begun, run, region) or run_range([run], stage, [find])[0]
        for run, find in zip(runs, finds, strict=True)
    ]


def _made_since(begun: float, run: Run, region: Region) -> Manifest | None:
    """What was committed of a range before it failed: its sinks are not to be written again."""
    found = run.store.find(run.address(region))
    return found if found is not None and found.created >= begun else None


def run_all(run: Run) -> list[Manifest]:
    """Runs every stage in order, in one process: what a notebook or a benchmark wants."""
    done: dict[int, Manifest] = {}
    for region in run.plan.regions:
        done[region.id] = run_stage(run, region, lambda r: done.get(r.id))
    return list(done.values())


def _inputs(runs: Sequence[Run], region: Region, finds: Sequence[Lookup]) -> list[dict[int, Manifest]]:
    """The intermediates of each partition that stand; those that a stage needs and that do not are made again."""
    plan = runs[0].plan
    if plan.execution.mode != "BATCH":
        raise UnsupportedError(
            f"{plan.name}: this job runs BATCH stages, and the pipeline resolves to {plan.execution.mode}; launch with"
            " execution.runtime-mode=BATCH and bounded sources"
        )
    found = [
        {r.id: m for r in run.plan.regions if r.id != region.id and (m := find(r)) is not None}
        for run, find in zip(runs, finds, strict=True)
    ]
    lost = [regions_to_recompute(region.id, plan.inputs, list(each)) for each in found]
    reason = f"its intermediate is gone or damaged, and '{region.name}' needs it"
    for ancestor in plan.regions:
        for needed, places in groupby(range(len(runs)), key=lambda place: ancestor.id in lost[place]):
            if needed:
                some = list(places)
                for place, manifest in zip(
                    some,
                    _run_together([runs[p] for p in some], ancestor.id, [found[p] for p in some], reason),
                    strict=True,
                ):
                    found[place][ancestor.id] = manifest
    return found


def _run_together(
    runs: Sequence[Run], region_id: int, inputs: Sequence[Mapping[int, Manifest]], reason: str = ""
) -> list[Manifest]:
    """Runs a region in one Spark job or, where an operator looks at all that there is, in one for each partition."""
    plan = runs[0].plan
    if any(plan.graph.node(n).sees_all_partitions for n in plan.regions[region_id].nodes):
        return [_run_region([run], region_id, [own], reason)[0] for run, own in zip(runs, inputs, strict=True)]
    return _run_region(runs, region_id, inputs, reason)


def _run_region(
    runs: Sequence[Run], region_id: int, inputs: Sequence[Mapping[int, Manifest]], reason: str
) -> list[Manifest]:
    """Runs a region for one partition, or for several in one Spark job."""
    first, region = runs[0], runs[0].plan.regions[region_id]
    number, of = region.id + 1, len(first.plan.regions)
    for run in runs:
        run.observe(StageStarted(region.name, number, of, reason))
    first.check()
    begun = now()
    before = first.carry.manifest(first.plan, region) if first.carry is not None else None
    parts = _parts(runs, region, inputs, before)

    def stream(port: Port) -> DataFrame:
        return _read(runs, port, inputs)

    frames = RegionFrames(
        first.plan,
        region,
        first.spark,
        stream,
        parts,
        None if first.carry is None else lambda port: _before(first, before, port),
    )
    try:
        manifests = _Job(runs, region, frames, recovering=bool(reason)).execute(begun, before)
    except Exception as error:
        raise translated(error, first.plan, region.name, first.spark) from error
    finally:
        frames.release()
    for run, manifest in zip(runs, manifests, strict=True):
        run.observe(StageFinished(region.name, number, of, manifest, reason))
    return manifests


def _parts(
    runs: Sequence[Run], region: Region, inputs: Sequence[Mapping[int, Manifest]], before: Manifest | None
) -> list[Part]:
    """How the partitions begin and end in time.

    Where state is carried, each goes on from what all before it have seen.
    """
    seen = Metrics(last_event_times=before.last_event_times) if before is not None else Metrics()
    parts = []
    for run, manifests in zip(runs, inputs, strict=True):
        upstream = merge(Metrics(last_event_times=manifests[i].last_event_times) for i in region.inputs)
        if run.carry is None:
            parts.append(Part(run.plan, upstream))
            continue
        begin, seen = _time_of(run.plan, seen), merge([seen, upstream])
        parts.append(Part(run.plan, seen, begin, _time_of(run.plan, upstream, run.carry.last)))
    return parts


def _time_of(plan: Plan, seen: Metrics, last: bool = False) -> ControlEvent:
    """The control event after all that has come so far: its watermarks or, with the last partition, the end of
    input.
    """
    now = wall_clock()
    time = JobTime(plan, None, now, native_windows=True)
    event = time.after(Report(seen), now)
    return time.end(now) if last else event or ControlEvent(now=now)


def _before(run: Run, manifest: Manifest | None, port: Port) -> DataFrame | None:
    """The state that the partition before left of a node."""
    if manifest is None:
        return None
    node = run.plan.graph.node(port.node)
    groups = run.plan.execution.streaming.max_parallelism
    if manifest.groups != groups:
        raise StateError(
            f"{run.plan.name}: the state of the partition before is in {manifest.groups} key groups, and"
            f" pipeline.max-parallelism is {groups}; set it as it was, or run a backfill from the first partition"
        )
    if all((s.uid, s.tag) != (node.uid, port.tag) for s in manifest.streams):
        raise StateError(
            f"{run.plan.name}: the partition before has no state of operator '{node.name}' (uid '{node.uid}'); give it"
            " the uid that it had, or run a backfill from the first partition"
        )
    return dataframes.read(run.spark, run.store, [manifest], node.uid, port.tag, run.plan.layout(port))


def _read(runs: Sequence[Run], port: Port, inputs: Sequence[Mapping[int, Manifest]]) -> DataFrame:
    """A stream of an intermediate, in the columns of its layout."""
    plan = runs[0].plan
    region = plan.region_of(port.node)
    if any(region.id not in manifests for manifests in inputs):
        raise IntermediateLostError(
            f"{plan.name}: the intermediate of stage '{region.name}' is gone; run that stage again"
        )
    return dataframes.read(
        runs[0].spark,
        runs[0].store,
        [manifests[region.id] for manifests in inputs],
        plan.graph.node(port.node).uid,
        port.tag,
        plan.layout(port),
    )


@dataclass
class _Stream:
    """A stream that a job materializes or writes: a port of the region, or what reaches one of its sinks."""

    uid: str
    tag: str | None
    layout: StreamLayout
    port: Port | None
    sink: int | None = None


class _Job:
    """The Spark jobs of one region, for one partition or several."""

    def __init__(self, runs: Sequence[Run], region: Region, frames: RegionFrames, recovering: bool) -> None:
        self.runs, self.run, self.region, self.frames = runs, runs[0], region, frames
        self.sinks = [] if recovering else [cast("SinkNode", self.run.plan.graph.node(s)) for s in region.sinks]
        self.streams = self._streams()

    def execute(self, begun: float, before: Manifest | None) -> list[Manifest]:
        """Materializes or writes, and commits the manifests: of each partition as soon as its sinks are written."""
        attempts = [run.store.new_attempt(run.address(self.region)) for run in self.runs]
        done: list[Manifest] = []
        try:
            if len(self.runs) > 1:
                made = self._materialized_together(attempts)
            elif len(self.sinks) == 1 and not self.region.outputs and not self.region.carried:
                made = self._written()
            else:
                made = self._materialized(attempts[0])
            manifests = self._manifests(made, attempts, before)
            self._count_malformed(manifests)
            self.run.check()
            written, left = (made.results, []) if made.results is not None else self._written_together(manifests)
            share = (now() - begun) / len(self.runs)
            for run, manifest, results in zip(self.runs, manifests, written, strict=True):
                own = now()
                results |= {
                    node.name: write(node, self._rows_for(node, [manifest]), self._context(run, node)) for node in left
                }
                size = manifest.bytes or sum(r.bytes for r in results.values())
                run.check()
                done.append(
                    msgspec.structs.replace(
                        manifest,
                        seconds=share + now() - own,
                        bytes=size,
                        sinks={name: r.location for name, r in results.items()},
                    )
                )
                run.store.commit(run.address(self.region), done[-1])
        except BaseException:
            for attempt in attempts[len(done) :]:
                remove_tree(attempt)
            raise
        return done

    def _written(self) -> _Made:
        """The one sink of a region that nothing else leaves, written directly."""
        sink = self.sinks[0]
        frame = self.frames.sink_input(sink.id)
        result = write(sink, frame, self._context(self.run, sink))
        again = [Metrics({"sink had this execution already": 1})] if result.repeated else []
        return _Made(
            frame.schema.json(), [[result.rows]], [merge([*self.frames.metrics(), *again])], [{sink.name: result}]
        )

    def _materialized(self, attempt: UPath) -> _Made:
        """All streams that leave, written into the store."""
        from pyspark.sql import Observation

        counts = Observation()
        frame = self._counted(self._combined(), counts, flat=len(self.streams) == 1)
        dataframes.write(frame, attempt)
        return _Made(frame.schema.json(), [self._rows(counts)], self.frames.metrics())

    def _materialized_together(self, attempts: Sequence[UPath]) -> _Made:
        """The same of several partitions, in one job.

        Their rows are counted in what was written: to count them on the way would take a test per row and partition.
        """
        from pyspark.sql import functions as F

        frame = self._combined()
        if any(node.sink.upserts for node in self.sinks):
            frame = frame.withColumn(EMITTED, F.monotonically_increasing_id())
        schema = frame.drop(PART).schema.json()
        filled = dataframes.write_parts(frame, attempts)
        rows = dataframes.counted(dataframes.placed(self.run.spark, schema, filled), len(self.runs), len(self.streams))
        return _Made(schema, rows, self.frames.metrics())

    def _rows(self, counts: Observation) -> list[int]:
        report = observed(counts)
        return [int(report.get(f"rows{i}") or 0) for i in range(len(self.streams))]

    def _manifests(self, made: _Made, attempts: Sequence[UPath], before: Manifest | None) -> list[Manifest]:
        """What was made, but for what the sinks wrote."""
        manifests = []
        carried_from = before.run if before is not None else ""
        seen = Metrics(last_event_times=before.last_event_times) if before is not None else Metrics()
        for number, (run, part, attempt) in enumerate(zip(self.runs, self.frames.parts, attempts, strict=True)):
            metrics = merge([made.metrics[number], part.upstream, seen])
            files = run.store.files(attempt)
            rows = made.rows[number]
            manifests.append(
                Manifest(
                    pipeline=run.plan.name,
                    stage=self.region.name,
                    partition=run.partition,
                    run=run.run_id,
                    fingerprint=run.plan.regions[self.region.id].fingerprint,
                    schema=made.schema,
                    streams=[StoredStream(s.uid, s.tag, n) for s, n in zip(self.streams, rows, strict=True)],
                    rows=sum(n for s, n in zip(self.streams, rows, strict=True) if s.tag != CARRIED),
                    bytes=sum(f.bytes for f in files),
                    data=attempt.name,
                    files=files,
                    last_event_times=metrics.last_event_times,
                    counters=metrics.counters,
                    created=now(),
                    carried_from=carried_from,
                    groups=run.plan.execution.streaming.max_parallelism if self.region.carried else 0,
                    together=len(self.runs),
                )
            )
            if run.carry is not None:
                carried_from, seen = run.run_id, Metrics(last_event_times=metrics.last_event_times)
        return manifests

    def _streams(self) -> list[_Stream]:
        plan = self.run.plan
        streams = [
            _Stream(plan.graph.node(p.node).uid, p.tag, plan.layout(p), p)
            for p in (*self.region.outputs, *self.region.carried)
        ]
        for sink in self.sinks:
            port = self._port_of(sink)
            if port is None:
                streams.append(
                    _Stream(sink.uid, None, StreamLayout(input_layout(plan, sink.id).records), None, sink.id)
                )
            elif all(s.port != port for s in streams):
                streams.append(_Stream(plan.graph.node(port.node).uid, port.tag, plan.layout(port), port))
        return streams

    def _port_of(self, sink: SinkNode) -> Port | None:
        """The one stream of this region that a sink writes, or None where it unites or exchanges several."""
        edges = self.run.plan.graph.inputs(sink.id)
        if (
            len(edges) != 1
            or edges[0].partitioning.kind is not ExchangeKind.FORWARD
            or edges[0].source not in self.region.nodes
        ):
            return None
        return Port(edges[0].source, edges[0].tag.name if edges[0].tag else None)

    def _combined(self) -> DataFrame:
        if not self.streams:
            raise PipelineError(f"{self.run.plan.name}: stage '{self.region.name}' leads to nothing")
        if len(self.streams) == 1:
            return self._frame(self.streams[0])
        self._in_pass_order()
        if all(s.port is not None for s in self.streams):
            whole = self.frames.whole_pass(tuple(cast("Port", s.port) for s in self.streams))
            if whole is not None:
                return whole
        return self._united()

    def _in_pass_order(self) -> None:
        """Streams that all leave one Python pass are stored in the order in which that pass emits them."""
        order = {
            port: i
            for i, port in enumerate(
                next((p.outputs for p in self.frames.passes if {s.port for s in self.streams} == set(p.outputs)), ())
            )
        }
        if order:
            self.streams.sort(key=lambda s: order[cast("Port", s.port)])

    def _united(self) -> DataFrame:
        from pyspark.sql import functions as F

        schema = spark_schema(combined_schema(tuple(s.layout for s in self.streams)))
        parts = []
        for number, stream in enumerate(self.streams):
            own = output_column(number)
            columns = [F.lit(number).cast("int").alias(OUTPUT)]
            columns += map(F.col, self.frames.beside)
            for field in list(schema)[1:-1]:
                value = F.struct(*[F.col(n) for n in stream.layout.schema.names]) if field.name == own else F.lit(None)
                columns.append(value.cast(field.dataType).alias(field.name))
            parts.append(self._frame(stream).select(*columns))
        frame = parts[0]
        for part in parts[1:]:
            frame = frame.unionByName(part)
        return frame

    def _frame(self, stream: _Stream) -> DataFrame:
        if stream.port is not None:
            return self.frames.port(stream.port)
        assert stream.sink is not None
        return self.frames.sink_input(stream.sink)

    def _counted(self, frame: DataFrame, counts: Observation, flat: bool) -> DataFrame:
        from pyspark.sql import functions as F

        if flat:
            return frame.observe(counts, F.count(F.lit(1)).alias("rows0"))
        return frame.observe(
            counts, *[F.count(F.when(F.col(OUTPUT) == i, 1)).alias(f"rows{i}") for i in range(len(self.streams))]
        )

    def _written_together(self, manifests: Sequence[Manifest]) -> tuple[list[dict[str, WriteResult]], list[SinkNode]]:
        """What the sinks wrote that can write several partitions at once, by partition; and the sinks that are left."""
        written: list[dict[str, WriteResult]] = [{} for _ in manifests]
        left = []
        for node in self.sinks:
            results = None
            if len(manifests) > 1:
                contexts = [self._context(run, node) for run in self.runs]
                results = write_parts(
                    node, self._rows_for(node, manifests, [EMITTED] if node.sink.upserts else []), contexts
                )
            if results is None:
                left.append(node)
                continue
            for of_part, result in zip(written, results, strict=True):
                of_part[node.name] = result
        return written, left

    def _rows_for(self, node: SinkNode, manifests: Sequence[Manifest], further: Sequence[str] = ()) -> DataFrame:
        """What a sink is to write, as it was materialized."""
        port = self._port_of(node)
        stream = next(s for s in self.streams if (s.port == port if port is not None else s.sink == node.id))
        frame = dataframes.read(
            self.run.spark, self.run.store, manifests, stream.uid, stream.tag, stream.layout, further
        )
        return frame.select(*stream.layout.records.names, *further, *([PART] if len(manifests) > 1 else []))

    def _context(self, run: Run, node: SinkNode) -> WriteContext:
        return WriteContext(
            run.spark,
            run.plan.name,
            self.region.name,
            run.execution,
            run.partition,
            ship=by_value_afresh,
            sink=node.uid,
        )

    def _count_malformed(self, manifests: Sequence[Manifest]) -> None:
        """Counts the rows that did not fit, and keeps those that are to be set aside."""
        for node, frame in self.frames.malformed:
            by = self.frames.beside
            found = {row[PART] if by else 0: row["count"] for row in frame.groupBy(*by).count().collect()}
            kept = cast("SparkSource[Any]", node.source).keeps_malformed()
            name = "malformed rows diverted" if kept else "malformed rows dropped"
            for place, (run, manifest) in enumerate(zip(self.runs, manifests, strict=True)):
                rows = found.get(place, 0)
                if rows:
                    manifest.counters[name] = manifest.counters.get(name, 0) + rows
                if kept:
                    manifest.diverted[node.uid] = rows
                    own = frame.where(f"{PART} = {place}").drop(PART) if by else frame
                    malformed.keep(own, rows, malformed.in_batch(run.store, run.plan.name, node), run.partition)


@dataclass
class _Made:
    """What a job has made, and what is known of it by partition."""

    schema: str
    rows: list[list[int]]
    """By stream."""

    metrics: list[Metrics]
    results: list[dict[str, WriteResult]] | None = None
    """What the sinks wrote, where they have already."""
