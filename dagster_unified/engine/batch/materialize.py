"""Materializes the streams that leave a region into the intermediate store, and says so in manifests.

Knows the region's DataFrames and the store; not who runs a stage, nor its sinks.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, cast

from dagster_unified.connectors.protocol.frame import spark_schema
from dagster_unified.connectors.protocol.positions import Position
from dagster_unified.connectors.protocol.source import SparkSource
from dagster_unified.engine import malformed
from dagster_unified.engine.batch.intermediates import dataframes
from dagster_unified.engine.batch.intermediates.store import Manifest, StoredStream, now
from dagster_unified.engine.batch.region import RegionFrames
from dagster_unified.engine.batch.run import Run, only_saved
from dagster_unified.engine.dataframe.observations import observed
from dagster_unified.errors import PipelineError
from dagster_unified.graph.nodes import ExchangeKind, IterationNode, SinkNode
from dagster_unified.graph.plan import Plan, Port, Region
from dagster_unified.operators.layout import (
    CARRIED,
    EMITTED,
    OUTPUT,
    PARTITION_INDEX,
    StreamLayout,
    combined_schema,
    output_column,
)
from dagster_unified.operators.metrics import Metrics, merge

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, Observation
    from upath import UPath


@dataclass(frozen=True)
class LeavingStream:
    """A stream that leaves a region: one of its ports, or what reaches one of its sinks."""

    uid: str
    tag: str | None
    layout: StreamLayout
    port: Port | None
    sink: int | None = None

    @staticmethod
    def of_port(plan: Plan, port: Port) -> LeavingStream:
        """The stream of a port."""
        return LeavingStream(plan.graph.node(port.node).uid, port.tag, plan.layout(port), port)

    @staticmethod
    def to_sink(plan: Plan, region: Region, sink: SinkNode) -> LeavingStream:
        """What a sink writes: the stream of a port, or a stream of its own if it unites or exchanges several."""
        edges = plan.graph.inputs(sink.id)
        forwarded = len(edges) == 1 and edges[0].partitioning.kind is ExchangeKind.FORWARD
        if forwarded and edges[0].source in region.nodes:
            return LeavingStream.of_port(plan, Port.of(edges[0]))
        return LeavingStream(sink.uid, None, StreamLayout(plan.input_layout(sink.id).records), None, sink.id)

    def frame(self, frames: RegionFrames) -> DataFrame:
        """Its rows."""
        if self.port is not None:
            return frames.port(self.port)
        assert self.sink is not None
        return frames.sink_input(self.sink)


def leaving_streams(plan: Plan, region: Region, sinks: Sequence[SinkNode]) -> list[LeavingStream]:
    """The streams that leave a region, to later regions, to the next partition and to these sinks; each once."""
    ports = [LeavingStream.of_port(plan, port) for port in (*region.outputs, *region.carried)]
    written = [LeavingStream.to_sink(plan, region, sink) for sink in sinks]
    return list({(stream.uid, stream.tag): stream for stream in (*ports, *written)}.values())


@dataclass(frozen=True)
class Combined:
    """Streams in one DataFrame. In a row of several, `OUTPUT` is the place of its stream in `streams`."""

    frame: DataFrame
    streams: tuple[LeavingStream, ...]


def combine(frames: RegionFrames, streams: Sequence[LeavingStream]) -> Combined:
    """The streams in one DataFrame: as the pass combined them that emits them all, or united."""
    if not streams:
        raise PipelineError(f"{frames.plan.name}: stage '{frames.graph.name}' leads to nothing")
    if len(streams) == 1:
        return Combined(streams[0].frame(frames), tuple(streams))
    by_port = {stream.port: stream for stream in streams if stream.port is not None}
    whole = frames.combined(by_port) if len(by_port) == len(streams) else None
    if whole is not None:
        frame, ports = whole
        return Combined(frame, tuple(by_port[port] for port in ports))
    return Combined(_united(frames, streams), tuple(streams))


def _united(frames: RegionFrames, streams: Sequence[LeavingStream]) -> DataFrame:
    from pyspark.sql import functions as F

    schema = spark_schema(combined_schema(tuple(s.layout for s in streams)))
    united: DataFrame | None = None
    for number, stream in enumerate(streams):
        own = output_column(number)
        columns = [F.lit(number).cast("int").alias(OUTPUT)]
        columns += map(F.col, frames.axis.columns)
        for field in list(schema)[1:-1]:
            value = F.struct(*map(F.col, stream.layout.schema.names)) if field.name == own else F.lit(None)
            columns.append(value.cast(field.dataType).alias(field.name))
        frame = stream.frame(frames).select(*columns)
        united = frame if united is None else united.unionByName(frame)
    assert united is not None
    return united


@dataclass(frozen=True)
class Materialized:
    """What a job computed: the streams and their schema, and for each partition the rows by stream and the metrics."""

    streams: Sequence[LeavingStream]
    schema: str
    rows: Sequence[Sequence[int]]
    metrics: Sequence[Metrics]


def materialize(frames: RegionFrames, streams: Sequence[LeavingStream], attempt: UPath) -> Materialized:
    """Write the streams of one partition into the folder of an attempt, in one job."""
    from pyspark.sql import Observation

    combined, counts = combine(frames, streams), Observation()
    frame = _counted(combined, counts)
    dataframes.write(frame, attempt)
    report = observed(counts)
    rows = [int(report.get(f"rows{number}") or 0) for number in range(len(streams))]
    return Materialized(combined.streams, frame.schema.json(), [rows], frames.metrics())


def _counted(combined: Combined, counts: Observation) -> DataFrame:
    """The rows, which Spark counts by stream while they are written."""
    from pyspark.sql import functions as F

    if len(combined.streams) == 1:
        return combined.frame.observe(counts, F.count(F.lit(1)).alias("rows0"))
    numbers = range(len(combined.streams))
    return combined.frame.observe(counts, *[F.count(F.when(F.col(OUTPUT) == n, 1)).alias(f"rows{n}") for n in numbers])


def materialize_together(
    runs: Sequence[Run],
    frames: RegionFrames,
    streams: Sequence[LeavingStream],
    attempts: Sequence[UPath],
    in_order: bool,
) -> Materialized:
    """Write the streams of several partitions into the folders of their attempts, in one job.

    `in_order` keeps the order in which tasks emit rows. The rows are counted in what was written: to count them on the
    way would take a test per row and partition.
    """
    from pyspark.sql import functions as F

    combined = combine(frames, streams)
    frame = combined.frame
    if in_order:
        frame = frame.withColumn(EMITTED, F.monotonically_increasing_id())
    schema = frame.drop(PARTITION_INDEX).schema.json()
    filled = dataframes.write_partitions(frame, attempts)
    written = dataframes.indexed(runs[0].spark, schema, filled)
    rows = dataframes.counted(written, len(runs), len(streams))
    return Materialized(combined.streams, schema, rows, frames.metrics())


def manifests_of(
    runs: Sequence[Run],
    region: Region,
    frames: RegionFrames,
    found: Materialized,
    attempts: Sequence[UPath],
    carried_from: str,
    seen: Metrics,
    positions: Sequence[Mapping[str, Position]],
) -> list[Manifest]:
    """The manifests of the partitions, without what their sinks wrote."""
    manifests = []
    for run, start, attempt, own, rows, read in zip(
        runs, frames.starts, attempts, found.metrics, found.rows, positions, strict=True
    ):
        metrics = merge([own, start.upstream, seen])
        files = run.store.files(attempt)
        carrying = [run.plan.graph.node(port.node) for port in region.carried]
        hear_of_the_end = [node for node in carrying if node.has_timers or isinstance(node, IterationNode)]
        manifests.append(
            Manifest(
                pipeline=run.plan.name,
                stage=region.name,
                partition=run.partition,
                run=run.run_id,
                fingerprint=run.plan.regions[region.id].fingerprint,
                schema=found.schema,
                streams=[StoredStream(s.uid, s.tag, n) for s, n in zip(found.streams, rows, strict=True)],
                rows=_emitted(run.plan, zip(found.streams, rows, strict=True)),
                bytes=sum(f.bytes for f in files),
                data=attempt.name,
                files=files,
                last_event_times=metrics.last_event_times,
                counters=metrics.counters,
                gauges=metrics.gauges,
                meters=metrics.meters,
                histograms=metrics.histograms,
                created=now(),
                carried_from=carried_from,
                ended=run.carry is not None and run.carry.last and bool(hear_of_the_end),
                subtasks=run.plan.subtasks_of_state(carrying),
                portable=[node.uid for node in carrying if node.merges_partials],
                groups=run.plan.execution.streaming.max_parallelism if region.carried and not only_saved(runs) else 0,
                together=len(runs),
                positions=dict(read),
                lacking=_lacking(run.plan, region),
            )
        )
        if run.carry is not None:
            carried_from, seen = run.run_id, Metrics(last_event_times=metrics.last_event_times)
    return manifests


def _lacking(plan: Plan, region: Region) -> dict[str, str]:
    """The files of the stage's sources that lack a column."""
    return {
        f"files of {node.name} without column '{column}'": files
        for node in plan.graph.sources
        if node.id in region.nodes and isinstance(node.source, SparkSource)
        for column, files in node.source.lacking().items()
    }


