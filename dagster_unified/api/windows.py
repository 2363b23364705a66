"""The bases of your own assigners, triggers and evictors, and the windows that they are given."""

from dagster_unified.operators.windows import (
    CountWindow,
    Evictor,
    Firing,
    GlobalWindow,
    MergingWindowAssigner,
    Trigger,
    TriggerResult,
    WindowAssigner,
)

__all__ = [
    "CountWindow", "Evictor", "Firing", "GlobalWindow", "MergingWindowAssigner", "Trigger", "TriggerResult",
    "WindowAssigner",
]  # fmt: skip
