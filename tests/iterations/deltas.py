"""Delta iterations that several tests run: shortest ways from some places, in steps of different lengths."""

import heapq
from typing import NamedTuple

import pyarrow as pa
import pyarrow.compute as pc

from dagster_unified.api import Pipeline, iterations


class Place(NamedTuple):
    name: int
    distance: int | None
    ways: list[tuple[int, int]]


class Visit(NamedTuple):
    name: int
    distance: int


class Nearest(iterations.DeltaFunction[Place, Visit]):
    """A place that is reached on a shorter way tells those that its ways lead to; one that no way leaves is added."""

    def update(self, solution, workset):
        distance = min(visit.distance for visit in workset)
        if solution is None:
            return Place(workset[0].name, distance, []), []
        if solution.distance is not None and solution.distance <= distance:
            return None, []
        return solution._replace(distance=distance), [Visit(to, distance + length) for to, length in solution.ways]


class NearestOfMany(iterations.BatchDeltaFunction):
    """The same over batches; a place has one row, since what it is sent is combined."""

    def update_batch(self, solution, workset):
        known = solution["distance"].fill_null(1 << 60)
        better = pc.less(workset["distance"], known)
        reached, before = workset.filter(better), solution.filter(better)
        of, ways = pc.list_parent_indices(before["ways"]), pc.list_flatten(before["ways"])
        length = pc.add(reached["distance"].take(of), pc.struct_field(ways, [1]))
        following = pa.RecordBatch.from_arrays([pc.struct_field(ways, [0]), length], names=["name", "distance"])
        if not before["name"].null_count:
            return reached, following
        none = pa.scalar([], before["ways"].type)
        return reached.append_column("ways", pc.if_else(before["ways"].is_valid(), before["ways"], none)), following


def distances(ways, starts, max_rounds=None, body=None, combine=None, **config):
    """The places of directed ways (from, to, length), and how far they are from some of them."""
    pipeline = Pipeline("distances")
    held = {a: Place(a, None, [(to, length) for b, to, length in ways if b == a]) for a, _, _ in ways}
    places = pipeline.from_collection(list(held.values()), Place, name="places").key_by("name")
    visits = pipeline.from_collection([Visit(a, 0) for a in starts], Visit, name="visits").key_by("name")
    config = iterations.IterationConfig(**config)
    return pipeline, iterations.iterate_delta(places, visits, body or Nearest(), max_rounds, config, combine)


def by_dijkstra(ways, starts):
    """The same by another algorithm: pairs of place and distance."""
    found, waiting = {}, [(0, start) for start in starts]
    heapq.heapify(waiting)
    while waiting:
        distance, place = heapq.heappop(waiting)
        if place not in found:
            found[place] = distance
            for a, to, length in ways:
                if a == place:
                    heapq.heappush(waiting, (distance + length, to))
    return sorted({**{a: None for a, _, _ in ways}, **found}.items())
