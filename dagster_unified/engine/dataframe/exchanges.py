"""Exchanges: how the rows of a stream reach the tasks of an operator.

Knows the plan and Spark's DataFrame API. Lazy: nothing runs here.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import pyarrow as pa

from dagster_unified.engine.dataframe.fragment import Fragment
from dagster_unified.engine.dataframe.partitions import PartitionAxis
from dagster_unified.engine.shipping import Shipments, by_value
from dagster_unified.engine.translate import keyed_by
from dagster_unified.graph import nodes as g
from dagster_unified.graph.nodes import Edge, ExchangeKind
from dagster_unified.graph.plan import Plan, Port
from dagster_unified.graph.subtasks import chosen_from
from dagster_unified.operators.layout import SUBTASK, TIMESTAMP, StreamLayout, key_column
from dagster_unified.operators.routing import ByPartitioner

if TYPE_CHECKING:
    from pyspark.sql import Column, DataFrame


@dataclass(frozen=True)
class Exchanges:
    """The exchanges before the operators of a fragment."""

    plan: Plan
    fragment: Fragment
    axis: PartitionAxis
    shipments: Shipments

    def apply(self, frame: DataFrame, edge: Edge, node: g.Node, layout: StreamLayout) -> DataFrame:
        """Partition rows as their edge says, and sort them where the node is keyed."""
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
            return self.in_subtasks([(edge, frame)], node, layout)
        return frame.coalesce(count) if count and not self._has_partitions(edge, count) else frame

    def parallelism(self, node: g.Node) -> int | None:
        """How many tasks a node is to have, or None where Spark decides."""
        return node.parallelism or self.plan.execution.parallelism

    def _by_key(self, frame: DataFrame, edge: Edge, node: g.Node, layout: StreamLayout, count: int | None) -> DataFrame:
        if node.aggregates_natively:
            return frame  # Catalyst shuffles by itself, after it has aggregated in part
        keys = [*self.axis.columns, *key_columns(edge)]
        spread = frame.repartition(count, *keys) if count else frame.repartition(*keys)
        if node.key is None:
            return spread
        order = [*keys, TIMESTAMP] if layout.timestamped else keys
        return spread.sortWithinPartitions(*order)

    def _has_partitions(self, edge: Edge, count: int) -> bool:
        """Whether an exchange upstream yields `count` partitions already.

        Coalescing them to as many would number them anew.
        """
        if self.plan.subtasks.get(edge.source) == count:
            return True
        while edge.source in self.fragment.nodes:
            node, inputs = self.plan.graph.node(edge.source), self.plan.graph.main_inputs(edge.source)
            if len(inputs) != 1 or self.parallelism(node) != count or node.aggregates_natively:
                return False
            edge = inputs[0]
            if edge.partitioning.kind is not ExchangeKind.FORWARD:
                return True
        return False

    def in_subtasks(self, inputs: Sequence[tuple[Edge, DataFrame]], node: g.Node, layout: StreamLayout) -> DataFrame:
        """The rows of some inputs of a node, united, each in the partition of the subtask that its edge says."""
        united: DataFrame | None = None
        counts = []
        names = [*layout.schema.names, *self.axis.columns, SUBTASK]
        for edge, frame in inputs:
            count = self.plan.subtasks.get(node.id) or chosen_from(self.plan.graph, edge, node, self.parallelism(node))
            counts.append(count)
            rows = frame.withColumn(SUBTASK, self._subtask(edge, node, count)).select(*names)
            united = rows if united is None else united.unionByName(rows)
        assert united is not None
        return united.repartitionById(max(counts), SUBTASK).drop(SUBTASK)

    def _subtask(self, edge: Edge, node: g.Node, count: int) -> Column:
        """The subtask of a row; those to which `broadcast()` copies it."""
        from pyspark.sql import functions as F

        kind = edge.partitioning.kind
        if kind is ExchangeKind.GLOBAL:
            return F.lit(0)
        if kind is ExchangeKind.BROADCAST:
            return F.explode(F.sequence(F.lit(0), F.lit(count - 1)))
        if kind is ExchangeKind.CUSTOM:
            return self._custom(edge, node, count)
        if kind is ExchangeKind.HASH:
            return F.pmod(F.hash(*key_columns(edge)), F.lit(count))
        return F.spark_partition_id() % count

    def _custom(self, edge: Edge, node: g.Node, count: int) -> Column:
        """What the partitioner says: a Python function of the key, which Spark runs as a UDF."""
        from pyspark.sql.pandas.functions import arrow_udf
        from pyspark.sql.types import IntegerType

        key, layout = edge.partitioning.key, self.plan.layout(Port.of(edge))
        assert key is not None
        where = f"{self.plan.name}: partition_custom before '{node.name}'"
        selector = ByPartitioner(edge.partitioning.partitioner, keyed_by(key, layout.records), count, where)

        def choose(*columns: pa.Array) -> pa.Array:
            return pa.array(selector.subtasks(columns), pa.int32())

        sent = self.shipments.once((edge.source, edge.target, "partitioner"), lambda: by_value(choose))

        def chosen(*columns: pa.Array) -> pa.Array:
            return sent(*columns)

        udf: Any = arrow_udf
        found: Column = udf(chosen, IntegerType())(*key_columns(edge))
        return found


def key_columns(edge: Edge) -> list[str]:
    """The columns of the key by which an exchange partitions."""
    key = edge.partitioning.key
    assert key is not None
    return [key_column(0)] if key.computed is not None else list(key.fields)
