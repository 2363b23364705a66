"""Operators on columns, which Catalyst runs."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from dagster_unified.graph.nodes.base import Node
from dagster_unified.graph.nodes.keyed import KeyedNode
from dagster_unified.operators.windows.assigners import WindowAssigner

BOUNDS = ("window_start", "window_end")
"""The fields of a record in which a native window tells its bounds."""


@dataclass(frozen=True, kw_only=True, eq=False)
class NativeKeyedNode(KeyedNode):
    """Column aggregates on a keyed stream, left to Catalyst."""

    columns: tuple[Any, ...]


class AggregateNode(NativeKeyedNode):
    """Column aggregates per key."""


@dataclass(frozen=True, kw_only=True, eq=False)
class WindowAggregateNode(NativeKeyedNode):
    """Column aggregates per key and window."""

    assigner: WindowAssigner[Any, Any]


@dataclass(frozen=True, kw_only=True, eq=False)
class NativeNode(Node):
    """An operation on columns, left to Catalyst."""

    columns: tuple[Any, ...]


class SelectNode(NativeNode):
    """Projects to new columns."""


@dataclass(frozen=True, kw_only=True, eq=False)
class WithColumnsNode(NativeNode):
    """Adds or replaces columns; `names` are theirs."""

    names: tuple[str, ...]


class WhereNode(NativeNode):
    """Keeps the rows for which a condition holds."""
