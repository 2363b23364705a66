"""The functions of windows, and their contexts."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable
from typing import Generic

from dagster_unified.operators.functions.base import Function, KeyedStateStore, OutputTag, SideOutput
from dagster_unified.operators.functions.type_variables import In, Key, Out, R, Win, WinOut


class WindowFunction(Function, ABC, Generic[In, Out, Key, Win]):
    """Turns a window's elements into results (Flink: *Windows*).

    In BATCH it is called at the end of a key, once per window; in STREAMING whenever the window's trigger fires.

    Examples:
        >>> class Listed(WindowFunction[Sale, str, str, TimeWindow]):
        ...     def apply(self, key: str, window: TimeWindow, inputs: list[Sale]) -> list[str]:
        ...         return [f"{key}: {[sale.amount for sale in inputs]}"]
        >>> days = timed.key_by("shop").window(TumblingEventTimeWindows.of(timedelta(days=1)))
        >>> sorted(collect(days.apply(Listed())))
        ['north: [3, 5]', 'south: [4]']
    """

    @abstractmethod
    def apply(self, key: Key, window: Win, inputs: Iterable[In]) -> Iterable[Out | SideOutput] | None:
        """The results; `inputs` are the window's elements, or the one value that they were reduced or aggregated to."""


class ProcessWindowFunction(Function, ABC, Generic[In, Out, Key, Win]):
    """Turns a window's elements into results, with access to time, state and side outputs (Flink: *Windows*).

    In BATCH it is called at the end of a key, once per window; in STREAMING whenever the window's trigger fires.

    Examples:
        >>> class Total(ProcessWindowFunction[Sale, str, str, TimeWindow]):
        ...     def process(self, key: str, context: ProcessWindowFunction.Context, elements: list[Sale]) -> list[str]:
        ...         hour = datetime.fromtimestamp(context.window().start / 1000, timezone.utc).hour
        ...         return [f"{key} from {hour}: {sum(sale.amount for sale in elements)}"]
        >>> hours = timed.key_by("shop").window(TumblingEventTimeWindows.of(timedelta(hours=1)))
        >>> sorted(collect(hours.process(Total())))
        ['north from 10: 5', 'north from 9: 3', 'south from 9: 4']
    """

    class Context(ABC, Generic[WinOut]):
        """The context that `process` and `clear` get."""

        @abstractmethod
        def window(self) -> WinOut:
            """The window."""

        @abstractmethod
        def current_processing_time(self) -> int:
            """The clock, in milliseconds since the epoch."""

        @abstractmethod
        def current_watermark(self) -> int:
            """Event time, in milliseconds since the epoch."""

        @abstractmethod
        def window_state(self) -> KeyedStateStore:
            """State of this key and window; clear it in `clear`."""

        @abstractmethod
        def global_state(self) -> KeyedStateStore:
            """State of this key."""

        @abstractmethod
        def output(self, tag: OutputTag[R], value: R) -> None:
            """Emit to a side output."""

    @abstractmethod
    def process(self, key: Key, context: Context[Win], elements: Iterable[In]) -> Iterable[Out | SideOutput] | None:
        """The results; `elements` are the window's, or the one value that they were reduced or aggregated to."""

    def clear(self, context: Context[Win]) -> None:
        """Called when the window is gone: clear its `window_state()`."""
