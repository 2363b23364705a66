"""Value state: one value per key."""

from __future__ import annotations

from typing import TYPE_CHECKING, Generic

from dagster_unified.operators.functions.type_variables import T, V
from dagster_unified.operators.state.descriptors import OneTypeDescriptor
from dagster_unified.operators.state.handles import State
from dagster_unified.operators.state.ttl import StateTtlConfig

if TYPE_CHECKING:
    from typing_extensions import TypeForm


class ValueState(State, Generic[T]):
    """One value of the current key; there is an example at `ValueStateDescriptor`.

    A value that is changed in place is stored as well. Writing one that is not of the declared type raises
    `StateError`.
    """

    def value(self) -> T | None:
        """The value, or None where there is none or it has expired."""
        found: T | None = self._get()
        return self._given(found) if self._mutable else found

    def update(self, value: T | None) -> None:
        """Replaces the value; None clears it."""
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
