"""How an author's code gets to Spark's workers: pickled once for a job, and loaded once in a worker or once in a task.

A query's epochs use what was pickled for the first. `by_value.py` says how a value is pickled.
"""

from __future__ import annotations

import functools
import types
import typing
from collections.abc import Callable, Hashable, Iterable
from typing import Any

from dagster_unified.by_value import by_value_bytes, from_bytes
from dagster_unified.engine import environment

T = typing.TypeVar("T")


class Payload:
    """Something that was shipped.

    `load` gives one object per worker, or with `fresh` another one each time: functions that are opened and closed.
    It raises `MissingRequirementError` in a worker that lacks a module, or has other versions than the process that
    shipped it.
    """

    def __init__(self, data: bytes, fresh: bool) -> None:
        self.data, self.fresh = data, fresh
        self.versions = environment.here()

    @classmethod
    def of(cls, value: Any, functions: Iterable[Any]) -> Payload:
        """`functions` are the author's in `value`. Plain ones that keep nothing from call to call are shared."""
        return cls(by_value_bytes(value), any(map(_may_keep, functions)))

    def load(self) -> Any:
        """Return the value that was shipped."""
        environment.check_here(self.versions)
        return from_bytes(self.data) if self.fresh else _once_per_worker(self.data)


def _may_keep(function: Any) -> bool:
    """Return whether a function may remember earlier calls; a plain one is never opened."""
    from dagster_unified.graph.code import changed_by  # where what was shipped is only opened, pyarrow is not loaded

    return function is not None and (not isinstance(function, types.FunctionType) or bool(changed_by(function)))


class Shipments:
    """The payloads of a job, pickled once for each place."""

    def __init__(self) -> None:
        self._values: dict[Hashable, Any] = {}

    def once(self, place: Hashable, make: Callable[[], T]) -> T:
        """Return what `make` gave for this place the first time."""
        if place not in self._values:
            self._values[place] = make()
        value: T = self._values[place]
        return value


def by_value(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function that carries its user code along. Called again in the same worker, it is the same object."""
    return functools.partial(_call, Payload(by_value_bytes(function), fresh=False))


def by_value_afresh(function: Callable[..., Any]) -> Callable[..., Any]:
    """A function that carries its user code along, and is another object at each call: for what a task calls once."""
    return functools.partial(_call, Payload(by_value_bytes(function), fresh=True))


def _call(payload: Payload, *arguments: Any) -> Any:
    return payload.load()(*arguments)


@functools.lru_cache(maxsize=8)
def _once_per_worker(data: bytes) -> Any:
    return from_bytes(data)
