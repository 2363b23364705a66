"""Writes the tables of a savepoint, and reads them as the state from which a job starts.

Knows Spark, the plan and the savepoint's manifest; not which mode runs.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from upath import UPath

from dagster_unified.connectors.paths import for_spark
from dagster_unified.engine.dataframe.observations import observed
from dagster_unified.engine.state_tables.frames import OperatorTable, operator_tables
from dagster_unified.errors import StateError
from dagster_unified.graph import nodes as g
from dagster_unified.graph.plan import Plan
from dagster_unified.operators.time import MIN_TIMESTAMP
from dagster_unified.state import manifest as manifests
from dagster_unified.state.manifest import Manifest, OperatorState
from dagster_unified.state.schemas import ROLES, columns_of, table_schema
from dagster_unified.state.tables import CODEC, read_frame

if TYPE_CHECKING:
    from pyspark.sql import Column as SparkColumn
    from pyspark.sql import DataFrame, SparkSession


AT_A_TIME = 4 << 20
"""Bytes in a savepoint's files, which are compressed, of the rows that a worker is given at a time."""


def stateful(plan: Plan) -> list[g.Node]:
    """The operators whose state a savepoint holds."""
    return [node for node in plan.graph.nodes if node.runs_by_key]


def write_table(table: OperatorTable, pages: DataFrame, folder: UPath, attempt: str) -> OperatorState:
    """Write the state of one operator below the folder of an attempt, in that of a savepoint."""
    from pyspark.sql import Observation
    from pyspark.sql import functions as F

    count = Observation()
    name = f"{attempt}/{manifests.folder_of(table.node.uid)}"
    rows = table.rows(pages)
    counted = rows.observe(count, F.count(F.lit(1)).alias("rows"))
    counted.write.mode("overwrite").option("compression", CODEC).parquet(for_spark(folder / name))
    files = manifests.files_in(folder / name, folder)
    return OperatorState(
        table.node.uid,
        table.node.name,
        name,
        columns_of(table.schema),
        rows.schema.json(),
        int(observed(count).get("rows") or 0),
        sum(file.bytes for file in files),
        files,
    )


@dataclass(frozen=True)
class StartingState:
    """The state from which a job of `plan` starts, matched by uid."""

    plan: Plan
    spark: SparkSession
    folder: UPath
    manifest: Manifest
    tables: Mapping[str, OperatorTable]

    @property
    def rows_at_a_time(self) -> int:
        """How many rows a worker is given at a time, so that they are of some ten megabytes; at most Spark's own."""
        largest = max((one.bytes / max(one.rows, 1) for one in self.manifest.operators), default=0.0)
        return max(min(10_000, int(AT_A_TIME / max(largest, 1.0))), 1)

    def pages(self, uid: str, groups: int, group: Callable[[], SparkColumn] | None = None) -> DataFrame | None:
        """An operator's state as pages of key groups; None where the savepoint has none of it."""
        state, table = self.manifest.operator(uid), self.tables.get(uid)
        if state is None or table is None:
            return None
        rows = read_frame(self.spark, self.folder, state)
        watermark = self.manifest.event.watermarks.get(uid, MIN_TIMESTAMP)
        return table.pages(rows, groups, watermark, group() if group is not None else None)


def starting_state(plan: Plan, spark: SparkSession, path: str, ignore_unclaimed: bool) -> StartingState:
    """The state that a savepoint has for the operators of a plan.

    Raises `StateError` where the savepoint is not whole, where it has state that no operator claims, unless that is
    ignored, and where an operator's state does not fit what the savepoint has.
    """
    folder, manifest = manifests.read(path)
    nodes = stateful(plan)
    known = {node.uid for node in nodes}
    unclaimed = [one for one in manifest.operators if one.uid not in known and one.rows]
    if unclaimed and not ignore_unclaimed:
        first = unclaimed[0]
        raise StateError(
            f"{plan.name}: the savepoint in {folder} has state of operator '{first.name}' (uid '{first.uid}'), and no"
            f" operator has that uid: there are {', '.join(sorted(known)) or 'none with state'}; give the operator its"
            " uid again, or drop the state with execution.savepoint.ignore-unclaimed-state=true"
        )
    claimed = [node for node in nodes if manifest.operator(node.uid) is not None]
    roles = ("key",) if ignore_unclaimed else ROLES  # a state without a role need not be declared
    stored = {one.uid: table_schema(one, roles) for one in manifest.operators if one.uid in known}
    tables = operator_tables(plan, spark, claimed, stored)
    return StartingState(plan, spark, folder, manifest, {table.node.uid: table for table in tables})
