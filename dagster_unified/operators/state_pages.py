"""How the keyed state of a key group is stored: pages of keys, encoded with msgspec by the types that the descriptors declare.

A group's keys are spread over pages by their hash, so that a micro-batch reads and writes only what it touches. A page holds
its keys' state, timers and held-back elements. Nothing in it is executable, and each state is named: one that the operator
has not declared (yet) is kept as it is, and one that no longer fits its type is an error that names it.
"""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass, field
from typing import Any

import msgspec

from dagster_unified.errors import StateError
from dagster_unified.operators.state import StateDescriptor

KEYS_PER_PAGE = 256
"""How many keys a page holds on average before a group's pages are split."""


class Index(msgspec.Struct, array_like=True):
    """What is known of a group without reading its pages: how many there are, and when each has something to do."""

    watermark: int
    pages: list[Page]
    inline: bytes | None = None
    """The content of the only page, where there is but one."""


class Page(msgspec.Struct, array_like=True):
    """What the index says of one page: its keys, and its earliest event timer, processing timer and held-back element."""

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


@dataclass
class Content:
    """A page in memory. Timers are `(timestamp, key, generation)`, held-back elements `(timestamp, key, record)`, in order of arrival."""

    keys: dict[Hashable, dict[str, Any]] = field(default_factory=dict)
    event_timers: list[tuple[int, Hashable, int]] = field(default_factory=list)
    processing_timers: list[tuple[int, Hashable, int]] = field(default_factory=list)
    held: list[tuple[int, Hashable, Any]] = field(default_factory=list)

    def entry(self) -> Page:
        """What the index says of it."""
        return Page(
            len(self.keys),
            min((t[0] for t in self.event_timers), default=None),
            min((t[0] for t in self.processing_timers), default=None),
            min((t[0] for t in self.held), default=None),
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


class PageCodec:
    """Encodes and decodes the pages of one operator. `where` names it in errors; `declared` are its descriptors, which may become more."""

    def __init__(self, where: str, key_type: Any, record_type: Any, declared: dict[str, StateDescriptor]) -> None:
        self.where, self.declared = where, declared
        self._key_type = key_type
        self._timers = self._decoder("timers", list[tuple[int, key_type, int]])
        self._held = self._decoder("held-back elements", list[tuple[int, key_type, record_type]])
        self._keys: dict[tuple[str, ...], msgspec.msgpack.Decoder[Any]] = {}

    def encode(self, content: Content) -> bytes:
        """A page as bytes."""
        names = sorted(set().union(*content.keys.values()))
        try:
            if len(names) == 1:
                name = names[0]
                keys = _encoder.encode([(key, (state[name],)) for key, state in content.keys.items()])
            else:
                keys = _encoder.encode([(key, [state.get(name) for name in names]) for key, state in content.keys.items()])
        except (TypeError, ValueError, OverflowError) as error:
            raise StateError(f"{self.where}: state cannot be stored: {error}; {self._misfit(content)}") from error
        rest = [msgspec.Raw(_encoder.encode(part)) for part in (content.event_timers, content.processing_timers, content.held)]
        return _encoder.encode(_Stored(names, msgspec.Raw(keys), *rest))

    def decode(self, data: bytes) -> Content:
        """A page from its bytes; raises `StateError` naming the state that does not fit its type."""
        stored = _stored.decode(data)
        names = tuple(stored.names)
        try:
            entries = self._keys_decoder(names).decode(stored.keys)
            content = Content(event_timers=self._timers.decode(stored.event_timers), processing_timers=self._timers.decode(stored.processing_timers))
            content.held = self._held.decode(stored.held)
        except msgspec.ValidationError as error:
            raise StateError(
                f"{self.where}: stored state does not fit its declared type: {error} (states: {', '.join(names)}); keep the type as it was, or start without state"
            ) from error
        if len(names) == 1:
            name = names[0]
            content.keys = {key: {name: values[0]} for key, values in entries}
        else:
            content.keys = {key: {n: v for n, v in zip(names, values, strict=True) if v is not None} for key, values in entries}
        return content

    def decode_late(self, descriptor: StateDescriptor, stored: Any) -> Any:
        """One state that was read before it was declared."""
        return self._decoder(descriptor.name, descriptor.stored_type).decode(stored)

    def _keys_decoder(self, names: tuple[str, ...]) -> msgspec.msgpack.Decoder[Any]:
        """For one set of names; those that are not declared are left as they are."""
        known = tuple(name for name in names if name in self.declared)
        decoder = self._keys.get((*names, "|", *known))
        if decoder is None:
            types = [(self.declared[n].stored_type | None) if n in self.declared else (msgspec.Raw) for n in names]
            values: Any = tuple.__class_getitem__(tuple(types)) if types else list[None]
            decoder = self._decoder(", ".join(names), list[tuple[self._key_type, values]])  # type: ignore[name-defined]
            self._keys[(*names, "|", *known)] = decoder
        return decoder

    def _decoder(self, name: str, python: Any) -> msgspec.msgpack.Decoder[Any]:
        try:
            return msgspec.msgpack.Decoder(python)
        except TypeError as error:
            raise StateError(f"{self.where}: {name} cannot be stored: {error}; use a type that msgspec knows") from error

    def _misfit(self, content: Content) -> str:
        for key, state in content.keys.items():
            for name, value in state.items():
                try:
                    _encoder.encode(value)
                except (TypeError, ValueError, OverflowError):
                    return f"state '{name}' of key {key!r} is a {type(value).__name__}"
        return "a key cannot be stored"
