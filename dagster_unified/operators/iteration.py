"""An iteration as workers run it: levels of passes, routes between them, and one epoch of a subtask in a level."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import Enum
from typing import Generic, NamedTuple, Protocol, TypeAlias, TypeVar

import pyarrow as pa
import pyarrow.compute as pc

from dagster_unified.operators.drivers.batch import run_batch
from dagster_unified.operators.drivers.key_groups import ControlEvent, GroupInput, KeyGroups, MicroBatch
from dagster_unified.operators.functions.base import Subtask
from dagster_unified.operators.keys import sorted_runs
from dagster_unified.operators.layout import TIMESTAMP
from dagster_unified.operators.metrics import Metrics
from dagster_unified.operators.operator import PageStore
from dagster_unified.operators.program.run import RunningProgram
from dagster_unified.operators.program.step import Program
from dagster_unified.operators.routing import EVERYWHERE, Route, Sender, encode, in_columns
from dagster_unified.operators.time import MIN_TIMESTAMP

GROUPS_PER_SUBTASK = 16
"""Key groups of a keyed operator in each subtask: one of them is in memory at a time."""


def everywhere_but(subtask: int) -> int:
    """The channel of records for all subtasks but one, which has had them."""
    return EVERYWHERE - 1 - subtask


@dataclass(frozen=True)
class InputBuffer:
    """Where records wait for a pass, or leave the iteration."""

    number: int
    schema: pa.Schema
    reader: str
    """The uid of the operator that reads them, or of the end of the body."""

    broadcast: bool = False
    """Whether the operator gets them by broadcast."""


@dataclass(frozen=True)
class InputRoute:
    """How records become an input of the body: their columns, the keys that functions compute, and their routes."""

    columns: tuple[str | None, ...]
    schema: pa.Schema
    keys: Program | None
    routes: tuple[Route, ...]


@dataclass(frozen=True)
class OutputRoutes:
    """Where one output of a pass goes."""

    routes: tuple[Route, ...]
    feedback: tuple[InputRoute, ...] = ()
    """The variables that it becomes in the next epoch."""

    is_criteria: bool = False


class Driver(Enum):
    """How a pass is run."""

    PLAIN = "plain"
    """Its records are pushed through: none of its operators has state."""

    GROUPED = "grouped"
    """Its keyed head keeps state from epoch to epoch, in key groups."""

    BOUNDED = "bounded"
    """Each epoch is its whole input, and drops its state at the end."""


@dataclass(frozen=True)
class BodyPass:
    """Operators that run in one Python pass, and where their records come from."""

    number: int
    program: Program
    driver: Driver
    subtasks: int
    main: InputBuffer
    outputs: tuple[OutputRoutes, ...]
    broadcast: InputBuffer | None = None
    groups: int = 0
    """How many key groups all its subtasks have; 0 where the head is not keyed."""

    listens: bool = False
    """Whether a function in it is called in each epoch, also without records."""

    @property
    def buffers(self) -> tuple[int, ...]:
        """The numbers of the buffers that it reads."""
        return (self.main.number,) if self.broadcast is None else (self.main.number, self.broadcast.number)


@dataclass(frozen=True)
class Level:
    """Passes that run together, in this order."""

    passes: tuple[BodyPass, ...]

    @property
    def subtasks(self) -> int:
        return max(body_pass.subtasks for body_pass in self.passes)

    @property
    def buffers(self) -> frozenset[int]:
        return frozenset(number for body_pass in self.passes for number in body_pass.buffers)

    def is_for(self, subtask: int, buffer: int, channel: int) -> bool:
        """Whether records sent to a channel of a buffer are for a subtask."""
        if channel <= EVERYWHERE:
            return channel != everywhere_but(subtask)
        return self._subtask(buffer, channel) == subtask

    def readers(self, buffer: int, channel: int) -> list[int]:
        """The subtasks that read records sent to a channel of a buffer."""
        if channel <= EVERYWHERE:
            return [subtask for subtask in range(self.subtasks) if channel != everywhere_but(subtask)]
        return [self._subtask(buffer, channel)]

    def _subtask(self, buffer: int, channel: int) -> int:
        return channel % next(body_pass.subtasks for body_pass in self.passes if buffer in body_pass.buffers)


@dataclass(frozen=True)
class Loop:
    """The body of an iteration."""

    where: str
    """How an error names the iteration."""

    levels: tuple[Level, ...]
    buffers: tuple[InputBuffer, ...]
    """By their numbers."""

    inputs: tuple[InputRoute, ...]
    """The inputs of the body, the variables first."""

    replayed: frozenset[int]
    """The inputs whose records come again in every epoch."""

    outputs: tuple[InputBuffer, ...]
    has_criteria: bool
    parallelism: int
    staleness: int = 0
    """How many epochs a subtask may lead the slowest; records to others arrive that many epochs later.

    A loop with a staleness has one level.
    """

    def route_to(self, buffer: int) -> tuple[InputRoute, Route]:
        """An input whose records reach a buffer, and its route; of several the input with an event time.

        Raises `LookupError` where there is none.
        """
        candidates = [
            (input_route, route)
            for input_route in self.inputs
            for route in input_route.routes
            if route.target == buffer
        ]
        if not candidates:
            raise LookupError(f"{self.where}: no input comes to buffer {buffer}")
        return max(candidates, key=lambda candidate: len(candidate[0].schema))

    @property
    def listens_to_the_end(self) -> bool:
        """Whether an operator may act when the iteration has ended."""
        return any(
            body_pass.listens or body_pass.driver is Driver.GROUPED
            for level in self.levels
            for body_pass in level.passes
        )


class Message(NamedTuple):
    """Records on their way: the buffer they go to, and of it the key group or subtask, or `EVERYWHERE`."""

    buffer: int
    target: int
    batch: pa.RecordBatch


def along(route: Route, batch: pa.RecordBatch, sender: Sender) -> Iterator[Message]:
    """Send a batch along a route."""
    for channel, part in route.split(route.aligned(batch), sender):
        yield Message(route.target, channel, part)


def into(input_route: InputRoute, batch: pa.RecordBatch, sender: Sender) -> Iterator[Message]:
    """Send a batch to an input of the body, along all its routes."""
    for keyed in _keyed(input_route, input_route.columns, batch):
        for route in input_route.routes:
            yield from along(route, keyed, sender)


def again(input_route: InputRoute, route: Route, batch: pa.RecordBatch, sender: Sender) -> Iterator[Message]:
    """Send records of an input of the body along one of its routes once more."""
    columns = tuple(name if name in batch.schema.names else None for name in input_route.schema.names)
    for keyed in _keyed(input_route, columns, batch):
        yield from along(route, keyed, sender)


def _keyed(input_route: InputRoute, columns: tuple[str | None, ...], batch: pa.RecordBatch) -> list[pa.RecordBatch]:
    """A batch in the columns of an input, with the keys that functions compute."""
    batch = in_columns(batch, columns, input_route.schema)
    if input_route.keys is None:
        return [batch]
    batches: list[pa.RecordBatch] = []
    with RunningProgram(input_route.keys, lambda _, keyed: batches.append(keyed), lambda: 0) as running:
        running.push(batch)
    return batches


Inbox: TypeAlias = Mapping[int, Sequence[tuple[int, pa.RecordBatch]]]
"""Records that were sent to a subtask, by buffer: the channel of some, and the records."""


class States(Protocol):
    """Where the state of a subtask's key groups is kept from epoch to epoch."""

    def group(self, pass_number: int, group: int) -> PageStore:
        """The state of a group of a pass."""

    def groups(self, pass_number: int) -> Sequence[int]:
        """The groups of a pass that have state."""


