"""Reducing state: one value per key, to which every added value is combined."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Generic, Protocol

from dagster_unified.operators.functions.type_variables import T, V
from dagster_unified.operators.state.backend import StateBackend
from dagster_unified.operators.state.descriptors import OneTypeDescriptor
from dagster_unified.operators.state.handles import State
from dagster_unified.operators.state.ttl import StateTtlConfig

if TYPE_CHECKING:
    from typing_extensions import TypeForm


class Reduce(Protocol[T]):
    """A `ReduceFunction`, as far as state calls it."""

    def reduce(self, value1: T, value2: T, /) -> T: ...


class ReducingState(State, Generic[T]):
    """One value of the current key, combined from all that was added.

    There is an example at `ReducingStateDescriptor`.
    """

    def __init__(self, backend: StateBackend, descriptor: ReducingStateDescriptor[T]) -> None:
        super().__init__(backend, descriptor)
        self._reduce = descriptor.reduce_function

    def get(self) -> T | None:
        """The combined value, or None where nothing was added."""
        found: T | None = self._get()
        return self._given(found) if self._mutable else found

    def add(self, value: T) -> None:
        """Combines one more value."""
        held = self._get(give_expired=False)
        self._put(value if held is None else self._reduce(held, value))

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
