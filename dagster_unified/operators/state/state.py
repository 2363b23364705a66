"""Keyed state: descriptors that an author declares, and the handles that a function reads and writes.

State is kept per key in a plain dict (`KeyedStateBackend`); a driver decides how long it lives: BATCH drops it at the
end of its key (FLIP-140), STREAMING keeps it in the key group's checkpointed state. Names and methods are PyFlink's.

What is written is held to the descriptor's type in every driver, before anything is committed: scalars at once, other
values many at a time, at the latest when a bundle of records is over, so that also those that were changed in their
place are seen.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Iterator
from dataclasses import dataclass, replace
from datetime import timedelta
from enum import Enum
from functools import lru_cache
from typing import TYPE_CHECKING, Any, ClassVar, Generic, Optional, Self

from msgspec import inspect as mi
from msgspec import msgpack

from dagster_unified.errors import PipelineError, StateError
from dagster_unified.operators.functions.type_variables import IN, OUT, A, K, R, T, V
from dagster_unified.records import shorten, type_name
from dagster_unified.values import Fit, fit_of, python_of

if TYPE_CHECKING:
    from typing_extensions import TypeForm

    from dagster_unified.operators.functions.base import AggregateFunction, ReduceFunction


class UpdateType(Enum):
    """What renews an entry's time to live."""

    ON_CREATE_AND_WRITE = "on create and write"
    ON_READ_AND_WRITE = "on read and write"


class StateVisibility(Enum):
    """Whether an expired entry that has not been removed yet is returned."""

    NEVER_RETURN_EXPIRED = "never return expired"
    RETURN_EXPIRED_IF_NOT_CLEANED_UP = "return expired if not cleaned up"


@dataclass(frozen=True)
class StateTtlConfig:
    """How long an entry of state lives without being renewed, on the processing-time clock (Flink: *State TTL*).

    In STREAMING an expired entry is removed when it is read, and with the next micro-batch that touches its page of
    keys (of a large list or map, its part); until then `visibility` says whether reading gives it once more. In BATCH
    nothing expires: a key's whole history passes in a moment, whose length says nothing of the time between its
    records. So a result that depends on expiry differs between the modes, which the lint says; event-time timers forget
    alike in both.
    """

    ttl: timedelta
    update_type: UpdateType = UpdateType.ON_CREATE_AND_WRITE
    visibility: StateVisibility = StateVisibility.NEVER_RETURN_EXPIRED

    def __post_init__(self) -> None:
        if self.ttl <= timedelta(0):
            raise PipelineError(f"state time to live must be positive, not {self.ttl}")

    @staticmethod
    def new_builder(ttl: timedelta) -> StateTtlConfigBuilder:
        """PyFlink's spelling: `StateTtlConfig.new_builder(ttl).update_ttl_on_read_and_write().build()`."""
        return StateTtlConfigBuilder(StateTtlConfig(ttl))


class StateTtlConfigBuilder:
    """A `StateTtlConfig` that is being built."""

    def __init__(self, config: StateTtlConfig) -> None:
        self._config = config

    def set_update_type(self, update_type: UpdateType) -> Self:
        """What renews an entry."""
        self._config = replace(self._config, update_type=update_type)
        return self

    def update_ttl_on_create_and_write(self) -> Self:
        """An entry is renewed when it is written, which is the default."""
        return self.set_update_type(UpdateType.ON_CREATE_AND_WRITE)

    def update_ttl_on_read_and_write(self) -> Self:
        """An entry is renewed when it is read or written."""
        return self.set_update_type(UpdateType.ON_READ_AND_WRITE)

    def set_state_visibility(self, visibility: StateVisibility) -> Self:
        """Whether an expired entry that has not been removed yet is returned."""
        self._config = replace(self._config, visibility=visibility)
        return self

    def never_return_expired(self) -> Self:
        """An expired entry is never returned, which is the default."""
        return self.set_state_visibility(StateVisibility.NEVER_RETURN_EXPIRED)

    def return_expired_if_not_cleaned_up(self) -> Self:
        """An expired entry is returned until it is removed."""
        return self.set_state_visibility(StateVisibility.RETURN_EXPIRED_IF_NOT_CLEANED_UP)

    def build(self) -> StateTtlConfig:
        """The configuration."""
        return self._config


