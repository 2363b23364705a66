"""Keys: the one form of equal values, their hash, and their key group.

A key group is one of `pipeline.max-parallelism` hash partitions of the key space (Flink: *Key Groups*). The hash is of
the msgpack encoding of the key's one form, so it is the same in every process, and for ever: state is found by it.
"""

from __future__ import annotations

import dataclasses
import datetime as dt
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from decimal import Decimal
from enum import Enum
from functools import lru_cache
from itertools import accumulate, chain, groupby
from operator import itemgetter
from types import NoneType
from typing import Any, NamedTuple
from uuid import UUID
from zlib import crc32

import pyarrow as pa
from msgspec import Struct, msgpack

from dagster_unified.arrow_types import has, python_values
from dagster_unified.errors import RecordTypeError
from dagster_unified.operators.failures import placed
from dagster_unified.operators.layout import StreamLayout
from dagster_unified.records import NOT_READ, shorten


class _IntegerForm(NamedTuple):
    """How msgpack writes the numbers from `least` to `most`: a first byte for the form, then `width` bytes."""

    least: int
    most: int
    first: bytes
    width: int


_INTEGER_FORMS = (
    _IntegerForm(1 << 32, (1 << 63) - 1, b"\xcf", 8),
    _IntegerForm(1 << 16, (1 << 32) - 1, b"\xce", 4),
    _IntegerForm(1 << 8, (1 << 16) - 1, b"\xcd", 2),
    _IntegerForm(1 << 7, (1 << 8) - 1, b"\xcc", 1),
    _IntegerForm(-(1 << 5), (1 << 7) - 1, b"", 1),
    _IntegerForm(-(1 << 7), -(1 << 5) - 1, b"\xd0", 1),
    _IntegerForm(-(1 << 15), -(1 << 7) - 1, b"\xd1", 2),
    _IntegerForm(-(1 << 31), -(1 << 15) - 1, b"\xd2", 4),
    _IntegerForm(-(1 << 63), -(1 << 31) - 1, b"\xd3", 8),
)


def integer_hashes(keys: pa.Array) -> pa.Array:
    """The hashes of keys that are `int64` and not null, as `uint32`."""
    import pyarrow.compute as pc  # slow to load, and a pipeline is built without it

    ends = pc.min_max(keys).as_py()
    hashes = pa.nulls(len(keys), pa.uint32())
    for form in _INTEGER_FORMS:
        if ends["max"] is None or ends["max"] < form.least or ends["min"] > form.most:
            continue
        if form.least <= ends["min"] and ends["max"] <= form.most:
            return _hashes(keys, form)
        has_form = pc.and_(pc.greater_equal(keys, form.least), pc.less_equal(keys, form.most))
        hashes = pc.replace_with_mask(hashes, has_form, _hashes(keys.filter(has_form), form))
    return hashes


LONGEST_TEXT = 31
"""Bytes of the longest text that msgpack writes after a single byte with its length."""


