"""List state: a list of values per key."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, Generic

from dagster_unified.operators.functions.type_variables import T, V
from dagster_unified.operators.state.chunks import SpilledList
from dagster_unified.operators.state.descriptors import OneTypeDescriptor
from dagster_unified.operators.state.handles import Collection
from dagster_unified.operators.state.ttl import StateTtlConfig

if TYPE_CHECKING:
    from typing_extensions import TypeForm


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
        value = self._written(value)
        self._backend.current.setdefault(self._name, []).append(self._wrap(value))

    def add_all(self, values: Iterable[T]) -> None:
        """Appends several elements."""
        self._backend.current.setdefault(self._name, []).extend(map(self._wrap, self._checked(values)))

    def update(self, values: Iterable[T]) -> None:
        """Replaces the whole list."""
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