class StateDescriptor(Generic[R]):
    """The name, type and time to live of one state of an operator. Names are unique within an operator."""

    kind: ClassVar[str] = "state"

    trusted = False
    """Whether the library itself writes it, lists of an operator's input, which need no check."""

    def __init__(self, name: str, types: tuple[Any, ...], ttl: StateTtlConfig | None) -> None:
        if not name:
            raise PipelineError("a state descriptor needs a name")
        for python in types:
            _check_type(name, python)
        self.name = name
        self.ttl = ttl
        self._types = types

    def describe(self) -> str:
        """`map state of str and int`, for messages."""
        return (
            f"{self.kind} state of"
            f" {' and '.join(map(type_name, self._types))}{'' if self.ttl is None else ' with a time to live'}"
        )

    @property
    def stored_type(self) -> Any:
        """The type of what is kept for one key: with a time to live, beside each value the moment of its last
        renewal.
        """
        raise NotImplementedError

    def _timed(self, python: Any) -> Any:
        return python if self.ttl is None else tuple[python, int]

    def enable_time_to_live(self, ttl: StateTtlConfig) -> None:
        """PyFlink's spelling of giving a descriptor its time to live."""
        self.ttl = ttl


def _check_type(name: str, python: Any) -> None:
    if isinstance(python, str):
        raise PipelineError(f"state '{name}': the type is the text {python!r}; give the type itself, without quotes")
    try:
        if isinstance(mi.type_info(python), (mi.AnyType, mi.CustomType)):
            raise TypeError(f"{type_name(python)} does not say what it holds")
    except (TypeError, NameError) as error:
        raise PipelineError(
            f"state '{name}': {error}; state is stored typed, so give a type such as int, list[str] or a NamedTuple"
        ) from error


class _OneType(StateDescriptor[R]):
    """A state of values of one type."""

    def __init__(self, name: str, type: Any, ttl: StateTtlConfig | None) -> None:  # noqa: A002 - Flink's name
        super().__init__(name, (type,), ttl)
        self.type = type

    @property
    def stored_type(self) -> Any:
        return self._timed(self.type)


class ValueStateDescriptor(_OneType["ValueState[V]"], Generic[V]):
    """One value per key."""

    kind = "value"

    def __init__(self, name: str, type: TypeForm[V], ttl: StateTtlConfig | None = None) -> None:  # noqa: A002
        super().__init__(name, type, ttl)


class ListStateDescriptor(_OneType["ListState[V]"], Generic[V]):
    """A list of values per key; `type` is the element's."""

    kind = "list"

    def __init__(self, name: str, type: TypeForm[V], ttl: StateTtlConfig | None = None) -> None:  # noqa: A002
        super().__init__(name, type, ttl)

    @property
    def stored_type(self) -> Any:
        return list[self._timed(self.type)]  # type: ignore[misc]


class MapStateDescriptor(StateDescriptor["MapState[K, V]"], Generic[K, V]):
    """A map per key."""

    kind = "map"

    def __init__(
        self,
        name: str,
        key_type: TypeForm[K],
        value_type: TypeForm[V],
        ttl: StateTtlConfig | None = None,
    ) -> None:
        super().__init__(name, (key_type, value_type), ttl)
        self.key_type: Any = key_type
        self.value_type: Any = value_type

    @property
    def stored_type(self) -> Any:
        return dict[self.key_type, self._timed(Optional[self.value_type])]  # type: ignore[name-defined, misc]  # noqa: UP045


class ReducingStateDescriptor(_OneType["ReducingState[V]"], Generic[V]):
    """One value per key, to which every added value is combined by `reduce_function(a, b)`."""

    kind = "reducing"

    def __init__(
        self,
        name: str,
        reduce_function: Callable[[V, V], V] | ReduceFunction[V],
        type: TypeForm[V],  # noqa: A002
        ttl: StateTtlConfig | None = None,
    ) -> None:
        super().__init__(name, type, ttl)
        function: Any = reduce_function
        self.reduce_function: Callable[[V, V], V] = getattr(function, "reduce", function)


class AggregatingStateDescriptor(_OneType["AggregatingState[IN, OUT]"], Generic[IN, A, OUT]):
    """One accumulator per key, to which every added value is aggregated by an `AggregateFunction`.

    `type` is the accumulator's.
    """

    kind = "aggregating"

    def __init__(
        self,
        name: str,
        aggregate_function: AggregateFunction[IN, A, OUT],
        type: TypeForm[A],  # noqa: A002
        ttl: StateTtlConfig | None = None,
    ) -> None:
        super().__init__(name, type, ttl)
        self.aggregate_function = aggregate_function


def _through_msgpack(info: mi.Type, values: list[Any]) -> list[Any]:
    found: list[Any] = msgpack.decode(msgpack.encode(values), type=list.__class_getitem__(python_of(info)))
    return found


@lru_cache(maxsize=1024)
def _fit(python: Any) -> Fit:
    return fit_of(mi.type_info(python), _through_msgpack, widens=False)


