"""Changes of a table's rows, as the records of a stream: the kinds are those of Flink's `RowKind`.

Spark's change data feed calls `update_before` and `update_after` pre- and postimage
(https://docs.delta.io/latest/delta-change-data-feed.html).
"""

from __future__ import annotations

from datetime import datetime
from enum import StrEnum
from functools import lru_cache
from typing import Any, Generic, NamedTuple, TypeVar

Row = TypeVar("Row")


class ChangeKind(StrEnum):
    """What happened to a row. There is an example at `DeltaSource`."""

    INSERT = "insert"
    UPDATE_BEFORE = "update_before"
    """The row as it was before an update; the row after it follows."""

    UPDATE_AFTER = "update_after"
    DELETE = "delete"


class Change(NamedTuple, Generic[Row]):
    """A change of one row of a table.

    `version` is the version of the table that made it, and `committed_at` the time of that commit, in UTC. There is an
    example at `DeltaSource`.
    """

    kind: ChangeKind
    row: Row
    version: int
    committed_at: datetime


@lru_cache(maxsize=1024)
def change_of(record: Any) -> Any:
    """Return the class of the changes of such records: `Change[record]` with the types of its fields in place."""
    fields = [("kind", ChangeKind), ("row", record), ("version", int), ("committed_at", datetime)]
    return NamedTuple(f"ChangeOf{getattr(record, '__name__', 'Row')}", fields)
