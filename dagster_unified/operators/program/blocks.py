"""What goes from operator to operator: whole lists of records, in Python's form or Arrow's; and how all are closed."""

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


class Collector:
    """Collects what an operator emits, main output and side outputs apart, until its driver takes it.

    Records that can change are copied: the function may change them, or the state that they are, before they go on.
    """

    def __init__(self, copies: Copies | None = None) -> None:
        self._copies = copies or {}
        self._copy = self._copies.get(None)
        self.records: list[Any] = []
        self.timestamps: list[int | None] = []
        self.side: dict[str, tuple[list[Any], list[int | None]]] = {}
        self.batches: dict[str | None, list[tuple[pa.RecordBatch, Sequence[int | None] | None]]] = {}
        """What is emitted as Arrow, with its event times, by the tag of its side output; None for the main output."""

        self.types: dict[str | None, RecordType] = {}
        self.rows = 0
        """How many rows the batches have."""

    def emit_all(self, emitted: Iterable[Any] | None, timestamp: int | None) -> None:
        """Takes what a process function returned or yields."""
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
        """Takes one record for the main output."""
        self.records.append(record if self._copy is None else self._copy(record))
        self.timestamps.append(timestamp)

    def emit_records(self, records: Iterable[Any]) -> None:
        """Takes records for the main output, without their timestamps."""
        self.records += records if self._copy is None else map(self._copy, records)

    def emit_side(self, tag: OutputTag[Any], record: Any, timestamp: int | None) -> None:
        """Takes one record for a side output."""
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
        """Takes a batch of records of this type, for a side output or the main one."""
        if not batch.num_rows:
            return
        self.batches.setdefault(tag, []).append((batch, timestamps))
        self.types[tag] = records
        self.rows += batch.num_rows

    def blocks(self) -> Iterator[tuple[str | None, Block]]:
        """What was collected: the main output's, and each side output's with its tag."""
        yield None, Block(self.records, None, self.timestamps, None)
        for tag, (records, times) in self.side.items():
            yield tag, Block(records, None, times, None)
        for tag_or_main, given in self.batches.items():
            whole = pa.concat_batches([batch for batch, _ in given])
            timestamps: list[int | None] | None = None
            if any(own is not None for _, own in given):
                timestamps = [moment for batch, own in given for moment in own or [None] * batch.num_rows]
            yield tag_or_main, Block(None, whole, timestamps, self.types[tag_or_main])

    def take(self, other: Collector) -> None:
        """Takes all that another one collected."""
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
    """Puts what a listener emits into an operator's output, with no event time; on a keyed stream it has a key."""

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
    """Calls a listener's method; raises `TypeError` where it returns what it should emit, which would be lost."""
    returned = method(*what, emitted, emitted)
    if returned is not None:
        raise TypeError(
            f"{method.__name__} returned {shorten(returned)}, which goes nowhere; emit with collector.collect(record)"
        )


@dataclass(frozen=True)
class Closing:
    """An author's function, or what holds one; `where` is how an error names it."""

    where: str
    one: Any

    def close(self, failure: BaseException | None) -> None:
        """Closes it, whatever has failed before."""
        try:
            self.one.close()
        except RAISED as error:
            close = getattr(getattr(self.one, "function", self.one), "close", None)
            raise user_failure(error, self.where, close, "close()") from error


class Closes(Protocol):
    """What is closed, after a failure or without one."""

    def close(self, failure: BaseException | None) -> None: ...


def close_each(ones: Iterable[Closes], failure: BaseException | None) -> None:
    """Closes all of them, also where one fails to; raises what failed first, which may be noted at what failed before.

    Flink: `StreamTask.cleanUp`, whose failures are suppressed ones of what made the task fail.
    """
    first: Exception | None = None
    for one in ones:
        try:
            one.close(failure or first)
        except Exception as error:
            told = failure or first
            if told is None:
                first = error
            else:
                told.add_note(f"after that: {error}")
    if first is not None:
        raise first
