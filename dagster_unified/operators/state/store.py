"""How a function gets the handles of its state."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any

from dagster_unified.operators.functions.type_variables import IN, OUT, A, K, R, V
from dagster_unified.operators.state.aggregating import AggregatingState, AggregatingStateDescriptor
from dagster_unified.operators.state.backend import StateBackend
from dagster_unified.operators.state.descriptors import StateDescriptor
from dagster_unified.operators.state.list import ListState, ListStateDescriptor
from dagster_unified.operators.state.map import MapState, MapStateDescriptor
from dagster_unified.operators.state.reducing import ReducingState, ReducingStateDescriptor


class KeyedStateStore(ABC):
    """Where a function gets its state. `get_state` gives every kind; the other names are PyFlink's for the same."""

    @abstractmethod
    def get_state(self, descriptor: StateDescriptor[R]) -> R:
        """The handle on the state that `descriptor` names: for a `ValueStateDescriptor`, a `ValueState`."""

    def get_list_state(self, descriptor: ListStateDescriptor[V]) -> ListState[V]:
        """The list state that `descriptor` names."""
        return self.get_state(descriptor)

    def get_map_state(self, descriptor: MapStateDescriptor[K, V]) -> MapState[K, V]:
        """The map state that `descriptor` names."""
        return self.get_state(descriptor)

    def get_reducing_state(self, descriptor: ReducingStateDescriptor[V]) -> ReducingState[V]:
        """The reducing state that `descriptor` names."""
        return self.get_state(descriptor)

    def get_aggregating_state(self, descriptor: AggregatingStateDescriptor[IN, A, OUT]) -> AggregatingState[IN, OUT]:
        """The aggregating state that `descriptor` names."""
        return self.get_state(descriptor)


class BackendStore(KeyedStateStore):
    """The state of a backend's scope."""

    def __init__(self, backend: StateBackend) -> None:
        self._backend = backend

    def get_state(self, descriptor: StateDescriptor[Any]) -> Any:
        return self._backend.bind(descriptor)
