"""How a subtask of an iteration sends records: each batch along a route, split by channel."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import pyarrow as pa

from dagster_unified.operators.program.run import RunningProgram
from dagster_unified.operators.program.spec import Program
from dagster_unified.operators.rounds.spec import InputRoute
from dagster_unified.operators.routing import Route, Sender, in_columns


class Message(NamedTuple):
    """Records on their way: the buffer they go to, and of it the key group or subtask, or `EVERYWHERE`."""

    slot: int
    target: int
    batch: pa.RecordBatch


def along(route: Route, batch: pa.RecordBatch, sender: Sender) -> Iterator[Message]:
    """A batch along a route."""
    for channel, part in route.split(route.aligned(batch), sender):
        yield Message(route.target, channel, part)


def into(given: InputRoute, batch: pa.RecordBatch, sender: Sender) -> Iterator[Message]:
    """A batch into an input of the body."""
    batch = in_columns(batch, given.columns, given.schema)
    for keyed in [batch] if given.keys is None else with_keys(given.keys, batch):
        for route in given.routes:
            yield from along(route, keyed, sender)


def again(given: InputRoute, route: Route, batch: pa.RecordBatch, sender: Sender) -> Iterator[Message]:
    """Records of an input of the body along one of its routes."""
    columns = tuple(name if name in batch.schema.names else None for name in given.schema.names)
    batch = in_columns(batch, columns, given.schema)
    for keyed in [batch] if given.keys is None else with_keys(given.keys, batch):
        yield from along(route, keyed, sender)


def with_keys(keys: Program, batch: pa.RecordBatch) -> list[pa.RecordBatch]:
    """A batch with the keys that functions compute."""
    found: list[pa.RecordBatch] = []
    with RunningProgram(keys, lambda _, keyed: found.append(keyed), lambda: 0) as running:
        running.push(batch)
    return found
