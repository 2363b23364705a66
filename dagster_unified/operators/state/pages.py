"""How the keyed state of a key group is stored: pages of keys, encoded with msgspec by their declared types.

A group's keys are spread over pages by their hash, so that a micro-batch reads and writes only what it touches; the
keys of a page are spread over blocks, so that it decodes and encodes only what it touches. A block holds its keys'
state, column by column, their timers and held-back elements; for a large list or map it holds where the chunks are.
Nothing in it is executable, and each state is named: a state that the operator has not declared (yet) stays as it is,
and one that no longer fits its type is an error that names it.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain
from operator import itemgetter
from typing import Any, TypedDict

import msgspec

from dagster_unified.errors import StateError
from dagster_unified.operators.functions.type_variables import T
from dagster_unified.operators.state.chunks import SPILLED, SpilledCollection, Write
from dagster_unified.operators.state.descriptors import StateDescriptor
from dagster_unified.operators.state.evolution import can_read, layout_of, shown

KEYS_PER_PAGE = 4096
"""Keys that a page holds on average before a group's pages are split; each page is a round trip to read or write."""

BYTES_PER_PAGE = 1 << 17
"""A page of this many bytes makes its group split its pages, as long as each has a block's keys."""

LARGE_PAGE = 16 * BYTES_PER_PAGE
"""Bytes of rows that become one page at most, likewise: they are larger than the page that they become."""

BLOCKS_PER_PAGE = 64
"""How many blocks a page of `KEYS_PER_PAGE` keys has."""

HASH_BITS = 32
"""Bits of a key's hash; the highest choose its block."""


class Index(msgspec.Struct, array_like=True):
    """A group's summary: how many pages it has, and when each has something to do."""

    watermark: int
    pages: list[Page]
    inline: bytes | None = None
    """The content of the only page, where there is but one."""
    chunks: int = 0
    """How many chunks of large lists and maps were ever numbered; they count down from -1, pages up from 0."""
    wanted: int = 1
    """How many pages there should be, by the bytes of the largest."""
    layouts: dict[str, str] = {}
    """The layout of each state in the pages, by its name."""
    of_keys: str = ""
    of_records: str = ""
    """The layouts of keys and of held-back elements."""


class Page(msgspec.Struct, array_like=True):
    """The index's entry for one page, and for one block in a page.

    It has the number of keys, and the earliest event timer, processing timer and held-back element.
    """

    keys: int = 0
    event_timer: int | None = None
    processing_timer: int | None = None
    held_back: int | None = None

    def due(self, watermark: int, now: int) -> bool:
        """Whether a timer or a held-back element is due."""
        return (
            (self.event_timer is not None and self.event_timer <= watermark)
            or (self.held_back is not None and self.held_back <= watermark)
            or (self.processing_timer is not None and self.processing_timer <= now)
        )


NOTHING = msgspec.Raw(b"\xc0")
"""An empty block."""


class Blocks(msgspec.Struct, array_like=True):
    """A page as it is stored: its blocks, a power of two of them, and an entry for each."""

    entries: list[Page]
    data: list[msgspec.Raw]

    @classmethod
    def empty(cls, count: int = 1) -> Blocks:
        return cls([Page() for _ in range(count)], [NOTHING] * count)

    def block_of(self, key_hash: int) -> int:
        return (key_hash << len(self.data).bit_length() - 1) >> HASH_BITS

    def blocks_of(self, hashes: Mapping[Hashable, int]) -> dict[Hashable, int]:
        """The block of each key, from the keys' hashes."""
        bits = self._bits
        return {key: key_hash >> bits for key, key_hash in hashes.items()}

    @property
    def _bits(self) -> int:
        return HASH_BITS - len(self.data).bit_length() + 1

    def ends_of(self, hashes: Sequence[int]) -> list[int]:
        """Where each block ends among keys with these hashes, which are in the order of blocks."""
        bits = self._bits
        numbers = [key_hash >> bits for key_hash in hashes]
        return [bisect_left(numbers, block) for block in range(1, len(self.data) + 1)]

    def entry(self) -> Page:
        """The page's entry in the index."""
        entries = self.entries
        if len(entries) == 1:
            return entries[0]
        return Page(
            sum(entry.keys for entry in entries),
            min((entry.event_timer for entry in entries if entry.event_timer is not None), default=None),
            min((entry.processing_timer for entry in entries if entry.processing_timer is not None), default=None),
            min((entry.held_back for entry in entries if entry.held_back is not None), default=None),
        )


