"""The slice of a pipeline's input that one run is for: what a partition is to the graph.

Knows neither Dagster's partitions nor how a source reads less than all of itself.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime
from urllib.parse import quote

WHOLE = "all"
"""The name under which a run without partitions is stored."""


@dataclass(frozen=True)
class TimeRange:
    """From `start` until before `end`; both know their time zone, in which the partition was declared."""

    start: datetime
    end: datetime


@dataclass(frozen=True)
class Dimensions:
    """What partitions have in common: the names of their dimensions, and which of those are in time.

    A sole dimension has the name ''.
    """

    names: tuple[str, ...]
    in_time: frozenset[str]

    def describe(self) -> str:
        """The names, for messages."""
        return ", ".join(f"'{name}'" for name in self.names if name) or "one dimension without a name"


@dataclass(frozen=True)
class Slice:
    """One partition: its key, and for each of its dimensions a range of time or a key.

    A sole dimension has the name ''.
    """

    key: str
    dimensions: Mapping[str, TimeRange | str]

    @property
    def name(self) -> str:
        """The key as a segment of a path, and the same on every file system: what is not plain is percent-encoded."""
        return "%61ll" if self.key == WHOLE else quote(self.key, safe="=+")

    @property
    def shape(self) -> Dimensions:
        """What it has in common with the other partitions."""
        in_time = (name for name, value in self.dimensions.items() if isinstance(value, TimeRange))
        return Dimensions(tuple(self.dimensions), frozenset(in_time))

    def time(self) -> TimeRange | None:
        """Its range of time, where it has one."""
        return next((value for value in self.dimensions.values() if isinstance(value, TimeRange)), None)
