"""An iteration's body as it ships: levels of passes, and the slots that records go to between them.

Within a level records stay in their subtask; between levels they are exchanged, and a level begins when the one before
has ended in all subtasks. A round runs all levels once. Knows no driver and no engine.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

import pyarrow as pa

from dagster_unified.operators.addresses import Address
from dagster_unified.operators.program.spec import Program

EVERYWHERE = -1
"""The target of records that all subtasks get; targets below it are those of `everywhere_but`."""

GROUPS_PER_SUBTASK = 16
"""Key groups of a keyed operator in each subtask: one of them is in memory at a time."""


def everywhere_but(subtask: int) -> int:
    """The target of records that all subtasks get, but for one that has had them."""
    return EVERYWHERE - 1 - subtask


@dataclass(frozen=True)
class Slot:
    """Where records wait for a pass, or leave the iteration."""

    number: int
    schema: pa.Schema
    reader: str
    """The uid of the operator that reads them, or of the end of the body."""

    broadcast: bool = False
    """Whether they are what the operator is told by broadcast."""


@dataclass(frozen=True)
class Way:
    """One way from a stream to a slot.

    `columns` are the stream's columns as the slot has them, None for one that is null there. Without an address records
    stay in their subtask.
    """

    slot: Slot
    columns: tuple[str | None, ...]
    address: Address | None = None
    everywhere: bool = False
    key: tuple[str, pa.Field] | None = None
    """A column of the stream by which its records are addressed, and what it is then called; it does not travel."""

    near: bool = False
    """Whether the slot's pass is of the same level, and reads the records at once."""


@dataclass(frozen=True)
class Intake:
    """How records become those of an input of the body: its columns, the keys that functions compute, and its ways."""

    columns: tuple[str | None, ...]
    schema: pa.Schema
    keys: Program | None
    ways: tuple[Way, ...]


@dataclass(frozen=True)
class Outlet:
    """Where one output of a pass goes."""

    ways: tuple[Way, ...]
    feedback: tuple[Intake, ...] = ()
    """The variables that it becomes in the next round."""

    is_criteria: bool = False


class Driver(Enum):
    """What drives a pass."""

    PLAIN = "plain"
    """Its records are pushed through: no operator of it has state."""

    GROUPED = "grouped"
    """Its keyed head has state, which lives on, in key groups."""

    BOUNDED = "bounded"
    """Each round is its whole input, after which its state is gone."""


@dataclass(frozen=True)
class BodyPass:
    """Operators that run in one Python pass, and where they get their records from."""

    number: int
    program: Program
    driver: Driver
    subtasks: int
    own: Slot
    outlets: tuple[Outlet, ...]
    broadcast: Slot | None = None
    groups: int = 0
    """How many key groups all its subtasks have; 0 where the head is not keyed."""

    listens: bool = False
    """Whether a function in it hears of each round, also where no record comes."""

    @property
    def slots(self) -> tuple[int, ...]:
        """The numbers of the slots that it reads."""
        return (self.own.number,) if self.broadcast is None else (self.own.number, self.broadcast.number)


@dataclass(frozen=True)
class Level:
    """Passes that run together, in this order."""

    passes: tuple[BodyPass, ...]

    @property
    def subtasks(self) -> int:
        """How many subtasks it has."""
        return max(one.subtasks for one in self.passes)

    def is_for(self, subtask: int, slot: int, target: int) -> bool:
        """Whether what was sent to a target of a slot is for a subtask."""
        if target <= EVERYWHERE:
            return target != everywhere_but(subtask)
        return self._subtask(slot, target) == subtask

    def readers(self, slot: int, target: int) -> list[int]:
        """The subtasks for which something is that was sent to a target of a slot."""
        if target <= EVERYWHERE:
            return [subtask for subtask in range(self.subtasks) if target != everywhere_but(subtask)]
        return [self._subtask(slot, target)]

    def _subtask(self, slot: int, target: int) -> int:
        return target % next(one.subtasks for one in self.passes if slot in one.slots)


@dataclass(frozen=True)
class Loop:
    """The body of an iteration."""

    where: str
    """How an error names the iteration."""

    levels: tuple[Level, ...]
    inputs: tuple[Intake, ...]
    """What becomes of the records of each input, the variables first."""

    replayed: frozenset[int]
    """The inputs whose records come again in every round."""

    outputs: tuple[Slot, ...]
    has_criteria: bool
    parallelism: int
    staleness: int = 0
    """How many epochs a subtask may be ahead of the slowest, and so many later than in the next one records come that
    one sends to another; where it may be, there is one level."""

    def way_to(self, slot: int) -> tuple[Intake, Way]:
        """An input whose records come to a slot, and their way; that with an event time, if there are others without.

        Raises `LookupError` where there is none.
        """
        found = [(intake, way) for intake in self.inputs for way in intake.ways if way.slot.number == slot]
        if not found:
            raise LookupError(f"{self.where}: no input comes to slot {slot}")
        return max(found, key=lambda one: len(one[0].schema))

    @property
    def listens_to_the_end(self) -> bool:
        """Whether an operator may do something when the iteration has ended."""
        return any(one.listens or one.driver is Driver.GROUPED for level in self.levels for one in level.passes)
