"""Operators of a plan that run together. Knows the plan only, no Spark."""

from __future__ import annotations

from dataclasses import dataclass

from dagster_unified.graph.plan import Port, Region


@dataclass(frozen=True)
class Fragment:
    """Operators that one Spark job or one streaming query runs; errors give `name` as their stage."""

    name: str
    nodes: tuple[int, ...]
    outputs: tuple[Port, ...] = ()
    """The streams that are materialized."""

    sinks: tuple[int, ...] = ()
    carried: tuple[Port, ...] = ()
    """The state that goes on to the next partition."""

    @staticmethod
    def of(region: Region) -> Fragment:
        """The operators of a region."""
        return Fragment(region.name, region.nodes, region.outputs, region.sinks, region.carried)