class Declared:
    """What values of a state have to be. `what` and `name` name it in errors: `state 'mean'`."""

    def __init__(self, what: str, name: str, python: Any) -> None:
        self._what, self._name = what, name
        self.latest: dict[Hashable, Any] = {}
        """Of a state of one value, what was written last for each key and has not been checked."""
        self.fit = _fit(python)

    def check(self, values: list[Any], keys: list[Hashable] | None = None) -> None:
        """Raises `StateError` for a value of another type; `keys` are those whose state the values are."""
        misfit = self.fit.misfit(values)
        if misfit is None:
            return
        number = next(i for i, value in enumerate(values) if self.fit.misfit((value,)) is not None)
        owner = "" if keys is None else f" of key {shorten(keys[number])}"
        whole = f" in {shorten(values[number])}" if misfit.path else ""
        place = f"{self._what} '{self._name}{misfit.path}'" if self._name else f"{self._what}{misfit.path}"
        raise StateError(
            f"{place}{owner} is declared {misfit.declared}, and was given {shorten(misfit.value)}"
            f" ({type_name(type(misfit.value))}){whole}; {misfit.remedy()}"
        )


_AT_ONCE = 1024
"""Values that are gathered before they are checked."""


class KeyedStateBackend:
    """All keyed state of one operator: a dict of state name to value for each key, and the key that is current."""

    def __init__(self, now: Callable[[], int]) -> None:
        self.now = now
        self.keys: dict[Hashable, dict[str, Any]] = {}
        self.created: list[Hashable] = []
        """The keys that had no state when they were selected; a driver that cares empties it."""

        self.current: dict[str, Any] = {}
        self.key: Hashable = None
        """The key that is current."""

        self._unchecked: list[tuple[Declared, Hashable, Any]] = []
        self._waiting: list[Declared] = []
        self.descriptors: dict[str, StateDescriptor[Any]] = {}
        self.on_register: Callable[[StateDescriptor[Any]], None] | None = None

    def select(self, key: Hashable) -> None:
        """Makes `key` the one that every handle reads and writes."""
        current = self.keys.get(key)
        if current is None:
            current = self.keys[key] = {}
            self.created.append(key)
        self.current = current
        self.key = key

    def look(self, declared: Declared, value: Any) -> None:
        """Takes a value of the current key to be checked; `StateError` is raised now or by `check`."""
        if declared.fit.scalar:
            declared.check([value], [self.key])
            return
        self._unchecked.append((declared, self.key, value))
        if len(self._unchecked) >= _AT_ONCE:
            self.check()

    def look_at_latest(self, declared: Declared, value: Any) -> None:
        """As `look`, where a key has one value: one that is replaced is never stored, and so needs no check."""
        if declared.fit.scalar:
            declared.check([value], [self.key])
            return
        latest = declared.latest
        if not latest:
            self._waiting.append(declared)
        latest[self.key] = value
        if len(latest) >= _AT_ONCE:
            self.check()

    def check(self) -> None:
        """Checks the values that were taken. A driver calls it before it commits anything."""
        waiting, self._waiting = self._waiting, []
        for declared in waiting:
            latest, declared.latest = declared.latest, {}
            declared.check(list(latest.values()), list(latest))
        if not self._unchecked:
            return
        taken, self._unchecked = self._unchecked, []
        found: dict[Declared, dict[int, tuple[Hashable, Any]]] = {}
        for declared, key, value in taken:
            found.setdefault(declared, {})[id(value)] = (key, value)
        for declared, entries in found.items():
            declared.check([value for _, value in entries.values()], [key for key, _ in entries.values()])

    def forget_expired(self, states: Iterable[dict[str, Any]]) -> None:
        """Removes what has expired of some keys' states."""
        timed = [handle(self, d) for d in list(self.descriptors.values()) if d.ttl is not None]
        if timed:
            for state in states:
                self.current = state
                for one in timed:
                    one.forget_expired()

    def drop(self, key: Hashable) -> None:
        """Forgets all state of `key`."""
        self.keys.pop(key, None)
        self.created.clear()

    def register(self, descriptor: StateDescriptor[Any]) -> None:
        """Remembers a descriptor; the same name twice must be the same state."""
        held = self.descriptors.setdefault(descriptor.name, descriptor)
        if held.kind != descriptor.kind or held.stored_type != descriptor.stored_type:
            raise PipelineError(
                f"state '{descriptor.name}' is declared as {held.describe()} and as {descriptor.describe()}; give one"
                " of them another name"
            )
        if self.on_register is not None and held is descriptor:
            self.on_register(descriptor)


