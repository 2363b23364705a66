"""Sinks that would take each other's rows away: of one place only sinks that add to it may be several.

Knows what sinks say of their targets; reads no storage.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass
from itertools import combinations

from dagster_unified.errors import PipelineError
from dagster_unified.graph.connectors import Target
from dagster_unified.graph.nodes import Graph, SinkNode


@dataclass(frozen=True)
class Written:
    """A target, and the sink that writes it."""

    pipeline: str
    sink: str
    description: str
    target: Target

    def __str__(self) -> str:
        return f"sink '{self.sink}' of {self.pipeline} ({self.description})"


def written(graph: Graph, sinks: Collection[int] | None = None) -> list[Written]:
    """Return the places that a pipeline writes to, or that some of its sinks do."""
    targets = [(node, node.sink.target()) for node in graph.sinks if sinks is None or node.id in sinks]
    return [Written(graph.name, n.name, _described(n), target) for n, target in targets if target is not None]


def check_targets(sinks: Iterable[Written]) -> None:
    """Raise where two sinks would overwrite each other, or one writes into the other's folder."""
    for first, second in combinations(sorted(sinks, key=lambda w: w.target.place.uri), 2):
        place, inner = first.target.place.uri, second.target.place.uri
        if place == inner and not (first.target.shared and second.target.shared):
            raise PipelineError(
                f"{first} and {second} write to one place, {place}, where one takes away what the other wrote; give"
                " each a path of its own, or unite the streams before one sink. Only sinks that append may share a"
                " place"
            )
        if inner.startswith(f"{place.rstrip('/')}/"):
            raise PipelineError(
                f"{second} writes to {inner}, inside the folder of {first}, where one takes away what the other wrote;"
                " give each a path outside the other's"
            )


def _described(node: SinkNode) -> str:
    return f"{node.location}: {node.sink.describe()}" if node.location is not None else node.sink.describe()
