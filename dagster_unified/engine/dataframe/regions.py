"""Builds a region's DataFrames: one Python pass per connected set of Python operators, everything else left to
Catalyst.

Knows the plan and Spark's DataFrame API (no RDDs, no JVM handles: it runs on Connect as well). Lazy: nothing runs here,
but for the event-time probe that a fully pipelined job with timers needs, and for fetching broadcast records.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, cast

import msgspec
import pyarrow as pa
import pyarrow.compute as pc

from dagster_unified.connectors.base import MALFORMED, SparkSource, spark_schema
from dagster_unified.engine.dataframe.aggregates import CarriedAggregate
from dagster_unified.engine.dataframe.native import Natives, with_event_time
from dagster_unified.engine.failures import naming_operator
from dagster_unified.engine.shipping import Shipments, by_value
from dagster_unified.engine.translate import input_layout, program, runs_in_python
from dagster_unified.engine.worker import shipped
from dagster_unified.errors import PipelineError
from dagster_unified.graph import nodes as g
from dagster_unified.graph.nodes import Edge, ExchangeKind, Key
from dagster_unified.graph.plan import Plan, Port, Region
from dagster_unified.operators.drivers.carried import GROUP, PAGE, STATE
from dagster_unified.operators.drivers.key_groups import ControlEvent
from dagster_unified.operators.lanes import encode
from dagster_unified.operators.layout import (
    CARRIED,
    METRICS,
    OUTPUT,
    PART,
    PART_FIELD,
    TIMESTAMP,
    StreamLayout,
    combined_schema,
    key_column,
    output_column,
)
from dagster_unified.operators.metrics import Metrics, merge
from dagster_unified.operators.program.spec import BroadcastInput, CarryOver, Output, Program
from dagster_unified.operators.time import MAX_TIMESTAMP, MIN_TIMESTAMP

if TYPE_CHECKING:
    from pyspark.sql import Column, DataFrame, Observation, SparkSession

Intermediate = Callable[[Port], "DataFrame"]
"""Gives the stream of another region's port."""


@dataclass
class Pass:
    """One Python pass: the operators in it, the streams that leave it, and its combined DataFrame."""

    members: tuple[int, ...]
    outputs: tuple[Port, ...]
    frame: DataFrame | None = None


@dataclass(frozen=True)
class Part:
    """What a region's run for one partition begins with: its plan, the last event times of its inputs, and, where state
    is carried, the control events between which it runs.
    """

    plan: Plan
    upstream: Metrics = field(default_factory=Metrics)
    """From the manifests."""

    begin: ControlEvent = field(default_factory=ControlEvent)
    end: ControlEvent = field(default_factory=ControlEvent)

    def over(self, node: g.Node) -> CarryOver:
        """How one operator begins and ends."""
        return CarryOver(self.begin.watermarks.get(node.uid, MIN_TIMESTAMP), msgspec.json.encode(self.end))


