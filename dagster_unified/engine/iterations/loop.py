"""The loop of an iteration, which a BATCH region, a STREAMING query and the harness each drive.

Input comes in micro-batches, of which BATCH has one. A bounded iteration runs all its epochs in the micro-batch that
brings the end of its input. An unbounded one has an epoch for what a micro-batch brings and what was fed back before,
and further epochs until its host lets new input come in; what is fed back then waits for the next micro-batch. A
micro-batch that runs again has the epochs that it had. Knows the loop; not where epochs are committed.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Generic, NamedTuple, Protocol, TypeVar

from dagster_unified.engine.iterations.epochs import (
    Addressed,
    Coming,
    EndedEpoch,
    LevelResult,
    Levels,
    R,
    run_epochs,
    terminate,
)
from dagster_unified.errors import PipelineError
from dagster_unified.operators.rounds.spec import Loop

MOST_GROWING, MOST_TIMES = 10, 10
"""Epochs in a row, each with more feedback than the one before, and how far above the limit: then a loop multiplies."""

R_co = TypeVar("R_co", bound=Addressed, covariant=True)


class Committed(Protocol[R_co]):
    """The last epoch that was committed."""

    @property
    def number(self) -> int:
        """Its number."""

    @property
    def micro_batch(self) -> int:
        """The micro-batch in which it ran."""

    @property
    def closes(self) -> bool:
        """Whether it is the last of that."""

    @property
    def fed_back(self) -> Sequence[R_co]:
        """What the next epoch begins with."""

    @property
    def later(self) -> Sequence[Sequence[R_co]]:
        """What comes in the epochs after the next one."""


class Arrived(NamedTuple, Generic[R]):
    """Input that no epoch has taken yet, and what comes in every epoch."""

    once: Sequence[R]
    replayed: Sequence[R]


class IterationLoop(ABC, Generic[R]):
    """The loop of one iteration."""

    runs_once = False
    """Whether each micro-batch has an epoch, also where nothing comes in."""

    def __init__(self, loop: Loop, levels: Levels[R], is_bounded: bool, goes_on: bool = False) -> None:
        """With `goes_on` the iteration goes on in another run, so operators do not hear that it has ended."""
        self.loop, self._levels, self.is_bounded, self._goes_on = loop, levels, is_bounded, goes_on

    @property
    @abstractmethod
    def last(self) -> Committed[R] | None:
        """The last epoch that was committed."""

    @abstractmethod
    def arrived(self) -> Arrived[R]:
        """What has come in."""

    @abstractmethod
    def commit(self, ended: EndedEpoch[R]) -> None:
        """Commit an epoch."""

    def may_close(self, feedback: int) -> bool:
        """Whether new input may come in, although so many records were fed back."""
        return True

    def run(self, micro_batch: int, ends: bool) -> LevelResult[R]:
        """Run the epochs of a micro-batch that were not run yet; `ends` says that it brings the end of the input.

        Returns what operators emit when they hear that the iteration has ended.
        """
        if self.is_bounded and not ends:
            return LevelResult()
        with self._levels.many_epochs():
            coming = self._coming(micro_batch, ends)
            for ended in run_epochs(self.loop, self._levels, coming) if coming is not None else ():
                closes = bool(ended.reason) or (not ends and self.may_close(ended.feedback))
                self.commit(ended._replace(micro_batch=micro_batch, closes=closes))
                if closes:
                    break
            if not ends or self._goes_on:
                return LevelResult()
            assert self.last is not None
            return terminate(self.loop, self._levels, self.last.number)

    def _coming(self, micro_batch: int, ends: bool) -> Coming[R] | None:
        """What the next epoch of a micro-batch takes in; None where there is none."""
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
                f"{self._where}: its records multiply: each of its last {self._growing} rounds fed back more than the"
                f" one before, the last one {feedback:,}, where {self._most:,} may circulate while new input is taken"
                " (iteration.max-feedback-records). Let the body drop or combine records, or raise the option if they"
                f" become fewer by themselves{self._afterwards}"
            )
