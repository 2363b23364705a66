"""Pages of key groups and typed rows as DataFrames, each made from the other.

Knows the plan, the workers' functions and Spark's DataFrame API. Lazy, but for the question of what an operator's
columns are.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import pyarrow as pa

from dagster_unified.connectors.base import spark_schema
from dagster_unified.engine.failures import translated
from dagster_unified.engine.shipping import Payload
from dagster_unified.engine.state_tables import worker
from dagster_unified.engine.translate import keyed_program
from dagster_unified.graph import nodes as g
from dagster_unified.graph.plan import Plan
from dagster_unified.operators.layout import CARRIED_LAYOUT
from dagster_unified.state.schemas import from_spark

if TYPE_CHECKING:
    from pyspark.sql import Column, DataFrame, SparkSession


@dataclass(frozen=True)
class OperatorTable:
    """The table of one keyed operator."""

    node: g.Node
    payload: Payload
    schema: pa.Schema

    def rows(self, pages: DataFrame) -> DataFrame:
        """Its rows, from pages in the columns of `CARRIED_LAYOUT`."""
        by_group = pages.repartition("group").sortWithinPartitions("group", "page")
        return by_group.mapInArrow(worker.to_rows(self.payload), spark_schema(self.schema))

    def pages(self, rows: DataFrame, groups: int, watermark: int, group: Column | None = None) -> DataFrame:
        """Pages of `groups` key groups, from rows. By default a key's group is that of a STREAMING job."""
        from pyspark.sql import functions as F

        stored, chosen = from_spark(rows.schema.json()), group is not None
        if group is not None:
            rows = rows.withColumn(worker.GROUP, group.cast("int"))
        slices = rows.mapInArrow(worker.to_slices(self.payload, groups, chosen), spark_schema(worker.SLICES))
        if not chosen:  # also a group without keys has a watermark
            empty = rows.sparkSession.range(groups).select(F.col("id").cast("int").alias("group"))
            slices = slices.unionByName(empty, allowMissingColumns=True)
        spread = slices.repartition("group").sortWithinPartitions("group")
        return spread.mapInArrow(worker.to_pages(self.payload, stored, watermark), spark_schema(CARRIED_LAYOUT.schema))


def operator_tables(
    plan: Plan, spark: SparkSession, nodes: Sequence[g.Node], stored: Mapping[str, pa.Schema]
) -> list[OperatorTable]:
    """The tables of some keyed operators, which are opened in a worker to say what their state is.

    `stored` are the columns that a savepoint has of an operator, by its uid. Raises `StateError` where an operator's
    state does not fit them.
    """
    if not nodes:
        return []
    payloads = [worker.payload_of(keyed_program(plan, node)) for node in nodes]
    held = [stored[n.uid].serialize().to_pybytes() if n.uid in stored else None for n in nodes]
    numbers = spark.range(0, len(nodes), 1, 1)
    described = numbers.mapInArrow(worker.describe(payloads, held), spark_schema(worker.DESCRIBED))
    try:
        answers = described.collect()
    except Exception as error:
        raise translated(error, plan, "savepoint", spark) from error
    schemas = {row["operator"]: pa.ipc.read_schema(pa.py_buffer(bytes(row["schema"]))) for row in answers}
    return [OperatorTable(node, payloads[i], schemas[i]) for i, node in enumerate(nodes)]
