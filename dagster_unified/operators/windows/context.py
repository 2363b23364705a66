"""The context that a window assigner gets."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING

from dagster_unified.errors import UnsupportedError

if TYPE_CHECKING:
    from dagster_unified.operators.functions.base import RuntimeContext


class WindowAssignerContext(ABC):
    """The context that an assigner gets with an element."""

    @abstractmethod
    def get_current_processing_time(self) -> int:
        """The clock, in milliseconds since the epoch."""

    @abstractmethod
    def get_runtime_context(self) -> RuntimeContext:
        """Where it runs, with the state of the element's key."""


class ByEventTime(WindowAssignerContext):
    """For windows by event time alone, which are assigned without running an operator."""

    def get_current_processing_time(self) -> int:
        raise UnsupportedError("windows by event time do not read the clock; use the element's timestamp")

    def get_runtime_context(self) -> RuntimeContext:
        raise UnsupportedError("windows by event time have no state; use the element's timestamp")
