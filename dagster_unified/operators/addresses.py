"""Addresses: which key group, or which subtask of the next operator, a record goes to.

Knows records and their keys; not how they travel.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from numbers import Integral
from typing import Any, Protocol

import pyarrow as pa
import pyarrow.compute as pc

from dagster_unified.errors import PipelineError
from dagster_unified.operators.failures import RAISED, user_failure
from dagster_unified.operators.keys import KeyedInput, decoded, key_groups, key_values
from dagster_unified.operators.layout import StreamLayout

SPREAD = 8192
"""How many records go to one key group together, where they have no key and any group will do."""


class Sender(Protocol):
    """What sends rows out of one partition, as an address knows it."""

    groups: int
    """How many key groups there are."""

    def next(self) -> int:
        """A number that rises."""

    def turn(self, count: int) -> int:
        """One of `count` in turn, for each sender another one first."""

    def known(self, columns: tuple[str, ...]) -> dict[Any, int]:
        """The key groups of the keys that were met in these columns."""


class Address(ABC):
    """Says which key group or subtask the records of a batch go to."""

    @abstractmethod
    def split(self, batch: pa.RecordBatch, sender: Sender) -> Iterator[tuple[int, pa.RecordBatch]]:
        """The batch in parts, each with the number of its key group or subtask."""


@dataclass(frozen=True)
class ByKey(Address):
    """The key group of a record's key; with a `count`, of so many."""

    keyed: KeyedInput
    layout: StreamLayout
    where: str
    count: int | None = None

    def split(self, batch: pa.RecordBatch, sender: Sender) -> Iterator[tuple[int, pa.RecordBatch]]:
        known = sender.known(self.keyed.columns) if self.count is None else {}
        found = key_groups(batch, self.keyed, self.layout, self.where, self.count or sender.groups, known)
        return _apart(batch, found)


@dataclass(frozen=True)
class Anywhere(Address):
    """Any key group, or any of `count` subtasks: for records without a key."""

    count: int | None = None

    def split(self, batch: pa.RecordBatch, sender: Sender) -> Iterator[tuple[int, pa.RecordBatch]]:
        for start in range(0, batch.num_rows, SPREAD):
            yield sender.turn(self.count or sender.groups), batch.slice(start, SPREAD)


@dataclass(frozen=True)
class EachOf(Address):
    """Each of `count` subtasks gets a copy; of one, that one gets the records."""

    count: int

    def split(self, batch: pa.RecordBatch, sender: Sender) -> Iterator[tuple[int, pa.RecordBatch]]:
        return ((subtask, batch) for subtask in range(self.count))


@dataclass(frozen=True)
class ByPartitioner(Address):
    """The subtask that the author's partitioner chooses by a record's key."""

    partitioner: Callable[[Any, int], int]
    keyed: KeyedInput
    count: int
    where: str

    def split(self, batch: pa.RecordBatch, sender: Sender) -> Iterator[tuple[int, pa.RecordBatch]]:
        return _apart(batch, pa.array(self.subtasks([batch.column(name) for name in self.keyed.columns]), pa.int32()))

    def subtasks(self, columns: Sequence[pa.Array]) -> list[int]:
        """The subtask of each record, from the columns of its key."""
        found: list[int] = []
        key = None
        try:
            for key in decoded(self.keyed, key_values(columns), self.where):
                found.append(self._checked(self.partitioner(key, self.count), key))
        except RAISED as error:
            raise user_failure(error, self.where, self.partitioner, key) from error
        return found

    def _checked(self, chosen: object, key: Any) -> int:
        if isinstance(chosen, Integral) and not isinstance(chosen, bool) and 0 <= int(chosen) < self.count:
            return int(chosen)
        raise PipelineError(
            f"{self.where}: the partitioner gave {chosen!r} for key {key!r}; it must be a whole number from 0 to"
            f" {self.count - 1}"
        )


def _apart(batch: pa.RecordBatch, numbers: pa.Array) -> Iterator[tuple[int, pa.RecordBatch]]:
    """The rows of each number, in their order."""
    order = pc.sort_indices(numbers)
    batch, numbers = batch.take(order), numbers.take(order)
    start = 0
    for entry in pc.value_counts(numbers):
        count = entry["counts"].as_py()
        yield entry["values"].as_py(), batch.slice(start, count)
        start += count
