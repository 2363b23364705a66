"""Writes the tables of a savepoint, and reads them as the state from which a job starts.

Knows Spark, the plan and the savepoint's manifest; not which mode runs.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from upath import UPath

from dagster_unified.engine.state_tables.frames import OperatorTable, operator_tables
from dagster_unified.errors import StateError
from dagster_unified.graph import nodes as g
from dagster_unified.graph.plan import Plan
from dagster_unified.operators.time import MIN_TIMESTAMP
from dagster_unified.state import manifest as manifests
from dagster_unified.state.manifest import Manifest, OperatorState
from dagster_unified.state.schemas import ROLES, columns_of, table_schema, to_spark

if TYPE_CHECKING:
    from pyspark.sql import Column as SparkColumn
    from pyspark.sql import DataFrame, SparkSession


def stateful(plan: Plan) -> list[g.Node]:
    """The operators whose state a savepoint holds."""
    return [node for node in plan.graph.nodes if node.runs_by_key]


def write_table(table: OperatorTable, pages: DataFrame, folder: UPath, attempt: str) -> OperatorState:
    """Write the state of one operator below the folder of an attempt, in that of a savepoint."""
    name = f"{attempt}/{manifests.folder_of(table.node.uid)}"
    own = folder / name
    own.mkdir(parents=True, exist_ok=True)
    rows = {f"{name}/{row['name']}": int(row["rows"]) for row in table.files(pages, own).collect()}
    found = manifests.files_in(own, folder)
    for file in found:
        if file.path not in rows:  # of an attempt of a task that failed, or was not the first
            (folder / file.path).unlink(missing_ok=True)
    files = [file for file in found if file.path in rows]
    if len(files) < len(rows):
        lost = min(rows.keys() - {file.path for file in files})
        raise StateError(
            f"{folder / lost} was written by a worker, and is not there; give a path that all machines share"
        )
    return OperatorState(
        table.node.uid,
        table.node.name,
        name,
        columns_of(table.schema),
        to_spark(table.schema),
        sum(rows.values()),
        sum(file.bytes for file in files),
        files,
        table.subtasks or 0,
    )


@dataclass(frozen=True)
class StartingState:
    """The state from which a job of `plan` starts, matched by uid."""

    plan: Plan
    spark: SparkSession
    folder: UPath
    manifest: Manifest
    tables: Mapping[str, OperatorTable]

    def pages(self, uid: str, groups: int, group: Callable[[], SparkColumn] | None = None) -> DataFrame | None:
        """An operator's state as pages of key groups; None where the savepoint has none of it.

        By default a key's group is that of a STREAMING job.
        """
        state, table = self.manifest.operator(uid), self.tables.get(uid)
        if state is None or table is None:
            return None
        watermark = self.manifest.event.watermarks.get(uid, MIN_TIMESTAMP)
        if table.subtasks is not None:
            return table.pages_of_subtasks(self.spark, self.folder, state, table.subtasks)
        if group is None:
            return table.pages(self.spark, self.folder, state, groups, watermark)
        return table.pages_in_groups(self.spark, self.folder, state, groups, watermark, group())


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