def text_hashes(keys: pa.Array) -> pa.Array | None:
    """The hashes of keys that are `string` and not null, as `uint32`; None where one is too long."""
    import pyarrow.compute as pc

    lengths = pc.binary_length(keys)
    longest = pc.max(lengths).as_py() or 0
    if longest > LONGEST_TEXT:
        return None
    empty = [crc32(bytes([0xA0 + length, *bytes(length)])) for length in range(longest + 1)]
    hashes = pc.take(pa.array(empty, pa.uint32()), lengths, boundscheck=False)
    width = max(8, -(-longest // 8) * 8)
    filled = pc.ascii_lpad(keys, width, padding="\0").view(pa.binary())
    for start in range(0, width, 8):
        word = filled if width == 8 else pc.binary_slice(filled, start, start + 8)
        bits = pa.Array.from_buffers(pa.uint64(), len(keys), [None, word.buffers()[2]])
        places = {byte: width - start - byte - 1 for byte in range(8)}
        hashes = _changed(hashes, bits, {byte: place for byte, place in places.items() if place < longest})
    return hashes


def _hashes(keys: pa.Array, form: _IntegerForm) -> pa.Array:
    """The hashes of keys that all have one form."""

    start = pa.scalar(crc32(form.first + bytes(form.width)), pa.uint32())
    return _changed(start, keys.view(pa.uint64()), {byte: byte for byte in range(form.width)})


def _changed(hashes: pa.Array | pa.Scalar, numbers: pa.Array, places: Mapping[int, int]) -> pa.Array:
    """Hashes changed by bytes of numbers; `places` maps each byte, from the lowest, to its place before the end."""
    import pyarrow.compute as pc

    for byte, place in places.items():
        byte_values = pc.bit_wise_and(
            pc.shift_right(numbers, pa.scalar(8 * byte, pa.uint64())), pa.scalar(255, pa.uint64())
        )
        hashes = pc.bit_wise_xor(hashes, pc.take(_changes(place), byte_values, boundscheck=False))
    return hashes


@lru_cache(maxsize=LONGEST_TEXT + 1)
def _changes(place: int) -> pa.Array:
    """The change of a hash for each value of the byte at a place before the end."""
    zero = crc32(bytes(place + 1))
    return pa.array([crc32(bytes([byte]) + bytes(place)) ^ zero for byte in range(256)], pa.uint32())


_encode = msgpack.Encoder().encode

OF_ONE_FORM: frozenset[type] = frozenset({int, str, bytes, NoneType, dt.date, dt.timedelta, UUID})
"""Types whose equal values have one encoding, which no other of these types shares."""

_EPOCH = dt.datetime(1970, 1, 1, tzinfo=dt.timezone.utc)
_LEAST, _MOST = -(1 << 63), (1 << 64) - 1


def one_form(value: Any) -> Any:
    """A form that equal values share, as msgspec encodes it; different values may share it too."""
    kind = type(value)
    if kind in OF_ONE_FORM:
        return value
    if kind is float:
        return int(value) if value.is_integer() and _LEAST <= value <= _MOST else value
    if isinstance(value, tuple):
        return value if OF_ONE_FORM.issuperset(map(type, value)) else list(map(one_form, value))
    for base, convert in _FORMS:
        if isinstance(value, base):
            return convert(value)
    if dataclasses.is_dataclass(value):
        return [one_form(getattr(value, field.name)) for field in dataclasses.fields(value)]
    return value


def has_nan(value: Any) -> bool:
    """Whether a value is NaN, or has one in it, and so does not equal itself."""
    kind = type(value)
    if kind in OF_ONE_FORM:
        return False
    if isinstance(value, (float, Decimal)):
        return value != value
    if isinstance(value, dict):
        return any(map(has_nan, chain(value, value.values())))
    if isinstance(value, (tuple, list, set, frozenset)):
        return any(map(has_nan, value))
    return any(has_nan(getattr(value, name)) for name in _fields(value))


def _fields(value: Any) -> Iterable[str]:
    if isinstance(value, Struct):
        return value.__struct_fields__
    return (field.name for field in dataclasses.fields(value)) if dataclasses.is_dataclass(value) else ()


def _decimal(value: Decimal) -> Any:
    if not value.is_finite():
        return str(value)
    if _LEAST <= value <= _MOST and value == value.to_integral_value():
        return int(value)
    as_float = float(value)
    if as_float == value:
        return as_float
    parts = value.as_tuple()
    return [parts.sign, "".join(map(str, parts.digits)).strip("0"), value.adjusted()]


def _datetime(value: dt.datetime) -> Any:
    """The moment of a datetime with a zone; `fold` does not count for `==`."""
    value = value.replace(fold=0)
    return value if value.utcoffset() is None else dt.datetime.__sub__(value, _EPOCH)


def _time(value: dt.time) -> Any:
    value = value.replace(fold=0)
    offset = value.utcoffset()
    if offset is None:
        return value
    return dt.timedelta(0, value.second, value.microsecond, 0, value.minute, value.hour) - offset


def _set(value: Iterable[Any]) -> list[bytes]:
    return sorted(_encode(one_form(item)) for item in value)


def _dict(value: dict[Any, Any]) -> list[tuple[bytes, Any]]:
    return sorted(((_encode(one_form(key)), one_form(item)) for key, item in value.items()), key=lambda pair: pair[0])


_FORMS: tuple[tuple[Any, Callable[[Any], Any]], ...] = (
    (Enum, lambda value: one_form(value.value)),
    (int, int),
    (float, lambda value: one_form(float(value))),
    (str, str),
    (Decimal, _decimal),
    (dt.datetime, _datetime),
    (dt.time, _time),
    (list, lambda value: list(map(one_form, value))),
    ((set, frozenset), _set),
    (dict, _dict),
    (Struct, lambda value: [one_form(getattr(value, name)) for name in value.__struct_fields__]),
)


@dataclass(frozen=True)
class KeyedInput:
    """The key of a keyed program's input: its columns, and how they become a Python value."""

    columns: tuple[str, ...]
    python: Any
    """The key's type as the author knows it."""

    decode: Callable[[Any], Any] | None = None


def key_hash(key: Hashable) -> int:
    """A hash of a key that is the same everywhere, and for equal keys."""
    return crc32(_encode(key if type(key) in OF_ONE_FORM else one_form(key)))


def key_hashes(keys: Iterable[Hashable]) -> list[int]:
    """The hashes of some keys."""
    keys = list(keys)
    if not OF_ONE_FORM.issuperset(map(type, keys)):
        keys = list(map(one_form, keys))
    return list(map(crc32, map(_encode, keys)))


def decoded(keyed: KeyedInput, values: list[Any], where: str) -> list[Any]:
    """Keys in the author's type, from their Arrow values."""
    if keyed.decode is None:
        return values
    with placed(where):
        return [keyed.decode(v) for v in values]


def runs(batch: pa.RecordBatch, keyed: KeyedInput, layout: StreamLayout, where: str) -> tuple[list[Any], list[int]]:
    """The keys of a batch that is sorted by key, and where each key's run begins.

    Without key columns it is one run, of the key 0.
    """
    return _runs(key_columns(batch, keyed, layout, where), batch.num_rows, keyed, where)


def _runs(columns: Sequence[pa.Array], size: int, keyed: KeyedInput, where: str) -> tuple[list[Any], list[int]]:
    """As `runs`, of the columns of the key."""
    if not columns:
        return [0], [0]
    if any(pa.types.is_nested(column.type) for column in columns):
        values = list(zip(*[c.to_pylist() for c in columns], strict=True))
        starts = [i for i in range(len(values)) if i == 0 or values[i] != values[i - 1]]
    else:
        starts = _boundaries(columns, size)
    firsts = pa.array(starts, pa.int64())
    picked = [python_values(column.take(firsts)) for column in columns]
    return decoded(keyed, picked[0] if len(columns) == 1 else list(zip(*picked, strict=True)), where), starts


def last_run(batch: pa.RecordBatch, keyed: KeyedInput, layout: StreamLayout, where: str) -> int:
    """Where the run of the last key begins in a batch that is sorted by key."""
    size = 1024
    while size < batch.num_rows:
        first: int = batch.num_rows - size
        _, starts = runs(batch.slice(first), keyed, layout, where)
        if starts[-1]:
            return first + starts[-1]
        size *= 8
    _, starts = runs(batch, keyed, layout, where)
    return starts[-1]


def sorted_runs(
    batch: pa.RecordBatch, keyed: KeyedInput, layout: StreamLayout, where: str
) -> tuple[pa.RecordBatch, list[Any], list[int]]:
    """A batch with equal keys together, in their order of arrival, and its runs as in `runs`.

    The keys come in any order, and each comes once.
    """
    columns = key_columns(batch, keyed, layout, where)
    if not columns or batch.num_rows < 2:
        return batch, *_runs(columns, batch.num_rows, keyed, where)
    if any(pa.types.is_nested(column.type) for column in columns):
        order = _order_in_python(columns)
        columns = [column.take(order) for column in columns]
        return batch.take(order), *_runs(columns, batch.num_rows, keyed, where)

    import pyarrow.compute as pc  # slow to load, and a pipeline is built without it

    encoded = [column.dictionary_encode() for column in columns]
    codes = encoded[0].indices
    for more in encoded[1:]:
        pairs = pc.add(pc.multiply(codes.cast(pa.int64()), len(more.dictionary)), more.indices.cast(pa.int64()))
        codes = pairs.dictionary_encode().indices
    order = pc.sort_indices(codes)  # of small numbers, which is much faster than of the keys
    counts = codes.take(order).value_counts().field("counts").to_pylist()
    batch, starts = batch.take(order), [0, *accumulate(counts[:-1])]
    if len(columns) == 1:
        return batch, decoded(keyed, python_values(encoded[0].dictionary), where), starts
    firsts = order.take(pa.array(starts, pa.int64()))
    picked = [python_values(column.take(firsts)) for column in columns]
    return batch, decoded(keyed, list(zip(*picked, strict=True)), where), starts


def _order_in_python(columns: Sequence[pa.Array]) -> pa.Array:
    """The order of nested keys, which Arrow does not sort; any order works that brings equal keys together."""
    texts = [repr(values) for values in zip(*[column.to_pylist() for column in columns], strict=True)]
    return pa.array(sorted(range(len(texts)), key=texts.__getitem__), pa.int64())


def stretches(batch: pa.RecordBatch, column: str) -> Iterator[tuple[int, pa.RecordBatch]]:
    """The stretches of a batch in which a column of numbers keeps its value, each with that value."""
    if batch.num_rows:
        starts = _boundaries([batch.column(column)], batch.num_rows)
        for start, end in zip(starts, [*starts[1:], batch.num_rows], strict=True):
            yield batch.column(column)[start].as_py(), batch.slice(start, end - start)


def grouped_stretches(batches: Iterable[pa.RecordBatch], column: str) -> Iterator[tuple[int, Iterator[pa.RecordBatch]]]:
    """The stretches of batches that are sorted by a column of numbers, together for each number."""
    rows = (stretch for batch in batches for stretch in stretches(batch, column))
    for number, stretch_group in groupby(rows, key=itemgetter(0)):
        yield number, (batch for _, batch in stretch_group)


def key_groups(
    batch: pa.RecordBatch, keyed: KeyedInput, layout: StreamLayout, where: str, count: int, known: dict[Any, int]
) -> pa.Array:
    """The key group of every row, of `count` groups. `known` remembers the groups of keys seen before."""
    columns = key_columns(batch, keyed, layout, where)
    hashes = _column_hashes(columns[0]) if len(columns) == 1 and keyed.decode is None else None
    if hashes is not None:
        return _groups_of(hashes, count)
    if len(columns) == 1 and not pa.types.is_nested(columns[0].type):
        spread = columns[0].dictionary_encode()
        values = python_values(spread.dictionary)
        hardly_any_twice = 2 * len(values) > batch.num_rows  # then remembering would cost more than it saves
        if hardly_any_twice:
            return _groups(decoded(keyed, values, where), count).take(spread.indices)
        return pa.array([_group(key, keyed, count, known, where) for key in values], pa.int32()).take(spread.indices)
    return _groups(decoded(keyed, key_values(columns), where), count)


_SAMPLE = 4096
"""Rows that tell whether a batch has many keys."""


def _column_hashes(keys: pa.Array) -> pa.Array | None:
    """The hashes of a column of keys, where computing them all at once is faster; else None."""
    if pa.types.is_int64(keys.type):
        return integer_hashes(keys)
    return text_hashes(keys) if pa.types.is_string(keys.type) and _many(keys) else None


def _many(keys: pa.Array) -> bool:
    """Whether few keys come twice."""
    sample = keys.slice(0, _SAMPLE)
    return 2 * len(sample.unique()) > len(sample)


def _groups(keys: Sequence[Hashable], count: int) -> pa.Array:
    return _groups_of(pa.array(key_hashes(keys), pa.uint32()), count)


def _groups_of(hashes: pa.Array, count: int) -> pa.Array:
    import pyarrow.compute as pc  # slow to load, and a pipeline is built without it

    number = pa.scalar(count, pa.uint32())
    return pc.subtract(hashes, pc.multiply(pc.divide(hashes, number), number)).cast(pa.int32())


def key_values(columns: Sequence[pa.Array]) -> list[Any]:
    """The keys in some columns, as Arrow values."""
    return python_values(columns[0]) if len(columns) == 1 else list(zip(*map(python_values, columns), strict=True))


def key_columns(batch: pa.RecordBatch, keyed: KeyedInput, layout: StreamLayout, where: str) -> list[pa.Array]:
    """The key's columns, each as `key_part` returns it."""
    return [key_part(name, batch.column(name), batch, layout.records.names, where) for name in keyed.columns]


def key_part(name: str, column: pa.Array, batch: pa.RecordBatch, fields: Sequence[str], where: str) -> pa.Array:
    """A column of a key, for records with these fields: one of the fields, or a computed key.

    Equal keys are equal in it (`alike`). Raises `RecordTypeError` for a record whose key is None, or has nan.
    """
    if column.null_count:
        raise _no_key(name, "is None", column.is_null(), batch, fields, where)
    if pa.types.is_floating(column.type):
        import pyarrow.compute as pc  # slow to load, and a pipeline is built without it

        if pc.any(pc.is_nan(column)).as_py():
            raise _no_key(name, f"is {_NAN}", pc.is_nan(column), batch, fields, where)
    elif has(column.type, pa.types.is_floating):
        unequal = pa.array(map(has_nan, column.to_pylist()))
        if True in unequal.to_pylist():
            raise _no_key(name, f"has {_NAN}", unequal, batch, fields, where)
    else:
        return column
    return alike(column)


def alike(column: pa.Array) -> pa.Array:
    """A column with 0.0 for -0.0, as everywhere in Spark: equal values then have one encoding and one key group."""
    if pa.types.is_floating(column.type):
        import pyarrow.compute as pc  # slow to load, and a pipeline is built without it

        return pc.add(column, pa.scalar(0.0, column.type))
    if has(column.type, pa.types.is_floating):
        return pa.array(map(_without_negative_zero, column.to_pylist()), column.type)
    return column


_NAN = "nan, which equals nothing,"


def _without_negative_zero(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _without_negative_zero(part) for name, part in value.items()}
    return value + 0.0 if isinstance(value, float) else value


def _no_key(
    name: str, what: str, is_wrong: pa.Array, batch: pa.RecordBatch, fields: Sequence[str], where: str
) -> RecordTypeError:
    row = batch.slice(is_wrong.to_pylist().index(True), 1).select(list(fields)).to_pylist()[0]
    row |= {field.name: NOT_READ for field in batch.schema if field.name in row and pa.types.is_null(field.type)}
    key_name = f"the key '{name}'" if name in fields else "the computed key"
    return RecordTypeError(
        f"{where}: {key_name} {what} for {shorten(row)}; filter such records out before key_by, or give them a key"
    )


def _group(value: Any, keyed: KeyedInput, count: int, known: dict[Any, int], where: str) -> int:
    group = known.get(value)
    if group is None:
        (key,) = decoded(keyed, [value], where)
        group = known[value] = key_hash(key) % count
    return group


def _boundaries(columns: Sequence[pa.Array], size: int) -> list[int]:
    import pyarrow.compute as pc  # slow to load, and a pipeline is built without it

    changed = None
    for column in columns:
        differs = pc.not_equal(column.slice(1), column.slice(0, size - 1))
        changed = differs if changed is None else pc.or_(changed, differs)
    return [0, *pc.add(pc.indices_nonzero(changed), 1).to_pylist()]
