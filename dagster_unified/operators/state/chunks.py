"""Lists and maps of one key that are too large for the key's page: chunks of them, in pages of their own.

Chunks are read when they are used, and written where they have changed: a list grows by chunks at its end, a map is
spread over buckets by its keys' hashes. So one hot key costs a micro-batch only what it touches. They replace a plain
list and a plain dict, as far as the state handles use those; a descriptor says which one its state uses (`spilled`).
Knows no store: `read` returns a chunk by its number.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence, Sized
from typing import Any, ClassVar, Self

from msgspec import Raw

from dagster_unified.operators.keys import key_hash

ENTRIES_PER_CHUNK = 1024
"""Elements of a chunk; a smaller collection stays in its key's page."""

BYTES = 1 << 20
"""Bytes of batches of rows that stay in their key's page."""

SMALL = 64 << 10
"""Bytes from which on a batch gets no more rows."""

Read = Callable[[int], Any]
"""Reads a chunk by its number."""

Write = Callable[[int | None, Any], int]
"""Writes a changed chunk under its number, or under a new one where that is None; returns the number."""


class SpilledCollection(ABC):
    """The entries of one state of one key, in chunks."""

    kind: ClassVar[str]
    """Its name in a page."""

    plain: ClassVar[type[Sized]]
    """The plain type that it replaces."""

    undeclared: ClassVar[Any]
    """The type to which a chunk of an undeclared state is decoded."""

    chunks: Sequence[int | None]
    """The numbers of its chunks."""

    size: int
    """How many entries are in chunks."""

    inline: Any
    """The part that stays in the key's page."""

    @classmethod
    def is_large(cls, entries: Any) -> bool:
        """Whether a plain list or dict has become large."""
        return len(entries) > ENTRIES_PER_CHUNK

    @classmethod
    @abstractmethod
    def of(cls, entries: Any, read: Read) -> Self:
        """Convert a plain list or dict that has become large."""

    @classmethod
    @abstractmethod
    def restored(cls, chunks: list[int | None], size: int, inline: Any, read: Read) -> Self:
        """Restore it from its entry in a page."""

    @abstractmethod
    def __len__(self) -> int: ...

    @abstractmethod
    def forget(self, expired: Callable[[Any], bool]) -> None:
        """Remove expired entries, if it was used."""

    @abstractmethod
    def save(self, write: Write) -> None:
        """Write the chunks that have changed."""


class SpilledList(SpilledCollection):
    """A list whose start is in chunks, and whose end is in memory."""

    kind = "list"
    plain = list
    undeclared = list[Raw]
    chunks: list[int]

    def __init__(self, chunks: list[int], size: int, inline: Any, read: Read) -> None:
        self.chunks, self.size, self.inline = chunks, size, inline
        self._read = read
        self._used = False

    @classmethod
    def of(cls, entries: Any, read: Read) -> Self:
        return cls([], 0, entries, read)

    @classmethod
    def restored(cls, chunks: list[int | None], size: int, inline: Any, read: Read) -> Self:
        return cls([chunk for chunk in chunks if chunk is not None], size, inline, read)

    def __len__(self) -> int:
        return self.size + len(self.inline)

    def __iter__(self) -> Iterator[Any]:
        self._used = True
        for number in self.chunks:
            yield from self._read(number)
        yield from self.inline

    def append(self, value: Any) -> None:
        self._used = True
        self.inline.append(value)

    def extend(self, values: Iterable[Any]) -> None:
        self._used = True
        self.inline.extend(values)

    def forget(self, expired: Callable[[Any], bool]) -> None:
        """Remove expired entries, if it was used: from the start chunk by chunk, and at the end those in memory."""
        while self._used and self.chunks:
            chunk = self._read(self.chunks[0])
            if not all(map(expired, chunk)):
                return
            self.size -= len(chunk)
            del self.chunks[0]
        self.inline = [value for value in self.inline if not expired(value)]

    def save(self, write: Write) -> None:
        """Write full chunks of the added elements."""
        while len(self.inline) > ENTRIES_PER_CHUNK:
            self.chunks.append(write(None, self.inline[:ENTRIES_PER_CHUNK]))
            self.size += ENTRIES_PER_CHUNK
            self.inline = self.inline[ENTRIES_PER_CHUNK:]


