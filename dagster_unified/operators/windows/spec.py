"""What an author says of a windowed stream."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from dagster_unified.operators.functions.base import AggregateFunction, Function, OutputTag
from dagster_unified.operators.functions.windows import ProcessWindowFunction, WindowFunction
from dagster_unified.operators.time import TimeDomain
from dagster_unified.operators.windows.assigners import WindowAssigner
from dagster_unified.operators.windows.evictors import Evictor
from dagster_unified.operators.windows.triggers import Trigger

CONTENTS = "window contents"
"""The name of the state that has what each window of a key holds."""

TIMERS = {TimeDomain.EVENT_TIME: "window timers", TimeDomain.PROCESSING_TIME: "window clock timers"}
"""The names of the states that have the windows for which a timer of a key is."""


@dataclass(frozen=True)
class Windowing:
    """What an author says of a windowed stream.

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
    aggregate: AggregateFunction[Any, Any, Any] | None = None
    accumulator_type: Any = None
    function: ProcessWindowFunction[Any, Any, Any, Any] | WindowFunction[Any, Any, Any, Any] | None = None
    only_registers_end: bool = field(init=False)
    """What the trigger says. A class that is sent to a worker by value loses what equals its base's attribute."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "only_registers_end", self.trigger.only_registers_end)

    def describe(self) -> str:
        """One line for plans."""
        parts = [self.assigner.describe()]
        if type(self.trigger) is not type(self.assigner.get_default_trigger()):
            parts.append(type(self.trigger).__name__)
        if self.evictor is not None:
            parts.append(type(self.evictor).__name__)
        if self.lateness:
            parts.append(f"allowed lateness {self.lateness} ms")
        return ", ".join([*parts, self._held()])

    def _held(self) -> str:
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
        """The author's."""
        return (self.assigner, self.trigger, self.evictor, self.reduce, self.aggregate, self.function)

    @property
    def drops_late_records(self) -> bool:
        """Whether a record can come too late for all its windows."""
        return self.assigner.is_event_time

    @property
    def late_tags(self) -> tuple[OutputTag[Any] | None, ...]:
        """Where late records go, for each input."""
        return (self.late_tag,)

    @property
    def functions(self) -> list[Function]:
        """Those that have to be opened and closed."""
        return [f for f in (self.reduce, self.aggregate, self.function) if isinstance(f, Function)]
