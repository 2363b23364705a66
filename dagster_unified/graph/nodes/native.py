"""Operators on columns, which Catalyst runs."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from dagster_unified.graph.expressions import Column
from dagster_unified.graph.nodes.base import Lineage, Node
from dagster_unified.graph.nodes.keyed import KeyedNode
from dagster_unified.operators.windows.assigners import AlignedEventTimeWindows, WindowAssigner
from dagster_unified.operators.windows.context import ByEventTime

BOUNDS = ("window_start", "window_end")
"""The fields of a record that hold a native window's bounds."""


@dataclass(frozen=True, kw_only=True, eq=False)
class NativeKeyedNode(KeyedNode):
    """Column aggregates on a keyed stream, left to Catalyst."""

    columns: tuple[Any, ...]

    native = True

    def describe(self) -> str:
        return f"Catalyst: {', '.join(map(str, self.columns))}"

    def state(self) -> list[dict[str, str]]:
        return [{"name": "aggregates", "kind": "aggregating"}]


class AggregateNode(NativeKeyedNode):
    """Column aggregates per key."""

    emits_updates = True

    def lineage(self, before: Lineage) -> Lineage | None:
        kept = {name: before[name] for name in self.key.fields}
        names = self.records.names[len(kept) :] if self.records else ()
        return _lineage_of(before, kept, self.columns, names)


@dataclass(frozen=True, kw_only=True, eq=False)
class WindowAggregateNode(NativeKeyedNode):
    """Column aggregates per key and window."""

    assigner: WindowAssigner[Any, Any]

    has_native_windows = True

    @property
    def drops_late_records(self) -> object | None:
        return self

    @property
    def not_carried(self) -> str | None:
        if isinstance(self.assigner, AlignedEventTimeWindows):
            return None
        return (
            f"cannot hand on the open sessions of '{self.name}', which Catalyst keeps with"
            " state.native-aggregates=SPARK; remove that, or use window(...).aggregate(...) or .reduce(...) with a"
            " function"
        )

    def windows_of(self, record: Any, timestamp: int | None) -> Sequence[Any]:
        return () if timestamp is None else list(self.assigner.assign_windows(record, timestamp, ByEventTime()))

    def code(self) -> tuple[Any, ...]:
        return (self.assigner,)

    def describe(self) -> str:
        return f"{super().describe()} in {self.assigner.describe()}"


@dataclass(frozen=True, kw_only=True, eq=False)
class NativeNode(Node):
    """An operation on columns, left to Catalyst."""

    columns: tuple[Any, ...]

    native = True

    @property
    def sees_all_partitions(self) -> bool:
        return any(_OVER.search(str(column)) for column in self.columns)

    def describe(self) -> str:
        return f"Catalyst: {', '.join(map(str, self.columns))}"


class SelectNode(NativeNode):
    """Projects to new columns."""

    counts_records = False

    def lineage(self, before: Lineage) -> Lineage | None:
        return _lineage_of(before, {}, self.columns, self.records.names if self.records else ())


@dataclass(frozen=True, kw_only=True, eq=False)
class WithColumnsNode(NativeNode):
    """Adds or replaces columns; `names` are theirs."""

    names: tuple[str, ...]

    counts_records = False


class WhereNode(NativeNode):
    """Keeps the rows for which a condition holds."""

    keeps_records = True


_OVER = re.compile(r"\bover\b", re.IGNORECASE)
"""SQL's window functions look at other rows than their own."""


def _lineage_of(before: Lineage, kept: Lineage, columns: tuple[object, ...], names: tuple[str, ...]) -> Lineage | None:
    """The lineage of some columns, next to those that are `kept`."""
    found = dict(kept)
    for name, column in zip(names, columns, strict=True):
        read = _columns_read(column, before)
        if read is None or not read <= set(before):
            return None
        found[name] = frozenset(origin for r in read for origin in before[r])
    return found


def _columns_read(column: object, before: Lineage) -> set[str] | frozenset[str] | None:
    if isinstance(column, Column):
        return column.references()
    return {column} if isinstance(column, str) and column in before else None
