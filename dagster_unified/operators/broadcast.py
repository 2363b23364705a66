"""Broadcast state: a small stream of rules that every parallel instance of an operator knows.

Every record of the small stream reaches every instance of an operator on a large one. Each instance holds its copy of
the maps that the rules fill, and the records of the large stream are processed with them at hand (Flink: *The Broadcast
State Pattern*). A driver gives an instance its broadcast records, and says which instance leads. What all instances
emit alike for a broadcast record is what one without keys emits: it is the leader's only, so that it does not depend on
how many instances there are. What an instance with keys emits besides is about its keys, and is kept everywhere.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from copy import deepcopy
from dataclasses import dataclass
from typing import Any, Generic, Optional

import pyarrow as pa

from dagster_unified.errors import PipelineError, UnsupportedError
from dagster_unified.operators.failures import RAISED, user_failure
from dagster_unified.operators.functions.base import Function, OutputTag, RuntimeContext, SideOutput, TimerService
from dagster_unified.operators.functions.keyed import NoKey
from dagster_unified.operators.functions.type_variables import In1, In2, K, Key, KeyOut, Out, R, V
from dagster_unified.operators.keyed import KeyedProcessOperator
from dagster_unified.operators.layout import StreamLayout
from dagster_unified.operators.metrics import Metrics
from dagster_unified.operators.operator import OperatorContext
from dagster_unified.operators.program.blocks import Collector
from dagster_unified.operators.program.epochs import Emitting
from dagster_unified.operators.state.backend import Declared, KeyedStateBackend
from dagster_unified.operators.state.descriptors import StateDescriptor
from dagster_unified.operators.state.map import MapStateDescriptor
from dagster_unified.operators.time import TimeDomain
from dagster_unified.records import shorten

_ABSENT: Any = object()

_Change = tuple[str, dict[Any, Any], bool]
"""What a broadcast map held before a broadcast record changed it: its name, entries, and whether they were all."""


class ReadOnlyBroadcastState(Generic[K, V]):
    """A broadcast map, as the records of the large stream see it.

    There is an example at `KeyedBroadcastProcessFunction`.
    """

    def __init__(self, entries: dict[K, V], key: Declared) -> None:
        self._entries, self._key = entries, key

    def get(self, key: K) -> V | None:
        """The value of `key`, or None."""
        return self._entries.get(self._key.sought(key))

    def contains(self, key: K) -> bool:
        """Whether `key` has a value."""
        return self._key.sought(key) in self._entries

    def items(self) -> list[tuple[K, V]]:
        """The entries, in the order in which their keys were first put."""
        return list(self._entries.items())

    def keys(self) -> list[K]:
        """The keys."""
        return list(self._entries)

    def values(self) -> list[V]:
        """The values."""
        return list(self._entries.values())

    def is_empty(self) -> bool:
        """Whether there is no entry."""
        return not self._entries

    def __contains__(self, key: K) -> bool:
        return self.contains(key)

    def __iter__(self) -> Iterator[K]:
        return iter(self.keys())


class BroadcastState(ReadOnlyBroadcastState[K, V]):
    """A broadcast map, as the broadcast records fill it.

    There is an example at `KeyedBroadcastProcessFunction`.
    """

    def __init__(self, entries: dict[K, V], descriptor: MapStateDescriptor[K, V], changes: list[_Change]) -> None:
        super().__init__(entries, _declared_key(descriptor))
        self._name, self._changes = descriptor.name, changes
        self._value = Declared("broadcast state", descriptor.name, Optional[descriptor.value_type])  # noqa: UP045

    def put(self, key: K, value: V) -> None:
        """Sets the value of `key`."""
        key = self._key.normal(key)
        self._key.check_equals_itself(key)
        value = self._value.normal(value)
        self._changes.append((self._name, {key: self._entries.get(key, _ABSENT)}, False))
        self._entries[key] = value

    def put_all(self, values: dict[K, V]) -> None:
        """Sets the values of several keys."""
        for key, value in values.items():
            self.put(key, value)

    def remove(self, key: K) -> None:
        """Forgets `key`; nothing happens where it is not there."""
        key = self._key.sought(key)
        if key in self._entries:
            self._changes.append((self._name, dict(self._entries), True))
            del self._entries[key]

    def clear(self) -> None:
        """Forgets all entries."""
        self._changes.append((self._name, dict(self._entries), True))
        self._entries.clear()


def _declared_key(descriptor: MapStateDescriptor[Any, Any]) -> Declared:
    return Declared("a key in broadcast state", descriptor.name, descriptor.key_type)


class _BaseContext(ABC):
    @abstractmethod
    def timestamp(self) -> int | None:
        """The record's event time, or None where the stream has none."""

    @abstractmethod
    def current_processing_time(self) -> int:
        """The clock, in milliseconds since the epoch."""

    @abstractmethod
    def current_watermark(self) -> int:
        """The event-time watermark: the smaller one of both streams'."""

    @abstractmethod
    def output(self, tag: OutputTag[R], value: R) -> None:
        """Emits to a side output."""