class _Section(msgspec.Struct, array_like=True):
    """The keys of a block that have the same states, and a column for each state."""

    names: list[str]
    keys: msgspec.Raw
    columns: list[msgspec.Raw]


class _Stored(msgspec.Struct, array_like=True):
    sections: list[_Section]
    event_timers: msgspec.Raw
    processing_timers: msgspec.Raw
    held_back: msgspec.Raw
    large: list[_Large] = []


class _Large(msgspec.Struct, array_like=True):
    """A list or map in chunks: its key's place in the page, its name, kind, size and chunks."""

    key: int
    name: str
    kind: str
    size: int
    chunks: list[int | None]


_moment = itemgetter(0)


@dataclass(kw_only=True)
class Block:
    """Some keys in memory: their timers and held-back elements; `Content` and `Columns` have their state.

    Timers are `(timestamp, key, generation)`, held-back elements `(timestamp, key, record)`, in order of arrival.
    """

    event_timers: list[tuple[int, Hashable, int]] = field(default_factory=list)
    processing_timers: list[tuple[int, Hashable, int]] = field(default_factory=list)
    held_back: list[tuple[int, Hashable, Any]] = field(default_factory=list)

    @property
    def size(self) -> int:
        """How many keys have state."""
        raise NotImplementedError

    def content(self) -> Content:
        """The block with a dict of states for each key."""
        raise NotImplementedError

    def entry(self) -> Page:
        """Its entry in the index."""
        return Page(
            self.size,
            min(map(_moment, self.event_timers), default=None),
            min(map(_moment, self.processing_timers), default=None),
            min(map(_moment, self.held_back), default=None),
        )

    def _take(self, other: Block) -> None:
        self.event_timers += other.event_timers
        self.processing_timers += other.processing_timers
        self.held_back += other.held_back


@dataclass
class Content(Block):
    """A block with a dict of its states for each key."""

    keys: dict[Hashable, dict[str, Any]] = field(default_factory=dict)
    large: bool = field(default=False, kw_only=True)
    """Whether it may have large lists or maps."""

    @property
    def size(self) -> int:
        return len(self.keys)

    def add(self, other: Content) -> None:
        """Take over the keys of another block."""
        self.keys.update(other.keys)
        self.large = self.large or other.large
        self._take(other)

    def content(self) -> Content:
        return self

    def split(self, number_of: Callable[[Hashable], int], count: int) -> list[Content]:
        """The content in `count` parts, each with the keys of its number."""
        states = _in_parts(list(self.keys.items()), list(map(number_of, self.keys)), count)
        event_timers, processing_timers, held_back = (
            _in_parts(entries, [number_of(key) for _, key, _ in entries], count)
            for entries in (self.event_timers, self.processing_timers, self.held_back)
        )
        return [
            Content(
                dict(states[number]),
                event_timers=event_timers[number],
                processing_timers=processing_timers[number],
                held_back=held_back[number],
                large=self.large,
            )
            for number in range(count)
        ]

    def chunks(self) -> set[int]:
        """The chunks of its large lists and maps."""
        if not self.large:
            return set()
        collections = (v for state in self.keys.values() for v in state.values() if isinstance(v, SpilledCollection))
        return {number for value in collections for number in value.chunks if number is not None}


def _in_parts(entries: list[T], numbers: list[int], count: int) -> list[list[T]]:
    """The entries of each number; fast where they are in the order of numbers."""
    order = sorted(numbers)
    if order != numbers:
        entries = [entries[place] for place in sorted(range(len(numbers)), key=numbers.__getitem__)]
    ends = [bisect_left(order, number) for number in range(1, count + 1)]
    return [entries[start:end] for start, end in zip([0, *ends], ends, strict=False)]