@dataclass(frozen=True)
class SubtaskEpoch:
    """One epoch of one subtask in one level."""

    level: Level
    subtask: Subtask
    epoch: int
    terminated: bool
    """Whether the iteration ended with the previous epoch: no records come, and functions are called for the end."""

    inbox: Inbox
    """The records sent to the subtask."""

    states: States
    clock: Callable[[], int]
    is_stale: bool = False
    """Whether other subtasks read this subtask's records later than in the next epoch."""


class Addressed(Protocol):
    """A message, with its records or with where they are."""

    @property
    def buffer(self) -> int:
        """The number of the buffer that it goes to."""

    @property
    def target(self) -> int:
        """The key group or subtask, or `EVERYWHERE`."""


R = TypeVar("R", bound=Addressed)


@dataclass
class LevelResult(Generic[R]):
    """The result of a level of an epoch, in one subtask or in all of them."""

    sent: list[R] = field(default_factory=list)
    fed_back: list[R] = field(default_factory=list)
    """Records of the next epoch."""

    late: list[R] = field(default_factory=list)
    """With a staleness: records for other subtasks, which read them in later epochs."""

    feedback: int = 0
    """How many records were fed back."""

    criteria: int = 0
    """How many records the criteria had."""

    metrics: Metrics = field(default_factory=Metrics)

    def add(self, other: LevelResult[R]) -> None:
        """Add another result."""
        self.sent += other.sent
        self.fed_back += other.fed_back
        self.late += other.late
        self.feedback += other.feedback
        self.criteria += other.criteria
        self.metrics.add(other.metrics)


