"""The loop of an iteration and its epochs (FLIP-176), which BATCH, STREAMING and the harness each drive."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Generic, NamedTuple

import msgspec

from dagster_unified.errors import PipelineError
from dagster_unified.operators.iteration import LevelResult, Loop, R


class Levels(ABC, Generic[R]):
    """Runs levels, and where subtasks run apart the subtasks of the only level."""

    loop: Loop

    @property
    def run_apart(self) -> bool:
        """Whether subtasks need not wait for each other in each epoch; then `give`, `ended` and `settle` are called."""
        return False

    @contextmanager
    def many_epochs(self) -> Iterator[None]:
        """Keep meanwhile what is needed from epoch to epoch."""
        yield

    @abstractmethod
    def run(
        self, level: int, epoch: int, terminated: bool, inbox: Sequence[R], replayed: Sequence[R] = ()
    ) -> LevelResult[R]:
        """Run a level of an epoch in all its subtasks.

        `inbox` is what was sent to its buffers, and `replayed` what comes to them in each epoch.
        """

    def give(self, subtask: int, epoch: int, inbox: Sequence[R], replayed: Sequence[R]) -> None:
        """Start an epoch of a subtask, which has ended the one before."""
        raise NotImplementedError

    def ended(self) -> tuple[int, LevelResult[R]]:
        """Wait for a subtask to end its epoch; return which it is, and its result."""
        raise NotImplementedError

    def settle(self, epoch: int) -> None:
        """Take the state that an epoch left: all subtasks have ended it."""
        raise NotImplementedError


class EndedEpoch(msgspec.Struct, Generic[R], frozen=True, kw_only=True):
    """An epoch that has ended."""

    number: int
    """Epochs are counted from 0."""

    feedback: int
    criteria: int
    fed_back: list[R]
    """The input that the next epoch begins with."""

    outputs: list[R]
    """The messages that left the iteration in this epoch."""

    metrics: str = "{}"
    reason: str = ""
    """Why there is no other epoch; empty where there is one."""

    later: list[list[R]] = []
    """The input of each of the epochs after the next one."""

    micro_batch: int = 0
    """The micro-batch in which it ran."""

    closes: bool = False
    """Whether it is the last of its micro-batch."""


@dataclass(frozen=True)
class Coming(Generic[R]):
    """The input of the next epochs."""

    number: int
    """The number of the next epoch."""

    begin: Sequence[R]
    """The input that it begins with."""

    replayed: Sequence[R] = ()
    """The input of every epoch."""

    later: Sequence[Sequence[R]] = ()
    """The input of each of the epochs after the next one."""


def run_epochs(levels: Levels[R], coming: Coming[R]) -> Iterator[EndedEpoch[R]]:
    """Run one epoch after another, until there is no other."""
    if levels.run_apart:
        yield from _SubtasksApart(levels, coming).run()
        return
    number, begin, later = coming.number, coming.begin, coming.later
    while True:
        result = _through(levels, begin, number, terminated=False, replayed=coming.replayed)
        ended = _ended(levels.loop, number, result, later)
        yield ended
        if ended.reason:
            return
        number, begin, later = number + 1, ended.fed_back, ended.later


class _SubtasksApart(Generic[R]):
    """Epochs in which subtasks need not wait for each other: with a staleness.

    An epoch ends when all subtasks have ended it. A subtask starts an epoch only once it is known that the iteration
    has it.
    """

    def __init__(self, levels: Levels[R], coming: Coming[R]) -> None:
        self._loop, self._levels = levels.loop, levels
        (self._level,) = self._loop.levels
        count = self._level.subtasks
        self._replayed = [self._for(subtask, coming.replayed) for subtask in range(count)]
        self._epoch = coming.number  # the first that not all have ended
        self._begin, self._later = coming.begin, coming.later
        self._next = [coming.number] * count
        self._working: set[int] = set()
        self._to_itself: list[Sequence[R]] = [()] * count
        """The messages that each has fed back to itself in its last epoch."""

        self._results: dict[int, dict[int, LevelResult[R]]] = {}
        """The results of epochs that not all have ended, by subtask."""

    def run(self) -> Iterator[EndedEpoch[R]]:
        """Run the subtasks, and yield each epoch that all have ended."""
        while True:
            self._start()
            subtask, result = self._levels.ended()
            self._working.remove(subtask)
            self._results.setdefault(self._next[subtask], {})[subtask] = result
            self._to_itself[subtask] = result.fed_back
            self._next[subtask] += 1
            while len(self._results.get(self._epoch, ())) == len(self._next):
                ended = self._settle()
                yield ended
                if ended.reason:
                    return
                self._epoch += 1

    def _start(self) -> None:
        """Start the next epoch of every idle subtask whose input is complete."""
        coming = [self._begin, *self._later]
        for subtask in sorted(set(range(len(self._next))) - self._working):
            epoch = self._next[subtask]
            ahead = epoch - self._epoch
            if ahead > self._loop.staleness or (ahead and not self._goes_on(subtask, epoch, coming[ahead:])):
                continue
            inbox = self._for(subtask, coming[ahead] if ahead < len(coming) else ())
            if ahead:  # else what it has fed back to itself is among what the epoch begins with
                inbox += self._to_itself[subtask]
            self._working.add(subtask)
            self._levels.give(subtask, epoch, inbox, self._replayed[subtask])

    def _goes_on(self, subtask: int, epoch: int, coming: Sequence[Sequence[R]]) -> bool:
        """Return whether it is known that the iteration has an epoch; the subtask has ended the one before.

        Criteria end it with an epoch that is the same in all subtasks. `coming` is the input of the epoch and of later
        ones.
        """
        if self._loop.has_criteria and not self._results[epoch - 1][subtask].criteria:
            return False
        ahead = (
            result
            for number, by_subtask in self._results.items()
            if number >= epoch - 1
            for result in by_subtask.values()
        )
        return any(coming) or any(result.feedback for result in ahead)

    def _settle(self) -> EndedEpoch[R]:
        """End the first epoch that not all had ended."""
        merged: LevelResult[R] = LevelResult()
        for _, result in sorted(self._results.pop(self._epoch).items()):
            merged.add(result)
        self._levels.settle(self._epoch)
        ended = _ended(self._loop, self._epoch, merged, self._later)
        self._begin, self._later = ended.fed_back, ended.later
        return ended

    def _for(self, subtask: int, messages: Iterable[R]) -> list[R]:
        return [message for message in messages if self._level.is_for(subtask, message.buffer, message.target)]


def _ended(loop: Loop, number: int, result: LevelResult[R], later: Sequence[Sequence[R]]) -> EndedEpoch[R]:
    """Close an epoch: merge its results with records scheduled for later epochs."""
    coming = [list(messages) for messages in later]
    coming += [[] for _ in range(len(coming), loop.staleness + 1)]
    coming[loop.staleness] += result.late
    coming[0] += result.fed_back
    reason = _why_it_ends(loop, number, bool(result.feedback) or any(coming), result.criteria)
    return EndedEpoch(
        number=number,
        feedback=result.feedback,
        criteria=result.criteria,
        fed_back=coming[0],
        outputs=outputs_of(loop, result.sent),
        metrics=result.metrics.encode(),
        reason=reason,
        later=coming[1:],
    )


def terminate(levels: Levels[R], epoch: int) -> LevelResult[R]:
    """Tell all operators that the iteration has ended with an epoch."""
    if not levels.loop.listens_to_the_end:
        return LevelResult()
    return _through(levels, [], epoch, terminated=True)


def outputs_of(loop: Loop, sent: Iterable[R]) -> list[R]:
    """Return the messages that leave the iteration."""
    leaving = {buffer.number for buffer in loop.outputs}
    return [message for message in sent if message.buffer in leaving]


def _why_it_ends(loop: Loop, epoch: int, has_feedback: bool, criteria: int) -> str:
    """Return why there is no epoch after this one; empty where there is one."""
    if loop.has_criteria and not criteria:
        return f"the termination criteria had no record in epoch {epoch}"
    if not has_feedback:
        return f"nothing was fed back in epoch {epoch}"
    return ""


def _through(
    levels: Levels[R],
    inbox: Sequence[R],
    epoch: int,
    terminated: bool,
    replayed: Sequence[R] = (),
) -> LevelResult[R]:
    whole: LevelResult[R] = LevelResult()
    for number, level in enumerate(levels.loop.levels):
        buffers = level.buffers
        messages = [message for message in (*inbox, *whole.sent) if message.buffer in buffers]
        replayed_messages = [message for message in replayed if message.buffer in buffers]
        if messages or replayed_messages or terminated or any(body_pass.listens for body_pass in level.passes):
            whole.add(levels.run(number, epoch, terminated, messages, replayed_messages))
    return whole


MOST_GROWING, MOST_TIMES = 10, 10
"""Epochs in a row, each with more feedback than the one before, and how far above the limit: then a loop multiplies."""


class Arrived(NamedTuple, Generic[R]):
    """Input that no epoch has taken yet, and what comes in every epoch."""

    once: Sequence[R]
    replayed: Sequence[R]


class IterationLoop(ABC, Generic[R]):
    """The loop of one iteration."""

    runs_once = False
    """Whether each micro-batch has an epoch, also where nothing comes in."""

    def __init__(self, levels: Levels[R], is_bounded: bool, goes_on: bool = False) -> None:
        """With `goes_on` the iteration goes on in another run, so operators do not hear that it has ended."""
        self.loop, self._levels, self.is_bounded, self._goes_on = levels.loop, levels, is_bounded, goes_on

    @property
    @abstractmethod
    def last(self) -> EndedEpoch[R] | None:
        """The last committed epoch."""

    @abstractmethod
    def arrived(self) -> Arrived[R]:
        """Return the input that has come in."""

    @abstractmethod
    def commit(self, ended: EndedEpoch[R]) -> None:
        """Commit an epoch."""

    def may_close(self, feedback: int) -> bool:
        """Return whether new input may come in, although so many records were fed back."""
        return True

    def run(self, micro_batch: int, ends: bool) -> LevelResult[R]:
        """Run a micro-batch's remaining epochs; `ends` says that it brings the end of the input.

        Returns what operators emit when they hear that the iteration has ended.
        """
        if self.is_bounded and not ends:
            return LevelResult()
        with self._levels.many_epochs():
            coming = self._coming(micro_batch, ends)
            for ended in run_epochs(self._levels, coming) if coming is not None else ():
                closes = bool(ended.reason) or (not ends and self.may_close(ended.feedback))
                self.commit(msgspec.structs.replace(ended, micro_batch=micro_batch, closes=closes))
                if closes:
                    break
            if not ends or self._goes_on:
                return LevelResult()
            assert self.last is not None
            return terminate(self._levels, self.last.number)

    def _coming(self, micro_batch: int, ends: bool) -> Coming[R] | None:
        """Return the input of a micro-batch's next epoch; None where there is none."""
        last, (once, replayed) = self.last, self.arrived()
        number = 0 if last is None else last.number + 1
        fed_back, later = ((), ()) if last is None else (last.fed_back, last.later)
        if last is not None and last.micro_batch == micro_batch:
            return None if last.closes else Coming(number, fed_back, replayed, later)
        begin = [*once, *fed_back]
        must_run = self.runs_once or (ends and last is None)
        return Coming(number, begin, replayed, later) if begin or must_run else None


class FeedbackGuard:
    """Stops an unbounded iteration that multiplies its records by itself.

    `most` records may circulate while it takes new input.
    """

    def __init__(self, where: str, most: int, afterwards: str = "") -> None:
        """`afterwards` says what becomes of the iteration then."""
        self._where, self._most, self._afterwards = where, most, afterwards
        self._before = self._growing = 0  # fed back by the epoch before, and how many epochs in a row it has been more

    def check(self, feedback: int) -> None:
        """Take the feedback of an epoch; raises `PipelineError` where the loop multiplies its records by itself."""
        self._growing = self._growing + 1 if feedback > self._before else 0
        self._before = feedback
        if self._growing >= MOST_GROWING and feedback > MOST_TIMES * self._most:
            raise PipelineError(
                f"{self._where}: its records multiply: each of its last {self._growing} epochs fed back more than the"
                f" one before, the last one {feedback:,}, where {self._most:,} may circulate while new input is taken"
                " (iteration.max-feedback-records). Let the body drop or combine records, or raise the option if they"
                f" become fewer by themselves{self._afterwards}"
            )
