"""How an `IterationListener` is called, and what it is given: where it emits to, and the key it is called for."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from dagster_unified.errors import UnsupportedError
from dagster_unified.operators.functions.base import OutputTag
from dagster_unified.operators.functions.iterations import EpochCollector, EpochContext
from dagster_unified.operators.program.blocks import Collector
from dagster_unified.records import shorten


class Emitting(EpochContext, EpochCollector[Any]):
    """Puts what a listener emits into an operator's output, with no event time; on a keyed stream it has a key."""

    def __init__(self, out: Collector, *key: Any) -> None:
        self.out, self._key = out, key

    def collect(self, value: Any) -> None:
        self.out.emit(value, None)

    def output(self, tag: OutputTag[Any], value: Any) -> None:
        self.out.emit_side(tag, value, None)

    def get_current_key(self) -> Any:
        if not self._key:
            raise UnsupportedError(
                "there is no key; call key_by before the operator, and give it a KeyedProcessFunction, or a function"
                " that overrides open()"
            )
        return self._key[0]


def tell(method: Callable[..., object], *what: int, emitted: Emitting) -> None:
    """Calls a listener's method; raises `TypeError` where it returns what it should emit, which would be lost."""
    returned = method(*what, emitted, emitted)
    if returned is not None:
        raise TypeError(
            f"{method.__name__} returned {shorten(returned)}, which goes nowhere; emit with collector.collect(record)"
        )