class BroadcastProcessFunction(Function, ABC, Generic[In1, In2, Out]):
    """A process function on a stream that is not keyed, with broadcast state (Flink: *The Broadcast State Pattern*).

    In BATCH every broadcast record comes before the first of the stream's; in STREAMING both come as they arrive, the
    broadcast records of a micro-batch first. In BATCH the stream stays partitioned as it is; in STREAMING its records
    are spread over the key groups, each of which holds a copy of the state. There is an example at
    `BroadcastConnectedStream.process`.
    """

    class ReadOnlyContext(_BaseContext):
        """The context that `process_element` gets with a record."""

        @abstractmethod
        def get_broadcast_state(self, descriptor: MapStateDescriptor[K, V]) -> ReadOnlyBroadcastState[K, V]:
            """The broadcast map that `descriptor` names, to be read."""

    class Context(_BaseContext):
        """The context that `process_broadcast_element` gets with a record."""

        @abstractmethod
        def get_broadcast_state(self, descriptor: MapStateDescriptor[K, V]) -> BroadcastState[K, V]:
            """The broadcast map that `descriptor` names, to be read and written."""

    @abstractmethod
    def process_element(self, value: In1, ctx: ReadOnlyContext) -> Iterable[Out | SideOutput] | None:
        """The records that a record of the stream leads to; `(tag, record)` goes to a side output."""

    @abstractmethod
    def process_broadcast_element(self, value: In2, ctx: Context) -> Iterable[Out | SideOutput] | None:
        """Takes a broadcast record into the state.

        It runs once in every instance, and has to do the same in each; what it emits is emitted once.
        """


class KeyedBroadcastProcessFunction(Function, ABC, Generic[Key, In1, In2, Out]):
    """A process function on a keyed stream, with broadcast state as well (Flink: *The Broadcast State Pattern*).

    It has keyed state, timers, and broadcast state that only broadcast records change. In BATCH every broadcast record
    comes before the first of the stream's, and a key's records together; in STREAMING both come as they arrive, the
    broadcast records of a micro-batch first.

    Examples:
        >>> LIMITS = MapStateDescriptor("limits", str, int)
        >>> class Reached(KeyedBroadcastProcessFunction[str, Sale, int, str]):
        ...     def open(self, runtime_context: RuntimeContext) -> None:
        ...         self.total = runtime_context.get_state(ValueStateDescriptor("total", int))
        ...     def process_element(self, value, ctx) -> list[str]:
        ...         self.total.update((self.total.value() or 0) + value.amount)
        ...         limit = ctx.get_broadcast_state(LIMITS).get("limit")
        ...         return [ctx.get_current_key()] if limit is not None and self.total.value() > limit else []
        ...     def process_broadcast_element(self, value, ctx) -> None:
        ...         ctx.get_broadcast_state(LIMITS).put("limit", value)
        >>> limit = numbers.map(lambda n: 5, int)
        >>> collect(sales.key_by("shop").connect(limit.broadcast(LIMITS)).process(Reached()))
        ['north']
    """

    class ReadOnlyContext(BroadcastProcessFunction.ReadOnlyContext, Generic[KeyOut]):
        """The context that `process_element` gets with a record."""

        @abstractmethod
        def timer_service(self) -> TimerService:
            """Time and timers of the current key."""

        @abstractmethod
        def get_current_key(self) -> KeyOut:
            """The key of the record or timer."""

    class OnTimerContext(ReadOnlyContext[KeyOut]):
        """The context that `on_timer` gets with a timestamp."""

        @abstractmethod
        def time_domain(self) -> TimeDomain:
            """Which clock the timer listened to."""

    class Context(BroadcastProcessFunction.Context):
        """The context that `process_broadcast_element` gets with a record."""

        @abstractmethod
        def apply_to_keyed_state(
            self, descriptor: StateDescriptor[R], function: Callable[[Any, R], Iterable[Any] | None]
        ) -> None:
            """Calls `function(key, state)` for every key that has this state.

            The function may change the state, and what it returns is emitted. In BATCH there is no key yet when
            broadcast records come, so that it is called for none.
            """

    requires_time_sorted_input: bool = False

    @abstractmethod
    def process_element(self, value: In1, ctx: ReadOnlyContext[Key]) -> Iterable[Out | SideOutput] | None:
        """The records that a record of the stream leads to; `(tag, record)` goes to a side output."""

    @abstractmethod
    def process_broadcast_element(self, value: In2, ctx: Context) -> Iterable[Out | SideOutput] | None:
        """Takes a broadcast record into the state.

        It runs in every instance, each of which has some of the keys, and has to do the same to the broadcast state in
        each. What it emits where there is no key is emitted once, and what it emits besides where it has seen the state
        of keys, by `ctx.apply_to_keyed_state`, is emitted of each instance: to know the former, it is called once more
        there, with no keys. So what depends on chance or the clock is an error there.
        """

    def on_timer(self, timestamp: int, ctx: OnTimerContext[Key]) -> Iterable[Out | SideOutput] | None:
        """The records that a timer leads to."""
        return None


