"""What a window holds: its elements, or what they are reduced or aggregated to.

Knows neither windows nor time. What a window holds is None where nothing has come.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from operator import length_hint
from typing import Any, ClassVar

from dagster_unified.operators.failures import RAISED, user_failure
from dagster_unified.operators.state.backend import Declared, KeyedStateBackend
from dagster_unified.operators.windows.spec import Windowing
from dagster_unified.values import UnfitError


class Contents(ABC):
    """How elements are added to a window, and what its function is given."""

    stored_type: Any
    """What one window holds."""

    starts_from_nothing: ClassVar[bool] = False
    """Whether no elements have a result, too."""

    @abstractmethod
    def add(self, held: Any, record: Any, timestamp: int | None) -> Any:
        """What a window holds with one more element."""

    @abstractmethod
    def add_all(self, held: Any, records: Sequence[Any]) -> Any:
        """What a window holds with some more elements."""

    @abstractmethod
    def combined(self, held: list[Any]) -> Any:
        """What merged windows hold together."""

    @abstractmethod
    def empty(self) -> Any:
        """What a window holds that was purged and stays."""

    @abstractmethod
    def is_empty(self, held: Any) -> bool:
        """Whether a window holds nothing, so that its function is not called. Flink: `WindowOperator.onEventTime`."""

    @abstractmethod
    def elements(self, held: Any) -> Iterable[Any]:
        """What the window's function is given."""


class Elements(Contents):
    """All elements, in the order in which they came."""

    def __init__(self, element_type: Any) -> None:
        self.stored_type = list[element_type]

    def add(self, held: Any, record: Any, timestamp: int | None) -> Any:
        if held is None:
            return [record]
        held.append(record)
        return held

    def add_all(self, held: Any, records: Sequence[Any]) -> Any:
        if held is None:
            return list(records)
        held += records
        return held

    def combined(self, held: list[Any]) -> Any:
        if not held:
            return []
        whole = held[0]
        for more in held[1:]:
            whole += more
        return whole

    def empty(self) -> Any:
        return []

    def is_empty(self, held: Any) -> bool:
        return held is None or len(held) == 0

    def elements(self, held: Any) -> Iterable[Any]:
        whole: Iterable[Any] = held
        return whole


class _OneValue(Contents):
    """One value, which an author's function computes from the elements, and which is state of a declared type."""

    def __init__(self, spec: Windowing, where: str, state: KeyedStateBackend, what: str, python: Any) -> None:
        self.stored_type = python | None
        self._spec, self._where, self._look = spec, where, state.look
        self._declared = Declared(what, "", python)
        self._mutable = self._declared.fit.mutable
        self._form, self._refuse = self._declared.fit.normal, partial(state.normal, self._declared)
        self._merge = self._declared.fit.fold("function(held, value)")

    def _normal(self, value: Any) -> Any:
        """The normal form of a value; raises `StateError` for one that does not fit."""
        try:
            return self._form(value)
        except UnfitError:
            return self._refuse(value)

    def _kept(self, held: Any) -> Any:
        """Passes on what a window holds now, which is looked at again where it can be changed."""
        if self._mutable:
            self._look(self._declared, held)
        return held

    def _merged(self, function: Callable[[Any, Any], Any], held: list[Any]) -> Any:
        return self._kept(self._merge(held[0], held[1:], function, self._normal)) if held else None

    def _failed(self, error: BaseException, record: Any) -> Exception:
        return user_failure(error, self._where, self._spec.suspect, record)

    def empty(self) -> Any:
        return None

    def is_empty(self, held: Any) -> bool:
        return held is None


class Reduced(_OneValue):
    """The elements, reduced by a function."""

    def __init__(self, spec: Windowing, where: str, state: KeyedStateBackend) -> None:
        super().__init__(spec, where, state, "the reduced value of a window", spec.element_type)
        self._reduce = getattr(spec.reduce, "reduce", spec.reduce)

    def add(self, held: Any, record: Any, timestamp: int | None) -> Any:
        return record if held is None else self._kept(self._merge(held, (record,), self._reduce, self._normal))

    def add_all(self, held: Any, records: Sequence[Any]) -> Any:
        rest = iter(records)
        try:
            return self._kept(self._merge(next(rest) if held is None else held, rest, self._reduce, self._normal))
        except RAISED as error:
            raise self._failed(error, records[len(records) - length_hint(rest) - 1]) from error

    def combined(self, held: list[Any]) -> Any:
        return self._merged(self._reduce, held)

    def elements(self, held: Any) -> Iterable[Any]:
        return [held]

    def folded(self, elements: list[Any]) -> list[Any]:
        """The one value of some elements."""
        return [self._merge(elements[0], elements[1:], self._reduce, self._normal)]


class Aggregated(_OneValue):
    """The elements' accumulator."""

    starts_from_nothing = True

    def __init__(self, spec: Windowing, where: str, state: KeyedStateBackend) -> None:
        super().__init__(spec, where, state, "the accumulator of a window", spec.accumulator_type)
        assert spec.aggregate is not None
        self._function = spec.aggregate
        self._add = self._declared.fit.fold("function(value, held)")

    def _added(self, held: Any, records: Iterable[Any]) -> Any:
        if held is None:
            held = self._normal(self._function.create_accumulator())
        return self._add(held, records, self._function.add, self._normal)

    def add(self, held: Any, record: Any, timestamp: int | None) -> Any:
        return self._kept(self._added(held, (record,)))

    def add_all(self, held: Any, records: Sequence[Any]) -> Any:
        rest = iter(records)
        try:
            return self._kept(self._added(held, rest))
        except RAISED as error:
            raise self._failed(error, records[max(0, len(records) - length_hint(rest) - 1)]) from error

    def combined(self, held: list[Any]) -> Any:
        return self._merged(self._function.merge, held)

    def elements(self, held: Any) -> Iterable[Any]:
        return [self._function.get_result(held)]

    def folded(self, elements: list[Any]) -> list[Any]:
        """The one result of some elements."""
        return [self._function.get_result(self._added(None, elements))]


class Evicted(Elements):
    """All elements with their event times, of which an evictor drops some before or after the function sees them.

    A window that is reduced or aggregated is so only then.
    """

    def __init__(self, spec: Windowing, value: Reduced | Aggregated | None) -> None:
        element: Any = spec.element_type
        super().__init__(tuple[element, int | None])
        self._evictor, self._value = spec.evictor, value

    def add(self, held: Any, record: Any, timestamp: int | None) -> Any:
        return super().add(held, (record, timestamp), timestamp)

    def before(self, held: Any, window: Any) -> Any:
        """What the function sees, and what stays."""
        assert self._evictor is not None
        return self._evictor.evict_before(held, window)

    def after(self, kept: Any, window: Any) -> Any:
        """What stays once the function has seen it."""
        assert self._evictor is not None
        return list(self._evictor.evict_after(kept, window))

    def elements(self, held: Any) -> Iterable[Any]:
        elements = [record for record, _ in held]
        if self._value is None or not (elements or self._value.starts_from_nothing):
            return elements
        return self._value.folded(elements)


def contents_of(spec: Windowing, where: str, state: KeyedStateBackend) -> Contents:
    """What the windows of a stream hold."""
    value: Reduced | Aggregated | None = None
    if spec.aggregate is not None:
        value = Aggregated(spec, where, state)
    elif spec.reduce is not None:
        value = Reduced(spec, where, state)
    if spec.evictor is not None:
        return Evicted(spec, value)
    return Elements(spec.element_type) if value is None else value
