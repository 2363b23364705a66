"""Runs an iteration of a BATCH stage: takes its inputs in, then round after round, each committed before the next.

What a killed run left goes on after the last round that was committed.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from dagster_unified.connectors.paths import is_local, path_text, remove_tree
from dagster_unified.engine.batch.intermediates.store import Address, IterationSummary, Manifest
from dagster_unified.engine.batch.run import Run
from dagster_unified.engine.events import IterationResumed, RoundCommitted
from dagster_unified.engine.iterations.files import StoredParcel
from dagster_unified.engine.iterations.journal import Epoch, Input, Journal
from dagster_unified.engine.iterations.levels import SparkLevels, cores, parcels
from dagster_unified.engine.iterations.places import forget_copies
from dagster_unified.engine.rounds.compile import compiled
from dagster_unified.engine.rounds.rounds import Round, outputs_of, run_rounds, terminate
from dagster_unified.graph import nodes as g
from dagster_unified.graph.fingerprint import digest
from dagster_unified.graph.plan import Port, Region
from dagster_unified.operators.metrics import Metrics, merge

if TYPE_CHECKING:
    from pyspark.sql import DataFrame
    from upath import UPath


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

    def outputs(
        self, node: g.IterationNode, inputs: Sequence[DataFrame], reported: Callable[[], Metrics]
    ) -> dict[Port, DataFrame]:
        """The outputs of an iteration over some inputs: runs it, from where it was left.

        `reported` gives what operators before it have measured, once the inputs have been computed.
        """
        folder = self._folder(node)
        one = _Iteration(self.run, self.region, node, _text(folder))
        found = one.levels.frames(node, one.rounds(inputs, reported))
        self.metrics.append(one.metrics)
        self.summaries[node.uid if node.name in self.summaries else node.name] = one.summary()
        return found

    def forget(self) -> None:
        """Removes what the iterations kept, once the stage is committed."""
        for node in self.run.plan.graph.nodes:
            if isinstance(node, g.IterationNode) and node.id in self.region.nodes:
                folder = self._folder(node)
                remove_tree(folder)
                forget_copies(_text(folder))

    def _folder(self, node: g.IterationNode) -> UPath:
        """Of the stage, for its code and its input: a retry and a re-execution find it again."""
        read = [self.inputs[number].data for number in self.region.inputs]
        mark = digest(self.region.fingerprint, node.uid, *read)[:16]
        run = self.run
        address = Address(run.plan.name, self.region.name, run.execution, run.partition)
        return run.store.folder(address) / f"iteration-{mark}"


def _text(folder: UPath) -> str:
    return path_text(folder) if is_local(folder) else str(folder)


class _Iteration:
    """One iteration of one stage."""

    def __init__(self, run: Run, region: Region, node: g.IterationNode, folder: str) -> None:
        self.stage, self.region, self.node = run, region, node
        self.journal = Journal(folder)
        held = self.journal.input
        given = node.parallelism or run.plan.execution.parallelism
        parallelism = held.parallelism if held is not None else given or cores(run.spark)
        self.levels = SparkLevels(run.spark, compiled(run.plan, node, parallelism), folder, run.check)
        self.loop = self.levels.loop
        self.metrics = Metrics()
        self._begun = time.monotonic()
        last = self.journal.last
        if last is not None:
            self.levels.states = last.states

    def rounds(self, inputs: Sequence[DataFrame], reported: Callable[[], Metrics]) -> list[StoredParcel]:
        """Runs all rounds that have not been run, and returns where the records of the outputs are."""
        held = self.journal.input or self._take_in(inputs, reported)
        self.metrics.add(merge([held.metrics]))
        last = self.journal.last
        begin, epoch = parcels(held.once), 0
        if last is not None:
            self.stage.observe(IterationResumed(self.region.name, self.node.name, last.number))
            self.metrics.add(merge(epoch.metrics for epoch in self.journal.epochs))
            begin, epoch = parcels(last.fed_back), last.number + 1
        if last is not None and last.reason:
            ended = terminate(self.loop, self.levels, last.number)
        else:
            self._begun = time.monotonic()
            ended = run_rounds(self.loop, self.levels, parcels(held.replayed), begin, epoch, self._commit)
        self.metrics.add(ended.metrics)
        emitted = [parcel for one in self.journal.epochs for parcel in one.outputs]
        return emitted + [parcel.records for parcel in outputs_of(self.loop, ended.sent)]

    def summary(self) -> IterationSummary:
        """What became of it."""
        epochs = self.journal.epochs
        return IterationSummary(
            rounds=len(epochs),
            feedback=[epoch.feedback for epoch in epochs],
            criteria=[epoch.criteria for epoch in epochs] if self.loop.has_criteria else [],
            seconds=sum(epoch.seconds for epoch in epochs),
            reason=epochs[-1].reason,
        )

    def _commit(self, ended: Round[StoredParcel]) -> None:
        now = time.monotonic()
        epoch = Epoch.of(ended, self.levels.states, now - self._begun)
        self.journal.commit(epoch, self.levels.files)
        self.levels.files, self._begun = [], now
        self.metrics.add(ended.metrics)
        self.stage.observe(RoundCommitted(self.region.name, self.node.name, epoch))

    def _take_in(self, inputs: Sequence[DataFrame], reported: Callable[[], Metrics]) -> Input:
        """Writes the records of the inputs to where they are read, and commits them."""
        once: list[StoredParcel] = []
        replayed: list[StoredParcel] = []
        for number, frame in enumerate(inputs):
            (replayed if number in self.loop.replayed else once).extend(self.levels.take_in(number, frame))
        self.stage.check()
        found = Input(self.loop.parallelism, once, replayed, reported().encode())
        self.journal.begin(found)
        return found
