"""How the keyed state of a key group is stored: pages of keys, encoded with msgspec by their declared types.

A group's keys are spread over pages by their hash, so that a micro-batch reads and writes only what it touches. A page
holds its keys' state, timers and held-back elements; of a list or map that is large it holds where its parts are.
Nothing in it is executable, and each state is named: one that the operator has not declared (yet) is kept as it is, and
one that no longer fits its type is an error that names it.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass, field
from operator import itemgetter
from typing import Any, TypedDict

import msgspec

from dagster_unified.errors import StateError
from dagster_unified.operators.state import chunks
from dagster_unified.operators.state.chunks import CHUNKED, Chunked, Write
from dagster_unified.operators.state.descriptors import StateDescriptor

KEYS_PER_PAGE = 1024
"""How many keys a page holds on average before a group's pages are split."""


class Index(msgspec.Struct, array_like=True):
    """What is known of a group without reading its pages: how many there are, and when each has something to do."""

    watermark: int
    pages: list[Page]
    inline: bytes | None = None
    """The content of the only page, where there is but one."""
    parts: int = 0
    """How many parts of large lists and maps were ever numbered; they count down from -1, pages up from 0."""


class Page(msgspec.Struct, array_like=True):
    """What the index says of one page.

    That is the number of its keys, and its earliest event timer, processing timer and held-back element.
    """

    keys: int = 0
    event_timer: int | None = None
    processing_timer: int | None = None
    held: int | None = None


class _Stored(msgspec.Struct, array_like=True):
    names: list[str]
    keys: msgspec.Raw
    event_timers: msgspec.Raw
    processing_timers: msgspec.Raw
    held: msgspec.Raw
    large: list[_Large] = []


class _Large(msgspec.Struct, array_like=True):
    """A list or map that is in parts: the place of its key in the page, its name, kind and size, and its parts."""

    key: int
    name: str
    kind: str
    size: int
    parts: list[int | None]


_moment = itemgetter(0)


@dataclass
class Content:
    """A page in memory.

    Timers are `(timestamp, key, generation)`, held-back elements `(timestamp, key, record)`, in order of arrival.
    """

    keys: dict[Hashable, dict[str, Any]] = field(default_factory=dict)
    event_timers: list[tuple[int, Hashable, int]] = field(default_factory=list)
    processing_timers: list[tuple[int, Hashable, int]] = field(default_factory=list)
    held: list[tuple[int, Hashable, Any]] = field(default_factory=list)
    large: bool = False
    """Whether it may have large lists or maps."""

    def add(self, other: Content) -> None:
        """Takes the keys of another page."""
        self.keys.update(other.keys)
        self.event_timers += other.event_timers
        self.processing_timers += other.processing_timers
        self.held += other.held
        self.large = self.large or other.large

    def parts(self) -> set[int]:
        """The parts of its large lists and maps."""
        if not self.large:
            return set()
        found = (v for state in self.keys.values() for v in state.values() if isinstance(v, Chunked))
        return {number for value in found for number in value.parts if number is not None}

    def entry(self) -> Page:
        """What the index says of it."""
        return Page(
            len(self.keys),
            min(map(_moment, self.event_timers), default=None),
            min(map(_moment, self.processing_timers), default=None),
            min(map(_moment, self.held), default=None),
        )


_index = msgspec.msgpack.Decoder(Index)
_stored = msgspec.msgpack.Decoder(_Stored)
_encoder = msgspec.msgpack.Encoder()


def encode_index(index: Index) -> bytes:
    """As bytes."""
    return _encoder.encode(index)


def decode_index(data: bytes) -> Index:
    """The inverse of `encode_index`."""
    return _index.decode(data)


class BroadcastCodec:
    """Encodes and decodes a group's broadcast maps by the types that their descriptors declare.

    `where` names the operator in errors.
    """

    def __init__(self, where: str, declared: Mapping[str, StateDescriptor[Any]]) -> None:
        self.where = where
        types: Any = TypedDict("broadcast", {name: d.stored_type for name, d in declared.items()}, total=False)  # type: ignore[misc]
        self._declared = frozenset(declared)
        self._decoder: msgspec.msgpack.Decoder[Any] = msgspec.msgpack.Decoder(types)
        self._raw = msgspec.msgpack.Decoder(dict[str, msgspec.Raw])

    def encode(self, maps: dict[str, dict[Any, Any]]) -> bytes:
        """Raises `StateError` for what cannot be stored."""
        try:
            return _encoder.encode(maps)
        except (TypeError, ValueError, OverflowError) as error:
            raise StateError(
                f"{self.where}: broadcast state cannot be stored: {error}; put what its MapStateDescriptor declares"
            ) from error

    def decode(self, data: bytes) -> dict[str, dict[Any, Any]]:
        """Raises `StateError` for a map that does not fit its type any more, or that nothing declares."""
        lost = sorted(set(self._raw.decode(data)) - self._declared)
        if lost:
            raise StateError(
                f"{self.where}: the checkpoint has broadcast state '{lost[0]}', which is not declared; give"
                " broadcast(...) its descriptor, or start without state"
            )
        try:
            found: dict[str, dict[Any, Any]] = self._decoder.decode(data)
        except msgspec.ValidationError as error:
            raise StateError(
                f"{self.where}: stored broadcast state does not fit its declared type: {error}; keep the type as it"
                " was, or start without state"
            ) from error
        return found


