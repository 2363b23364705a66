"""Aggregating state: one accumulator per key, to which every added value is aggregated."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Generic, Protocol

from dagster_unified.operators.functions.type_variables import IN, OUT, A, In, Out
from dagster_unified.operators.state.backend import StateBackend
from dagster_unified.operators.state.descriptors import OneTypeDescriptor
from dagster_unified.operators.state.handles import State
from dagster_unified.operators.state.ttl import StateTtlConfig

if TYPE_CHECKING:
    from typing_extensions import TypeForm


class Aggregate(Protocol[In, A, Out]):
    """An `AggregateFunction`, as far as state calls it."""

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
        """The result over all that was added, or None where nothing was."""
        held = self._get()
        return None if held is None else self._function.get_result(held)

    def add(self, value: IN) -> None:
        """Aggregates one more value."""
        held = self._get(give_expired=False)
        if held is None:
            held = self._backend.normal(self._declared, self._function.create_accumulator())
        self._put(self._function.add(value, held))

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
