"""Builds the DataFrames of a region in BATCH, for one partition or several, and materializes what leaves it."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, cast

import pyarrow as pa
import pyarrow.compute as pc

from dagster_unified.connectors.protocol.frame import MALFORMED, spark_schema
from dagster_unified.connectors.protocol.positions import Position
from dagster_unified.connectors.protocol.source import SparkSource
from dagster_unified.engine import malformed
from dagster_unified.engine.batch import intermediates
from dagster_unified.engine.batch.intermediates import Manifest, StoredStream, now
from dagster_unified.engine.batch.run import CarriedState, PartitionStart, Run, StateBefore, exports_rows, only_saved
from dagster_unified.engine.dataframe.frames import Frames, files_lacking_columns, spark_source, split_malformed
from dagster_unified.engine.dataframe.native import Natives
from dagster_unified.engine.dataframe.partitions import PartitionAxis
from dagster_unified.engine.dataframe.passes import observed
from dagster_unified.engine.positions import Read
from dagster_unified.errors import PipelineError
from dagster_unified.graph import nodes as g
from dagster_unified.graph.execution_graph import ExecutionGraph, Vertex
from dagster_unified.graph.nodes import ExchangeKind, IterationNode, Key, Port, SinkNode
from dagster_unified.graph.plan import Plan, Region
from dagster_unified.operators.layout import (
    CARRIED,
    EMITTED,
    OUTPUT,
    PARTITION_INDEX,
    TIMESTAMP,
    StreamLayout,
    combined_schema,
    declared,
    output_column,
)
from dagster_unified.operators.metrics import Metrics, merge
from dagster_unified.operators.program.step import BroadcastInput, Program
from dagster_unified.operators.routing import encode

if TYPE_CHECKING:
    from pyspark.sql import Column, DataFrame, Observation, SparkSession
    from upath import UPath

    from dagster_unified.engine.batch.iterate import Iterations


class RegionFrames(Frames):
    """The lazy DataFrames of one region.

    `intermediate` gives the streams of other regions. `state` gives what the partition before the first left, where
    state is carried; `only_saved` says that there is none and that it goes to a savepoint only. `iterations` runs those
    in it.
    """

    def __init__(
        self,
        plan: Plan,
        region: Region,
        spark: SparkSession,
        intermediate: Callable[[Port], DataFrame],
        starts: Sequence[PartitionStart],
        state: StateBefore | None = None,
        iterations: Iterations | None = None,
        only_saved: bool = False,
    ) -> None:
        super().__init__(ExecutionGraph.of(plan, region), intermediate, PartitionAxis(len(starts)))
        self.spark, self.starts = spark, starts
        self.malformed: list[tuple[g.SourceNode, DataFrame]] = []
        """The rows that do not fit, by source."""

        self._natives = Natives(plan.name, region.name, spark)
        self._iterations, self._only_saved = iterations, only_saved
        self._iterated: dict[Port, DataFrame] = {}
        self._carried = None if state is None else CarriedState(self, self._natives, starts, state)

    def metrics(self) -> list[Metrics]:
        """Return the totals that operators reported, by partition; call it after the region's job has run."""
        by_partition = self.reports.metrics()
        return (
            by_partition
            if self._iterations is None
            else [merge([by_partition[0], *self._iterations.metrics]), *by_partition[1:]]
        )

    # How BATCH runs operators

    def run_vertex(self, vertex: Vertex) -> DataFrame:
        node = self.plan.graph.node(vertex.head)
        ship = self.graph.program(vertex)
        if self._only_saved and exports_rows(node):
            ship = replace(self.axis.timed(ship), export=self.starts[0].over(node))
            frame = self.input_of(node.id).select(*ship.input.schema.names)
        elif self._carried is not None and node.runs_by_key:
            ship = replace(self.axis.timed(ship), carry=tuple(start.over(node) for start in self.starts))
            frame = self._carried.records(node, ship.input)
        else:
            frame = self.input_of(node.id)
            ship = self.axis.timed(ship, self._last_event_times(node, frame))
            frame = frame.select(*ship.input.schema.names, *self.axis.columns)
            frame = frame if node.runs_by_key and node.key != Key() else self.axis.in_order(frame)
        if ship.broadcast is None:
            combined = self.run_program(frame, ship, vertex.members)
        elif ship.carry:
            combined = self.run_program(frame, self._given_broadcast(ship, ship.broadcast, node.id), vertex.members)
        else:
            combined = self._with_broadcast(frame, ship, ship.broadcast, node.id)
        return self.persisted(vertex, combined)

    def run_natively(self, node: g.Node, port: Port) -> DataFrame:
        if isinstance(node, g.SourceNode):
            return self._source(node)
        if isinstance(node, g.IterationNode):
            return self._output_of(node, port)
        if self._carried is not None and node.aggregates_natively:
            return self._carried.aggregate(node, port)
        frame = self._natives.run(node, self.input_of(node.id), self.axis.columns)
        return self._with_last_event_times(node, frame)

    def _output_of(self, node: g.IterationNode, port: Port) -> DataFrame:
        """Return an output of an iteration; asking for the first one runs it."""
        if port not in self._iterated:
            assert self._iterations is not None
            inputs = functools.cache(lambda: self._inputs_of(node))
            if self._leaves_rows_out:
                inputs()
            self._iterated.update(self._iterations.outputs(node, inputs))
        return self._iterated[port]

    def _inputs_of(self, node: g.IterationNode) -> tuple[list[DataFrame], Callable[[], Metrics]]:
        """The inputs of an iteration, which one that goes on does not read again: nothing is observed of them then."""
        frames, reported = self.reports.take(lambda: self.inputs_of_iteration(node))
        return frames, lambda: merge(reported())

    @property
    def _leaves_rows_out(self) -> bool:
        """Whether a source is read once more to count malformed rows, also where its stream is not read."""
        sources = [n for n in map(self.plan.graph.node, self.graph.nodes) if isinstance(n, g.SourceNode)]
        return any(spark_source(self.plan.name, node).on_malformed != "fail" for node in sources)

    def _source(self, node: g.SourceNode) -> DataFrame:
        source = spark_source(self.plan.name, node)
        rows, unfit = split_malformed(self._read(source, node))
        if unfit is not None:
            self.malformed.append((node, unfit.select(f"{MALFORMED}.*", *self.axis.columns)))
        return rows.select(*source.records.names, *self.axis.columns)

    def _read(self, source: SparkSource[Any], node: g.SourceNode) -> DataFrame:
        if not self.axis.enabled:
            return source.read_partition(self.spark)
        bounded = [cast("g.SourceNode", start.plan.graph.node(node.id)).source for start in self.starts]
        return source.read_partitions(self.spark, cast("list[SparkSource[Any]]", bounded))

    # Event time

    def _with_last_event_times(self, node: g.Node, frame: DataFrame) -> DataFrame:
        """Return what a node emits, and observe the last of the event times that it assigns.

        Only where timers depend on it: observing costs Catalyst its fused code.
        """
        from pyspark.sql import functions as F

        nodes = self.plan.graph.nodes
        waiting = [n.id for n in nodes if n.has_timers and n.id not in self.graph.in_sql]
        if self._carried is not None:
            waiting = [n.id for n in nodes if n.is_told_watermark or n.has_native_windows]
        if not any(node.uid in self.plan.assigners_before(n) for n in waiting):
            return frame

        def report(index: int) -> Column:
            moment = F.when(self.axis.index == index, F.col(TIMESTAMP)) if self.axis.enabled else F.col(TIMESTAMP)
            last = F.max(moment)
            times = F.when(last.isNotNull(), F.create_map(F.lit(node.uid), last))
            none = F.create_map().cast("map<string,int>")
            content = F.struct(none.alias("counters"), times.alias("last_event_times"))
            return F.struct(F.lit(index).alias("partition"), F.to_json(content).alias("report"))

        reports = F.array(*map(report, range(self.axis.count)))
        return self.reports.observe(frame, reports)

    def _last_event_times(self, node: g.Node, frame: DataFrame) -> dict[int, int]:
        """Return the last event times, by partition, of what reaches a node that may have timers.

        They come from the manifests of what the region reads or, where those do not say, from the records.
        """
        if not node.has_timers or node.key == Key():
            return {}
        before = self.plan.assigners_before(node.id)
        known = {index: start.upstream.last_event_time(before) for index, start in enumerate(self.starts)}
        times = {index: time for index, time in known.items() if time is not None}
        assigners = set(self.plan.assigners_of(self.plan.graph.main_inputs(node.id)))
        missing = any(assigners - set(start.upstream.last_event_times) for start in self.starts)
        if missing and TIMESTAMP in frame.columns:
            for index, time in self._probe(frame).items():
                times[index] = max(time, times.get(index, time))
        return times

    def _probe(self, frame: DataFrame) -> dict[int, int]:
        """Return the last event times, by partition, of an input that is not materialized.

        This takes a job of its own, so the input is persisted for the main one.
        """
        from pyspark.sql import functions as F

        persisted = self.persist(frame)
        rows = persisted.groupBy(*self.axis.columns).agg(F.max(TIMESTAMP).alias("last")).collect()
        return {self.axis.index_of(row): row["last"] for row in rows if row["last"] is not None}

    # Broadcast state

    def _with_broadcast(self, frame: DataFrame, ship: Program, input_: BroadcastInput, node_id: int) -> DataFrame:
        """A pass whose head has broadcast state.

        The broadcast records travel with the program to every partition, and to one partition of no other records,
        which alone keeps what the operator emits for them.
        """
        from pyspark.sql import functions as F

        ship = self._given_broadcast(ship, input_, node_id)
        assert ship.broadcast is not None
        followers = replace(ship, broadcast=replace(ship.broadcast, leads=False))
        leader = replace(ship, broadcast=replace(ship.broadcast, alone=True))
        columns = spark_schema(ship.input.schema)
        nothing = self.spark.range(0, 1, 1, 1).select(*[F.lit(None).cast(f.dataType).alias(f.name) for f in columns])
        return self.run_program(frame, followers, node_id).unionByName(
            self.run_program(nothing, leader, (node_id, "leader"))
        )

    def _given_broadcast(self, ship: Program, input_: BroadcastInput, node_id: int) -> Program:
        """Return the program with its broadcast records, in event-time order where they have event times."""
        records = self.united(self.plan.graph.broadcast_inputs(node_id), input_.layout)
        if input_.layout.timestamped:
            records = records.orderBy(TIMESTAMP)
        batches = [declared(b.columns, input_.layout.schema) for b in records.toArrow().to_batches()]
        table = pa.Table.from_batches(batches, input_.layout.schema)
        if input_.layout.timestamped:
            ship = _lasting_until(ship, pc.max(table.column(TIMESTAMP)).as_py())
        data = tuple(encode(b) for b in batches)
        return replace(ship, broadcast=replace(input_, data=data))


