"""Builds the DataFrames of a region in BATCH, for one partition or several.

Knows the plan and Spark's DataFrame API (no RDDs, no JVM handles: it runs on Connect as well). Lazy: nothing runs here,
except the probe for the last event time that a fully pipelined job with timers needs, and the collecting of broadcast
records.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, cast

import pyarrow as pa
import pyarrow.compute as pc

from dagster_unified.connectors.protocol.frame import MALFORMED, spark_schema
from dagster_unified.connectors.protocol.source import SparkSource
from dagster_unified.engine.batch.carried import CarriedState, PartitionStart, StateBefore, exports_rows
from dagster_unified.engine.batch.iterate import Iterations
from dagster_unified.engine.dataframe.frames import Frames
from dagster_unified.engine.dataframe.inputs import spark_source, split_malformed
from dagster_unified.engine.dataframe.native import Natives
from dagster_unified.engine.dataframe.partitions import PartitionAxis
from dagster_unified.engine.iterations.spark_loop import IterationInputs
from dagster_unified.graph import nodes as g
from dagster_unified.graph.execution_graph import ExecutionGraph, Vertex
from dagster_unified.graph.nodes import Key
from dagster_unified.graph.plan import Plan, Port, Region
from dagster_unified.operators.layout import TIMESTAMP, declared
from dagster_unified.operators.metrics import Metrics, merge
from dagster_unified.operators.packing import encode
from dagster_unified.operators.program.spec import BroadcastInput, Program

if TYPE_CHECKING:
    from pyspark.sql import Column, DataFrame, SparkSession


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
        """The totals that operators reported, by partition; call it after the region's job has run."""
        found = self.reports.metrics()
        return found if self._iterations is None else [merge([found[0], *self._iterations.metrics]), *found[1:]]

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
        """An output of an iteration, which runs when the first of them is asked for."""
        if port not in self._iterated:
            assert self._iterations is not None
            given = functools.cache(lambda: self._inputs_of(node))
            if self._leaves_rows_out:
                given()
            self._iterated.update(self._iterations.outputs(node, given))
        return self._iterated[port]

    def _inputs_of(self, node: g.IterationNode) -> IterationInputs:
        """The inputs of an iteration, which one that goes on does not read again: nothing is observed of them then."""
        frames, reported = self.reports.take(lambda: self.inputs_of_iteration(node))
        return IterationInputs(frames, lambda: merge(reported()))

    @property
    def _leaves_rows_out(self) -> bool:
        """Whether rows that do not fit are counted by reading a source once more, also where its stream is not."""
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
        """What a node emits; the last of the event times that it assigns is observed.

        Only where timers depend on it, since observing costs Catalyst its fused code.
        """
        from pyspark.sql import functions as F

        nodes = self.plan.graph.nodes
        waiting = [n.id for n in nodes if n.has_timers]
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
        """The last event times of what reaches a node that may have timers, by partition.

        They come from the manifests of what the region reads or, where those do not say, from the records.
        """
        if not node.has_timers or node.key == Key():
            return {}
        before = self.plan.assigners_before(node.id)
        known = {index: start.upstream.last_event_time(before) for index, start in enumerate(self.starts)}
        found = {index: time for index, time in known.items() if time is not None}
        assigners = set(self.plan.assigners_of(self.plan.graph.main_inputs(node.id)))
        missing = any(assigners - set(start.upstream.last_event_times) for start in self.starts)
        if missing and TIMESTAMP in frame.columns:
            for index, time in self._probe(frame).items():
                found[index] = max(time, found.get(index, time))
        return found

    def _probe(self, frame: DataFrame) -> dict[int, int]:
        """The last event times of an input that is not materialized, by partition.

        This takes a job of its own; its input is persisted for the main one.
        """
        from pyspark.sql import functions as F

        persisted = self.persist(frame)
        rows = persisted.groupBy(*self.axis.columns).agg(F.max(TIMESTAMP).alias("last")).collect()
        return {self.axis.index_of(row): row["last"] for row in rows if row["last"] is not None}

    # Broadcast state

    def _with_broadcast(self, frame: DataFrame, ship: Program, given: BroadcastInput, node_id: int) -> DataFrame:
        """A pass whose head has broadcast state.

        The broadcast records travel with the program to every partition, and to one partition of no other records,
        which alone keeps what the operator emits for them.
        """
        from pyspark.sql import functions as F

        ship = self._given_broadcast(ship, given, node_id)
        assert ship.broadcast is not None
        followers = replace(ship, broadcast=replace(ship.broadcast, leads=False))
        leader = replace(ship, broadcast=replace(ship.broadcast, alone=True))
        columns = spark_schema(ship.input.schema)
        nothing = self.spark.range(0, 1, 1, 1).select(*[F.lit(None).cast(f.dataType).alias(f.name) for f in columns])
        return self.run_program(frame, followers, node_id).unionByName(
            self.run_program(nothing, leader, (node_id, "leader"))
        )

    def _given_broadcast(self, ship: Program, given: BroadcastInput, node_id: int) -> Program:
        """The program with its broadcast records, in event-time order where they have event times."""
        records = self.united(self.plan.graph.broadcast_inputs(node_id), given.layout)
        if given.layout.timestamped:
            records = records.orderBy(TIMESTAMP)
        batches = [declared(b.columns, given.layout.schema) for b in records.toArrow().to_batches()]
        table = pa.Table.from_batches(batches, given.layout.schema)
        if given.layout.timestamped:
            ship = _lasting_until(ship, pc.max(table.column(TIMESTAMP)).as_py())
        data = tuple(encode(b) for b in batches)
        return replace(ship, broadcast=replace(given, data=data))


def _lasting_until(ship: Program, moment: int | None) -> Program:
    """A program whose event time ends no earlier than at a moment."""
    moments = [t for t in (ship.options.last_event_time, moment) if t is not None]
    return replace(ship, options=replace(ship.options, last_event_time=max(moments, default=None)))
