"""What is committed of an iteration of a stream: what each epoch brought, and each round.

    <folder>/begun.json                the iteration as it was begun
    <folder>/before.json               what a bounded one had taken in the savepoint from which its job has started
    <folder>/taken-0000000007.json     what an epoch of the stream brought, until a round has taken it
    <folder>/round-0000000012.json     a round: what it fed back and emitted, where its state is, and of which epoch
    <folder>/ended.json                the state that is left, once the iteration has ended
    <folder>/<name>-<token>            a file of a task

The feedback edge is this log: what the last round fed back is what the next one begins with (Flink paper, 4.4). A
manifest is written last and at once. Of the rounds those of the newest epoch stay, and the one before them. Knows no
Spark.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Iterator, Sequence

import msgspec

from dagster_unified.engine.iterations import manifests
from dagster_unified.engine.iterations.files import StoredParcel, stands
from dagster_unified.engine.iterations.journal import Epoch, Input, StoredState
from dagster_unified.engine.iterations.places import Place
from dagster_unified.errors import StateError

_TAKEN = re.compile(r"taken-(\d{10})\.json")
_ROUND = re.compile(r"round-(\d{10})\.json")
_BEGUN, _BEFORE, _ENDED = "begun.json", "before.json", "ended.json"


class Begun(msgspec.Struct, frozen=True):
    """What must not change while an iteration has state: `slots` are those of its records, with their columns."""

    parallelism: int
    bounded: bool
    operators: list[list[str]]
    slots: list[str]
    groups: list[int] = []
    """The key groups of each pass; 0 for one whose state is that of its subtasks, or has none."""

    subtasks: list[int] = []
    """The subtasks of each pass: as many as the iteration has, or its own number."""

    def differs(self, other: Begun) -> str:
        """What is different in another one, which is started now; empty where nothing is.

        The number of subtasks may change: key groups go from one to another.
        """
        if self.bounded != other.bounded:
            return f"it was {_kind(self)}, and is {_kind(other)} now"
        if self.operators != other.operators:
            return "the operators of its body are others than those whose state it has"
        if self.slots != other.slots:
            return "the records that go round are of other types than those that it has"
        split = [n for n, own in zip(self.groups, other.subtasks, strict=True) if n and own == other.parallelism]
        most = min(split, default=other.parallelism + 1) - 1
        if self.parallelism != other.parallelism and other.parallelism > most:
            return (
                f"it has state of {self.parallelism} subtasks, of which there can be up to {most}, and is started with"
                f" {other.parallelism}"
            )
        return ""


class StreamRound(msgspec.Struct, frozen=True):
    """A round, and the epoch of the stream in which it ran; `closes` says that the epoch has no other."""

    round: Epoch
    epoch: int
    closes: bool
    parallelism: int = 0
    """How many subtasks it had."""


class Ended(msgspec.Struct, frozen=True):
    """The state of an iteration that has ended, and how many subtasks it had."""

    states: list[StoredState]
    parallelism: int


class FeedbackLog:
    """The log of one iteration."""

    def __init__(self, folder: str, where: str) -> None:
        self._place, self._where = Place(folder), where
        if self._place.is_shared:
            os.makedirs(folder, exist_ok=True)
        self._sizes = self._place.sizes()
        self.begun = manifests.read(self._place, _BEGUN, Begun)
        found = [manifests.read(self._place, name, StreamRound) for _, name in self._names(_ROUND)]
        self.rounds = [one for one in found if one is not None]
        if None in found:
            raise StateError(
                f"{where}: what is committed of one of its rounds cannot be read in {folder}; go back to a savepoint,"
                " or start the job without state"
            )
        if self.last is not None and not stands(self._sizes, [*self.last.round.needs(), *self.last.round.gives()]):
            raise StateError(
                f"{where}: files of its round {self.last.round.number} are gone from {folder}; go back to a savepoint,"
                " or start the job without state"
            )

    @property
    def last(self) -> StreamRound | None:
        """The last round that is committed."""
        return self.rounds[-1] if self.rounds else None

    @property
    def holds_state(self) -> bool:
        """Whether it has more than the record of what was begun."""
        return bool(self.rounds or self._names(_TAKEN) or _BEFORE in self._sizes)

    def begin(self, found: Begun) -> None:
        """Records what the iteration is; raises `StateError` where it has state as another one."""
        if self.begun is None or not self.holds_state:
            manifests.write(self._place, _BEGUN, found)
            self.begun = found
        elif what := self.begun.differs(found):
            raise StateError(f"{self._where}: {what}; start it as it was, or the job without state")
        elif self.begun != found:
            manifests.write(self._place, _BEGUN, found)
            self.begun = found

    def taken(self, epoch: int) -> Input | None:
        """What an epoch brought, if that is committed."""
        return manifests.read(self._place, _taken(epoch), Input)

    def all_taken(self, until: int | None = None) -> Iterator[Input]:
        """What came before the first epoch, and what all brought that no round has taken, in their order.

        `until` is the last of those that count, by default the last of all.
        """
        taken = [name for number, name in self._names(_TAKEN) if until is None or number <= until]
        for name in [_BEFORE, *taken]:
            found = manifests.read(self._place, name, Input)
            if found is not None:
                yield found

    def take(self, epoch: int, found: Input) -> None:
        """Commits what an epoch brought."""
        self._take(_taken(epoch), found)

    def take_before(self, found: Input) -> None:
        """Commits what a savepoint has of the input of a bounded iteration."""
        self._take(_BEFORE, found)

    def _take(self, name: str, found: Input) -> None:
        manifests.write(self._place, name, found)
        self._sizes.update(dict.fromkeys([name, *(block.file for block in found.blocks())], 0))

    def commit(self, done: StreamRound, written: Iterable[str]) -> None:
        """Commits a round, in which these files were written, and deletes what is not needed any more."""
        manifests.create(self._place, _round(done.round.number), done, done.round.number)
        kept = [one for one in self.rounds if one.epoch == done.epoch] or self.rounds[-1:]
        dropped = [_round(one.round.number) for one in self.rounds if one not in kept]
        taken = [name for number, name in self._names(_TAKEN) if number <= done.epoch]
        before = self.rounds[-1:]
        self.rounds = [*kept, done]
        self._sizes.update(dict.fromkeys([_round(done.round.number), *written], 0))
        needed = {block.file for one in self.rounds for block in one.round.gives()}
        needed.update(*(one.round.files() for one in (*before, done)))
        files = [name for name in self._sizes if not name.endswith(".json") and name not in needed]
        for name in (*dropped, *taken, *files):
            self._remove(name)

    def start(self, done: StreamRound, written: Iterable[str]) -> None:
        """Commits what a savepoint has, as the round before all others; the first epoch is taken once more."""
        for _, name in self._names(_TAKEN):
            self._remove(name)
        for one in self.rounds:
            self._remove(_round(one.round.number))
        self.rounds = []
        self.commit(done, written)

    def end(self, states: list[StoredState], parallelism: int) -> None:
        """Notes the state that is left when the iteration has ended."""
        manifests.write(self._place, _ENDED, Ended(states, parallelism))

    def left(self) -> Ended:
        """The state that the last round has left, or the end of the iteration."""
        ended = manifests.read(self._place, _ENDED, Ended)
        if ended is not None:
            return ended
        return Ended(self.last.round.states, self.last.parallelism) if self.last is not None else Ended([], 0)

    def has(self, epoch: int) -> bool:
        """Whether something of an epoch of the stream is committed."""
        return any(one.epoch == epoch for one in self.rounds) or _taken(epoch) in self._sizes

    def outputs(self, epoch: int) -> list[StoredParcel]:
        """What left the iteration in an epoch of the stream."""
        return [parcel for one in self.rounds if one.epoch == epoch for parcel in one.round.outputs]

    def waiting(self) -> Sequence[StoredParcel]:
        """What the next round begins with, besides what comes in."""
        return self.last.round.fed_back if self.last is not None else ()

    def _names(self, pattern: re.Pattern[str]) -> list[tuple[int, str]]:
        found = [(match, name) for name in self._sizes if (match := pattern.fullmatch(name))]
        return sorted((int(match[1]), name) for match, name in found)

    def _remove(self, name: str) -> None:
        self._place.remove(name)
        self._sizes.pop(name, None)


def _kind(begun: Begun) -> str:
    return "bounded" if begun.bounded else "unbounded"


def _taken(epoch: int) -> str:
    return f"taken-{epoch:010d}.json"


def _round(number: int) -> str:
    return f"round-{number:010d}.json"
