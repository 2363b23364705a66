"""Routing: which channels of the next operator get a record, and the packed rows in which it travels."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from enum import IntEnum
from functools import cached_property
from numbers import Integral
from typing import Any, NamedTuple

import pyarrow as pa
import pyarrow.compute as pc

from dagster_unified.errors import PipelineError
from dagster_unified.operators.failures import RAISED, user_failure
from dagster_unified.operators.keys import KeyedInput, decoded, key_groups, key_values
from dagster_unified.operators.layout import StreamLayout, declared
from dagster_unified.operators.program.step import Program

SPREAD = 8192
"""Records without a key that go to one channel together."""

EVERYWHERE = -1
"""The channel of records that all subtasks get."""

_REMEMBERED = 1 << 18
"""Keys whose key groups a sender remembers."""


class Sender:
    """The sender of one subtask's records: takes channels in turn, and remembers the key groups of keys."""

    def __init__(self, subtask: int) -> None:
        self.subtask = subtask
        self._turns = 0
        self._known: dict[tuple[tuple[str, ...], int], dict[Any, int]] = {}

    def turn(self, count: int) -> int:
        """One of `count` channels in turn; each subtask starts at another one, as most send only a few batches."""
        self._turns += 1
        return (self.subtask + self._turns) % count

    def known(self, columns: tuple[str, ...], count: int) -> dict[Any, int]:
        """The key groups, of `count`, of keys seen in these columns."""
        known = self._known.setdefault((columns, count), {})
        if len(known) > _REMEMBERED:
            known.clear()
        return known


class ChannelSelector(ABC):
    """Decides which channels the records of a batch go to."""

    @abstractmethod
    def split(self, batch: pa.RecordBatch, sender: Sender) -> Iterator[tuple[int, pa.RecordBatch]]:
        """The batch in parts, each with the number of its channel."""

    @abstractmethod
    def describe(self) -> str:
        """How it chooses, for `explain`."""


@dataclass(frozen=True)
class ByKey(ChannelSelector):
    """The key group of a record's key, of `count`."""

    keyed: KeyedInput
    layout: StreamLayout
    where: str
    count: int

    def split(self, batch: pa.RecordBatch, sender: Sender) -> Iterator[tuple[int, pa.RecordBatch]]:
        known = sender.known(self.keyed.columns, self.count)
        return _by_number(batch, key_groups(batch, self.keyed, self.layout, self.where, self.count, known))

    def describe(self) -> str:
        return f"by key over {self.count}"


@dataclass(frozen=True)
class Rebalance(ChannelSelector):
    """Any of `count` channels: for records without a key."""

    count: int

    def split(self, batch: pa.RecordBatch, sender: Sender) -> Iterator[tuple[int, pa.RecordBatch]]:
        for start in range(0, batch.num_rows, SPREAD):
            yield sender.turn(self.count), batch.slice(start, SPREAD)

    def describe(self) -> str:
        return f"in turn over {self.count}"


@dataclass(frozen=True)
class CopyToAll(ChannelSelector):
    """A copy to each of `count` channels; with one channel, the records themselves."""

    count: int

    def split(self, batch: pa.RecordBatch, sender: Sender) -> Iterator[tuple[int, pa.RecordBatch]]:
        return ((channel, batch) for channel in range(self.count))

    def describe(self) -> str:
        return f"a copy to each of {self.count}"


@dataclass(frozen=True)
class ByPartitioner(ChannelSelector):
    """The subtask that the author's partitioner chooses by a record's key."""

    partitioner: Callable[[Any, int], int]
    keyed: KeyedInput
    count: int
    where: str

    def split(self, batch: pa.RecordBatch, sender: Sender) -> Iterator[tuple[int, pa.RecordBatch]]:
        return _by_number(
            batch, pa.array(self.subtasks([batch.column(name) for name in self.keyed.columns]), pa.int32())
        )

    def describe(self) -> str:
        return f"by a partitioner over {self.count}"

    def subtasks(self, columns: Sequence[pa.Array]) -> list[int]:
        """The subtask of each record, from the columns of its key."""
        chosen: list[int] = []
        key = None
        try:
            for key in decoded(self.keyed, key_values(columns), self.where):
                chosen.append(self._checked(self.partitioner(key, self.count), key))
        except RAISED as error:
            raise user_failure(error, self.where, self.partitioner, key) from error
        return chosen

    def _checked(self, chosen: object, key: Any) -> int:
        if isinstance(chosen, Integral) and not isinstance(chosen, bool) and 0 <= int(chosen) < self.count:
            return int(chosen)
        raise PipelineError(
            f"{self.where}: the partitioner gave {chosen!r} for key {key!r}; it must be a whole number from 0 to"
            f" {self.count - 1}"
        )