@dataclass(frozen=True)
class Broadcasting:
    """A function with broadcast state, and the maps that it has."""

    function: (
        BroadcastProcessFunction[Any, Any, Any]
        | KeyedBroadcastProcessFunction[Any, Any, Any, Any]
        | Callable[[pa.RecordBatch, pa.Table], pa.RecordBatch]
    )
    descriptors: tuple[MapStateDescriptor[Any, Any], ...]

    @property
    def keyed(self) -> bool:
        """Whether its stream is keyed."""
        return isinstance(self.function, KeyedBroadcastProcessFunction)

    @property
    def wrapped_functions(self) -> tuple[Any, ...]:
        """The author's."""
        return (self.function,)

    @property
    def requires_time_sorted_input(self) -> bool:
        """As the function says."""
        return bool(getattr(self.function, "requires_time_sorted_input", False))


class BroadcastOperator(KeyedProcessOperator, KeyedBroadcastProcessFunction.OnTimerContext[Any]):
    """Runs a function with broadcast state; is itself the context that the stream's records are processed with.

    Without a keyed stream it is driven as with one key, and has neither keyed state nor timers.
    """

    def __init__(self, spec: Broadcasting, context: OperatorContext) -> None:
        function: Any = spec.function  # on_timer is called for timers only, of which a stream without a key has none
        super().__init__(function, context)
        self.broadcast: dict[str, dict[Any, Any]] = {}
        """The broadcast maps by name, of the instance that is current."""

        self.keys: Callable[[], Iterable[Hashable]] = tuple
        """The keys that there are, where a driver holds several at once."""

        self.descriptors = {d.name: d for d in spec.descriptors}
        self._declared_keys = {name: _declared_key(descriptor) for name, descriptor in self.descriptors.items()}
        self._keyed = spec.keyed

    @property
    def subtask_key(self) -> Hashable | None:
        return None if self._keyed else 0

    def open(self, context: Callable[[KeyedStateBackend | None], RuntimeContext]) -> None:
        self.function.open(context(self.state if self._keyed else None))

    def read_broadcast(self, batch: pa.RecordBatch, layout: StreamLayout) -> Sequence[Any]:
        """The broadcast records, from their columns."""
        return layout.records.from_batch(batch.select(list(layout.records.names)))

    def process_broadcast(self, records: Sequence[Any], timestamps: Sequence[int | None], leads: bool) -> None:
        """Broadcast records, in order. What all instances emit alike is kept where this one leads."""
        function: Any = self.function
        before = self._metrics.take()
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
                    self._emit_own(record, context, leads)
                applied.add(context.applied)
        except RAISED as error:
            raise user_failure(error, self.where, function.process_broadcast_element, record) from error
        if not leads:  # what was measured with the state of this instance's own keys stays
            self._metrics.clear()
            self._metrics.add(applied)
        self._metrics.add(before)

    def _emit_own(self, record: Any, context: _BroadcastContext, leads: bool) -> None:
        """Emit what an instance with keys emitted for a record; where it does not lead, without what all emit."""
        alike = self._without_keys(record, context)
        own, missing = _besides(context.out, alike)
        if missing and _differ(alike, self._without_keys(record, context)):
            raise UnsupportedError(
                f"{self.where}: what process_broadcast_element emits for {shorten(record)} differs from call to call,"
                " so that it cannot be told what it emits about its own keys and what once for all; emit what is about"
                " a key from the function that is given to ctx.apply_to_keyed_state, and take no chance or clock but"
                " ctx.current_processing_time()"
            )
        if not leads:
            self.out.take(own)
        elif missing:
            self.out.take(alike)
            self.out.take(own)
        else:
            self.out.take(context.out)

    def _without_keys(self, record: Any, given: _BroadcastContext) -> Collector:
        """What an instance without keys emits for a record, which changes nothing here."""
        function: Any = self.function
        after, keys, measured = self.broadcast, self.keys, self._metrics.take()
        self.broadcast, self.keys = given.broadcast_before(), tuple
        context = _BroadcastContext(self, given.current, given.current_processing_time())
        try:
            context.out.emit_all(function.process_broadcast_element(record, context), given.current)
        finally:
            self.broadcast, self.keys = after, keys
            self._metrics.clear()
            self._metrics.add(measured)
        return context.out

    def measured(self) -> Metrics:
        """What has been measured, which is then forgotten."""
        return self._metrics.take()

    def measure(self, more: Metrics) -> None:
        """Adds what has been measured."""
        self._metrics.add(more)

    def _told(self) -> Emitting:
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
        self.out = operator.collector()
        self.has_met_keys = False
        """Whether the record was shown the state of a key of this instance's."""

        self.applied = Metrics()
        """What was measured with the state of keys: they are this instance's own, so it always counts."""

        self._changes: list[_Change] = []
        self._applying = False

    def broadcast_before(self) -> dict[str, dict[Any, Any]]:
        """The broadcast maps as they were before the record, as copies."""
        maps = {name: dict(entries) for name, entries in self._operator.broadcast.items()}
        for name, entries, are_all in reversed(self._changes):
            if are_all:
                maps[name] = dict(entries)
                continue
            for key, value in entries.items():
                if value is _ABSENT:
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
        before = operator.measured()
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
        applied = operator.measured()
        self.applied.add(applied)
        operator.measure(before)
        operator.measure(applied)


