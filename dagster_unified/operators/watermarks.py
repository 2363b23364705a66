"""Runs an author's watermark generator over the records of one task, and reports what it emitted.

Knows no driver: a driver takes the marks of all tasks of a micro-batch and decides what the watermark is.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import date, datetime
from typing import Any

import msgspec

from dagster_unified.errors import RecordTypeError
from dagster_unified.operators.failures import RAISED, user_failure
from dagster_unified.operators.functions.event_time import WatermarkGenerator, WatermarkOutput
from dagster_unified.operators.time import to_millis
from dagster_unified.records import shorten

Supplier = Callable[[], WatermarkGenerator[Any]]


class Mark(msgspec.Struct, frozen=True):
    """What the generators of one timestamp assigner said in a micro-batch. Milliseconds since the epoch."""

    watermark: int | None = None
    idle: bool = False
    kept: dict[int, bytes | None] = {}
    """What generators keep for the next micro-batch, by the subtask they ran in; None where another one took it over.
    """


def slowest(marks: Iterable[Mark]) -> Mark:
    """What parallel instances say together: the smallest watermark of those that are not idle."""
    found = list(marks)
    kept = {subtask: data for mark in found for subtask, data in mark.kept.items()}
    active = [mark for mark in found if not mark.idle]
    if active:
        return Mark(min((m.watermark for m in active if m.watermark is not None), default=None), kept=kept)
    return Mark(max((m.watermark for m in found if m.watermark is not None), default=None), True, kept)


Kept = Mapping[int, bytes]
"""What the generators of an assigner have kept, by the subtask they ran in."""


@dataclass(frozen=True)
class Memory:
    """What a generator keeps from one micro-batch to the next: the names of its attributes, and what others kept."""

    names: tuple[str, ...] = ()
    before: Kept = field(default_factory=dict)
    subtask: int = 0

    def source(self) -> int | None:
        """The subtask whose generator this one goes on from: its own, or the only one that there was."""
        if self.subtask in self.before:
            return self.subtask
        return next(iter(self.before)) if len(self.before) == 1 else None


def encoded_attributes(generator: WatermarkGenerator[Any], names: Sequence[str], where: str) -> bytes:
    """Encode attributes of a generator; raise `RecordTypeError` for a value that cannot go on to another process."""
    values = []
    for name in names:
        try:
            values.append((name, _tagged(getattr(generator, name))) if hasattr(generator, name) else None)
        except TypeError as error:
            raise RecordTypeError(
                f"{where}: {type(generator).__name__} keeps self.{name} from record to record, and {error} cannot go on"
                " to the next micro-batch; keep numbers, text, moments, and lists, tuples, sets and dicts of them"
            ) from error
    return msgspec.msgpack.encode([value for value in values if value is not None])


def restore_attributes(generator: WatermarkGenerator[Any], data: bytes) -> None:
    """Set the attributes of a generator that were encoded."""
    for name, value in msgspec.msgpack.decode(data):
        setattr(generator, name, _untagged(value))


_PLAIN = (type(None), bool, int, float, str, bytes)
_MOMENTS: dict[str, type[datetime] | type[date]] = {"datetime": datetime, "date": date}
_MANY: dict[str, Callable[[Any], Any]] = {
    "list": list, "tuple": tuple, "set": set, "frozenset": frozenset, "deque": deque
}  # fmt: skip


def _tagged(value: Any) -> Any:
    """A value of which only plain ones are themselves; others are their type's name and what they hold."""
    kind = type(value)
    if kind in _PLAIN:
        return value
    if kind.__name__ in _MOMENTS and kind in _MOMENTS.values():
        return [kind.__name__, value.isoformat()]
    if kind is dict:
        return ["dict", [[_tagged(key), _tagged(one)] for key, one in value.items()]]
    if kind.__name__ in _MANY and kind in _MANY.values():
        return [kind.__name__, [_tagged(one) for one in value]]
    raise TypeError(f"{shorten(value)} ({kind.__name__})")


def _untagged(value: Any) -> Any:
    if not isinstance(value, list):
        return value
    kind, held = value
    if kind in _MOMENTS:
        return _MOMENTS[kind].fromisoformat(held)
    if kind == "dict":
        return {_untagged(key): _untagged(one) for key, one in held}
    return _MANY[kind](_untagged(one) for one in held)


class Generated(WatermarkOutput):
    """The generator of one task, new for each micro-batch, and what it emitted.

    What it keeps over records goes on from the micro-batch before, and to the next.
    """

    def __init__(self, where: str, supplier: Supplier, memory: Memory | None = None) -> None:
        self._where, self._supplier, self._memory = where, supplier, memory or Memory()
        self._generator: WatermarkGenerator[Any] | None = None
        self._said: Mark | None = None

    def on_event(self, event: Any, event_timestamp: int) -> None:
        """Shows a record to the generator."""
        if self._generator is None:
            self._generator = self._supplied()
        self._generator.on_event(event, event_timestamp, self)

    def end_of_batch(self) -> Mark | None:
        """What was emitted in a micro-batch; the generator is asked for its periodic watermark if it saw a record."""
        return self.periodic() if self._generator is not None else None

    def periodic(self) -> Mark | None:
        """What was emitted, also for the period that ends now; the next generator is a new one."""
        generator = self._generator or self._supplied()
        try:
            generator.on_periodic_emit(self)
        except RAISED as error:
            raise user_failure(error, self._where, generator.on_periodic_emit, "on_periodic_emit()") from error
        said, self._generator, self._said = self._said, None, None
        if not self._memory.names:
            return said
        data = encoded_attributes(generator, self._memory.names, self._where)
        source = self._memory.source()
        kept: dict[int, bytes | None] = {} if source is None else {source: None}
        kept[self._memory.subtask] = data
        self._memory = replace(self._memory, before={self._memory.subtask: data})
        return msgspec.structs.replace(said or Mark(), kept=kept)

    def _supplied(self) -> WatermarkGenerator[Any]:
        generator = self._supplier()
        if not isinstance(generator, WatermarkGenerator):
            raise RecordTypeError(
                f"{self._where}: the function given to for_generator must give a WatermarkGenerator, and gave"
                f" {_article(generator)}"
            )
        source = self._memory.source()
        if self._memory.names and source is not None:
            restore_attributes(generator, self._memory.before[source])
        return generator

    def emit_watermark(self, watermark: int | datetime) -> None:
        moment = to_millis(watermark)
        if not isinstance(moment, int):
            raise RecordTypeError(f"a watermark is milliseconds (int) or a datetime, not {shorten(moment)}")
        before = self._said.watermark if self._said is not None else None
        self._said = Mark(moment if before is None else max(moment, before))

    def mark_idle(self) -> None:
        self._said = Mark(self._said.watermark if self._said is not None else None, idle=True)

    def mark_active(self) -> None:
        self._said = Mark(self._said.watermark if self._said is not None else None)


def _article(value: object) -> str:
    name = type(value).__name__
    return f"{'an' if name[0] in 'aeiou' else 'a'} {name}"
