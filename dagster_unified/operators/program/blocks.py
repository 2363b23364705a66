"""The data between operators: whole lists of records, in Python's form or Arrow's; and how functions are closed."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import pyarrow as pa

from dagster_unified.errors import RecordTypeError, UnsupportedError
from dagster_unified.operators.failures import RAISED, placed, user_failure
from dagster_unified.operators.functions.base import OutputTag
from dagster_unified.operators.functions.iterations import EpochCollector, EpochContext
from dagster_unified.records import Copy, RecordType, shorten


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
        self.size: int = 0 if batch is None else batch.num_rows
        if records is not None:
            self.size = len(records)

    @property
    def columns(self) -> pa.RecordBatch | None:
        """As Arrow, unless they were converted to Python records that may have been changed since."""
        return self._batch if self._records is None or _cannot_change(self._kind) else None

    def at(self, timestamps: Sequence[int | None] | None) -> Block:
        """The same records with these event times."""
        return Block(self._records, self._batch, timestamps, self._kind, self._where)

    def copied(self, copy: Copy) -> Block:
        """The same, with copied records."""
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

    def normal(self, kind: RecordType, where: str, in_chain: bool = False) -> Block:
        """Bring its records into normal form; `where` names the operator whose function made them.

        `in_chain` does it as a chain does for its own functions, which may take numbers that no column can hold.
        """
        if self._records is not None:
            with placed(where):
                form = kind.normal_in_chain if in_chain else kind.all_normal
                self._records = form(self._records)
        return self

    def encode_plain(self, kind: RecordType) -> bool:
        """Encode the records if all are plainly in normal form; whether they are."""
        if self._batch is None and self._records is not None:
            self._batch = kind.plain_batch(self._records)
        return self._batch is not None

    def batch(self, kind: RecordType) -> pa.RecordBatch:
        """As Arrow, the record's columns only."""
        if self._batch is None:
            assert self._records is not None
            self._batch = kind.to_batch(self._records)
        return self._batch


def _cannot_change(kind: RecordType | None) -> bool:
    """Whether no function can change a record of a type, by whatever means."""
    if kind is None or kind.fit.mutable:
        return False
    return kind.shape != "class" or issubclass(kind.python, tuple)


Consumer = Callable[[Block], None]

Copies = Mapping[str | None, Copy]
"""Copiers of the records of an operator's outputs, by tag, None for the main one; only for mutable records."""


def encoded(block: Block, kind: RecordType, where: str) -> pa.RecordBatch:
    """A block as Arrow; `where` names the operator whose records do not fit their type."""
    try:
        return block.batch(kind)
    except RecordTypeError as error:
        raise RecordTypeError(f"{where}: {error}") from error


