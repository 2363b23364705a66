"""Runs an iteration in memory, in several subtasks: as BATCH runs it, with the records themselves for files."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence

import pyarrow as pa

from dagster_unified.engine.rounds.compile import compiled
from dagster_unified.engine.rounds.copies import afresh
from dagster_unified.engine.rounds.rounds import LevelResult, Parcel, Round, outputs_of, run_rounds
from dagster_unified.graph import nodes as g
from dagster_unified.graph.plan import Plan
from dagster_unified.operators.drivers.group import GroupStore, MemoryStore
from dagster_unified.operators.functions.base import Subtask
from dagster_unified.operators.metrics import Metrics
from dagster_unified.operators.rounds.sending import Sending, Sent
from dagster_unified.operators.rounds.spec import Loop
from dagster_unified.operators.rounds.task import Turn, take_turn
from dagster_unified.testing.driving import Timed, to_batch, to_timed

SUBTASKS = 2
"""Where an iteration has no parallelism of its own: what works in one subtask only is found."""


def run_iteration(
    plan: Plan, node: g.IterationNode, inputs: Sequence[Sequence[Timed]], clock: Callable[[], int]
) -> tuple[list[list[Timed]], Metrics]:
    """The outputs of an iteration, and its metrics, from the records of its inputs."""
    loop = compiled(plan, node, node.parallelism or plan.execution.parallelism or SUBTASKS)
    begin: list[Parcel[pa.RecordBatch]] = []
    replayed: list[Parcel[pa.RecordBatch]] = []
    for number, (head, records) in enumerate(zip(node.heads, inputs, strict=True)):
        into = replayed if number in loop.replayed else begin
        for subtask in range(loop.parallelism):
            own = list(records)[subtask :: loop.parallelism]
            if own:
                into += _parcels(Sending(subtask).into(loop.inputs[number], to_batch(plan.name, head.layout, own)))
    outputs: list[Parcel[pa.RecordBatch]] = []
    metrics = Metrics()

    def ended(one: Round[pa.RecordBatch]) -> None:
        outputs.extend(one.outputs)
        metrics.add(one.metrics)

    last = run_rounds(loop, _InMemory(loop, clock), replayed, begin, 0, ended)
    outputs += outputs_of(loop, last.sent)
    metrics.add(last.metrics)
    found = [
        [timed for parcel in outputs if parcel.slot == slot.number for timed in to_timed(tail.layout, parcel.records)]
        for slot, tail in zip(loop.outputs, node.outputs, strict=True)
    ]
    return found, metrics


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


class _InMemory:
    """Runs levels subtask after subtask, each with functions of its own, as if they had come to a worker."""

    def __init__(self, loop: Loop, clock: Callable[[], int]) -> None:
        self._loop, self._clock, self._states = loop, clock, _States()

    def run(
        self, level: int, epoch: int, terminated: bool, inbox: Sequence[Parcel[pa.RecordBatch]]
    ) -> LevelResult[pa.RecordBatch]:
        found: LevelResult[pa.RecordBatch] = LevelResult()
        own = self._loop.levels[level]
        for subtask in range(own.subtasks):
            self._states.subtask, self._states.subtasks = subtask, own.subtasks
            given: dict[int, list[tuple[int, pa.RecordBatch]]] = defaultdict(list)
            for slot, target, records in inbox:
                if own.is_for(subtask, slot, target):
                    given[slot].append((target, records))
            turn = Turn(
                afresh(self._loop, level), Subtask(subtask), epoch, terminated, given, self._states, self._clock
            )
            out = take_turn(turn)
            found.add(LevelResult(_parcels(out.sent), _parcels(out.fed_back), out.feedback, out.criteria, out.metrics))
        return found
