"""Positions: what has been read of a source, by files or by the offsets of its parts.

They belong to the library, and travel between runs in savepoints. Watermark alignment (FLIP-182, FLIP-217) tells a
source how far its parts may read.
"""

from __future__ import annotations

import zlib
from collections.abc import Collection, Iterable, Mapping
from datetime import datetime
from itertools import pairwise
from typing import TYPE_CHECKING

import msgspec

from dagster_unified.errors import StateError, UnsupportedError
from dagster_unified.graph.connectors import Slice
from dagster_unified.records import shorten
from dagster_unified.storage.paths import put

if TYPE_CHECKING:
    from upath import UPath


class Unread(msgspec.Struct, frozen=True, tag_field="kind", tag=True):
    """Nothing has been read."""

    def describe(self) -> str:
        """The position in words."""
        return "nothing"


class EverythingRead(msgspec.Struct, frozen=True, tag_field="kind", tag=True):
    """Everything has been read that there was.

    `count` is the number of records, for a source with records in an order of its own. Such a source goes on with the
    record after them.
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
    written again under its name counts as read. Everything in `partitions` has been read as well.
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

    `offsets` has the next offset to read of each part, by its name; `origin` names the system and the thing in it.
    Everything in `partitions` has been read as well. `identities` are ids of what the offsets refer to, such as a
    topic's id, which change when it is made again under its name; as far as they are known.
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
    """A Spark source has been read up to an offset, in that source's own form.

    `format` is Spark's name of the source; `offset` is usually JSON. Everything in `partitions` has been read as well.
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


def cannot_stop(source: str, position: Position, reason: str) -> StateError:
    """The error for a source that cannot stop at a position."""
    return StateError(f"source '{source}': it cannot stop at {position.describe()}: {reason}")


ALL = ""
"""Stands for all parts of a source that does not say which part a split belongs to."""


class Watermarks(msgspec.Struct, frozen=True):
    """The watermarks of a source's parts, and of those that it is aligned with. Milliseconds since the epoch."""

    drift: int
    """Milliseconds that a part may be ahead of the slowest."""

    parts: dict[str, int] = {}
    """The watermark of each part that had records."""

    idle: frozenset[str] = frozenset()
    """The parts for which nobody waits."""

    others: int | None = None
    """The smallest watermark of the other sources of the group."""

    def slowest(self, finished: Collection[str] = ()) -> int | None:
        """The smallest watermark of the group; finished parts do not count."""
        marks = [mark for part, mark in self.parts.items() if part not in self.idle and part not in finished]
        return min([*marks, *([] if self.others is None else [self.others])], default=None)

    def waiting(self, parts: Collection[str], finished: Collection[str] = ()) -> set[str]:
        """The parts, of these, that are not to be read further now."""
        slowest = self.slowest(finished)
        if slowest is None:
            return set()
        marks = {part: self.parts.get(part, self.parts.get(ALL)) for part in parts}
        return {part for part, mark in marks.items() if mark is not None and mark > slowest + self.drift}


def tell(file: UPath, watermarks: Watermarks) -> None:
    """Write the watermarks that a source follows from its next micro-batch on."""
    put(file, msgspec.json.encode(watermarks))


def held_back(
    file: UPath, start: Mapping[str, int], end: Mapping[str, int], until: Mapping[str, int] | None
) -> set[str]:
    """The parts that wait, of those that could be read from `start` to `end`; `until` is where the source ends."""
    watermarks = msgspec.json.decode(file.read_bytes(), type=Watermarks)
    finished = {part for part, last in (until or {}).items() if start.get(part, -1) >= last}
    return watermarks.waiting([part for part in end if part in start], finished)


Offsets = Mapping[str, int]
"""How far each part of a source has been read, by the part's name: the offset of the next record."""


class Range(msgspec.Struct, frozen=True):
    """The range that a query reads: from `start`, and until `end` if it ends."""

    start: dict[str, int]
    end: dict[str, int] | None = None

    def parts_read(self, log: UPath | None, offset: str | None) -> frozenset[str]:
        """The parts that a query has read to their end, at an offset; with `ALL` where it has read all to their end."""
        position = self.start
        if offset is not None and offset != "-":  # it had nothing to read yet
            position = msgspec.json.decode(offset, type=dict[str, int])
        end = self.end or {}
        parts = {part for part, last in end.items() if position.get(part, -1) >= last}
        return frozenset({*parts, ALL} if self.end is not None and len(parts) == len(end) else parts)


def shared(start: Offsets, end: Offsets, most: int) -> dict[str, int]:
    """The position at most `most` records after `start`: each part contributes in proportion to its backlog."""
    waiting = {part: max(0, last - start.get(part, last)) for part, last in end.items()}
    total = sum(waiting.values())
    if total <= most:
        return dict(end)
    shares = {part: count * most // total for part, count in waiting.items()}
    rest = most - sum(shares.values())
    for part in sorted(waiting, key=lambda part: (shares[part] - waiting[part], part))[:rest]:
        shares[part] += 1
    return {part: start.get(part, last) + shares.get(part, 0) for part, last in end.items()}


def cuts(low: int, high: int, count: int) -> list[tuple[int, int]]:
    """A range in this many pieces, at least one."""
    count = max(1, min(count, high - low))
    marks = [low + (high - low) * number // count for number in range(count + 1)]
    return list(pairwise(marks))
