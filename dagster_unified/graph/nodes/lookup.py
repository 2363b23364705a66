"""Joins with a small table."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from dagster_unified.graph.connectors import Source
from dagster_unified.graph.nodes.native import NativeNode


@dataclass(frozen=True, kw_only=True, eq=False)
class LookupNode(NativeNode):
    """Joins each record with the rows of a small table that have its key."""

    source: Source[Any]
    """The table."""

    on: tuple[tuple[str, str], ...]
    """The record's fields and the table's columns that have to be equal."""

    found: tuple[tuple[str, str], ...]
    """The fields that come from the table, and its columns."""

    inner: bool
    """Whether a record without a row is dropped."""
