"""Which rows a filter surely drops, so that they need not reach it: as a condition in Spark's SQL.

Rows for which the condition is null reach the function, and so do those that it keeps.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from dagster_unified.graph.lowering.reading import read
from dagster_unified.graph.lowering.record_classes import record_of
from dagster_unified.graph.lowering.source import UnreadableError
from dagster_unified.graph.lowering.sql import Sql, UnsaidError, both
from dagster_unified.records import RecordType


def kept_rows(function: Any, taken: RecordType) -> str | None:
    """Return the condition of a filter's function on the columns of records; None where it cannot be said."""
    try:
        return Sql(taken.names).true(read(function, "filter", record_of(taken)))
    except (UnreadableError, UnsaidError, RecursionError):
        return None


def all_kept(conditions: Sequence[str]) -> str:
    """Return the condition that all hold, each of which is only asked where those before it hold."""
    found = conditions[-1]
    for before in reversed(conditions[:-1]):
        found = both(before, found)
    return found