def _by_number(batch: pa.RecordBatch, numbers: pa.Array) -> Iterator[tuple[int, pa.RecordBatch]]:
    """The rows of each number, in order."""
    order = pc.sort_indices(numbers)
    batch, numbers = batch.take(order), numbers.take(order)
    start = 0
    for entry in pc.value_counts(numbers):
        count = entry["counts"].as_py()
        yield entry["values"].as_py(), batch.slice(start, count)
        start += count


@dataclass(frozen=True)
class Route:
    """One way from an output of a program to an operator, or out of a query or an iteration.

    `columns` are the output's columns in the operator's order, None for a column that is null there. The columns of
    `schema` travel. Without a `selector` records stay in their subtask.
    """

    target: int
    """The number of the receiver: a lane in STREAMING, an input buffer in an iteration."""

    schema: pa.Schema
    columns: tuple[str | None, ...]
    selector: ChannelSelector | None = None
    key: pa.Field | None = None
    """A column for the selector, the last one, which does not travel."""

    everywhere: bool = False
    """Whether all subtasks get the records, as those of a broadcast stream."""

    def describe(self) -> str:
        """How records travel, for `explain`."""
        if self.everywhere:
            return "a copy to all"
        return "forward" if self.selector is None else self.selector.describe()

    def aligned(self, batch: pa.RecordBatch) -> pa.RecordBatch:
        """A batch of the output, in the columns that `split` takes."""
        if self._keeps_columns and batch.schema.equals(self.schema):
            return batch
        return in_columns(batch, self.columns, self.schema if self.key is None else self.schema.append(self.key))

    @cached_property
    def _keeps_columns(self) -> bool:
        """Whether the columns that travel are those of the output."""
        return self.key is None and list(self.columns) == self.schema.names

    def split(self, aligned: pa.RecordBatch, sender: Sender) -> Iterator[tuple[int, pa.RecordBatch]]:
        """An aligned batch by channel, in the columns that travel."""
        if self.everywhere:
            yield EVERYWHERE, aligned
        elif self.selector is None:
            yield sender.subtask, aligned
        else:
            for channel, part in self.selector.split(aligned, sender):
                yield channel, part if self.key is None else part.select(self.schema.names)


@dataclass(frozen=True)
class RoutedProgram:
    """A program, and the routes of each of its outputs."""

    program: Program
    routes: tuple[tuple[Route, ...], ...]
    in_subtasks: bool = False
    """Whether an exchange chose the subtask of its records, and each subtask has an instance of the program."""


def in_columns(batch: pa.RecordBatch, columns: tuple[str | None, ...], schema: pa.Schema) -> pa.RecordBatch:
    """A batch in other columns: some of its own, and nulls."""
    arrays = [
        pa.nulls(batch.num_rows, field.type) if name is None else batch.column(name)
        for name, field in zip(columns, schema, strict=True)
    ]
    return declared(arrays, schema)


PACKED = pa.schema([("lane", pa.int32()), ("group", pa.int32()), ("seq", pa.int64()), ("data", pa.binary())])

REPORT = -1
"""The lane of reports to the driver: JSON, one per partition."""


class BatchOrder(IntEnum):
    """The place of a row in its micro-batch.

    A row before the control event was emitted for that event by an operator upstream.
    """

    BROADCAST_BEFORE_EVENT = 0
    BEFORE_EVENT = 1
    EVENT = 2
    BROADCAST_AFTER_EVENT = 3
    AFTER_EVENT = 4

    @classmethod
    def of(cls, before_event: bool, is_broadcast: bool = False) -> BatchOrder:
        """The place of records."""
        if is_broadcast:
            return cls.BROADCAST_BEFORE_EVENT if before_event else cls.BROADCAST_AFTER_EVENT
        return cls.BEFORE_EVENT if before_event else cls.AFTER_EVENT


