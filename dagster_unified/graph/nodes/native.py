"""Operators on columns, which Catalyst runs, and the nodes of local-global column aggregates."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from dagster_unified.graph.expressions import Column
from dagster_unified.graph.nodes.base import Finding, Lineage, Node
from dagster_unified.graph.nodes.keyed import KeyedNode, ReduceNode, WindowNode
from dagster_unified.graph.nodes.sources_and_sinks import ReadingNode
from dagster_unified.operators.partials import MergeOperator, Partial, PartialsStep
from dagster_unified.operators.windows.assigners import AlignedEventTimeWindows, ByEventTime, WindowAssigner

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
        keys = {name: before[name] for name in self.key.fields}
        names = self.records.names[len(keys) :] if self.records else ()
        return _lineage_of(before, keys, self.columns, names)


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


def _lineage_of(before: Lineage, keys: Lineage, columns: tuple[object, ...], names: tuple[str, ...]) -> Lineage | None:
    """Return the lineage of some columns, next to that of the keys."""
    lineage = dict(keys)
    for name, column in zip(names, columns, strict=True):
        read = _columns_read(column, before)
        if read is None or not read <= set(before):
            return None
        lineage[name] = frozenset(origin for r in read for origin in before[r])
    return lineage


def _columns_read(column: object, before: Lineage) -> set[str] | frozenset[str] | None:
    if isinstance(column, Column):
        return column.references()
    return {column} if isinstance(column, str) and column in before else None


@dataclass(frozen=True, kw_only=True, eq=False)
class LookupNode(NativeNode, ReadingNode):
    """Joins each record with the rows of a small table, its `source`, that have its key."""

    on: tuple[tuple[str, str], ...]
    """The record's fields and the table's columns that have to be equal."""

    added: tuple[tuple[str, str], ...]
    """The fields that come from the table, and its columns."""

    inner: bool
    """Whether a record without a row is dropped."""

    counts_records = False

    def settings(self, with_input: bool = True) -> list[object]:
        settings: list[object] = [self.source.describe(), self.on, self.added, self.inner]
        return [*settings, self.source.snapshot()] if with_input else settings

    def describe(self) -> str:
        equal = ", ".join(f"{field} = {column}" for field, column in self.on)
        return f"Catalyst: {equal} in {self.source.describe()}{', inner' if self.inner else ''}"

    def lineage(self, before: Lineage) -> Lineage | None:
        return None

    def parity(self) -> list[Finding]:
        return [
            self.note(
                "lookup",
                f"reads '{self.source.name}' as it is when the stage runs in BATCH, and as it is at each micro-batch in"
                " STREAMING; while it changes, results differ",
            )
        ]


@dataclass(frozen=True, kw_only=True, eq=False)
class PartialsNode(Node):
    """Partial aggregates of the records of a key that come to one task, and with `panes` of a pane of event time."""

    keys: tuple[str, ...]
    partials: tuple[Partial, ...]
    panes: tuple[int, int] | None = None

    step = PartialsStep

    def step_arguments(self) -> dict[str, Any]:
        return {"keys": self.keys, "partials": self.partials, "panes": self.panes}

    def describe(self) -> str:
        return ", ".join(partial.shown for partial in self.partials)

    def lineage(self, before: Lineage) -> Lineage | None:
        lineage: Lineage = {name: before[name] for name in self.keys}
        for partial in self.partials:
            lineage[partial.name] = frozenset() if partial.column is None else before[partial.column]
        return lineage


class MergeNode(ReduceNode):
    """Merges the partials of a key."""

    operator = MergeOperator
    merges_partials = True

    def lineage(self, before: Lineage) -> Lineage | None:
        return before


class MergeWindowsNode(WindowNode):
    """Merges the partials of a key and window."""

    merges_partials = True

    def lineage(self, before: Lineage) -> Lineage | None:
        names = self.records.names if self.records else ()
        return {name: before.get(name, frozenset()) for name in names}
