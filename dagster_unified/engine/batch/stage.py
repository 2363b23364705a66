"""Runs one stage: its region's Spark job, its output into the intermediate store, its sinks.

A stage with a single sink writes it directly. A stage with several streams leaving it materializes them once, and its sinks
are written from that, so that nothing is computed twice and a retry of a sink computes nothing again.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, cast

import msgspec

from dagster_unified.connectors.base import SparkSink, WriteContext, WriteResult, spark_schema
from dagster_unified.connectors.paths import for_spark, remove_tree
from dagster_unified.engine.batch.frames import Carry, RegionFrames, observed
from dagster_unified.engine.batch.store import Address, IntermediateStore, Manifest, StoredStream, now
from dagster_unified.engine.events import Observer, StageFinished, StageStarted, nobody
from dagster_unified.engine.failures import translated
from dagster_unified.engine.job_time import JobTime
from dagster_unified.engine.translate import input_layout
from dagster_unified.engine.worker import by_value
from dagster_unified.errors import CarriedStateError, IntermediateLostError, PipelineError, StateError, UnsupportedError
from dagster_unified.graph.failover import regions_to_recompute
from dagster_unified.graph.nodes import ExchangeKind, SinkNode
from dagster_unified.graph.plan import Plan, Port, Region
from dagster_unified.graph.slices import WHOLE
from dagster_unified.operators.carried import CARRIED
from dagster_unified.operators.key_groups import ControlEvent
from dagster_unified.operators.layout import OUTPUT, StreamLayout, combined_schema, output_column
from dagster_unified.operators.metrics import Metrics, merge
from dagster_unified.operators.report import Report
from dagster_unified.operators.time import wall_clock

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, Observation, SparkSession
    from upath import UPath


INTERMEDIATE_CODEC = "lz4_raw"
"""Written once and read once, soon: measured against zstd and snappy, this costs the least time for a stage and its reader."""


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

    def address(self, region: Region) -> Address:
        """Where this run puts a region's intermediate."""
        return Address(self.plan.name, region.name, self.run_id, self.partition)


Lookup = Callable[[Region], Manifest | None]
"""Finds a region's intermediate, as far as it still stands."""


@dataclass(frozen=True)
class Carrying:
    """Where the state that a partition begins with comes from, or None where it is the first; and whether the input ends with it."""

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
                f"{plan.name}: stage '{region.name}' goes on from the state of partition {self.key_before}, which is not there: it has not been run, or its state was freed; "
                f"run a backfill that begins with {self.key_before}, or with an earlier partition"
            )
        return found


def run_stage(run: Run, region: Region, find: Lookup) -> Manifest:
    """Runs a stage; where an intermediate that it needs is gone or damaged, first recomputes from the nearest ancestors that stand."""
    if run.plan.execution.mode != "BATCH":
        raise UnsupportedError(
            f"{run.plan.name}: this job runs BATCH stages, and the pipeline resolves to {run.plan.execution.mode}; launch with execution.runtime-mode=BATCH and bounded sources"
        )
    found = {r.id: m for r in run.plan.regions if r.id != region.id and (m := find(r)) is not None}
    for lost in regions_to_recompute(region.id, run.plan.inputs, list(found)):
        ancestor = run.plan.regions[lost]
        reason = f"its intermediate is gone or damaged, and '{region.name}' needs it"
        found[lost] = _run_region(run, ancestor, found, reason=reason)
    return _run_region(run, region, found)


def run_all(run: Run) -> list[Manifest]:
    """Runs every stage in order, in one process: what a notebook or a benchmark wants."""
    done: dict[int, Manifest] = {}
    for region in run.plan.regions:
        done[region.id] = run_stage(run, region, lambda r: done.get(r.id))
    return list(done.values())


def _run_region(run: Run, region: Region, inputs: Mapping[int, Manifest], reason: str = "") -> Manifest:
    number, of = region.id + 1, len(run.plan.regions)
    run.observe(StageStarted(region.name, number, of, reason))
    begun = now()
    upstream = merge(Metrics(last_event_times=inputs[i].last_event_times) for i in region.inputs)
    before = run.carry.manifest(run.plan, region) if run.carry is not None else None
    carry = None
    if run.carry is not None:
        begin = _time_of(run.plan, Metrics(last_event_times=before.last_event_times) if before is not None else Metrics())
        carry = Carry(lambda port: _before(run, before, port), begin, _time_of(run.plan, upstream, run.carry.last))
    frames = RegionFrames(run.plan, region, run.spark, lambda port: _read(run, port, inputs), upstream, carry=carry)
    if before is not None:
        frames.upstream = merge([upstream, Metrics(last_event_times=before.last_event_times)])
    attempt = run.store.new_attempt(run.address(region))
    try:
        manifest = _Job(run, region, frames, attempt, recovering=bool(reason)).execute(begun, before.run if before is not None else "")
    except Exception as error:
        remove_tree(attempt)
        raise translated(error, run.plan, region.name, run.spark) from error
    finally:
        frames.release()
    run.observe(StageFinished(region.name, number, of, manifest, reason))
    return manifest


