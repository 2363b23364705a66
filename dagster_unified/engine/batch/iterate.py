"""The iterations of a BATCH stage: where each keeps its epochs, and what became of it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from dagster_unified.engine.batch.intermediates import Address, IterationSummary, Manifest
from dagster_unified.engine.batch.run import Run, StateBefore
from dagster_unified.engine.iterations.epoch_log import FORMAT, Epoch
from dagster_unified.engine.iterations.files import forget_copies, text_of
from dagster_unified.engine.iterations.savepoints import epoch_before, left_by, start_iteration
from dagster_unified.engine.iterations.spark_loop import IterationInputs, SparkLoop
from dagster_unified.errors import StateError
from dagster_unified.graph import nodes as g
from dagster_unified.graph.fingerprint import digest
from dagster_unified.graph.nodes import Port
from dagster_unified.graph.plan import Region
from dagster_unified.operators.layout import CARRIED
from dagster_unified.operators.metrics import Metrics
from dagster_unified.storage.paths import children, remove_tree

if TYPE_CHECKING:
    from pyspark.sql import DataFrame
    from upath import UPath


_EPOCHS = "iteration-"
"""The prefix of the folders of iterations' epochs."""

_ONLY = 0
"""The micro-batch that all input of a stage is in."""


class BatchLoop(SparkLoop):
    """The loop of an iteration in one run of a stage."""

    runs_once = True

    def __init__(self, run: Run, stage: str, node: g.IterationNode, folder: str, parallelism: int | None) -> None:
        self._run = run
        goes_on = node.is_unbounded and run.carry is not None and not run.carry.last
        super().__init__(run.plan, node, run.spark, folder, stage, run.observe, parallelism, goes_on)

    def check(self) -> None:
        self._run.check()

    def summary(self) -> IterationSummary:
        """Return the iteration's outcome."""
        epochs = self.log.of(_ONLY)
        gauges = [epoch.gauges for epoch in epochs]
        return IterationSummary(
            rounds=epochs[-1].number + 1 - epochs[0].number,
            epochs=[epoch.number for epoch in epochs],
            feedback=[epoch.feedback for epoch in epochs],
            criteria=[epoch.criteria for epoch in epochs] if self.loop.has_criteria else [],
            seconds=sum(epoch.seconds for epoch in epochs),
            reason=epochs[-1].reason,
            gauges={
                name: [float(metrics[name].max) if name in metrics else None for metrics in gauges]
                for name in sorted(set().union(*gauges))
            },
        )


@dataclass
class Iterations:
    """The iterations of a stage."""

    run: Run
    region: Region
    inputs: Mapping[int, Manifest]
    """The intermediates that the stage reads."""

    before: Manifest | None = None
    """The manifest of the partition before, where state is carried."""

    state: StateBefore | None = None
    """The state that operators left in it."""

    subtasks: dict[str, int] = field(default_factory=dict)
    """In how many subtasks those are that leave state, by uid."""

    metrics: list[Metrics] = field(default_factory=list)
    summaries: dict[str, IterationSummary] = field(default_factory=dict)
    """Their outcomes, by name."""

    def outputs(
        self, node: g.IterationNode, inputs: Callable[[], tuple[list[DataFrame], Callable[[], Metrics]]]
    ) -> dict[Port, DataFrame]:
        """Return an iteration's outputs, running it from where it was left; takes its inputs if it has none yet."""
        folder = text_of(self._folder(node))
        iteration = BatchLoop(self.run, self.region.name, node, folder, self._subtasks_before(node))

        def taken() -> IterationInputs:
            taken_inputs = IterationInputs(*inputs())
            before = self._epoch_before(node, iteration)
            if before is not None:
                iteration.start(before)
            return taken_inputs

        outputs = iteration.outputs(_ONLY, True, taken)
        if self.run.carry is not None and node.carries_state:
            outputs[Port(node.id, CARRIED)] = left_by(self.run.plan, node, iteration.levels)
            self.subtasks[node.uid] = iteration.loop.parallelism
        self.metrics.append(iteration.metrics)
        self.summaries[node.uid if node.name in self.summaries else node.name] = iteration.summary()
        return outputs

    def _subtasks_before(self, node: g.IterationNode) -> int | None:
        return None if self.before is None else self.before.subtasks.get(node.uid)

    def _epoch_before(self, node: g.IterationNode, iteration: SparkLoop) -> Epoch | None:
        """Return the epoch that an iteration goes on after, from the partition before or the savepoint it starts from.

        Raises `StateError` where it cannot.
        """
        carry = self.run.carry
        if carry is None or not node.carries_state:
            return None
        if self.before is None:
            return None if carry.start is None else start_iteration(carry.start, node, iteration.levels)
        assert self.state is not None
        state_before, count = self.state(Port(node.id, CARRIED)), self._subtasks_before(node)
        assert state_before is not None
        if count != iteration.loop.parallelism:
            raise StateError(
                f"{iteration.loop.where}: it has {iteration.loop.parallelism} subtasks, and its state of the partition"
                f" before is of {count}; set the parallelism that it had, start from a savepoint, which splits the"
                " state anew, or run a backfill from the first partition"
            )
        return epoch_before(
            self.run.plan, node, iteration.levels, state_before, self.before.summary_of(node.uid, node.name).epochs[-1]
        )

    def forget(self) -> None:
        """Remove all epochs of the stage once it is committed, also those of code that was fixed since."""
        stage = self._stage()
        for folder in (stage / name for name in children(stage) if name.startswith(_EPOCHS)):
            remove_tree(folder)
            forget_copies(text_of(folder))

    def _folder(self, node: g.IterationNode) -> UPath:
        """Return the iteration's folder, named by code and input so that a retry and a re-execution find it."""
        read = [self.inputs[number].data for number in self.region.inputs]
        read += [self.before.data] if self.before is not None else []
        return self._stage() / f"{_EPOCHS}{digest(FORMAT, self.region.fingerprint, node.uid, *read)[:16]}"

    def _stage(self) -> UPath:
        """Return the folder of the epochs of all runs of the execution."""
        run = self.run
        return run.store.folder(Address(run.plan.name, self.region.name, run.execution, run.partition))
