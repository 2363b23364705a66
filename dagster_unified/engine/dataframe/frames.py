"""The lazy DataFrames of an execution graph, each built once: what sources yield, and what reaches each operator."""

from __future__ import annotations

import functools
import operator
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Hashable, Iterable, Sequence
from typing import TYPE_CHECKING, Any

import pyarrow as pa

from dagster_unified.connectors.protocol.frame import MALFORMED, spark_schema
from dagster_unified.connectors.protocol.source import SparkSource
from dagster_unified.engine.dataframe.lowered import asked, run_in_sql
from dagster_unified.engine.dataframe.partitions import PartitionAxis
from dagster_unified.engine.dataframe.passes import Reports, mapped, stream_of
from dagster_unified.engine.failures import naming_operator
from dagster_unified.engine.shipping import Shipments, by_value
from dagster_unified.errors import LoweringError, PipelineError
from dagster_unified.graph import nodes as g
from dagster_unified.graph.execution_graph import ExecutionGraph, Runs, Vertex, channel_selector, channels
from dagster_unified.graph.lowering.catalyst import InSql
from dagster_unified.graph.nodes import Edge, ExchangeKind, Port
from dagster_unified.graph.operator_state import CHOOSING
from dagster_unified.operators.layout import SUBTASK, TIMESTAMP, StreamLayout, key_column
from dagster_unified.operators.program.step import Program
from dagster_unified.operators.routing import ByKey, ByPartitioner, CopyToAll
from dagster_unified.records import RANGE_OF_DATES, RANGE_OF_TIMES, RecordType, type_name

if TYPE_CHECKING:
    from pyspark.sql import Column, DataFrame
    from pyspark.sql.types import DataType

_WITHOUT_FUNCTIONS = (g.SourceNode, g.NativeNode, g.AssignTimestampsNode)
"""The nodes that let records pass which nobody has decoded."""


