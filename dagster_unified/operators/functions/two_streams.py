"""Functions of two streams in one operator, as an author writes them: connected, joined, grouped or broadcast."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator
from typing import Any, Generic, Optional, TypeAlias

from dagster_unified.operators.functions.base import (
    Function,
    KeyedProcessFunction,
    OutputTag,
    ProcessFunction,
    SideOutput,
    TimerService,
)
from dagster_unified.operators.functions.type_variables import In1, In2, K, Key, KeyOut, Out, R, V
from dagster_unified.operators.state.backend import Declared
from dagster_unified.operators.state.descriptors import StateDescriptor
from dagster_unified.operators.state.handles import MapStateDescriptor
from dagster_unified.operators.time import TimeDomain


class CoMapFunction(Function, ABC, Generic[In1, In2, Out]):
    """One record in, of either stream, one record out; there is an example at `DataStream.connect`."""

    @abstractmethod
    def map1(self, value: In1) -> Out:
        """The result of a record of the first stream."""

    @abstractmethod
    def map2(self, value: In2) -> Out:
        """The result of a record of the second stream."""


class CoFlatMapFunction(Function, ABC, Generic[In1, In2, Out]):
    """One record in, of either stream, any number out; there is an example at `ConnectedStreams.flat_map`."""

    @abstractmethod
    def flat_map1(self, value: In1) -> Iterable[Out]:
        """The results of a record of the first stream."""

    @abstractmethod
    def flat_map2(self, value: In2) -> Iterable[Out]:
        """The results of a record of the second stream."""


class CoProcessFunction(Function, ABC, Generic[In1, In2, Out]):
    """A process function over two streams (Flink: *Process Function*, "Low-level Joins").

    Where both are keyed, it has state and timers of the key that both share. Where one of them is keyed, there is state
    for its records, and there are no timers. In BATCH the order of the two streams is as at `ConnectedStreams`; in
    STREAMING records come as they arrive.

    Examples:
        >>> class Amounts(CoProcessFunction[Sale, int, int]):
        ...     def process_element1(self, value: Sale, ctx: CoProcessFunction.Context) -> list[int]:
        ...         return [value.amount]
        ...     def process_element2(self, value: int, ctx: CoProcessFunction.Context) -> list[int]:
        ...         return [10 * value]
        >>> sorted(collect(sales.connect(numbers).process(Amounts())))
        [3, 4, 5, 10, 20, 30]
    """

    Context: TypeAlias = ProcessFunction.Context

    @abstractmethod
    def process_element1(self, value: In1, ctx: ProcessFunction.Context) -> Iterable[Out | SideOutput] | None:
        """The results of a record of the first stream."""

    @abstractmethod
    def process_element2(self, value: In2, ctx: ProcessFunction.Context) -> Iterable[Out | SideOutput] | None:
        """The results of a record of the second stream."""

    def on_timer(
        self, timestamp: int, ctx: KeyedProcessFunction.OnTimerContext[Any]
    ) -> Iterable[Out | SideOutput] | None:
        """The results of a timer; only where both streams are keyed."""
        return None


class KeyedCoProcessFunction(Function, ABC, Generic[Key, In1, In2, Out]):
    """A process function over two keyed streams, with state and timers of the key that both share.

    In BATCH all records of a key from both come before the next key, sorted by event time; in STREAMING they come as
    they arrive. There is an example at `KeyedConnectedStreams.process`.
    """

    class Context(KeyedProcessFunction.Context[KeyOut]):
        """The context that `process_element1` and `process_element2` get with a record."""

    class OnTimerContext(Context[KeyOut], KeyedProcessFunction.OnTimerContext[KeyOut]):
        """The context that `on_timer` gets with a timestamp."""

    requires_time_sorted_input: bool = False

    @abstractmethod
    def process_element1(self, value: In1, ctx: Context[Key]) -> Iterable[Out | SideOutput] | None:
        """The results of a record of the first stream."""

    @abstractmethod
    def process_element2(self, value: In2, ctx: Context[Key]) -> Iterable[Out | SideOutput] | None:
        """The results of a record of the second stream."""

    def on_timer(self, timestamp: int, ctx: OnTimerContext[Key]) -> Iterable[Out | SideOutput] | None:
        """The results of a timer."""
        return ()


class JoinFunction(Function, ABC, Generic[In1, In2, Out]):
    """Returns one record for each pair of one key and window (Flink: *Joining*).

    In BATCH it is called when a key is over, in STREAMING when the window fires.

    Examples:
        >>> class Pair(JoinFunction[Sale, Sale, str]):
        ...     def join(self, first: Sale, second: Sale) -> str:
        ...         return f"{first.shop}: {first.amount} and {second.amount}"
        >>> days = TumblingEventTimeWindows.of(timedelta(days=1))
        >>> pairs = timed.join(timed.where("amount > 4")).where("shop").equal_to("shop").window(days)
        >>> sorted(collect(pairs.apply(Pair())))
        ['north: 3 and 5', 'north: 5 and 5']
    """

    @abstractmethod
    def join(self, first: In1, second: In2) -> Out:
        """The pair as one record."""


class FlatJoinFunction(Function, ABC, Generic[In1, In2, Out]):
    """Returns any number of records for each pair of one key and window (Flink: *Joining*).

    In BATCH it is called when a key is over, in STREAMING when the window fires.

    Examples:
        >>> class Larger(FlatJoinFunction[Sale, Sale, int]):
        ...     def join(self, first: Sale, second: Sale) -> list[int]:
        ...         return [second.amount] if second.amount > first.amount else []
        >>> days = TumblingEventTimeWindows.of(timedelta(days=1))
        >>> pairs = timed.join(timed).where("shop").equal_to("shop").window(days)
        >>> collect(pairs.apply(Larger()))
        [5]
    """

    @abstractmethod
    def join(self, first: In1, second: In2) -> Iterable[Out] | None:
        """The results of the pair."""


class CoGroupFunction(Function, ABC, Generic[In1, In2, Out]):
    """Returns any number of records for all records of one key and window; one of the two lists may be empty.

    In BATCH it is called when a key is over, in STREAMING when the window fires.

    Examples:
        >>> class Unmatched(CoGroupFunction[Sale, Sale, str]):
        ...     def co_group(self, first: list[Sale], second: list[Sale]) -> list[str]:
        ...         return [sale.shop for sale in first] if not second else []
        >>> days = TumblingEventTimeWindows.of(timedelta(days=1))
        >>> groups = timed.co_group(timed.where("amount > 4")).where("shop").equal_to("shop").window(days)
        >>> collect(groups.apply(Unmatched()))
        ['south']
    """

    @abstractmethod
    def co_group(self, first: list[In1], second: list[In2]) -> Iterable[Out] | None:
        """The results of the two groups."""


class ProcessJoinFunction(Function, ABC, Generic[In1, In2, Out]):
    """Returns any number of records for each pair of an interval join (Flink: *Joining*, "Interval Join").

    Records are paired in the order of event time, in both modes. There is an example at `KeyedStream.interval_join`.
    """

    class Context(ABC):
        """The context that `process_element` gets with a pair."""

        @abstractmethod
        def get_left_timestamp(self) -> int:
            """The left record's event time."""

        @abstractmethod
        def get_right_timestamp(self) -> int:
            """The right record's event time."""

        @abstractmethod
        def get_timestamp(self) -> int:
            """The later of the two; the results carry it."""

        @abstractmethod
        def output(self, tag: OutputTag[R], value: R) -> None:
            """Emit to a side output."""

    @abstractmethod
    def process_element(self, left: In1, right: In2, ctx: Context) -> Iterable[Out | SideOutput] | None:
        """The results of the pair."""


