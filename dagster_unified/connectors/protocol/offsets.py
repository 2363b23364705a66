"""How far the parts of a source have been read, and what of them a query or a micro-batch reads."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import pairwise
from typing import TYPE_CHECKING

import msgspec

from dagster_unified.connectors.protocol.alignment import ALL

if TYPE_CHECKING:
    from upath import UPath


Offsets = Mapping[str, int]
"""How far each part of a source has been read, by the part's name: the offset of the next record."""


class Range(msgspec.Struct, frozen=True):
    """What a query reads: from `start`, and until `end` if it ends."""

    start: dict[str, int]
    end: dict[str, int] | None = None

    def parts_read(self, log: UPath | None, offset: str | None) -> frozenset[str]:
        """The parts that a query has read to their end, at an offset; with `ALL` where that is so for each of them."""
        position = self.start
        if offset is not None and offset != "-":  # it had nothing to read yet
            position = msgspec.json.decode(offset, type=dict[str, int])
        end = self.end or {}
        parts = {part for part, last in end.items() if position.get(part, -1) >= last}
        return frozenset({*parts, ALL} if self.end is not None and len(parts) == len(end) else parts)


def shared(start: Offsets, end: Offsets, most: int) -> dict[str, int]:
    """The position that is at most so many records behind `start`: each part gives in proportion to what it has."""
    waiting = {part: max(0, last - start.get(part, last)) for part, last in end.items()}
    total = sum(waiting.values())
    if total <= most:
        return dict(end)
    given = {part: count * most // total for part, count in waiting.items()}
    rest = most - sum(given.values())
    for part in sorted(waiting, key=lambda part: (given[part] - waiting[part], part))[:rest]:
        given[part] += 1
    return {part: start.get(part, last) + given.get(part, 0) for part, last in end.items()}


def cuts(low: int, high: int, count: int) -> list[tuple[int, int]]:
    """A range in so many pieces, at least one."""
    count = max(1, min(count, high - low))
    marks = [low + (high - low) * number // count for number in range(count + 1)]
    return list(pairwise(marks))