class Collector:
    """Collects an operator's results, main output and side outputs apart, until its driver takes them.

    Mutable records are copied: the function may change them, or the state that they are, before they go on.
    """

    def __init__(self, copies: Copies | None = None) -> None:
        self._copies = copies or {}
        self._copy = self._copies.get(None)
        self.records: list[Any] = []
        self.timestamps: list[int | None] = []
        self.side: dict[str, tuple[list[Any], list[int | None]]] = {}
        self.batches: dict[str | None, list[tuple[pa.RecordBatch, Sequence[int | None] | None]]] = {}
        """Batches with their event times, by the tag of the side output; None for the main output."""

        self.types: dict[str | None, RecordType] = {}
        self.rows = 0
        """How many rows the batches have."""

    def emit_all(self, emitted: Iterable[Any] | None, timestamp: int | None) -> None:
        """Collect what a process function returned or yields."""
        if emitted is None:
            return
        copy = self._copy
        for record in emitted:
            if type(record) is tuple and len(record) == 2 and isinstance(record[0], OutputTag):
                self.emit_side(record[0], record[1], timestamp)
            else:
                self.records.append(record if copy is None else copy(record))
                self.timestamps.append(timestamp)

    def emit(self, record: Any, timestamp: int | None) -> None:
        self.records.append(record if self._copy is None else self._copy(record))
        self.timestamps.append(timestamp)

    def emit_records(self, records: Iterable[Any]) -> None:
        """Collect records for the main output, without their timestamps."""
        self.records += records if self._copy is None else map(self._copy, records)

    def emit_side(self, tag: OutputTag[Any], record: Any, timestamp: int | None) -> None:
        """Collect one record for a side output."""
        copy = self._copies.get(tag.name)
        records, timestamps = self.side.setdefault(tag.name, ([], []))
        records.append(record if copy is None else copy(record))
        timestamps.append(timestamp)

    def emit_batch(
        self,
        tag: str | None,
        batch: pa.RecordBatch,
        records: RecordType,
        timestamps: Sequence[int | None] | None = None,
    ) -> None:
        """Collect a batch of records of this type, for a side output or the main one."""
        if not batch.num_rows:
            return
        self.batches.setdefault(tag, []).append((batch, timestamps))
        self.types[tag] = records
        self.rows += batch.num_rows

    def blocks(self) -> Iterator[tuple[str | None, Block]]:
        """The collected blocks: the main output's, and each side output's with its tag."""
        yield None, Block(self.records, None, self.timestamps, None)
        for tag, (records, times) in self.side.items():
            yield tag, Block(records, None, times, None)
        for tag_or_main, parts in self.batches.items():
            whole = pa.concat_batches([batch for batch, _ in parts])
            timestamps: list[int | None] | None = None
            if any(batch_times is not None for _, batch_times in parts):
                timestamps = [
                    moment for batch, batch_times in parts for moment in batch_times or [None] * batch.num_rows
                ]
            yield tag_or_main, Block(None, whole, timestamps, self.types[tag_or_main])

    def take(self, other: Collector) -> None:
        self.records += other.records
        self.timestamps += other.timestamps
        for name, (records, timestamps) in other.side.items():
            mine = self.side.setdefault(name, ([], []))
            mine[0].extend(records)
            mine[1].extend(timestamps)
        for tag, batches in other.batches.items():
            self.batches.setdefault(tag, []).extend(batches)
        self.types |= other.types
        self.rows += other.rows


class Emitting(EpochContext, EpochCollector[Any]):
    """Puts a listener's results into an operator's output, with no event time; on a keyed stream it has a key."""

    def __init__(self, out: Collector, *key: Any) -> None:
        self.out, self._key = out, key

    def collect(self, value: Any) -> None:
        self.out.emit(value, None)

    def output(self, tag: OutputTag[Any], value: Any) -> None:
        self.out.emit_side(tag, value, None)

    def get_current_key(self) -> Any:
        if not self._key:
            raise UnsupportedError(
                "there is no key; call key_by before the operator, and give it a KeyedProcessFunction, or a function"
                " that overrides open()"
            )
        return self._key[0]


def tell(method: Callable[..., object], *what: int, emitted: Emitting) -> None:
    """Call a listener's method; raises `TypeError` where it returns what it should emit, which would be lost."""
    returned = method(*what, emitted, emitted)
    if returned is not None:
        raise TypeError(
            f"{method.__name__} returned {shorten(returned)}, which goes nowhere; emit with collector.collect(record)"
        )


@dataclass(frozen=True)
class Closing:
    """An author's function, or an object that has one; `where` is its name in errors."""

    where: str
    closable: Any

    def close(self, failure: BaseException | None) -> None:
        """Close it, whatever has failed before."""
        try:
            self.closable.close()
        except RAISED as error:
            close = getattr(getattr(self.closable, "function", self.closable), "close", None)
            raise user_failure(error, self.where, close, "close()") from error


class Closes(Protocol):
    """Anything that is closed, after a failure or without one."""

    def close(self, failure: BaseException | None) -> None: ...


def close_each(closables: Iterable[Closes], failure: BaseException | None) -> None:
    """Close all of them, also where one fails to; raises the first failure, or adds it to an earlier one as a note.

    Flink: `StreamTask.cleanUp`, where these failures are suppressed ones of the error that made the task fail.
    """
    first: Exception | None = None
    for closable in closables:
        try:
            closable.close(failure or first)
        except Exception as error:
            raised = failure or first
            if raised is None:
                first = error
            else:
                raised.add_note(f"after that: {error}")
    if first is not None:
        raise first
