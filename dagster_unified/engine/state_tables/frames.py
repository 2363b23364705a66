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
from dagster_unified.state.manifest import OperatorState
from dagster_unified.state.schemas import from_spark
from dagster_unified.state.tables import splits

if TYPE_CHECKING:
    from pyspark.sql import Column, DataFrame, SparkSession
    from upath import UPath


@dataclass(frozen=True)
class OperatorTable:
    """The table of one keyed operator."""

    node: g.Node
    payload: Payload
    schema: pa.Schema
    subtasks: int | None = None
    """By how many subtasks it keeps operator state; None for keyed state."""

    def files(self, pages: DataFrame, folder: UPath) -> DataFrame:
        """The files with its rows that tasks write into a folder, from pages in the columns of `CARRIED_LAYOUT`."""
        by_group = pages.repartition("group").sortWithinPartitions("group", "page")
        writing = worker.to_file(self.payload, self.schema, str(folder))
        return by_group.mapInArrow(writing, spark_schema(worker.WRITTEN))

    def pages(self, spark: SparkSession, folder: UPath, state: OperatorState, groups: int, watermark: int) -> DataFrame:
        """Pages of the key groups of a STREAMING job, from its rows in a savepoint, which tasks read."""
        from pyspark.sql import functions as F

        found = splits(folder, state)
        reading = worker.read_slices(self.payload, groups, str(folder), state, found)
        slices = spark.range(0, len(found), 1, max(len(found), 1)).mapInArrow(reading, spark_schema(worker.SLICES))
        # Also a group without keys has a watermark.
        empty = spark.range(groups).select(F.col("id").cast("int").alias("group"))
        return self._pages(slices.unionByName(empty, allowMissingColumns=True), from_spark(state.schema), watermark)

    def pages_of_rows(self, rows: DataFrame, groups: int, watermark: int, group: Column) -> DataFrame:
        """Pages of groups that Spark chooses, from its rows."""
        chosen = rows.withColumn(worker.GROUP, group.cast("int"))
        slices = chosen.mapInArrow(worker.to_slices(self.payload, groups, True), spark_schema(worker.SLICES))
        return self._pages(slices, from_spark(rows.schema.json()), watermark)

    def pages_of_subtasks(self, rows: DataFrame, before: int, subtasks: int) -> DataFrame:
        """Pages of so many subtasks, from its rows, which were of `before` subtasks: one task reads all of them."""
        made = worker.to_subtasks(self.payload, from_spark(rows.schema.json()), before, subtasks)
        return rows.coalesce(1).mapInArrow(made, spark_schema(CARRIED_LAYOUT.schema))

    def _pages(self, slices: DataFrame, stored: pa.Schema, watermark: int) -> DataFrame:
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
    counts = [plan.subtasks_with_state(node) for node in nodes]
    return [OperatorTable(node, payloads[i], schemas[i], counts[i]) for i, node in enumerate(nodes)]
