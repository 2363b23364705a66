"""The iterations of a BATCH stage: where each keeps its rounds, and what became of it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple

from dagster_unified.connectors.paths import children, remove_tree
from dagster_unified.engine.batch.intermediates.store import Address, IterationSummary, Manifest
from dagster_unified.engine.batch.run import Run
from dagster_unified.engine.iterations.bounded import BoundedIteration
from dagster_unified.engine.iterations.journal import Input, Journal
from dagster_unified.engine.iterations.levels import SparkLevels
from dagster_unified.engine.iterations.places import forget_copies, text_of
from dagster_unified.engine.rounds.compile import compiled
from dagster_unified.engine.session import cores
from dagster_unified.graph import nodes as g
from dagster_unified.graph.fingerprint import digest
from dagster_unified.graph.plan import Port, Region
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

    metrics: list[Metrics] = field(default_factory=list)
    summaries: dict[str, IterationSummary] = field(default_factory=dict)
    """What became of them, by name."""

    def outputs(self, node: g.IterationNode, inputs: Callable[[], IterationInputs]) -> dict[Port, DataFrame]:
        """The outputs of an iteration: runs it, from where it was left. Asks for inputs where none were taken in."""
        folder = self._folder(node)
        one = self._iteration(node, text_of(folder))
        outputs = one.rounds(lambda: self._taken(one.levels, inputs()))
        found = one.levels.frames(node, outputs)
        self.metrics.append(one.metrics)
        self.summaries[node.uid if node.name in self.summaries else node.name] = _summary(one)
        return found

    def _iteration(self, node: g.IterationNode, folder: str) -> BoundedIteration:
        run, journal = self.run, Journal(folder)
        given = node.parallelism or run.plan.execution.parallelism
        parallelism = journal.input.parallelism if journal.input is not None else given or cores(run.spark)
        levels = SparkLevels(run.spark, compiled(run.plan, node, parallelism), folder, run.check)
        return BoundedIteration(journal, levels, self.region.name, node.name, run.observe)

    def _taken(self, levels: SparkLevels, inputs: IterationInputs) -> Input:
        """Writes the records of the inputs to where they are read."""
        once, replayed = levels.taken(inputs.frames)
        self.run.check()
        return Input(levels.loop.parallelism, once, replayed, inputs.reported().encode())

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
        return self._stage() / f"{_ROUNDS}{digest(self.region.fingerprint, node.uid, *read)[:16]}"

    def _stage(self) -> UPath:
        """Where the rounds of all runs of the execution are."""
        run = self.run
        return run.store.folder(Address(run.plan.name, self.region.name, run.execution, run.partition))


def _summary(one: BoundedIteration) -> IterationSummary:
    """What became of an iteration."""
    epochs = one.journal.epochs
    return IterationSummary(
        rounds=epochs[-1].number + 1,
        epochs=[epoch.number for epoch in epochs],
        feedback=[epoch.feedback for epoch in epochs],
        criteria=[epoch.criteria for epoch in epochs] if one.levels.loop.has_criteria else [],
        seconds=sum(epoch.seconds for epoch in epochs),
        reason=epochs[-1].reason,
    )
