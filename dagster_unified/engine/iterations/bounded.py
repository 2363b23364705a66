"""Runs a bounded iteration: takes its inputs in, then round after round, each committed before the next.

What a killed run left goes on after the last round that was committed. Knows levels and the journal; not who asks for
the iteration.
"""

from __future__ import annotations

import time
from collections.abc import Callable

from dagster_unified.engine.events import IterationResumed, Observer, RoundCommitted
from dagster_unified.engine.iterations.files import StoredParcel
from dagster_unified.engine.iterations.journal import Epoch, Input, Journal
from dagster_unified.engine.iterations.levels import SparkLevels, parcels
from dagster_unified.engine.rounds.rounds import (
    LevelResult,
    Parcel,
    Round,
    RoundsApart,
    outputs_of,
    run_rounds,
    terminate,
)
from dagster_unified.operators.metrics import Metrics, merge


class BoundedIteration:
    """An iteration over bounded input; `stage` and `name` say in events which.

    One that `goes_on` in another run is not told that it has ended.
    """

    def __init__(
        self, journal: Journal, levels: SparkLevels, stage: str, name: str, observe: Observer, goes_on: bool = False
    ) -> None:
        self.journal, self.levels = journal, levels
        self.metrics = Metrics()
        self._stage, self._name, self._observe, self._goes_on = stage, name, observe, goes_on
        self._begun = time.monotonic()
        last = journal.last
        if last is not None:
            levels.states = last.states

    def rounds(self, take_in: Callable[[], Input]) -> list[StoredParcel]:
        """Runs all rounds that have not been run, and returns where the records of the outputs are."""
        held = self.journal.input
        if held is None:
            held = take_in()
            self.journal.begin(held)
            self.levels.files = []
        loop = self.levels.loop
        self.metrics.add(merge([held.metrics]))
        last = self.journal.last
        begin, later, epoch = parcels(held.once), list[list[Parcel[StoredParcel]]](), held.first
        if last is not None:
            self._observe(IterationResumed(self._stage, self._name, last.number))
            for done in self.journal.epochs:
                self.metrics.add_later(merge([done.metrics]))
            begin, later, epoch = parcels(last.fed_back), list(map(parcels, last.later)), last.number + 1
        elif held.after is not None:
            self.levels.states = held.after.states
            begin += parcels(held.after.fed_back)
        with self.levels.many_rounds():
            if last is not None and last.reason:
                ended = LevelResult() if self._goes_on else terminate(loop, self.levels, last.number)
            else:
                self._begun = time.monotonic()
                given = (loop, self.levels, parcels(held.replayed), begin, epoch, self._commit, later, self._goes_on)
                ended = RoundsApart(*given).run() if self.levels.run_apart else run_rounds(*given)
        self.metrics.add_later(ended.metrics)
        emitted = [parcel for one in self.journal.epochs for parcel in one.outputs]
        return emitted + [parcel.records for parcel in outputs_of(loop, ended.sent)]

    def _commit(self, ended: Round[StoredParcel]) -> None:
        now = time.monotonic()
        epoch = Epoch.of(ended, self.levels.states, now - self._begun)
        self.journal.commit(epoch, self.levels.files)
        self.levels.files, self._begun = [], now
        self.metrics.add_later(ended.metrics)
        self._observe(RoundCommitted(self._stage, self._name, epoch))
