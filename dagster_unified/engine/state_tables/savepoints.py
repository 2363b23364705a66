"""Writes the tables of a savepoint, and reads them as the state from which a job starts.

Knows Spark, the plan and the savepoint's manifest; not which mode runs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

import msgspec
import pyarrow as pa
from upath import UPath

from dagster_unified.connectors.protocol.frame import spark_schema
from dagster_unified.engine.session import cores
from dagster_unified.engine.state_tables.frames import OperatorTable, Stateful, operator_tables
from dagster_unified.engine.state_tables.worker import WRITTEN, rows_to_file
from dagster_unified.errors import StateError
from dagster_unified.graph import nodes as g
from dagster_unified.graph.body import body_plan
from dagster_unified.graph.plan import Plan
from dagster_unified.graph.segments import cross_query_streams
from dagster_unified.operators.layout import TIMESTAMP
from dagster_unified.operators.state.table import ROLE
from dagster_unified.operators.time import MIN_TIMESTAMP
from dagster_unified.state import manifest as manifests
from dagster_unified.state.manifest import Manifest, OperatorState
from dagster_unified.state.schemas import ROLES, columns_of, table_schema, to_spark
from dagster_unified.state.tables import files_in

if TYPE_CHECKING:
    from pyspark.sql import Column as SparkColumn
    from pyspark.sql import DataFrame, SparkSession


def stateful(plan: Plan) -> list[Stateful]:
    """The operators of a plan whose state a savepoint holds, but for those in the bodies of iterations."""
    nodes = [node for node in plan.graph.nodes if node.runs_by_key]
    return [Stateful(plan, node, node.uid, plan.subtasks_with_state(node)) for node in nodes]


def stateful_in_body(plan: Plan, node: g.IterationNode, parallelism: int) -> list[Stateful]:
    """The operators of an unbounded iteration, on so many subtasks, whose state a savepoint holds.

    Those of a bounded one have no state before it goes round, and none behind it.
    """
    if not node.takes_input_in_all_rounds:
        return []
    body = body_plan(plan, node, parallelism)
    return [
        Stateful(body, one, uid_in(node, one.uid), one.parallelism if one.holds_subtask_state else None)
        for one in body.graph.nodes
        if one.runs_by_key and one.id not in node.per_round
    ]


def uid_in(iteration: g.IterationNode, uid: str) -> str:
    """What a savepoint knows an operator of a body by."""
    return f"{iteration.uid}.{uid}"


def stateful_in_all(plan: Plan, spark: SparkSession) -> list[Stateful]:
    """The operators whose state a savepoint holds, in the bodies of iterations as well.

    Raises `StateError` where two of them would have one uid.
    """
    found = stateful(plan)
    for node in plan.graph.nodes:
        if isinstance(node, g.IterationNode):
            count = node.parallelism or plan.execution.parallelism or cores(spark)
            found += stateful_in_body(plan, node, count)
    twice = next((one for one in found if sum(other.uid == one.uid for other in found) > 1), None)
    if twice is not None:
        raise StateError(
            f"{plan.name}: a savepoint would know operator '{twice.node.name}' and another one by the uid '{twice.uid}'"
            " (that of an operator in an iteration begins with the iteration's); give one of them another uid"
        )
    return found


def write_table(
    table: OperatorTable, files: Callable[[UPath], DataFrame], folder: UPath, attempt: str
) -> OperatorState:
    """Write the state of one operator below the folder of an attempt, in that of a savepoint.

    `files` is one of the table's own ways to make files of what there is.
    """
    operator = table.operator
    state = described(operator.uid, operator.node.name, table.schema, attempt)
    written = write_files(state, files, folder)
    return msgspec.structs.replace(written, subtasks=operator.subtasks or 0)


def described(uid: str, name: str, schema: pa.Schema, attempt: str, kind: str = "") -> OperatorState:
    """A table that an attempt is about to write; `kind` tells it from the state of the operator."""
    place = f"{attempt}/{manifests.folder_of(uid)}{kind}"
    return OperatorState(uid, name, place, columns_of(schema), to_spark(schema), 0, 0, [])


def write_files(state: OperatorState, files: Callable[[UPath], DataFrame], folder: UPath) -> OperatorState:
    """Write a table into the folder of a savepoint; `files` are those that tasks write into the table's own."""
    name = state.folder
    own = folder / name
    own.mkdir(parents=True, exist_ok=True)
    rows = {f"{name}/{row['name']}": int(row["rows"]) for row in files(own).collect()}
    found = files_in(own, folder)
    for file in found:
        if file.path not in rows:  # of an attempt of a task that failed, or was not the first
            (folder / file.path).unlink(missing_ok=True)
    written = [file for file in found if file.path in rows]
    if len(written) < len(rows):
        lost = min(rows.keys() - {file.path for file in written})
        raise StateError(
            f"{folder / lost} was written by a worker, and is not there; give a path that all machines share"
        )
    size = sum(file.bytes for file in written)
    return msgspec.structs.replace(state, rows=sum(rows.values()), bytes=size, files=written)


