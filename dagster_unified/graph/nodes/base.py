"""What all nodes of a graph have in common, and what they are put together with: keys, exchanges, places, names."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum, IntEnum
from typing import Any

from dagster_unified.operators.layout import ComputedKey
from dagster_unified.records import RecordType


@dataclass(frozen=True)
class Location:
    """A line of the author's program."""

    file: str
    line: int

    def __str__(self) -> str:
        return f"{self.file}:{self.line}"


class Chaining(Enum):
    """Flink's chaining strategy: whether an operator may be chained to the one before it, and the one after to it."""

    ALWAYS = "always"
    HEAD = "head"
    NEVER = "never"


class Naming(IntEnum):
    """Where an operator's name comes from.

    The higher, the more it says of what the operator makes: stages are named after it.
    """

    LIBRARY = 0
    """The library's word for the operator, such as `map`."""
    SOURCE = 1
    """What a source is called: it says what is read."""
    FUNCTION = 2
    """The name of the operator's function or class."""
    AUTHOR = 3
    """Given with `name(...)`, or the name of a sink."""


class ExchangeKind(Enum):
    """How records travel along an edge."""

    FORWARD = "FORWARD"
    HASH = "HASH"
    REBALANCE = "REBALANCE"
    RESCALE = "RESCALE"
    SHUFFLE = "SHUFFLE"
    BROADCAST = "BROADCAST"
    GLOBAL = "GLOBAL"
    CUSTOM = "CUSTOM"


@dataclass(frozen=True)
class Key:
    """What a stream is keyed by: fields of the record, or what a function gives."""

    fields: tuple[str, ...] = ()
    computed: ComputedKey | None = None

    def describe(self) -> str:
        """For plans and messages."""
        if self.computed is None:
            return ", ".join(self.fields)
        return getattr(self.computed.function, "__name__", type(self.computed.function).__name__)


@dataclass(frozen=True)
class Partitioning:
    """The exchange that an author asked for; FORWARD stands for "not said", unless `explicit`."""

    kind: ExchangeKind = ExchangeKind.FORWARD
    key: Key | None = None
    partitioner: Any = None
    explicit: bool = False


@dataclass(frozen=True, kw_only=True, eq=False)
class Node:
    """A transformation. `records` is its output type; `timestamped` says whether its records carry event times."""

    id: int
    name: str
    naming: Naming = Naming.LIBRARY
    uid: str = ""
    given_uid: bool = False
    location: Location | None = None
    records: RecordType | None = None
    timestamped: bool = False
    parallelism: int | None = None
    chaining: Chaining = Chaining.ALWAYS