class _State:
    """A handle on one state of the current key. With a time to live, an entry is stored as `(value, last renewal)`."""

    def __init__(self, backend: KeyedStateBackend, descriptor: StateDescriptor[Any]) -> None:
        backend.register(descriptor)
        self._backend = backend
        self._name = descriptor.name
        self._ttl = None if descriptor.ttl is None else int(descriptor.ttl.ttl.total_seconds() * 1000)
        self._renew_on_read = descriptor.ttl is not None and descriptor.ttl.update_type is UpdateType.ON_READ_AND_WRITE
        self._give_expired = (
            descriptor.ttl is not None and descriptor.ttl.visibility is StateVisibility.RETURN_EXPIRED_IF_NOT_CLEANED_UP
        )
        self._declared = Declared("state", self._name, self._value_type(descriptor))
        fit = self._declared.fit
        self._plain = fit.exact | {list} if descriptor.trusted else fit.exact
        """The types of values that need no look at them."""
        self._mutable = fit.mutable and not descriptor.trusted

    def _value_type(self, descriptor: Any) -> Any:
        """The type of what is written."""
        return descriptor.type

    def _given(self, value: Any) -> Any:
        """A value that its reader may change in its place, and which so is checked again."""
        if self._mutable and value is not None:
            self._backend.look(self._declared, value)
        return value

    def clear(self) -> None:
        """Forgets the state of the current key."""
        self._backend.current.pop(self._name, None)

    def _wrap(self, value: Any) -> Any:
        return value if self._ttl is None else (value, self._backend.now())

    def _expired(self, entry: Any) -> bool:
        return self._ttl is not None and self._backend.now() - entry[1] >= self._ttl

    def forget_expired(self) -> None:
        """Removes what has expired."""
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


class ValueState(_State, Generic[T]):
    """One value of the current key."""

    def value(self) -> T | None:
        """The value, or None where there is none or it has expired."""
        found: T | None = self._get()
        return self._given(found) if self._mutable else found

    def update(self, value: T | None) -> None:
        """Replaces the value; None clears it."""
        if value is None:
            self.clear()
        else:
            if type(value) not in self._plain:
                latest = self._declared.latest
                if 0 < len(latest) < _AT_ONCE:  # as look_at_latest, without a call for each record
                    latest[self._backend.key] = value
                else:
                    self._backend.look_at_latest(self._declared, value)
            self._set(value)


class _Collection(_State):
    """A state of many entries, each with its own time to live; where it is large, it is a list or map in parts."""

    def _live(self, entries: Any) -> Any:
        """The entries that have not expired."""
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


class ListState(_Collection, Generic[T]):
    """A list of the current key, in the order of adding; each element has its own time to live."""

    def _live(self, entries: Any) -> list[Any]:
        return [e for e in entries if not self._expired(e)]

    def _entries(self) -> list[Any]:
        entries: list[Any] = self._backend.current.get(self._name) or []
        if self._ttl is not None and entries:
            live = self._live(entries)
            given = list(entries) if self._give_expired else live
            if self._renew_on_read:
                live = [self._wrap(value) for value, _ in live]
            if self._renew_on_read or len(live) < len(entries):
                self._backend.current[self._name] = live
            entries = given
        return entries

    def get(self) -> list[T]:
        """The live elements."""
        found = list(self._entries()) if self._ttl is None else [value for value, _ in self._entries()]
        return list(map(self._given, found)) if self._mutable else found

    def __iter__(self) -> Iterator[T]:
        return iter(self.get())

    def add(self, value: T) -> None:
        """Appends one element."""
        if type(value) not in self._plain:
            self._backend.look(self._declared, value)
        self._backend.current.setdefault(self._name, []).append(self._wrap(value))

    def add_all(self, values: Iterable[T]) -> None:
        """Appends several elements."""
        self._backend.current.setdefault(self._name, []).extend(map(self._wrap, self._checked(values)))

    def update(self, values: Iterable[T]) -> None:
        """Replaces the whole list."""
        self._backend.current[self._name] = list(map(self._wrap, self._checked(values)))

    def _checked(self, values: Iterable[T]) -> list[T]:
        taken = list(values)
        for value in taken:
            if type(value) not in self._plain:
                self._backend.look(self._declared, value)
        return taken


