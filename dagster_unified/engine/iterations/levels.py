"""Runs the levels of a loop on Spark, and brings records into it and out of it.

Only control goes through Spark: tasks that stay are told of one level after another on one machine, and elsewhere the
job of a level has a task for each subtask. Knows sessions and the loop; neither when epochs are committed nor for whom
they run.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING

import msgspec

from dagster_unified.by_value import sent
from dagster_unified.connectors.protocol.frame import spark_schema
from dagster_unified.engine.iterations.epoch_log import StoredState
from dagster_unified.engine.iterations.files import IterationFolder, StoredMessage
from dagster_unified.engine.iterations.jobs import IS_PINNED, ResidentTasks, SeparateJobs, can_stay
from dagster_unified.engine.iterations.loop import Levels
from dagster_unified.engine.iterations.worker import (
    ANSWER,
    REPORT,
    Order,
    Report,
    carry_out,
    decode_answer,
    decode_report,
    read_output,
    read_pages,
    run_subtasks,
    send_again,
    store_pages,
    take_in,
)
from dagster_unified.engine.shipping import Payload
from dagster_unified.graph import nodes as g
from dagster_unified.graph.nodes import Port
from dagster_unified.operators.iteration import LevelResult, Loop
from dagster_unified.operators.layout import CARRIED_LAYOUT, StreamLayout
from dagster_unified.operators.metrics import merge
from dagster_unified.spark_internals.placing import EXECUTOR, Placing
from dagster_unified.state.manifest import OperatorState
from dagster_unified.storage.object_store import is_connect

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession


class SparkLevels(Levels[StoredMessage]):
    """The levels of one loop. `check` raises where the run is to stop."""

    def __init__(self, spark: SparkSession, loop: Loop, folder: str, check: Callable[[], None] = lambda: None) -> None:
        self.spark, self.loop, self.folder, self._check = spark, loop, folder, check
        self.files: list[str] = []
        """The files that tasks have written since the last look."""

        self._states: dict[tuple[int, int], StoredState] = {}
        self._payload = _pickled(loop)
        self._carry_out = functools.partial(carry_out, self._payload, folder)
        self._report = spark_schema(REPORT)
        self._placing = Placing(spark, copies=not IterationFolder(folder).is_shared)
        self._tasks: ResidentTasks | SeparateJobs | None = None
        """Carries out orders while there are many epochs; None where each level has a job."""

        self._started: dict[int, int] = {}
        """The epoch that each subtask has started last, where they run apart."""

        self._unsettled: dict[int, dict[int, Report]] = {}
        """The results of subtasks in epochs that not all have ended."""

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
        inbox: Sequence[StoredMessage],
        replayed: Sequence[StoredMessage] = (),
    ) -> LevelResult[StoredMessage]:
        self._check()
        readers = self.loop.levels[level]
        orders = [
            Order(level, subtask, epoch, terminated, self._states.get((level, subtask)), [])
            for subtask in range(readers.subtasks)
        ]
        for message in (*replayed, *inbox):
            for subtask in readers.readers(message.buffer, message.target):
                orders[subtask].inbox.append(message)
        result: LevelResult[StoredMessage] = LevelResult()
        for report in self._in_tasks(level, [msgspec.msgpack.encode(order) for order in orders]):
            self._take(report)
            result.add(_result(report))
        return result

    def _take(self, report: Report) -> None:
        self.files += report.files
        self._states.update({(state.level, state.subtask): state for state in report.states})

    def give(
        self,
        subtask: int,
        epoch: int,
        inbox: Sequence[StoredMessage],
        replayed: Sequence[StoredMessage],
    ) -> None:
        self._check()
        before = self._unsettled.get(epoch - 1, {}).get(subtask)
        state = self._states.get((0, subtask)) if before is None else next(iter(before.states), None)
        order = Order(0, subtask, epoch, False, state, [*replayed, *inbox])
        assert self._tasks is not None
        self._started[subtask] = epoch
        self._tasks.give(subtask, msgspec.msgpack.encode(order))

    def ended(self) -> tuple[int, LevelResult[StoredMessage]]:
        assert self._tasks is not None
        subtask, answer = self._tasks.answered()
        report = decode_answer(answer)
        self._unsettled.setdefault(self._started[subtask], {})[subtask] = report
        return subtask, _result(report)

    def settle(self, epoch: int) -> None:
        for report in self._unsettled.pop(epoch).values():
            self._take(report)

    def _in_tasks(self, level: int, orders: Sequence[bytes]) -> list[Report]:
        """Have a task carry out the order of each subtask."""
        if self._tasks is None:
            return [decode_answer(answer) for answer in self._in_job(level, dict(enumerate(orders)))]
        for number, order in enumerate(orders):
            self._tasks.give(number, order)
        answers = dict(self._tasks.answered() for _ in orders)
        return [decode_answer(answers[number]) for number in range(len(orders))]

    def _in_job(self, level: int, orders: Mapping[int, bytes]) -> list[bytes]:
        """Carry out subtasks' orders in a job with a task for each, where the subtask ran last."""
        subtasks = list(orders)
        running = functools.partial(run_subtasks, self._carry_out, list(orders.values()))
        rows = self._placing.rows(level, subtasks).mapInArrow(running, spark_schema(ANSWER)).collect()
        self._placing.ran(level, {subtask: row[EXECUTOR] for subtask, row in zip(subtasks, rows, strict=True)})
        return [bytes(row["answer"]) for row in rows]

    @contextmanager
    def many_epochs(self) -> Iterator[None]:
        """Meanwhile tasks stay from level to level, where the session is one of this machine."""
        self._tasks = tasks = self._tasks_of_many_epochs()
        failed = True
        try:
            yield
            failed = False
        finally:
            self._tasks = None
            self._started.clear()
            self._unsettled.clear()
            if tasks is not None:
                tasks.close(failed)

    @property
    def run_apart(self) -> bool:
        return self._tasks is not None and self.loop.staleness > 0 and self.loop.levels[0].subtasks > 1

    def _tasks_of_many_epochs(self) -> ResidentTasks | SeparateJobs | None:
        if can_stay(self.spark):
            subtasks = max((level.subtasks for level in self.loop.levels), default=1)
            return ResidentTasks(self.spark, subtasks, self._carry_out)
        apart = self.loop.staleness > 0 and (is_connect(self.spark) or IS_PINNED)
        return SeparateJobs(self.spark, lambda subtask, order: self._in_job(0, {subtask: order})[0]) if apart else None

    def taken(self, inputs: Sequence[DataFrame]) -> tuple[list[StoredMessage], list[StoredMessage]]:
        """Write the records of the inputs to where they are read: those that come once, and the replayed ones."""
        once: list[StoredMessage] = []
        replayed: list[StoredMessage] = []
        for number, frame in enumerate(inputs):
            taking = functools.partial(take_in, self._payload, self.folder, number)
            into = replayed if number in self.loop.replayed else once
            for report in collected(frame.mapInArrow(taking, self._report)):
                into += report.sent
        return once, replayed

    def pages(self, level: int, pass_number: int, states: Iterable[StoredState]) -> DataFrame:
        """Return the pages of a pass in some states, in the columns of `CARRIED_LAYOUT`."""
        encoded = tuple(msgspec.msgpack.encode(state) for state in states if state.level == level)
        reading = functools.partial(read_pages, self.folder, pass_number, encoded)
        numbers = self.spark.range(0, len(encoded), 1, max(len(encoded), 1))
        return numbers.mapInArrow(reading, spark_schema(CARRIED_LAYOUT.schema))

    def store(self, level: int, pass_number: int, pages: DataFrame) -> list[StoredState]:
        """Store such pages, of whichever subtasks they are."""
        storing = functools.partial(store_pages, self.folder, level, pass_number)
        reports = collected(pages.mapInArrow(storing, self._report))
        self.files += [file for report in reports for file in report.files]
        return [state for report in reports for state in report.states]

    def send_again(self, buffer: int, savepoint: str, table: OperatorState) -> list[StoredMessage]:
        """Send the records of a savepoint's table to a buffer; those of a file keep their order."""
        sending = functools.partial(send_again, self._payload, self.folder, buffer, savepoint, table)
        reports = collected(self._rows(len(table.files)).mapInArrow(sending, self._report)) if table.files else []
        self.files += [file for report in reports for file in report.files]
        return [message for report in reports for message in report.sent]

    def frames(self, node: g.IterationNode, outputs: Sequence[StoredMessage]) -> dict[Port, DataFrame]:
        """Return the outputs of an iteration as DataFrames."""
        return {
            Port(node.id, g.output_tag(tail.number)): self._frame(tail, buffer.number, outputs, node.timestamped)
            for tail, buffer in zip(node.outputs, self.loop.outputs, strict=True)
        }

    def _frame(self, tail: g.TailNode, buffer: int, outputs: Sequence[StoredMessage], timestamped: bool) -> DataFrame:
        """Return one output: each task reads what one subtask emitted, in its order."""
        emitted: list[list[StoredMessage]] = [[]]
        for message in outputs:
            if message.buffer == buffer:
                emitted += [[] for _ in range(len(emitted), message.target + 1)]
                emitted[message.target].append(message)
        layout = tail.layout
        schema = StreamLayout(layout.records, timestamped).schema
        reading = functools.partial(
            read_output, self.folder, layout.schema, schema, tuple(map(msgspec.msgpack.encode, emitted))
        )
        return self._rows(len(emitted)).mapInArrow(reading, spark_schema(schema))

    def _rows(self, subtasks: int) -> DataFrame:
        return self.spark.range(0, subtasks, 1, subtasks)


def _result(report: Report) -> LevelResult[StoredMessage]:
    return LevelResult(
        sent=report.sent,
        fed_back=report.fed_back,
        late=report.late,
        feedback=report.feedback,
        criteria=report.criteria,
        metrics=merge([report.metrics]),
    )


def collected(reports: DataFrame) -> list[Report]:
    """Return what the tasks of a job report, in the order of their partitions."""
    return [decode_report(row["report"]) for row in reports.collect()]


def _pickled(loop: Loop) -> Payload:
    programs = [body_pass.program for level in loop.levels for body_pass in level.passes]
    functions = [step.function for program in programs for step in program.steps]
    return sent(programs, lambda: Payload.of(loop, functions), f"{loop.where}: its body")
