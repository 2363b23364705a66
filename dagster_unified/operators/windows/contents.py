"""One window as its operator, its trigger and its function see it: elements or an accumulator, state and contexts."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from operator import length_hint
from typing import Any, ClassVar

from dagster_unified.errors import UnsupportedError
from dagster_unified.operators.by_field import FieldFold, Rows
from dagster_unified.operators.failures import RAISED, user_failure
from dagster_unified.operators.functions.base import (
    AggregateFunction,
    BackendStore,
    Function,
    KeyedStateStore,
    OutputTag,
    RuntimeContext,
)
from dagster_unified.operators.functions.windows import ProcessWindowFunction, WindowFunction
from dagster_unified.operators.keyed import KeyedProcessOperator
from dagster_unified.operators.operator import timer_time
from dagster_unified.operators.state.arrow_list import RowsByKeyColumn, RowsColumn
from dagster_unified.operators.state.backend import Declared, KeyedStateBackend, StateBackend
from dagster_unified.operators.state.columns import TypedColumn
from dagster_unified.operators.state.descriptors import StateDescriptor
from dagster_unified.operators.state.handles import MapStateDescriptor, State
from dagster_unified.operators.time import TimeDomain
from dagster_unified.operators.windows.assigners import (
    MergingWindowAssigner,
    WindowAssigner,
    WindowAssignerContext,
)
from dagster_unified.operators.windows.evictors import Evictor
from dagster_unified.operators.windows.triggers import OnMergeContext, Trigger
from dagster_unified.values import UnfitError

CONTENTS = "window contents"
"""The name of the state with the contents of each window of a key."""

TIMERS = {TimeDomain.EVENT_TIME: "window timers", TimeDomain.PROCESSING_TIME: "window clock timers"}
"""The names of the states with the windows that a timer of a key is for."""


@dataclass(frozen=True)
class Windowing:
    """A windowed stream as its author declared it.

    A window holds its elements, or what `reduce` or `aggregate` computes from them.
    """

    assigner: WindowAssigner[Any, Any]
    trigger: Trigger[Any, Any]
    element_type: Any
    evictor: Evictor[Any, Any] | None = None
    lateness: int = 0
    """Milliseconds for which a window stays after its end."""
    late_tag: OutputTag[Any] | None = None
    reduce: Any = None
    built_in: tuple[str, str | int | None] | None = None
    """The kind and the field of the library's combination that `reduce` is, if it is one."""
    aggregate: AggregateFunction[Any, Any, Any] | None = None
    accumulator_type: Any = None
    function: ProcessWindowFunction[Any, Any, Any, Any] | WindowFunction[Any, Any, Any, Any] | None = None
    only_registers_end: bool = field(init=False)
    """The trigger's. A class that is sent to a worker by value loses an attribute that equals its base's."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "only_registers_end", self.trigger.only_registers_end)

    @property
    def takes_runs(self) -> bool:
        """Whether elements that follow one another go into a window at once: nothing happens before its end."""
        assigner = self.assigner
        if self.evictor is not None or not self.only_registers_end:
            return False
        gap = assigner.fixed_gap() if isinstance(assigner, MergingWindowAssigner) else None
        return assigner.panes() is not None or gap is not None

    def describe(self) -> str:
        """One line for plans."""
        parts = [self.assigner.describe()]
        if type(self.trigger) is not type(self.assigner.get_default_trigger()):
            parts.append(type(self.trigger).__name__)
        if self.evictor is not None:
            parts.append(type(self.evictor).__name__)
        if self.lateness:
            parts.append(f"allowed lateness {self.lateness} ms")
        return ", ".join([*parts, self._contents_kind()])

    def _contents_kind(self) -> str:
        if self.evictor is not None:
            return "all elements"
        if self.aggregate is not None:
            return "aggregated"
        return "all elements" if self.reduce is None else "reduced"

    @property
    def suspect(self) -> Any:
        """The author's function to which an error is traced."""
        for function, method in ((self.function, "process"), (self.aggregate, "add"), (self.reduce, "reduce")):
            if function is not None:
                return getattr(function, method, function)
        return self.trigger.on_element

    @property
    def wrapped_functions(self) -> tuple[Any, ...]:
        return (self.assigner, self.trigger, self.evictor, self.reduce, self.aggregate, self.function)

    @property
    def drops_late_records(self) -> bool:
        """Whether a record can be too late for all its windows."""
        return self.assigner.is_event_time

    @property
    def late_tags(self) -> tuple[OutputTag[Any] | None, ...]:
        """Where late records go, for each input."""
        return (self.late_tag,)

    @property
    def functions(self) -> list[Function]:
        """The functions that are opened and closed."""
        return [f for f in (self.reduce, self.aggregate, self.function) if isinstance(f, Function)]


