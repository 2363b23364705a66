"""Runs the levels of a loop on Spark, and brings records into it and out of it.

A level's job has a task for each subtask and carries control only. A level of one subtask, such as an update of a model
behind `global_()`, runs in the driver's process, since a job for it would cost more than it does. Knows sessions and
the loop; neither when rounds are committed nor for whom they run.
"""

from __future__ import annotations

import functools
import os
from base64 import b85encode
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING

import msgspec

from dagster_unified.connectors.base import spark_schema
from dagster_unified.engine.iterations.files import StoredParcel
from dagster_unified.engine.iterations.journal import StoredState
from dagster_unified.engine.iterations.worker import (
    REPORT,
    ROUND,
    Job,
    Report,
    Share,
    Told,
    decode_report,
    read_output,
    read_pages,
    run_level,
    run_level_as_told,
    send_again,
    store_pages,
    take_in,
    turn_of,
)
from dagster_unified.engine.rounds.copies import afresh
from dagster_unified.engine.rounds.rounds import LevelResult, Parcel
from dagster_unified.engine.session import is_connect
from dagster_unified.engine.shipping import Payload
from dagster_unified.errors import PipelineError
from dagster_unified.graph import nodes as g
from dagster_unified.graph.plan import Port
from dagster_unified.operators.functions.base import Subtask
from dagster_unified.operators.layout import CARRIED_LAYOUT, StreamLayout
from dagster_unified.operators.metrics import merge
from dagster_unified.operators.rounds.spec import Loop
from dagster_unified.state.manifest import OperatorState

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession


_AS_PROPERTY = 1 << 15
"""Bytes that all subtasks are told together: Spark sends a job's properties with each of its tasks."""


_IS_PINNED = os.environ.get("PYSPARK_PIN_THREAD", "true").lower() == "true"
"""Whether a thread sets the properties of its own jobs, and of no others."""