def _emitted(plan: Plan, counted: Iterable[tuple[LeavingStream, int]]) -> int:
    """How many records a stage emitted. What goes to several joins is written for each of them, and counts once."""
    rows: dict[tuple[object, ...], int] = {}
    for stream, count in counted:
        if stream.tag == CARRIED:
            continue
        if stream.port is None:
            rows[stream.uid, stream.tag, stream.sink] = count
        else:
            rows[plan.graph.emitter(stream.port.node, stream.tag)] = count
    return sum(rows.values())


def count_malformed(runs: Sequence[Run], frames: RegionFrames, manifests: Sequence[Manifest]) -> None:
    """Count the rows that do not fit, in the manifests, and keep those of sources that divert them."""
    for node, frame in frames.malformed:
        axis = frames.axis
        counts = {axis.index_of(row): row["count"] for row in frame.groupBy(*axis.columns).count().collect()}
        kept = cast("SparkSource[Any]", node.source).keeps_malformed()
        name = "malformed rows diverted" if kept else "malformed rows dropped"
        for index, (run, manifest) in enumerate(zip(runs, manifests, strict=True)):
            rows = counts.get(index, 0)
            if rows:
                manifest.counters[name] = manifest.counters.get(name, 0) + rows
            if kept:
                manifest.diverted[node.uid] = rows
                own = axis.rows_of(frame, index)
                malformed.keep(own, rows, malformed.in_batch(run.store, run.plan.name, node), run.partition)