def _lasting_until(ship: Program, moment: int | None) -> Program:
    """Return the program with an end of its event time no earlier than `moment`."""
    moments = [t for t in (ship.options.last_event_time, moment) if t is not None]
    return replace(ship, options=replace(ship.options, last_event_time=max(moments, default=None)))


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
        """Return the stream of a port."""
        return LeavingStream(plan.graph.node(port.node).uid, port.tag, plan.layout(port), port)

    @staticmethod
    def to_sink(plan: Plan, region: Region, sink: SinkNode) -> LeavingStream:
        """Return the stream that a sink writes: that of a port, or one of its own if it unites or exchanges several."""
        edges = plan.graph.inputs(sink.id)
        forwarded = len(edges) == 1 and edges[0].partitioning.kind is ExchangeKind.FORWARD
        if forwarded and edges[0].source in region.nodes:
            return LeavingStream.of_port(plan, edges[0].port)
        return LeavingStream(sink.uid, None, StreamLayout(plan.input_layout(sink.id).records), None, sink.id)

    def frame(self, frames: RegionFrames) -> DataFrame:
        """Its rows."""
        if self.port is not None:
            return frames.port(self.port)
        assert self.sink is not None
        return frames.sink_input(self.sink)


def leaving_streams(plan: Plan, region: Region, sinks: Sequence[SinkNode]) -> list[LeavingStream]:
    """Return the streams that leave a region, to later regions, to the next partition and to these sinks; each once."""
    ports = [LeavingStream.of_port(plan, port) for port in (*region.outputs, *region.carried)]
    written = [LeavingStream.to_sink(plan, region, sink) for sink in sinks]
    return list({(stream.uid, stream.tag): stream for stream in (*ports, *written)}.values())


