"""Joins with a small table."""

from __future__ import annotations

from dataclasses import dataclass

from dagster_unified.graph.findings import Finding
from dagster_unified.graph.nodes.base import Lineage
from dagster_unified.graph.nodes.native import NativeNode
from dagster_unified.graph.nodes.sources_and_sinks import ReadingNode


@dataclass(frozen=True, kw_only=True, eq=False)
class LookupNode(NativeNode, ReadingNode):
    """Joins each record with the rows of a small table, its `source`, that have its key."""

    on: tuple[tuple[str, str], ...]
    """The record's fields and the table's columns that have to be equal."""

    found: tuple[tuple[str, str], ...]
    """The fields that come from the table, and its columns."""

    inner: bool
    """Whether a record without a row is dropped."""

    counts_records = False

    def settings(self, with_input: bool = True) -> list[object]:
        found: list[object] = [self.source.describe(), self.on, self.found, self.inner]
        return [*found, self.source.snapshot()] if with_input else found

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