@dataclass
class RegionFrames:
    """The lazy DataFrames of one region."""

    plan: Plan
    region: Region
    spark: SparkSession
    intermediate: Intermediate
    parts: Sequence[Part] = ()
    """The partitions that are processed. Of several every row tells its own, in the column `PART`."""

    state: Callable[[Port], DataFrame | None] | None = None
    """What the partition before the first left, where state is carried."""

    observations: list[Observation] = field(default_factory=list)
    malformed: list[tuple[g.SourceNode, DataFrame]] = field(default_factory=list)
    """The rows that do not fit, by source."""

    persisted: list[DataFrame] = field(default_factory=list)
    tables: list[DataFrame] = field(default_factory=list)
    """What lookups read."""

    _ports: dict[Port, DataFrame] = field(default_factory=dict)
    _aggregates: dict[int, CarriedAggregate] = field(default_factory=dict)
    passes: list[Pass] = field(default_factory=list)
    shipments: Shipments = field(default_factory=Shipments)
    """What workers are sent. In STREAMING every epoch has frames of its own, and shares these."""

    def __post_init__(self) -> None:
        self.parts = self.parts or (Part(self.plan),)
        self.natives = Natives(self.plan.name, self.region.name, self.spark, self.tables)
        self.passes = self._find_passes()

    @property
    def beside(self) -> list[str]:
        """The columns that stay beside a stream's own through every operator."""
        return [PART] if len(self.parts) > 1 else []

    def port(self, port: Port) -> DataFrame:
        """A stream of this region or, through `intermediate`, of an earlier one; in the columns of its layout."""
        if port.node not in self.region.nodes:
            return self.intermediate(port)
        if port not in self._ports:
            self._ports[port] = self._build(port)
        return self._ports[port]

    def sink_input(self, sink: int) -> DataFrame:
        """What a sink is to write: the records' columns only."""
        return self.stream(sink).select(*input_layout(self.plan, sink).records.names, *self.beside)

    def whole_pass(self, ports: tuple[Port, ...]) -> DataFrame | None:
        """The combined DataFrame of the one pass that gives exactly these streams, if there is one."""
        for one in self.passes:
            if one.outputs == ports and len(ports) > 1:
                return self._run(one)
        return None

    def metrics(self) -> list[Metrics]:
        """The totals that the passes reported for each partition; to be called after the region's job has run."""
        reports = [r for o in self.observations for r in observed(o).get("reports") or []]
        return [merge(r["report"] for r in reports if r["part"] == part) for part in range(len(self.parts))]

    def release(self) -> None:
        """Frees what was kept for several readers."""
        for frame in self.persisted:
            frame.unpersist()

    def _find_passes(self) -> list[Pass]:
        graph = self.plan.graph
        task_of = {o: t.id for t in self.plan.tasks for o in t.operators}
        groups: list[list[int]] = []
        for node_id in self.region.nodes:
            node = graph.node(node_id)
            edges = graph.inputs(node_id)
            joined = None
            if (
                len(edges) == 1
                and edges[0].partitioning.kind is ExchangeKind.FORWARD
                and task_of[edges[0].source] == task_of[node_id]
            ):
                joined = next((group for group in groups if edges[0].source in group), None)
            by_field = isinstance(node, g.AssignTimestampsNode) and not runs_in_python(node)
            if joined is not None and (runs_in_python(node) or by_field):
                joined.append(node_id)
            elif runs_in_python(node):
                groups.append([node_id])
        return [Pass(tuple(group), self._leaving(group)) for group in groups]

    def _leaving(self, group: list[int]) -> tuple[Port, ...]:
        found = [
            Port(e.source, e.tag.name if e.tag else None)
            for e in self.plan.graph.edges
            if e.source in group and e.target not in group
        ]
        return (*dict.fromkeys(found), *[p for p in self.region.carried if p.node in group])

    def _build(self, port: Port) -> DataFrame:
        one = next((p for p in self.passes if port.node in p.members), None)
        layout = self.plan.layout(port)
        if one is not None:
            frame = self._run(one)
            if len(one.outputs) == 1:
                return frame
            number = one.outputs.index(port)
            column = output_column(number)
            return frame.where(f"{OUTPUT} = {number}").select(
                *[f"{column}.{name}" for name in layout.schema.names], *self.beside
            )
        node = self.plan.graph.node(port.node)
        carries = isinstance(node, (g.AggregateNode, g.WindowAggregateNode)) and self.state is not None
        with naming_operator(self.plan.name, node):
            frame = self._carried_aggregate(node, port) if carries else self._native(node)
        return self._with_keys(port, frame, layout) if layout.keys else frame

    def _run(self, one: Pass) -> DataFrame:
        """The pass's combined DataFrame, with its reports taken out on the way."""
        if one.frame is None:
            head = one.members[0]
            node = self.plan.graph.node(head)
            ship = program(self.plan, self.region.name, one.members, one.outputs)
            if self.state is not None and isinstance(node, g.KeyedNode):
                ship = replace(
                    self._timed_program(ship, [None] * len(self.parts)),
                    carry=tuple(part.over(node) for part in self.parts),
                )
                frame = self._carrying(node, ship.input, self.state(Port(head, CARRIED)))
            else:
                frame = self.stream(head)
                ship = self._timed_program(ship, self._last_event_times(node, frame))
                frame = frame.select(*ship.input.schema.names, *self.beside)
                frame = frame if isinstance(node, g.KeyedNode) else self._by_part(frame)
            one.frame = (
                self._map(frame, ship, one.members)
                if ship.broadcast is None
                else self._with_broadcast(frame, ship, ship.broadcast, head)
            )
            readers = len([p for p in self.region.carried if p.node in one.members]) + sum(
                1 for e in self.plan.graph.edges if e.source in one.members and e.target not in one.members
            )
            if readers > 1 and self.whole_pass_differs(one):
                one.frame = self._kept(one.frame)
        return one.frame

    def _last_event_times(self, node: g.Node, frame: DataFrame) -> list[int | None]:
        """The last event times of what reaches a node that may have timers, by partition: from the manifests, or by a
        look at the records.
        """
        if not isinstance(node, g.KeyedProcessNode) or node.key == Key():
            return [None] * len(self.parts)
        known = [part.upstream.last_event_time(self.plan.assigners_before(node.id)) for part in self.parts]
        assigners = set(self.plan.assigners_of(self.plan.graph.main_inputs(node.id)))
        missing = any(assigners - set(part.upstream.last_event_times) for part in self.parts)
        found = self._probe(frame) if missing and TIMESTAMP in frame.columns else {}
        return [
            max((t for t in (of, found.get(number)) if t is not None), default=None) for number, of in enumerate(known)
        ]

    def _by_part(self, frame: DataFrame) -> DataFrame:
        """Rows that have no other order, so that a program sees one partition after another."""
        return frame.sortWithinPartitions(*self.beside) if self.beside else frame

    def _timed_program(self, ship: Program, times: Sequence[int | None]) -> Program:
        """A program that knows when the event times of its partitions end."""
        return (
            replace(ship, last_event_times=tuple(times))
            if self.beside
            else replace(ship, options=replace(ship.options, last_event_time=times[0]))
        )

    def _kept(self, frame: DataFrame) -> DataFrame:
        """What several readers share is computed once."""
        self.persisted.append(frame.persist())
        return self.persisted[-1]

    def whole_pass_differs(self, one: Pass) -> bool:
        """Whether a pass with several readers would run once for each of them: not where its outputs leave the region
        together.
        """
        return not set(one.outputs) <= set(self.region.outputs) | set(self.region.carried) | {
            Port(e.source, e.tag.name if e.tag else None) for s in self.region.sinks for e in self.plan.graph.inputs(s)
        }

    def _map(self, frame: DataFrame, ship: Program, place: Hashable) -> DataFrame:
        from pyspark.sql import Observation
        from pyspark.sql import functions as F

        schema = combined_schema(tuple(o.layout for o in ship.outputs))
        observation = Observation()
        self.observations.append(observation)
        mapped = frame.mapInArrow(
            self.shipments.once(place, lambda: shipped(ship)),
            spark_schema(schema.append(PART_FIELD) if self.beside else schema),
        )
        report = F.struct((F.col(PART) if self.beside else F.lit(0)).alias("part"), F.col(METRICS).alias("report"))
        reports = F.collect_list(F.when(F.col(METRICS).isNotNull(), report)).alias("reports")
        return mapped.observe(observation, reports).where(F.col(METRICS).isNull()).drop(METRICS)

    def _with_broadcast(self, frame: DataFrame, ship: Program, given: BroadcastInput, node_id: int) -> DataFrame:
        """A pass whose head has broadcast state: its records travel with the program to every partition, and to one
        that does nothing else, which leads.
        """
        from pyspark.sql import functions as F

        records = self._united(self.plan.graph.broadcast_inputs(node_id), given.layout)
        if given.layout.timestamped:
            records = records.orderBy(TIMESTAMP)
        table = records.toArrow().cast(given.layout.schema)
        if given.layout.timestamped:
            moments = (ship.options.last_event_time, pc.max(table.column(TIMESTAMP)).as_py())
            ship = replace(
                ship,
                options=replace(ship.options, last_event_time=max((t for t in moments if t is not None), default=None)),
            )
        data = tuple(
            encode(pa.RecordBatch.from_arrays(b.columns, schema=given.layout.schema)) for b in table.to_batches()
        )
        followers = self._map(frame, replace(ship, broadcast=replace(given, data=data, leads=False)), node_id)
        columns = spark_schema(ship.input.schema)
        nothing = self.spark.range(0, 1, 1, 1).select(*[F.lit(None).cast(f.dataType).alias(f.name) for f in columns])
        leader = self._map(nothing, replace(ship, broadcast=replace(given, data=data, alone=True)), (node_id, "leader"))
        return followers.unionByName(leader)

    def _with_keys(self, port: Port, frame: DataFrame, layout: StreamLayout) -> DataFrame:
        """Keys that functions compute, after an operator that runs in Catalyst."""
        bare = StreamLayout(layout.records, layout.timestamped)
        ship = Program(self.plan.name, self.region.name, bare, (), (Output(-1, layout),))
        return self._map(self._by_part(frame), self._timed_program(ship, [None] * len(self.parts)), port)

    def _probe(self, frame: DataFrame) -> dict[int, int]:
        """The last event times of an input that is not materialized, by partition: a job of its own, over what is then
        kept for the main one.
        """
        from pyspark.sql import functions as F

        frame.persist()
        self.persisted.append(frame)
        found = frame.groupBy(*self.beside).agg(F.max(TIMESTAMP).alias("last")).collect()
        return {row[PART] if self.beside else 0: row["last"] for row in found if row["last"] is not None}

    # What reaches an operator

    def stream(self, node_id: int) -> DataFrame:
        """A node's inputs united, partitioned as their exchange says, and sorted where the node is keyed."""
        node = self.plan.graph.node(node_id)
        layout = input_layout(self.plan, node_id)
        edges = self.plan.graph.main_inputs(node_id)
        return self._exchanged(self._united(edges, layout), edges[0], node, layout)

    def _united(self, edges: Sequence[Edge], layout: StreamLayout) -> DataFrame:
        frame = self._aligned(edges[0], layout)
        for edge in edges[1:]:
            frame = frame.unionByName(self._aligned(edge, layout))
        return frame

    def _aligned(self, edge: Edge, layout: StreamLayout) -> DataFrame:
        from pyspark.sql import functions as F

        port = Port(edge.source, edge.tag.name if edge.tag else None)
        frame = self.port(port)
        own = self.plan.layout(port)
        columns: list[Column] = [F.col(name) for name in own.records.names]
        if layout.timestamped:
            columns.append(F.col(TIMESTAMP) if own.timestamped else F.lit(None).cast("long").alias(TIMESTAMP))
        computed = edge.partitioning.key.computed if edge.partitioning.key is not None else None
        if computed is not None:
            columns.append(F.col(key_column(own.keys.index(computed))).alias(key_column(0)))
        return frame.select(*columns, *self.beside)

    def _exchanged(self, frame: DataFrame, edge: Edge, node: g.Node, layout: StreamLayout) -> DataFrame:
        from pyspark.sql import functions as F

        kind = edge.partitioning.kind
        count = node.parallelism or self.plan.execution.parallelism
        if kind is ExchangeKind.HASH:
            if isinstance(node, g.NativeKeyedNode):
                return frame  # Catalyst shuffles by itself, after it has aggregated in part
            keys = [*self.beside, *_key_columns(edge)]
            spread = frame.repartition(count, *keys) if count else frame.repartition(*keys)
            if not isinstance(node, g.KeyedNode):
                return spread
            return (
                spread.sortWithinPartitions(*keys, TIMESTAMP)
                if layout.timestamped
                else spread.sortWithinPartitions(*keys)
            )
        if kind in (ExchangeKind.REBALANCE, ExchangeKind.RESCALE, ExchangeKind.SHUFFLE):
            return (
                frame.repartition(count)
                if count
                else frame.repartition(F.rand() if kind is ExchangeKind.SHUFFLE else F.spark_partition_id())
            )
        if kind is ExchangeKind.GLOBAL:
            return frame.coalesce(1)
        if kind is ExchangeKind.CUSTOM:
            return self._custom(frame, edge, node, count)
        if kind is ExchangeKind.BROADCAST:
            return self._broadcast(frame, count or 1)
        return frame.coalesce(count) if count and not self._spread(edge, count) else frame

    def _spread(self, edge: Edge, count: int) -> bool:
        """Whether an exchange upstream has left `count` partitions already.

        To coalesce them to as many would number them anew.
        """
        while edge.source in self.region.nodes:
            node, inputs = self.plan.graph.node(edge.source), self.plan.graph.main_inputs(edge.source)
            if (
                len(inputs) != 1
                or (node.parallelism or self.plan.execution.parallelism) != count
                or isinstance(node, g.NativeKeyedNode)
            ):
                return False
            edge = inputs[0]
            if edge.partitioning.kind is not ExchangeKind.FORWARD:
                return True
        return False

    def _carrying(self, node: g.KeyedNode, layout: StreamLayout, state: DataFrame | None) -> DataFrame:
        """A keyed node's records by key group, after the state that the partition before left of each."""
        from pyspark.sql import functions as F

        edges = self.plan.graph.main_inputs(node.id)
        keys, groups = _key_columns(edges[0]), self.plan.execution.streaming.max_parallelism
        records = self._united(edges, layout).select(
            *layout.schema.names, F.pmod(F.hash(*keys), F.lit(groups)).alias(GROUP), *self.beside
        )
        if state is None:
            frame = records.withColumns({PAGE: F.lit(None).cast("bigint"), STATE: F.lit(None).cast("binary")})
        else:
            kept = (F.col("group").cast("int").alias(GROUP), F.col("page").alias(PAGE), F.col("state").alias(STATE))
            first = state.select(*kept, *(F.lit(0).alias(name) for name in self.beside))
            frame = records.unionByName(first, allowMissingColumns=True)
        count = node.parallelism or self.plan.execution.parallelism
        if self.beside and not count:
            # Adaptive execution goes by bytes, and every partition has its state to write, however few its records are.
            count = int(self.spark.conf.get("spark.sql.shuffle.partitions") or 1)
        spread = frame.repartition(count, GROUP) if count else frame.repartition(GROUP)
        return spread.sortWithinPartitions(
            GROUP, *self.beside, F.col(PAGE).asc_nulls_last(), *keys, *([TIMESTAMP] if layout.timestamped else [])
        )

    def _carried_aggregate(self, node: g.Node, port: Port) -> DataFrame:
        """The aggregates of the keys that this partition has, or of the windows that it closes, over all partitions so
        far; or the state that goes on to the next.
        """
        assert self.state is not None
        assert isinstance(node, (g.AggregateNode, g.WindowAggregateNode))
        held = self._aggregates.get(node.id)
        if held is None:
            frame, before = self.stream(node.id), self.state(Port(node.id, CARRIED))
            if isinstance(node, g.AggregateNode):
                merged = self.natives.carried_aggregate(node, frame, before, len(self.parts))
            else:
                begin = self.parts[0].begin.watermarks.get(node.uid, MIN_TIMESTAMP)
                ends = [
                    MAX_TIMESTAMP if part.end.end else part.end.watermarks.get(node.uid, MIN_TIMESTAMP)
                    for part in self.parts
                ]
                merged = self.natives.carried_windows(node, frame, before, begin, ends)
            held = self._aggregates[node.id] = replace(merged, frame=self._kept(merged.frame))
        if port.tag == CARRIED:
            return held.state()
        return (
            self.natives.finished(node, held) if isinstance(node, g.AggregateNode) else self.natives.closed(node, held)
        )

    def _custom(self, frame: DataFrame, edge: Edge, node: g.Node, count: int | None) -> DataFrame:
        """Records go where the partitioner says: a Python function of the key, evaluated beside the records."""
        from pyspark.sql import functions as F
        from pyspark.sql.types import IntegerType

        if not count:
            raise PipelineError(
                f"{self.plan.name}: operator '{node.name}' comes after partition_custom and needs set_parallelism(n),"
                " since the partitioner is asked for one of n partitions"
            )
        partitioner = edge.partitioning.partitioner
        names = _key_columns(edge)
        where = f"{self.plan.name}: partition_custom before '{node.name}'"

        def choose(*values: object) -> int:
            chosen = partitioner(values[0] if len(values) == 1 else values, count)
            if not 0 <= chosen < count:
                raise PipelineError(
                    f"{where}: the partitioner gave {chosen!r} for key {values!r}; it must be from 0 to {count - 1}"
                )
            return int(chosen)

        sent = self.shipments.once((edge.source, edge.target, "partitioner"), lambda: by_value(choose))
        chosen = frame.withColumn("__p", F.udf(sent, IntegerType())(*names))
        return chosen.repartitionById(count, "__p").drop("__p")

    def _broadcast(self, frame: DataFrame, count: int) -> DataFrame:
        """Every record in every one of `count` partitions."""
        from pyspark.sql import functions as F

        copies = frame.withColumn("__p", F.explode(F.sequence(F.lit(0), F.lit(count - 1))))
        return copies.repartitionById(count, "__p").drop("__p")

    # What Catalyst does by itself

    def _native(self, node: g.Node) -> DataFrame:
        if isinstance(node, g.SourceNode):
            return self._source(node)
        frame = self.stream(node.id)
        if isinstance(node, g.AssignTimestampsNode):
            return self._timestamps(node, frame)
        if isinstance(node, g.NativeNode):
            return self.natives.operation(
                node, frame, [*([TIMESTAMP] if node.timestamped and TIMESTAMP in frame.columns else []), *self.beside]
            )
        if isinstance(node, g.AggregateNode):
            return self.natives.aggregate(node, frame, self.beside)
        if isinstance(node, g.WindowAggregateNode):
            return self.natives.windows(node, frame, lambda rows: self._timed(node, rows), self.beside)
        raise PipelineError(f"{self.plan.name}: '{node.name}' cannot run in BATCH")

    def _timed(self, node: g.WindowAggregateNode, frame: DataFrame) -> DataFrame:
        """Rows with their moments, before they are put into windows."""
        return frame

    def _source(self, node: g.SourceNode) -> DataFrame:
        if not isinstance(node.source, SparkSource):
            raise PipelineError(
                f"{self.plan.name}: source '{node.name}' is a {type(node.source).__name__}, which Spark cannot read"
            )
        frame = self._read(node.source, node)
        if MALFORMED in frame.columns:
            self.malformed.append(
                (node, frame.where(f"{MALFORMED} is not null").select(f"{MALFORMED}.*", *self.beside))
            )
            frame = frame.where(f"{MALFORMED} is null")
        return frame.select(*node.source.records.names, *self.beside)

    def _read(self, source: SparkSource[Any], node: g.SourceNode) -> DataFrame:
        if not self.beside:
            return source.read_part(self.spark)
        return source.read_parts(
            self.spark,
            [
                cast("SparkSource[Any]", cast("g.SourceNode", part.plan.graph.node(node.id)).source)
                for part in self.parts
            ],
        )

    def _timestamps(self, node: g.AssignTimestampsNode, frame: DataFrame) -> DataFrame:
        """Event times from a field; the last of them is observed where timers go by it, since observing costs Catalyst
        its fused code.
        """
        from pyspark.sql import Observation
        from pyspark.sql import functions as F

        waiting = (g.KeyedProcessNode, g.WindowAggregateNode) if self.state is not None else g.KeyedProcessNode
        timers = [n.id for n in self.plan.graph.nodes if isinstance(n, waiting)]
        if not any(node.uid in self.plan.assigners_before(n) for n in timers):
            return with_event_time(node, frame)
        observation = Observation()
        self.observations.append(observation)

        def report(part: int) -> Column:
            last = F.max(F.when(F.col(PART) == part, F.col(TIMESTAMP)) if self.beside else F.col(TIMESTAMP))
            times = F.when(last.isNotNull(), F.create_map(F.lit(node.uid), last))
            told = F.struct(F.create_map().cast("map<string,int>").alias("counters"), times.alias("last_event_times"))
            return F.struct(F.lit(part).alias("part"), F.to_json(told).alias("report"))

        return with_event_time(node, frame).observe(
            observation, F.array(*map(report, range(len(self.parts)))).alias("reports")
        )


def observed(observation: Observation) -> dict[str, Any]:
    """What a finished job observed; nothing where the optimizer took the observed part out, as it does over input that
    it knows to be empty.
    """
    try:
        return observation.get
    except Exception as error:
        if "toPyRow" in str(error):  # how a classic session says that the row is not there
            return {}
        raise


def _key_columns(edge: Edge) -> list[str]:
    """The columns of the key that an exchange goes by."""
    key = edge.partitioning.key
    assert key is not None
    return [key_column(0)] if key.computed is not None else list(key.fields)
