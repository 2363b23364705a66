"""Runs an author's watermark generator over the records of one task, and reports what it emitted.

Knows no driver: a driver takes the marks of all tasks of a micro-batch and decides what the watermark is.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from datetime import datetime
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


def slowest(marks: Iterable[Mark]) -> Mark:
    """What parallel instances say together: the smallest watermark of those that are not idle."""
    found = list(marks)
    active = [mark for mark in found if not mark.idle]
    if active:
        return Mark(min((m.watermark for m in active if m.watermark is not None), default=None))
    return Mark(max((m.watermark for m in found if m.watermark is not None), default=None), idle=True)


class Generated(WatermarkOutput):
    """The generator of one task, new for each micro-batch, and what it emitted."""

    def __init__(self, where: str, supplier: Supplier) -> None:
        self._where, self._supplier = where, supplier
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
        return said

    def _supplied(self) -> WatermarkGenerator[Any]:
        generator = self._supplier()
        if not isinstance(generator, WatermarkGenerator):
            raise RecordTypeError(
                f"{self._where}: the function given to for_generator must give a WatermarkGenerator, and gave"
                f" {_article(generator)}"
            )
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
