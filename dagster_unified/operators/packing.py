"""Packing: how the streams of a whole pipeline travel through one Spark plan, as a few large rows.

A row is `(lane, group, seq, data)`: an Arrow record batch of one stream, which is a lane, for one key group, or for one
subtask where an exchange chooses it. Every stage passes on the lanes of others, so that a pipeline with branches is one
line of stages and nothing is computed twice. Control events and reports travel the same way. `seq` orders a group's
rows, first of all by their place around the control event. Knows no engine.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from enum import IntEnum
from typing import Any, NamedTuple

import pyarrow as pa

from dagster_unified.operators.routing import Route, Sender

PACKED = pa.schema([("lane", pa.int32()), ("group", pa.int32()), ("seq", pa.int64()), ("data", pa.binary())])

REPORT = -1
"""The lane of reports to the driver: JSON, one per partition."""


class BatchOrder(IntEnum):
    """Where a row stands in its micro-batch.

    A row ahead of the control event is what an operator upstream emitted for that event.
    """

    BROADCAST_AHEAD = 0
    AHEAD = 1
    EVENT = 2
    BROADCAST = 3
    BEHIND = 4


def sequence(place: BatchOrder, number: int) -> int:
    """The sequence number of a row: its place, then its number among the rows of that place."""
    return (int(place) << 60) + number


def place_of(seq: int) -> BatchOrder:
    """The place of a row by its sequence number."""
    return BatchOrder(seq >> 60)


ROWS = 131_072
"""Rows that are collected before they are packed: with many key groups, smaller ones would make buffers of a few rows.
"""

PIECE = 8 << 10
"""Bytes of a packed row. Ten thousand of them, which Spark gives a worker at a time, are no more than 80 MB then."""


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
    """Collects the outputs of a pass and packs them, in one task. The sequence numbers rise with what is added."""

    def __init__(self, task: int, groups: int) -> None:
        self._groups = groups
        self._sender = Sender(task)
        self._seq = task << 40
        self._waiting: dict[tuple[int, bool, int | None], _Waiting] = {}
        self._rows = 0

    def add(self, route: Route, batch: pa.RecordBatch, ahead: bool = False, subtask: int | None = None) -> None:
        """Takes a batch of a route's output, ahead of the micro-batch's control event or behind it.

        It comes from a subtask that an exchange chose, or from None.
        """
        place = (id(route), ahead, subtask)
        waiting = self._waiting.get(place)
        if waiting is None:
            waiting = self._waiting[place] = _Waiting(route, ahead, subtask, [])
        waiting.batches.append(route.aligned(batch))
        self._rows += batch.num_rows

    def flush(self, at_least: int = 1) -> Iterator[pa.RecordBatch]:
        """What has been collected, packed, once it is so many rows."""
        if self._rows < at_least:
            return
        rows: list[tuple[int, int, int, bytes]] = []
        for route, ahead, subtask, batches in self._waiting.values():
            (batch,) = pa.Table.from_batches(batches).combine_chunks().to_batches()
            if route.everywhere:
                place = BatchOrder.BROADCAST_AHEAD if ahead else BatchOrder.BROADCAST
                for data in encoded(batch):
                    seq = sequence(place, self._next())
                    rows += [(route.target, group, seq, data) for group in range(self._groups)]
                continue
            first = sequence(BatchOrder.AHEAD if ahead else BatchOrder.BEHIND, 0)
            for channel, own in self._split(route, batch, subtask):
                rows += [(route.target, channel, first + self._next(), data) for data in encoded(own)]
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
    """What waits to be packed together."""

    route: Route
    ahead: bool
    subtask: int | None
    batches: list[pa.RecordBatch]