@dataclass(frozen=True)
class Combined:
    """Streams in one DataFrame. In a row of several, `OUTPUT` is the place of its stream in `streams`."""

    frame: DataFrame
    streams: tuple[LeavingStream, ...]


def combine(frames: RegionFrames, streams: Sequence[LeavingStream]) -> Combined:
    """Return the streams in one DataFrame: as the pass that emits them all combined them, or united."""
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
        column = output_column(number)
        columns = [F.lit(number).cast("int").alias(OUTPUT)]
        columns += map(F.col, frames.axis.columns)
        for field in list(schema)[1:-1]:
            value = F.struct(*map(F.col, stream.layout.schema.names)) if field.name == column else F.lit(None)
            columns.append(value.cast(field.dataType).alias(field.name))
        frame = stream.frame(frames).select(*columns)
        united = frame if united is None else united.unionByName(frame)
    assert united is not None
    return united


@dataclass(frozen=True)
class Materialized:
    """The result of a job: the streams and their schema, and for each partition the rows by stream and the metrics."""

    streams: Sequence[LeavingStream]
    schema: str
    rows: Sequence[Sequence[int]]
    metrics: Sequence[Metrics]


def materialize(frames: RegionFrames, streams: Sequence[LeavingStream], attempt: UPath) -> Materialized:
    """Write the streams of one partition into the folder of an attempt, in one job."""
    from pyspark.sql import Observation

    combined, counts = combine(frames, streams), Observation()
    frame = _counted(combined, counts)
    intermediates.write(frame, attempt)
    report = observed(counts)
    rows = [int(report.get(f"rows{number}") or 0) for number in range(len(streams))]
    return Materialized(combined.streams, frame.schema.json(), [rows], frames.metrics())


