"""The iterations of a query, which go round while an epoch is committed.

A bounded iteration keeps what each epoch brings, and goes round in the epoch that brings the end of its input. An
unbounded one has a round for what an epoch brings and what was fed back before, and further rounds for as long as that
takes no longer than a moment, or more is fed back than may be. What is fed back when an epoch closes waits for the next
one. An epoch that runs again has the rounds that it had. Knows the queries' epochs; not their rows.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from dagster_unified.engine.events import InputHeldBack, IterationResumed, RoundCommitted
from dagster_unified.engine.iterations.bounded import BoundedIteration
from dagster_unified.engine.iterations.feedback_log import Begun, FeedbackLog, StreamRound
from dagster_unified.engine.iterations.files import StoredParcel
from dagster_unified.engine.iterations.journal import Epoch, Input, Journal, begun_with
from dagster_unified.engine.iterations.levels import SparkLevels, parcels
from dagster_unified.engine.iterations.places import text_of
from dagster_unified.engine.iterations.rescaling import rescaled
from dagster_unified.engine.iterations.savepoints import BEFORE, divided, start_input, start_iteration
from dagster_unified.engine.rounds.growth import Growth
from dagster_unified.engine.rounds.rounds import LevelResult, outputs_of, run_round, terminate
from dagster_unified.engine.session import cores
from dagster_unified.engine.state_tables.savepoints import StartingState
from dagster_unified.engine.streaming.host import Host
from dagster_unified.errors import StateError
from dagster_unified.graph import nodes as g
from dagster_unified.graph.body import compiled
from dagster_unified.graph.plan import Plan, Port
from dagster_unified.operators.metrics import Metrics, merge

if TYPE_CHECKING:
    from pyspark.sql import DataFrame
    from upath import UPath

FOLDER = "iterations"
"""The folder of the checkpoint directory."""

MOMENT = 0.5
"""Seconds after which an unbounded iteration lets new input come in, while it goes round."""

TELL_EVERY = 10.0
"""Seconds between two events that say that an epoch goes on."""

SINKS = "sinks"
"""What events call the part of a query in which iterations are."""

FED_BACK = "records fed back"
"""The counter of metrics."""


@dataclass(frozen=True)
class Rounds:
    """What the iterations of a query go round with."""

    plan: Plan
    host: Host
    folder: UPath
    start: StartingState | None = None
    """The savepoint that the query starts from, until it has committed its first epoch."""


class StreamIterations:
    """The iterations of one query: those among some operators. Another process that they are sent to begins them."""

    def __init__(self, plan: Plan, nodes: Sequence[int]) -> None:
        self._nodes = [node for node in map(plan.graph.node, nodes) if isinstance(node, g.IterationNode)]
        self._streams: dict[int, _Stream] = {}

    def __getstate__(self) -> dict[str, object]:
        return {**self.__dict__, "_streams": {}}

    def begin(self, rounds: Rounds) -> None:
        """Finds what the job before has left of them."""
        for node in self._nodes:
            kind = _Unbounded if node.takes_input_in_all_rounds else _Bounded
            self._streams[node.id] = kind(rounds, node)

    def __bool__(self) -> bool:
        return bool(self._nodes)

    @property
    def circulates(self) -> bool:
        """Whether something was fed back that waits for the next epoch."""
        return any(one.circulates for one in self._streams.values())

    @property
    def subtasks(self) -> tuple[int, ...]:
        """How many there are of each."""
        return tuple(one.loop.parallelism for one in self._streams.values())

    def have(self, epoch: int) -> bool:
        """Whether something of an epoch is committed."""
        return any(one.log.has(epoch) for one in self._streams.values())

    def of(self, node: g.IterationNode) -> _Stream:
        """One of them."""
        return self._streams[node.id]


@dataclass(frozen=True)
class IterationsInEpoch:
    """The iterations of a query in one of its epochs; `ends` says of an uid that it brings the end of its input."""

    iterations: StreamIterations
    epoch: int
    ends: Callable[[str], bool]

    def has_run(self) -> bool:
        """Whether one of them has something of the epoch, which then runs again."""
        return self.iterations.have(self.epoch)

    def outputs(
        self, node: g.IterationNode, inputs: Sequence[DataFrame], reported: Callable[[], Metrics]
    ) -> tuple[dict[Port, DataFrame], Metrics]:
        """The outputs of an iteration, and what its operators, and those before it, have measured.

        `reported` gives what operators before it have measured, once the inputs have been computed.
        """
        one = self.iterations.of(node)
        outputs, metrics = one.epoch(self.epoch, self.ends(node.uid), lambda: one.taken(inputs, reported))
        return one.levels.frames(node, outputs), metrics


class _Stream:
    """One iteration."""

    circulates = False

    def __init__(self, rounds: Rounds, node: g.IterationNode) -> None:
        self.rounds, self.node = rounds, node
        self.folder = text_of(rounds.folder / node.uid)
        where = f"{rounds.plan.name}: iteration '{node.name}'"
        self.log = FeedbackLog(self.folder, where)
        held = self.log.begun if self.log.holds_state else None
        parallelism = begun_with(self.folder) or node.parallelism or rounds.plan.execution.parallelism
        parallelism = parallelism or (held.parallelism if held is not None else cores(rounds.host.spark))
        self.loop = compiled(rounds.plan, node, parallelism, held.groups if held is not None else ())
        passes = sorted((one for level in self.loop.levels for one in level.passes), key=lambda one: one.number)
        slots = {slot.number: slot for one in passes for slot in (one.own, one.broadcast) if slot is not None}
        slots |= {slot.number: slot for slot in self.loop.outputs}
        self.log.begin(
            Begun(
                parallelism,
                not node.takes_input_in_all_rounds,
                [[step.uid for step in one.program.steps] for one in passes],
                [f"{number} {slot.schema}" for number, slot in sorted(slots.items())],
                [0 if one.groups == one.subtasks else one.groups for one in passes],
                [one.subtasks for one in passes],
            )
        )
        self.levels = SparkLevels(rounds.host.spark, self.loop, self.folder, self.check)

    def check(self) -> None:
        """Raises where the iteration is to stop."""
        self.rounds.host.check()

    def check_stop(self) -> None:
        """Raises where the job is being stopped, and an epoch would go on for long."""
        if self.rounds.host.stopping():
            raise StateError(f"{self.loop.where}: the job is being stopped; it goes on after the last round")

    def epoch(self, epoch: int, ends: bool, take: Callable[[], Input]) -> tuple[list[StoredParcel], Metrics]:
        """What left the iteration in an epoch of the stream, and what its operators have measured."""
        raise NotImplementedError

    def taken(self, inputs: Sequence[DataFrame], reported: Callable[[], Metrics]) -> Input:
        """Writes what an epoch brought to where it is read."""
        once, replayed = self.levels.taken(inputs)
        self.rounds.host.check()
        return Input(self.loop.parallelism, once, replayed, reported().encode())


class _Bounded(_Stream):
    def __init__(self, rounds: Rounds, node: g.IterationNode) -> None:
        super().__init__(rounds, node)
        if rounds.start is not None:
            found = start_input(rounds.start, node, self.levels)
            if found is not None:
                self.log.take_before(found)

    def epoch(self, epoch: int, ends: bool, take: Callable[[], Input]) -> tuple[list[StoredParcel], Metrics]:
        found = self.log.taken(epoch)
        journal = Journal(self.folder) if ends else None
        if found is None and (journal is None or journal.input is None):
            found = take()
            if found.once or found.replayed:
                self.log.take(epoch, found)
        before = Metrics() if found is None else merge([found.metrics])
        if journal is None:
            return [], before
        one = BoundedIteration(journal, self.levels, SINKS, self.node.name, self.rounds.host.observe)
        outputs = one.rounds(self._all)
        return outputs, merge([before, one.metrics])

    def check(self) -> None:
        self.check_stop()
        super().check()

    def _all(self) -> Input:
        """What all epochs have brought."""
        taken = list(self.log.all_taken())
        once = [parcel for one in taken for parcel in one.once]
        return Input(self.loop.parallelism, once, [parcel for one in taken for parcel in one.replayed], "{}")


class _Unbounded(_Stream):
    def __init__(self, rounds: Rounds, node: g.IterationNode) -> None:
        super().__init__(rounds, node)
        self._told = time.monotonic()
        afterwards = "; the job goes on from this round when it is started again"
        self._growth = Growth(self.loop.where, self._most, afterwards)
        interval = rounds.plan.execution.streaming.interval
        self._moment = MOMENT if interval is None else max(MOMENT, interval.total_seconds() / 2)
        """Seconds after which an epoch closes although something was fed back."""

        if rounds.start is not None and (self.log.last is None or self.log.last.epoch == BEFORE):
            found = start_iteration(rounds.start, node, self.levels)
            if found is not None:
                self.log.start(found, self.levels.files)
                self.levels.files = []
        if self.log.last is not None:
            self._take_states(self.log.last)
            rounds.host.observe(IterationResumed(SINKS, node.name, self.log.last.round.number))

    def _take_states(self, last: StreamRound) -> None:
        """Goes on with the state that a round has left, in as many subtasks as there are now."""
        states, subtasks = last.round.states, self.loop.parallelism
        if last.parallelism != subtasks:
            assert self.log.begun is not None
            before = compiled(self.rounds.plan, self.node, last.parallelism, self.log.begun.groups)
            found = divided(self.rounds.plan, self.node, self.levels, before, states)
            states, files = rescaled(states, self.loop, self.folder, found)
            self.levels.files += files
        self.levels.states = states

    @property
    def circulates(self) -> bool:  # type: ignore[override]
        return bool(self.log.waiting())

    def epoch(self, epoch: int, ends: bool, take: Callable[[], Input]) -> tuple[list[StoredParcel], Metrics]:
        until, last = time.monotonic() + self._moment, self.log.last
        if last is not None and last.epoch > epoch:
            raise StateError(
                f"{self.loop.where}: epoch {epoch} comes after its rounds of epoch {last.epoch}; the checkpoint"
                " directory is not whole: go back to a savepoint, or start the job without state"
            )
        if last is None or last.epoch < epoch:
            taken = self.log.taken(epoch)
            if taken is None:
                taken = take()
                if taken.once:
                    self.log.take(epoch, taken)
            metrics, begin = merge([taken.metrics]), [*taken.once, *self.log.waiting()]
        else:
            metrics, begin = Metrics(), []
        with self.levels.many_rounds():
            ended = self._rounds(begin, epoch, ends, until, metrics)
        return self.log.outputs(epoch) + [parcel.records for parcel in outputs_of(self.loop, ended.sent)], metrics

    def _rounds(
        self, begin: Sequence[StoredParcel], epoch: int, ends: bool, until: float, metrics: Metrics
    ) -> LevelResult[StoredParcel]:
        """Runs the rounds of an epoch, whose first begins with some records; returns what came of the iteration's end.

        Adds to `metrics` what its operators have measured.
        """
        if begin or (ends and self.log.last is None):
            metrics.add_later(self._round(begin, epoch, ends, until))
        last = self.log.last
        while last is not None and last.epoch == epoch and not last.closes:
            metrics.add_later(self._round(last.round.fed_back, epoch, ends, until))
            last = self.log.last
        if not ends:
            return LevelResult()
        assert last is not None
        ended = terminate(self.loop, self.levels, last.round.number)
        self.log.end(self.levels.states, self.levels.loop.parallelism)
        metrics.add_later(ended.metrics)
        return ended

    def _round(self, begin: Sequence[StoredParcel], epoch: int, ends: bool, until: float) -> Metrics:
        """Runs a round and commits it; returns what its operators have measured."""
        if ends:
            self.check_stop()
        begun = time.monotonic()
        number = self.log.last.round.number + 1 if self.log.last is not None else 0
        ended = run_round(self.loop, self.levels, parcels(begin), number)
        now = time.monotonic()
        closes = not ended.feedback if ends else self._may_close(ended.feedback, now >= until)
        self.rounds.host.check()
        done = Epoch.of(ended, self.levels.states, now - begun)
        self.log.commit(StreamRound(done, epoch, closes, self.loop.parallelism), self.levels.files)
        self.levels.files = []
        if not closes and now - self._told >= TELL_EVERY:
            self._told = now
            self._tell(done, ends)
        ended.metrics.count(FED_BACK, ended.feedback)
        self._growth.check(ended.feedback)
        return ended.metrics

    def _may_close(self, feedback: int, late: bool) -> bool:
        """Whether an epoch closes after a round that fed back so many records."""
        if self.rounds.host.stopping():
            return True
        return not feedback or (late and feedback <= self._most)

    def _tell(self, done: Epoch, ends: bool) -> None:
        """Say that an epoch takes long: a sign of life."""
        held = not ends and done.feedback > self._most
        stage = self.node.name
        self.rounds.host.observe(
            InputHeldBack(stage, done.feedback, self._most) if held else RoundCommitted(SINKS, stage, done)
        )

    @property
    def _most(self) -> int:
        return self.rounds.plan.execution.streaming.max_feedback
