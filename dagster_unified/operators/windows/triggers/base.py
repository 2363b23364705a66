"""What every trigger is, and what it says of itself."""

from __future__ import annotations

from abc import ABC, abstractmethod
from enum import Enum
from typing import Any, Generic, TypeAlias

from dagster_unified.errors import UnsupportedError
from dagster_unified.operators.functions.type_variables import In, Win
from dagster_unified.operators.windows.triggers import context
from dagster_unified.operators.windows.triggers.context import TriggerContext
from dagster_unified.operators.windows.window import Window


class TriggerResult(Enum):
    """What is to happen with a window; there is an example at `Trigger`."""

    CONTINUE = (False, False)
    FIRE = (True, False)
    PURGE = (False, True)
    FIRE_AND_PURGE = (True, True)

    def is_fire(self) -> bool:
        """Whether the window's function is called."""
        return self.value[0]

    def is_purge(self) -> bool:
        """Whether the window's elements are dropped."""
        return self.value[1]


class Firing(Enum):
    """What decides when a trigger fires; there is an example at `Trigger`.

    From it follows whether BATCH and STREAMING give the same results.
    """

    UNDECLARED = "not declared"
    """The trigger does not say. The lint notes it."""

    EVENT_TIME = "event time"
    """Event time alone, and once for each window, but for late elements: both modes give the same."""

    EARLY = "event time, also before the end"
    """In STREAMING also before a window's end; in BATCH there are no early results."""

    ELEMENTS = "elements"
    """The elements that have come, and so their order."""

    CLOCK = "processing time"
    """The clock."""


class Trigger(ABC, Generic[In, Win]):
    """Says when a window gives its result (Flink: *Windows*, "Triggers").

    A trigger says of itself what follows from its code, so that the lint and the operator need not know it. This is not
    inherited: a subclass may do something else, and says it again where it does not. In BATCH event-time timers fire at
    the end of a key, in STREAMING as the watermark passes them.

    Examples:
        >>> class OnLarge(Trigger[Sale, TimeWindow]):
        ...     firing = Firing.ELEMENTS
        ...     def on_element(self, element, timestamp, window, ctx):
        ...         return TriggerResult.FIRE if element.amount > 3 else TriggerResult.CONTINUE
        ...     def on_event_time(self, time, window, ctx):
        ...         return TriggerResult.CONTINUE
        ...     def on_processing_time(self, time, window, ctx):
        ...         return TriggerResult.CONTINUE
        ...     def clear(self, window, ctx):
        ...         pass
        >>> day = timed.window_all(TumblingEventTimeWindows.of(timedelta(days=1)))
        >>> [sale.amount for sale in collect(day.trigger(OnLarge()).sum("amount"), "STREAMING")]
        [7, 12]
    """

    TriggerContext: TypeAlias = context.TriggerContext
    OnMergeContext: TypeAlias = context.OnMergeContext

    firing: Firing = Firing.UNDECLARED
    """What decides when it fires."""

    only_registers_end: bool = False
    """Whether `on_element` does no more than register an event-time timer at a window's end that is still to come.

    Then elements are added to a window many at a time, and `on_element` is not called for them.
    """

    def __init_subclass__(cls, **named: Any) -> None:
        super().__init_subclass__(**named)
        cls.firing = cls.__dict__.get("firing", Firing.UNDECLARED)
        cls.only_registers_end = cls.__dict__.get("only_registers_end", False)

    @abstractmethod
    def on_element(self, element: In, timestamp: int | None, window: Win, ctx: context.TriggerContext) -> TriggerResult:
        """An element has come into a window."""

    @abstractmethod
    def on_event_time(self, time: int, window: Win, ctx: context.TriggerContext) -> TriggerResult:
        """An event-time timer of the window has come; also called when its time to be cleaned up has."""

    @abstractmethod
    def on_processing_time(self, time: int, window: Win, ctx: context.TriggerContext) -> TriggerResult:
        """A processing-time timer of the window has come; also called when its time to be cleaned up has."""

    def can_merge(self) -> bool:
        """Whether it can be used with windows that merge."""
        return False

    def on_merge(self, window: Win, ctx: context.OnMergeContext) -> None:
        """Windows have become one: their state and timers are to become its."""
        raise UnsupportedError(
            f"{type(self).__name__} does not work with windows that merge; give it can_merge() and on_merge()"
        )

    @abstractmethod
    def clear(self, window: Win, ctx: context.TriggerContext) -> None:
        """The window is gone: timers and state of it are to go."""


class QuietTrigger(Trigger[Any, Window]):
    """Does nothing when a timer comes, unless it says so."""

    def on_event_time(self, time: int, window: Window, ctx: TriggerContext) -> TriggerResult:
        return TriggerResult.CONTINUE

    def on_processing_time(self, time: int, window: Window, ctx: TriggerContext) -> TriggerResult:
        return TriggerResult.CONTINUE
