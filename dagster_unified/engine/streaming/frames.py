"""Builds a query's streaming DataFrame: heads, levels and passes in a line, packed; or, for native aggregates, columns.

Knows Spark's DataFrame API. Lazy: nothing runs here.
"""

from __future__ import annotations

from collections.abc import Collection, Hashable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import pyarrow as pa

from dagster_unified.connectors.base import MALFORMED, SparkSource, spark_schema
from dagster_unified.engine.dataframe.native import MOMENT, Natives, with_event_time
from dagster_unified.engine.dataframe.regions import RegionFrames
from dagster_unified.engine.failures import naming_operator
from dagster_unified.engine.streaming import worker
from dagster_unified.engine.streaming.control import NAME, ControlSource
from dagster_unified.engine.streaming.processor import KeyGroupProcessor
from dagster_unified.engine.streaming.topology import Head, Native, Topology
from dagster_unified.engine.translate import input_layout
from dagster_unified.engine.worker import shipped
from dagster_unified.errors import PipelineError, UnsupportedError
from dagster_unified.graph import nodes as g
from dagster_unified.graph.plan import Plan, Port, Region
from dagster_unified.operators.lanes import PACKED, Place, Route, sequence
from dagster_unified.operators.layout import METRICS, TIMESTAMP, combined_schema
from dagster_unified.operators.program.spec import Program

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession
    from upath import UPath

END = 253_402_300_799_000
"""The last moment that Spark's timestamps reach (the year 9999), in milliseconds."""

MALFORMED_ROW = pa.schema([("file", pa.string()), ("row", pa.string()), ("reason", pa.string())])


@dataclass
class StreamFrames(RegionFrames):
    """The native frames of a stream: as in BATCH, but read as streams, and without what needs a job of its own."""

    sources: UPath | None = None
    control: UPath | None = None
    """Where the end of input is told, for windows to close."""

    def _read(self, source: SparkSource[Any], node: g.SourceNode) -> DataFrame:
        assert self.sources is not None
        return source.read_stream(self.spark, self.sources / node.uid)

    def _kept(self, frame: DataFrame) -> DataFrame:
        return frame  # a query has one reader

    def _map(self, frame: DataFrame, ship: Program, place: Hashable) -> DataFrame:
        from pyspark.sql import functions as F

        mapped = frame.mapInArrow(
            self.shipments.once(place, lambda: shipped(ship)),
            spark_schema(combined_schema(tuple(o.layout for o in ship.outputs))),
        )
        return mapped.where(F.col(METRICS).isNull()).drop(METRICS)

    def _timestamps(self, node: g.AssignTimestampsNode, frame: DataFrame) -> DataFrame:
        return with_event_time(node, frame)

    def _timed(self, node: g.WindowAggregateNode, frame: DataFrame) -> DataFrame:
        """With Spark's watermark, by the strategy of the one assigner; at the end of input a row of the control stream
        moves it to its end.

        Spark has one watermark for a query, which is the latest of all its sources': so there can be but one assigner.
        """
        from pyspark.sql import functions as F

        where = f"{self.plan.name}: operator '{node.name}'"
        before = self.plan.assigners_before(node.id)
        assigners = [n for n in self.plan.graph.nodes if isinstance(n, g.AssignTimestampsNode) and n.uid in before]
        assert self.control is not None
        if len(assigners) != 1:
            raise UnsupportedError(
                f"{where}: its event times come from {' and '.join(n.name for n in assigners)}, and a native window has"
                " one watermark in STREAMING; assign timestamps once, after the union, or use aggregate(...) instead"
                " of agg(...)"
            )
        if assigners[0].generator is not None:
            raise UnsupportedError(
                f"{where}: '{assigners[0].name}' has a watermark generator, and a native window goes by Spark's"
                " watermark in STREAMING, which has a bound; use aggregate(...) instead of agg(...)"
            )
        bound = assigners[0].max_out_of_orderness_ms
        if bound is None:
            raise UnsupportedError(
                f"{where}: '{assigners[0].name}' makes no watermarks, which a native window needs in STREAMING; give"
                " the strategy a bound"
            )
        self.spark.dataSource.register(ControlSource)
        events = (
            self.spark.readStream.format(NAME)
            .option("path", str(self.control))
            .load()
            .where(F.get_json_object("event", "$.end") == "true")
        )
        nothing = [F.lit(None).cast(f.dataType).alias(f.name) for f in frame.schema if f.name != MOMENT]
        end = events.select(*nothing, F.timestamp_millis(F.lit(END)).alias(MOMENT))
        early = self.natives.raised(
            node,
            "a record is from before 1970, where Spark's watermark begins, so that its native window is lost in"
            " STREAMING; use aggregate(...) instead of agg(...)",
        )
        frame = frame.withColumn(MOMENT, F.when(F.col(TIMESTAMP) < 0, early.cast("timestamp")).otherwise(F.col(MOMENT)))
        both = frame.unionByName(end).withWatermark(MOMENT, f"{bound} milliseconds")
        return both.where(F.col(MOMENT) < F.timestamp_millis(F.lit(END)))


