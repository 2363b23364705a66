"""Delta Lake tables."""

from dagster_unified.connectors.delta.sink import DeltaSink

__all__ = ["DeltaSink"]
