"""Which regions run again after one failed (Flink: `RestartPipelinedRegionFailoverStrategy`).

Knows the logical graph only. The failed region restarts; so does the producer of every intermediate that it needs and
that is gone, and so on upwards; and so does every region that consumes from one that restarts, since its input may come
out differently.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping


def regions_to_restart(
    failed: int, inputs: Mapping[int, Collection[int]], available: Collection[int]
) -> tuple[int, ...]:
    """The regions to run again, upstream ones first.

    `inputs` gives for each region the regions that it reads from; `available` are the regions whose intermediates still
    stand.
    """
    restart: set[int] = set()
    pending = [failed]
    while pending:
        region = pending.pop()
        if region in restart:
            continue
        restart.add(region)
        pending += [producer for producer in inputs[region] if producer not in available]
        pending += [consumer for consumer, producers in inputs.items() if region in producers]
    return tuple(r for r in upstream_first(inputs) if r in restart)


def regions_to_recompute(
    wanted: int, inputs: Mapping[int, Collection[int]], available: Collection[int]
) -> tuple[int, ...]:
    """The ancestors to recompute before `wanted` can run.

    They are the part of `regions_to_restart` that lies upstream, upstream first.
    """
    ancestors: set[int] = set()
    pending = list(inputs[wanted])
    while pending:
        region = pending.pop()
        if region not in ancestors:
            ancestors.add(region)
            pending += inputs[region]
    return tuple(
        r
        for r in regions_to_restart(wanted, inputs, available)
        if r in ancestors and _needed(r, wanted, inputs, available)
    )


def _needed(region: int, wanted: int, inputs: Mapping[int, Collection[int]], available: Collection[int]) -> bool:
    """Whether `region` is missing and lies on a path of missing intermediates to `wanted`."""
    if region in available:
        return False
    return any(
        consumer == wanted or _needed(consumer, wanted, inputs, available)
        for consumer, producers in inputs.items()
        if region in producers
    )


def upstream_first(inputs: Mapping[int, Collection[int]]) -> list[int]:
    """All regions, producers before consumers."""
    ordered: list[int] = []
    while len(ordered) < len(inputs):
        ordered += [r for r in inputs if r not in ordered and all(p in ordered for p in inputs[r])]
    return ordered