@dataclass
class PackedFrames:
    """The line of stages of one query."""

    plan: Plan
    topology: Topology
    spark: SparkSession
    folder: UPath
    control: UPath
    malformed: dict[str, int] = field(default_factory=dict)
    tables: list[DataFrame] = field(default_factory=list)
    """What lookups read."""

    """For each source that diverts what does not fit, the lane in which it goes."""

    def build(self) -> DataFrame:
        """Every row of the query's output, packed, with its reports."""
        groups = self.plan.execution.streaming.max_parallelism
        packed = spark_schema(PACKED)
        frames = [self._head(head, groups) for head in self.topology.heads]
        if self.topology.timed:
            frames.append(self._control(groups))
        frame = frames[0]
        for other in frames[1:]:
            frame = frame.unionByName(other)
        for native in self.topology.natives[0]:
            frame = self._natively(frame, native, groups)
        for level, tracks, natives in zip(
            self.topology.levels, self.topology.passes, self.topology.natives[1:], strict=True
        ):
            processor = KeyGroupProcessor(worker.payload_of(dict(level), level.values()))
            frame = frame.groupBy("lane", "group").transformWithState(processor, packed, "Append", "None")
            if tracks:
                frame = frame.mapInArrow(worker.between(tracks, groups), packed)
            for native in natives:
                frame = self._natively(frame, native, groups)
        return frame

    def _natively(self, frame: DataFrame, native: Native, groups: int) -> DataFrame:
        """Native operators on one lane's rows, which for this become columns; the other lanes' rows pass beside
        them.
        """
        from pyspark.sql import functions as F

        schema = worker.beside(input_layout(self.plan, native.nodes[0]).schema)
        wide = frame.mapInArrow(worker.spread(native.lane, schema), spark_schema(schema))
        natives = Natives(self.plan.name, self.plan.graph.node(native.nodes[0]).name, self.spark, self.tables)
        others = F.col(worker.LANE) != native.lane
        for number in native.nodes:
            node = self.plan.graph.node(number)
            assert isinstance(node, g.NativeNode)
            kept = [*worker.BESIDE, *([TIMESTAMP] if node.timestamped and TIMESTAMP in wide.columns else [])]
            with naming_operator(self.plan.name, node):
                wide = natives.operation(node, wide, kept, others)
        return wide.mapInArrow(worker.gather(native.lane, native.track, groups), spark_schema(PACKED))

    def lane(self, frame: DataFrame, lane: int, schema: pa.Schema) -> DataFrame:
        """One stream out of packed rows, in its own columns."""
        from pyspark.sql import functions as F

        return frame.where(F.col("lane") == lane).select("data").mapInArrow(worker.unpack(schema), spark_schema(schema))

    def _head(self, head: Head, groups: int) -> DataFrame:
        node = self.plan.graph.node(head.source)
        assert isinstance(node, g.SourceNode)
        if not isinstance(node.source, SparkSource):
            raise PipelineError(
                f"{self.plan.name}: source '{node.name}' is a {type(node.source).__name__}, which Spark cannot read"
            )
        frame = node.source.read_stream(self.spark, self.folder / "sources" / node.uid)
        route = None
        if MALFORMED in frame.columns:
            if node.source.keeps_malformed():
                route = Route(0, self.malformed[node.uid], MALFORMED_ROW, tuple(MALFORMED_ROW.names))
            if head.native:
                raise _native_behind(self.plan, node)
        else:
            frame = frame.select(*node.source.records.names)
        if head.native:
            region = Region(-1, node.name, (), (head.source, *head.native), (), (), (), "")
            native = StreamFrames(
                self.plan, region, self.spark, _nothing, tables=self.tables, sources=self.folder / "sources"
            )
            frame = native.port(Port(head.native[-1])).select(*head.track.program.input.records.names)
        return frame.mapInArrow(worker.head(head.track, groups, route), spark_schema(PACKED))

    def _control(self, groups: int) -> DataFrame:
        from pyspark.sql import functions as F

        self.spark.dataSource.register(ControlSource)
        events = self.spark.readStream.format(NAME).option("path", str(self.control)).load()
        lanes = F.explode(F.array(*[F.lit(lane).cast("int") for lane in sorted(self.topology.timed)])).alias("lane")
        addressed = events.select("event", lanes).select(
            "event", "lane", F.explode(F.sequence(F.lit(0), F.lit(groups - 1))).alias("group")
        )
        seq = F.lit(sequence(Place.EVENT, 0)).cast("long").alias("seq")
        return addressed.select("lane", "group", seq, F.col("event").cast("binary").alias("data"))


