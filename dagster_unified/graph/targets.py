"""Sinks that would take each other's rows away: of one place only sinks that add to it may be several.

Knows what sinks say of their targets; reads no storage.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass

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
    by_place: dict[str, Written] = {}
    for second in sorted(sinks, key=lambda w: w.target.place.uri):
        place = second.target.place.uri
        first = by_place.setdefault(place.rstrip("/"), second)
        if first is not second and not (first.target.shared and second.target.shared):
            raise PipelineError(
                f"{first} and {second} write to one place, {place}, where one takes away what the other wrote; give"
                " each a path of its own, or unite the streams before one sink. Only sinks that append may share a"
                " place"
            )
    for place, second in by_place.items():
        outer = next((by_place[folder] for folder in _folders(place) if folder in by_place), None)
        if outer is not None:
            raise PipelineError(
                f"{second} writes to {second.target.place.uri}, inside the folder of {outer}, where one takes away what"
                " the other wrote; give each a path outside the other's"
            )


def _folders(place: str) -> Iterator[str]:
    """Return the folders that a place is in, from the innermost."""
    while "/" in place:
        place = place.rpartition("/")[0]
        yield place


def _described(node: SinkNode) -> str:
    return f"{node.location}: {node.sink.describe()}" if node.location is not None else node.sink.describe()
