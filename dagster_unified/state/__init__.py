"""Savepoints as tables: their format, and how to read, write and compare them. Knows no engine."""

from dagster_unified.connectors.protocol.positions import (
    EverythingRead,
    FilesRead,
    OffsetsRead,
    PartitionsRead,
    Position,
    SparkOffset,
    Unread,
)
from dagster_unified.state.manifest import Column
from dagster_unified.state.savepoint import Operator, Savepoint

__all__ = [
    "Column",
    "EverythingRead",
    "FilesRead",
    "OffsetsRead",
    "Operator",
    "PartitionsRead",
    "Position",
    "Savepoint",
    "SparkOffset",
    "Unread",
]