class SpilledRows(SpilledList):
    """A list of batches of rows. Each batch is a chunk, except the last as long as it may grow."""

    kind = "rows"

    @classmethod
    def is_large(cls, entries: Any) -> bool:
        return sum(map(len, entries)) > BYTES

    def save(self, write: Write) -> None:
        end = len(self.inline) - (bool(self.inline) and len(self.inline[-1]) < SMALL)
        self.chunks += [write(None, [batch]) for batch in self.inline[:end]]
        self.size += end
        self.inline = self.inline[end:]


class SpilledMap(SpilledCollection):
    """A map in buckets; each is a chunk. An empty bucket has no chunk."""

    kind = "map"
    plain = dict
    undeclared = dict[Any, Raw]
    inline: dict[Any, Any] = {}
    chunks: list[int | None]

    def __init__(self, chunks: list[int | None], size: int, read: Read) -> None:
        self.chunks, self.size = chunks, size
        self._read = read
        self._buckets: dict[int, dict[Any, Any]] = {}

    @classmethod
    def of(cls, entries: Any, read: Read) -> Self:
        spilled = cls([None], 0, read)
        for key, value in entries.items():
            spilled[key] = value
        return spilled

    @classmethod
    def restored(cls, chunks: list[int | None], size: int, inline: Any, read: Read) -> Self:
        return cls(chunks, size, read)

    def __len__(self) -> int:
        return self.size

    def __iter__(self) -> Iterator[Any]:
        return (key for key, _ in self.items())

    def items(self) -> Iterator[tuple[Any, Any]]:
        """All entries, bucket by bucket."""
        for number in range(len(self.chunks)):
            yield from list(self._bucket(number).items())

    def __contains__(self, key: Hashable) -> bool:
        return key in self._bucket(self._number(key))

    def get(self, key: Hashable, default: Any = None) -> Any:
        return self._bucket(self._number(key)).get(key, default)

    def __setitem__(self, key: Hashable, value: Any) -> None:
        bucket = self._bucket(self._number(key))
        self.size += key not in bucket
        bucket[key] = value

    def __delitem__(self, key: Hashable) -> None:
        del self._bucket(self._number(key))[key]
        self.size -= 1

    def pop(self, key: Hashable, default: Any = None) -> Any:
        if key not in self:
            return default
        value = self.get(key)
        del self[key]
        return value

    def forget(self, expired: Callable[[Any], bool]) -> None:
        """Remove expired entries from the buckets that were used."""
        for number, bucket in self._buckets.items():
            live = {key: value for key, value in bucket.items() if not expired(value)}
            self.size -= len(bucket) - len(live)
            self._buckets[number] = live

    def save(self, write: Write) -> None:
        """Write the buckets that were used, and make more of them once they are too full."""
        if self.size > ENTRIES_PER_CHUNK * len(self.chunks):
            entries = list(self.items())
            while self.size > ENTRIES_PER_CHUNK * len(self.chunks):
                self.chunks += [None] * len(self.chunks)
            self._buckets = {number: {} for number in range(len(self.chunks))}
            for key, value in entries:
                self._buckets[self._number(key)][key] = value
        for number, bucket in sorted(self._buckets.items()):
            self.chunks[number] = write(self.chunks[number], bucket) if bucket else None

    def _number(self, key: Hashable) -> int:
        return key_hash(key) & (len(self.chunks) - 1)

    def _bucket(self, number: int) -> dict[Any, Any]:
        if number not in self._buckets:
            chunk = self.chunks[number]
            self._buckets[number] = {} if chunk is None else self._read(chunk)
        return self._buckets[number]


SPILLED: dict[str, type[SpilledCollection]] = {kind.kind: kind for kind in (SpilledList, SpilledMap, SpilledRows)}
"""The classes of a page's entries by kind, also for states that are no longer declared."""
