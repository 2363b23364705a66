"""Lanes: how the streams of a whole pipeline travel through one Spark plan, packed as a few large rows.

A row is `(lane, group, seq, data)`: an Arrow record batch of one stream, addressed to one key group, or to one subtask
where an exchange chooses it. Every stage passes on what is not addressed to it, so that a pipeline with branches is one
line of stages and nothing is computed twice. Control events and reports travel the same way. `seq` orders a group's
rows, first of all by their place around the control event. Knows no engine.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from enum import IntEnum
from typing import Any, NamedTuple

import pyarrow as pa

from dagster_unified.operators.addresses import Address
from dagster_unified.operators.layout import declared
from dagster_unified.operators.program.spec import Program

PACKED = pa.schema([("lane", pa.int32()), ("group", pa.int32()), ("seq", pa.int64()), ("data", pa.binary())])

REPORT = -1
"""The lane of reports to the driver: JSON, one per partition."""


class Place(IntEnum):
    """Where a row stands in its micro-batch.

    A row ahead of the control event is what an operator upstream emitted for that event.
    """

    BROADCAST_AHEAD = 0
    AHEAD = 1
    EVENT = 2
    BROADCAST = 3
    BEHIND = 4


def sequence(place: Place, number: int) -> int:
    """The sequence number of a row: its place, then its number among the rows of that place."""
    return (int(place) << 60) + number


def place_of(seq: int) -> Place:
    """The place of a row by its sequence number."""
    return Place(seq >> 60)


ROWS = 131_072
"""Rows that are collected before they are packed: with many key groups, smaller ones would make buffers of a few rows.
"""

PIECE = 8 << 10
"""Bytes of a packed row. Ten thousand of them, which Spark gives a worker at a time, are no more than 80 MB then."""


@dataclass(frozen=True)
class Route:
    """One way from a program's output to a lane.

    `columns` are the output's columns as its rows are addressed by them, None for one that is null there. Of these,
    `schema` are those that travel. Rows without an `address` stay in the task, and in the subtask, that they come from.
    """

    output: int
    lane: int
    schema: pa.Schema
    columns: tuple[str | None, ...]
    address: Address | None = None
    key: pa.Field | None = None
    """A column for the address, the last one, which does not travel."""

    everywhere: bool = False
    """Whether every key group gets a copy: broadcast records, which come before the other records of their micro-batch.
    """

    @property
    def addressed(self) -> pa.Schema:
        """The columns by which rows are addressed."""
        return self.schema if self.key is None else self.schema.append(self.key)


@dataclass(frozen=True)
class Track:
    """What a pass does with one lane (or a source's rows): a program, and where its outputs go."""

    program: Program
    routes: tuple[Route, ...]
    in_subtasks: bool = False
    """Whether a row's group is the subtask that an exchange chose, and each subtask has an instance of the program."""


def encode(batch: pa.RecordBatch) -> bytes:
    """A batch without its schema, which both ends know."""
    return bytes(batch.serialize().to_pybytes())


def encoded(batch: pa.RecordBatch) -> Iterator[bytes]:
    """A batch as several, none of which is much larger than `PIECE`, unless a record of it is."""
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
    """Collects the outputs of a pass and packs them, in one partition. The sequence numbers rise with what is added."""

    def __init__(self, partition: int, groups: int) -> None:
        self.groups = groups
        self._partition = partition
        self._seq = partition << 40
        self._known: dict[tuple[str, ...], dict[Any, int]] = {}
        self._waiting: dict[tuple[int, bool, int | None], _Waiting] = {}
        self._rows = self._turns = 0

    def add(self, route: Route, batch: pa.RecordBatch, ahead: bool = False, subtask: int | None = None) -> None:
        """Takes a batch of a route's output, ahead of the micro-batch's control event or behind it.

        It comes from a subtask that an exchange chose, or from None.
        """
        schema = route.addressed
        arrays = [
            pa.nulls(batch.num_rows, f.type) if c is None else batch.column(c)
            for c, f in zip(route.columns, schema, strict=True)
        ]
        place = (id(route), ahead, subtask)
        waiting = self._waiting.get(place)
        if waiting is None:
            waiting = self._waiting[place] = _Waiting(route, ahead, subtask, [])
        waiting.batches.append(declared(arrays, schema))
        self._rows += batch.num_rows

    def flush(self, at_least: int = 1) -> Iterator[pa.RecordBatch]:
        """What has been collected, packed, once it is so many rows."""
        if self._rows < at_least:
            return
        rows: list[tuple[int, int, int, bytes]] = []
        for route, ahead, subtask, batches in self._waiting.values():
            (batch,) = pa.Table.from_batches(batches).combine_chunks().to_batches()
            if route.everywhere:
                place = Place.BROADCAST_AHEAD if ahead else Place.BROADCAST
                for data in encoded(batch):
                    seq = sequence(place, self.next())
                    rows += [(route.lane, group, seq, data) for group in range(self.groups)]
                continue
            first = sequence(Place.AHEAD if ahead else Place.BEHIND, 0)
            for group, own in self._split(route, batch, subtask):
                if route.key is not None:
                    own = own.select(route.schema.names)
                rows += [(route.lane, group, first + self.next(), data) for data in encoded(own)]
        self._waiting, self._rows = {}, 0
        yield packed(rows)

    def next(self) -> int:
        """The next sequence number."""
        self._seq += 1
        return self._seq

    def turn(self, count: int) -> int:
        """One of `count` in turn, for each partition another one first: most send a few buffers only."""
        self._turns += 1
        return (self._partition + self._turns) % count

    def known(self, columns: tuple[str, ...]) -> dict[Any, int]:
        """The key groups of the keys that were met in these columns."""
        return self._known.setdefault(columns, {})

    def _split(self, route: Route, batch: pa.RecordBatch, subtask: int | None) -> Iterable[tuple[int, pa.RecordBatch]]:
        if route.address is not None:
            return route.address.split(batch, self)
        return [(self._partition % self.groups if subtask is None else subtask, batch)]


class _Waiting(NamedTuple):
    """What waits to be packed together."""

    route: Route
    ahead: bool
    subtask: int | None
    batches: list[pa.RecordBatch]
