"""Pages of key groups and typed rows as DataFrames, each made from the other.

Knows the plan, the workers' functions and Spark's DataFrame API. Lazy, but for the question of what an operator's
columns are.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import pyarrow as pa

from dagster_unified.connectors.protocol.frame import spark_schema
from dagster_unified.engine.failures import translated
from dagster_unified.engine.shipping import Payload
from dagster_unified.engine.state_tables import worker
from dagster_unified.graph import nodes as g
from dagster_unified.graph.plan import Plan
from dagster_unified.graph.programs import keyed_program
from dagster_unified.operators.layout import CARRIED_LAYOUT
from dagster_unified.state.manifest import OperatorState
from dagster_unified.state.schemas import from_spark
from dagster_unified.state.tables import Split, splits

if TYPE_CHECKING:
    from pyspark.sql import Column, DataFrame, SparkSession
    from upath import UPath


class Stateful(NamedTuple):
    """An operator whose state a savepoint holds."""

    plan: Plan
    """The plan that it is of: that of its pipeline, or of the body of an iteration."""

    node: g.Node
    uid: str
    """What a savepoint knows it by."""

    subtasks: int | None = None
    """By how many subtasks it keeps operator state; None for keyed state."""


@dataclass(frozen=True)
class OperatorTable:
    """The table of one operator with state."""

    operator: Stateful
    payload: Payload
    schema: pa.Schema

    def files(self, pages: DataFrame, folder: UPath) -> DataFrame:
        """The files with its rows that tasks write into a folder, from pages in the columns of `CARRIED_LAYOUT`."""
        return self.files_of_groups(pages.repartition("group").sortWithinPartitions("group", "page"), folder)

    def files_of_groups(self, pages: DataFrame, folder: UPath) -> DataFrame:
        """As `files`, from pages of which those of a group lie together."""
        return pages.mapInArrow(worker.to_file(self.payload, self.schema, str(folder)), spark_schema(worker.WRITTEN))

    def files_left(self, left: DataFrame, folder: UPath) -> DataFrame:
        """As `files`, of files that are made already: each is the state of a row in the columns of `CARRIED_LAYOUT`."""
        return left.mapInArrow(worker.files_left(str(folder)), spark_schema(worker.WRITTEN))

    def pages(self, spark: SparkSession, folder: UPath, state: OperatorState, groups: int, watermark: int) -> DataFrame:
        """Pages of the key groups of a STREAMING job, from its rows in a savepoint, which tasks read."""
        from pyspark.sql import functions as F

        found = splits(folder, state)
        reading = worker.read_slices(self.payload, groups, str(folder), state, found)
        slices = _numbers(spark, found).mapInArrow(reading, spark_schema(worker.SLICES))
        # Also a group without keys has a watermark.
        empty = spark.range(groups).select(F.col("id").cast("int").alias("group"))
        return self._pages(slices.unionByName(empty, allowMissingColumns=True), from_spark(state.schema), watermark)

    def pages_in_groups(
        self, spark: SparkSession, folder: UPath, state: OperatorState, groups: int, watermark: int, group: Column
    ) -> DataFrame:
        """Pages of groups that Spark chooses by the columns of the key, from its rows in a savepoint.

        Only the keys go to Spark, and the groups back, in the order of the rows: a row has lists that are null as a
        rule, of which Spark measures all before it for each (17 s instead of 1.4 for half a million keys).
        """
        from pyspark.sql import functions as F

        found, stored = splits(folder, state), from_spark(state.schema)
        keys = pa.schema([stored.field(column.name) for column in state.columns if column.role == "key"])
        reading = worker.read_keys(str(folder), state, found, keys.names)
        chosen = _numbers(spark, found).mapInArrow(reading, spark_schema(keys.append(worker.SPLIT_FIELD)))
        chosen = chosen.select(F.col(worker.SPLIT), group.cast("int").alias(worker.GROUP))
        slicing = worker.slices_in_groups(self.payload, groups, str(folder), state, found)
        return self._pages(chosen.mapInArrow(slicing, spark_schema(worker.SLICES)), stored, watermark)

    def pages_of_subtasks(self, spark: SparkSession, folder: UPath, state: OperatorState, subtasks: int) -> DataFrame:
        """Pages of so many subtasks, from its rows in a savepoint, all of which one task reads."""
        found = splits(folder, state)
        made = worker.read_subtasks(self.payload, str(folder), state, found, subtasks)
        numbers = spark.range(0, max(len(found), 1), 1, 1)  # a task also where no subtask had state
        return numbers.mapInArrow(made, spark_schema(CARRIED_LAYOUT.schema))

    def divided(self, pages: DataFrame, before: int, count: int) -> DataFrame:
        """The pages of `count` subtasks with operator state, from those of the subtasks before."""
        rows = pages.coalesce(1).sortWithinPartitions("group", "page")
        rows = rows.mapInArrow(worker.to_rows(self.payload), spark_schema(self.schema))
        divided = worker.to_subtasks(self.payload, self.schema, before, count)
        return rows.mapInArrow(divided, spark_schema(CARRIED_LAYOUT.schema))

    def _pages(self, slices: DataFrame, stored: pa.Schema, watermark: int) -> DataFrame:
        spread = slices.repartition("group").sortWithinPartitions("group")
        return spread.mapInArrow(worker.to_pages(self.payload, stored, watermark), spark_schema(CARRIED_LAYOUT.schema))


def _numbers(spark: SparkSession, found: Sequence[Split]) -> DataFrame:
    """The numbers of splits, each in a task of its own."""
    return spark.range(0, len(found), 1, max(len(found), 1))


def operator_tables(
    plan: Plan, spark: SparkSession, operators: Sequence[Stateful], stored: Mapping[str, pa.Schema]
) -> list[OperatorTable]:
    """The tables of some operators, which are opened in a worker to say what their state is.

    `stored` are the columns that a savepoint has of an operator, by its uid. Raises `StateError` where an operator's
    state does not fit them.
    """
    if not operators:
        return []
    payloads = [worker.payload_of(keyed_program(one.plan, one.node)) for one in operators]
    held = [stored[one.uid].serialize().to_pybytes() if one.uid in stored else None for one in operators]
    numbers = spark.range(0, len(operators), 1, 1)
    described = numbers.mapInArrow(worker.describe(payloads, held), spark_schema(worker.DESCRIBED))
    try:
        answers = described.collect()
    except Exception as error:
        raise translated(error, plan, "savepoint", spark) from error
    schemas = {row["operator"]: pa.ipc.read_schema(pa.py_buffer(bytes(row["schema"]))) for row in answers}
    return [OperatorTable(one, payloads[i], schemas[i]) for i, one in enumerate(operators)]
