"""The hashes of integers and short texts as keys, as `keys.key_hash` has them, of a whole column at once.

A CRC is linear: that of a key's msgpack encoding is that of the encoding with zeros in the place of its bytes, and for
each byte what it alone would change. So there is a table for each place, and a few of Arrow's functions look bytes up
in them. A byte that is zero changes nothing, so that texts can be filled up with zeros at their beginning.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import lru_cache
from typing import NamedTuple
from zlib import crc32

import pyarrow as pa


class _Form(NamedTuple):
    """How msgpack writes the numbers from `least` to `most`: a byte that says which form it is, and then so many."""

    least: int
    most: int
    first: bytes
    width: int


_FORMS = (
    _Form(1 << 32, (1 << 63) - 1, b"\xcf", 8),
    _Form(1 << 16, (1 << 32) - 1, b"\xce", 4),
    _Form(1 << 8, (1 << 16) - 1, b"\xcd", 2),
    _Form(1 << 7, (1 << 8) - 1, b"\xcc", 1),
    _Form(-(1 << 5), (1 << 7) - 1, b"", 1),
    _Form(-(1 << 7), -(1 << 5) - 1, b"\xd0", 1),
    _Form(-(1 << 15), -(1 << 7) - 1, b"\xd1", 2),
    _Form(-(1 << 31), -(1 << 15) - 1, b"\xd2", 4),
    _Form(-(1 << 63), -(1 << 31) - 1, b"\xd3", 8),
)


def integer_hashes(keys: pa.Array) -> pa.Array:
    """The hash of each of some keys, which are `int64` and not null, as `uint32`."""
    import pyarrow.compute as pc  # slow to load, and a pipeline is built without it

    ends = pc.min_max(keys).as_py()
    found = pa.nulls(len(keys), pa.uint32())
    for form in _FORMS:
        if ends["max"] is None or ends["max"] < form.least or ends["min"] > form.most:
            continue
        if form.least <= ends["min"] and ends["max"] <= form.most:
            return _hashes(keys, form)
        own = pc.and_(pc.greater_equal(keys, form.least), pc.less_equal(keys, form.most))
        found = pc.replace_with_mask(found, own, _hashes(keys.filter(own), form))
    return found


LONGEST_TEXT = 31
"""Bytes of a text that msgpack writes behind one byte, which has their number."""


def text_hashes(keys: pa.Array) -> pa.Array | None:
    """The hash of each of some keys, which are `string` and not null, as `uint32`; None where one is too long."""
    import pyarrow.compute as pc

    lengths = pc.binary_length(keys)
    longest = pc.max(lengths).as_py() or 0
    if longest > LONGEST_TEXT:
        return None
    empty = [crc32(bytes([0xA0 + length, *bytes(length)])) for length in range(longest + 1)]
    found = pc.take(pa.array(empty, pa.uint32()), lengths, boundscheck=False)
    width = max(8, -(-longest // 8) * 8)
    filled = pc.ascii_lpad(keys, width, padding="\0").view(pa.binary())
    for start in range(0, width, 8):
        word = filled if width == 8 else pc.binary_slice(filled, start, start + 8)
        bits = pa.Array.from_buffers(pa.uint64(), len(keys), [None, word.buffers()[2]])
        places = {byte: width - start - byte - 1 for byte in range(8)}
        found = _changed(found, bits, {byte: place for byte, place in places.items() if place < longest})
    return found


def _hashes(keys: pa.Array, form: _Form) -> pa.Array:
    """The hashes of keys that have all one form."""

    found = pa.scalar(crc32(form.first + bytes(form.width)), pa.uint32())
    return _changed(found, keys.view(pa.uint64()), {byte: byte for byte in range(form.width)})


def _changed(found: pa.Array | pa.Scalar, numbers: pa.Array, places: Mapping[int, int]) -> pa.Array:
    """The hashes with what bytes of numbers change: by the byte, from the lowest on, its places before the end."""
    import pyarrow.compute as pc

    for byte, place in places.items():
        own = pc.bit_wise_and(pc.shift_right(numbers, pa.scalar(8 * byte, pa.uint64())), pa.scalar(255, pa.uint64()))
        found = pc.bit_wise_xor(found, pc.take(_changes(place), own, boundscheck=False))
    return found


@lru_cache(maxsize=LONGEST_TEXT + 1)
def _changes(place: int) -> pa.Array:
    """What each byte changes in the hash, so many places before the end."""
    zero = crc32(bytes(place + 1))
    return pa.array([crc32(bytes([byte]) + bytes(place)) ^ zero for byte in range(256)], pa.uint32())
