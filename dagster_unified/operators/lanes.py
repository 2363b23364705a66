"""Lanes: how the streams of a whole pipeline travel through one Spark plan, packed as a few large rows.

A row is `(lane, group, seq, data)`: an Arrow record batch of one stream, addressed to one key group. Every stage passes
on what is not addressed to it, so that a pipeline with branches is one line of stages and nothing is computed twice.
Control events and reports travel the same way. `seq` orders a group's rows, first of all by their place around the
control event. Knows no engine.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from enum import IntEnum
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from dagster_unified.operators.keys import key_groups
from dagster_unified.operators.layout import StreamLayout
from dagster_unified.operators.program.spec import KeyedInput, Program

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

SPREAD = 8192
"""How many records go to one key group together, where they have no key and any group will do."""


@dataclass(frozen=True)
class Route:
    """One way from a program's output to a lane.

    `columns` are the output's columns as the lane has them, None for one that is null there.
    """

    output: int
    lane: int
    schema: pa.Schema
    columns: tuple[str | None, ...]
    keyed: KeyedInput | None = None
    layout: StreamLayout | None = None
    where: str = ""
    everywhere: bool = False
    """Whether every key group gets a copy: broadcast records, which come before the other records of their micro-batch.
    """


@dataclass(frozen=True)
class Track:
    """What a pass does with one lane (or a source's rows): a program, and where its outputs go."""

    program: Program
    routes: tuple[Route, ...]


def encode(batch: pa.RecordBatch) -> bytes:
    """A batch without its schema, which both ends know."""
    return bytes(batch.serialize().to_pybytes())


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

    def __init__(self, partition: int, group_count: int) -> None:
        self._groups = group_count
        self._partition = partition
        self._seq = partition << 40
        self._known: dict[tuple[str, ...], dict[Any, int]] = {}
        self._waiting: dict[tuple[int, bool], tuple[Route, bool, list[pa.RecordBatch]]] = {}
        self._rows = 0

    def add(self, route: Route, batch: pa.RecordBatch, ahead: bool = False) -> None:
        """Takes a batch of a route's output, ahead of the micro-batch's control event or behind it."""
        arrays = [
            pa.nulls(batch.num_rows, f.type) if c is None else batch.column(c)
            for c, f in zip(route.columns, route.schema, strict=True)
        ]
        waiting = self._waiting.setdefault((id(route), ahead), (route, ahead, []))[2]
        waiting.append(pa.RecordBatch.from_arrays(arrays, schema=route.schema))
        self._rows += batch.num_rows

    def flush(self, at_least: int = 1) -> Iterator[pa.RecordBatch]:
        """What has been collected, packed, once it is so many rows."""
        if self._rows < at_least:
            return
        rows: list[tuple[int, int, int, bytes]] = []
        for route, ahead, batches in self._waiting.values():
            (batch,) = pa.Table.from_batches(batches).combine_chunks().to_batches()
            if route.everywhere:
                place = Place.BROADCAST_AHEAD if ahead else Place.BROADCAST
                data, seq = encode(batch), sequence(place, self._next())
                rows += [(route.lane, group, seq, data) for group in range(self._groups)]
                continue
            first = sequence(Place.AHEAD if ahead else Place.BEHIND, 0)
            for group, own in self._by_group(route, batch):
                rows.append((route.lane, group, first + self._next(), encode(own)))
        self._waiting, self._rows = {}, 0
        yield packed(rows)

    def _next(self) -> int:
        self._seq += 1
        return self._seq

    def _by_group(self, route: Route, batch: pa.RecordBatch) -> Iterable[tuple[int, pa.RecordBatch]]:
        if route.keyed is None or route.layout is None:
            yield self._partition % self._groups, batch
            return
        if not route.keyed.columns:
            for start in range(0, batch.num_rows, SPREAD):
                yield self._next() % self._groups, batch.slice(start, SPREAD)
            return
        known = self._known.setdefault(route.keyed.columns, {})
        found = key_groups(batch, route.keyed, route.layout, route.where, self._groups, known)
        order = pc.sort_indices(found)
        batch, found = batch.take(order), found.take(order)
        start = 0
        for entry in pc.value_counts(found):
            group, count = entry["values"].as_py(), entry["counts"].as_py()
            yield group, batch.slice(start, count)
            start += count