def record_columns(schema: pa.Schema) -> pa.Schema:
    """The columns of a table of records, as they are on their way: the records', and their event time."""
    role = {ROLE: b"record"}
    return pa.schema([field if field.name == TIMESTAMP else field.with_metadata(role) for field in schema])


def write_records(
    spark: SparkSession,
    table: OperatorState,
    schema: pa.Schema,
    reading: Callable[[Iterable[pa.RecordBatch]], Iterator[pa.RecordBatch]],
    tasks: int,
    folder: UPath,
) -> OperatorState:
    """Write a table of records on their way, with the columns `schema`: a file for each task that has some.

    `reading` gives the records of the tasks whose numbers are in the column `id`.
    """

    def files(own: UPath) -> DataFrame:
        writing = rows_to_file(reading, schema, str(own))
        return spark.range(0, tasks, 1, tasks).mapInArrow(writing, spark_schema(WRITTEN))

    return write_files(table, files, folder)


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
        if table.operator.subtasks is not None:
            return table.pages_of_subtasks(self.spark, self.folder, state, table.operator.subtasks)
        if group is None:
            return table.pages(self.spark, self.folder, state, groups, watermark)
        return table.pages_in_groups(self.spark, self.folder, state, groups, watermark, group())

    def pages_in_body(self, uid: str, groups: int) -> DataFrame | None:
        """As `pages`, for an operator of an iteration, which has so many key groups or, of operator state, subtasks."""
        state, table = self.manifest.operator(uid), self.tables.get(uid)
        if state is None or table is None:
            return None
        if table.operator.subtasks is not None:
            return table.pages_of_subtasks(self.spark, self.folder, state, groups)
        return table.pages(self.spark, self.folder, state, groups, MIN_TIMESTAMP)


def starting_state(plan: Plan, spark: SparkSession, path: str, ignore_unclaimed: bool) -> StartingState:
    """The state that a savepoint has for the operators of a plan.

    Raises `StateError` where the savepoint is not whole, where it has state that no operator claims, unless that is
    ignored, and where an operator's state does not fit what the savepoint has.
    """
    folder, manifest = manifests.read(path)
    operators = stateful_in_all(plan, spark)
    known = {one.uid for one in operators}
    unclaimed = [one for one in manifest.operators if one.uid not in known and one.rows]
    if unclaimed and not ignore_unclaimed:
        first = unclaimed[0]
        raise StateError(
            f"{plan.name}: the savepoint in {folder} has state of operator '{first.name}' (uid '{first.uid}'), and no"
            f" operator has that uid: there are {', '.join(sorted(known)) or 'none with state'}; give the operator its"
            " uid again, or drop the state with execution.savepoint.ignore-unclaimed-state=true"
        )
    nodes = [node for node in plan.graph.nodes if isinstance(node, g.IterationNode)]
    streams = plan.execution.mode == "STREAMING"
    loops = {(node.uid, not node.takes_input_in_all_rounds) for node in nodes if streams or node.carries_state}
    waiting = [one for one in manifest.iterations if any(f.table.rows for f in one.feedback)]
    gone = next((one for one in waiting if (one.uid, one.bounded) not in loops), None)
    if gone is not None and not ignore_unclaimed:
        why = "BATCH begins a bounded iteration anew; start from it in STREAMING"
        if streams:
            why = f"no {gone.kind} iteration has that uid; give it its uid again"
        raise StateError(
            f"{plan.name}: the savepoint in {folder} has records that wait in the {gone.kind} iteration '{gone.name}'"
            f" (uid '{gone.uid}'), and {why}, or drop them with execution.savepoint.ignore-unclaimed-state=true"
        )
    logs = {one.relay for one in cross_query_streams(plan) if streams}
    lost = next((one for one in manifest.handed_on if one.rows and one.uid not in logs), None)
    if lost is not None and not ignore_unclaimed:
        raise StateError(
            f"{plan.name}: the savepoint in {folder} has {lost.rows:,} records that '{lost.name}' has handed on behind"
            " an iteration, and it hands on nothing there now; keep the uids of the operators before and behind"
            " iterations, or drop the records with execution.savepoint.ignore-unclaimed-state=true"
        )
    claimed = [one for one in operators if manifest.operator(one.uid) is not None]
    roles = ("key",) if ignore_unclaimed else ROLES  # a state without a role need not be declared
    stored = {one.uid: table_schema(one, roles) for one in manifest.operators if one.uid in known}
    tables = operator_tables(plan, spark, claimed, stored)
    return StartingState(plan, spark, folder, manifest, {table.operator.uid: table for table in tables})
