"""Broadcast state: a small stream of rules that every parallel instance of an operator knows.

Every record of the small stream reaches every instance of an operator on a large one. Each instance holds its copy of
the maps that the rules fill, and processes the records of the large stream with them (Flink: *The Broadcast State
Pattern*). A driver passes broadcast records to an instance, and says which instance leads. What all instances emit
alike for a broadcast record is what an instance without keys emits: only the leader emits it, so that it does not
depend on how many instances there are. What an instance with keys emits besides is about its keys, and is always
emitted.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Sequence
from copy import deepcopy
from dataclasses import dataclass
from typing import Any

import pyarrow as pa

from dagster_unified.errors import PipelineError, UnsupportedError
from dagster_unified.operators.failures import RAISED, user_failure
from dagster_unified.operators.functions.base import OutputTag, RuntimeContext, TimerService
from dagster_unified.operators.functions.two_streams import (
    ABSENT,
    BroadcastProcessFunction,
    BroadcastState,
    Change,
    KeyedBroadcastProcessFunction,
    ReadOnlyBroadcastState,
    declared_key,
)
from dagster_unified.operators.functions.type_variables import R
from dagster_unified.operators.keyed import KeyedProcessOperator, NoKey
from dagster_unified.operators.layout import StreamLayout
from dagster_unified.operators.metrics import Metrics
from dagster_unified.operators.operator import OperatorContext
from dagster_unified.operators.program.blocks import Collector, Emitting
from dagster_unified.operators.state.backend import KeyedStateBackend
from dagster_unified.operators.state.descriptors import StateDescriptor
from dagster_unified.operators.state.handles import MapStateDescriptor
from dagster_unified.records import shorten


@dataclass(frozen=True)
class Broadcasting:
    """A function with broadcast state, and its maps."""

    function: (
        BroadcastProcessFunction[Any, Any, Any]
        | KeyedBroadcastProcessFunction[Any, Any, Any, Any]
        | Callable[[pa.RecordBatch, pa.Table], pa.RecordBatch]
    )
    descriptors: tuple[MapStateDescriptor[Any, Any], ...]

    @property
    def keyed(self) -> bool:
        return isinstance(self.function, KeyedBroadcastProcessFunction)

    @property
    def wrapped_functions(self) -> tuple[Any, ...]:
        return (self.function,)

    @property
    def requires_time_sorted_input(self) -> bool:
        return bool(getattr(self.function, "requires_time_sorted_input", False))


class BroadcastOperator(KeyedProcessOperator, KeyedBroadcastProcessFunction.OnTimerContext[Any]):
    """Runs a function with broadcast state; is itself the context that processes the stream's records.

    Without a keyed stream it is driven as with one key, and has neither keyed state nor timers.
    """

    def __init__(self, spec: Broadcasting, context: OperatorContext) -> None:
        function: Any = spec.function  # on_timer is never called without a key
        super().__init__(function, context)
        self.broadcast: dict[str, dict[Any, Any]] = {}
        """The current instance's broadcast maps, by name."""

        self.keys: Callable[[], Iterable[Hashable]] = tuple
        """Returns the keys, where a driver holds several at once."""

        self.descriptors = {d.name: d for d in spec.descriptors}
        self._declared_keys = {name: declared_key(descriptor) for name, descriptor in self.descriptors.items()}
        self._keyed = spec.keyed

    @property
    def subtask_key(self) -> Hashable | None:
        return None if self._keyed else 0

    def open(self, context: Callable[[KeyedStateBackend | None], RuntimeContext]) -> None:
        self.function.open(context(self.state if self._keyed else None))

    def read_broadcast(self, batch: pa.RecordBatch, layout: StreamLayout) -> Sequence[Any]:
        return layout.records.from_batch(batch.select(list(layout.records.names)))

    def process_broadcast(self, records: Sequence[Any], timestamps: Sequence[int | None], leads: bool) -> None:
        """Process broadcast records, in order. Only the leading instance emits what all emit alike."""
        function: Any = self.function
        before = self.metrics.take()
        applied = Metrics()
        self.state.current = _NO_KEY
        record = None
        try:
            for record, timestamp in zip(records, timestamps, strict=True):
                context = _BroadcastContext(self, timestamp)
                context.out.emit_all(function.process_broadcast_element(record, context), timestamp)
                if not context.has_met_keys:
                    if leads:
                        self.out.take(context.out)
                elif leads or context.out.records or context.out.side:
                    self._emit_with_keys(record, context, leads)
                applied.add(context.applied)
        except RAISED as error:
            raise user_failure(error, self.where, function.process_broadcast_element, record) from error
        if not leads:  # what was measured with the state of this instance's own keys stays
            self.metrics.clear()
            self.metrics.add(applied)
        self.metrics.add(before)

    def _emit_with_keys(self, record: Any, context: _BroadcastContext, leads: bool) -> None:
        """Emit what an instance with keys emitted for a record; unless it leads, without what all emit."""
        alike = self._without_keys(record, context)
        own_only, missing = _beyond_common(context.out, alike)
        if missing and _differ(alike, self._without_keys(record, context)):
            raise UnsupportedError(
                f"{self.where}: what process_broadcast_element emits for {shorten(record)} differs from call to call,"
                " so that it cannot be told what it emits about its own keys and what once for all; emit what is about"
                " a key from the function that is given to ctx.apply_to_keyed_state, and take no chance or clock but"
                " ctx.current_processing_time()"
            )
        if not leads:
            self.out.take(own_only)
        elif missing:
            self.out.take(alike)
            self.out.take(own_only)
        else:
            self.out.take(context.out)

    def _without_keys(self, record: Any, original: _BroadcastContext) -> Collector:
        """The emissions of an instance without keys for a record; nothing changes here."""
        function: Any = self.function
        after, keys, measured = self.broadcast, self.keys, self.metrics.take()
        self.broadcast, self.keys = original.broadcast_before(), tuple
        context = _BroadcastContext(self, original.current, original.current_processing_time())
        try:
            context.out.emit_all(function.process_broadcast_element(record, context), original.current)
        finally:
            self.broadcast, self.keys = after, keys
            self.metrics.clear()
            self.metrics.add(measured)
        return context.out

    def _emitter(self) -> Emitting:
        return Emitting(self.out, self.key) if self._keyed else Emitting(self.out)

    def entries(self, descriptor: MapStateDescriptor[Any, Any]) -> dict[Any, Any]:
        """The broadcast map that a descriptor names."""
        if descriptor.name not in self.descriptors:
            raise PipelineError(
                f"there is no broadcast state '{descriptor.name}'; the stream was broadcast with"
                f" {', '.join(self.descriptors)}, so give broadcast(...) this descriptor too"
            )
        declared = self.descriptors[descriptor.name]
        if declared.stored_type != descriptor.stored_type:
            raise PipelineError(
                f"broadcast state '{descriptor.name}' is declared as {declared.describe()} and as"
                f" {descriptor.describe()}; use the descriptor that the stream was broadcast with"
            )
        return self.broadcast.setdefault(descriptor.name, {})

    def get_broadcast_state(self, descriptor: MapStateDescriptor[Any, Any]) -> ReadOnlyBroadcastState[Any, Any]:
        return ReadOnlyBroadcastState(self.entries(descriptor), self._declared_keys[descriptor.name])

    def timer_service(self) -> TimerService:
        if not self._keyed:
            raise UnsupportedError(
                "timers need a keyed stream; call key_by before connect, and use a KeyedBroadcastProcessFunction"
            )
        return self

    def get_current_key(self) -> Any:
        if not self._keyed:
            raise UnsupportedError(
                "there is no key; call key_by before connect, and use a KeyedBroadcastProcessFunction"
            )
        return self.key


