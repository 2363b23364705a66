"""What the handles of all kinds of state have in common: time to live, and the check of what is written."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import reduce
from typing import Any

from dagster_unified.errors import UnsupportedError
from dagster_unified.operators.state.backend import Declared, StateBackend
from dagster_unified.operators.state.descriptors import StateDescriptor
from dagster_unified.operators.state.ttl import StateVisibility, UpdateType
from dagster_unified.operators.time import to_span

_NOTHING = object()
"""In the place of a value where none is held, since None may be one."""


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
        """The type of what is written."""
        return descriptor.type

    def _given(self, value: Any) -> Any:
        """A value that its reader may change in its place, and which so is checked again."""
        if self._mutable and value is not None:
            self._backend.look(self._declared, value)
        return value

    def _written(self, value: Any, held: Any = _NOTHING) -> Any:
        """The normal form of a value that is written in the place of one that is held.

        One that is held already has been changed in its place, and is looked at once its bundle is over: it may be
        large, and be written for each record.
        """
        if self._trusted:
            return value
        if value is not held:
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
        if value is not self._held(self._backend.current.get(self._name)):
            value = self._backend.normal(self._declared, value)
        self._backend.look_at_latest(self._declared, value)
        return value

    def _held(self, entry: Any) -> Any:
        """The value of an entry, expired or not."""
        if entry is None:
            return _NOTHING
        return entry if self._ttl is None else entry[0]

    def clear(self) -> None:
        """Forgets the state of the current key."""
        self._backend.current.pop(self._name, None)

    def _wrap(self, value: Any) -> Any:
        return value if self._ttl is None else (value, self._backend.now())

    def _expired(self, entry: Any) -> bool:
        return self._ttl is not None and self._backend.expires and self._backend.now() - entry[1] >= self._ttl

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

    def _put(self, value: Any) -> None:
        """Replaces the value, which takes its normal form."""
        self._set(self._written_last(value))

    def merge(self, entries: Sequence[Any]) -> None:
        """Makes what several windows have stored of this state that of the current one, in which they merge."""
        raise UnsupportedError(
            f"{self.descriptor.kind} state '{self._name}' cannot be merged; use reducing, aggregating or list state"
        )

    def _merge_values(self, entries: Sequence[Any], merge: Callable[[Any, Any], Any]) -> None:
        """As `merge`, where an entry is one value."""
        values = entries if self._ttl is None else [value for value, _ in entries]
        self._set(reduce(lambda one, other: self._declared.normal(merge(one, other)), values))


class Collection(State):
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
