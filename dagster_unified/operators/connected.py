"""Operators of two inputs of different types.

One function sees both, with state and timers that they share where they are keyed. The two streams are united as
records of `Either`, so that an engine knows operators of one input only, and one key's records of both come together,
in the order of time in BATCH.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

from dagster_unified.operators.functions.base import (
    KeyedProcessFunction,
    ProcessFunction,
    Wrapping,
)
from dagster_unified.operators.keys import key_hash
from dagster_unified.operators.layout import DelegatingKey
from dagster_unified.records import UNITED, type_name


def either_type(first: Any, second: Any) -> Any:
    """The record of two united streams: which one it is from (1 or 2), and its record there."""
    made = _either(first, second)
    setattr(made, UNITED, f"{type_name(first)} | {type_name(second)}")
    return made


def _either(first: Any, second: Any) -> Any:
    return NamedTuple("Either", [("side", int), ("first", first | None), ("second", second | None)])


class Tag:
    """Wraps a stream's records as `Either`."""

    keeps_form = True
    """Whether what it returns is in normal form where its record is."""

    def __init__(self, either: Any, side: int) -> None:
        self.either, self.side = either, side

    def __call__(self, record: Any) -> Any:
        return self.either(1, record, None) if self.side == 1 else self.either(2, None, record)


def _own(either: Any) -> Any:
    """The record of its own stream in a record of `Either`."""
    return either.first if either.side == 1 else either.second


class OwnKey(NamedTuple):
    """How the key of one stream's records is read, what errors call that, and what plans call the key."""

    get: Callable[[Any], Any]
    where: str
    name: str


class EitherKey(DelegatingKey):
    """The key of a record of `Either`, from that of its own stream."""

    def __init__(self, first: OwnKey, second: OwnKey) -> None:
        self._first, self._second = first.get, second.get
        self._where = {1: first.where, 2: second.where}
        self.__name__ = " | ".join(dict.fromkeys((first.name, second.name)))

    def __call__(self, record: Any) -> Any:
        return self._first(record.first) if record.side == 1 else self._second(record.second)

    def told(self, record: Any) -> tuple[str, Any]:
        return self._where[record.side], _own(record)


_SPREAD = 1024
"""Over how many keys the records of a stream without a key are spread, where the other stream has one."""


class OneSidesKey(DelegatingKey):
    """The key of a record of `Either` where only one of the streams is keyed: `(0, key)`.

    The other stream's records get keys that sort before all of those, so that in BATCH they come first.
    """

    def __init__(self, side: int, own: OwnKey, width: int) -> None:
        self.side, self.get, self.where, self.width = side, own.get, own.where, width
        self.__name__ = own.name

    def __call__(self, record: Any) -> Any:
        own = _own(record)
        if record.side != self.side:
            return (-1 - key_hash(own) % _SPREAD, *[None] * self.width)
        key = self.get(own)
        fields = key if isinstance(key, tuple) else (key,)
        return None if None in fields else (0, *fields)

    def told(self, record: Any) -> tuple[str, Any]:
        return self.where, _own(record)


class _Both(Wrapping):
    """Calls one of two methods of a function, by the side that a record is from."""

    first = second = ""
    """The names of the methods."""

    def __init__(self, function: Any) -> None:
        super().__init__(function)
        self._first, self._second = getattr(function, self.first), getattr(function, self.second)


class CoMap(_Both):
    """A `CoMapFunction` over `Either`."""

    first, second = "map1", "map2"

    def map(self, value: Any) -> Any:
        """As `MapFunction.map`."""
        return self._first(value.first) if value.side == 1 else self._second(value.second)


class CoFlatMap(_Both):
    """A `CoFlatMapFunction` over `Either`."""

    first, second = "flat_map1", "flat_map2"

    def flat_map(self, value: Any) -> Iterable[Any]:
        """As `FlatMapFunction.flat_map`."""
        found: Iterable[Any] = self._first(value.first) if value.side == 1 else self._second(value.second)
        return found


class CoProcess(_Both, ProcessFunction[Any, Any]):
    """A `CoProcessFunction` or a `KeyedCoProcessFunction` over `Either`."""

    first, second = "process_element1", "process_element2"

    def process_element(self, value: Any, ctx: ProcessFunction.Context) -> Iterable[Any] | None:
        found: Iterable[Any] | None = (
            self._first(value.first, ctx) if value.side == 1 else self._second(value.second, ctx)
        )
        return found

    def on_timer(self, timestamp: int, ctx: KeyedProcessFunction.OnTimerContext[Any]) -> Iterable[Any] | None:
        found: Iterable[Any] | None = self.function.on_timer(timestamp, ctx)
        return found
