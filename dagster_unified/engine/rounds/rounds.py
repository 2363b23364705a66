"""The rounds of an iteration, one after another, and when there is no other (FLIP-176: the coordinator).

With a staleness of k (Flink paper, 5.3) a subtask has its own feedback in the epoch after, and that of others k epochs
later. So what a subtask takes in an epoch is known when the others have ended the one that is k + 1 before: it may be k
epochs ahead of the slowest, and what comes out does not depend on how far it is. Knows the loop; not where a level
runs, nor where records and state are in the meantime.
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
    late: list[Parcel[R]] = field(default_factory=list)
    """What others take later than in the next round."""

    feedback: int = 0
    criteria: int = 0
    metrics: Metrics = field(default_factory=Metrics)

    def add(self, other: LevelResult[R]) -> None:
        """Adds what came of another one."""
        self.sent += other.sent
        self.fed_back += other.fed_back
        self.late += other.late
        self.feedback += other.feedback
        self.criteria += other.criteria
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
    ) -> LevelResult[R]:
        """Runs a level of a round in all its subtasks.

        `inbox` is what was sent to its slots, and `replayed` what comes to them in each epoch.
        """


class Subtasks(Levels[R], Protocol):
    """Runs the subtasks of the only level of a loop, one apart from another."""

    def give(self, subtask: int, epoch: int, inbox: Sequence[Parcel[R]], replayed: Sequence[Parcel[R]]) -> None:
        """Begins an epoch of a subtask, which has ended the one before."""

    def ended(self) -> tuple[int, LevelResult[R]]:
        """Waits for a subtask to end its epoch, and returns which it is, and what came of that."""

    def settle(self, epoch: int) -> None:
        """All subtasks have ended an epoch: from now on their state is what that has left."""


class Round(NamedTuple, Generic[R]):
    """A round that has ended."""

    epoch: int
    """Its number, from 0."""

    feedback: int
    criteria: int
    fed_back: Sequence[Parcel[R]]
    """What the next round begins with."""

    outputs: Sequence[Parcel[R]]
    """What left the iteration in this round."""

    metrics: Metrics
    reason: str
    """Why there is no other; empty where there is one."""

    later: Sequence[Sequence[Parcel[R]]] = ()
    """What comes in the rounds after the next one, for each of them."""


def run_rounds(
    loop: Loop,
    levels: Levels[R],
    replayed: Sequence[Parcel[R]],
    begin: Sequence[Parcel[R]],
    epoch: int,
    ended: Callable[[Round[R]], None],
    later: Sequence[Sequence[Parcel[R]]] = (),
    goes_on: bool = False,
) -> LevelResult[R]:
    """Runs rounds from `epoch` on, which begins with some records, until there is no other; `ended` takes each.

    What comes in the rounds after that is `later`. Returns what operators emitted when they heard that the iteration
    has ended; where it `goes_on` in another run, they do not hear so.
    """
    while True:
        one = run_round(loop, levels, begin, epoch, replayed, later)
        ended(one)
        if one.reason:
            return LevelResult() if goes_on else terminate(loop, levels, epoch)
        begin, later, epoch = one.fed_back, one.later, epoch + 1


def run_round(
    loop: Loop,
    levels: Levels[R],
    begin: Sequence[Parcel[R]],
    epoch: int,
    replayed: Sequence[Parcel[R]] = (),
    later: Sequence[Sequence[Parcel[R]]] = (),
) -> Round[R]:
    """Runs one round, which begins with some records; `later` is what comes in the rounds after it."""
    found = _through(loop, levels, begin, epoch, terminated=False, replayed=replayed)
    return _ended(loop, epoch, found, later)


class RoundsApart(Generic[R]):
    """As `run_rounds`, where subtasks need not wait for each other in each epoch: with a staleness.

    A round ends, and `ended` takes it, when all subtasks have ended it. No subtask begins an epoch before it is known
    that the iteration has it.
    """

    def __init__(
        self,
        loop: Loop,
        subtasks: Subtasks[R],
        replayed: Sequence[Parcel[R]],
        begin: Sequence[Parcel[R]],
        epoch: int,
        ended: Callable[[Round[R]], None],
        later: Sequence[Sequence[Parcel[R]]] = (),
        goes_on: bool = False,
    ) -> None:
        self._loop, self._subtasks, self._take_round, self._goes_on_later = loop, subtasks, ended, goes_on
        (self._level,) = loop.levels
        count = self._level.subtasks
        self._replayed = [self._for(subtask, replayed) for subtask in range(count)]
        self._epoch = epoch  # the first that not all have ended
        self._begin, self._later = begin, later
        self._next = [epoch] * count
        self._working: set[int] = set()
        self._own: list[Sequence[Parcel[R]]] = [()] * count
        """What each has fed back to itself in its last epoch."""

        self._results: dict[int, dict[int, LevelResult[R]]] = {}
        """What came of epochs that not all have ended, by subtask."""

    def run(self) -> LevelResult[R]:
        """Runs them; returns what operators emitted when they heard that the iteration has ended."""
        while True:
            self._give()
            subtask, result = self._subtasks.ended()
            self._working.remove(subtask)
            self._results.setdefault(self._next[subtask], {})[subtask] = result
            self._own[subtask] = result.fed_back
            self._next[subtask] += 1
            while len(self._results.get(self._epoch, ())) == len(self._next):
                if self._settle():
                    end = not self._goes_on_later
                    return terminate(self._loop, self._subtasks, self._epoch) if end else LevelResult()
                self._epoch += 1

    def _give(self) -> None:
        """Begins the epochs of which is known that there are, and what comes in them."""
        coming = [self._begin, *self._later]
        for subtask in sorted(set(range(len(self._next))) - self._working):
            epoch = self._next[subtask]
            ahead = epoch - self._epoch
            if ahead > self._loop.staleness or (ahead and not self._goes_on(subtask, epoch, coming[ahead:])):
                continue
            came = self._for(subtask, coming[ahead] if ahead < len(coming) else ())
            if ahead:  # else what it has fed back to itself is among what the round begins with
                came += self._own[subtask]
            self._working.add(subtask)
            self._subtasks.give(subtask, epoch, came, self._replayed[subtask])

    def _goes_on(self, subtask: int, epoch: int, coming: Sequence[Sequence[Parcel[R]]]) -> bool:
        """Whether the iteration has an epoch, of which a subtask has ended the one before, for all that is known.

        Criteria end it with an epoch that is the same in all subtasks. `coming` is what comes in the epoch and later.
        """
        if self._loop.has_criteria and not self._results[epoch - 1][subtask].criteria:
            return False
        ahead = (result for number, found in self._results.items() if number >= epoch - 1 for result in found.values())
        return any(coming) or any(result.feedback for result in ahead)

    def _settle(self) -> bool:
        """Ends the first epoch that not all had ended; says whether it is the last."""
        found: LevelResult[R] = LevelResult()
        for _, result in sorted(self._results.pop(self._epoch).items()):
            found.add(result)
        self._subtasks.settle(self._epoch)
        one = _ended(self._loop, self._epoch, found, self._later)
        self._take_round(one)
        self._begin, self._later = one.fed_back, one.later
        return bool(one.reason)

    def _for(self, subtask: int, parcels: Iterable[Parcel[R]]) -> list[Parcel[R]]:
        return [one for one in parcels if self._level.is_for(subtask, one.slot, one.target)]


def _ended(loop: Loop, epoch: int, found: LevelResult[R], later: Sequence[Sequence[Parcel[R]]]) -> Round[R]:
    """A round of which that came, where `later` was to come in the rounds after it."""
    coming = [list(parcels) for parcels in later]
    coming += [[] for _ in range(len(coming), loop.staleness + 1)]
    coming[loop.staleness] += found.late
    coming[0] += found.fed_back
    reason = why_it_ends(loop, epoch, bool(found.feedback) or any(coming), found.criteria)
    outputs = outputs_of(loop, found.sent)
    return Round(epoch, found.feedback, found.criteria, coming[0], outputs, found.metrics, reason, coming[1:])


def terminate(loop: Loop, levels: Levels[R], epoch: int) -> LevelResult[R]:
    """Tells all operators that the iteration has ended with an epoch."""
    if not loop.listens_to_the_end:
        return LevelResult()
    return _through(loop, levels, [], epoch, terminated=True)


def outputs_of(loop: Loop, sent: Iterable[Parcel[R]]) -> list[Parcel[R]]:
    """What leaves the iteration, of what was sent."""
    leaving = {slot.number for slot in loop.outputs}
    return [parcel for parcel in sent if parcel.slot in leaving]


def why_it_ends(loop: Loop, epoch: int, goes_round: bool, criteria: int) -> str:
    """Why there is no round after this one; empty where there is one. `goes_round` says that something was fed back."""
    if loop.has_criteria and not criteria:
        return f"the termination criteria had no record in epoch {epoch}"
    if not goes_round:
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
    for number, level in enumerate(loop.levels):
        buffers = level.buffers
        here = [parcel for parcel in (*inbox, *whole.sent) if parcel.slot in buffers]
        again = [parcel for parcel in replayed if parcel.slot in buffers]
        if here or again or terminated or any(one.listens for one in level.passes):
            whole.add(levels.run(number, epoch, terminated, here, again))
    return whole
