"""Keyed state in memory: what handles read and write, and the check of what was written.

State is kept per key in a plain dict (`KeyedStateBackend`); a driver decides how long it lives: BATCH drops it at the
end of its key (FLIP-140), STREAMING keeps it in the key group's checkpointed state.

Every driver checks written values against the descriptor's type, and brings them into its normal form, which they also
have after a checkpoint. Mutable values are checked again at the end of a bundle of records, as they are then.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Hashable, Iterable, Sequence
from functools import lru_cache
from itertools import islice
from typing import Any, Protocol

from msgspec import inspect as mi
from msgspec import msgpack

from dagster_unified.errors import PipelineError, StateError
from dagster_unified.operators.functions.type_variables import R
from dagster_unified.operators.keys import OF_ONE_FORM, has_nan
from dagster_unified.operators.state.descriptors import StateDescriptor, StateHandle
from dagster_unified.records import shorten, type_name
from dagster_unified.values import Fit, Misfit, UnfitError, fit_of, python_of


def _through_msgpack(info: mi.Type, values: list[Any]) -> list[Any]:
    decoded: list[Any] = msgpack.decode(msgpack.encode(values), type=list.__class_getitem__(python_of(info)))
    return decoded


@lru_cache(maxsize=1024)
def _fit(python: Any) -> Fit:
    return fit_of(mi.type_info(python), _through_msgpack, widens=False)


class Declared:
    """The declared type of a state's values. `what` and `name` name it in errors: `state 'mean'`."""

    def __init__(self, what: str, name: str, python: Any) -> None:
        self._what, self._name = what, name
        self.latest: dict[Hashable, Any] = {}
        """For a state of one value, the last written value of each key that was not checked yet."""
        self.fit = _fit(python)

    def check(self, values: list[Any], keys: list[Hashable] | None = None) -> None:
        """Raise `StateError` for a value that does not fit; `keys` are the keys of the values."""
        if self.fit.are_normal(values):
            return
        for number, value in enumerate(values):
            self.normal(value, "" if keys is None else f" of key {shorten(keys[number])}")

    def normal(self, value: Any, owner: str = "") -> Any:
        """The normal form of a value; raises `StateError` for one that does not fit."""
        try:
            return self.fit.normal(value)
        except UnfitError as error:
            raise self.refusal(value, error.misfit, owner) from None

    def sought(self, key: Any) -> Any:
        """The normal form of a key that is looked up, as entries have it; a value of another type as it is."""
        if type(key) in OF_ONE_FORM:
            return key
        try:
            return self.fit.normal(key)
        except UnfitError:
            return key

    def refusal(self, value: Any, misfit: Misfit, owner: str) -> StateError:
        """The error for a value that does not fit; `owner` is " of key 'a'", or nothing."""
        whole = f" in {shorten(value)}" if misfit.path else ""
        place = f"{self._what} '{self._name}{misfit.path}'" if self._name else f"{self._what}{misfit.path}"
        return StateError(
            f"{place}{owner} is declared {misfit.declared}, and was given {shorten(misfit.value)}"
            f" ({type_name(type(misfit.value))}){whole}; {misfit.remedy()}"
        )

    def check_equals_itself(self, key: Hashable) -> None:
        """Raise `StateError` for a map's key that is or contains NaN: no look-up would find it again."""
        if has_nan(key):
            place = f"{self._what} '{self._name}'"
            raise StateError(
                f"{place} {'is' if key != key else 'has'} nan, which equals nothing, in {shorten(key)}; leave it out,"
                " or give it a key"
            )


AT_ONCE = 1024
"""Values that are collected before they are checked."""


class StateCells(Protocol):
    """The states of one scope, by name, such as a dict. Each kind of state decides what it stores."""

    def get(self, name: str, /) -> Any: ...
    def setdefault(self, name: str, value: Any, /) -> Any: ...
    def pop(self, name: str, default: Any, /) -> Any: ...
    def __setitem__(self, name: str, value: Any, /) -> None: ...


class StateBackend(ABC):
    """The storage of handles: the states of one scope at a time, such as a key, or a window of it."""

    current: StateCells
    """The states of the current scope."""

    key: Hashable
    """The key that is current."""

    def __init__(self, now: Callable[[], int], expires: bool = True) -> None:
        """`expires` says whether entries with a time to live expire; their last renewal is noted in any case."""
        self.now, self.expires = now, expires
        self.descriptors: dict[str, StateDescriptor[Any]] = {}
        self._handles: dict[str, StateHandle] = {}

    @abstractmethod
    def normal(self, declared: Declared, value: Any) -> Any:
        """The normal form of a value of the current key; raises `StateError` for one that does not fit."""

    @abstractmethod
    def look(self, declared: Declared, value: Any) -> None:
        """Note a mutable value of the current key, to be checked before a commit."""

    @abstractmethod
    def look_at_latest(self, declared: Declared, value: Any) -> None:
        """As `look`, where a scope has one value: one that is replaced need not be checked."""

    def bind(self, descriptor: StateDescriptor[R]) -> R:
        """The handle that reads and writes a descriptor's state."""
        handle = self._handles.get(descriptor.name)
        if handle is None or (handle.descriptor is not descriptor and not handle.descriptor.same_as(descriptor)):
            self.register(descriptor)
            handle = self._handles[descriptor.name] = descriptor.handle_type(self, descriptor)
        untyped: Any = handle
        bound: R = untyped
        return bound

    def register(self, descriptor: StateDescriptor[Any]) -> None:
        """Remember a descriptor; the same name twice must be the same state."""
        known = self.descriptors.setdefault(descriptor.name, descriptor)
        if known is descriptor:
            self.on_first(descriptor)
        elif not known.stores_as(descriptor):
            raise PipelineError(
                f"state '{descriptor.name}' is declared as {known.describe()} and as {descriptor.describe()}; give one"
                " of them another name"
            )

    @abstractmethod
    def on_first(self, descriptor: StateDescriptor[Any]) -> None:
        """Called when a state is declared for the first time."""


