"""The window operator as its parts see it, and the state of one window, which window and trigger state use."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

from dagster_unified.operators.operator import KeyedOptions
from dagster_unified.operators.program.blocks import Collector
from dagster_unified.operators.state.backend import Declared, KeyedStateBackend, StateBackend
from dagster_unified.operators.state.columns import TypedColumn
from dagster_unified.operators.state.descriptors import StateDescriptor
from dagster_unified.operators.state.map import MapStateDescriptor
from dagster_unified.operators.state.row_columns import RowsByKeyColumn, RowsColumn
from dagster_unified.operators.time import TimeDomain
from dagster_unified.operators.windows.contents import Contents
from dagster_unified.operators.windows.context import WindowAssignerContext
from dagster_unified.operators.windows.spec import Windowing
from dagster_unified.operators.windows.triggers import TriggerResult
from dagster_unified.records import Copy


class WindowingOperator(Protocol):
    """The window operator, as its strategies, its contexts and merging windows see it."""

    where: str
    spec: Windowing
    options: KeyedOptions
    clock: Callable[[], int]
    read_clock: Callable[[], int]
    watermark: int
    state: KeyedStateBackend
    out: Collector
    contents: Contents
    assigning: WindowAssignerContext
    copy: Copy | None

    def at(self, timestamp: int | None) -> None: ...
    def windows(self) -> Any: ...
    def is_late(self, window: Any) -> bool: ...
    def late(self, record: Any, timestamp: int) -> None: ...
    def add_all(self, window: Any, records: Sequence[Any]) -> None: ...
    def act(self, result: TriggerResult, window: Any) -> None: ...
    def register(self, window: Any, timestamp: int, domain: TimeDomain) -> None: ...
    def unregister(self, window: Any, timestamp: int, domain: TimeDomain) -> None: ...
    def register_cleanup(self, window: Any) -> None: ...
    def merge_trigger(self, cover: Any, parts: Sequence[Any]) -> None: ...


class WindowScope(StateBackend):
    """State of one window of the current key: each state is a map by window in the key's own state."""

    def __init__(self, operator: WindowingOperator, window_type: Any, prefix: str) -> None:
        super().__init__(operator.clock, operator.options.expiry)
        self._operator, self._prefix, self._window_type = operator, prefix, window_type
        self.window: Any = None
        self.current = _WindowCells(self)

    def normal(self, declared: Declared, value: Any) -> Any:
        return self._operator.state.normal(declared, value)

    def look(self, declared: Declared, value: Any) -> None:
        self._operator.state.look(declared, value)

    def look_at_latest(self, declared: Declared, value: Any) -> None:
        self._operator.state.look(declared, value)  # the latest is by key, and a key has one value for each window

    def on_first(self, descriptor: StateDescriptor[Any]) -> None:
        self._operator.state.register(_OfWindows(self.name(descriptor.name), self._window_type, descriptor))

    def name(self, name: str) -> str:
        """A state's name among the key's."""
        return f"{self._prefix} {name}"

    @property
    def of_key(self) -> dict[str, Any]:
        """The state of the current key."""
        return self._operator.state.current


class _OfWindows(MapStateDescriptor[Any, Any]):
    """A state of windows, as a map of the key's."""

    def __init__(self, name: str, window_type: Any, descriptor: StateDescriptor[Any]) -> None:
        super().__init__(name, window_type, descriptor.stored_type)
        self._of_window = descriptor

    @property
    def column_type(self) -> Any:
        return dict[self.key_type, self._of_window.column_type]  # type: ignore[name-defined]

    @property
    def declared(self) -> str:
        return self._of_window.declared

    def stores_as(self, other: StateDescriptor[Any]) -> bool:
        return isinstance(other, _OfWindows) and self._of_window.stores_as(other._of_window)

    def column(self, what: str) -> TypedColumn:
        rows = self._of_window.column(what)
        return (
            RowsByKeyColumn(what, self.key_type, rows, several=True)
            if isinstance(rows, RowsColumn)
            else super().column(what)
        )


class _WindowCells:
    """The states of a scope's window, each an entry of a map in the key's state."""

    def __init__(self, scope: WindowScope) -> None:
        self._scope = scope

    def get(self, name: str) -> Any:
        held = self._scope.of_key.get(self._scope.name(name))
        return held.get(self._scope.window) if held else None

    def __setitem__(self, name: str, value: Any) -> None:
        self._scope.of_key.setdefault(self._scope.name(name), {})[self._scope.window] = value

    def setdefault(self, name: str, value: Any) -> Any:
        held = self.get(name)
        if held is None:
            self[name] = held = value
        return held

    def pop(self, name: str, default: Any) -> Any:
        full = self._scope.name(name)
        held = self._scope.of_key.get(full)
        if not held:
            return default
        value = held.pop(self._scope.window, default)
        if not len(held):
            self._scope.of_key.pop(full, None)
        return value
