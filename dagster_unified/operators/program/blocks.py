"""What goes from operator to operator: whole lists of records, in Python's form or Arrow's."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import pyarrow as pa

from dagster_unified.errors import RecordTypeError
from dagster_unified.operators.failures import placed
from dagster_unified.records import Copy, RecordType


class Block:
    """Some consecutive records of a stream, as Python records or as Arrow.

    They are converted when the other form is asked for.
    """

    def __init__(
        self,
        records: list[Any] | None,
        batch: pa.RecordBatch | None,
        timestamps: Sequence[int | None] | None,
        kind: RecordType | None,
        where: str = "",
    ) -> None:
        self._records, self._batch, self._kind = records, batch, kind
        self._where = where
        self.timestamps = timestamps

    @property
    def size(self) -> int:
        """How many records."""
        if self._records is not None:
            return len(self._records)
        return 0 if self._batch is None else int(self._batch.num_rows)

    @property
    def columns(self) -> pa.RecordBatch | None:
        """As Arrow, where nobody has asked for Python records yet."""
        return self._batch if self._records is None else None

    def at(self, timestamps: Sequence[int | None] | None) -> Block:
        """The same records with these event times."""
        return Block(self._records, self._batch, timestamps, self._kind, self._where)

    def copied(self, copy: Copy) -> Block:
        """The same, with records of its own."""
        if self._records is None:
            return self.at(self.timestamps)
        return Block(list(map(copy, self._records)), None, self.timestamps, self._kind, self._where)

    def records(self) -> list[Any]:
        """As Python records."""
        if self._records is None:
            assert self._batch is not None
            assert self._kind is not None
            with placed(self._where):
                self._records = self._kind.from_batch(self._batch)
        return self._records

    def normal(self, kind: RecordType, where: str) -> Block:
        """Makes the normal form of its records; `where` names the operator whose function made them."""
        if self._records is not None:
            with placed(where):
                self._records = kind.all_normal(self._records)
        return self

    def batch(self, kind: RecordType) -> pa.RecordBatch:
        """As Arrow, the record's columns only."""
        if self._batch is None:
            assert self._records is not None
            self._batch = kind.to_batch(self._records)
        return self._batch


Consumer = Callable[[Block], None]

Copies = Mapping[str | None, Copy]
"""What copies the records of an operator's outputs, by tag, None for the main one; not of those that cannot change."""


def encoded(block: Block, kind: RecordType, where: str) -> pa.RecordBatch:
    """A block as Arrow; `where` names the operator whose records do not fit their type."""
    try:
        return block.batch(kind)
    except RecordTypeError as error:
        raise RecordTypeError(f"{where}: {error}") from error
