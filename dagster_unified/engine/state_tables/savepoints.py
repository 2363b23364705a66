"""Writes a savepoint's tables from the pages of key groups, and reads them as the state that a job starts from."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, NamedTuple

import msgspec
import pyarrow as pa
from upath import UPath

from dagster_unified.connectors.protocol.frame import spark_schema
from dagster_unified.engine.failures import translated
from dagster_unified.engine.session import cores
from dagster_unified.engine.shipping import Payload
from dagster_unified.engine.state_tables import worker
from dagster_unified.errors import StateError
from dagster_unified.graph import nodes as g
from dagster_unified.graph.execution_graph import keyed_program
from dagster_unified.graph.loops import body_plan
from dagster_unified.graph.plan import Plan
from dagster_unified.graph.queries import cross_query_streams
from dagster_unified.operators.layout import CARRIED_LAYOUT, TIMESTAMP
from dagster_unified.operators.state.table import ROLE
from dagster_unified.operators.time import MIN_TIMESTAMP
from dagster_unified.state import manifest as manifests
from dagster_unified.state.manifest import (
    ROLES,
    Manifest,
    OperatorState,
    columns_of,
    from_spark,
    table_schema,
    to_spark,
)
from dagster_unified.state.tables import Split, files_in, splits

if TYPE_CHECKING:
    from pyspark.sql import Column, DataFrame, SparkSession


class Stateful(NamedTuple):
    """An operator whose state a savepoint holds."""

    plan: Plan
    """The plan that it is of: that of its pipeline, or of the body of an iteration."""

    node: g.Node
    uid: str
    """Its uid in a savepoint."""

    subtasks: int | None = None
    """By how many subtasks it keeps operator state; None for keyed state."""


@dataclass(frozen=True)
class OperatorTable:
    """The table of one operator with state."""

    operator: Stateful
    payload: Payload
    schema: pa.Schema

    def files(self, pages: DataFrame, folder: UPath) -> DataFrame:
        """Return the files of its rows, which tasks write into a folder, from pages as in `CARRIED_LAYOUT`."""
        return self.files_of_groups(pages.repartition("group").sortWithinPartitions("group", "page"), folder)

    def files_of_groups(self, pages: DataFrame, folder: UPath) -> DataFrame:
        """As `files`, from pages of which those of a group lie together."""
        rows = partial(worker.to_rows, self.payload)
        writing = partial(worker.rows_to_file, rows, self.schema, str(folder))
        return pages.mapInArrow(writing, spark_schema(worker.WRITTEN))

    def files_left(self, pages: DataFrame, folder: UPath) -> DataFrame:
        """As `files`, of finished files: each is the state of a row in the columns of `CARRIED_LAYOUT`."""
        return pages.mapInArrow(partial(worker.files_left, str(folder)), spark_schema(worker.WRITTEN))

    def pages(self, spark: SparkSession, folder: UPath, state: OperatorState, groups: int, watermark: int) -> DataFrame:
        """Pages of the key groups of a STREAMING job, from its rows in a savepoint, which tasks read."""
        from pyspark.sql import functions as F

        file_splits = splits(folder, state)
        reading = partial(worker.read_slices, self.payload, groups, str(folder), state, file_splits)
        slices = _numbers(spark, file_splits).mapInArrow(reading, spark_schema(worker.SLICES))
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

        file_splits, stored = splits(folder, state), from_spark(state.schema)
        keys = pa.schema([stored.field(column.name) for column in state.columns if column.role == "key"])
        reading = partial(worker.read_keys, str(folder), state, file_splits, keys.names)
        chosen = _numbers(spark, file_splits).mapInArrow(reading, spark_schema(keys.append(worker.SPLIT_FIELD)))
        chosen = chosen.select(F.col(worker.SPLIT), group.cast("int").alias(worker.GROUP))
        slicing = partial(worker.slices_in_groups, self.payload, groups, str(folder), state, file_splits)
        return self._pages(chosen.mapInArrow(slicing, spark_schema(worker.SLICES)), stored, watermark)

    def pages_of_subtasks(self, spark: SparkSession, folder: UPath, state: OperatorState, subtasks: int) -> DataFrame:
        """Pages of so many subtasks, from its rows in a savepoint, all of which one task reads."""
        file_splits = splits(folder, state)
        reading = partial(worker.read_subtasks, self.payload, str(folder), state, file_splits, subtasks)
        numbers = spark.range(0, max(len(file_splits), 1), 1, 1)  # a task also where no subtask had state
        return numbers.mapInArrow(reading, spark_schema(CARRIED_LAYOUT.schema))

    def divided(self, pages: DataFrame, before: int, count: int) -> DataFrame:
        """Return the pages of `count` subtasks with operator state, from those of the subtasks before."""
        rows = pages.coalesce(1).sortWithinPartitions("group", "page")
        rows = rows.mapInArrow(partial(worker.to_rows, self.payload), spark_schema(self.schema))
        divided = partial(worker.to_subtasks, self.payload, self.schema, before, count)
        return rows.mapInArrow(divided, spark_schema(CARRIED_LAYOUT.schema))

    def _pages(self, slices: DataFrame, stored: pa.Schema, watermark: int) -> DataFrame:
        spread = slices.repartition("group").sortWithinPartitions("group")
        filling = partial(worker.to_pages, self.payload, stored, watermark)
        return spread.mapInArrow(filling, spark_schema(CARRIED_LAYOUT.schema))


def _numbers(spark: SparkSession, file_splits: Sequence[Split]) -> DataFrame:
    return spark.range(0, len(file_splits), 1, max(len(file_splits), 1))


def operator_tables(
    plan: Plan, spark: SparkSession, operators: Sequence[Stateful], stored: Mapping[str, pa.Schema]
) -> list[OperatorTable]:
    """Return the tables of some operators, which a worker opens to learn their state.

    `stored` are the columns that a savepoint has of an operator, by its uid. Raises `StateError` where an operator's
    state does not fit them.
    """
    if not operators:
        return []
    payloads = [worker.payload_of(keyed_program(operator.plan, operator.node)) for operator in operators]
    schemas_before = [stored.get(operator.uid) for operator in operators]
    numbers = spark.range(0, len(operators), 1, 1)
    described = numbers.mapInArrow(partial(worker.describe, payloads, schemas_before), spark_schema(worker.DESCRIBED))
    try:
        answers = described.collect()
    except Exception as error:
        raise translated(error, plan, "savepoint", spark) from error
    schemas = {row["operator"]: pa.ipc.read_schema(pa.py_buffer(bytes(row["schema"]))) for row in answers}
    return [OperatorTable(operator, payloads[i], schemas[i]) for i, operator in enumerate(operators)]


def stateful(plan: Plan) -> list[Stateful]:
    """Return the operators of a plan whose state a savepoint holds, without those in the bodies of iterations."""
    nodes = [node for node in plan.graph.nodes if node.runs_by_key]
    return [Stateful(plan, node, node.uid, plan.subtasks_with_state(node)) for node in nodes]


def stateful_in_body(plan: Plan, node: g.IterationNode, parallelism: int) -> list[Stateful]:
    """Return the operators of an unbounded iteration, on so many subtasks, whose state a savepoint holds.

    Those of a bounded one have no state before it runs, and none behind it.
    """
    if not node.is_unbounded:
        return []
    body = body_plan(plan, node, parallelism)
    return [
        Stateful(
            body, operator, uid_in(node, operator.uid), operator.parallelism if operator.holds_subtask_state else None
        )
        for operator in body.graph.nodes
        if operator.runs_by_key and operator.id not in node.per_round
    ]


def uid_in(iteration: g.IterationNode, uid: str) -> str:
    """Return the uid that a savepoint has for an operator of a body."""
    return f"{iteration.uid}.{uid}"


def stateful_in_all(plan: Plan, spark: SparkSession) -> list[Stateful]:
    """Return the operators whose state a savepoint holds, in the bodies of iterations as well.

    Raises `StateError` where two of them would have one uid.
    """
    operators = stateful(plan)
    for node in plan.graph.nodes:
        if isinstance(node, g.IterationNode):
            count = node.parallelism or plan.execution.parallelism or cores(spark)
            operators += stateful_in_body(plan, node, count)
    twice = next(
        (operator for operator in operators if sum(other.uid == operator.uid for other in operators) > 1), None
    )
    if twice is not None:
        raise StateError(
            f"{plan.name}: a savepoint would know operator '{twice.node.name}' and another one by the uid '{twice.uid}'"
            " (that of an operator in an iteration begins with the iteration's); give one of them another uid"
        )
    return operators


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
    """Return a table that an attempt is about to write; `kind` distinguishes it from the state of the operator."""
    place = f"{attempt}/{manifests.folder_of(uid)}{kind}"
    return OperatorState(uid, name, place, columns_of(schema), to_spark(schema), 0, 0, [])


def write_files(state: OperatorState, files: Callable[[UPath], DataFrame], folder: UPath) -> OperatorState:
    """Write a table into a savepoint's folder; `files` are those that tasks write into the table's own."""
    name = state.folder
    table_folder = folder / name
    table_folder.mkdir(parents=True, exist_ok=True)
    rows = {f"{name}/{row['name']}": int(row["rows"]) for row in files(table_folder).collect()}
    files_there = files_in(table_folder, folder)
    for file in files_there:
        if file.path not in rows:  # of an attempt of a task that failed, or was not the first
            (folder / file.path).unlink(missing_ok=True)
    written = [file for file in files_there if file.path in rows]
    if len(written) < len(rows):
        lost = min(rows.keys() - {file.path for file in written})
        raise StateError(
            f"{folder / lost} was written by a worker, and is not there; give a path that all machines share"
        )
    size = sum(file.bytes for file in written)
    return msgspec.structs.replace(state, rows=sum(rows.values()), bytes=size, files=written)


def record_columns(schema: pa.Schema) -> pa.Schema:
    """Return the columns of a table of records that wait: the records', and their event time."""
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
    """Write a table of records that wait, with the columns `schema`: a file for each task that has some.

    `reading` gives the records of the tasks whose numbers are in the column `id`.
    """

    def files(table_folder: UPath) -> DataFrame:
        writing = partial(worker.rows_to_file, reading, schema, str(table_folder))
        return spark.range(0, tasks, 1, tasks).mapInArrow(writing, spark_schema(worker.WRITTEN))

    return write_files(table, files, folder)