def _time_of(plan: Plan, seen: Metrics, last: bool = False) -> ControlEvent:
    """The control event after all that has come so far: its watermarks or, with the last partition, the end of input."""
    now = wall_clock()
    time = JobTime(plan, None, now)
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
            f"{run.plan.name}: the state of the partition before is in {manifest.groups} key groups, and pipeline.max-parallelism is {groups}; set it as it was, or run a backfill from the first partition"
        )
    number = next((i for i, s in enumerate(manifest.streams) if s.uid == node.uid and s.tag == port.tag), None)
    if number is None:
        raise StateError(
            f"{run.plan.name}: the partition before has no state of operator '{node.name}' (uid '{node.uid}'); give it the uid that it had, or run a backfill from the first partition"
        )
    return _stored(run, manifest, number, run.plan.layout(port))


def _read(run: Run, port: Port, inputs: Mapping[int, Manifest]) -> DataFrame:
    """A stream of an intermediate, in the columns of its layout."""
    region = run.plan.region_of(port.node)
    manifest = inputs.get(region.id)
    if manifest is None:
        raise IntermediateLostError(f"{run.plan.name}: the intermediate of stage '{region.name}' is gone; run that stage again")
    uid = run.plan.graph.node(port.node).uid
    number = next(i for i, s in enumerate(manifest.streams) if s.uid == uid and s.tag == port.tag)
    return _stored(run, manifest, number, run.plan.layout(port))


def _stored(run: Run, manifest: Manifest, number: int, layout: StreamLayout) -> DataFrame:
    from pyspark.sql.types import StructType

    path = for_spark(run.store.data(manifest))
    stored = StructType.fromJson(json.loads(manifest.schema))
    frame = run.spark.read.schema(stored).parquet(path)
    if len(manifest.streams) == 1:
        return frame.select(*layout.schema.names)
    column = output_column(number)
    return frame.where(f"{OUTPUT} = {number}").select(*[f"{column}.{name}" for name in layout.schema.names])


@dataclass
class _Stream:
    """A stream that a job materializes or writes: a port of the region, or what reaches one of its sinks."""

    uid: str
    tag: str | None
    layout: StreamLayout
    port: Port | None
    sink: int | None = None


