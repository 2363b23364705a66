"""The hashes of integer keys, as `keys.key_hash` has them, of a whole column at once.

A CRC is linear: that of a number's msgpack encoding is that of the encoding of zero in as many bytes, and for each byte
what it alone would change. So there is a table for each place, and a few of Arrow's functions look bytes up in them.
"""

from __future__ import annotations

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


def _hashes(keys: pa.Array, form: _Form) -> pa.Array:
    """The hashes of keys that have all one form."""
    import pyarrow.compute as pc

    found = pa.scalar(crc32(form.first + bytes(form.width)), pa.uint32())
    bits = keys.view(pa.uint64())
    for place in range(form.width):
        byte = pc.bit_wise_and(pc.shift_right(bits, pa.scalar(8 * place, pa.uint64())), pa.scalar(255, pa.uint64()))
        found = pc.bit_wise_xor(found, pc.take(_changes(place), byte, boundscheck=False))
    return found


@lru_cache(maxsize=8)
def _changes(place: int) -> pa.Array:
    """What each byte changes in the hash, so many places before the end."""
    zero = crc32(bytes(place + 1))
    return pa.array([crc32(bytes([byte]) + bytes(place)) ^ zero for byte in range(256)], pa.uint32())
