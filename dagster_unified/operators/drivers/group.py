"""One key group's state: pages of keys, read when they are needed, written back where they have changed.

Knows no engine; where the pages are kept is a `GroupStore`'s affair.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Mapping, Sequence
from typing import Any, Protocol

import pyarrow as pa
import pyarrow.compute as pc

from dagster_unified.errors import UnifiedError
from dagster_unified.operators.keys import key_hash
from dagster_unified.operators.numbers import INDEX
from dagster_unified.operators.state.pages import Content, Index, Page, PageCodec, decode_index, encode_index
from dagster_unified.operators.time import MIN_TIMESTAMP
from dagster_unified.operators.timers import TimerQueue


class GroupStore(Protocol):
    """Where one group's state is kept."""

    def read_index(self) -> bytes | None: ...
    def write_index(self, data: bytes) -> None: ...
    def read_page(self, number: int) -> bytes | None: ...
    def write_page(self, number: int, data: bytes) -> None: ...
    def remove_page(self, number: int) -> None: ...


class MemoryStore:
    """A group's state in memory."""

    def __init__(self, pages: Mapping[int, bytes] | None = None) -> None:
        self.pages = dict(pages or {})

    def read_index(self) -> bytes | None:
        return self.pages.get(INDEX)

    def write_index(self, data: bytes) -> None:
        self.pages[INDEX] = data

    def read_page(self, number: int) -> bytes | None:
        return self.pages.get(number)

    def write_page(self, number: int, data: bytes) -> None:
        self.pages[number] = data

    def remove_page(self, number: int) -> None:
        self.pages.pop(number, None)


PAGE_BITS = 12
"""A key's page is chosen by its hash above these bits, because the lowest ones have chosen its group."""


def pages_of_hashes(hashes: pa.ChunkedArray, pages: int) -> pa.ChunkedArray:
    """The pages that keys with these hashes are in, of so many, which are a power of two."""
    return pc.bit_wise_and(pc.shift_right(hashes, PAGE_BITS), pages - 1)