class Inputs(ABC):
    """The inputs of the operators of an execution graph."""

    def __init__(self, graph: ExecutionGraph, axis: PartitionAxis | None, shipments: Shipments | None) -> None:
        self.graph, self.plan = graph, graph.plan
        self.axis = axis or PartitionAxis()
        self.shipments = Shipments() if shipments is None else shipments

    @abstractmethod
    def port(self, port: Port) -> DataFrame:
        """Return a stream of the graph or from outside of it, in the columns of its layout."""

    def input_of(self, node_id: int) -> DataFrame:
        """Return a node's inputs united, partitioned as their exchange says, and sorted where the node is keyed."""
        node = self.plan.graph.node(node_id)
        layout = self.graph.input_layout(node_id)
        edges = self.plan.graph.main_inputs(node_id)
        choosing = [edge.partitioning for edge in edges if edge.partitioning.kind in CHOOSING]
        if len(edges) == 1 or choosing == [edges[0].partitioning] * len(edges):
            return self._exchanged(self.united(edges, layout), edges[0], node, layout)
        if node_id in self.plan.subtasks:
            return self._in_subtasks([(edge, self._aligned(edge, layout)) for edge in edges], layout)
        if not choosing:
            return self._exchanged(self.united(edges, layout), edges[0], node, layout)
        frames = [self._exchanged(self._aligned(edge, layout), edge, node, layout) for edge in edges]
        return functools.reduce(lambda left, right: left.unionByName(right), frames)

    def sink_input(self, sink: int) -> DataFrame:
        """Return the rows for a sink: the columns of the records, and the pass-through columns.

        A null that a type does not allow fails here, where no function has looked at the records before.
        """
        records = self.plan.input_layout(sink).records
        edges = self.plan.graph.main_inputs(sink)
        unseen = any(isinstance(self.plan.graph.node(edge.source), _WITHOUT_FUNCTIONS) for edge in edges)
        columns = self._without_nulls(sink, records) if unseen else list(records.names)
        return self.input_of(sink).select(*columns, *self.axis.columns)

    def _without_nulls(self, sink: int, records: RecordType) -> list[Column]:
        from pyspark.sql import functions as F

        name, kind, columns = self.plan.graph.node(sink).name, type_name(records.python), []
        for field, stored in zip(records.schema, spark_schema(records.schema), strict=True):
            column = F.col(field.name)
            if not field.nullable:
                message = (
                    f"dagster_unified.errors.RecordTypeError: {self.plan.name}: sink '{name}': field '{field.name}' of"
                    f" {kind} is null, and its type does not allow None; declare it optional (`| None`), or leave such"
                    " rows out before"
                )
                failure = raised(message, stored.dataType)
                column = F.when(column.isNull(), failure).otherwise(column).alias(field.name)
            columns.append(column)
        return columns

    def inputs_of_iteration(self, node: g.IterationNode) -> list[DataFrame]:
        """Return the inputs of an iteration, the variables first."""
        edges = node.by_input(self.plan.graph.inputs(node.id))
        return [self.united(edges_of_head, head.layout) for edges_of_head, head in zip(edges, node.heads, strict=True)]

    def united(self, edges: Sequence[Edge], layout: StreamLayout) -> DataFrame:
        """Return the streams that come over some edges, in the columns of one layout."""
        frame = self._aligned(edges[0], layout)
        for edge in edges[1:]:
            frame = frame.unionByName(self._aligned(edge, layout))
        return frame

    def _aligned(self, edge: Edge, layout: StreamLayout) -> DataFrame:
        from pyspark.sql import functions as F

        port = edge.port
        emitted = self.graph.layout(port)
        frame = self.port(port)
        unseen, kept = self.graph.is_unseen(port), self.graph.kept_rows(edge.target)
        if unseen or kept is not None:
            lowered = edge.target in self.graph.in_sql
            frame = sifted(frame, emitted.records, () if lowered else layout.numbers, unseen, kept)
        columns: list[Column] = [F.col(emitted.records.names[number]) for number in layout.numbers]
        if layout.timestamped:
            columns.append(F.col(TIMESTAMP) if emitted.timestamped else F.lit(None).cast("long").alias(TIMESTAMP))
        computed = edge.partitioning.key.computed if edge.partitioning.key is not None else None
        if computed is not None:
            columns.append(F.col(key_column(emitted.keys.index(computed))).alias(key_column(0)))
        return frame.select(*columns, *self.axis.columns)

    # Exchanges

    def parallelism(self, node: g.Node) -> int | None:
        """Return how many tasks a node is to have, or None where Spark decides."""
        return node.parallelism or self.plan.execution.parallelism

    def _exchanged(self, frame: DataFrame, edge: Edge, node: g.Node, layout: StreamLayout) -> DataFrame:
        from pyspark.sql import functions as F

        kind, count = edge.partitioning.kind, self.parallelism(node)
        if kind is ExchangeKind.HASH:
            return self._by_key(frame, edge, node, layout, count)
        if kind in (ExchangeKind.REBALANCE, ExchangeKind.RESCALE, ExchangeKind.SHUFFLE):
            if count:
                return frame.repartition(count)
            return frame.repartition(F.rand() if kind is ExchangeKind.SHUFFLE else F.spark_partition_id())
        if kind is ExchangeKind.GLOBAL:
            return frame.coalesce(1)
        if kind in (ExchangeKind.CUSTOM, ExchangeKind.BROADCAST):
            return self._in_subtasks([(edge, frame)], layout)
        return frame.coalesce(count) if count and not self._has_partitions(edge, count) else frame

    def _is_grouped(self, node: g.Node) -> bool:
        """Return whether Catalyst brings the rows of a key of a node together."""
        return node.aggregates_natively or (node.key is not None and node.id in self.graph.in_sql)

    def _by_key(self, frame: DataFrame, edge: Edge, node: g.Node, layout: StreamLayout, count: int | None) -> DataFrame:
        if self._is_grouped(node):
            return frame  # Catalyst shuffles by itself, after it has aggregated in part
        keys = [*self.axis.columns, *key_columns(edge)]
        spread = frame.repartition(count, *keys) if count else frame.repartition(*keys)
        if node.key is None:
            return spread
        order = [*keys, TIMESTAMP] if layout.timestamped else keys
        return spread.sortWithinPartitions(*order)

    def _has_partitions(self, edge: Edge, count: int) -> bool:
        """Return whether an exchange upstream already yields `count` partitions; coalescing would number them anew."""
        if self.plan.subtasks.get(edge.source) == count:
            return True
        while edge.source in self.graph.nodes:
            node, inputs = self.plan.graph.node(edge.source), self.plan.graph.main_inputs(edge.source)
            if len(inputs) != 1 or self.parallelism(node) != count or self._is_grouped(node):
                return False
            edge = inputs[0]
            if edge.partitioning.kind is not ExchangeKind.FORWARD:
                return True
        return False

    def _in_subtasks(self, inputs: Sequence[tuple[Edge, DataFrame]], layout: StreamLayout) -> DataFrame:
        """Return the united rows of some inputs, each in the partition of the subtask that its edge selects."""
        names = [*layout.schema.names, *self.axis.columns, SUBTASK]
        counts = [channels(self.plan, edge) for edge, _ in inputs]
        rows = [
            frame.withColumn(SUBTASK, self._channel(edge, count)).select(*names)
            for (edge, frame), count in zip(inputs, counts, strict=True)
        ]
        united = functools.reduce(lambda left, right: left.unionByName(right), rows)
        return united.repartitionById(max(counts), SUBTASK).drop(SUBTASK)

    def _channel(self, edge: Edge, count: int) -> Column:
        """Return the channel of a row, by the edge's selector, or the channels to which it is copied."""
        from pyspark.sql import functions as F

        selector = channel_selector(self.plan, edge, count)
        if isinstance(selector, CopyToAll):
            return F.explode(F.sequence(F.lit(0), F.lit(selector.count - 1)))
        if isinstance(selector, ByPartitioner):
            return self._chosen(edge, selector)
        if isinstance(selector, ByKey):
            return F.pmod(F.hash(*key_columns(edge)), F.lit(selector.count))
        return F.lit(0) if edge.partitioning.kind is ExchangeKind.GLOBAL else F.spark_partition_id() % count

    def _chosen(self, edge: Edge, selector: ByPartitioner) -> Column:
        """Return a partitioner's choice: a Python function of the key, which Spark runs as a UDF."""
        from pyspark.sql.pandas.functions import arrow_udf
        from pyspark.sql.types import IntegerType

        def choose(*columns: pa.Array) -> pa.Array:
            return pa.array(selector.subtasks(columns), pa.int32())

        sent = self.shipments.once((edge.source, edge.target, "partitioner"), lambda: by_value(choose))

        def chosen(*columns: pa.Array) -> pa.Array:
            return sent(*columns)

        udf: Any = arrow_udf
        subtask: Column = udf(chosen, IntegerType())(*key_columns(edge))
        return subtask


