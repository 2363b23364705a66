"""An iteration as workers run it: levels of passes, routes between them, and one epoch of a subtask in a level."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import Enum
from typing import NamedTuple, Protocol, TypeAlias

import pyarrow as pa
import pyarrow.compute as pc

from dagster_unified.operators.drivers.batch import run_batch
from dagster_unified.operators.drivers.group import GroupStore
from dagster_unified.operators.drivers.key_groups import Arrived, ControlEvent, KeyGroups, MicroBatch
from dagster_unified.operators.functions.base import Subtask
from dagster_unified.operators.keys import sorted_runs
from dagster_unified.operators.layout import TIMESTAMP
from dagster_unified.operators.metrics import Metrics
from dagster_unified.operators.program.run import RunningProgram
from dagster_unified.operators.program.step import Program
from dagster_unified.operators.routing import EVERYWHERE, Route, Sender, encode, in_columns
from dagster_unified.operators.time import MIN_TIMESTAMP

GROUPS_PER_SUBTASK = 16
"""Key groups of a keyed operator in each subtask: one of them is in memory at a time."""


def everywhere_but(subtask: int) -> int:
    """The channel of records that all subtasks get, but for one that has had them."""
    return EVERYWHERE - 1 - subtask


@dataclass(frozen=True)
class InputBuffer:
    """Where records wait for a pass, or leave the iteration."""

    number: int
    schema: pa.Schema
    reader: str
    """The uid of the operator that reads them, or of the end of the body."""

    broadcast: bool = False
    """Whether they are what the operator is told by broadcast."""


@dataclass(frozen=True)
class InputRoute:
    """How records become those of an input of the body: their columns, the keys that functions compute, and routes."""

    columns: tuple[str | None, ...]
    schema: pa.Schema
    keys: Program | None
    routes: tuple[Route, ...]


@dataclass(frozen=True)
class OutputRoutes:
    """Where one output of a pass goes."""

    routes: tuple[Route, ...]
    feedback: tuple[InputRoute, ...] = ()
    """The variables that it becomes in the next round."""

    is_criteria: bool = False


class Driver(Enum):
    """What drives a pass."""

    PLAIN = "plain"
    """Its records are pushed through: no operator of it has state."""

    GROUPED = "grouped"
    """Its keyed head has state, which lives on, in key groups."""

    BOUNDED = "bounded"
    """Each round is its whole input, after which its state is gone."""


@dataclass(frozen=True)
class BodyPass:
    """Operators that run in one Python pass, and where they get their records from."""

    number: int
    program: Program
    driver: Driver
    subtasks: int
    own: InputBuffer
    outputs: tuple[OutputRoutes, ...]
    broadcast: InputBuffer | None = None
    groups: int = 0
    """How many key groups all its subtasks have; 0 where the head is not keyed."""

    listens: bool = False
    """Whether a function in it hears of each round, also where no record comes."""

    @property
    def buffers(self) -> tuple[int, ...]:
        """The numbers of the buffers that it reads."""
        return (self.own.number,) if self.broadcast is None else (self.own.number, self.broadcast.number)


@dataclass(frozen=True)
class Level:
    """Passes that run together, in this order."""

    passes: tuple[BodyPass, ...]

    @property
    def subtasks(self) -> int:
        """How many subtasks it has."""
        return max(one.subtasks for one in self.passes)

    @property
    def buffers(self) -> frozenset[int]:
        """The numbers of the buffers that its passes read."""
        return frozenset(number for one in self.passes for number in one.buffers)

    def is_for(self, subtask: int, buffer: int, channel: int) -> bool:
        """Whether what was sent to a channel of a buffer is for a subtask."""
        if channel <= EVERYWHERE:
            return channel != everywhere_but(subtask)
        return self._subtask(buffer, channel) == subtask

    def readers(self, buffer: int, channel: int) -> list[int]:
        """The subtasks for which something is that was sent to a channel of a buffer."""
        if channel <= EVERYWHERE:
            return [subtask for subtask in range(self.subtasks) if channel != everywhere_but(subtask)]
        return [self._subtask(buffer, channel)]

    def _subtask(self, buffer: int, channel: int) -> int:
        return channel % next(one.subtasks for one in self.passes if buffer in one.buffers)


@dataclass(frozen=True)
class Loop:
    """The body of an iteration."""

    where: str
    """How an error names the iteration."""

    levels: tuple[Level, ...]
    buffers: tuple[InputBuffer, ...]
    """By their numbers."""

    inputs: tuple[InputRoute, ...]
    """What becomes of the records of each input, the variables first."""

    replayed: frozenset[int]
    """The inputs whose records come again in every round."""

    outputs: tuple[InputBuffer, ...]
    has_criteria: bool
    parallelism: int
    staleness: int = 0
    """How many epochs a subtask may lead the slowest; records to others arrive that many epochs later.

    A loop with a staleness has one level.
    """

    def route_to(self, buffer: int) -> tuple[InputRoute, Route]:
        """An input whose records come to a buffer, and their route; that with an event time, if there are others.

        Raises `LookupError` where there is none.
        """
        found = [(own, route) for own in self.inputs for route in own.routes if route.target == buffer]
        if not found:
            raise LookupError(f"{self.where}: no input comes to buffer {buffer}")
        return max(found, key=lambda one: len(one[0].schema))

    @property
    def listens_to_the_end(self) -> bool:
        """Whether an operator may do something when the iteration has ended."""
        return any(one.listens or one.driver is Driver.GROUPED for level in self.levels for one in level.passes)


class Message(NamedTuple):
    """Records on their way: the buffer they go to, and of it the key group or subtask, or `EVERYWHERE`."""

    slot: int
    target: int
    batch: pa.RecordBatch


def along(route: Route, batch: pa.RecordBatch, sender: Sender) -> Iterator[Message]:
    """A batch along a route."""
    for channel, part in route.split(route.aligned(batch), sender):
        yield Message(route.target, channel, part)


def into(given: InputRoute, batch: pa.RecordBatch, sender: Sender) -> Iterator[Message]:
    """A batch into an input of the body."""
    batch = in_columns(batch, given.columns, given.schema)
    for keyed in [batch] if given.keys is None else with_keys(given.keys, batch):
        for route in given.routes:
            yield from along(route, keyed, sender)


def again(given: InputRoute, route: Route, batch: pa.RecordBatch, sender: Sender) -> Iterator[Message]:
    """Records of an input of the body along one of its routes."""
    columns = tuple(name if name in batch.schema.names else None for name in given.schema.names)
    batch = in_columns(batch, columns, given.schema)
    for keyed in [batch] if given.keys is None else with_keys(given.keys, batch):
        yield from along(route, keyed, sender)


def with_keys(keys: Program, batch: pa.RecordBatch) -> list[pa.RecordBatch]:
    """A batch with the keys that functions compute."""
    found: list[pa.RecordBatch] = []
    with RunningProgram(keys, lambda _, keyed: found.append(keyed), lambda: 0) as running:
        running.push(batch)
    return found


Inbox: TypeAlias = Mapping[int, Sequence[tuple[int, pa.RecordBatch]]]
"""Records that were sent to a subtask, by buffer: the channel of some, and the records."""


class States(Protocol):
    """Where the state of a subtask's key groups is kept from epoch to epoch."""

    def group(self, one: int, group: int) -> GroupStore:
        """The state of a group of a pass."""

    def groups(self, one: int) -> Sequence[int]:
        """The groups of a pass that have state."""