class Group:
    """The pages of one group, as far as they have been read, and the state of all their keys."""

    def __init__(self, store: GroupStore, codec: PageCodec, keys_per_page: int) -> None:
        self.store, self.codec, self.keys_per_page = store, codec, keys_per_page
        data = store.read_index()
        self.before = data
        self.index = decode_index(data) if data is not None else Index(MIN_TIMESTAMP, [Page()])
        self.keys: dict[Hashable, dict[str, Any]] = {}
        self.created: list[Hashable] = []
        self.pages: dict[int, Content] = {}
        self.held: dict[Hashable, list[tuple[int, Any]]] = {}
        self.loaded: dict[int, bytes | None] = {}
        self.chunks: set[int] = set()
        """The chunks of large lists and maps in the pages that were read."""

        self.read: dict[int, bytes] = {}
        self._hashes: dict[Hashable, int] = {}

    def page_of(self, key: Hashable) -> int:
        """The page that a key is in."""
        found = self._hashes.get(key)
        if found is None:
            found = self._hashes[key] = key_hash(key) >> PAGE_BITS
        return found & (len(self.index.pages) - 1)

    def pages_of(self, keys: Sequence[Hashable]) -> set[int]:
        """The pages that some keys are in; where that will be nearly all of them, all."""
        count = len(self.index.pages)
        return set(range(count)) if len(keys) >= 4 * count else {self.page_of(key) for key in keys}

    def pages_due(self, watermark: int, now: int) -> list[int]:
        """The pages with a timer or a held-back element that is due."""

        def due(moment: int | None, until: int) -> bool:
            return moment is not None and moment <= until

        return [
            i
            for i, p in enumerate(self.index.pages)
            if due(p.event_timer, watermark) or due(p.held, watermark) or due(p.processing_timer, now)
        ]

    def load(self, pages: Iterable[int]) -> list[Content]:
        """Reads pages that have not been read."""
        found = []
        for number in sorted(pages):
            if number in self.loaded:
                continue
            content = self.read_page(number)
            if content is None:
                continue
            self.pages[number] = content
            self.chunks |= content.parts()
            self._add(content)
            found.append(content)
        return found

    def read_page(self, number: int) -> Content | None:
        """What a page holds; None where it was never written."""
        data = self.index.inline if len(self.index.pages) == 1 else self.store.read_page(number)
        self.loaded[number] = data
        if data is not None:
            return self.codec.decode(data, self._read_chunk)
        if self.index.pages[number] != Page():
            raise UnifiedError(
                f"{self.codec.where}: page {number} of a key group's state is missing in the checkpoint;"
                " restore from an earlier one"
            )
        return None

    def split(self, count: int) -> int:
        """Make pages for so many keys, in a group that has none yet; return how many they are."""
        while count > self.keys_per_page * len(self.index.pages):
            self.index.pages = [Page() for _ in range(2 * len(self.index.pages))]
        return len(self.index.pages)

    def fill(self, pages: Iterable[tuple[int, Content]], watermark: int) -> None:
        """Write the pages of a group that has none yet, one after another."""
        self.loaded = dict.fromkeys(range(len(self.index.pages)))
        for number, content in pages:
            self._store(number, content)
        self._finish(watermark)

    def _add(self, content: Content) -> None:
        self.keys.update(content.keys)
        for timestamp, key, record in content.held:
            self.held.setdefault(key, []).append((timestamp, record))

    def hold(self, key: Hashable, elements: list[tuple[int, Any]]) -> None:
        """Keeps elements until the watermark passes them."""
        self.held.setdefault(key, []).extend(elements)

    def release(self, watermark: int) -> list[tuple[int, Hashable, Any]]:
        """The held-back elements that the watermark passes, in event-time order, equal ones as they arrived."""
        due = [(t, key, record) for key, elements in self.held.items() for t, record in elements if t <= watermark]
        if due:
            waiting = {key: [e for e in elements if e[0] > watermark] for key, elements in self.held.items()}
            self.held = {key: elements for key, elements in waiting.items() if elements}
            due.sort(key=lambda e: e[0])
        return due

    def save(self, event_timers: TimerQueue, processing_timers: TimerQueue, watermark: int) -> None:
        """Writes back what has changed."""
        count = sum(p.keys for i, p in enumerate(self.index.pages) if i not in self.loaded) + len(self.keys)
        if count > self.keys_per_page * len(self.index.pages):
            for content in self.load(range(len(self.index.pages))):
                for queue, timers in (
                    (event_timers, content.event_timers),
                    (processing_timers, content.processing_timers),
                ):
                    for timestamp, key, generation in timers:
                        queue.register(key, timestamp, generation)
            self.split(count)
            self.loaded = dict.fromkeys(range(len(self.index.pages)))
            self.pages, self.created = {}, list(self.keys)
        self._write(event_timers, processing_timers)
        self._finish(watermark)

    def _finish(self, watermark: int) -> None:
        self.index.watermark = watermark
        index = encode_index(self.index)
        if index != self.before:
            self.store.write_index(index)

    def _write(self, event_timers: TimerQueue, processing_timers: TimerQueue) -> None:
        pages: dict[int, Content] = {number: Content(large=bool(self.chunks)) for number in self.loaded}
        for number, content in self.pages.items():
            pages[number].keys = (
                content.keys
                if all(content.keys.values())
                else {key: state for key, state in content.keys.items() if state}
            )
        for key in self.created:
            state = self.keys[key]
            if state:
                pages[self.page_of(key)].keys[key] = state
        for timer in event_timers.pending():
            pages[self.page_of(timer[1])].event_timers.append(timer)
        for timer in processing_timers.pending():
            pages[self.page_of(timer[1])].processing_timers.append(timer)
        for key, elements in self.held.items():
            pages[self.page_of(key)].held += [(timestamp, key, record) for timestamp, record in elements]
        for number, content in pages.items():
            self._store(number, content)
        for gone in (
            self.chunks - {number for content in pages.values() for number in content.parts()} if self.chunks else ()
        ):
            self.store.remove_page(gone)

    def _store(self, number: int, content: Content) -> None:
        """Write a page, if it has changed."""
        self.index.pages[number] = content.entry()
        data = self.codec.encode(content, self._write_chunk, self._read_chunk)
        if len(self.index.pages) == 1:
            self.index.inline = data
            return
        self.index.inline = None
        if data != self.loaded[number]:
            self.store.write_page(number, data)

    def _read_chunk(self, number: int) -> bytes:
        data = self.store.read_page(number)
        if data is None:
            raise UnifiedError(
                f"{self.codec.where}: a chunk of a key group's state is missing in the checkpoint; restore from an"
                " earlier one"
            )
        self.read[number] = data
        return data

    def _write_chunk(self, number: int | None, data: bytes) -> int:
        if number is None:
            self.index.parts += 1
            number = -self.index.parts
        if self.read.get(number) != data:
            self.store.write_page(number, data)
        return number
