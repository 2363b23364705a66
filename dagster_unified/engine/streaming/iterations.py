"""The iterations of a query, which go round while an epoch is committed, and the process that they ask."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from dagster_unified.engine.events import InputHeldBack, IterationResumed, Observer
from dagster_unified.engine.iterations.epoch_log import BEFORE, Epoch
from dagster_unified.engine.iterations.files import StoredMessage, text_of
from dagster_unified.engine.iterations.loop import EndedEpoch, FeedbackGuard
from dagster_unified.engine.iterations.savepoints import start_input, start_iteration
from dagster_unified.engine.iterations.spark_loop import IterationInputs, SparkLoop
from dagster_unified.engine.state_tables.savepoints import StartingState
from dagster_unified.errors import StateError
from dagster_unified.graph import nodes as g
from dagster_unified.graph.nodes import Port
from dagster_unified.graph.plan import Plan
from dagster_unified.operators.metrics import Metrics

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession
    from upath import UPath


@dataclass(frozen=True)
class Host:
    """The session, and the questions and reports of epochs to the job."""

    spark: SparkSession
    check: Callable[[], None]
    """Raises where the job may not write any more."""

    observe: Observer
    stopping: Callable[[], bool]
    """Whether the job is being stopped, so that an epoch is to close soon."""


FOLDER = "iterations"
"""The folder of the checkpoint directory."""

MOMENT = 0.5
"""Seconds after which an unbounded iteration lets new input come in, while it goes round."""

TELL_EVERY = 10.0
"""Seconds between two events that say that an epoch goes on."""

SINKS = "sinks"
"""The name, in events, of the part of a query with iterations."""

FED_BACK = "records fed back"
"""The counter of metrics."""


class StreamIterations:
    """The iterations of one query, among some operators. Another process that receives them calls `begin`."""

    def __init__(self, plan: Plan, nodes: Sequence[int]) -> None:
        self._nodes = [node for node in map(plan.graph.node, nodes) if isinstance(node, g.IterationNode)]
        self._loops: dict[int, StreamLoop] = {}

    def __getstate__(self) -> dict[str, object]:
        return {**self.__dict__, "_loops": {}}

    def begin(self, plan: Plan, host: Host, folder: UPath, start: StartingState | None) -> None:
        """Find the state that the previous job left of them.

        `start` is the savepoint that the query starts from, until it has committed its first epoch.
        """
        for node in self._nodes:
            self._loops[node.id] = StreamLoop(plan, node, host, text_of(folder / node.uid), start)

    def __bool__(self) -> bool:
        return bool(self._nodes)

    @property
    def circulates(self) -> bool:
        """Whether fed-back records wait for the next epoch."""
        return any(loop.circulates for loop in self._loops.values())

    @property
    def subtasks(self) -> tuple[int, ...]:
        """The number of subtasks of each."""
        return tuple(loop.loop.parallelism for loop in self._loops.values())

    def have(self, epoch: int) -> bool:
        """Return whether something of an epoch is committed."""
        return any(loop.log.has(epoch) for loop in self._loops.values())

    def of(self, node: g.IterationNode) -> StreamLoop:
        """Return the loop of one of them."""
        return self._loops[node.id]


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
        """Return the outputs of an iteration, and what its operators, and those before it, have measured.

        `reported` gives what operators before it have measured, once the inputs have been computed.
        """
        loop = self.iterations.of(node)
        frames = loop.outputs(self.epoch, self.ends(node.uid), lambda: IterationInputs(inputs, reported))
        return frames, loop.metrics


class StreamLoop(SparkLoop):
    """The loop of an iteration in a query."""

    def __init__(self, plan: Plan, node: g.IterationNode, host: Host, folder: str, start: StartingState | None) -> None:
        self._host = host
        super().__init__(plan, node, host.spark, folder, SINKS, host.observe)
        self._most = plan.execution.streaming.max_feedback
        afterwards = "; the job goes on from this epoch when it is started again"
        self._guard = FeedbackGuard(self.loop.where, self._most, afterwards)
        interval = plan.execution.streaming.interval
        self._moment = MOMENT if interval is None else max(MOMENT, interval.total_seconds() / 2)
        """Seconds after which an epoch of the query closes although something was fed back."""

        self._ends, self._until, self._last_report = False, 0.0, time.monotonic()
        if start is not None and (self.last is None or self.last.micro_batch == BEFORE):
            self._start_from(start)
        if not self.is_bounded and self.last is not None:
            self.observe(IterationResumed(SINKS, node.name, self.last.number))

    def _start_from(self, start: StartingState) -> None:
        if self.is_bounded:
            stored_input = start_input(start, self.node, self.levels)
            if stored_input is not None:
                self.log.take(BEFORE, stored_input)
        else:
            before = start_iteration(start, self.node, self.levels)
            if before is not None:
                self.start(before)

    @property
    def circulates(self) -> bool:
        """Whether fed-back records wait for the query's next epoch."""
        return not self.is_bounded and self.last is not None and bool(self.last.fed_back)

    def check(self) -> None:
        if self._ends and self._host.stopping():  # else the epoch of the query closes soon
            raise StateError(f"{self.loop.where}: the job is being stopped; it goes on after the last epoch")
        self._host.check()

    def check_may_write(self) -> None:
        self._host.check()

    def outputs(self, micro_batch: int, ends: bool, inputs: Callable[[], IterationInputs]) -> dict[Port, DataFrame]:
        last = self.last
        if last is not None and last.micro_batch > micro_batch:
            raise StateError(
                f"{self.loop.where}: epoch {micro_batch} of the job comes after its epochs in {last.micro_batch}; the"
                " checkpoint directory is not whole: go back to a savepoint, or start the job without state"
            )
        self._ends, self._until = ends, time.monotonic() + self._moment
        outputs = super().outputs(micro_batch, ends, inputs)
        if not self.is_bounded:
            epochs = self.log.of(micro_batch)
            if epochs:
                self.metrics.count(FED_BACK, sum(epoch.feedback for epoch in epochs))
            if ends:
                self.log.end(self.levels.states, self.loop.parallelism)
        return outputs

    def may_close(self, feedback: int) -> bool:
        return self._host.stopping() or (time.monotonic() >= self._until and feedback <= self._most)

    def commit(self, ended: EndedEpoch[StoredMessage]) -> None:
        self._host.check()
        super().commit(ended)
        if not self.is_bounded:
            self._guard.check(ended.feedback)

    def committed(self, epoch: Epoch) -> None:
        """Announce that a bounded iteration has committed an epoch, or that an epoch of the query takes long."""
        now = time.monotonic()
        if self.is_bounded:
            super().committed(epoch)
        elif not epoch.closes and now - self._last_report >= TELL_EVERY:
            self._last_report = now
            if self._ends or epoch.feedback <= self._most:
                super().committed(epoch)
            else:
                self.observe(InputHeldBack(self.node.name, epoch.feedback, self._most))
