"""The loop of an iteration on Spark: its input and its epochs are in a log, from which it goes on.

Knows levels and the log; not who asks for the iteration.
"""

from __future__ import annotations

import time
from abc import abstractmethod
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, NamedTuple

from dagster_unified.engine.events import IterationEpochCommitted, IterationResumed, Observer
from dagster_unified.engine.iterations.epoch_log import BEFORE, Begun, Epoch, EpochLog, Input
from dagster_unified.engine.iterations.files import StoredMessage
from dagster_unified.engine.iterations.levels import SparkLevels
from dagster_unified.engine.iterations.loop import Arrived, EndedEpoch, IterationLoop, outputs_of
from dagster_unified.engine.iterations.savepoints import divided, rescaled
from dagster_unified.engine.session import cores
from dagster_unified.graph import nodes as g
from dagster_unified.graph.loops import compile_loop
from dagster_unified.graph.nodes import Port
from dagster_unified.graph.plan import Plan
from dagster_unified.operators.metrics import Metrics, merge

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession


class IterationInputs(NamedTuple):
    """The inputs of an iteration."""

    frames: Sequence[DataFrame]
    reported: Callable[[], Metrics]
    """The metrics of the operators before it, once the frames have been computed."""


class SparkLoop(IterationLoop[StoredMessage]):
    """The loop of one iteration; `stage` is its place in events."""

    def __init__(
        self,
        plan: Plan,
        node: g.IterationNode,
        spark: SparkSession,
        folder: str,
        stage: str,
        observe: Observer,
        parallelism: int | None = None,
        goes_on: bool = False,
    ) -> None:
        """`parallelism` is that of an iteration for which none is given; by default that of the session."""
        self.plan, self.node, self.folder = plan, node, folder
        self.stage, self.observe = stage, observe
        is_bounded = not node.is_unbounded
        self.log = EpochLog(folder, f"{plan.name}: iteration '{node.name}'", can_run_again=self.runs_once)
        begun = self.log.begun if self.log.holds_state else None
        subtasks = node.parallelism or plan.execution.parallelism
        if begun is not None and (not subtasks or self.runs_once or (is_bounded and self.log.epochs)):
            subtasks = begun.parallelism
        loop = compile_loop(
            plan, node, subtasks or parallelism or cores(spark), begun.groups if begun is not None else ()
        )
        self.log.begin(Begun.of(loop, is_bounded))
        self.levels = SparkLevels(spark, loop, folder, self.check)
        super().__init__(self.levels, is_bounded, goes_on)
        self.metrics = Metrics()
        """The metrics of the operators in the micro-batch that ran last."""

        self._epoch_began = 0.0
        self._take_states()

    @abstractmethod
    def check(self) -> None:
        """Raise where the iteration is to stop."""

    def check_may_write(self) -> None:
        """Raise where this process may not write any more."""
        self.check()

    @property
    def last(self) -> Epoch | None:
        return self.log.last

    def start(self, before: Epoch) -> None:
        """Go on after an epoch of a savepoint or another run."""
        self.log.start(before, self.levels.files)
        self.levels.files = []
        self._take_states()

    def outputs(self, micro_batch: int, ends: bool, inputs: Callable[[], IterationInputs]) -> dict[Port, DataFrame]:
        """Return a micro-batch's outputs; asks for its input where that was not taken in."""
        done = self.log.of(micro_batch)
        if done and (self.is_bounded or self.runs_once):
            self.observe(IterationResumed(self.stage, self.node.name, done[-1].number))
        self.metrics = merge([self._taken(micro_batch, inputs)])
        for epoch in done:
            self.metrics.add_later(merge([epoch.metrics]))
        self._epoch_began = time.monotonic()
        ended = self.run(micro_batch, ends)
        self.metrics.add_later(ended.metrics)
        emitted = [message for epoch in self.log.of(micro_batch) for message in epoch.outputs]
        return self.levels.frames(self.node, emitted + outputs_of(self.loop, ended.sent))

    def _taken(self, micro_batch: int, inputs: Callable[[], IterationInputs]) -> str:
        """Take in a micro-batch's input, if that was not done; return what the operators before it measured."""
        taken, last = self.log.inputs.get(micro_batch), self.last
        if taken is not None:
            return taken.metrics
        if last is not None and last.micro_batch == micro_batch:
            return "{}"
        frames, reported = inputs()
        once, replayed = self.levels.taken(frames)
        self.check_may_write()
        taken = Input(once, replayed, reported().encode())
        if once or replayed or self.runs_once:
            self.log.take(micro_batch, taken)
        return taken.metrics

    def _take_states(self) -> None:
        """Go on with the state of the last epoch, in as many subtasks as there are now."""
        last = self.last
        if last is None:
            return
        states = last.states
        if last.parallelism != self.loop.parallelism:
            assert self.log.begun is not None
            before = compile_loop(self.plan, self.node, last.parallelism, self.log.begun.groups)
            operator_state = divided(self.plan, self.node, self.levels, before, states)
            states, files = rescaled(states, self.loop, self.folder, operator_state)
            self.levels.files += files
        self.levels.states = states

    def arrived(self) -> Arrived[StoredMessage]:
        once: list[StoredMessage] = []
        replayed: list[StoredMessage] = []
        taken_until = BEFORE - 1 if self.last is None else self.last.micro_batch
        for micro_batch, taken in self.log.inputs.items():
            once += taken.once if micro_batch > taken_until else []
            replayed += taken.replayed
        return Arrived(once, replayed)

    def commit(self, ended: EndedEpoch[StoredMessage]) -> None:
        now = time.monotonic()
        epoch = Epoch.of(ended, self.levels.states, now - self._epoch_began, self.loop.parallelism)
        self.log.commit(epoch, self.levels.files)
        self.levels.files, self._epoch_began = [], now
        self.metrics.add_later(merge([epoch.metrics]))
        self.committed(epoch)

    def committed(self, epoch: Epoch) -> None:
        """Announce a committed epoch."""
        self.observe(IterationEpochCommitted(self.stage, self.node.name, epoch))
