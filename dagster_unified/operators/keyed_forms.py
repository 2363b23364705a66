"""Functions of one record, on a keyed stream: as the keyed process functions that the engines run.

On a keyed stream every function may ask its runtime context for state (Flink: *Working with State*). A function that
may do so runs as the keyed process operator with one of these around it; any other needs no state, and stays a step of
a fused chain.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from dagster_unified.errors import UnsupportedError
from dagster_unified.operators.functions.base import (
    Function,
    KeyedProcessFunction,
    NoTimers,
    OutputTag,
    ProcessFunction,
    RuntimeContext,
    TimerService,
    Wrapping,
)
from dagster_unified.operators.functions.iterations import IterationListener
from dagster_unified.operators.state.backend import KeyedStateBackend


def may_hold_state(function: Any) -> bool:
    """Whether a function may ask for keyed state or timers.

    It can ask for state in `open` only, and timers reach `on_timer` only. One that takes the records of all keys in one
    subtask has no key.
    """
    if isinstance(function, IterationListener) and function.in_one_subtask:
        return False
    overridden = [(Function, "open"), (ProcessFunction, "on_timer")]
    return any(
        isinstance(function, base) and getattr(type(function), name) is not getattr(base, name)
        for base, name in overridden
    )


class KeyedMap(Wrapping, KeyedProcessFunction[Any, Any, Any]):
    """A `MapFunction` with state."""

    def process_element(self, value: Any, ctx: KeyedProcessFunction.Context[Any]) -> Iterable[Any]:
        return (self.function.map(value),)


class KeyedFlatMap(Wrapping, KeyedProcessFunction[Any, Any, Any]):
    """A `FlatMapFunction` with state."""

    def process_element(self, value: Any, ctx: KeyedProcessFunction.Context[Any]) -> Iterable[Any]:
        found: Iterable[Any] = self.function.flat_map(value)
        return found


class KeyedFilter(Wrapping, KeyedProcessFunction[Any, Any, Any]):
    """A `FilterFunction` with state."""

    def process_element(self, value: Any, ctx: KeyedProcessFunction.Context[Any]) -> Iterable[Any]:
        return (value,) if self.function.filter(value) else ()


class KeyedProcess(Wrapping, KeyedProcessFunction[Any, Any, Any]):
    """A `ProcessFunction` with state and timers."""

    def process_element(self, value: Any, ctx: KeyedProcessFunction.Context[Any]) -> Iterable[Any] | None:
        found: Iterable[Any] | None = self.function.process_element(value, ctx)
        return found

    def on_timer(self, timestamp: int, ctx: KeyedProcessFunction.OnTimerContext[Any]) -> Iterable[Any] | None:
        found: Iterable[Any] | None = self.function.on_timer(timestamp, ctx)
        return found


class PartlyKeyed(Wrapping, KeyedProcessFunction[Any, Any, Any]):
    """A function over a keyed stream and one that is not, united as records of `Either`.

    A record of the stream without a key has no keyed state, and there are no timers (Flink: `CoProcessOperator`).
    """

    def __init__(self, function: KeyedProcessFunction[Any, Any, Any], keyed_side: int) -> None:
        super().__init__(function)
        self._keyed_side = keyed_side
        self._state: KeyedStateBackend | None = None

    def open(self, runtime_context: RuntimeContext) -> None:
        self._state = runtime_context.keyed_state
        super().open(runtime_context)

    def process_element(self, value: Any, ctx: KeyedProcessFunction.Context[Any]) -> Iterable[Any] | None:
        if value.side != self._keyed_side:
            assert self._state is not None
            self._state.current = _NO_KEY
        found: Iterable[Any] | None = self.function.process_element(value, _Untimed(ctx))
        return found


class NoKey(dict[str, Any]):
    """The state of a record that has no key: to touch it is an error that says `message`."""

    def __init__(self, message: str) -> None:
        self._message = message

    def _refuse(self, *_: Any) -> Any:
        raise UnsupportedError(self._message)

    get = setdefault = pop = __getitem__ = __setitem__ = __contains__ = _refuse


_NO_KEY = NoKey(
    "a record of a stream without a key has no keyed state; call key_by on both connected streams, or use the state for"
    " the keyed stream's records only"
)


class _Untimed(ProcessFunction.Context, NoTimers):
    """The context of a record, without timers."""

    def __init__(self, context: KeyedProcessFunction.Context[Any]) -> None:
        self._context = context

    def timestamp(self) -> int | None:
        return self._context.timestamp()

    def timer_service(self) -> TimerService:
        return self

    def output(self, tag: OutputTag[Any], value: Any) -> None:
        self._context.output(tag, value)

    def current_processing_time(self) -> int:
        return self._context.timer_service().current_processing_time()

    def current_watermark(self) -> int:
        return self._context.timer_service().current_watermark()


KEYED_FORMS: dict[str, Callable[[Any], KeyedProcessFunction[Any, Any, Any]]] = {
    "map": KeyedMap,
    "flat_map": KeyedFlatMap,
    "filter": KeyedFilter,
    "process": KeyedProcess,
}
"""What runs a function with state, by the operator that it was given to."""
