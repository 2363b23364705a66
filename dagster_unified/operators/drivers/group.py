"""One key group's state: pages of keys, read when they are needed, and written back where they have changed.

Of a page only the needed blocks are decoded. Where an operator has one state of one value, and its keys nothing else,
they are decoded into one column for the group; else each key has a dict of its states. Knows no engine; a `PageStore`
decides where the pages are kept.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import median_low
from typing import Any

import msgspec
import pyarrow as pa
import pyarrow.compute as pc

from dagster_unified.errors import UnifiedError
from dagster_unified.operators.keys import key_hash
from dagster_unified.operators.operator import INDEX, PageStore, TimerQueue
from dagster_unified.operators.state.backend import KeyedColumn
from dagster_unified.operators.state.pages import (
    BLOCKS_PER_PAGE,
    BYTES_PER_PAGE,
    HASH_BITS,
    LARGE_PAGE,
    NOTHING,
    Block,
    Blocks,
    Columns,
    Content,
    Index,
    Page,
    PageCodec,
    decode_index,
    decode_page,
    encode_index,
    encode_page,
)
from dagster_unified.operators.time import MIN_TIMESTAMP


class MemoryStore:
    """A group's state in memory."""

    def __init__(self, pages: Mapping[int, bytes] | None = None) -> None:
        self.pages = dict(pages or {})

    def read_page(self, number: int) -> bytes | None:
        return self.pages.get(number)

    def write_page(self, number: int, data: bytes) -> None:
        self.pages[number] = data

    def remove_page(self, number: int) -> None:
        self.pages.pop(number, None)


PAGE_BITS = 12
"""A key's page is chosen by its hash above these bits, because the lowest ones have chosen its group."""


def pages_of_hashes(hashes: pa.ChunkedArray, pages: int) -> pa.ChunkedArray:
    """The pages of keys with these hashes; `pages` is how many there are, a power of two."""
    return pc.bit_wise_and(pc.shift_right(hashes, PAGE_BITS), pages - 1)


def in_order_of_blocks(pages: pa.ChunkedArray, hashes: pa.ChunkedArray) -> pa.ChunkedArray:
    """Numbers that sort keys by page, and in a page by block, for up to `BLOCKS_PER_PAGE` blocks."""
    bits = BLOCKS_PER_PAGE.bit_length() - 1
    return pc.add(pc.shift_left(pages, bits), pc.shift_right(hashes, HASH_BITS - bits))


Divided = Callable[[Blocks], "Sequence[Block]"]
"""Splits a page's content into its blocks."""


@dataclass
class _OpenPage:
    """A page that was read: its blocks as stored, and the blocks that were decoded."""

    blocks: Blocks
    contents: dict[int, Content] = field(default_factory=dict)
    stored: dict[int, Columns] = field(default_factory=dict)
    changed: bool = False

    @classmethod
    def fresh(cls, blocks: int) -> _OpenPage:
        """A page of this many empty blocks, to replace another."""
        return cls(Blocks.empty(blocks), {block: Content() for block in range(blocks)}, changed=True)

    def keys(self) -> int:
        """How many keys it had when it was read."""
        return sum(entry.keys for entry in self.blocks.entries)

    def keys_read(self) -> int:
        """How many of them were decoded."""
        return sum(self.blocks.entries[block].keys for block in (*self.contents, *self.stored))

    def typical_size(self) -> int:
        """The page's size in bytes if no block were much larger than the others, as for a key with a lot of state."""
        return len(self.blocks.data) * median_low(map(len, self.blocks.data))

    def missing(self, blocks: Iterable[int]) -> list[int]:
        return sorted(block for block in set(blocks) if block not in self.contents and block not in self.stored)

    def put(self, block: int, entry: Page, data: msgspec.Raw) -> None:
        self.blocks.entries[block] = entry
        if data != self.blocks.data[block]:
            self.blocks.data[block] = data
            self.changed = True