class SparkLevels:
    """The levels of one loop. `check` raises where the run is to stop."""

    def __init__(self, spark: SparkSession, loop: Loop, folder: str, check: Callable[[], None]) -> None:
        self.spark, self.loop, self.folder, self._check = spark, loop, folder, check
        self.files: list[str] = []
        """What tasks have written since somebody took it."""

        self._states: dict[tuple[int, int], StoredState] = {}
        self._payload = _pickled(loop)
        self._report = spark_schema(REPORT)
        self._rows: dict[int, DataFrame] = {}
        self._plans: dict[int, DataFrame] = {}
        """The levels that have run, by number."""

    @property
    def states(self) -> list[StoredState]:
        """Where the state of each subtask is."""
        return list(self._states.values())

    @states.setter
    def states(self, states: Iterable[StoredState]) -> None:
        self._states = {(state.level, state.subtask): state for state in states}

    def run(
        self,
        level: int,
        epoch: int,
        terminated: bool,
        inbox: Sequence[Parcel[StoredParcel]],
        replayed: Sequence[Parcel[StoredParcel]] = (),
        epochs: int = 1,
    ) -> LevelResult[StoredParcel]:
        """Runs a level of a round, or of a block of epochs, in all its subtasks."""
        self._check()
        shares = list(map(msgspec.msgpack.encode, self._shares(level, inbox, replayed)))
        job, told = Job(self._payload, self.folder, level), Told(epoch, terminated, shares, epochs)
        if len(shares) == 1:
            functions = functools.partial(afresh, self.loop, level)
            reports = [turn_of(job, told, self.loop, functions(), Subtask(), functions)]
        else:
            reports = self._in_tasks(job, told)
        found: LevelResult[StoredParcel] = LevelResult()
        for report in reports:
            self.files += report.files
            self._states.update({(state.level, state.subtask): state for state in report.states})
            metrics = merge([report.metrics])
            sent, fed_back = parcels(report.sent), parcels(report.fed_back)
            found.add(LevelResult(sent, fed_back, report.feedback, report.criteria, report.epochs, metrics))
        return found

    def _in_tasks(self, job: Job, told: Told) -> list[Report]:
        """Runs a level in a task for each subtask.

        What little they are told is a property of the job, so that all rounds have one plan: to make one took a fifth
        of an empty round. More is sent with a plan of its own.
        """
        tasks = self._tasks(len(told.shares))
        if is_connect(self.spark) or not _IS_PINNED or sum(map(len, told.shares)) > _AS_PROPERTY:
            return collected(tasks.mapInArrow(functools.partial(run_level, job, told), self._report))
        if job.level not in self._plans:
            self._plans[job.level] = tasks.mapInArrow(functools.partial(run_level_as_told, job), self._report)
        context = self.spark.sparkContext
        context.setLocalProperty(ROUND, b85encode(msgspec.msgpack.encode(told)).decode())
        try:
            return collected(self._plans[job.level])
        finally:
            context.setLocalProperty(ROUND, None)  # type: ignore[arg-type]  # which removes it

    def _shares(
        self, number: int, inbox: Sequence[Parcel[StoredParcel]], replayed: Sequence[Parcel[StoredParcel]]
    ) -> list[Share]:
        """What each subtask of a level is given."""
        level = self.loop.levels[number]
        shares = [Share(state=self._states.get((number, subtask))) for subtask in range(level.subtasks)]
        for parcel in inbox:
            for subtask in level.readers(parcel.slot, parcel.target):
                shares[subtask].inbox.append(parcel.records)
        for parcel in replayed:
            for subtask in level.readers(parcel.slot, parcel.target):
                shares[subtask].replayed.append(parcel.records)
        return shares

    def taken(self, inputs: Sequence[DataFrame]) -> tuple[list[StoredParcel], list[StoredParcel]]:
        """Writes the records of the inputs to where they are read: those that come once, and the replayed ones."""
        once: list[StoredParcel] = []
        replayed: list[StoredParcel] = []
        for number, frame in enumerate(inputs):
            taking = functools.partial(take_in, self._payload, self.folder, number)
            into = replayed if number in self.loop.replayed else once
            for report in collected(frame.mapInArrow(taking, self._report)):
                into += report.sent
        return once, replayed

    def pages(self, level: int, one: int, states: Iterable[StoredState]) -> DataFrame:
        """The pages of a pass in some states, in the columns of `CARRIED_LAYOUT`."""
        own = tuple(msgspec.msgpack.encode(state) for state in states if state.level == level)
        reading = functools.partial(read_pages, self.folder, one, own)
        numbers = self.spark.range(0, len(own), 1, max(len(own), 1))
        return numbers.mapInArrow(reading, spark_schema(CARRIED_LAYOUT.schema))

    def store(self, level: int, one: int, pages: DataFrame) -> list[StoredState]:
        """Stores such pages, of whichever subtasks they are."""
        storing = functools.partial(store_pages, self.folder, level, one)
        reports = collected(pages.mapInArrow(storing, self._report))
        self.files += [file for report in reports for file in report.files]
        return [state for report in reports for state in report.states]

    def send_again(self, slot: int, savepoint: str, table: OperatorState) -> list[StoredParcel]:
        """Sends the records of a savepoint's table to a slot: those of a file keep their order."""
        sending = functools.partial(send_again, self._payload, self.folder, slot, savepoint, table)
        reports = collected(self._tasks(len(table.files)).mapInArrow(sending, self._report)) if table.files else []
        self.files += [file for report in reports for file in report.files]
        return [parcel for report in reports for parcel in report.sent]

    def frames(self, node: g.IterationNode, outputs: Sequence[StoredParcel]) -> dict[Port, DataFrame]:
        """The outputs of an iteration as DataFrames."""
        return {
            Port(node.id, g.output_tag(tail.number)): self._frame(tail, slot.number, outputs, node.timestamped)
            for tail, slot in zip(node.outputs, self.loop.outputs, strict=True)
        }

    def _frame(self, tail: g.TailNode, slot: int, outputs: Sequence[StoredParcel], timestamped: bool) -> DataFrame:
        """One output: each task reads what one subtask emitted, in its order."""
        emitted: list[list[StoredParcel]] = [[]]
        for parcel in outputs:
            if parcel.slot == slot:
                emitted += [[] for _ in range(len(emitted), parcel.target + 1)]
                emitted[parcel.target].append(parcel)
        held = tail.layout
        schema = StreamLayout(held.records, timestamped).schema
        reading = functools.partial(
            read_output, self.folder, held.schema, schema, tuple(map(msgspec.msgpack.encode, emitted))
        )
        return self._tasks(len(emitted)).mapInArrow(reading, spark_schema(schema))

    def _tasks(self, subtasks: int) -> DataFrame:
        """A row for each subtask, in a partition of its own."""
        if subtasks not in self._rows:
            self._rows[subtasks] = self.spark.range(0, subtasks, 1, subtasks)
        return self._rows[subtasks]


def parcels(stored: Iterable[StoredParcel]) -> list[Parcel[StoredParcel]]:
    """Stored records as they are sent."""
    return [Parcel(parcel.slot, parcel.target, parcel) for parcel in stored]


def collected(reports: DataFrame) -> list[Report]:
    """What the tasks of a job report, in the order of their partitions."""
    return [decode_report(row["report"]) for row in reports.collect()]


def _pickled(loop: Loop) -> Payload:
    functions = [step.function for level in loop.levels for one in level.passes for step in one.program.steps]
    try:
        return Payload.of(loop, functions)
    except Exception as error:
        raise PipelineError(
            f"{loop.where}: its body cannot be sent to Spark's workers: {error}; create connections, locks and open"
            " files in open(), not before"
        ) from error
