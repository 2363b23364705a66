"""How a subtask sends records: each batch split by where its rows go, and put in the columns of its slot."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import pyarrow as pa

from dagster_unified.operators.layout import declared
from dagster_unified.operators.program.run import RunningProgram
from dagster_unified.operators.program.spec import Program
from dagster_unified.operators.rounds.spec import EVERYWHERE, Intake, Way


class Sent(NamedTuple):
    """Records on their way: the slot they go to, and of it the key group or subtask, or `EVERYWHERE`."""

    slot: int
    target: int
    batch: pa.RecordBatch


class Sending:
    """The sender of one subtask."""

    groups = 1
    """For addresses that are of no number of their own; those of a body are."""

    def __init__(self, subtask: int) -> None:
        self.subtask = subtask
        self._turns = 0

    def next(self) -> int:
        """A number that rises."""
        self._turns += 1
        return self._turns

    def turn(self, count: int) -> int:
        """One of `count` in turn, for each subtask another one first."""
        return (self.subtask + self.next()) % count

    def known(self, columns: tuple[str, ...]) -> dict[Any, int]:
        """Nothing: addresses with a number of groups do not ask."""
        return {}

    def along(self, way: Way, batch: pa.RecordBatch) -> Iterator[Sent]:
        """A batch along a way."""
        own = in_columns(batch, way.columns, way.slot.schema)
        if way.everywhere:
            yield Sent(way.slot.number, EVERYWHERE, own)
        elif way.address is None:
            yield Sent(way.slot.number, self.subtask, own)
        elif way.key is None:
            for target, part in way.address.split(own, self):
                yield Sent(way.slot.number, target, part)
        else:
            column, field = way.key
            for target, part in way.address.split(own.append_column(field, batch.column(column)), self):
                yield Sent(way.slot.number, target, part.select(own.schema.names))

    def into(self, intake: Intake, batch: pa.RecordBatch) -> Iterator[Sent]:
        """A batch into an input of the body."""
        batch = in_columns(batch, intake.columns, intake.schema)
        for keyed in [batch] if intake.keys is None else with_keys(intake.keys, batch):
            for way in intake.ways:
                yield from self.along(way, keyed)

    def again(self, intake: Intake, way: Way, batch: pa.RecordBatch) -> Iterator[Sent]:
        """Records of an input of the body along one of its ways."""
        columns = tuple(name if name in batch.schema.names else None for name in intake.schema.names)
        batch = in_columns(batch, columns, intake.schema)
        for keyed in [batch] if intake.keys is None else with_keys(intake.keys, batch):
            yield from self.along(way, keyed)


def in_columns(batch: pa.RecordBatch, columns: tuple[str | None, ...], schema: pa.Schema) -> pa.RecordBatch:
    """A batch in other columns: some of its own, and nulls."""
    arrays = [
        pa.nulls(batch.num_rows, field.type) if name is None else batch.column(name)
        for name, field in zip(columns, schema, strict=True)
    ]
    return declared(arrays, schema)


def with_keys(keys: Program, batch: pa.RecordBatch) -> list[pa.RecordBatch]:
    """A batch with the keys that functions compute."""
    found: list[pa.RecordBatch] = []
    with RunningProgram(keys, lambda _, keyed: found.append(keyed), lambda: 0) as running:
        running.push(batch)
    return found
