"""An iteration's body as it ships: levels of passes, and the buffers that records go to between them.

Within a level records stay in their subtask; between levels they are exchanged, and a level begins when the one before
has ended in all subtasks. A round runs all levels once. Knows no driver and no engine.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

import pyarrow as pa

from dagster_unified.operators.program.spec import Program
from dagster_unified.operators.routing import EVERYWHERE, Route

GROUPS_PER_SUBTASK = 16
"""Key groups of a keyed operator in each subtask: one of them is in memory at a time."""


def everywhere_but(subtask: int) -> int:
    """The channel of records that all subtasks get, but for one that has had them."""
    return EVERYWHERE - 1 - subtask


@dataclass(frozen=True)
class InputBuffer:
    """Where records wait for a pass, or leave the iteration."""

    number: int
    schema: pa.Schema
    reader: str
    """The uid of the operator that reads them, or of the end of the body."""

    broadcast: bool = False
    """Whether they are what the operator is told by broadcast."""


@dataclass(frozen=True)
class InputRoute:
    """How records become those of an input of the body: their columns, the keys that functions compute, and routes."""

    columns: tuple[str | None, ...]
    schema: pa.Schema
    keys: Program | None
    routes: tuple[Route, ...]


@dataclass(frozen=True)
class OutputRoutes:
    """Where one output of a pass goes."""

    routes: tuple[Route, ...]
    feedback: tuple[InputRoute, ...] = ()
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
    own: InputBuffer
    outputs: tuple[OutputRoutes, ...]
    broadcast: InputBuffer | None = None
    groups: int = 0
    """How many key groups all its subtasks have; 0 where the head is not keyed."""

    listens: bool = False
    """Whether a function in it hears of each round, also where no record comes."""

    @property
    def buffers(self) -> tuple[int, ...]:
        """The numbers of the buffers that it reads."""
        return (self.own.number,) if self.broadcast is None else (self.own.number, self.broadcast.number)


@dataclass(frozen=True)
class Level:
    """Passes that run together, in this order."""

    passes: tuple[BodyPass, ...]

    @property
    def subtasks(self) -> int:
        """How many subtasks it has."""
        return max(one.subtasks for one in self.passes)

    @property
    def buffers(self) -> frozenset[int]:
        """The numbers of the buffers that its passes read."""
        return frozenset(number for one in self.passes for number in one.buffers)

    def is_for(self, subtask: int, buffer: int, channel: int) -> bool:
        """Whether what was sent to a channel of a buffer is for a subtask."""
        if channel <= EVERYWHERE:
            return channel != everywhere_but(subtask)
        return self._subtask(buffer, channel) == subtask

    def readers(self, buffer: int, channel: int) -> list[int]:
        """The subtasks for which something is that was sent to a channel of a buffer."""
        if channel <= EVERYWHERE:
            return [subtask for subtask in range(self.subtasks) if channel != everywhere_but(subtask)]
        return [self._subtask(buffer, channel)]

    def _subtask(self, buffer: int, channel: int) -> int:
        return channel % next(one.subtasks for one in self.passes if buffer in one.buffers)


@dataclass(frozen=True)
class Loop:
    """The body of an iteration."""

    where: str
    """How an error names the iteration."""

    levels: tuple[Level, ...]
    buffers: tuple[InputBuffer, ...]
    """By their numbers."""

    inputs: tuple[InputRoute, ...]
    """What becomes of the records of each input, the variables first."""

    replayed: frozenset[int]
    """The inputs whose records come again in every round."""

    outputs: tuple[InputBuffer, ...]
    has_criteria: bool
    parallelism: int
    staleness: int = 0
    """How many epochs a subtask may lead the slowest; records to others arrive that many epochs later.

    A loop with a staleness has one level.
    """

    def route_to(self, buffer: int) -> tuple[InputRoute, Route]:
        """An input whose records come to a buffer, and their route; that with an event time, if there are others.

        Raises `LookupError` where there is none.
        """
        found = [(own, route) for own in self.inputs for route in own.routes if route.target == buffer]
        if not found:
            raise LookupError(f"{self.where}: no input comes to buffer {buffer}")
        return max(found, key=lambda one: len(one[0].schema))

    @property
    def listens_to_the_end(self) -> bool:
        """Whether an operator may do something when the iteration has ended."""
        return any(one.listens or one.driver is Driver.GROUPED for level in self.levels for one in level.passes)
