"""dagster-unified: a data pipeline written once, run in BATCH or STREAMING on Spark under Dagster."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from dagster_unified.orchestration.component import UnifiedPipelineComponent

__all__ = ["UnifiedPipelineComponent"]


def __getattr__(name: str) -> object:
    # Loaded when it is asked for: workers and harnesses import this package without Dagster.
    if name == "UnifiedPipelineComponent":
        from dagster_unified.orchestration import component

        return component.UnifiedPipelineComponent
    raise AttributeError(f"module 'dagster_unified' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
