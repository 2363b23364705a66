"""Runs an iteration of a BATCH stage: takes its inputs in, then round after round, each committed before the next.

A round's job has a task for each subtask and carries control only. A level of one subtask, such as an update of a model
behind `global_()`, runs in the driver's process, since a job for it would cost more than it does. What a killed run
left goes on after the last round that was committed.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import msgspec

from dagster_unified.connectors.base import spark_schema
from dagster_unified.connectors.paths import is_local, path_text, remove_tree
from dagster_unified.engine.batch.intermediates.store import Address, IterationSummary, Manifest
from dagster_unified.engine.batch.iterations.files import StoredParcel
from dagster_unified.engine.batch.iterations.journal import Epoch, Input, Journal
from dagster_unified.engine.batch.iterations.worker import (
    REPORT,
    Job,
    Report,
    decode_report,
    read_output,
    run_level,
    take_in,
    turn_of,
)
from dagster_unified.engine.batch.run import Run
from dagster_unified.engine.events import IterationResumed, RoundCommitted
from dagster_unified.engine.rounds.compile import compiled
from dagster_unified.engine.rounds.rounds import LevelResult, Parcel, Round, outputs_of, run_rounds, terminate
from dagster_unified.engine.shipping import Payload
from dagster_unified.errors import PipelineError, UnsupportedError
from dagster_unified.graph import nodes as g
from dagster_unified.graph.fingerprint import digest
from dagster_unified.graph.plan import Port, Region
from dagster_unified.operators.functions.base import Subtask
from dagster_unified.operators.metrics import Metrics, merge
from dagster_unified.operators.rounds.spec import Loop

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession
    from upath import UPath


@dataclass
class Iterations:
    """The iterations of a stage."""

    run: Run
    region: Region
    inputs: Mapping[int, Manifest]
    """The intermediates that the stage reads."""

    metrics: list[Metrics] = field(default_factory=list)
    summaries: dict[str, IterationSummary] = field(default_factory=dict)
    """What became of them, by name."""

    def outputs(
        self, node: g.IterationNode, inputs: Sequence[DataFrame], reported: Callable[[], Metrics]
    ) -> dict[Port, DataFrame]:
        """The outputs of an iteration over some inputs: runs it, from where it was left.

        `reported` gives what operators before it have measured, once the inputs have been computed.
        """
        folder = self._folder(node)
        if not is_local(folder):
            raise UnsupportedError(
                f"{self.run.plan.name}: iteration '{node.name}' keeps its rounds below {folder}, and workers map them"
                " from a folder that all of them share; put intermediates on such a folder, not into a bucket"
            )
        one = _Iteration(self.run, self.region, node, path_text(folder))
        found = one.frames(one.rounds(inputs, reported))
        self.metrics.append(one.metrics)
        self.summaries[node.uid if node.name in self.summaries else node.name] = one.summary()
        return found

    def forget(self) -> None:
        """Removes what the iterations kept, once the stage is committed."""
        for node in self.run.plan.graph.nodes:
            if isinstance(node, g.IterationNode) and node.id in self.region.nodes:
                remove_tree(self._folder(node))

    def _folder(self, node: g.IterationNode) -> UPath:
        """Of the stage, for its code and its input: a retry and a re-execution find it again."""
        read = [self.inputs[number].data for number in self.region.inputs]
        mark = digest(self.region.fingerprint, node.uid, *read)[:16]
        run = self.run
        address = Address(run.plan.name, self.region.name, run.execution, run.partition)
        return run.store.folder(address) / f"iteration-{mark}"


class _Iteration:
    """One iteration of one stage."""

    def __init__(self, run: Run, region: Region, node: g.IterationNode, folder: str) -> None:
        self.stage, self.region, self.node, self.folder = run, region, node, folder
        self.journal = Journal(folder)
        held = self.journal.input
        given = node.parallelism or run.plan.execution.parallelism
        parallelism = held.parallelism if held is not None else given or _cores(run.spark)
        self.loop = compiled(run.plan, node, parallelism)
        self.payload = _pickled(self.loop)
        self.metrics = Metrics()
        self._report = spark_schema(REPORT)
        self._rows: dict[int, DataFrame] = {}
        self._begun = time.monotonic()
        self._files: list[str] = []
        """What the tasks of the round have written."""

        last = self.journal.last
        self._states = {(state.level, state.subtask): state for state in last.states} if last is not None else {}

    def rounds(self, inputs: Sequence[DataFrame], reported: Callable[[], Metrics]) -> list[StoredParcel]:
        """Runs all rounds that have not been run, and returns where the records of the outputs are."""
        held = self.journal.input or self._take_in(inputs, reported)
        self.metrics.add(merge([held.metrics]))
        last = self.journal.last
        begin, epoch = _parcels(held.once), 0
        if last is not None:
            self.stage.observe(IterationResumed(self.region.name, self.node.name, last.number))
            self.metrics.add(merge(epoch.metrics for epoch in self.journal.epochs))
            begin, epoch = _parcels(last.fed_back), last.number + 1
        if last is not None and last.reason:
            ended = terminate(self.loop, self, last.number)
        else:
            self._begun = time.monotonic()
            ended = run_rounds(self.loop, self, _parcels(held.replayed), begin, epoch, self._commit)
        self.metrics.add(ended.metrics)
        emitted = [parcel for one in self.journal.epochs for parcel in one.outputs]
        return emitted + [parcel.records for parcel in outputs_of(self.loop, ended.sent)]

    def frames(self, outputs: Sequence[StoredParcel]) -> dict[Port, DataFrame]:
        """The outputs as DataFrames."""
        return {
            Port(self.node.id, g.output_tag(tail.number)): self._frame(tail, slot.number, outputs)
            for tail, slot in zip(self.node.outputs, self.loop.outputs, strict=True)
        }

    def summary(self) -> IterationSummary:
        """What became of it."""
        epochs = self.journal.epochs
        return IterationSummary(
            rounds=len(epochs),
            feedback=[epoch.feedback for epoch in epochs],
            criteria=[epoch.criteria for epoch in epochs] if self.loop.has_criteria else [],
            seconds=sum(epoch.seconds for epoch in epochs),
            reason=epochs[-1].reason,
        )

    # Levels

    def run(
        self, level: int, epoch: int, terminated: bool, inbox: Sequence[Parcel[StoredParcel]]
    ) -> LevelResult[StoredParcel]:
        """Runs a level of a round: in the driver's process where it has one subtask, else as a Spark job."""
        self.stage.check()
        states = tuple(state for state in self._states.values() if state.level == level)
        stored = tuple(parcel.records for parcel in inbox)
        job = Job(self.payload, self.folder, level, epoch, terminated, stored, states)
        subtasks = self.loop.levels[level].subtasks
        if subtasks == 1:
            reports = [turn_of(job, Subtask())]
        else:
            reports = _collected(self._tasks(subtasks).mapInArrow(functools.partial(run_level, job), self._report))
        found: LevelResult[StoredParcel] = LevelResult()
        for report in reports:
            self._files += report.files
            self._states.update({(state.level, state.subtask): state for state in report.states})
            metrics = merge([report.metrics])
            sent, fed_back = _parcels(report.sent), _parcels(report.fed_back)
            found.add(LevelResult(sent, fed_back, report.feedback, report.criteria, metrics))
        return found

    def _tasks(self, subtasks: int) -> DataFrame:
        """A row for each subtask, in a partition of its own."""
        if subtasks not in self._rows:
            self._rows[subtasks] = self.stage.spark.range(0, subtasks, 1, subtasks)
        return self._rows[subtasks]

    def _commit(self, ended: Round[StoredParcel]) -> None:
        now = time.monotonic()
        epoch = Epoch(
            number=ended.epoch,
            feedback=ended.feedback,
            criteria=ended.criteria,
            fed_back=[parcel.records for parcel in ended.fed_back],
            outputs=[parcel.records for parcel in ended.outputs],
            states=list(self._states.values()),
            metrics=ended.metrics.encode(),
            seconds=now - self._begun,
            reason=ended.reason,
        )
        self.journal.commit(epoch, self._files)
        self._files, self._begun = [], now
        self.metrics.add(ended.metrics)
        self.stage.observe(RoundCommitted(self.region.name, self.node.name, epoch))

    # Records in and out

    def _take_in(self, inputs: Sequence[DataFrame], reported: Callable[[], Metrics]) -> Input:
        """Writes the records of the inputs to where they are read, and commits them."""
        once: list[StoredParcel] = []
        replayed: list[StoredParcel] = []
        for number, frame in enumerate(inputs):
            taking = functools.partial(take_in, self.payload, self.folder, number)
            for report in _collected(frame.mapInArrow(taking, self._report)):
                (replayed if number in self.loop.replayed else once).extend(report.sent)
        self.stage.check()
        found = Input(self.loop.parallelism, once, replayed, reported().encode())
        self.journal.begin(found)
        return found

    def _frame(self, tail: g.TailNode, slot: int, outputs: Sequence[StoredParcel]) -> DataFrame:
        """One output: a row says where some of its records are, and workers read them."""
        schema = tail.layout.schema
        rows = [(msgspec.json.encode(parcel).decode(),) for parcel in outputs if parcel.slot == slot]
        spark = self.stage.spark
        parts = max(1, min(len(rows), self.loop.parallelism))
        places = spark.createDataFrame(rows, "parcel string").repartition(parts)
        reading = functools.partial(read_output, self.folder, schema)
        return places.mapInArrow(reading, spark_schema(schema))


def _collected(reports: DataFrame) -> list[Report]:
    return [decode_report(row["report"]) for row in reports.collect()]


def _parcels(stored: Sequence[StoredParcel]) -> list[Parcel[StoredParcel]]:
    return [Parcel(parcel.slot, parcel.target, parcel) for parcel in stored]


def _pickled(loop: Loop) -> Payload:
    functions = [step.function for level in loop.levels for one in level.passes for step in one.program.steps]
    try:
        return Payload.of(loop, functions)
    except Exception as error:
        raise PipelineError(
            f"{loop.where}: its body cannot be sent to Spark's workers: {error}; create connections, locks and open"
            " files in open(), not before"
        ) from error


def _cores(spark: SparkSession) -> int:
    """How many tasks run at once: as many as Spark makes partitions of a range."""
    from pyspark.sql import functions as F

    return spark.range(1 << 12).select(F.spark_partition_id().alias("partition")).distinct().count()