ABSENT: Any = object()
"""Stands for the value of a key without one."""

Change = tuple[str, dict[Any, Any], bool]
"""A broadcast map before a broadcast record changed it: its name, entries, and whether they were all."""


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

    def __init__(self, entries: dict[K, V], descriptor: MapStateDescriptor[K, V], changes: list[Change]) -> None:
        super().__init__(entries, declared_key(descriptor))
        self._name, self._changes = descriptor.name, changes
        self._value = Declared("broadcast state", descriptor.name, Optional[descriptor.value_type])  # noqa: UP045

    def put(self, key: K, value: V) -> None:
        """Set the value of `key`."""
        key = self._key.normal(key)
        self._key.check_equals_itself(key)
        value = self._value.normal(value)
        self._changes.append((self._name, {key: self._entries.get(key, ABSENT)}, False))
        self._entries[key] = value

    def put_all(self, values: dict[K, V]) -> None:
        """Set the values of several keys."""
        for key, value in values.items():
            self.put(key, value)

    def remove(self, key: K) -> None:
        """Forget `key`; does nothing where it is absent."""
        key = self._key.sought(key)
        if key in self._entries:
            self._changes.append((self._name, dict(self._entries), True))
            del self._entries[key]

    def clear(self) -> None:
        """Forget all entries."""
        self._changes.append((self._name, dict(self._entries), True))
        self._entries.clear()


def declared_key(descriptor: MapStateDescriptor[Any, Any]) -> Declared:
    """The declared type of a broadcast map's keys."""
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
        """Emit to a side output."""


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
        """The results of a record of the stream; `(tag, record)` goes to a side output."""

    @abstractmethod
    def process_broadcast_element(self, value: In2, ctx: Context) -> Iterable[Out | SideOutput] | None:
        """Take a broadcast record into the state.

        It runs once in every instance, and must do the same in each; its results are emitted once.
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
            """The clock of the timer."""

    class Context(BroadcastProcessFunction.Context):
        """The context that `process_broadcast_element` gets with a record."""

        @abstractmethod
        def apply_to_keyed_state(
            self, descriptor: StateDescriptor[R], function: Callable[[Any, R], Iterable[Any] | None]
        ) -> None:
            """Call `function(key, state)` for every key that has this state.

            The function may change the state, and its results are emitted. In BATCH there is no key yet when broadcast
            records come, so that it is not called.
            """

    requires_time_sorted_input: bool = False

    @abstractmethod
    def process_element(self, value: In1, ctx: ReadOnlyContext[Key]) -> Iterable[Out | SideOutput] | None:
        """The results of a record of the stream; `(tag, record)` goes to a side output."""

    @abstractmethod
    def process_broadcast_element(self, value: In2, ctx: Context) -> Iterable[Out | SideOutput] | None:
        """Take a broadcast record into the state.

        It runs in every instance, each of which has some of the keys, and must do the same to the broadcast state in
        each. Results that do not depend on keys are emitted once; further results, where it has seen the state of keys
        by `ctx.apply_to_keyed_state`, are emitted by each instance. To tell them apart, it is called once more there,
        with no keys; so results that depend on chance or the clock are an error there.
        """

    def on_timer(self, timestamp: int, ctx: OnTimerContext[Key]) -> Iterable[Out | SideOutput] | None:
        """The results of a timer."""
        return None