def sequence(place: BatchOrder, number: int) -> int:
    """The sequence number of a row: its place, then its number within the place."""
    return (int(place) << 60) + number


def place_of(seq: int) -> BatchOrder:
    """The place of a row by its sequence number."""
    return BatchOrder(seq >> 60)


ROWS = 131_072
"""Rows that are collected before they are packed: with many key groups, smaller ones would make buffers of a few rows.
"""

PIECE = 8 << 10
"""Bytes of a packed row: ten thousand rows, which Spark passes to a worker at a time, are then at most 80 MB."""


def encode(batch: pa.RecordBatch) -> bytes:
    """A batch without its schema, which both ends know."""
    return bytes(batch.serialize().to_pybytes())


def encoded(batch: pa.RecordBatch) -> Iterator[bytes]:
    """A batch as several encoded ones, none much larger than `PIECE` unless a single record is."""
    each = max(batch.num_rows * PIECE // max(batch.nbytes, 1), 1)
    for start in range(0, batch.num_rows, each):
        yield encode(batch.slice(start, each))


def decode(data: Any, schema: pa.Schema) -> pa.RecordBatch:
    """The inverse of `encode`."""
    return pa.ipc.read_record_batch(pa.py_buffer(data), schema)


def packed(rows: list[tuple[int, int, int, bytes]]) -> pa.RecordBatch:
    """Rows as a batch of `PACKED`."""
    columns = zip(*rows, strict=True) if rows else ((), (), (), ())
    return pa.RecordBatch.from_arrays(
        [pa.array(c, f.type) for c, f in zip(columns, PACKED, strict=True)], schema=PACKED
    )


class Packer:
    """Collects the outputs of a pass and packs them, in one task. Sequence numbers rise in order of adding."""

    def __init__(self, task: int, groups: int) -> None:
        self._groups = groups
        self._sender = Sender(task)
        self._seq = task << 40
        self._waiting: dict[tuple[int, bool, int | None], _Waiting] = {}
        self._rows = 0

    def add(self, route: Route, batch: pa.RecordBatch, before_event: bool = False, subtask: int | None = None) -> None:
        """Add a batch of a route's output, before the micro-batch's control event or after it.

        `subtask` is the subtask that an exchange chose, or None.
        """
        place = (id(route), before_event, subtask)
        waiting = self._waiting.get(place)
        if waiting is None:
            waiting = self._waiting[place] = _Waiting(route, before_event, subtask, [])
        waiting.batches.append(route.aligned(batch))
        self._rows += batch.num_rows

    def flush(self, at_least: int = 1) -> Iterator[pa.RecordBatch]:
        """Pack the collected rows, once there are `at_least` this many."""
        if self._rows < at_least:
            return
        rows: list[tuple[int, int, int, bytes]] = []
        for route, before_event, subtask, batches in self._waiting.values():
            (batch,) = pa.Table.from_batches(batches).combine_chunks().to_batches()
            first = sequence(BatchOrder.of(before_event, route.everywhere), 0)
            if route.everywhere:
                for data in encoded(batch):
                    seq = first + self._next()
                    rows += [(route.target, group, seq, data) for group in range(self._groups)]
                continue
            for channel, part in self._split(route, batch, subtask):
                rows += [(route.target, channel, first + self._next(), data) for data in encoded(part)]
        self._waiting, self._rows = {}, 0
        yield packed(rows)

    def _next(self) -> int:
        self._seq += 1
        return self._seq

    def _split(self, route: Route, batch: pa.RecordBatch, subtask: int | None) -> Iterable[tuple[int, pa.RecordBatch]]:
        if route.selector is not None:
            return route.split(batch, self._sender)
        return [(self._sender.subtask % self._groups if subtask is None else subtask, batch)]


class _Waiting(NamedTuple):
    """Batches that are packed together."""

    route: Route
    before_event: bool
    subtask: int | None
    batches: list[pa.RecordBatch]
