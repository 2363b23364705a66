"""What the handles of all kinds of state have in common: time to live, and the check of what is written."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import reduce
from typing import TYPE_CHECKING, Any

from dagster_unified.errors import UnsupportedError
from dagster_unified.operators.state.backend import Declared, StateBackend
from dagster_unified.operators.state.ttl import StateVisibility, UpdateType
from dagster_unified.operators.time import to_span

if TYPE_CHECKING:
    from dagster_unified.operators.state.descriptors import StateDescriptor


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
        """Replaces the value, which is checked."""
        if type(value) not in self._plain:
            self._backend.look_at_latest(self._declared, value)
        self._backend.current[self._name] = value if self._ttl is None else (value, self._backend.now())

    def merge(self, entries: Sequence[Any]) -> None:
        """Makes what several windows have stored of this state that of the current one, in which they merge."""
        raise UnsupportedError(
            f"{self.descriptor.kind} state '{self._name}' cannot be merged; use reducing, aggregating or list state"
        )

    def _merge_values(self, entries: Sequence[Any], merge: Callable[[Any, Any], Any]) -> None:
        """As `merge`, where an entry is one value."""
        values = entries if self._ttl is None else [value for value, _ in entries]
        merged = reduce(merge, values)
        self._declared.check([merged])
        self._set(merged)


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