class Contents(ABC):
    """How elements are added to a window, and what its function gets."""

    stored_type: Any
    """The contents of one window."""

    starts_from_nothing: ClassVar[bool] = False
    """Whether no elements have a result, too."""

    @abstractmethod
    def add(self, contents: Any, record: Any, timestamp: int | None) -> Any:
        """A window's contents with one more element."""

    @abstractmethod
    def add_all(self, contents: Any, records: Sequence[Any]) -> Any:
        """A window's contents with some more elements."""

    @abstractmethod
    def combined(self, parts: list[Any]) -> Any:
        """The contents of merged windows together."""

    @abstractmethod
    def empty(self) -> Any:
        """The contents of a window that was purged and stays."""

    @abstractmethod
    def is_empty(self, contents: Any) -> bool:
        """Whether a window is empty, so that its function is not called. Flink: `WindowOperator.onEventTime`."""

    @abstractmethod
    def elements(self, contents: Any) -> Iterable[Any]:
        """The elements that the window's function gets."""


class Elements(Contents):
    """All elements, in the order in which they came."""

    def __init__(self, element_type: Any) -> None:
        self.stored_type = list[element_type]

    def add(self, contents: Any, record: Any, timestamp: int | None) -> Any:
        if contents is None:
            return [record]
        contents.append(record)
        return contents

    def add_all(self, contents: Any, records: Sequence[Any]) -> Any:
        if contents is None:
            return list(records)
        contents += records
        return contents

    def combined(self, parts: list[Any]) -> Any:
        if not parts:
            return []
        whole = parts[0]
        for more in parts[1:]:
            whole += more
        return whole

    def empty(self) -> Any:
        return []

    def is_empty(self, contents: Any) -> bool:
        return contents is None or len(contents) == 0

    def elements(self, contents: Any) -> Iterable[Any]:
        whole: Iterable[Any] = contents
        return whole


class _OneValue(Contents):
    """One value that an author's function computes from the elements; it is state of a declared type."""

    def __init__(
        self,
        spec: Windowing,
        where: str,
        state: KeyedStateBackend,
        what: str,
        python: Any,
        by_field: FieldFold | None,
    ) -> None:
        self.stored_type = python | None
        self._by_field = by_field
        self._spec, self._where, self._look = spec, where, state.look
        self._declared = Declared(what, "", python)
        self._mutable = self._declared.fit.mutable
        self._form, self._refuse = self._declared.fit.normal, partial(state.normal, self._declared)
        self._merge = self._declared.fit.fold("function(combined, value)")

    def _normal(self, value: Any) -> Any:
        try:
            return self._form(value)
        except UnfitError:
            return self._refuse(value)

    def _watched(self, contents: Any) -> Any:
        """Return the contents, and check them again later where they can be changed."""
        if self._mutable:
            self._look(self._declared, contents)
        return contents

    def _folded(self, contents: Any, records: Sequence[Any]) -> Any:
        """The contents with some more elements, folded in columns; None where the function has to."""
        if self._by_field is None or not isinstance(records, Rows):
            return None
        folded = self._by_field.one(records, contents)
        return None if folded is None else self._watched(folded)

    def _merged(self, function: Callable[[Any, Any], Any], parts: list[Any]) -> Any:
        return self._watched(self._merge(parts[0], parts[1:], function, self._normal)) if parts else None

    def _failed(self, error: BaseException, record: Any) -> Exception:
        return user_failure(error, self._where, self._spec.suspect, record)

    def empty(self) -> Any:
        return None

    def is_empty(self, contents: Any) -> bool:
        return contents is None


class Reduced(_OneValue):
    """The elements, reduced by a function."""

    def __init__(self, spec: Windowing, where: str, state: KeyedStateBackend, by_field: FieldFold | None) -> None:
        super().__init__(spec, where, state, "the reduced value of a window", spec.element_type, by_field)
        self._reduce = getattr(spec.reduce, "reduce", spec.reduce)

    def add(self, contents: Any, record: Any, timestamp: int | None) -> Any:
        return (
            record if contents is None else self._watched(self._merge(contents, (record,), self._reduce, self._normal))
        )

    def add_all(self, contents: Any, records: Sequence[Any]) -> Any:
        folded = self._folded(contents, records)
        if folded is not None:
            return folded
        rest = iter(records)
        try:
            return self._watched(
                self._merge(next(rest) if contents is None else contents, rest, self._reduce, self._normal)
            )
        except RAISED as error:
            raise self._failed(error, records[len(records) - length_hint(rest) - 1]) from error

    def combined(self, parts: list[Any]) -> Any:
        return self._merged(self._reduce, parts)

    def elements(self, contents: Any) -> Iterable[Any]:
        return [contents]

    def folded(self, elements: list[Any]) -> list[Any]:
        """The one value of some elements, as a list."""
        return [self._merge(elements[0], elements[1:], self._reduce, self._normal)]