def _counted(combined: Combined, counts: Observation) -> DataFrame:
    """Return the rows, which Spark counts by stream while it writes them."""
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
    filled = intermediates.write_partitions(frame, attempts)
    written = intermediates.indexed(runs[0].spark, schema, filled)
    rows = intermediates.counted(written, len(runs), len(streams))
    return Materialized(combined.streams, schema, rows, frames.metrics())


def manifests_of(
    runs: Sequence[Run],
    region: Region,
    frames: RegionFrames,
    materialized: Materialized,
    attempts: Sequence[UPath],
    carried_from: str,
    seen: Metrics,
    positions: Sequence[Mapping[str, Position]],
    reads: Sequence[Mapping[str, Read]],
) -> list[Manifest]:
    """Return the manifests of the partitions, without what their sinks wrote."""
    manifests = []
    for run, start, attempt, reported, rows, read_until, read in zip(
        runs, frames.starts, attempts, materialized.metrics, materialized.rows, positions, reads, strict=True
    ):
        metrics = merge([reported, start.upstream, seen])
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
                schema=materialized.schema,
                streams=[StoredStream(s.uid, s.tag, n) for s, n in zip(materialized.streams, rows, strict=True)],
                rows=_emitted(run.plan, zip(materialized.streams, rows, strict=True)),
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
                local_global=[node.uid for node in carrying if node.merges_partials],
                groups=run.plan.execution.streaming.max_parallelism if region.carried and not only_saved(runs) else 0,
                together=len(runs),
                positions=dict(read_until),
                read=dict(read),
                lacking=files_lacking_columns(n for n in run.plan.graph.sources if n.id in region.nodes),
            )
        )
        if run.carry is not None:
            carried_from, seen = run.run_id, Metrics(last_event_times=metrics.last_event_times)
    return manifests


def _emitted(plan: Plan, counted: Iterable[tuple[LeavingStream, int]]) -> int:
    """Return how many records a stage emitted. A stream that is written for each of several joins counts once."""
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
    """Count malformed rows in the manifests, and keep those of sources that divert them."""
    for node, frame in frames.malformed:
        axis = frames.axis
        counts = {axis.index_of(row): row["count"] for row in frame.groupBy(*axis.columns).count().collect()}
        diverted = cast("SparkSource[Any]", node.source).keeps_malformed()
        name = "malformed rows diverted" if diverted else "malformed rows dropped"
        for index, (run, manifest) in enumerate(zip(runs, manifests, strict=True)):
            rows = counts.get(index, 0)
            if rows:
                manifest.counters[name] = manifest.counters.get(name, 0) + rows
            if diverted:
                manifest.diverted[node.uid] = rows
                rows_of_partition = axis.rows_of(frame, index)
                malformed.keep(
                    rows_of_partition, rows, malformed.in_batch(run.store, run.plan.name, node), run.partition
                )
