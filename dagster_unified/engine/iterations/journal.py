"""What is committed of an iteration: what came in, and each round; and which files are still needed.

    <folder>/input.json              the records of its inputs
    <folder>/epoch-0000000012.json   a round: what it fed back and emitted, and where its state is
    <folder>/<name>-<token>          a file of a task

A manifest is written last and at once. What no manifest of the newest two rounds needs, and has left the iteration in
no round, is deleted. Knows no Spark.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable
from itertools import chain

import msgspec

from dagster_unified.engine.iterations import manifests
from dagster_unified.engine.iterations.files import Block, StoredParcel, stands
from dagster_unified.engine.iterations.places import Place
from dagster_unified.engine.rounds.rounds import Round
from dagster_unified.operators.metrics import GaugeRange, merge

_EPOCH = re.compile(r"epoch-(\d{10})\.json")
_INPUT = "input.json"


def _name(epoch: int) -> str:
    return f"epoch-{epoch:010d}.json"


class StoredState(msgspec.Struct, frozen=True, array_like=True):
    """Where the state of a subtask in a level is, and the files that hold it."""

    level: int
    subtask: int
    index: Block
    files: list[str]


class Epoch(msgspec.Struct, frozen=True):
    """A round that is committed."""

    number: int
    feedback: int
    criteria: int
    fed_back: list[StoredParcel]
    outputs: list[StoredParcel]
    states: list[StoredState]
    metrics: str
    seconds: float
    reason: str = ""
    """Why there is no other round; empty where there is one."""

    later: list[list[StoredParcel]] = []
    """What comes in the rounds after the next one, for each of them."""

    @staticmethod
    def of(ended: Round[StoredParcel], states: list[StoredState], seconds: float) -> Epoch:
        """A round that has ended, and left its state there."""
        return Epoch(
            number=ended.epoch,
            feedback=ended.feedback,
            criteria=ended.criteria,
            fed_back=[parcel.records for parcel in ended.fed_back],
            outputs=[parcel.records for parcel in ended.outputs],
            states=states,
            metrics=ended.metrics.encode(),
            seconds=seconds,
            reason=ended.reason,
            later=[[parcel.records for parcel in coming] for coming in ended.later],
        )

    @property
    def gauges(self) -> dict[str, GaugeRange]:
        """What the gauges of its functions said at its end."""
        return merge([self.metrics]).gauges

    def needs(self) -> list[Block]:
        """What the next round reads, and those after it."""
        held = [Block(file, 0, 1) for state in self.states for file in state.files]
        coming = chain(self.fed_back, *self.later)
        return [state.index for state in self.states] + held + [parcel.block for parcel in coming]

    def files(self) -> set[str]:
        """The files that the next rounds read."""
        return {block.file for block in self.needs()}

    def gives(self) -> list[Block]:
        """What left the iteration."""
        return [parcel.block for parcel in self.outputs]


class Input(msgspec.Struct, frozen=True):
    """The records that an iteration began with: those that come once, and those that come in every round."""

    parallelism: int
    once: list[StoredParcel]
    replayed: list[StoredParcel]
    metrics: str
    """What the operators before have measured."""

    after: Epoch | None = None
    """The round of another run that it goes on after, with the state that this left."""

    @property
    def first(self) -> int:
        """The number of the first round."""
        return 0 if self.after is None else self.after.number + 1

    def blocks(self) -> list[Block]:
        """Where they are, and the state."""
        before = [] if self.after is None else self.after.needs()
        return [parcel.block for parcel in (*self.once, *self.replayed)] + before


def begun_with(folder: str) -> int | None:
    """In how many subtasks a bounded iteration goes round; None where it has not begun to."""
    held = manifests.read(Place(folder), _INPUT, Input)
    return None if held is None else held.parallelism


class Journal:
    """The manifests of one iteration."""

    def __init__(self, folder: str) -> None:
        self.folder = folder
        self._place = Place(folder)
        if self._place.is_shared:
            os.makedirs(folder, exist_ok=True)
        self._sizes = self._place.sizes()
        self.input = manifests.read(self._place, _INPUT, Input)
        self.epochs = self._epochs()
        self._kept = {block.file for epoch in self.epochs for block in epoch.gives()}
        if self.input is not None:
            self._kept |= {parcel.block.file for parcel in self.input.replayed}
        self._alive = {name for name in self._sizes if not name.endswith(".json")} - self._kept

    @property
    def last(self) -> Epoch | None:
        """The last round that is committed."""
        return self.epochs[-1] if self.epochs else None

    def begin(self, found: Input) -> None:
        """Commits what came in."""
        manifests.write(self._place, _INPUT, found)
        self.input = found
        self._kept |= {parcel.block.file for parcel in found.replayed}
        self._alive |= {block.file for block in found.blocks()} - self._kept

    def commit(self, epoch: Epoch, written: Iterable[str]) -> None:
        """Commits a round, in which these files were written, and deletes what is not needed any more."""
        manifests.create(self._place, _name(epoch.number), epoch, epoch.number)
        before = self.last
        needed = epoch.files() | (before.files() if before is not None else set())
        if before is not None:
            self.epochs[-1] = bare(before)
        self.epochs.append(epoch)
        self._kept |= {block.file for block in epoch.gives()}
        self._alive |= set(written)
        self._alive -= self._kept
        for name in self._alive - needed:
            self._place.remove(name)
        self._alive &= needed

    def _epochs(self) -> list[Epoch]:
        """The rounds from the first on, as far as one can go on after them; what follows is deleted."""
        numbers = sorted(int(match[1]) for name in self._sizes if (match := _EPOCH.fullmatch(name)))
        found: list[Epoch] = []
        if self.input is not None and stands(self._sizes, [parcel.block for parcel in self.input.replayed]):
            for number in numbers:
                epoch = manifests.read(self._place, _name(number), Epoch)
                if epoch is None or number != self.input.first + len(found) or not stands(self._sizes, epoch.gives()):
                    break
                found.append(epoch)
            while found and not stands(self._sizes, found[-1].needs()):
                found.pop()
        if not found and self.input is not None and not stands(self._sizes, self.input.blocks()):
            self.input = None  # nothing can go on
        for number in numbers[len(found) :]:
            self._place.remove(_name(number))
        return [bare(epoch) for epoch in found[:-1]] + found[-1:]


def bare(epoch: Epoch) -> Epoch:
    """A round without what others go on with, which is in its manifest."""
    return msgspec.structs.replace(epoch, fed_back=[], later=[], states=[])