@dataclass
class Columns(Block):
    """A block by column: its keys have the same declared states, and none is a large list or map."""

    names: tuple[str, ...]
    keys: list[Hashable]
    values: list[list[Any]]
    """Those of each state, in the order of the keys."""

    encoded_keys: msgspec.Raw | None = field(default=None, kw_only=True)
    """The keys as they are stored, where they are the same."""

    @property
    def size(self) -> int:
        return len(self.keys)

    def add(self, other: Columns) -> None:
        """Take over the keys of another block, which have the same states."""
        self.keys += other.keys
        self.encoded_keys = None
        for values, more in zip(self.values, other.values, strict=True):
            values += more
        self._take(other)

    def cut(self, ends: Sequence[int]) -> list[Columns]:
        """The keys in stretches that end at these places.

        Timers have to be in the order of their keys, and no key may have held-back elements.
        """
        starts = [0, *ends[:-1]]
        spans = list(zip(starts, ends, strict=True))
        events, moments = (self._cut(timers, spans) for timers in (self.event_timers, self.processing_timers))
        return [
            Columns(
                self.names,
                self.keys[start:end],
                [values[start:end] for values in self.values],
                event_timers=event_part,
                processing_timers=processing_part,
            )
            for (start, end), event_part, processing_part in zip(spans, events, moments, strict=True)
        ]

    def _cut(
        self, timers: list[tuple[int, Hashable, int]], spans: Sequence[tuple[int, int]]
    ) -> list[list[tuple[int, Hashable, int]]]:
        if len(timers) == len(self.keys) and all(timer[1] is key for timer, key in zip(timers, self.keys, strict=True)):
            return [timers[start:end] for start, end in spans]
        if not timers:
            return [[] for _ in spans]
        place = {key: number for number, key in enumerate(self.keys)}
        places = [place[key] for _, key, _ in timers]
        return [timers[bisect_left(places, start) : bisect_left(places, end)] for start, end in spans]

    def content(self) -> Content:
        return Content(
            _states_by_key(self.keys, self.names, self.values),
            event_timers=self.event_timers,
            processing_timers=self.processing_timers,
            held_back=self.held_back,
        )


def _states_by_key(
    keys: Sequence[Hashable], names: Sequence[str], columns: Sequence[Sequence[Any]]
) -> dict[Hashable, dict[str, Any]]:
    """The states of each key, from a column of values for each name."""
    if len(names) == 1:
        (name,), (values,) = names, columns
        return {key: {name: value} for key, value in zip(keys, values, strict=True)}
    rows = zip(*columns, strict=True)
    return {key: dict(zip(names, row, strict=True)) for key, row in zip(keys, rows, strict=True)}


_index = msgspec.msgpack.Decoder(Index)
_blocks = msgspec.msgpack.Decoder(Blocks)
_stored = msgspec.msgpack.Decoder(_Stored | None)
_encoder = msgspec.msgpack.Encoder()
_NONE = msgspec.Raw(_encoder.encode([]))


def encode_index(index: Index) -> bytes:
    """Encode a group's index."""
    return _encoder.encode(index)


def decode_index(data: bytes) -> Index:
    """The inverse of `encode_index`."""
    return _index.decode(data)


def encode_page(blocks: Blocks) -> bytes:
    """Encode a page."""
    return _encoder.encode(blocks)


def decode_page(data: bytes) -> Blocks:
    """The inverse of `encode_page`."""
    return _blocks.decode(data)


_ANEW = "start without state, in BATCH with a backfill from the first partition"
"""The advice where nothing can read what is stored."""


def _check_layout(where: str, what: str, declared: str, stored: str) -> None:
    """Raise `StateError` where stored data would be read as something else."""
    if declared != stored and not can_read(declared, stored):
        raise StateError(
            f"{where}: the type of {what} has changed: the checkpoint has {shown(stored)}, and {shown(declared)} is"
            f" declared; keep it as it was, start from a savepoint where only its fields have other places, or {_ANEW}"
        )


