"""Map state: a map per key."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, Generic, Optional

from msgspec import inspect as mi

from dagster_unified.errors import PipelineError
from dagster_unified.operators.equal_values import OF_ONE_FORM
from dagster_unified.operators.functions.type_variables import K, V
from dagster_unified.operators.state.backend import Declared, StateBackend
from dagster_unified.operators.state.chunks import SpilledMap
from dagster_unified.operators.state.descriptors import StateDescriptor
from dagster_unified.operators.state.handles import Collection
from dagster_unified.operators.state.ttl import StateTtlConfig
from dagster_unified.records import equal_by_more

if TYPE_CHECKING:
    from typing_extensions import TypeForm


class MapState(Collection, Generic[K, V]):
    """A map of the current key; each entry has its own time to live.

    A value may be None, and its key is there then. There is an example at `MapStateDescriptor`.
    """

    def __init__(self, backend: StateBackend, descriptor: MapStateDescriptor[K, V]) -> None:
        super().__init__(backend, descriptor)
        self._declared_key = Declared("a key in state", self._name, descriptor.key_type)

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
        key = self._declared_key.sought(key)
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
        key = self._backend.normal(self._declared_key, key)
        if type(key) not in OF_ONE_FORM:
            self._declared_key.check_equals_itself(key)
        entries = self._backend.current.setdefault(self._name, {})
        held = self._held(entries.get(key) if self._mutable else None)
        entries[key] = self._wrap(self._written(value, held))

    def put_all(self, values: dict[K, V | None]) -> None:
        """Sets the values of several keys."""
        for key, value in values.items():
            self.put(key, value)

    def remove(self, key: K) -> None:
        """Forgets `key`; nothing happens where it is not there."""
        (self._backend.current.get(self._name) or {}).pop(self._declared_key.sought(key), None)

    def contains(self, key: K) -> bool:
        """Whether `key` is there and lives, also with None as its value."""
        key = self._declared_key.sought(key)
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
        own = equal_by_more(mi.type_info(key_type))
        if own is not None:
            raise PipelineError(
                f"state '{name}': {own} is not equal by all its fields, by which a key is found again; leave __eq__,"
                " eq=False and compare=False out, or use another key"
            )
        self.key_type: Any = key_type
        self.value_type: Any = value_type

    @property
    def stored_type(self) -> Any:
        return dict[self.key_type, self._timed(Optional[self.value_type])]  # type: ignore[name-defined, misc]  # noqa: UP045
