"""Runs an iteration in memory, in several subtasks: as Spark runs it, with the records themselves for files."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence

import pyarrow as pa

from dagster_unified.engine.rounds.growth import Growth
from dagster_unified.engine.rounds.rounds import (
    LevelResult,
    Parcel,
    Round,
    outputs_of,
    run_round,
    run_rounds,
    terminate,
)
from dagster_unified.graph import nodes as g
from dagster_unified.graph.body import compiled
from dagster_unified.graph.plan import Plan
from dagster_unified.operators.drivers.group import GroupStore, MemoryStore
from dagster_unified.operators.functions.base import Subtask
from dagster_unified.operators.metrics import Metrics
from dagster_unified.operators.rounds.sending import Sent, into
from dagster_unified.operators.rounds.spec import Level, Loop
from dagster_unified.operators.rounds.task import Inbox, Turn, take_turn
from dagster_unified.operators.routing import Sender
from dagster_unified.testing.driving import Timed, shipped, to_batch, to_timed

SUBTASKS = 2
"""Where an iteration has no parallelism of its own: what works in one subtask only is found."""


def run_iteration(
    plan: Plan, node: g.IterationNode, inputs: Sequence[Sequence[Timed]], clock: Callable[[], int]
) -> tuple[list[list[Timed]], Metrics]:
    """The outputs of an iteration, and its metrics, from the records of its inputs."""
    one = _Iteration(plan, node, clock)
    once, replayed = one.taken(inputs)
    last = run_rounds(one.loop, one.levels, replayed, once, 0, one.ended)
    one.terminated(last)
    return one.take_outputs(), one.metrics


class StreamedIteration:
    """An iteration in STREAMING: what comes in while it goes round, or before it does."""

    def __init__(self, plan: Plan, node: g.IterationNode, clock: Callable[[], int]) -> None:
        self._one, self._all_rounds = _Iteration(plan, node, clock), node.takes_input_in_all_rounds
        self._waiting: list[Parcel[pa.RecordBatch]] = []
        self._replayed: list[Parcel[pa.RecordBatch]] = []
        self._epoch = 0

    @property
    def metrics(self) -> Metrics:
        """What its operators have reported."""
        return self._one.metrics

    @property
    def circulates(self) -> bool:
        """Whether something waits for the next round."""
        return bool(self._waiting)

    def micro_batch(self, inputs: Sequence[Sequence[Timed]], ends: bool) -> list[list[Timed]]:
        """The outputs of a micro-batch: of one round, or where the input ends of all that are left."""
        one = self._one
        once, replayed = one.taken(inputs)
        self._waiting += once
        self._replayed += replayed
        if ends and self._all_rounds and self._epoch and not self._waiting:
            one.terminated(terminate(one.loop, one.levels, self._epoch - 1))
        elif ends:
            last = run_rounds(one.loop, one.levels, self._replayed, self._waiting, self._epoch, one.ended)
            self._waiting = []
            one.terminated(last)
        elif self._all_rounds and self._waiting:
            found = run_round(one.loop, one.levels, self._waiting, self._epoch)
            one.ended(found)
            self._waiting, self._epoch = list(found.fed_back), self._epoch + 1
        return one.take_outputs()


class _Iteration:
    def __init__(self, plan: Plan, node: g.IterationNode, clock: Callable[[], int]) -> None:
        self.plan, self.node = plan, node
        self.loop = compiled(plan, node, node.parallelism or plan.execution.parallelism or SUBTASKS)
        self.levels = InMemory(self.loop, clock)
        self.metrics = Metrics()
        multiplies = node.takes_input_in_all_rounds and plan.execution.mode == "STREAMING"
        self._growth = Growth(self.loop.where, plan.execution.streaming.max_feedback) if multiplies else None
        self._outputs: list[Parcel[pa.RecordBatch]] = []

    def taken(
        self, inputs: Sequence[Sequence[Timed]]
    ) -> tuple[list[Parcel[pa.RecordBatch]], list[Parcel[pa.RecordBatch]]]:
        """The records of the inputs, sent to where they are read: those that come once, and the replayed ones."""
        once: list[Parcel[pa.RecordBatch]] = []
        replayed: list[Parcel[pa.RecordBatch]] = []
        for number, (head, records) in enumerate(zip(self.node.heads, inputs, strict=True)):
            taken, given = replayed if number in self.loop.replayed else once, self.loop.inputs[number]
            for subtask in range(self.loop.parallelism):
                own = list(records)[subtask :: self.loop.parallelism]
                if own:
                    batch = to_batch(self.plan.name, head.layout, own)
                    taken += _parcels(into(given, batch, Sender(subtask)))
        return once, replayed

    def ended(self, one: Round[pa.RecordBatch]) -> None:
        """Takes what came of a round."""
        self._outputs += one.outputs
        self.metrics.add_later(one.metrics)
        if self._growth is not None:
            self._growth.check(one.feedback)

    def terminated(self, last: LevelResult[pa.RecordBatch]) -> None:
        """Takes what came when operators heard that the iteration has ended."""
        self._outputs += outputs_of(self.loop, last.sent)
        self.metrics.add_later(last.metrics)

    def take_outputs(self) -> list[list[Timed]]:
        """What left the iteration since this was called."""
        outputs, self._outputs = self._outputs, []
        return [
            [timed for one in outputs if one.slot == slot.number for timed in to_timed(tail.layout, one.records)]
            for slot, tail in zip(self.loop.outputs, self.node.outputs, strict=True)
        ]


def _parcels(sent: Iterable[Sent]) -> list[Parcel[pa.RecordBatch]]:
    return [Parcel(*one) for one in sent]


class _States:
    """The state of all key groups."""

    def __init__(self) -> None:
        self._stores: dict[tuple[int, int], MemoryStore] = {}
        self.subtask, self.subtasks = 0, 1

    def group(self, one: int, group: int) -> GroupStore:
        return self._stores.setdefault((one, group), MemoryStore())

    def groups(self, one: int) -> Sequence[int]:
        found = sorted(group for number, group in self._stores if number == one)
        return [group for group in found if group % self.subtasks == self.subtask]


class InMemory:
    """Runs levels subtask after subtask, each with functions of its own, as if they had come to a worker."""

    def __init__(self, loop: Loop, clock: Callable[[], int]) -> None:
        self._loop, self._clock, self._states = loop, clock, _States()
        self._levels = [shipped(level, [one.program for one in level.passes], loop.where) for level in loop.levels]

    def run(
        self,
        level: int,
        epoch: int,
        terminated: bool,
        inbox: Sequence[Parcel[pa.RecordBatch]],
        replayed: Sequence[Parcel[pa.RecordBatch]] = (),
    ) -> LevelResult[pa.RecordBatch]:
        found: LevelResult[pa.RecordBatch] = LevelResult()
        for subtask in range(self._loop.levels[level].subtasks):
            found.add(self.run_subtask(level, subtask, epoch, terminated, [*replayed, *inbox]))
        return found

    def run_subtask(
        self, level: int, subtask: int, epoch: int, terminated: bool, inbox: Sequence[Parcel[pa.RecordBatch]]
    ) -> LevelResult[pa.RecordBatch]:
        """Runs a level of a round in one subtask, of what was sent to all."""
        own = self._loop.levels[level]
        self._states.subtask, self._states.subtasks = subtask, own.subtasks
        given, is_stale = _for(own, subtask, inbox), self._loop.staleness > 0
        turn = Turn(
            self._levels[level](), Subtask(subtask), epoch, terminated, given, self._states, self._clock, is_stale
        )
        out = take_turn(turn)
        sent, fed_back, late = _parcels(out.sent), _parcels(out.fed_back), _parcels(out.late)
        return LevelResult(sent, fed_back, late, out.feedback, out.criteria, out.metrics)


def _for(level: Level, subtask: int, inbox: Iterable[Parcel[pa.RecordBatch]]) -> Inbox:
    """What is for a subtask of what was sent."""
    given: dict[int, list[tuple[int, pa.RecordBatch]]] = defaultdict(list)
    for slot, target, records in inbox:
        if level.is_for(subtask, slot, target):
            given[slot].append((target, records))
    return given
