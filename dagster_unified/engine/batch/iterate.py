"""The iterations of a BATCH stage: where each keeps its rounds, and what became of it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple

from dagster_unified.connectors.paths import children, remove_tree
from dagster_unified.engine.batch.carried import StateBefore
from dagster_unified.engine.batch.intermediates.store import Address, IterationSummary, Manifest
from dagster_unified.engine.batch.run import Run
from dagster_unified.engine.iterations.bounded import BoundedIteration
from dagster_unified.engine.iterations.carried import left_by, round_before
from dagster_unified.engine.iterations.journal import Epoch, Input, Journal
from dagster_unified.engine.iterations.levels import SparkLevels
from dagster_unified.engine.iterations.places import forget_copies, text_of
from dagster_unified.engine.iterations.savepoints import start_iteration
from dagster_unified.engine.session import cores
from dagster_unified.errors import StateError
from dagster_unified.graph import nodes as g
from dagster_unified.graph.body import compiled
from dagster_unified.graph.fingerprint import digest
from dagster_unified.graph.plan import Port, Region
from dagster_unified.operators.layout import CARRIED
from dagster_unified.operators.metrics import Metrics

if TYPE_CHECKING:
    from pyspark.sql import DataFrame
    from upath import UPath


_ROUNDS = "iteration-"
"""What the folder of an iteration's rounds begins with."""


class IterationInputs(NamedTuple):
    """What an iteration takes in."""

    frames: Sequence[DataFrame]
    reported: Callable[[], Metrics]
    """What operators before it have measured, once the frames have been computed."""


@dataclass
class Iterations:
    """The iterations of a stage."""

    run: Run
    region: Region
    inputs: Mapping[int, Manifest]
    """The intermediates that the stage reads."""

    before: Manifest | None = None
    """What the stage has left for the partition before, where state is carried."""

    state: StateBefore | None = None
    """What operators have left for it."""

    subtasks: dict[str, int] = field(default_factory=dict)
    """In how many subtasks those are that leave state, by uid."""

    metrics: list[Metrics] = field(default_factory=list)
    summaries: dict[str, IterationSummary] = field(default_factory=dict)
    """What became of them, by name."""

    def outputs(self, node: g.IterationNode, inputs: Callable[[], IterationInputs]) -> dict[Port, DataFrame]:
        """The outputs of an iteration: runs it, from where it was left. Asks for inputs where none were taken in."""
        folder = self._folder(node)
        one = self._iteration(node, text_of(folder))
        outputs = one.rounds(lambda: self._taken(node, one.levels, inputs()))
        found = one.levels.frames(node, outputs)
        if self.run.carry is not None and node.carries_state:
            found[Port(node.id, CARRIED)] = left_by(self.run.plan, node, one.levels)
            self.subtasks[node.uid] = one.levels.loop.parallelism
        self.metrics.append(one.metrics)
        self.summaries[node.uid if node.name in self.summaries else node.name] = _summary(one)
        return found

    def _iteration(self, node: g.IterationNode, folder: str) -> BoundedIteration:
        run, journal = self.run, Journal(folder)
        given = node.parallelism or run.plan.execution.parallelism or self._subtasks_before(node)
        parallelism = journal.input.parallelism if journal.input is not None else given or cores(run.spark)
        levels = SparkLevels(run.spark, compiled(run.plan, node, parallelism), folder, run.check)
        goes_on = node.takes_input_in_all_rounds and run.carry is not None and not run.carry.last
        return BoundedIteration(journal, levels, self.region.name, node.name, run.observe, goes_on)

    def _taken(self, node: g.IterationNode, levels: SparkLevels, inputs: IterationInputs) -> Input:
        """Writes the records of the inputs to where they are read, and the state that it goes on with."""
        after = self._round_before(node, levels)
        once, replayed = levels.taken(inputs.frames)
        self.run.check()
        return Input(levels.loop.parallelism, once, replayed, inputs.reported().encode(), after)

    def _subtasks_before(self, node: g.IterationNode) -> int | None:
        return None if self.before is None else self.before.subtasks.get(node.uid)

    def _round_before(self, node: g.IterationNode, levels: SparkLevels) -> Epoch | None:
        """The round that an iteration goes on after: of the partition before, or in the savepoint it starts from.

        Raises `StateError` where it cannot.
        """
        carry, plan = self.run.carry, self.run.plan
        if carry is None or not node.carries_state:
            return None
        if self.before is None:
            start = None if carry.start is None else start_iteration(carry.start, node, levels)
            return None if start is None else start.round
        assert self.state is not None
        left, count = self.state(Port(node.id, CARRIED)), self._subtasks_before(node)
        assert left is not None
        if count != levels.loop.parallelism:
            raise StateError(
                f"{levels.loop.where}: it has {levels.loop.parallelism} subtasks, and its state of the partition before"
                f" is of {count}; set the parallelism that it had, start from a savepoint, which splits the state anew,"
                " or run a backfill from the first partition"
            )
        return round_before(plan, node, levels, left, summary_of(self.before, node).epochs[-1])

    def forget(self) -> None:
        """Removes all rounds of the stage, once it is committed; also those of code that was mended since."""
        if any(isinstance(self.run.plan.graph.node(number), g.IterationNode) for number in self.region.nodes):
            stage = self._stage()
            for folder in (stage / name for name in children(stage) if name.startswith(_ROUNDS)):
                remove_tree(folder)
                forget_copies(text_of(folder))

    def _folder(self, node: g.IterationNode) -> UPath:
        """Of the stage, for its code and its input: a retry and a re-execution find it again."""
        read = [self.inputs[number].data for number in self.region.inputs]
        read += [self.before.data] if self.before is not None else []
        return self._stage() / f"{_ROUNDS}{digest(self.region.fingerprint, node.uid, *read)[:16]}"

    def _stage(self) -> UPath:
        """Where the rounds of all runs of the execution are."""
        run = self.run
        return run.store.folder(Address(run.plan.name, self.region.name, run.execution, run.partition))


def summary_of(manifest: Manifest, node: g.IterationNode) -> IterationSummary:
    """What became of an iteration of a stage."""
    return manifest.iterations.get(node.uid) or manifest.iterations[node.name]


def _summary(one: BoundedIteration) -> IterationSummary:
    """What became of an iteration."""
    epochs = one.journal.epochs
    said = [epoch.gauges for epoch in epochs]
    return IterationSummary(
        rounds=epochs[-1].number + 1 - epochs[0].number,
        epochs=[epoch.number for epoch in epochs],
        feedback=[epoch.feedback for epoch in epochs],
        criteria=[epoch.criteria for epoch in epochs] if one.levels.loop.has_criteria else [],
        seconds=sum(epoch.seconds for epoch in epochs),
        reason=epochs[-1].reason,
        gauges={
            name: [float(found[name].max) if name in found else None for found in said]
            for name in sorted(set().union(*said))
        },
    )
