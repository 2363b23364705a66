"""What happens while a pipeline runs, as one stream of events that a terminal, Dagster and tests all listen to.

Core code never prints; it tells an observer.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from dagster_unified.engine.batch.store import Manifest


@dataclass(frozen=True)
class StageStarted:
    """A stage begins. `reason` is set where it is recomputed for a later stage."""

    stage: str
    number: int
    of: int
    reason: str = ""


@dataclass(frozen=True)
class StageFinished:
    """A stage's output is committed."""

    stage: str
    number: int
    of: int
    manifest: Manifest
    reason: str = ""


Event = StageStarted | StageFinished
Observer = Callable[[Event], None]


def nobody(event: Event) -> None:
    """The observer that does not care."""