class _Job:
    """The Spark jobs of one region."""

    def __init__(self, run: Run, region: Region, frames: RegionFrames, attempt: UPath, recovering: bool) -> None:
        self.run, self.region, self.frames, self.attempt = run, region, frames, attempt
        self.sinks = [] if recovering else [cast("SinkNode", run.plan.graph.node(s)) for s in region.sinks]
        self.streams = self._streams()

    def execute(self, begun: float, carried_from: str) -> Manifest:
        """Materializes or writes, and commits the manifest."""
        from pyspark.sql import Observation

        counts = Observation()
        results: dict[str, WriteResult] = {}
        direct = len(self.sinks) == 1 and not self.region.outputs and not self.region.carried
        if direct:
            frame = self._counted(self.frames.sink_input(self.sinks[0].id), counts, flat=True)
            results = self._write_sinks({self.sinks[0].id: frame})
        else:
            frame = self._counted(self._combined(), counts, flat=len(self.streams) == 1)
            frame.write.mode("overwrite").option("compression", INTERMEDIATE_CODEC).parquet(for_spark(self.attempt))
        if direct and any(r.repeated for r in results.values()):
            # No job ran, so there is nothing to observe, and asking would wait for ever.
            rows, metrics = [0] * len(self.streams), Metrics({"sink had this execution already": 1})
        else:
            report = observed(counts)
            rows, metrics = [int(report.get(f"rows{i}") or 0) for i in range(len(self.streams))], self.frames.metrics()
        metrics = merge([metrics, self.frames.upstream])
        self._count_malformed(metrics)
        files = self.run.store.files(self.attempt)
        manifest = Manifest(
            pipeline=self.run.plan.name,
            stage=self.region.name,
            partition=self.run.partition,
            run=self.run.run_id,
            fingerprint=self.region.fingerprint,
            schema=frame.schema.json(),
            streams=[StoredStream(s.uid, s.tag, n) for s, n in zip(self.streams, rows, strict=True)],
            rows=sum(n for s, n in zip(self.streams, rows, strict=True) if s.tag != CARRIED),
            bytes=sum(f.bytes for f in files) or sum(r.bytes for r in results.values()),
            data=self.attempt.name,
            files=files,
            last_event_times=metrics.last_event_times,
            counters=metrics.counters,
            created=now(),
            carried_from=carried_from,
            groups=self.run.plan.execution.streaming.max_parallelism if self.region.carried else 0,
        )
        if not direct and self.sinks:
            results = self._write_sinks({s.id: self._materialized(manifest, s) for s in self.sinks})
        manifest = _with(manifest, seconds=now() - begun, sinks={name: r.location for name, r in results.items()})
        self.run.store.commit(self.run.address(self.region), manifest)
        return manifest

    def _streams(self) -> list[_Stream]:
        plan = self.run.plan
        streams = [_Stream(plan.graph.node(p.node).uid, p.tag, plan.layout(p), p) for p in (*self.region.outputs, *self.region.carried)]
        for sink in self.sinks:
            port = self._port_of(sink)
            if port is None:
                streams.append(_Stream(sink.uid, None, StreamLayout(input_layout(plan, sink.id).records), None, sink.id))
            elif all(s.port != port for s in streams):
                streams.append(_Stream(plan.graph.node(port.node).uid, port.tag, plan.layout(port), port))
        return streams

    def _port_of(self, sink: SinkNode) -> Port | None:
        """The one stream of this region that a sink writes, or None where it unites or exchanges several."""
        edges = self.run.plan.graph.inputs(sink.id)
        if len(edges) != 1 or edges[0].partitioning.kind is not ExchangeKind.FORWARD or edges[0].source not in self.region.nodes:
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
        order = {port: i for i, port in enumerate(next((p.outputs for p in self.frames.passes if {s.port for s in self.streams} == set(p.outputs)), ()))}
        if order:
            self.streams.sort(key=lambda s: order[cast("Port", s.port)])

    def _united(self) -> DataFrame:
        from pyspark.sql import functions as F

        schema = spark_schema(combined_schema(tuple(s.layout for s in self.streams)))
        parts = []
        for number, stream in enumerate(self.streams):
            own = output_column(number)
            columns = [F.lit(number).cast("int").alias(OUTPUT)]
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
        return frame.observe(counts, *[F.count(F.when(F.col(OUTPUT) == i, 1)).alias(f"rows{i}") for i in range(len(self.streams))])

    def _materialized(self, manifest: Manifest, sink: SinkNode) -> DataFrame:
        port = self._port_of(sink)
        number = next(i for i, s in enumerate(self.streams) if (s.port == port if port is not None else s.sink == sink.id))
        frame = _stored(self.run, manifest, number, self.streams[number].layout)
        return frame.select(*self.streams[number].layout.records.names)

    def _write_sinks(self, frames: Mapping[int, DataFrame]) -> dict[str, WriteResult]:
        context = WriteContext(self.run.spark, self.run.plan.name, self.region.name, self.run.execution, self.run.partition, ship=by_value)
        written = {}
        for node in self.sinks:
            if not isinstance(node.sink, SparkSink):
                raise PipelineError(f"{self.run.plan.name}: sink '{node.name}' is a {type(node.sink).__name__}, which Spark cannot write")
            written[node.name] = node.sink.write(frames[node.id], context)
        return written

    def _count_malformed(self, metrics: Metrics) -> None:
        """Counts the rows that did not fit, and writes those that are to be kept beside the intermediate."""
        for number, (frame, keep) in enumerate(self.frames.diverted):
            folder = self.run.store.folder(self.run.address(self.region)) / f"malformed-{number}"
            if keep:
                frame.write.mode("overwrite").parquet(for_spark(folder))
                frame = self.run.spark.read.schema(frame.schema).parquet(for_spark(folder))
            found = frame.count()
            if found:
                metrics.count("malformed rows diverted" if keep else "malformed rows dropped", found)


def _with(manifest: Manifest, **changes: Any) -> Manifest:
    return msgspec.structs.replace(manifest, **changes)