class _BroadcastContext(KeyedBroadcastProcessFunction.Context):
    """The context of one broadcast record."""

    def __init__(self, operator: BroadcastOperator, timestamp: int | None, now: int | None = None) -> None:
        self._operator = operator
        self.current = timestamp
        self._now = now
        self.out = Collector(operator.copies)
        self.has_met_keys = False
        """Whether the record has seen the state of one of this instance's keys."""

        self.applied = Metrics()
        """The metrics measured with the state of keys: these are this instance's own, so they always count."""

        self._changes: list[Change] = []
        self._applying = False

    def broadcast_before(self) -> dict[str, dict[Any, Any]]:
        """The broadcast maps as they were before the record, as copies."""
        maps = {name: dict(entries) for name, entries in self._operator.broadcast.items()}
        for name, entries, are_all in reversed(self._changes):
            if are_all:
                maps[name] = dict(entries)
                continue
            for key, value in entries.items():
                if value is ABSENT:
                    maps[name].pop(key, None)
                else:
                    maps[name][key] = value
        return deepcopy(maps)

    def timestamp(self) -> int | None:
        return self.current

    def current_processing_time(self) -> int:
        if self._now is None:
            self._now = self._operator.read_clock()
        return self._now

    def current_watermark(self) -> int:
        return self._operator.watermark

    def output(self, tag: OutputTag[Any], value: Any) -> None:
        (self._operator.out if self._applying else self.out).emit_side(tag, value, self.current)

    def get_broadcast_state(self, descriptor: MapStateDescriptor[Any, Any]) -> BroadcastState[Any, Any]:
        return BroadcastState(self._operator.entries(descriptor), descriptor, self._changes)

    def apply_to_keyed_state(
        self, descriptor: StateDescriptor[R], function: Callable[[Any, R], Iterable[Any] | None]
    ) -> None:
        operator = self._operator
        state = operator.state.bind(descriptor)
        before = operator.metrics.take()
        self._applying = True
        try:
            for key in list(operator.keys()):
                operator.select(key)
                if descriptor.name in operator.state.current:
                    self.has_met_keys = True
                    operator.out.emit_all(function(key, state), self.current)
        finally:
            self._applying = False
            operator.state.current = _NO_KEY
        applied = operator.metrics.take()
        self.applied.add(applied)
        operator.metrics.add(before)
        operator.metrics.add(applied)


