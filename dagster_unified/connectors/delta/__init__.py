"""Delta Lake: tables with a log, read and written without a JVM jar."""

from dagster_unified.connectors.delta.changes import Change, ChangeKind
from dagster_unified.connectors.delta.sink import DeltaSink
from dagster_unified.connectors.delta.source import DeltaSource

__all__ = ["Change", "ChangeKind", "DeltaSink", "DeltaSource"]