@dataclass(frozen=True)
class StartingState:
    """The state from which a job of `plan` starts, matched by uid."""

    plan: Plan
    spark: SparkSession
    folder: UPath
    manifest: Manifest
    tables: Mapping[str, OperatorTable]

    def pages(self, uid: str, groups: int, group: Callable[[], Column] | None = None) -> DataFrame | None:
        """Return an operator's state as pages of key groups; None where the savepoint has none of it.

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
        """As `pages`, for an operator of an iteration with so many key groups or, of operator state, subtasks."""
        state, table = self.manifest.operator(uid), self.tables.get(uid)
        if state is None or table is None:
            return None
        if table.operator.subtasks is not None:
            return table.pages_of_subtasks(self.spark, self.folder, state, groups)
        return table.pages(self.spark, self.folder, state, groups, MIN_TIMESTAMP)


def starting_state(plan: Plan, spark: SparkSession, path: str, ignore_unclaimed: bool) -> StartingState:
    """Return a savepoint's state for the operators of a plan.

    Raises `StateError` where the savepoint is not complete, where it has state that no operator claims, unless that is
    ignored, and where an operator's state does not fit the savepoint's.
    """
    folder, manifest = manifests.read(path)
    operators = stateful_in_all(plan, spark)
    known = {operator.uid for operator in operators}
    unclaimed = [operator for operator in manifest.operators if operator.uid not in known and operator.rows]
    if unclaimed and not ignore_unclaimed:
        first = unclaimed[0]
        raise StateError(
            f"{plan.name}: the savepoint in {folder} has state of operator '{first.name}' (uid '{first.uid}'), and no"
            f" operator has that uid: there are {', '.join(sorted(known)) or 'none with state'}; give the operator its"
            " uid again, or drop the state with execution.savepoint.ignore-unclaimed-state=true"
        )
    nodes = [node for node in plan.graph.nodes if isinstance(node, g.IterationNode)]
    streams = plan.execution.mode == "STREAMING"
    loops = {(node.uid, not node.is_unbounded) for node in nodes if streams or node.carries_state}
    waiting = [iteration for iteration in manifest.iterations if any(f.table.rows for f in iteration.feedback)]
    iteration_gone = next((iteration for iteration in waiting if (iteration.uid, iteration.bounded) not in loops), None)
    if iteration_gone is not None and not ignore_unclaimed:
        why = "BATCH begins a bounded iteration anew; start from it in STREAMING"
        if streams:
            why = f"no {iteration_gone.kind} iteration has that uid; give it its uid again"
        raise StateError(
            f"{plan.name}: the savepoint in {folder} has records that wait in the {iteration_gone.kind} iteration"
            f" '{iteration_gone.name}' (uid '{iteration_gone.uid}'), and {why}, or drop them with"
            " execution.savepoint.ignore-unclaimed-state=true"
        )
    logs = {stream.log for stream in cross_query_streams(plan) if streams}
    stream_gone = next((stream for stream in manifest.handed_on if stream.rows and stream.uid not in logs), None)
    if stream_gone is not None and not ignore_unclaimed:
        raise StateError(
            f"{plan.name}: the savepoint in {folder} has {stream_gone.rows:,} records that '{stream_gone.name}' has"
            " handed on behind an iteration, and it hands on nothing there now; keep the uids of the operators before"
            " and behind iterations, or drop the records with execution.savepoint.ignore-unclaimed-state=true"
        )
    claimed = [operator for operator in operators if manifest.operator(operator.uid) is not None]
    roles = ("key",) if ignore_unclaimed else ROLES  # a state without a role need not be declared
    stored = {operator.uid: table_schema(operator, roles) for operator in manifest.operators if operator.uid in known}
    tables = operator_tables(plan, spark, claimed, stored)
    return StartingState(plan, spark, folder, manifest, {table.operator.uid: table for table in tables})
