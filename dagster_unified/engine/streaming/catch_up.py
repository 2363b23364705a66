"""What had arrived at the sources of a query by a moment, and whether it has been read.

Records that arrive after draining began are not awaited. Knows what Spark reports of an epoch.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, TypeAlias

import msgspec

if TYPE_CHECKING:
    from pyspark.sql.streaming.query import StreamingQuery

Offsets: TypeAlias = dict[str, int | dict[str, int]]
"""By part, or by topic and part."""


class CatchUp:
    """What there is to read for a query now."""

    def __init__(self, query: StreamingQuery, begun: int | None) -> None:
        """`begun` is the last epoch that Spark has logged to have begun."""
        self._query = query
        # the one after that may have been planned already
        self._planned_later = 2 + (-1 if begun is None else begun)
        self._targets: list[Offsets] | None = None

    def is_read(self) -> bool:
        """Whether an epoch has read up to what was the newest when one was planned from now on.

        Of a source that does not tell the newest such an epoch has read what there was.
        """
        progress = self._query.lastProgress
        if progress is None or progress.batchId < self._planned_later:
            return False
        if self._targets is None:
            self._targets = [_offsets(one.latestOffset) for one in progress.sources]
        read = [_offsets(one.endOffset) for one in progress.sources]
        return all(covers(have, wanted) for have, wanted in zip(read, self._targets, strict=True))


def covers(read: Mapping[str, int | dict[str, int]], wanted: Mapping[str, int | dict[str, int]]) -> bool:
    """Whether every offset that is wanted is read."""
    for part, last in wanted.items():
        have = read.get(part)
        if isinstance(last, dict):
            if not covers(have if isinstance(have, dict) else {}, last):
                return False
        elif not isinstance(have, int) or have < last:
            return False
    return True


def _offsets(text: str | None) -> Offsets:
    """What Spark says of a source; nothing where it does not tell, or not in numbers."""
    try:
        return msgspec.json.decode(text or "", type=Offsets)
    except msgspec.DecodeError:
        return {}
