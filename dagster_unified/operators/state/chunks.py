"""Lists and maps of one key that have grown too large for the page of their key: parts of them, in pages of their own.

They are read when they are used, and written where they have changed: a list grows by parts at its end, a map is spread
over buckets by its keys' hashes. So one hot key costs a micro-batch what it touches. They stand in for a plain list and
a plain dict, as far as the state handles use those. Knows no store: `read` gives a part by its number.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Iterator
from typing import Any

from dagster_unified.operators.keys import key_hash

PART = 1024
"""Elements of a part; what is not larger stays in its key's page."""

Write = Callable[[int | None, Any], int]
"""Writes a part under its number, unless it is as it was, or under a new one where that is None; gives the number."""


class LargeList:
    """A list whose beginning is in parts, and whose end is in memory."""

    kind = "list"

    def __init__(self, parts: list[int], size: int, tail: Any, read: Callable[[int], list[Any]]) -> None:
        self.parts, self.size, self.tail = parts, size, tail
        self._read = read
        self._used = False

    def __len__(self) -> int:
        return self.size + len(self.tail)

    def __iter__(self) -> Iterator[Any]:
        self._used = True
        for number in self.parts:
            yield from self._read(number)
        yield from self.tail

    def append(self, value: Any) -> None:
        """As a list's."""
        self._used = True
        self.tail.append(value)

    def extend(self, values: Iterable[Any]) -> None:
        """As a list's."""
        self._used = True
        self.tail.extend(values)

    def forget(self, expired: Callable[[Any], bool]) -> None:
        """Removes what has expired, if it was used: the beginning, part by part, and of the end what is in memory."""
        while self._used and self.parts:
            part = self._read(self.parts[0])
            if not all(map(expired, part)):
                return
            self.size -= len(part)
            del self.parts[0]
        self.tail = [value for value in self.tail if not expired(value)]

    def save(self, write: Write) -> None:
        """Writes full parts of what was added."""
        while len(self.tail) > PART:
            self.parts.append(write(None, self.tail[:PART]))
            self.size += PART
            self.tail = self.tail[PART:]

    @property
    def inline(self) -> Any:
        """What is left to the key's page."""
        return self.tail


class LargeMap:
    """A map in buckets, each of them a part. A bucket that holds nothing has no part."""

    kind = "map"
    inline: dict[Any, Any] = {}

    def __init__(self, parts: list[int | None], size: int, read: Callable[[int], dict[Any, Any]]) -> None:
        self.parts, self.size = parts, size
        self._read = read
        self._buckets: dict[int, dict[Any, Any]] = {}

    @staticmethod
    def of(values: dict[Any, Any], read: Callable[[int], dict[Any, Any]]) -> LargeMap:
        """A map that has become large."""
        made = LargeMap([None], 0, read)
        for key, value in values.items():
            made[key] = value
        return made

    def __len__(self) -> int:
        return self.size

    def __iter__(self) -> Iterator[Any]:
        return (key for key, _ in self.items())

    def items(self) -> Iterator[tuple[Any, Any]]:
        """All entries, bucket by bucket."""
        for number in range(len(self.parts)):
            yield from list(self._bucket(number).items())

    def __contains__(self, key: Hashable) -> bool:
        return key in self._bucket(self._number(key))

    def get(self, key: Hashable, default: Any = None) -> Any:
        """As a dict's."""
        return self._bucket(self._number(key)).get(key, default)

    def __setitem__(self, key: Hashable, value: Any) -> None:
        bucket = self._bucket(self._number(key))
        self.size += key not in bucket
        bucket[key] = value

    def __delitem__(self, key: Hashable) -> None:
        del self._bucket(self._number(key))[key]
        self.size -= 1

    def pop(self, key: Hashable, default: Any = None) -> Any:
        """As a dict's."""
        if key not in self:
            return default
        value = self.get(key)
        del self[key]
        return value

    def forget(self, expired: Callable[[Any], bool]) -> None:
        """Removes what has expired, of the buckets that were used."""
        for number, bucket in self._buckets.items():
            live = {key: value for key, value in bucket.items() if not expired(value)}
            self.size -= len(bucket) - len(live)
            self._buckets[number] = live

    def save(self, write: Write) -> None:
        """Writes the buckets that were used, more of them once they are too full."""
        if self.size > PART * len(self.parts):
            entries = list(self.items())
            while self.size > PART * len(self.parts):
                self.parts += [None] * len(self.parts)
            self._buckets = {number: {} for number in range(len(self.parts))}
            for key, value in entries:
                self._buckets[self._number(key)][key] = value
        for number, bucket in sorted(self._buckets.items()):
            self.parts[number] = write(self.parts[number], bucket) if bucket else None

    def _number(self, key: Hashable) -> int:
        return key_hash(key) & (len(self.parts) - 1)

    def _bucket(self, number: int) -> dict[Any, Any]:
        if number not in self._buckets:
            part = self.parts[number]
            self._buckets[number] = {} if part is None else self._read(part)
        return self._buckets[number]