class BroadcastCodec:
    """Encodes and decodes a group's broadcast maps by the types that their descriptors declare.

    `where` names the operator in errors.
    """

    def __init__(self, where: str, declared: Mapping[str, StateDescriptor[Any]]) -> None:
        self.where = where
        types: Any = TypedDict("broadcast", {name: d.stored_type for name, d in declared.items()}, total=False)  # type: ignore[misc]
        self._layouts = {name: d.stored_layout for name, d in declared.items()}
        self._decoder: msgspec.msgpack.Decoder[Any] = msgspec.msgpack.Decoder(types)
        self._raw = msgspec.msgpack.Decoder(tuple[dict[str, str], msgspec.Raw])

    def encode(self, maps: dict[str, dict[Any, Any]]) -> bytes:
        """Raises `StateError` for what cannot be stored."""
        try:
            return _encoder.encode(({name: self._layouts[name] for name in maps}, maps))
        except (TypeError, ValueError, OverflowError) as error:
            raise StateError(
                f"{self.where}: broadcast state cannot be stored: {error}; put what its MapStateDescriptor declares"
            ) from error

    def decode(self, data: bytes) -> dict[str, dict[Any, Any]]:
        """Raises `StateError` for a map that does not fit its type any more, or that nothing declares."""
        layouts, stored = self._raw.decode(data)
        lost = sorted(layouts.keys() - self._layouts.keys())
        if lost:
            raise StateError(
                f"{self.where}: the checkpoint has broadcast state '{lost[0]}', which is not declared; give"
                f" broadcast(...) its descriptor, or {_ANEW}"
            )
        for name, layout in layouts.items():
            _check_layout(self.where, f"broadcast state '{name}'", self._layouts[name], layout)
        try:
            maps: dict[str, dict[Any, Any]] = self._decoder.decode(stored)
        except msgspec.ValidationError as error:
            raise StateError(
                f"{self.where}: stored broadcast state does not fit its declared type: {error}; keep the type as it"
                f" was, or {_ANEW}"
            ) from error
        return maps


