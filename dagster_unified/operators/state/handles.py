"""The handles of keyed state: value, list, map, reducing and aggregating state, as an author reads and writes them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import reduce
from typing import TYPE_CHECKING, Any, Generic, Optional, Protocol

from msgspec import inspect as mi

from dagster_unified.errors import PipelineError, UnsupportedError
from dagster_unified.operators.functions.type_variables import IN, OUT, A, In, K, Out, T, V
from dagster_unified.operators.keys import OF_ONE_FORM
from dagster_unified.operators.state.backend import Declared, StateBackend
from dagster_unified.operators.state.chunks import SpilledList, SpilledMap
from dagster_unified.operators.state.descriptors import (
    OneTypeDescriptor,
    StateDescriptor,
    StateTtlConfig,
    StateVisibility,
    UpdateType,
)
from dagster_unified.operators.time import to_span
from dagster_unified.records import equal_by_more

if TYPE_CHECKING:
    from typing_extensions import TypeForm

_NOTHING = object()
"""Stands for no value, since None may be one."""


class State:
    """A handle on one state of the current key. With a time to live, an entry is stored as `(value, last renewal)`."""

    def __init__(self, backend: StateBackend, descriptor: StateDescriptor[Any]) -> None:
        self.descriptor = descriptor
        self._backend = backend
        self._name = descriptor.name
        self._ttl = None if descriptor.ttl is None else to_span(descriptor.ttl.ttl)
        self._renew_on_read = descriptor.ttl is not None and descriptor.ttl.update_type is UpdateType.ON_READ_AND_WRITE
        self._give_expired = (
            descriptor.ttl is not None and descriptor.ttl.visibility is StateVisibility.RETURN_EXPIRED_IF_NOT_CLEANED_UP
        )
        self._declared = Declared("state", self._name, self._value_type(descriptor))
        self._trusted = descriptor.trusted
        self._mutable = self._declared.fit.mutable and not descriptor.trusted

    def _value_type(self, descriptor: Any) -> Any:
        return descriptor.type

    def _handed_out(self, value: Any) -> Any:
        """A value that its reader may change in place; it is checked again later."""
        if self._mutable and value is not None:
            self._backend.look(self._declared, value)
        return value

    def _written(self, value: Any, stored: Any = _NOTHING) -> Any:
        """The normal form of a value that replaces a stored one.

        The stored value itself has been changed in place, and is checked once its bundle is over: it may be large, and
        written for each record.
        """
        if self._trusted:
            return value
        if value is not stored:
            value = self._backend.normal(self._declared, value)
        if self._mutable:
            self._backend.look(self._declared, value)
        return value

    def _written_last(self, value: Any) -> Any:
        """As `_written`, where a key has one value."""
        if self._trusted:
            return value
        if not self._mutable:
            return self._backend.normal(self._declared, value)
        if value is not self._stored_value(self._backend.current.get(self._name)):
            value = self._backend.normal(self._declared, value)
        self._backend.look_at_latest(self._declared, value)
        return value

    def _stored_value(self, entry: Any) -> Any:
        """The value of an entry, expired or not."""
        if entry is None:
            return _NOTHING
        return entry if self._ttl is None else entry[0]

    def clear(self) -> None:
        """Forget the state of the current key."""
        self._backend.current.pop(self._name, None)

    def _wrap(self, value: Any) -> Any:
        return value if self._ttl is None else (value, self._backend.now())

    def _expired(self, entry: Any) -> bool:
        return self._ttl is not None and self._backend.expires and self._backend.now() - entry[1] >= self._ttl

    def forget_expired(self) -> None:
        """Remove an entry that has expired."""
        entry = self._backend.current.get(self._name)
        if entry is not None and self._expired(entry):
            self.clear()

    def _get(self, give_expired: bool | None = None) -> Any:
        entry = self._backend.current.get(self._name)
        if entry is None or self._ttl is None:
            return entry
        if self._expired(entry):
            self.clear()
            return entry[0] if (self._give_expired if give_expired is None else give_expired) else None
        if self._renew_on_read:
            self._set(entry[0])
        return entry[0]

    def _set(self, value: Any) -> None:
        self._backend.current[self._name] = self._wrap(value)

    def _put(self, value: Any) -> None:
        self._set(self._written_last(value))

    def merge(self, entries: Sequence[Any]) -> None:
        """Merge the state of several windows into the current window's."""
        raise UnsupportedError(
            f"{self.descriptor.kind} state '{self._name}' cannot be merged; use reducing, aggregating or list state"
        )

    def _merge_values(self, entries: Sequence[Any], merge: Callable[[Any, Any], Any]) -> None:
        """As `merge`, where an entry is one value."""
        values = entries if self._ttl is None else [value for value, _ in entries]
        self._set(reduce(lambda merged, value: self._declared.normal(merge(merged, value)), values))


