"""Holds the tables of two ways to run a pipeline against each other: what the demonstrations end with."""

from __future__ import annotations

from rich.console import Console
from upath import UPath

from dagster_unified.api import Pipeline
from dagster_unified.connectors import DeltaSink
from dagster_unified.graph.nodes import SinkNode


def compare(
    console: Console, pipeline: Pipeline, expected: UPath, how_expected: str, found: UPath, how_found: str
) -> int:
    """Each table that the pipeline writes; 0 where all are equal. One that is missing is an error."""
    same = True
    for name in sorted(n.name for n in pipeline.graph().nodes if isinstance(n, SinkNode)):
        ours, theirs = rows(expected / name), rows(found / name)
        same &= ours == theirs
        console.print(
            f"{name}: {len(ours):,} rows {how_expected}, {len(theirs):,} {how_found}:"
            f" {'equal' if ours == theirs else 'DIFFERENT'}",
            highlight=False,
        )
    return 0 if same else 1


def rows(table: UPath) -> list[str]:
    """A table's rows, in an order of their own."""
    return sorted(str(sorted(r.items())) for r in DeltaSink(str(table)).dataset().to_table().to_pylist())
