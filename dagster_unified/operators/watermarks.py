"""Runs an author's watermark generator over the records of one task, and reports what it emitted.

Knows no driver: a driver takes the marks of all tasks of a micro-batch and decides the watermark.
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
    """The report of one timestamp assigner's generators for a micro-batch. Milliseconds since the epoch."""

    watermark: int | None = None
    idle: bool = False
    kept: dict[int, bytes | None] = {}
    """The memories of generators for the next micro-batch, by the subtask they ran in; None where another has it."""


def slowest(marks: Iterable[Mark]) -> Mark:
    """The combined mark of parallel instances: the smallest watermark of those that are not idle."""
    all_marks = list(marks)
    memories = {subtask: data for mark in all_marks for subtask, data in mark.kept.items()}
    active = [mark for mark in all_marks if not mark.idle]
    if active:
        return Mark(min((m.watermark for m in active if m.watermark is not None), default=None), kept=memories)
    return Mark(max((m.watermark for m in all_marks if m.watermark is not None), default=None), True, memories)


Kept = Mapping[int, bytes]
"""The memories of an assigner's generators, by the subtask they ran in."""


@dataclass(frozen=True)
class Memory:
    """A generator's memory between micro-batches: the names of its attributes, and the memories before."""

    names: tuple[str, ...] = ()
    before: Kept = field(default_factory=dict)
    subtask: int = 0

    def source(self) -> int | None:
        """The subtask whose memory this generator starts from: its own, or the only one that there was."""
        if self.subtask in self.before:
            return self.subtask
        return next(iter(self.before)) if len(self.before) == 1 else None


def encoded_attributes(generator: WatermarkGenerator[Any], names: Sequence[str], where: str) -> bytes:
    """Encode attributes of a generator; raise `RecordTypeError` for a value that no other process can read."""
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
    """Set the encoded attributes of a generator."""
    for name, value in msgspec.msgpack.decode(data):
        setattr(generator, name, _untagged(value))


_PLAIN = (type(None), bool, int, float, str, bytes)
_MOMENTS: dict[str, type[datetime] | type[date]] = {"datetime": datetime, "date": date}
_MANY: dict[str, Callable[[Any], Any]] = {
    "list": list, "tuple": tuple, "set": set, "frozenset": frozenset, "deque": deque
}  # fmt: skip


def _tagged(value: Any) -> Any:
    """A plain value as it is; any other as its type's name and its content."""
    kind = type(value)
    if kind in _PLAIN:
        return value
    if kind.__name__ in _MOMENTS and kind in _MOMENTS.values():
        return [kind.__name__, value.isoformat()]
    if kind is dict:
        return ["dict", [[_tagged(key), _tagged(item)] for key, item in value.items()]]
    if kind.__name__ in _MANY and kind in _MANY.values():
        return [kind.__name__, [_tagged(item) for item in value]]
    raise TypeError(f"{shorten(value)} ({kind.__name__})")


def _untagged(value: Any) -> Any:
    if not isinstance(value, list):
        return value
    kind, content = value
    if kind in _MOMENTS:
        return _MOMENTS[kind].fromisoformat(content)
    if kind == "dict":
        return {_untagged(key): _untagged(item) for key, item in content}
    return _MANY[kind](_untagged(item) for item in content)


class Generated(WatermarkOutput):
    """The generator of one task, new for each micro-batch, and what it emitted.

    Its memory over records continues from the last micro-batch, and to the next.
    """

    def __init__(self, where: str, supplier: Supplier, memory: Memory | None = None) -> None:
        self._where, self._supplier, self._memory = where, supplier, memory or Memory()
        self._generator: WatermarkGenerator[Any] | None = None
        self._said: Mark | None = None

    def on_event(self, event: Any, event_timestamp: int) -> None:
        """Pass a record to the generator."""
        if self._generator is None:
            self._generator = self._supplied()
        self._generator.on_event(event, event_timestamp, self)

    def end_of_batch(self) -> Mark | None:
        """The mark of a micro-batch; a generator that saw a record is asked for its periodic watermark."""
        return self.periodic() if self._generator is not None else None

    def periodic(self) -> Mark | None:
        """The mark so far, including the period that ends now; the next generator is a new one."""
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
        memories: dict[int, bytes | None] = {} if source is None else {source: None}
        memories[self._memory.subtask] = data
        self._memory = replace(self._memory, before={self._memory.subtask: data})
        return msgspec.structs.replace(said or Mark(), kept=memories)

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