class Aggregated(_OneValue):
    """The elements' accumulator."""

    starts_from_nothing = True

    def __init__(self, spec: Windowing, where: str, state: KeyedStateBackend, by_field: FieldFold | None) -> None:
        super().__init__(spec, where, state, "the accumulator of a window", spec.accumulator_type, by_field)
        assert spec.aggregate is not None
        self._function = spec.aggregate
        self._add = self._declared.fit.fold("function(value, combined)")

    def _begun(self, contents: Any) -> Any:
        return self._normal(self._function.create_accumulator()) if contents is None else contents

    def _added(self, contents: Any, records: Iterable[Any]) -> Any:
        return self._add(self._begun(contents), records, self._function.add, self._normal)

    def add(self, contents: Any, record: Any, timestamp: int | None) -> Any:
        return self._watched(self._added(contents, (record,)))

    def add_all(self, contents: Any, records: Sequence[Any]) -> Any:
        rest: Iterator[Any] | None = None
        try:
            begun = self._begun(contents)
            folded = self._folded(begun, records)
            if folded is not None:
                return folded
            rest = iter(records)  # which makes them, where they are still in columns
            return self._watched(self._added(begun, rest))
        except RAISED as error:
            added = 0 if rest is None else len(records) - length_hint(rest)
            raise self._failed(error, records[max(0, added - 1)]) from error

    def combined(self, parts: list[Any]) -> Any:
        return self._merged(self._function.merge, parts)

    def elements(self, contents: Any) -> Iterable[Any]:
        return [self._function.get_result(contents)]

    def folded(self, elements: list[Any]) -> list[Any]:
        """The one result of some elements, as a list."""
        return [self._function.get_result(self._added(None, elements))]


class Evicted(Elements):
    """All elements with their event times; an evictor drops some before or after the function sees them.

    A reduce or an aggregation runs only after that.
    """

    def __init__(self, spec: Windowing, value: Reduced | Aggregated | None) -> None:
        element: Any = spec.element_type
        super().__init__(tuple[element, int | None])
        self._evictor, self._value = spec.evictor, value

    def add(self, contents: Any, record: Any, timestamp: int | None) -> Any:
        return super().add(contents, (record, timestamp), timestamp)

    def before(self, contents: Any, window: Any) -> Any:
        """The contents that the function sees."""
        assert self._evictor is not None
        return self._evictor.evict_before(contents, window)

    def after(self, contents: Any, window: Any) -> Any:
        """The elements that stay once the function has seen the contents."""
        assert self._evictor is not None
        return list(self._evictor.evict_after(contents, window))

    def elements(self, contents: Any) -> Iterable[Any]:
        elements = [record for record, _ in contents]
        if self._value is None or not (elements or self._value.starts_from_nothing):
            return elements
        return self._value.folded(elements)


def contents_of(spec: Windowing, where: str, state: KeyedStateBackend, by_field: FieldFold | None = None) -> Contents:
    """The contents of a stream's windows; `by_field` folds elements that are read in columns."""
    value: Reduced | Aggregated | None = None
    if spec.aggregate is not None:
        value = Aggregated(spec, where, state, by_field)
    elif spec.reduce is not None:
        value = Reduced(spec, where, state, by_field)
    if spec.evictor is not None:
        return Evicted(spec, value)
    return Elements(spec.element_type) if value is None else value


class WindowTimers:
    """The timers of the current key's windows, over those of the key: each notes the windows that it is for."""

    def __init__(self, operator: KeyedProcessOperator, window_type: Any) -> None:
        self._operator = operator
        windows: Any = list.__class_getitem__(window_type)
        for name in TIMERS.values():
            operator.state.register(MapStateDescriptor(name, int, windows))

    def register(self, window: Any, timestamp: int, domain: TimeDomain) -> None:
        waiting = self._operator.state.current.setdefault(TIMERS[domain], {})
        windows = waiting.get(timestamp)
        if windows is None:
            waiting[timestamp] = [window]
            if domain is TimeDomain.EVENT_TIME:
                self._operator.register_event_time_timer(timestamp)
            else:
                self._operator.register_processing_time_timer(timestamp)
        elif window not in windows:
            windows.append(window)

    def delete(self, window: Any, timestamp: int, domain: TimeDomain) -> None:
        windows = (self._operator.state.current.get(TIMERS[domain]) or {}).get(timestamp)
        if windows is None or window not in windows:
            return
        windows.remove(window)
        if not windows:
            remove_entry(self._operator.state, TIMERS[domain], timestamp)
            if domain is TimeDomain.EVENT_TIME:
                self._operator.delete_event_time_timer(timestamp)
            else:
                self._operator.delete_processing_time_timer(timestamp)

    def take(self, timestamp: int, domain: TimeDomain) -> Sequence[Any]:
        """Return the windows of a timer that has fired, and forget it."""
        waiting = self._operator.state.current.get(TIMERS[domain])
        windows = waiting.get(timestamp) if waiting else None
        remove_entry(self._operator.state, TIMERS[domain], timestamp)
        return windows or ()


