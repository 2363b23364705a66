"""What the window operator gives an assigner, a trigger and a window function."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from dagster_unified.errors import UnsupportedError
from dagster_unified.operators.functions.base import OutputTag, RuntimeContext
from dagster_unified.operators.functions.windows import ProcessWindowFunction
from dagster_unified.operators.state.descriptors import StateDescriptor
from dagster_unified.operators.state.handles import State
from dagster_unified.operators.state.store import BackendStore, KeyedStateStore
from dagster_unified.operators.time import TimeDomain
from dagster_unified.operators.timers import timer_time
from dagster_unified.operators.windows.context import WindowAssignerContext
from dagster_unified.operators.windows.scope import WindowingOperator, WindowScope
from dagster_unified.operators.windows.triggers import OnMergeContext


class OperatorAssignerContext(WindowAssignerContext):
    """The clock, and the state of the current key."""

    def __init__(self, operator: WindowingOperator, runtime_context: RuntimeContext) -> None:
        self._operator, self._runtime_context = operator, runtime_context

    def get_current_processing_time(self) -> int:
        return self._operator.read_clock()

    def get_runtime_context(self) -> RuntimeContext:
        return self._runtime_context


class OperatorTriggerContext(OnMergeContext):
    """Time, timers and state of the current key and one window."""

    def __init__(self, operator: WindowingOperator) -> None:
        self._operator = operator
        self._scope = WindowScope(operator, operator.spec.assigner.window_type, "trigger")
        self._merged: Sequence[Any] = ()

    def of(self, window: Any, merged: Sequence[Any] = ()) -> OperatorTriggerContext:
        self._scope.window, self._merged = window, merged
        return self

    def get_current_watermark(self) -> int:
        return self._operator.watermark

    def get_current_processing_time(self) -> int:
        return self._operator.read_clock()

    def register_event_time_timer(self, timestamp: int) -> None:
        self._operator.register(self._scope.window, timer_time(timestamp), TimeDomain.EVENT_TIME)

    def register_processing_time_timer(self, timestamp: int) -> None:
        self._operator.register(self._scope.window, timer_time(timestamp), TimeDomain.PROCESSING_TIME)

    def delete_event_time_timer(self, timestamp: int) -> None:
        self._operator.unregister(self._scope.window, timestamp, TimeDomain.EVENT_TIME)

    def delete_processing_time_timer(self, timestamp: int) -> None:
        self._operator.unregister(self._scope.window, timestamp, TimeDomain.PROCESSING_TIME)

    def get_partitioned_state(self, descriptor: StateDescriptor[Any]) -> Any:
        return self._scope.bind(descriptor)

    def early_results(self) -> bool:
        return self._operator.options.incremental_updates

    def merge_partitioned_state(self, descriptor: StateDescriptor[Any]) -> None:
        scope, into = self._scope, self._scope.window
        state: State = scope.bind(descriptor)  # first: what is there from before the job started has no type yet
        found = []
        for window in self._merged:
            scope.window = window
            value = scope.current.pop(descriptor.name, None)
            if value is not None:
                found.append(value)
        scope.window = into
        if not found:
            return
        try:
            state.merge(found)
        except UnsupportedError as error:
            raise UnsupportedError(f"{self._operator.where}: {error}") from error


class OperatorFunctionContext(ProcessWindowFunction.Context[Any]):
    """Time, state and side outputs of the current key and one window."""

    def __init__(self, operator: WindowingOperator) -> None:
        self._operator = operator
        self._scope = WindowScope(operator, operator.spec.assigner.window_type, "window")
        self._of_window, self._of_key = BackendStore(self._scope), BackendStore(operator.state)

    def of(self, window: Any) -> OperatorFunctionContext:
        self._scope.window = window
        return self

    def window(self) -> Any:
        return self._scope.window

    def current_processing_time(self) -> int:
        return self._operator.read_clock()

    def current_watermark(self) -> int:
        return self._operator.watermark

    def window_state(self) -> KeyedStateStore:
        return self._of_window

    def global_state(self) -> KeyedStateStore:
        return self._of_key

    def output(self, tag: OutputTag[Any], value: Any) -> None:
        self._operator.out.emit_side(tag, value, self._scope.window.max_timestamp())