class Collection(State):
    """A state of many entries, each with its own time to live; a large one is a list or map in chunks."""

    def _live(self, entries: Any) -> Any:
        raise NotImplementedError

    def forget_expired(self) -> None:
        entries = self._backend.current.get(self._name)
        if isinstance(entries, (list, dict)):
            live = self._live(entries)
            if live:
                self._backend.current[self._name] = live
            else:
                self.clear()
        elif entries is not None:
            entries.forget(self._expired)


class ValueState(State, Generic[T]):
    """One value of the current key; there is an example at `ValueStateDescriptor`.

    A value that is changed in place is stored as well. Writing one that is not of the declared type raises
    `StateError`.
    """

    def value(self) -> T | None:
        """The value, or None where there is none or it has expired."""
        value: T | None = self._get()
        return self._handed_out(value) if self._mutable else value

    def update(self, value: T | None) -> None:
        """Replace the value; None clears it."""
        if value is None:
            self.clear()
        else:
            self._put(value)


class ValueStateDescriptor(OneTypeDescriptor[ValueState[V]], Generic[V]):
    """One value per key (Flink: *Working with State*); `type` is the value's.

    In BATCH state lasts from a key's first record to its last or, where it is carried, on to the next partition; in
    STREAMING until it is cleared or expires. Raises `PipelineError` for a type that says too little to be stored.

    Examples:
        >>> class First(KeyedProcessFunction[str, Sale, int]):
        ...     def open(self, runtime_context: RuntimeContext) -> None:
        ...         self.seen = runtime_context.get_state(ValueStateDescriptor("seen", bool))
        ...     def process_element(self, value: Sale, ctx: KeyedProcessFunction.Context) -> list[int]:
        ...         if self.seen.value():
        ...             return []
        ...         self.seen.update(True)
        ...         return [value.amount]
        >>> sorted(collect(timed.key_by("shop").process(First())))
        [3, 4]
    """

    kind = "value"
    handle_type = ValueState

    def __init__(self, name: str, type: TypeForm[V], ttl: StateTtlConfig | None = None) -> None:  # noqa: A002
        super().__init__(name, type, ttl)


class ListState(Collection, Generic[T]):
    """A list of the current key, in the order of adding; each element has its own time to live.

    There is an example at `ListStateDescriptor`.
    """

    def _live(self, entries: Any) -> list[Any]:
        return [e for e in entries if not self._expired(e)]

    def _entries(self) -> list[Any]:
        entries: list[Any] = self._backend.current.get(self._name) or []
        if self._ttl is not None and entries:
            live = self._live(entries)
            visible = list(entries) if self._give_expired else live
            if self._renew_on_read:
                live = [self._wrap(value) for value, _ in live]
            if self._renew_on_read or len(live) < len(entries):
                self._backend.current[self._name] = live
            entries = visible
        return entries

    def get(self) -> list[T]:
        """The live elements."""
        values = list(self._entries()) if self._ttl is None else [value for value, _ in self._entries()]
        return list(map(self._handed_out, values)) if self._mutable else values

    def __iter__(self) -> Iterator[T]:
        return iter(self.get())

    def add(self, value: T) -> None:
        """Append one element."""
        value = self._written(value)
        self._backend.current.setdefault(self._name, []).append(self._wrap(value))

    def add_all(self, values: Iterable[T]) -> None:
        """Append several elements."""
        self._backend.current.setdefault(self._name, []).extend(map(self._wrap, self._checked(values)))

    def update(self, values: Iterable[T]) -> None:
        """Replace the whole list."""
        self._backend.current[self._name] = list(map(self._wrap, self._checked(values)))

    def merge(self, entries: Sequence[Any]) -> None:
        self._backend.current[self._name] = [element for elements in entries for element in elements]

    def _checked(self, values: Iterable[T]) -> list[T]:
        return list(map(self._written, values))