class MapState(_Collection, Generic[K, V]):
    """A map of the current key; each entry has its own time to live. A value may be None, and its key is there then."""

    def __init__(self, backend: KeyedStateBackend, descriptor: MapStateDescriptor[K, V]) -> None:
        super().__init__(backend, descriptor)
        self._declared_key = Declared("a key in state", self._name, descriptor.key_type)
        self._plain_keys = self._declared_key.fit.exact

    def _value_type(self, descriptor: Any) -> Any:
        return Optional[descriptor.value_type]  # noqa: UP045

    def _live(self, entries: Any) -> dict[K, Any]:
        return {k: e for k, e in entries.items() if not self._expired(e)}

    def _entries(self, read: bool = False) -> dict[K, Any]:
        """The entries that are given. Those that live stay, each renewed where it is `read`."""
        entries: dict[K, Any] = self._backend.current.get(self._name) or {}
        if self._ttl is None or not entries:
            return entries
        live = self._live(entries)
        given = dict(entries.items()) if self._give_expired else live
        if read and self._renew_on_read:
            live = {k: self._wrap(value) for k, (value, _) in live.items()}
        self._backend.current[self._name] = live
        return given

    def get(self, key: K) -> V | None:
        """The value of `key`, or None."""
        entries: dict[K, Any] = self._backend.current.get(self._name) or {}
        entry = entries.get(key)
        if entry is None or self._ttl is None:
            return self._given(entry) if self._mutable else entry
        if self._expired(entry):
            del entries[key]
            given: V | None = entry[0] if self._give_expired else None
            return given
        if self._renew_on_read:
            entries[key] = self._wrap(entry[0])
        found: V = entry[0]
        return self._given(found) if self._mutable else found

    def put(self, key: K, value: V | None) -> None:
        """Sets the value of `key`."""
        if type(value) not in self._plain:
            self._backend.look(self._declared, value)
        if type(key) not in self._plain_keys:
            self._backend.look(self._declared_key, key)
        self._backend.current.setdefault(self._name, {})[key] = self._wrap(value)

    def put_all(self, values: dict[K, V | None]) -> None:
        """Sets the values of several keys."""
        for key, value in values.items():
            self.put(key, value)

    def remove(self, key: K) -> None:
        """Forgets `key`; nothing happens where it is not there."""
        (self._backend.current.get(self._name) or {}).pop(key, None)

    def contains(self, key: K) -> bool:
        """Whether `key` is there and lives, also with None as its value."""
        entries: dict[K, Any] = self._backend.current.get(self._name) or {}
        if key not in entries:
            return False
        expired = self._expired(entries.get(key))
        self.get(key)
        return not expired or self._give_expired

    def items(self) -> list[tuple[K, V]]:
        """The live entries."""
        found = [(k, e if self._ttl is None else e[0]) for k, e in self._entries(read=True).items()]
        return [(k, self._given(value)) for k, value in found] if self._mutable else found

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


class ReducingState(_State, Generic[T]):
    """One value of the current key, combined from all that was added."""

    def __init__(self, backend: KeyedStateBackend, descriptor: ReducingStateDescriptor[T]) -> None:
        super().__init__(backend, descriptor)
        self._reduce = descriptor.reduce_function

    def get(self) -> T | None:
        """The combined value, or None where nothing was added."""
        found: T | None = self._get()
        return self._given(found) if self._mutable else found

    def add(self, value: T) -> None:
        """Combines one more value."""
        held = self._get(give_expired=False)
        combined = value if held is None else self._reduce(held, value)
        if type(combined) not in self._plain:
            self._backend.look_at_latest(self._declared, combined)
        self._set(combined)


class AggregatingState(_State, Generic[IN, OUT]):
    """The accumulator of the current key's added values, read as the aggregate function's result."""

    def __init__(self, backend: KeyedStateBackend, descriptor: AggregatingStateDescriptor[IN, Any, OUT]) -> None:
        super().__init__(backend, descriptor)
        self._function = descriptor.aggregate_function

    def get(self) -> OUT | None:
        """The result over all that was added, or None where nothing was."""
        held = self._get()
        return None if held is None else self._function.get_result(held)

    def add(self, value: IN) -> None:
        """Aggregates one more value."""
        held = self._get(give_expired=False)
        accumulator = self._function.add(value, self._function.create_accumulator() if held is None else held)
        if type(accumulator) not in self._plain:
            self._backend.look_at_latest(self._declared, accumulator)
        self._set(accumulator)


_HANDLES: dict[str, type[_State]] = {
    "value": ValueState,
    "list": ListState,
    "map": MapState,
    "reducing": ReducingState,
    "aggregating": AggregatingState,
}


def handle(backend: KeyedStateBackend, descriptor: StateDescriptor[R]) -> R:
    """The handle that reads and writes the state which a descriptor names."""
    made: Any = _HANDLES[descriptor.kind](backend, descriptor)
    found: R = made
    return found
