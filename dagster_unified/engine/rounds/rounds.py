"""The rounds of an iteration, one after another, and when there is no other (FLIP-176: the coordinator).

Knows the loop; not where a level runs, nor where records and state are in the meantime.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Generic, NamedTuple, Protocol, TypeVar

from dagster_unified.operators.metrics import Metrics
from dagster_unified.operators.rounds.spec import Loop

R = TypeVar("R")
"""How records are found that were sent: the records themselves, or where they are."""


class Parcel(NamedTuple, Generic[R]):
    """Records that were sent to a slot; of it to a key group or subtask, or to all."""

    slot: int
    target: int
    records: R


@dataclass
class LevelResult(Generic[R]):
    """What came of a level of a round in all its subtasks."""

    sent: list[Parcel[R]] = field(default_factory=list)
    fed_back: list[Parcel[R]] = field(default_factory=list)
    feedback: int = 0
    criteria: int = 0
    epochs: int = 1
    metrics: Metrics = field(default_factory=Metrics)

    def add(self, other: LevelResult[R]) -> None:
        """Adds what came of another one."""
        self.sent += other.sent
        self.fed_back += other.fed_back
        self.feedback += other.feedback
        self.criteria += other.criteria
        self.epochs = max(self.epochs, other.epochs)
        self.metrics.add(other.metrics)


class Levels(Protocol[R]):
    """Runs levels."""

    def run(
        self,
        level: int,
        epoch: int,
        terminated: bool,
        inbox: Sequence[Parcel[R]],
        replayed: Sequence[Parcel[R]] = (),
        epochs: int = 1,
    ) -> LevelResult[R]:
        """Runs a level of a round, or of a block of `epochs`, in all its subtasks.

        `inbox` is what was sent to its slots, and `replayed` what comes to them in each epoch.
        """


class Round(NamedTuple, Generic[R]):
    """A round that has ended, or a block of epochs."""

    epoch: int
    """Its number, from 0; of a block, that of its last epoch."""

    feedback: int
    criteria: int
    fed_back: Sequence[Parcel[R]]
    """What the next round begins with."""

    outputs: Sequence[Parcel[R]]
    """What left the iteration in this round."""

    metrics: Metrics
    reason: str
    """Why there is no other; empty where there is one."""

    epochs: int = 1
    """How many epochs it has."""


def run_rounds(
    loop: Loop,
    levels: Levels[R],
    replayed: Sequence[Parcel[R]],
    begin: Sequence[Parcel[R]],
    epoch: int,
    ended: Callable[[Round[R]], None],
) -> LevelResult[R]:
    """Runs rounds from `epoch` on, which begins with some records, until there is no other; `ended` takes each.

    Returns what operators emitted when they heard that the iteration has ended.
    """
    while True:
        one = run_round(loop, levels, begin, epoch, replayed)
        ended(one)
        if one.reason:
            return terminate(loop, levels, one.epoch)
        begin, epoch = one.fed_back, one.epoch + 1


def run_round(
    loop: Loop, levels: Levels[R], begin: Sequence[Parcel[R]], epoch: int, replayed: Sequence[Parcel[R]] = ()
) -> Round[R]:
    """Runs one round, which begins with some records; where subtasks may be ahead of each other, a block of epochs."""
    found = _through(loop, levels, begin, epoch, terminated=False, replayed=replayed)
    last = epoch + found.epochs - 1
    reason = why_it_ends(loop, last, found.feedback, found.criteria)
    outputs = outputs_of(loop, found.sent)
    return Round(last, found.feedback, found.criteria, found.fed_back, outputs, found.metrics, reason, found.epochs)


def terminate(loop: Loop, levels: Levels[R], epoch: int) -> LevelResult[R]:
    """Tells all operators that the iteration has ended with an epoch."""
    if not loop.listens_to_the_end:
        return LevelResult()
    return _through(loop, levels, [], epoch, terminated=True)


def outputs_of(loop: Loop, sent: Iterable[Parcel[R]]) -> list[Parcel[R]]:
    """What leaves the iteration, of what was sent."""
    leaving = {slot.number for slot in loop.outputs}
    return [parcel for parcel in sent if parcel.slot in leaving]


def why_it_ends(loop: Loop, epoch: int, feedback: int, criteria: int) -> str:
    """Why there is no round after this one; empty where there is one."""
    if loop.has_criteria and not criteria:
        return f"the termination criteria had no record in epoch {epoch}"
    if not feedback:
        return f"nothing was fed back in epoch {epoch}"
    return ""


def _through(
    loop: Loop,
    levels: Levels[R],
    inbox: Sequence[Parcel[R]],
    epoch: int,
    terminated: bool,
    replayed: Sequence[Parcel[R]] = (),
) -> LevelResult[R]:
    """A round through all levels."""
    whole: LevelResult[R] = LevelResult()
    epochs = 1 if terminated else loop.staleness + 1
    for number, level in enumerate(loop.levels):
        slots = {slot for one in level.passes for slot in one.slots}
        here = [parcel for parcel in (*inbox, *whole.sent) if parcel.slot in slots]
        again = [parcel for parcel in replayed if parcel.slot in slots]
        if here or again or terminated or any(one.listens for one in level.passes):
            whole.add(levels.run(number, epoch, terminated, here, again, epochs))
    return whole