def _native_behind(plan: Plan, node: g.SourceNode) -> UnsupportedError:
    return UnsupportedError(
        f"{plan.name}: source '{node.name}' drops or diverts malformed rows and has native operators behind it, which"
        " STREAMING cannot run; use on_malformed='fail', or a Python operator first"
    )


def _nothing(port: Port) -> DataFrame:
    raise PipelineError(f"stream {port} is not in this region")


def read_again(tables: Iterable[DataFrame]) -> None:
    """Lets the tables that a running query reads in each micro-batch see files that came since; Spark lists them
    once.
    """
    for table in tables:
        plan: Any = table._jdf.queryExecution().analyzed()
        leaves = plan.collectLeaves()
        for number in range(leaves.size()):
            leaf = leaves.apply(number)
            if (
                leaf.getClass().getSimpleName() == "LogicalRelation"
                and leaf.relation().getClass().getSimpleName() == "HadoopFsRelation"
            ):
                leaf.relation().location().refresh()


def native_frame(
    plan: Plan,
    spark: SparkSession,
    aggregate: int,
    members: Sequence[int],
    folder: UPath,
    control: UPath,
    tables: list[DataFrame],
    packed: Collection[int] = (),
) -> DataFrame:
    """The stream of a native aggregate, from its sources: in each micro-batch the keys that changed, or the windows
    that closed.

    The query of lanes reads the sources in `packed` as well, and counts and keeps their malformed rows.
    """
    region = Region(-1, plan.graph.node(aggregate).name, (), tuple(members), (), (), (), "")
    frames = StreamFrames(plan, region, spark, _nothing, tables=tables, sources=folder / "sources", control=control)
    built = frames.port(Port(aggregate))
    for node, _ in frames.malformed:
        if node.id not in packed:
            raise UnsupportedError(
                f"{plan.name}: source '{node.name}' drops or diverts malformed rows, and only native aggregates read"
                " it, which STREAMING cannot run; use on_malformed='fail', or aggregate with reduce(...) or a function"
            )
    return built
