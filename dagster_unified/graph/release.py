"""Which intermediates may go (FLIP-119: a blocking result is released when its consumers have finished).

Knows the logical graph only; how long they are kept beyond that is for the store's budget.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping


def releasable(inputs: Mapping[int, Collection[int]], finished: Collection[int]) -> frozenset[int]:
    """The regions whose intermediates nobody needs any more: finished, with consumers that have all finished.

    `inputs` gives for each region the regions that it reads from. A region without consumers has no intermediate.
    """
    consumers: dict[int, set[int]] = {}
    for region, producers in inputs.items():
        for producer in producers:
            consumers.setdefault(producer, set()).add(region)
    return frozenset(r for r, readers in consumers.items() if r in finished and readers <= set(finished))