@dataclass(frozen=True)
class SubtaskEpoch:
    """One epoch of one subtask in one level."""

    level: Level
    subtask: Subtask
    epoch: int
    terminated: bool
    """Whether the iteration has ended with the epoch before: no record comes, and functions are told."""

    inbox: Inbox
    """What was sent to the subtask."""

    states: States
    clock: Callable[[], int]
    is_stale: bool = False
    """Whether others take what the subtask sends them later than in the next epoch."""


@dataclass
class Outcome:
    """What came of one."""

    sent: list[Message] = field(default_factory=list)
    fed_back: list[Message] = field(default_factory=list)
    """Records of the next epoch."""

    late: list[Message] = field(default_factory=list)
    """Records of later epochs, with a staleness: all that other subtasks take."""

    feedback: int = 0
    """How many records were fed back."""

    criteria: int = 0
    """How many records the criteria had."""

    metrics: Metrics = field(default_factory=Metrics)


def run_subtask(work: SubtaskEpoch) -> Outcome:
    """Run one epoch of a subtask in one level."""
    out = _SubtaskRun(work).run()
    if work.is_stale:
        out.fed_back, out.late = _apart(work, out.fed_back)
    return out


def _apart(work: SubtaskEpoch, fed_back: Iterable[Message]) -> tuple[list[Message], list[Message]]:
    """What was fed back to the subtask itself, and what to others."""
    own: list[Message] = []
    others: list[Message] = []
    number = work.subtask.number
    for sent in fed_back:
        if sent.target == EVERYWHERE and work.level.subtasks > 1:
            own.append(sent._replace(target=number))
            others.append(sent._replace(target=everywhere_but(number)))
        elif work.level.is_for(number, sent.slot, sent.target):
            own.append(sent)
        else:
            others.append(sent)
    return own, others