def sifted(
    frame: DataFrame, records: RecordType, read: Collection[int], unseen: bool = True, kept: str | None = None
) -> DataFrame:
    """Return the rows of which a worker will read some fields, without those for which the condition `kept` is false.

    If nobody has looked at the rows, a value of another field that a worker could not read fails here, and a row with
    such a value of a field that it reads goes on to it.
    """
    from pyspark.sql import functions as F

    others = [number for number in range(len(records.names)) if number not in read]
    unread = _misfits(records, others) if unseen else None
    if kept is None and unread is None:
        return frame
    goes_on = F.lit(True)
    if kept is not None:
        goes_on = F.coalesce(F.expr(kept), goes_on)
        wrong = _misfits(records, read) if unseen else None
        goes_on = goes_on if wrong is None else goes_on | F.coalesce(wrong, F.lit(False))
    if unread is not None:
        message = f"{LoweringError.__module__}.LoweringError: a field of {type_name(records.python)} cannot be read"
        goes_on = F.when(unread, raised(message, "boolean")).otherwise(goes_on)
    return asked(frame, goes_on)


def _misfits(records: RecordType, numbers: Collection[int]) -> Column | None:
    """Return whether a row has a value in some of its fields that a worker could not read; None where none can be."""
    from pyspark.sql import functions as F

    wrong: list[Column] = []
    for number in numbers:
        field = records.schema.field(number)
        column = F.col(field.name)
        if not field.nullable:
            wrong.append(column.isNull())
        if pa.types.is_string(field.type):
            wrong.append(~F.is_valid_utf8(column))
        elif pa.types.is_timestamp(field.type):
            wrong.append(~F.unix_micros(column.cast("timestamp")).between(*RANGE_OF_TIMES))
        elif pa.types.is_date(field.type):
            wrong.append(~F.unix_date(column).between(*RANGE_OF_DATES))
        elif field.nullable:  # any can be read, but what Spark computes it with may raise, and has to be asked for
            wrong.append((column if pa.types.is_int64(field.type) else F.xxhash64(column)) == _SELDOM)
    return functools.reduce(operator.or_, wrong) if wrong else None


_SELDOM = -6_510_615_555_426_900_571
"""A number, or a hash, that no value has, as good as. A row that has it is looked at by a worker."""


def raised(message: str, kind: str | DataType) -> Column:
    """Return an expression that raises an error of the library's, for a value of a type."""
    from pyspark.sql import functions as F

    return F.raise_error(F.lit(message)).cast(kind)


def key_columns(edge: Edge) -> list[str]:
    """Return the columns of the key by which an exchange partitions."""
    key = edge.partitioning.key
    assert key is not None
    return [key_column(0)] if key.computed is not None else list(key.fields)


def spark_source(pipeline: str, node: g.SourceNode) -> SparkSource[Any]:
    """Return the source of a node; raises `PipelineError` where Spark cannot read it."""
    if not isinstance(node.source, SparkSource):
        raise PipelineError(
            f"{pipeline}: source '{node.name}' is a {type(node.source).__name__}, which Spark cannot read"
        )
    return node.source


def files_lacking_columns(nodes: Iterable[g.SourceNode]) -> dict[str, str]:
    """The files that were read of some sources and lack a column, by what metadata calls them."""
    return {
        f"files of {node.name} without column '{column}'": files
        for node in nodes
        if isinstance(node.source, SparkSource)
        for column, files in node.source.lacking().items()
    }