def _beyond_common(emitted: Collector, alike: Collector) -> tuple[Collector, bool]:
    """The emissions beyond those that all instances share, and whether some of the shared ones are missing."""
    besides = Collector()
    besides.records, besides.timestamps, is_missing = _without(emitted.records, emitted.timestamps, alike.records)
    for tag in {**emitted.side, **alike.side}:
        records, timestamps = emitted.side.get(tag, ([], []))
        remaining, times, lacks = _without(records, timestamps, alike.side.get(tag, ([], []))[0])
        besides.side[tag] = remaining, times
        is_missing |= lacks
    return besides, is_missing


def _without(
    records: Sequence[Any], timestamps: Sequence[int | None], alike: Sequence[Any]
) -> tuple[list[Any], list[int | None], bool]:
    """The records without those that all emit, their event times, and whether one of the latter is missing."""
    waiting = list(alike)
    remaining: list[Any] = []
    times: list[int | None] = []
    for record, timestamp in zip(records, timestamps, strict=True):
        place = next((n for n, other in enumerate(waiting) if _is_same(record, other)), None)
        if place is None:
            remaining.append(record)
            times.append(timestamp)
        else:
            del waiting[place]
    return remaining, times, bool(waiting)


def _is_same(first: Any, second: Any) -> bool:
    return bool(first == second) or repr(first) == repr(second)  # NaN is not equal to itself


def _differ(first: Collector, second: Collector) -> bool:
    return _beyond_common(first, second)[1] or _beyond_common(second, first)[1]


_NO_KEY = NoKey(
    "a broadcast record has no key, and so no keyed state; use ctx.apply_to_keyed_state(descriptor, function) to see"
    " that of every key"
)


def checked(
    descriptors: Sequence[MapStateDescriptor[Any, Any]], where: str
) -> tuple[MapStateDescriptor[Any, Any], ...]:
    """Descriptors of broadcast state; raises `PipelineError` for one that cannot be broadcast state."""
    for descriptor in descriptors:
        if not isinstance(descriptor, MapStateDescriptor):
            raise PipelineError(
                f"{where}: broadcast state is a map, so give broadcast(...) a MapStateDescriptor, not {descriptor!r}"
            )
        if descriptor.ttl is not None:
            raise PipelineError(
                f"{where}: broadcast state '{descriptor.name}' cannot have a time to live; remove entries in"
                " process_broadcast_element"
            )
    names = [d.name for d in descriptors]
    twice = [n for n in names if names.count(n) > 1]
    if twice:
        raise PipelineError(
            f"{where}: there are two broadcast states named '{twice[0]}'; give one of them another name"
        )
    return tuple(descriptors)