class Group:
    """The pages of one group that have been read, and the state of their keys."""

    def __init__(self, store: PageStore, codec: PageCodec, keys_per_page: int) -> None:
        self.store, self.codec, self.keys_per_page = store, codec, keys_per_page
        self.keys_per_block = max(1, keys_per_page // BLOCKS_PER_PAGE)
        data = store.read_page(INDEX)
        self.before = data
        self.index = decode_index(data) if data is not None else Index(MIN_TIMESTAMP, [Page()])
        codec.check_layouts(self.index)
        self.keys: dict[Hashable, dict[str, Any]] = {}
        self.created: list[Hashable] = []
        self.column: KeyedColumn | None = None
        """The content of the blocks that were read, where each key has one state only; else `keys` has it."""

        self.pages: dict[int, _OpenPage] = {}
        self.held_back: dict[Hashable, list[tuple[int, Any]]] = {}
        self.chunks: set[int] = set()
        """The chunks of large lists and maps in the blocks that were read."""

        self.read: dict[int, bytes] = {}
        self._hashes: dict[Hashable, int] = {}

    # Reading

    def load_column(self, name: str, keys: Sequence[Hashable]) -> bool:
        """Read the blocks of some keys into the column of one state.

        Return False where that is impossible, because keys have anything else, or were read before; then use `load`.
        """
        if self.keys or any(page.contents for page in self.pages.values()):
            return False
        column = self.column = self.column or KeyedColumn(name)
        for page, blocks in self._places(keys):
            for block in page.missing(blocks):
                columns = self.codec.decode_columns(page.blocks.data[block], only=name)
                if columns is None:
                    return False
                if columns.keys:
                    column.extend(columns.keys, columns.values[0])
                page.stored[block] = columns
        return True

    def load(self, keys: Sequence[Hashable]) -> list[Content]:
        """Read the blocks of some keys, and return their contents, without blocks that were read before."""
        self._leave_column()
        return self._load(self._places(keys))

    def load_all(self) -> list[Content]:
        """As `load`, for all keys."""
        self._leave_column()
        return self._load(self._everything())

    def load_due(self, watermark: int, now: int) -> list[Content]:
        """As `load`, for the blocks with a timer or a held-back element that is due."""
        pages = [self._open(i) for i, entry in enumerate(self.index.pages) if entry.due(watermark, now)]
        if pages:
            self._leave_column()
        return self._load(
            (page, [i for i, entry in enumerate(page.blocks.entries) if entry.due(watermark, now)]) for page in pages
        )

    def contents(self) -> Iterator[Block]:
        """The contents of all blocks, one after another, by column where possible; none becomes current."""
        for number in range(len(self.index.pages)):
            for data in self._read_page(number).data:
                if data != NOTHING:
                    yield self.codec.decode_columns(data) or self.codec.decode(data, self._read_chunk)

    def _load(self, places: Iterable[tuple[_OpenPage, Iterable[int]]]) -> list[Content]:
        contents = []
        for page, blocks in places:
            for block in page.missing(blocks):
                content = page.contents[block] = self.codec.decode(page.blocks.data[block], self._read_chunk)
                self.chunks |= content.chunks()
                self.keys.update(content.keys)
                for timestamp, key, record in content.held_back:
                    self.held_back.setdefault(key, []).append((timestamp, record))
                contents.append(content)
        return contents

    def _leave_column(self) -> None:
        column, self.column = self.column, None
        if column is None:
            return
        for page in self.pages.values():
            for block, stored in page.stored.items():
                states = {key: {column.name: column.values[key]} for key in stored.keys}
                page.contents[block] = Content(states)
                self.keys.update(states)
            page.stored.clear()
        for key in column.created:
            self.keys[key] = {column.name: column.values[key]}
            self.created.append(key)

    def _places(self, keys: Sequence[Hashable]) -> Iterator[tuple[_OpenPage, Iterable[int]]]:
        """The pages and blocks of some keys; all of them, where nearly all would be needed."""
        key_count = sum(entry.keys for entry in self.index.pages)
        if len(keys) * self.keys_per_block >= 2 * max(key_count, self.keys_per_block * len(self.index.pages)):
            yield from self._everything()
            return
        hashes: dict[int, list[int]] = {}
        for key in keys:
            hashed = self._hash(key)
            hashes.setdefault(self._page_of(hashed), []).append(hashed)
        for number in sorted(hashes):
            page = self._open(number)
            yield page, map(page.blocks.block_of, hashes[number])

    def _everything(self) -> Iterator[tuple[_OpenPage, Iterable[int]]]:
        for number in range(len(self.index.pages)):
            page = self._open(number)
            yield page, range(len(page.blocks.data))

    def _open(self, number: int) -> _OpenPage:
        page = self.pages.get(number)
        if page is None:
            page = self.pages[number] = _OpenPage(self._read_page(number))
        return page

    def _read_page(self, number: int) -> Blocks:
        data = self.index.inline if len(self.index.pages) == 1 else self.store.read_page(number)
        if data is not None:
            return decode_page(data)
        if self.index.pages[number] != Page():
            raise UnifiedError(
                f"{self.codec.where}: page {number} of a key group's state is missing in the checkpoint;"
                " restore from an earlier one"
            )
        return Blocks.empty()

    def _hash(self, key: Hashable) -> int:
        hashed = self._hashes.get(key)
        if hashed is None:
            hashed = self._hashes[key] = key_hash(key)
        return hashed

    def _page_of(self, hashed: int) -> int:
        return hashed >> PAGE_BITS & len(self.index.pages) - 1

    def _block_of(self, key: Hashable) -> tuple[int, int]:
        hashed = self._hash(key)
        number = self._page_of(hashed)
        return number, self.pages[number].blocks.block_of(hashed)

    # Elements that wait for the watermark

    def hold(self, key: Hashable, elements: list[tuple[int, Any]]) -> None:
        self.held_back.setdefault(key, []).extend(elements)

    def release(self, watermark: int) -> list[tuple[int, Hashable, Any]]:
        """The held-back elements that the watermark passes, in event-time order; equal times keep their order."""
        due = [(t, key, record) for key, elements in self.held_back.items() for t, record in elements if t <= watermark]
        if due:
            waiting = {key: [e for e in elements if e[0] > watermark] for key, elements in self.held_back.items()}
            self.held_back = {key: elements for key, elements in waiting.items() if elements}
            due.sort(key=lambda e: e[0])
        return due

    # Writing

    def split(self, count: int, size: int = 0) -> int:
        """Make pages for this many keys, or bytes, in a group that has none yet; return how many pages."""
        self.index.wanted = max(self.index.wanted, -(-size // LARGE_PAGE))
        pages = self._pages_for(count)
        self.index.pages = [Page() for _ in range(pages)]
        return pages

    def _pages_for(self, keys: int) -> int:
        count = len(self.index.pages)
        while keys > self.keys_per_page * count or (count < self.index.wanted and keys > self.keys_per_block * count):
            count *= 2
        return count

    def fill(self, pages: Iterable[tuple[int, int, Divided]], watermark: int) -> None:
        """Write the pages of a group that has none yet, one after another, each with its number of keys."""
        for number, keys, divided in pages:
            page = self.pages[number] = _OpenPage(Blocks.empty(self._blocks_for(keys)))
            for block, part in enumerate(divided(page.blocks)):
                self._put(page, block, part)
            self._store(number, page)
            del self.pages[number]
        self._finish(watermark)

    def save(self, event_timers: TimerQueue, processing_timers: TimerQueue, watermark: int) -> None:
        for content in self._make_room():
            for queue, timers in (
                (event_timers, content.event_timers),
                (processing_timers, content.processing_timers),
            ):
                for timestamp, key, generation in timers:
                    queue.register(key, timestamp, generation)
        if self.column is not None:
            self._write_column(self.column)
        else:
            self._write(event_timers, processing_timers)
        for number, page in self.pages.items():
            self._store(number, page)
        self._finish(watermark)

    def all_content(self, event_timers: TimerQueue, processing_timers: TimerQueue) -> Block:
        """Everything in the group, once all has been read; it is not written back."""
        events, moments = list(event_timers.pending()), list(processing_timers.pending())
        held_back = [
            (timestamp, key, record) for key, elements in self.held_back.items() for timestamp, record in elements
        ]
        if self.column is not None:
            values = self.column.values
            return Columns(
                (self.column.name,),
                list(values),
                [list(values.values())],
                event_timers=events,
                processing_timers=moments,
                held_back=held_back,
            )
        return Content(self.keys, event_timers=events, processing_timers=moments, held_back=held_back, large=True)

    def _make_room(self) -> list[Content]:
        """Make pages, and blocks of pages, for new keys; return what was read for it."""
        created = self.created if self.column is None else self.column.created
        if not created and self.index.wanted <= len(self.index.pages):
            return []
        contents: list[Content] = []
        before = sum(page.keys for number, page in enumerate(self.index.pages) if number not in self.pages)
        before += sum(page.keys() - page.keys_read() for page in self.pages.values())
        count = before + len(self.keys if self.column is None else self.column.values)
        if self._pages_for(count) > len(self.index.pages):
            contents += self.load_all()
            self.split(count)
            self.pages = {number: _OpenPage.fresh(1) for number in range(len(self.index.pages))}
            created = self.created = list(self.keys)
        for number, more in Counter(self._page_of(self._hash(key)) for key in created).items():
            page = self.pages[number]
            blocks = self._blocks_for(page.keys() + more)
            if blocks > len(page.blocks.data):
                self._leave_column()
                contents += self._load([(page, range(len(page.blocks.data)))])
                created = self.created = [*self.created, *(key for c in page.contents.values() for key in c.keys)]
                self.pages[number] = _OpenPage.fresh(blocks)
        return contents

    def _blocks_for(self, keys: int) -> int:
        count = 1
        while keys > self.keys_per_block * count:
            count *= 2
        return count

    def _write(self, event_timers: TimerQueue, processing_timers: TimerQueue) -> None:
        blocks: dict[tuple[int, int], Content] = {}
        for number, page in self.pages.items():
            for block, content in page.contents.items():
                states = content.keys
                if not all(states.values()):
                    states = {key: state for key, state in states.items() if state}
                blocks[number, block] = Content(states, large=bool(self.chunks))
        for key in self.created:
            state = self.keys[key]
            if state:
                blocks[self._block_of(key)].keys[key] = state
        for timer in event_timers.pending():
            blocks[self._block_of(timer[1])].event_timers.append(timer)
        for timer in processing_timers.pending():
            blocks[self._block_of(timer[1])].processing_timers.append(timer)
        for key, elements in self.held_back.items():
            blocks[self._block_of(key)].held_back += [(timestamp, key, record) for timestamp, record in elements]
        for (number, block), content in blocks.items():
            self._put(self.pages[number], block, content)
        if self.chunks:
            for gone in self.chunks - {number for content in blocks.values() for number in content.chunks()}:
                self.store.remove_page(gone)

    def _write_column(self, column: KeyedColumn) -> None:
        """As `_write`, where each key has one state and nothing else. Stored keys are not encoded again."""
        created: dict[tuple[int, int], list[Hashable]] = {}
        for key in column.created:
            created.setdefault(self._block_of(key), []).append(key)
        for number, page in self.pages.items():
            for block, stored in page.stored.items():
                more = created.get((number, block), [])
                keys = stored.keys + more if more else stored.keys
                encoded = None if more else stored.encoded_keys
                self._put(page, block, Columns((column.name,), keys, [column.values_of(keys)], encoded_keys=encoded))

    def _put(self, page: _OpenPage, number: int, block: Block) -> None:
        data = self.codec.encode(block, self._write_chunk, self._read_chunk)
        page.put(number, block.entry(), data)

    def _store(self, number: int, page: _OpenPage) -> None:
        if not page.changed:
            return
        self.index.pages[number] = page.blocks.entry()
        data = encode_page(page.blocks)
        self.index.wanted = max(self.index.wanted, -(-len(self.index.pages) * page.typical_size() // BYTES_PER_PAGE))
        if len(self.index.pages) == 1:
            self.index.inline = data
            return
        self.index.inline = None
        self.store.write_page(number, data)

    def _finish(self, watermark: int) -> None:
        self.index.watermark = watermark
        self.codec.set_layouts(self.index)
        index = encode_index(self.index)
        if index != self.before:
            self.store.write_page(INDEX, index)

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
            self.index.chunks += 1
            number = -self.index.chunks
        if self.read.get(number) != data:
            self.store.write_page(number, data)
        return number


def apart(content: Content, hashes: Mapping[Hashable, int], blocks: Blocks) -> list[Content]:
    """A page's content, split into blocks by the hashes of its keys."""
    if len(blocks.data) == 1:
        return [content]
    return content.split(blocks.blocks_of(hashes).__getitem__, len(blocks.data))