class ListStateDescriptor(OneTypeDescriptor[ListState[V]], Generic[V]):
    """A list of values per key (Flink: *Working with State*); `type` is the element's.

    It lasts as `ValueStateDescriptor` says. A list that grows large costs a micro-batch what it touches, not its whole
    length.

    Examples:
        >>> class Amounts(KeyedProcessFunction[str, Sale, str]):
        ...     def open(self, runtime_context: RuntimeContext) -> None:
        ...         self.amounts = runtime_context.get_list_state(ListStateDescriptor("amounts", int))
        ...     def process_element(self, value: Sale, ctx: KeyedProcessFunction.Context) -> list[str]:
        ...         self.amounts.add(value.amount)
        ...         return [f"{value.shop}: {self.amounts.get()}"]
        >>> sorted(collect(timed.key_by("shop").process(Amounts())))
        ['north: [3, 5]', 'north: [3]', 'south: [4]']
    """

    kind = "list"
    handle_type = ListState
    spilled = SpilledList

    def __init__(self, name: str, type: TypeForm[V], ttl: StateTtlConfig | None = None) -> None:  # noqa: A002
        super().__init__(name, type, ttl)

    @property
    def stored_type(self) -> Any:
        return list[self._timed(self.type)]  # type: ignore[misc]


class MapState(Collection, Generic[K, V]):
    """A map of the current key; each entry has its own time to live.

    A value may be None; its key then counts as present. There is an example at `MapStateDescriptor`.
    """

    def __init__(self, backend: StateBackend, descriptor: MapStateDescriptor[K, V]) -> None:
        super().__init__(backend, descriptor)
        self._declared_key = Declared("a key in state", self._name, descriptor.key_type)

    def _value_type(self, descriptor: Any) -> Any:
        return Optional[descriptor.value_type]  # noqa: UP045

    def _live(self, entries: Any) -> dict[K, Any]:
        return {k: e for k, e in entries.items() if not self._expired(e)}

    def _entries(self, read: bool = False) -> dict[K, Any]:
        """The visible entries. Live entries stay, each renewed where `read` is set."""
        entries: dict[K, Any] = self._backend.current.get(self._name) or {}
        if self._ttl is None or not entries:
            return entries
        live = self._live(entries)
        visible = dict(entries.items()) if self._give_expired else live
        if read and self._renew_on_read:
            live = {k: self._wrap(value) for k, (value, _) in live.items()}
        self._backend.current[self._name] = live
        return visible

    def get(self, key: K) -> V | None:
        """The value of `key`, or None."""
        key = self._declared_key.sought(key)
        entries: dict[K, Any] = self._backend.current.get(self._name) or {}
        entry = entries.get(key)
        if entry is None or self._ttl is None:
            return self._handed_out(entry) if self._mutable else entry
        if self._expired(entry):
            del entries[key]
            expired: V | None = entry[0] if self._give_expired else None
            return expired
        if self._renew_on_read:
            entries[key] = self._wrap(entry[0])
        value: V = entry[0]
        return self._handed_out(value) if self._mutable else value

    def put(self, key: K, value: V | None) -> None:
        """Set the value of `key`."""
        key = self._backend.normal(self._declared_key, key)
        if type(key) not in OF_ONE_FORM:
            self._declared_key.check_equals_itself(key)
        entries = self._backend.current.setdefault(self._name, {})
        stored = self._stored_value(entries.get(key) if self._mutable else None)
        entries[key] = self._wrap(self._written(value, stored))

    def put_all(self, values: dict[K, V | None]) -> None:
        """Set the values of several keys."""
        for key, value in values.items():
            self.put(key, value)

    def remove(self, key: K) -> None:
        """Forget `key`; does nothing where it is absent."""
        (self._backend.current.get(self._name) or {}).pop(self._declared_key.sought(key), None)

    def contains(self, key: K) -> bool:
        """Whether `key` is present and live, also with None as its value."""
        key = self._declared_key.sought(key)
        entries: dict[K, Any] = self._backend.current.get(self._name) or {}
        if key not in entries:
            return False
        expired = self._expired(entries.get(key))
        self.get(key)
        return not expired or self._give_expired

    def items(self) -> list[tuple[K, V]]:
        """The live entries."""
        entries = [(k, e if self._ttl is None else e[0]) for k, e in self._entries(read=True).items()]
        return [(k, self._handed_out(value)) for k, value in entries] if self._mutable else entries

    def keys(self) -> list[K]:
        """The keys of the live entries."""
        return list(self._entries(read=True))

    def values(self) -> list[V]:
        """The values of the live entries."""
        return [value for _, value in self.items()]

    def is_empty(self) -> bool:
        """Whether there is no live entry."""
        return not self._entries()

    def __contains__(self, key: K) -> bool:
        return self.contains(key)

    def __iter__(self) -> Iterator[K]:
        return iter(self.keys())


