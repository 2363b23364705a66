"""What a job tells a source that is read in splits of the watermarks of its group, and what has to wait (FLIP-217).

The job's driver writes it, and the Python process that plans what a micro-batch reads looks at it: what it decides is
in Spark's log of offsets, so an epoch that is run again reads the same.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import TYPE_CHECKING

import msgspec

from dagster_unified.connectors.paths import put

if TYPE_CHECKING:
    from upath import UPath

ALL = ""
"""What stands for all parts of a source that does not say of which part a split is."""


class Watermarks(msgspec.Struct, frozen=True):
    """The watermarks of a source's parts, and of those that it is aligned with. Milliseconds since the epoch."""

    drift: int
    """How far a part may be ahead of the slowest."""

    parts: dict[str, int] = {}
    """The watermark of each part that had records."""

    idle: frozenset[str] = frozenset()
    """The parts for which nobody waits."""

    others: int | None = None
    """The smallest watermark of the other sources of the group."""

    def slowest(self, finished: Collection[str] = ()) -> int | None:
        """The smallest watermark of the group; nobody waits for a part that is finished."""
        own = [mark for part, mark in self.parts.items() if part not in self.idle and part not in finished]
        return min([*own, *([] if self.others is None else [self.others])], default=None)

    def waiting(self, parts: Collection[str], finished: Collection[str] = ()) -> set[str]:
        """Those of some parts that are not to be read further now."""
        slowest = self.slowest(finished)
        if slowest is None:
            return set()
        marks = {part: self.parts.get(part, self.parts.get(ALL)) for part in parts}
        return {part for part, mark in marks.items() if mark is not None and mark > slowest + self.drift}


def tell(file: UPath, watermarks: Watermarks) -> None:
    """Write what a source is to go by from its next micro-batch on."""
    put(file, msgspec.json.encode(watermarks))


def held_back(
    file: UPath, start: Mapping[str, int], end: Mapping[str, int], until: Mapping[str, int] | None
) -> set[str]:
    """The parts that wait, of those that could be read from `start` to `end`; `until` is where the source ends."""
    watermarks = msgspec.json.decode(file.read_bytes(), type=Watermarks)
    finished = {part for part, last in (until or {}).items() if start.get(part, -1) >= last}
    return watermarks.waiting([part for part in end if part in start], finished)