def split_malformed(frame: DataFrame) -> tuple[DataFrame, DataFrame | None]:
    """Return the rows of a source that fit its schema, and those that do not, where it distinguishes them."""
    if MALFORMED not in frame.columns:
        return frame, None
    return frame.where(f"{MALFORMED} is null"), frame.where(f"{MALFORMED} is not null")


class Frames(Inputs):
    """The lazy DataFrames of an execution graph; `outside` gives the streams that come from elsewhere.

    In STREAMING `log` is Spark's log of the query's offsets.
    """

    def __init__(
        self,
        graph: ExecutionGraph,
        outside: Callable[[Port], DataFrame],
        axis: PartitionAxis | None = None,
        shipments: Shipments | None = None,
        log: str | None = None,
    ) -> None:
        super().__init__(graph, axis, shipments)
        self.log = log
        self.reports = Reports(self.axis)
        self._outside = outside
        self._ports: dict[Port, DataFrame] = {}
        self._combined: dict[Vertex, DataFrame] = {}
        self._persisted: list[DataFrame] = []

    @abstractmethod
    def run_natively(self, node: g.Node, port: Port) -> DataFrame:
        """Return the stream of an operator that does not run in Python."""

    def run_vertex(self, vertex: Vertex) -> DataFrame:
        """Return the combined DataFrame of a vertex of Python."""
        program = self.graph.program(vertex)
        frame = self.input_of(vertex.head).select(*program.input.schema.names, *self.axis.columns)
        return self.persisted(vertex, self.run_program(frame, program, vertex.members))

    def run_program(self, frame: DataFrame, program: Program, place: Hashable) -> DataFrame:
        """Run rows through a program, whose reports are observed; `place` identifies it in the plan."""
        return self.reports.taken_from(mapped(frame, program, self.shipments, place, self.axis, self.log))

    def persisted(self, vertex: Vertex, combined: DataFrame) -> DataFrame:
        """Return the output of a vertex, persisted where several readers would compute it again."""
        return self.persist(combined) if self.graph.is_computed_again(vertex) else combined

    def persist(self, frame: DataFrame) -> DataFrame:
        """Return a DataFrame that is computed once, until `release`."""
        self._persisted.append(frame.persist())
        return self._persisted[-1]

    def release(self) -> None:
        """Free the DataFrames that were persisted for several readers."""
        for frame in self._persisted:
            frame.unpersist()

    def port(self, port: Port) -> DataFrame:
        if port.node not in self.graph.vertex_of:
            return self._outside(port)
        if port not in self._ports:
            self._ports[port] = self._build(port)
        return self._ports[port]

    def combined(self, ports: Collection[Port]) -> tuple[DataFrame, tuple[Port, ...]] | None:
        """Several streams in one DataFrame, in the order of their numbers, if one vertex emits exactly these."""
        wanted = set(ports)
        candidates = (v for v in self.graph.vertices if v.runs is Runs.PYTHON and len(v.outputs) > 1)
        vertex = next((vertex for vertex in candidates if set(vertex.outputs) == wanted), None)
        return None if vertex is None else (self._combined_of(vertex), vertex.outputs)

    def _combined_of(self, vertex: Vertex) -> DataFrame:
        if vertex not in self._combined:
            self._combined[vertex] = self.run_vertex(vertex)
        return self._combined[vertex]

    def _run_in_sql(self, node: g.Node, said: InSql) -> DataFrame:
        records = self.plan.layout(Port(node.id)).records
        return run_in_sql(said, self.input_of(node.id), records, self.axis.columns, self.parallelism(node))

    def _build(self, port: Port) -> DataFrame:
        from pyspark.sql import functions as F

        layout, vertex = self.graph.layout(port), self.graph.vertex_of[port.node]
        if vertex.runs is Runs.PYTHON:
            return stream_of(vertex, self._combined_of(vertex), port, layout, self.axis.columns)
        node = self.plan.graph.node(port.node)
        with naming_operator(self.plan.name, node):
            said = self.graph.in_sql.get(node.id)
            frame = self.run_natively(node, port) if said is None else self._run_in_sql(node, said)
        if vertex in self.graph.behind_python:
            frame = self.persisted(vertex, frame)
        if not layout.keys:
            return frame
        texts = self.graph.keys_in_sql(port)
        if texts is not None:
            return frame.withColumns({key_column(number): F.expr(text) for number, text in enumerate(texts)})
        keys = self.axis.timed(self.graph.keys_program(port))
        checked = sifted(frame, layout.records, keys.input.numbers)
        rows = self.axis.in_order(checked.select(*keys.input.schema.names, *self.axis.columns))
        return self.run_program(rows, keys, port)