class MapStateDescriptor(StateDescriptor[MapState[K, V]], Generic[K, V]):
    """A map per key (Flink: *Working with State*), with keys of `key_type` and values of `value_type`.

    It lasts as `ValueStateDescriptor` says. A map that grows large costs a micro-batch what it touches, not all its
    entries.

    Examples:
        >>> class ByHour(KeyedProcessFunction[str, Sale, str]):
        ...     def open(self, runtime_context: RuntimeContext) -> None:
        ...         self.hours = runtime_context.get_map_state(MapStateDescriptor("hours", int, int))
        ...     def process_element(self, value: Sale, ctx: KeyedProcessFunction.Context) -> list[str]:
        ...         self.hours.put(value.at.hour, (self.hours.get(value.at.hour) or 0) + value.amount)
        ...         return [f"{value.shop}: {dict(self.hours.items())}"]
        >>> sorted(collect(timed.key_by("shop").process(ByHour())))
        ['north: {9: 3, 10: 5}', 'north: {9: 3}', 'south: {9: 4}']
    """

    kind = "map"
    handle_type = MapState
    spilled = SpilledMap

    def __init__(
        self,
        name: str,
        key_type: TypeForm[K],
        value_type: TypeForm[V],
        ttl: StateTtlConfig | None = None,
    ) -> None:
        super().__init__(name, (key_type, value_type), ttl)
        unequal = equal_by_more(mi.type_info(key_type))
        if unequal is not None:
            raise PipelineError(
                f"state '{name}': {unequal} is not equal by all its fields, by which a key is found again; leave"
                " __eq__, eq=False and compare=False out, or use another key"
            )
        self.key_type: Any = key_type
        self.value_type: Any = value_type

    @property
    def stored_type(self) -> Any:
        return dict[self.key_type, self._timed(Optional[self.value_type])]  # type: ignore[name-defined, misc]  # noqa: UP045


class Reduce(Protocol[T]):
    """The part of a `ReduceFunction` that state calls."""

    def reduce(self, value1: T, value2: T, /) -> T: ...


class ReducingState(State, Generic[T]):
    """One value of the current key, combined from all added values.

    There is an example at `ReducingStateDescriptor`.
    """

    def __init__(self, backend: StateBackend, descriptor: ReducingStateDescriptor[T]) -> None:
        super().__init__(backend, descriptor)
        self._reduce = descriptor.reduce_function

    def get(self) -> T | None:
        """The combined value, or None where nothing was added."""
        value: T | None = self._get()
        return self._handed_out(value) if self._mutable else value

    def add(self, value: T) -> None:
        """Combine one more value."""
        current = self._get(give_expired=False)
        self._put(value if current is None else self._reduce(current, value))

    def merge(self, entries: Sequence[Any]) -> None:
        self._merge_values(entries, self._reduce)