class PageCodec:
    """Encodes and decodes the pages of one operator.

    `where` names it in errors; `declared` are its descriptors, which may become more.
    """

    def __init__(self, where: str, key_type: Any, record_type: Any, declared: dict[str, StateDescriptor[Any]]) -> None:
        self.where, self.declared = where, declared
        self._parts: dict[str, msgspec.msgpack.Decoder[Any]] = {}
        self._key_type = key_type
        self._timers = self._decoder("timers", list[tuple[int, key_type, int]])
        self._held = self._decoder("held-back elements", list[tuple[int, key_type, record_type]])
        self._keys: dict[tuple[str, ...], msgspec.msgpack.Decoder[Any]] = {}

    def encode(self, content: Content, write: Write, read: Callable[[int], bytes]) -> bytes:
        """A page as bytes; large lists and maps are written in parts."""
        large = self._set_apart(content, write, read)
        try:
            return self._encode(content, large)
        finally:
            for state, name, value in large:
                state[name] = value

    def _encode(self, content: Content, large: list[tuple[dict[str, Any], str, Chunked]]) -> bytes:
        places = {id(state): place for place, state in enumerate(content.keys.values())} if large else {}
        apart = [
            _Large(places[id(state)], name, value.kind, value.size, list(value.parts)) for state, name, value in large
        ]
        for state, name, value in large:
            state[name] = value.inline
        names = sorted(set().union(*content.keys.values()))
        try:
            keys = _encoder.encode(list(content.keys.items()))
        except (TypeError, ValueError, OverflowError) as error:
            raise StateError(f"{self.where}: state cannot be stored: {error}; {self._misfit(content)}") from error
        event_timers, processing_timers, waiting = (
            msgspec.Raw(_encoder.encode(part))
            for part in (content.event_timers, content.processing_timers, content.held)
        )
        return _encoder.encode(_Stored(names, msgspec.Raw(keys), event_timers, processing_timers, waiting, apart))

    def _set_apart(
        self, content: Content, write: Write, read: Callable[[int], bytes]
    ) -> list[tuple[dict[str, Any], str, Chunked]]:
        """The large lists and maps of a page, with what has changed of them written."""
        collections = [(name, d.chunks) for name, d in self.declared.items() if d.chunks is not None]
        found: list[tuple[dict[str, Any], str, Chunked]] = []
        if not collections and not content.large:
            return found
        for state in content.keys.values():
            for name, kind in collections:
                value = state.get(name)
                if isinstance(value, kind.plain) and len(value) > chunks.PART:
                    value = state[name] = kind.of(value, self._reader(name, kind, read))
                if isinstance(value, Chunked):
                    value.save(lambda number, part: write(number, _encoder.encode(part)))
                    if not len(value):
                        del state[name]
            found += [(state, name, value) for name, value in state.items() if isinstance(value, Chunked)]
        content.large = bool(found)
        return found

    def _reader(self, name: str, kind: type[Chunked], read: Callable[[int], bytes]) -> Callable[[int], Any]:
        return lambda number: self._part(name, kind, read(number))

    def _part(self, name: str, kind: type[Chunked], data: bytes) -> Any:
        if name not in self.declared:
            return msgspec.msgpack.decode(data, type=kind.undeclared)
        if name not in self._parts:
            self._parts[name] = self._decoder(name, self.declared[name].stored_type)
        try:
            return self._parts[name].decode(data)
        except msgspec.ValidationError as error:
            raise StateError(
                f"{self.where}: stored state '{name}' does not fit its declared type: {error}; keep the type as it was,"
                " or start without state"
            ) from error

    def decode(self, data: bytes, read: Callable[[int], bytes]) -> Content:
        """A page from its bytes; raises `StateError` naming the state that does not fit its type."""
        stored = _stored.decode(data)
        names = tuple(stored.names)
        try:
            keys = dict(self._keys_decoder(names).decode(stored.keys))
            content = Content(
                keys,
                event_timers=self._timers.decode(stored.event_timers),
                processing_timers=self._timers.decode(stored.processing_timers),
            )
            content.held = self._held.decode(stored.held)
        except msgspec.ValidationError as error:
            raise StateError(
                f"{self.where}: stored state does not fit its declared type: {error} (states: {', '.join(names)}); keep"
                " the type as it was, or start without state"
            ) from error
        if stored.large:
            self._restore(content, stored.large, read)
        return content

    def _restore(self, content: Content, large: list[_Large], read: Callable[[int], bytes]) -> None:
        states = list(content.keys.values())
        for entry in large:
            state, name = states[entry.key], entry.name
            content.large = True
            kind = CHUNKED[entry.kind]
            state[name] = kind.restored(entry.parts, entry.size, state.get(name), self._reader(name, kind, read))

    def declare(self, descriptor: StateDescriptor[Any], state: dict[str, Any]) -> None:
        """Decodes one state of a key that was read before it was declared."""
        held = state.get(descriptor.name)
        if isinstance(held, msgspec.Raw):
            state[descriptor.name] = self._decoder(descriptor.name, descriptor.stored_type).decode(held)
        elif isinstance(held, Chunked) and isinstance(held.inline, msgspec.Raw):
            held.inline = self._decoder(descriptor.name, descriptor.stored_type).decode(held.inline)

    def _keys_decoder(self, names: tuple[str, ...]) -> msgspec.msgpack.Decoder[Any]:
        """For one set of names; those that are not declared are left as they are."""
        known = tuple(name for name in names if name in self.declared)
        decoder = self._keys.get((*names, "|", *known))
        if decoder is None:
            types = {n: self.declared[n].stored_type if n in self.declared else msgspec.Raw for n in names}
            states: Any = TypedDict("states", types, total=False)  # type: ignore[misc]
            decoder = self._decoder(", ".join(names), list[tuple[self._key_type, states]])  # type: ignore[name-defined]
            self._keys[(*names, "|", *known)] = decoder
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
