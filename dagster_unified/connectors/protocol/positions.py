"""Positions: what has been read of a source. They belong to the library, and travel between runs in savepoints.

A position is a small record, a line of JSON. The source that gave it, or the same source in another mode or version of
the pipeline, reads what comes after it (`SparkSource.after`). Knows neither Spark nor its logs.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterable
from datetime import datetime

import msgspec

from dagster_unified.errors import StateError, UnsupportedError
from dagster_unified.graph.slices import Slice
from dagster_unified.records import shorten


class Unread(msgspec.Struct, frozen=True, tag_field="kind", tag=True):
    """Nothing has been read."""

    def describe(self) -> str:
        """The position in words."""
        return "nothing"


class EverythingRead(msgspec.Struct, frozen=True, tag_field="kind", tag=True):
    """Everything has been read that there was.

    `count` is how many records that were, of a source that gives its records in an order of its own. Such a source
    goes on with the record after them.
    """

    count: int | None = None

    def describe(self) -> str:
        """The position in words."""
        return "everything" if self.count is None else f"the first {self.count} records"


class PartitionsRead(msgspec.Struct, frozen=True, tag_field="kind", tag=True):
    """Everything has been read up to the end of a partition in time.

    `until` is that end, in the time zone of the partitions; `key` names the partition.
    """

    until: datetime
    key: str = ""

    def describe(self) -> str:
        """The position in words."""
        return f"the partitions up to {self.key or 'a moment'}, which ends at {self.until.isoformat()}"


class FilesRead(msgspec.Struct, frozen=True, tag_field="kind", tag=True):
    """Some files have been read, each to its end.

    `names` are their names below `root`: sorted, with a zero byte between them, as UTF-8 packed by zlib. A file that is
    written again under its name counts as read. What belongs to `partitions` has been read as well.
    """

    root: str
    count: int
    names: bytes
    partitions: PartitionsRead | None = None

    @classmethod
    def of(cls, root: str, names: Iterable[str], partitions: PartitionsRead | None = None) -> FilesRead:
        """The position after files with these names below `root`."""
        distinct = sorted(set(names))
        packed = zlib.compress("\0".join(distinct).encode("utf-8", "surrogateescape"), 6)
        return cls(root, len(distinct), packed, partitions)

    def files(self) -> frozenset[str]:
        """The names of the files below `root`."""
        text = zlib.decompress(self.names).decode("utf-8", "surrogateescape")
        return frozenset(text.split("\0") if self.count else ())

    def describe(self) -> str:
        """The position in words."""
        files = f"{self.count} file{'' if self.count == 1 else 's'} in {self.root}"
        return files if self.partitions is None else f"{self.partitions.describe()}, and of later ones {files}"


class OffsetsRead(msgspec.Struct, frozen=True, tag_field="kind", tag=True):
    """Each part of a source, such as a partition of a topic, has been read up to an offset.

    `offsets` has the next offset to read of each part, by its name; `origin` says which system and what of it that is.
    What belongs to `partitions` has been read as well. `identities` tell what the offsets are of from what is made
    again under its name, as far as that is known: a topic's id.
    """

    origin: str
    offsets: dict[str, int]
    partitions: PartitionsRead | None = None
    identities: dict[str, str] = {}

    def describe(self) -> str:
        """The position in words."""
        shown = [f"{part} up to {offset}" for part, offset in sorted(self.offsets.items())[:4]]
        more = [f"{len(self.offsets) - len(shown)} more"] if len(self.offsets) > len(shown) else []
        offsets = f"{self.origin} ({', '.join(shown + more)})"
        return offsets if self.partitions is None else f"{self.partitions.describe()}, and of later ones {offsets}"


class SparkOffset(msgspec.Struct, frozen=True, tag_field="kind", tag=True):
    """A source of Spark's has been read up to an offset, in the words of that source.

    `format` is Spark's name of the source; `offset` is JSON as a rule. What belongs to `partitions` has been read as
    well.
    """

    format: str
    offset: str
    partitions: PartitionsRead | None = None

    def describe(self) -> str:
        """The position in words."""
        offset = f"Spark's {self.format} up to {shorten(self.offset)}"
        return offset if self.partitions is None else f"{self.partitions.describe()}, and of later ones {offset}"


Position = Unread | EverythingRead | PartitionsRead | FilesRead | OffsetsRead | SparkOffset
"""What has been read of a source; `msgspec.json` writes and reads it."""


def partitions_read(slice_: Slice, source: str) -> PartitionsRead:
    """The position at the end of a partition.

    Raises `UnsupportedError` where partitions have no order: they are static, or have several dimensions.
    """
    time = slice_.time()
    if time is None or len(slice_.dimensions) > 1:
        why = "are not in time" if time is None else "have several dimensions"
        raise UnsupportedError(
            f"source '{source}': it has read partition '{slice_.key}', and partitions that {why} have no order, so that"
            " nothing can come after it; take the savepoint of a run without partitions, or of partitions in time only"
        )
    return PartitionsRead(datetime.fromisoformat(time.end.isoformat()), slice_.key)


def cannot_follow(source: str, position: Position, reason: str) -> StateError:
    """The error for a source that cannot go on after a position."""
    return StateError(
        f"source '{source}': it cannot go on after {position.describe()}: {reason}; start without state, or give the"
        " source another uid to read it from its beginning"
    )