class PageCodec:
    """Encodes and decodes the blocks of one operator's pages.

    `where` names it in errors; `declared` are its descriptors, which may become more.
    """

    def __init__(self, where: str, key_type: Any, record_type: Any, declared: dict[str, StateDescriptor[Any]]) -> None:
        self.where, self.declared = where, declared
        self._chunk_decoders: dict[str, msgspec.msgpack.Decoder[Any]] = {}
        self._key_layout, self._record_layout = layout_of(key_type), layout_of(record_type)
        self._keys = self._decoder("keys", list[key_type])
        self._timers = self._decoder("timers", list[tuple[int, key_type, int]])
        self._held_back = self._decoder("held-back elements", list[tuple[int, key_type, record_type]])
        self._columns: dict[str, msgspec.msgpack.Decoder[Any]] = {}
        self._layouts: dict[str, str] = {}

    def check_layouts(self, index: Index) -> None:
        """Raise `StateError` where state, keys or held-back elements of a group would be read as something else."""
        if index.of_keys and index.of_keys != self._key_layout:
            raise StateError(
                f"{self.where}: the type of the key has changed: the checkpoint has {shown(index.of_keys)}, and"
                f" {shown(self._key_layout)} is declared; key by what it was, or {_ANEW}"
            )
        if index.of_records and any(page.held_back is not None for page in index.pages):
            _check_layout(self.where, "the elements that are held back", self._record_layout, index.of_records)
        for name, layout in index.layouts.items():
            if name in self.declared:
                _check_layout(self.where, f"state '{name}'", self._layout(name), layout)

    def _layout(self, name: str) -> str:
        if name not in self._layouts:
            self._layouts[name] = self.declared[name].stored_layout
        return self._layouts[name]

    def set_layouts(self, index: Index) -> None:
        """Record in the index how the declared states lie in the group's pages."""
        index.of_keys, index.of_records = self._key_layout, self._record_layout
        index.layouts |= {name: self._layout(name) for name in self.declared}

    def encode(self, block: Block, write: Write, read: Callable[[int], bytes]) -> msgspec.Raw:
        """Encode a block; large lists and maps are written in chunks."""
        if isinstance(block, Columns):
            return self.encode_columns(block)
        content = block.content()
        if not (content.keys or content.event_timers or content.processing_timers or content.held_back):
            return NOTHING
        large = self._set_apart(content, write, read)
        try:
            return self._encode(content, large)
        finally:
            for state, name, value in large:
                state[name] = value

    def _encode(self, content: Content, large: list[tuple[dict[str, Any], str, SpilledCollection]]) -> msgspec.Raw:
        for state, name, value in large:
            state[name] = value.inline
        alike = _by_names(content.keys)
        try:
            sections = [_section(names, states) for names, states in alike.items()]
        except (TypeError, ValueError, OverflowError) as error:
            raise StateError(f"{self.where}: state cannot be stored: {error}; {self._misfit(content)}") from error
        ordered = chain.from_iterable(states.values() for states in alike.values())
        places = {id(state): place for place, state in enumerate(ordered)} if large else {}
        apart = [
            _Large(places[id(state)], name, value.kind, value.size, list(value.chunks)) for state, name, value in large
        ]
        return self._stored(sections, content, apart)

    def encode_columns(self, columns: Columns) -> msgspec.Raw:
        """Encode a block whose keys all have the same states, none of which is a collection."""
        if not columns.keys:
            return NOTHING
        try:
            states = [msgspec.Raw(_encoder.encode(values)) for values in columns.values]
            keys = columns.encoded_keys or msgspec.Raw(_encoder.encode(columns.keys))
            section = _Section(list(columns.names), keys, states)
        except (TypeError, ValueError, OverflowError):
            return self._encode(columns.content(), [])  # which says whose value cannot be stored
        return self._stored([section], columns)

    def _stored(self, sections: list[_Section], block: Block, apart: Sequence[_Large] = ()) -> msgspec.Raw:
        event_timers, processing_timers, waiting = (
            msgspec.Raw(_encoder.encode(part)) if part else _NONE
            for part in (block.event_timers, block.processing_timers, block.held_back)
        )
        return msgspec.Raw(_encoder.encode(_Stored(sections, event_timers, processing_timers, waiting, list(apart))))

    def _set_apart(
        self, content: Content, write: Write, read: Callable[[int], bytes]
    ) -> list[tuple[dict[str, Any], str, SpilledCollection]]:
        collections = [(name, d.spilled) for name, d in self.declared.items() if d.spilled is not None]
        large: list[tuple[dict[str, Any], str, SpilledCollection]] = []
        if not collections and not content.large:
            return large
        for state in content.keys.values():
            for name, kind in collections:
                value = state.get(name)
                if isinstance(value, kind.plain) and kind.is_large(value):
                    value = state[name] = kind.of(value, self._reader(name, kind, read))
                if isinstance(value, SpilledCollection):
                    value.save(lambda number, chunk: write(number, _encoder.encode(chunk)))
                    if not len(value):
                        del state[name]
            large += [(state, name, value) for name, value in state.items() if isinstance(value, SpilledCollection)]
        content.large = bool(large)
        return large

    def _reader(self, name: str, kind: type[SpilledCollection], read: Callable[[int], bytes]) -> Callable[[int], Any]:
        return lambda number: self._chunk(name, kind, read(number))

    def _chunk(self, name: str, kind: type[SpilledCollection], data: bytes) -> Any:
        if name not in self.declared:
            return msgspec.msgpack.decode(data, type=kind.undeclared)
        if name not in self._chunk_decoders:
            self._chunk_decoders[name] = self._decoder(name, self.declared[name].stored_type)
        try:
            return self._chunk_decoders[name].decode(data)
        except msgspec.ValidationError as error:
            raise StateError(
                f"{self.where}: stored state '{name}' does not fit its declared type: {error}; keep the type as it was,"
                f" or {_ANEW}"
            ) from error

    def decode(self, data: msgspec.Raw, read: Callable[[int], bytes]) -> Content:
        """Decode a block; raises `StateError` naming the state that does not fit its type."""
        stored = _stored.decode(data)
        if stored is None:
            return Content()
        try:
            content = Content(**self._waiting(stored))
            for section in stored.sections:
                keys = self._keys.decode(section.keys)
                content.keys.update(_states_by_key(keys, section.names, self._values(section)))
        except msgspec.ValidationError as error:
            raise self._unfit(error, stored) from error
        if stored.large:
            self._restore(content, stored.large, read)
        return content

    def decode_columns(self, data: msgspec.Raw, only: str | None = None) -> Columns | None:
        """Decode a block as columns; None where keys have different, large or undeclared states.

        With `only`, None also where they have anything but that state.
        """
        stored = _stored.decode(data)
        if stored is None:
            return Columns((), [], [])
        if len(stored.sections) != 1 or stored.large:
            return None
        (section,) = stored.sections
        if only is not None:
            plain = stored.event_timers == stored.processing_timers == stored.held_back == _NONE
            if not plain or section.names != [only]:
                return None
        elif not self.declared.keys() >= set(section.names):
            return None
        try:
            keys, values = self._keys.decode(section.keys), self._values(section)
            return Columns(tuple(section.names), keys, values, encoded_keys=section.keys, **self._waiting(stored))
        except msgspec.ValidationError as error:
            raise self._unfit(error, stored) from error

    def _values(self, section: _Section) -> list[list[Any]]:
        return [self._column(name).decode(data) for name, data in zip(section.names, section.columns, strict=True)]

    def _waiting(self, stored: _Stored) -> dict[str, Any]:
        """A block's timers and held-back elements."""
        return {
            "event_timers": _decoded(self._timers, stored.event_timers),
            "processing_timers": _decoded(self._timers, stored.processing_timers),
            "held_back": _decoded(self._held_back, stored.held_back),
        }

    def _unfit(self, error: msgspec.ValidationError, stored: _Stored) -> StateError:
        names = sorted({name for section in stored.sections for name in section.names})
        return StateError(
            f"{self.where}: stored state does not fit its declared type: {error} (states: {', '.join(names)}); keep"
            f" the type as it was, or {_ANEW}"
        )

    def _restore(self, content: Content, large: list[_Large], read: Callable[[int], bytes]) -> None:
        states = list(content.keys.values())
        for entry in large:
            state, name = states[entry.key], entry.name
            content.large = True
            kind = SPILLED[entry.kind]
            state[name] = kind.restored(entry.chunks, entry.size, state.get(name), self._reader(name, kind, read))

    def declare(self, descriptor: StateDescriptor[Any], state: dict[str, Any]) -> None:
        """Decode one state of a key that was read before the state was declared."""
        stored = state.get(descriptor.name)
        if isinstance(stored, msgspec.Raw):
            state[descriptor.name] = self._decoder(descriptor.name, descriptor.stored_type).decode(stored)
        elif isinstance(stored, SpilledCollection) and isinstance(stored.inline, msgspec.Raw):
            stored.inline = self._decoder(descriptor.name, descriptor.stored_type).decode(stored.inline)

    def _column(self, name: str) -> msgspec.msgpack.Decoder[Any]:
        """The decoder of a state's values; values of an undeclared state stay as they are."""
        if name not in self.declared:
            return _UNDECLARED
        decoder = self._columns.get(name)
        if decoder is None:
            stored: Any = self.declared[name].stored_type
            decoder = self._columns[name] = self._decoder(name, list[stored])
        return decoder

    def _decoder(self, name: str, python: Any) -> msgspec.msgpack.Decoder[Any]:
        try:
            return msgspec.msgpack.Decoder(python)
        except TypeError as error:
            raise StateError(
                f"{self.where}: {name} cannot be stored: {error}; use a type that msgspec knows"
            ) from error

    def _misfit(self, content: Content) -> str:
        for key, state in content.keys.items():
            for name, value in state.items():
                try:
                    _encoder.encode(value)
                except (TypeError, ValueError, OverflowError):
                    return f"state '{name}' of key {key!r} is a {type(value).__name__}"
        return "a key cannot be stored"


_UNDECLARED = msgspec.msgpack.Decoder(list[msgspec.Raw])


def _decoded(decoder: msgspec.msgpack.Decoder[list[Any]], data: msgspec.Raw) -> list[Any]:
    return [] if data == _NONE else decoder.decode(data)


def _by_names(keys: dict[Hashable, dict[str, Any]]) -> dict[tuple[str, ...], dict[Hashable, dict[str, Any]]]:
    """Group the states of keys by the names of the states; keys without state are left out."""
    shapes = set(map(tuple, keys.values()))
    if len(shapes) <= 1:
        return {tuple(sorted(shape)): keys for shape in shapes if shape}
    by_names: dict[tuple[str, ...], dict[Hashable, dict[str, Any]]] = {}
    for key, state in keys.items():
        if state:
            by_names.setdefault(tuple(sorted(state)), {})[key] = state
    return by_names


def _section(names: Sequence[str], states: dict[Hashable, dict[str, Any]]) -> _Section:
    columns = [msgspec.Raw(_encoder.encode(list(map(itemgetter(name), states.values())))) for name in names]
    return _Section(list(names), msgspec.Raw(_encoder.encode(list(states))), columns)
