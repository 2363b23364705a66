"""The context that a trigger gets: time, timers and state of one key and window."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any

from dagster_unified.operators.functions.type_variables import R
from dagster_unified.operators.state.descriptors import StateDescriptor


class TriggerContext(ABC):
    """Time, timers and state of the key and window at hand."""

    @abstractmethod
    def get_current_watermark(self) -> int:
        """Event time, in milliseconds since the epoch; in BATCH `MIN_TIMESTAMP` until the key's end."""

    @abstractmethod
    def get_current_processing_time(self) -> int:
        """The clock, in milliseconds since the epoch."""

    @abstractmethod
    def register_event_time_timer(self, timestamp: int) -> None:
        """Calls `on_event_time` for this window once the watermark is there."""

    @abstractmethod
    def register_processing_time_timer(self, timestamp: int) -> None:
        """Calls `on_processing_time` for this window once the clock is there."""

    @abstractmethod
    def delete_event_time_timer(self, timestamp: int) -> None:
        """Takes a timer back."""

    @abstractmethod
    def delete_processing_time_timer(self, timestamp: int) -> None:
        """Takes a timer back."""

    @abstractmethod
    def get_partitioned_state(self, descriptor: StateDescriptor[R]) -> R:
        """State of this key and window."""

    def early_results(self) -> bool:
        """Whether results before a window's end are wanted.

        In STREAMING they are, in BATCH not (`execution.incremental-updates`).
        """
        return True


class OnMergeContext(TriggerContext):
    """The context that `on_merge` gets, with the state of the windows that were merged."""

    @abstractmethod
    def merge_partitioned_state(self, descriptor: StateDescriptor[Any]) -> None:
        """Brings reducing, aggregating or list state of the merged windows together in the new one."""