def remove_entry(state: KeyedStateBackend, name: str, entry: Any) -> None:
    """Remove an entry from a map of the current key, and the map where it was the last."""
    entries = state.current.get(name)
    if entries:
        entries.pop(entry, None)
    if entries is not None and not len(entries):
        state.current.pop(name, None)


class WindowScope(StateBackend):
    """State of one window of the current key: each state is a map by window in the key's own state."""

    def __init__(self, operator: KeyedProcessOperator, window_type: Any, prefix: str) -> None:
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
        self._operator.state.register(_StateByWindow(self.name(descriptor.name), self._window_type, descriptor))

    def name(self, name: str) -> str:
        """A state's name among the key's."""
        return f"{self._prefix} {name}"

    @property
    def of_key(self) -> dict[str, Any]:
        return self._operator.state.current


class _StateByWindow(MapStateDescriptor[Any, Any]):
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
        return isinstance(other, _StateByWindow) and self._of_window.stores_as(other._of_window)

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
        by_window = self._scope.of_key.get(self._scope.name(name))
        return by_window.get(self._scope.window) if by_window else None

    def __setitem__(self, name: str, value: Any) -> None:
        self._scope.of_key.setdefault(self._scope.name(name), {})[self._scope.window] = value

    def setdefault(self, name: str, value: Any) -> Any:
        present = self.get(name)
        if present is None:
            self[name] = present = value
        return present

    def pop(self, name: str, default: Any) -> Any:
        full = self._scope.name(name)
        by_window = self._scope.of_key.get(full)
        if not by_window:
            return default
        value = by_window.pop(self._scope.window, default)
        if not len(by_window):
            self._scope.of_key.pop(full, None)
        return value


class OperatorAssignerContext(WindowAssignerContext):
    """The clock, and the state of the current key."""

    def __init__(self, operator: KeyedProcessOperator, runtime_context: RuntimeContext) -> None:
        self._operator, self._runtime_context = operator, runtime_context

    def get_current_processing_time(self) -> int:
        return self._operator.read_clock()

    def get_runtime_context(self) -> RuntimeContext:
        return self._runtime_context


class OperatorTriggerContext(OnMergeContext):
    """Time, timers and state of the current key and one window."""

    def __init__(self, operator: KeyedProcessOperator, window_type: Any, timers: WindowTimers) -> None:
        self._operator, self._timers = operator, timers
        self._scope = WindowScope(operator, window_type, "trigger")
        self._merged: Sequence[Any] = ()

    def of(self, window: Any, merged: Sequence[Any] = ()) -> OperatorTriggerContext:
        self._scope.window, self._merged = window, merged
        return self

    def get_current_watermark(self) -> int:
        return self._operator.watermark

    def get_current_processing_time(self) -> int:
        return self._operator.read_clock()

    def register_event_time_timer(self, timestamp: int) -> None:
        self._timers.register(self._scope.window, timer_time(timestamp), TimeDomain.EVENT_TIME)

    def register_processing_time_timer(self, timestamp: int) -> None:
        self._timers.register(self._scope.window, timer_time(timestamp), TimeDomain.PROCESSING_TIME)

    def delete_event_time_timer(self, timestamp: int) -> None:
        self._timers.delete(self._scope.window, timestamp, TimeDomain.EVENT_TIME)

    def delete_processing_time_timer(self, timestamp: int) -> None:
        self._timers.delete(self._scope.window, timestamp, TimeDomain.PROCESSING_TIME)

    def get_partitioned_state(self, descriptor: StateDescriptor[Any]) -> Any:
        return self._scope.bind(descriptor)

    def early_results(self) -> bool:
        return self._operator.options.incremental_updates

    def merge_partitioned_state(self, descriptor: StateDescriptor[Any]) -> None:
        scope, into = self._scope, self._scope.window
        state: State = scope.bind(descriptor)  # first: what is there from before the job started has no type yet
        values = []
        for window in self._merged:
            scope.window = window
            value = scope.current.pop(descriptor.name, None)
            if value is not None:
                values.append(value)
        scope.window = into
        if not values:
            return
        try:
            state.merge(values)
        except UnsupportedError as error:
            raise UnsupportedError(f"{self._operator.where}: {error}") from error


class OperatorFunctionContext(ProcessWindowFunction.Context[Any]):
    """Time, state and side outputs of the current key and one window."""

    def __init__(self, operator: KeyedProcessOperator, window_type: Any) -> None:
        self._operator = operator
        self._scope = WindowScope(operator, window_type, "window")
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