class KeyedColumn:
    """One state of many keys, one value each, where keys have no other state."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.values: dict[Hashable, Any] = {}
        self.created: list[Hashable] = []
        """The keys that were put and had no value before."""

    def extend(self, keys: Sequence[Hashable], values: Sequence[Any]) -> None:
        self.values.update(zip(keys, values, strict=True))

    def take(self, keys: Sequence[Hashable]) -> list[Any]:
        """The values of some keys, None where there is none."""
        return list(map(self.values.get, keys))

    def put(self, keys: Sequence[Hashable], replacing: Sequence[Any]) -> None:
        count = len(self.values)
        self.values.update(zip(keys, replacing, strict=True))
        created = list(islice(reversed(self.values), len(self.values) - count))  # a dict has what is new at its end
        self.created += reversed(created)

    def values_of(self, keys: Sequence[Hashable]) -> list[Any]:
        """The values of some keys that have one."""
        return list(map(self.values.__getitem__, keys))


class KeyedStateBackend(StateBackend):
    """All keyed state of one operator: a dict of state name to value for each key, and the current key."""

    current: dict[str, Any]

    def __init__(self, now: Callable[[], int], expires: bool = True) -> None:
        super().__init__(now, expires)
        self.keys: dict[Hashable, dict[str, Any]] = {}
        self.created: list[Hashable] = []
        """The keys that had no state when they were selected; a driver that cares empties it."""

        self.column: KeyedColumn | None = None
        """The state of keys instead of `keys`, where a driver keeps it so for an operator that asks for it."""

        self.current = {}
        self.key = None
        self._unchecked: list[tuple[Declared, Hashable, Any]] = []
        self._waiting: list[Declared] = []
        self.on_register: Callable[[StateDescriptor[Any]], None] | None = None
        self.by_key = True
        """Whether errors name the key; a subtask's state has none."""

    def select(self, key: Hashable) -> None:
        """Make `key` the key that every handle reads and writes."""
        current = self.keys.get(key)
        if current is None:
            current = self.keys[key] = {}
            self.created.append(key)
        self.current = current
        self.key = key

    def take(self, name: str, keys: Sequence[Hashable]) -> list[Any]:
        """The values of one state of several keys, None where there is none."""
        if self.column is not None:
            return self.column.take(keys)
        states = map(self.keys.get, keys)
        return [None if state is None else state.get(name) for state in states]

    def put(self, name: str, keys: Sequence[Hashable], values: Sequence[Any]) -> None:
        """Replace the values of one state of several keys, which were taken before."""
        if self.column is not None:
            self.column.put(keys, values)
            return
        for key, value in zip(keys, values, strict=True):
            self.select(key)
            self.current[name] = value

    def normal(self, declared: Declared, value: Any) -> Any:
        try:
            return declared.fit.normal(value)
        except UnfitError as error:
            owner = f" of key {shorten(self.key)}" if self.by_key else ""
            raise declared.refusal(value, error.misfit, owner) from None

    def look(self, declared: Declared, value: Any) -> None:
        self._unchecked.append((declared, self.key, value))
        if len(self._unchecked) >= AT_ONCE:
            self.check()

    def look_at_latest(self, declared: Declared, value: Any) -> None:
        """As `look`, where a key has one value: one that is replaced is never stored, and so needs no check."""
        latest = declared.latest
        if not latest:
            self._waiting.append(declared)
        latest[self.key] = value
        if len(latest) >= AT_ONCE:
            self.check()

    def check(self) -> None:
        """Check the noted values. A driver calls it before it commits anything."""
        waiting, self._waiting = self._waiting, []
        for declared in waiting:
            latest, declared.latest = declared.latest, {}
            self._check(declared, list(latest.values()), list(latest))
        if not self._unchecked:
            return
        noted, self._unchecked = self._unchecked, []
        by_state: dict[Declared, dict[int, tuple[Hashable, Any]]] = {}
        for declared, key, value in noted:
            by_state.setdefault(declared, {})[id(value)] = (key, value)
        for declared, entries in by_state.items():
            self._check(declared, [value for _, value in entries.values()], [key for key, _ in entries.values()])

    def _check(self, declared: Declared, values: list[Any], keys: list[Hashable]) -> None:
        declared.check(values, keys if self.by_key else None)

    def forget_expired(self, states: Iterable[dict[str, Any]]) -> None:
        """Remove expired entries from some keys' states."""
        timed: list[StateHandle] = [self.bind(d) for d in list(self.descriptors.values()) if d.ttl is not None]
        if timed:
            for state in states:
                self.current = state
                for handle in timed:
                    handle.forget_expired()

    def drop(self, key: Hashable) -> None:
        self.keys.pop(key, None)
        self.created.clear()

    def on_first(self, descriptor: StateDescriptor[Any]) -> None:
        if self.on_register is not None:
            self.on_register(descriptor)
