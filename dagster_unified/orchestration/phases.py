"""The phase that a streaming run is in: for its tags, the status file, and `dagster-unified list`.

A phase before the first epoch is the engine's, which says what takes so long. Knows events, and nobody who shows one.
"""

from __future__ import annotations

from dagster_unified.engine.events import (
    EpochCommitted,
    Event,
    PhaseBegun,
    QueriesStopped,
    QueriesTakenOver,
    SavepointTaken,
    StartDelayed,
)

PHASE = "dagster-unified/phase"
"""The tag of a run."""

STARTING, RUNNING, DRAINING = "starting Spark", "running", "draining"
SAVING, STOPPING = "taking a savepoint", "stopping"


def phase_after(event: Event, before: str) -> str:
    """Return the phase after an event, where it was in another before."""
    ends = before.startswith((DRAINING, SAVING, STOPPING))
    if isinstance(event, QueriesStopped):
        return SAVING
    if isinstance(event, SavepointTaken):
        return STOPPING if before == SAVING else before
    if isinstance(event, StartDelayed):
        return f"starting again in {event.pause:.0f} s"
    if isinstance(event, EpochCommitted | QueriesTakenOver):
        return before if ends else RUNNING
    if isinstance(event, PhaseBegun) and not ends and not (before == RUNNING and event.phase.startswith("query ")):
        return event.phase.partition(":")[0]  # without the folder
    return before


def is_starting(phase: str) -> bool:
    """Return whether a job in this phase has committed no epoch yet."""
    return bool(phase) and not phase.startswith((RUNNING, DRAINING, SAVING, STOPPING))