class _SubtaskRun:
    def __init__(self, work: SubtaskEpoch) -> None:
        self.work = work
        self.out = Outcome()
        self.near: dict[int, list[tuple[int, pa.RecordBatch]]] = defaultdict(list)
        """What was sent to passes of this level, which read it at once, by buffer."""

        self.sender, self.here = Sender(work.subtask.number), work.level.buffers

    def run(self) -> Outcome:
        for one in self.work.level.passes:
            if self.work.subtask.number < one.subtasks:
                self._run(one)
        return self.out

    def _run(self, one: BodyPass) -> None:
        own, broadcast = self._received(one.own), [] if one.broadcast is None else self._received(one.broadcast)
        everywhere = [batch for _, batch in broadcast]
        if one.driver is Driver.BOUNDED:
            if own or (everywhere and self.work.subtask.number == 0):
                self._bounded(one, own, everywhere)
        elif one.driver is Driver.GROUPED:
            self._grouped(one, own, everywhere)
        elif own or one.listens:
            self._plain(one, own, everywhere)

    def _received(self, buffer: InputBuffer) -> list[tuple[int, pa.RecordBatch]]:
        return [*self.work.inbox.get(buffer.number, ()), *self.near.pop(buffer.number, ())]

    def _plain(
        self, one: BodyPass, own: Iterable[tuple[int, pa.RecordBatch]], everywhere: Sequence[pa.RecordBatch]
    ) -> None:
        with RunningProgram(one.program, self._emitting(one), self.work.clock, self.work.subtask) as running:
            if one.program.broadcast is not None:
                running.give(pa.Table.from_batches(everywhere, one.program.broadcast.layout.schema))
            for _, batch in own:
                running.push(batch)
            self._end(running)

    def _grouped(
        self, one: BodyPass, own: Iterable[tuple[int, pa.RecordBatch]], everywhere: Sequence[pa.RecordBatch]
    ) -> None:
        by_group: dict[int, list[pa.RecordBatch]] = defaultdict(list)
        number, alone = self.work.subtask.number, one.groups == one.subtasks
        for target, batch in own:
            # without keys also what was sent to a subtask that is no more, before there was another number of them
            by_group[number if alone or target <= EVERYWHERE else target].append(batch)
        if alone and (one.listens or everywhere or self.work.terminated):
            by_group[number]
        elif everywhere:
            for group in range(number, one.groups, one.subtasks):
                by_group[group]
        elif self.work.terminated:
            for group in self.work.states.groups(one.number):
                by_group[group]
        if not by_group and not one.listens:
            return
        with KeyGroups(one.program, self._emitting(one), self.work.clock, self.work.subtask) as driver:
            for group in sorted(by_group):
                given = MicroBatch(
                    event=ControlEvent(now=self.work.clock(), end=self.work.terminated),
                    behind=Arrived(by_group[group], everywhere),
                    leads=group == 0,
                    epoch=None if self.work.terminated else self.work.epoch,
                    terminated=self.work.terminated,
                )
                driver.run(self.work.states.group(one.number, group), given)
            self._end(driver.running)

    def _bounded(
        self, one: BodyPass, own: Sequence[tuple[int, pa.RecordBatch]], everywhere: Sequence[pa.RecordBatch]
    ) -> None:
        program = one.program
        if program.broadcast is not None:
            data = tuple(map(encode, everywhere))
            leads = self.work.subtask.number == 0
            program = replace(program, broadcast=replace(program.broadcast, data=data, leads=leads))
        whole = pa.Table.from_batches([batch for _, batch in own], one.own.schema).combine_chunks().to_batches()
        batches = [_in_order(program, batch) for batch in whole]
        emit = self._emitting(one)
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

    def _emitting(self, one: BodyPass) -> Callable[[int, pa.RecordBatch], None]:
        def emit(number: int, batch: pa.RecordBatch) -> None:
            output = one.outputs[number]
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
    """A pass's whole input, a key's records together and in the order of their event times."""
    if TIMESTAMP in batch.schema.names:
        batch = batch.take(pc.array_sort_indices(pc.fill_null(batch[TIMESTAMP], MIN_TIMESTAMP)))
    if program.keyed is None or not program.keyed.columns:
        return batch
    return sorted_runs(batch, program.keyed, program.input, program.where(program.steps[0]))[0]
