"""Exchanges: how the rows of a stream reach the tasks of an operator.

Knows the plan and Spark's DataFrame API. Lazy: nothing runs here.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from dagster_unified.engine.dataframe.fragment import Fragment
from dagster_unified.engine.dataframe.partitions import PartitionAxis
from dagster_unified.engine.shipping import Shipments, by_value
from dagster_unified.errors import PipelineError
from dagster_unified.graph import nodes as g
from dagster_unified.graph.nodes import Edge, ExchangeKind
from dagster_unified.graph.plan import Plan
from dagster_unified.operators.layout import TIMESTAMP, StreamLayout, key_column

if TYPE_CHECKING:
    from pyspark.sql import DataFrame


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
        if kind is ExchangeKind.CUSTOM:
            return self._custom(frame, edge, node, count)
        if kind is ExchangeKind.BROADCAST:
            return _copied(frame, count or 1)
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
        while edge.source in self.fragment.nodes:
            node, inputs = self.plan.graph.node(edge.source), self.plan.graph.main_inputs(edge.source)
            if len(inputs) != 1 or self.parallelism(node) != count or node.aggregates_natively:
                return False
            edge = inputs[0]
            if edge.partitioning.kind is not ExchangeKind.FORWARD:
                return True
        return False

    def _custom(self, frame: DataFrame, edge: Edge, node: g.Node, count: int | None) -> DataFrame:
        """Send records where the partitioner says: a Python function of the key, which Spark runs as a UDF."""
        from pyspark.sql import functions as F
        from pyspark.sql.types import IntegerType

        if not count:
            raise PipelineError(
                f"{self.plan.name}: operator '{node.name}' comes after partition_custom and needs set_parallelism(n),"
                " since the partitioner is asked for one of n partitions"
            )
        partitioner = edge.partitioning.partitioner
        names = key_columns(edge)
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


def _copied(frame: DataFrame, count: int) -> DataFrame:
    """Every record in every one of `count` partitions."""
    from pyspark.sql import functions as F

    copies = frame.withColumn("__p", F.explode(F.sequence(F.lit(0), F.lit(count - 1))))
    return copies.repartitionById(count, "__p").drop("__p")


def key_columns(edge: Edge) -> list[str]:
    """The columns of the key by which an exchange partitions."""
    key = edge.partitioning.key
    assert key is not None
    return [key_column(0)] if key.computed is not None else list(key.fields)
