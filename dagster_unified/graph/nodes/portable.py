"""Operators that column aggregates become where their state is portable, in key groups instead of in Catalyst."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from dagster_unified.graph.nodes.base import Lineage, Node
from dagster_unified.graph.nodes.keyed import ReduceNode, WindowNode
from dagster_unified.operators.partials import MergeOperator, Partial, PartialsStep


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
        found: Lineage = {name: before[name] for name in self.keys}
        for partial in self.partials:
            found[partial.name] = frozenset() if partial.column is None else before[partial.column]
        return found


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