def run_subtask(work: SubtaskEpoch) -> LevelResult[Message]:
    """Run one epoch of a subtask in one level."""
    out = _SubtaskRun(work).run()
    if work.is_stale:
        out.fed_back, out.late = _split_feedback(work, out.fed_back)
    return out


def _split_feedback(work: SubtaskEpoch, fed_back: Iterable[Message]) -> tuple[list[Message], list[Message]]:
    """Split what was fed back into what goes to the subtask itself and what goes to others."""
    to_itself: list[Message] = []
    to_others: list[Message] = []
    number = work.subtask.number
    for message in fed_back:
        if message.target == EVERYWHERE and work.level.subtasks > 1:
            to_itself.append(message._replace(target=number))
            to_others.append(message._replace(target=everywhere_but(number)))
        elif work.level.is_for(number, message.buffer, message.target):
            to_itself.append(message)
        else:
            to_others.append(message)
    return to_itself, to_others


class _SubtaskRun:
    def __init__(self, work: SubtaskEpoch) -> None:
        self.work = work
        self.out: LevelResult[Message] = LevelResult()
        self.near: dict[int, list[tuple[int, pa.RecordBatch]]] = defaultdict(list)
        """Records for passes of this level, which read them at once, by buffer."""

        self.sender, self.here = Sender(work.subtask.number), work.level.buffers

    def run(self) -> LevelResult[Message]:
        for body_pass in self.work.level.passes:
            if self.work.subtask.number < body_pass.subtasks:
                self._run(body_pass)
        return self.out

    def _run(self, body_pass: BodyPass) -> None:
        records, broadcast_records = (
            self._received(body_pass.main),
            [] if body_pass.broadcast is None else self._received(body_pass.broadcast),
        )
        broadcast_batches = [batch for _, batch in broadcast_records]
        if body_pass.driver is Driver.BOUNDED:
            if records or (broadcast_batches and self.work.subtask.number == 0):
                self._bounded(body_pass, records, broadcast_batches)
        elif body_pass.driver is Driver.GROUPED:
            self._grouped(body_pass, records, broadcast_batches)
        elif records or body_pass.listens:
            self._plain(body_pass, records, broadcast_batches)

    def _received(self, buffer: InputBuffer) -> list[tuple[int, pa.RecordBatch]]:
        return [*self.work.inbox.get(buffer.number, ()), *self.near.pop(buffer.number, ())]

    def _plain(
        self, body_pass: BodyPass, records: Iterable[tuple[int, pa.RecordBatch]], broadcast: Sequence[pa.RecordBatch]
    ) -> None:
        with RunningProgram(
            body_pass.program, self._emitting(body_pass), self.work.clock, self.work.subtask
        ) as running:
            if body_pass.program.broadcast is not None:
                running.give(pa.Table.from_batches(broadcast, body_pass.program.broadcast.layout.schema))
            for _, batch in records:
                running.push(batch)
            self._end(running)

    def _grouped(
        self, body_pass: BodyPass, records: Iterable[tuple[int, pa.RecordBatch]], broadcast: Sequence[pa.RecordBatch]
    ) -> None:
        by_group: dict[int, list[pa.RecordBatch]] = defaultdict(list)
        number, alone = self.work.subtask.number, body_pass.groups == body_pass.subtasks
        for target, batch in records:
            # without keys also what was sent to a subtask that is no more, before there was another number of them
            by_group[number if alone or target <= EVERYWHERE else target].append(batch)
        if alone and (body_pass.listens or broadcast or self.work.terminated):
            by_group[number]
        elif broadcast:
            for group in range(number, body_pass.groups, body_pass.subtasks):
                by_group[group]
        elif self.work.terminated:
            for group in self.work.states.groups(body_pass.number):
                by_group[group]
        if not by_group and not body_pass.listens:
            return
        with KeyGroups(body_pass.program, self._emitting(body_pass), self.work.clock, self.work.subtask) as driver:
            for group in sorted(by_group):
                micro_batch = MicroBatch(
                    event=ControlEvent(now=self.work.clock(), end=self.work.terminated),
                    after_event=GroupInput(by_group[group], broadcast),
                    leads=group == 0,
                    epoch=None if self.work.terminated else self.work.epoch,
                    terminated=self.work.terminated,
                )
                driver.run(self.work.states.group(body_pass.number, group), micro_batch)
            self._end(driver.running)

    def _bounded(
        self, body_pass: BodyPass, records: Sequence[tuple[int, pa.RecordBatch]], broadcast: Sequence[pa.RecordBatch]
    ) -> None:
        program = body_pass.program
        if program.broadcast is not None:
            data = tuple(map(encode, broadcast))
            leads = self.work.subtask.number == 0
            program = replace(program, broadcast=replace(program.broadcast, data=data, leads=leads))
        whole = (
            pa.Table.from_batches([batch for _, batch in records], body_pass.main.schema).combine_chunks().to_batches()
        )
        batches = [_in_order(program, batch) for batch in whole]
        emit = self._emitting(body_pass)
        run = run_batch(program, batches, self.work.clock, self.work.subtask)
        for emitted in run:
            emit(emitted.output, emitted.batch)
        self.out.metrics.add(run.metrics[0])

    def _end(self, running: RunningProgram) -> None:
        if self.work.terminated:
            running.end_of_iteration()
        else:
            running.end_of_epoch(self.work.epoch)
        self.out.metrics.add(running.report())

    def _emitting(self, body_pass: BodyPass) -> Callable[[int, pa.RecordBatch], None]:
        def emit(number: int, batch: pa.RecordBatch) -> None:
            output = body_pass.outputs[number]
            for route in output.routes:
                sent = along(route, batch, self.sender)
                if route.target in self.here:
                    self.near[route.target] += [(channel, part) for _, channel, part in sent]
                else:
                    self.out.sent += sent
            if output.is_criteria:
                self.out.criteria += batch.num_rows
            if output.feedback and not self.work.terminated:
                self.out.feedback += batch.num_rows
                for variable in output.feedback:
                    self.out.fed_back += into(variable, batch, self.sender)

        return emit


def _in_order(program: Program, batch: pa.RecordBatch) -> pa.RecordBatch:
    """The whole input of a pass, with each key's records together and in order of event time."""
    if TIMESTAMP in batch.schema.names:
        batch = batch.take(pc.array_sort_indices(pc.fill_null(batch[TIMESTAMP], MIN_TIMESTAMP)))
    if program.keyed is None or not program.keyed.columns:
        return batch
    return sorted_runs(batch, program.keyed, program.input, program.where(program.steps[0]))[0]