class ReducingStateDescriptor(OneTypeDescriptor[ReducingState[V]], Generic[V]):
    """One value per key, to which every added value is combined by `reduce_function(a, b)`.

    `type` is the value's (Flink: *Working with State*). It lasts as `ValueStateDescriptor` says.

    Examples:
        >>> class Largest(KeyedProcessFunction[str, Sale, str]):
        ...     def open(self, runtime_context: RuntimeContext) -> None:
        ...         self.largest = runtime_context.get_reducing_state(ReducingStateDescriptor("largest", max, int))
        ...     def process_element(self, value: Sale, ctx: KeyedProcessFunction.Context) -> list[str]:
        ...         self.largest.add(value.amount)
        ...         return [f"{value.shop}: {self.largest.get()}"]
        >>> sorted(collect(timed.key_by("shop").process(Largest())))
        ['north: 3', 'north: 5', 'south: 4']
    """

    kind = "reducing"
    handle_type = ReducingState

    def __init__(
        self,
        name: str,
        reduce_function: Callable[[V, V], V] | Reduce[V],
        type: TypeForm[V],  # noqa: A002
        ttl: StateTtlConfig | None = None,
    ) -> None:
        super().__init__(name, type, ttl)
        function: Any = reduce_function
        self.reduce_function: Callable[[V, V], V] = getattr(function, "reduce", function)


class Aggregate(Protocol[In, A, Out]):
    """The part of an `AggregateFunction` that state calls."""

    def create_accumulator(self) -> A: ...
    def add(self, value: In, accumulator: A, /) -> A: ...
    def get_result(self, accumulator: A, /) -> Out: ...
    def merge(self, a: A, b: A, /) -> A: ...


class AggregatingState(State, Generic[IN, OUT]):
    """The accumulator of the current key's added values, read as the aggregate function's result.

    There is an example at `AggregatingStateDescriptor`.
    """

    def __init__(self, backend: StateBackend, descriptor: AggregatingStateDescriptor[IN, Any, OUT]) -> None:
        super().__init__(backend, descriptor)
        self._function = descriptor.aggregate_function

    def get(self) -> OUT | None:
        """The result over all added values, or None where nothing was added."""
        accumulator = self._get()
        return None if accumulator is None else self._function.get_result(accumulator)

    def add(self, value: IN) -> None:
        """Aggregate one more value."""
        accumulator = self._get(give_expired=False)
        if accumulator is None:
            accumulator = self._backend.normal(self._declared, self._function.create_accumulator())
        self._put(self._function.add(value, accumulator))

    def merge(self, entries: Sequence[Any]) -> None:
        self._merge_values(entries, self._function.merge)


class AggregatingStateDescriptor(OneTypeDescriptor[AggregatingState[IN, OUT]], Generic[IN, A, OUT]):
    """One accumulator per key, to which every added value is aggregated by an `AggregateFunction`.

    `type` is the accumulator's (Flink: *Working with State*). It lasts as `ValueStateDescriptor` says.

    Examples:
        >>> class Count(AggregateFunction[int, int, str]):
        ...     def create_accumulator(self) -> int:
        ...         return 0
        ...     def add(self, value: int, accumulator: int) -> int:
        ...         return accumulator + 1
        ...     def get_result(self, accumulator: int) -> str:
        ...         return f"{accumulator} sales"
        ...     def merge(self, a: int, b: int) -> int:
        ...         return a + b
        >>> class Counted(KeyedProcessFunction[str, Sale, str]):
        ...     def open(self, runtime_context: RuntimeContext) -> None:
        ...         count = AggregatingStateDescriptor("count", Count(), int)
        ...         self.count = runtime_context.get_aggregating_state(count)
        ...     def process_element(self, value: Sale, ctx: KeyedProcessFunction.Context) -> list[str]:
        ...         self.count.add(value.amount)
        ...         return [f"{value.shop}: {self.count.get()}"]
        >>> sorted(collect(timed.key_by("shop").process(Counted())))
        ['north: 1 sales', 'north: 2 sales', 'south: 1 sales']
    """

    kind = "aggregating"
    handle_type = AggregatingState

    def __init__(
        self,
        name: str,
        aggregate_function: Aggregate[IN, A, OUT],
        type: TypeForm[A],  # noqa: A002
        ttl: StateTtlConfig | None = None,
    ) -> None:
        super().__init__(name, type, ttl)
        self.aggregate_function = aggregate_function