def _besides(emitted: Collector, alike: Collector) -> tuple[Collector, bool]:
    """What was emitted besides what all emit alike, and whether something of that is missing."""
    own = Collector()
    own.records, own.timestamps, is_missing = _left(emitted.records, emitted.timestamps, alike.records)
    for tag in {**emitted.side, **alike.side}:
        records, timestamps = emitted.side.get(tag, ([], []))
        left, times, lacks = _left(records, timestamps, alike.side.get(tag, ([], []))[0])
        own.side[tag] = left, times
        is_missing |= lacks
    return own, is_missing


def _left(
    records: Sequence[Any], timestamps: Sequence[int | None], alike: Sequence[Any]
) -> tuple[list[Any], list[int | None], bool]:
    """The records without those that all emit, their event times, and whether one of the latter is not among them."""
    waiting = list(alike)
    left: list[Any] = []
    times: list[int | None] = []
    for record, timestamp in zip(records, timestamps, strict=True):
        place = next((n for n, other in enumerate(waiting) if _is_same(record, other)), None)
        if place is None:
            left.append(record)
            times.append(timestamp)
        else:
            del waiting[place]
    return left, times, bool(waiting)


def _is_same(one: Any, other: Any) -> bool:
    return bool(one == other) or repr(one) == repr(other)  # NaN is not equal to itself


def _differ(one: Collector, other: Collector) -> bool:
    return _besides(one, other)[1] or _besides(other, one)[1]


_NO_KEY = NoKey(
    "a broadcast record has no key, and so no keyed state; use ctx.apply_to_keyed_state(descriptor, function) to see"
    " that of every key"
)


def checked(
    descriptors: Sequence[MapStateDescriptor[Any, Any]], where: str
) -> tuple[MapStateDescriptor[Any, Any], ...]:
    """Descriptors of broadcast state; raises `PipelineError` for what cannot be one."""
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
