"""What reaches an operator: its inputs united and exchanged; and what a source yields.

Knows the plan, connectors and Spark's DataFrame API. Lazy: nothing runs here.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from dagster_unified.connectors.protocol.frame import MALFORMED, spark_schema
from dagster_unified.connectors.protocol.source import SparkSource
from dagster_unified.engine.dataframe.exchanges import Exchanges
from dagster_unified.engine.translate import input_layout
from dagster_unified.errors import PipelineError
from dagster_unified.graph import nodes as g
from dagster_unified.graph.nodes import Edge
from dagster_unified.graph.plan import Plan, Port
from dagster_unified.graph.subtasks import CHOOSING
from dagster_unified.operators.layout import TIMESTAMP, StreamLayout, key_column
from dagster_unified.records import RecordType, type_name

if TYPE_CHECKING:
    from pyspark.sql import Column, DataFrame


_WITHOUT_FUNCTIONS = (g.SourceNode, g.NativeNode, g.AssignTimestampsNode)
"""What lets records pass that nobody has decoded."""


@dataclass(frozen=True)
class Inputs:
    """The inputs of the operators of a fragment."""

    plan: Plan
    exchanges: Exchanges
    port: Callable[[Port], DataFrame]
    """Returns a stream, in the columns of its layout."""

    def of(self, node_id: int) -> DataFrame:
        """A node's inputs united, partitioned as their exchange says, and sorted where the node is keyed."""
        node = self.plan.graph.node(node_id)
        layout = input_layout(self.plan, node_id)
        edges = self.plan.graph.main_inputs(node_id)
        choosing = [edge.partitioning for edge in edges if edge.partitioning.kind in CHOOSING]
        if len(edges) == 1 or choosing == [edges[0].partitioning] * len(edges):
            return self.exchanges.apply(self.united(edges, layout), edges[0], node, layout)
        if node_id in self.plan.subtasks:
            return self.exchanges.in_subtasks([(edge, self._aligned(edge, layout)) for edge in edges], node, layout)
        if not choosing:
            return self.exchanges.apply(self.united(edges, layout), edges[0], node, layout)
        frames = [self.exchanges.apply(self._aligned(edge, layout), edge, node, layout) for edge in edges]
        return functools.reduce(lambda one, other: one.unionByName(other), frames)

    def of_sink(self, sink: int) -> DataFrame:
        """What a sink writes: the columns of the records, and the pass-through columns.

        A null that a type does not allow fails where no function has looked at the records before.
        """
        records = input_layout(self.plan, sink).records
        edges = self.plan.graph.main_inputs(sink)
        unseen = any(isinstance(self.plan.graph.node(edge.source), _WITHOUT_FUNCTIONS) for edge in edges)
        columns = self._without_nulls(sink, records) if unseen else list(records.names)
        return self.of(sink).select(*columns, *self.exchanges.axis.columns)

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
                raised = F.raise_error(F.lit(message)).cast(stored.dataType)
                column = F.when(column.isNull(), raised).otherwise(column).alias(field.name)
            columns.append(column)
        return columns

    def of_iteration(self, node: g.IterationNode) -> list[DataFrame]:
        """The inputs of an iteration, the variables first."""
        edges = node.by_input(self.plan.graph.inputs(node.id))
        return [self.united(own, head.layout) for own, head in zip(edges, node.heads, strict=True)]

    def united(self, edges: Sequence[Edge], layout: StreamLayout) -> DataFrame:
        """The streams that come over some edges, in the columns of one layout."""
        frame = self._aligned(edges[0], layout)
        for edge in edges[1:]:
            frame = frame.unionByName(self._aligned(edge, layout))
        return frame

    def _aligned(self, edge: Edge, layout: StreamLayout) -> DataFrame:
        from pyspark.sql import functions as F

        port = Port.of(edge)
        frame = self.port(port)
        own = self.plan.layout(port)
        columns: list[Column] = [F.col(name) for name in own.records.names]
        if layout.timestamped:
            columns.append(F.col(TIMESTAMP) if own.timestamped else F.lit(None).cast("long").alias(TIMESTAMP))
        computed = edge.partitioning.key.computed if edge.partitioning.key is not None else None
        if computed is not None:
            columns.append(F.col(key_column(own.keys.index(computed))).alias(key_column(0)))
        return frame.select(*columns, *self.exchanges.axis.columns)


def spark_source(pipeline: str, node: g.SourceNode) -> SparkSource[Any]:
    """The source of a node; raises `PipelineError` where Spark cannot read it."""
    if not isinstance(node.source, SparkSource):
        raise PipelineError(
            f"{pipeline}: source '{node.name}' is a {type(node.source).__name__}, which Spark cannot read"
        )
    return node.source


def split_malformed(frame: DataFrame) -> tuple[DataFrame, DataFrame | None]:
    """What a source read: the rows that fit its schema, and those that do not, where it distinguishes them."""
    if MALFORMED not in frame.columns:
        return frame, None
    return frame.where(f"{MALFORMED} is null"), frame.where(f"{MALFORMED} is not null")
