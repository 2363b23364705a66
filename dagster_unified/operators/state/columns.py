"""A column of a savepoint: values of one declared type, in Arrow's type for it, each exactly as it was.

Values that Arrow has no type for, or would change (a datetime without a time zone comes back with one), are kept as
msgpack. Knows types and values; no operator, no engine.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec
import pyarrow as pa
from msgspec import inspect as mi

from dagster_unified.arrow_types import has, parts, python_values
from dagster_unified.errors import RecordTypeError, StateError
from dagster_unified.operators.state.evolution import FILL_IN, Convert, migration
from dagster_unified.records import arrow_of, decoder_of, encoder_of, holds, type_name

_encode = msgspec.msgpack.Encoder().encode

_REFUSED = (pa.ArrowInvalid, pa.ArrowTypeError, pa.ArrowNotImplementedError, TypeError, ValueError, OverflowError)
"""Errors for a value that Arrow rejects."""

Encoded = dict[int, bytes]
"""Values that Arrow cannot hold, by their place in the column, as msgpack."""


class TypedColumn:
    """Values of one type, or None for no value.

    `what` names it in errors, such as `state 'mean'`, and `declared` its type.
    """

    def __init__(self, what: str, python: Any, declared: str = "") -> None:
        self.what, self.python = what, python
        self._declared = declared or type_name(python)
        self._info = mi.type_info(python)
        self.arrow = _arrow(self._info)
        """Arrow's type; None where it has none."""

        self._prepare = encoder_of(self._info)
        self._restore = decoder_of(self._info)
        self._inexact = self.arrow is not None and holds(self._info, mi.DateTimeType)
        self._decoder = msgspec.msgpack.Decoder(python)

    def encode(self, values: Sequence[Any]) -> tuple[pa.Array | None, Encoded]:
        """The values as an array, and those that the array cannot hold."""
        if self.arrow is None:
            return None, {i: _encode(value) for i, value in enumerate(values) if value is not None}
        try:
            array = self._array(values, self.arrow)
        except _REFUSED:
            return self._one_by_one(values, self.arrow)
        if not self._inexact:
            return array, {}
        changed = {i for i, back in enumerate(self._values(array)) if back != values[i]}
        if not changed:
            return array, {}
        representable = [None if i in changed else value for i, value in enumerate(values)]
        return self._array(representable, self.arrow), {i: _encode(values[i]) for i in changed}

    def decode(self, array: pa.Array | None, encoded: Encoded) -> list[Any]:
        """The inverse of `encode`, also for an array of another type: see `evolution.py`."""
        if array is None:
            return []
        try:
            if self.arrow is not None and same_type(array.type, self.arrow):
                check_members(array, self._info)
                values = self._values(array)
            else:
                convert = self.migration(array.type)
                values = [None if v is None else convert(v) for v in python_values(array)]
            self._check_order(array.type, encoded)
        except (ValueError, RecordTypeError) as error:
            raise StateError(f"{self.what}: {error}") from error
        for place, data in encoded.items():
            values[place] = self.decoded(data)
        return values

    def _check_order(self, stored: pa.DataType, encoded: Encoded) -> None:
        """Raise `ValueError` where values are msgpack, which stores fields by place, and the places have changed."""
        if not encoded or self.arrow is None or _in_place(stored, self.arrow):
            return
        if holds(self._info, mi.NamedTupleType):
            raise ValueError(
                f"it is declared {self._declared}, and the savepoint has {stored}, with {len(encoded)} values"
                " that Arrow cannot hold; keep the type as it was"
            )

    def decoded(self, data: bytes) -> Any:
        """One value that was kept as msgpack."""
        try:
            return self._decoder.decode(data)
        except msgspec.ValidationError as error:
            raise StateError(
                f"{self.what} is declared {self._declared}, and the savepoint has what does not fit it:"
                f" {error}; keep the type as it was"
            ) from error

    def check(self, stored: pa.DataType) -> None:
        """Raise `StateError` where a column of another type cannot become one of this type."""
        self.migration(stored)

    def migration(self, stored: pa.DataType) -> Convert:
        """A function that turns stored values of another type into this one's; raises `StateError` if there is none."""
        convert = migration(stored, self._info)
        if convert is None:
            raise StateError(
                f"{self.what} is declared {self._declared}, and the savepoint has {stored}; fields may be"
                " added with a default, dropped, widened or made optional; otherwise keep the type as it was"
            )
        return convert

    def _array(self, values: Sequence[Any], arrow: pa.DataType) -> pa.Array:
        prepare = self._prepare
        return pa.array(values if prepare is None else [None if v is None else prepare(v) for v in values], arrow)

    def _values(self, array: pa.Array) -> list[Any]:
        restore, values = self._restore, python_values(array)
        return values if restore is None else [None if v is None else restore(v) for v in values]

    def _one_by_one(self, values: Sequence[Any], arrow: pa.DataType) -> tuple[pa.Array, Encoded]:
        representable: list[Any] = []
        encoded: Encoded = {}
        for place, value in enumerate(values):
            try:
                self._array([value], arrow)
                representable.append(value)
            except _REFUSED:
                representable.append(None)
                encoded[place] = _encode(value)
        return self._array(representable, arrow), encoded


def _arrow(info: mi.Type) -> pa.DataType | None:
    try:
        kind = arrow_of(info)
    except RecordTypeError:
        return None
    return None if has(kind, is_empty) else kind


def is_empty(kind: pa.DataType) -> bool:
    """Whether it is a struct without fields, which Parquet does not have."""
    return bool(pa.types.is_struct(kind) and kind.num_fields == 0)


def same_type(first: pa.DataType, second: pa.DataType) -> bool:
    """Whether two types are the same apart from nullability and the names of lists' and maps' elements."""
    if pa.types.is_struct(first) and pa.types.is_struct(second):
        names = [f.name for f in first] == [f.name for f in second]
        return names and all(same_type(a.type, b.type) for a, b in zip(first, second, strict=True))
    if pa.types.is_list(first) and pa.types.is_list(second):
        return same_type(first.value_type, second.value_type)
    if pa.types.is_map(first) and pa.types.is_map(second):
        return same_type(first.key_type, second.key_type) and same_type(first.item_type, second.item_type)
    return bool(first == second)


def _in_place(first: pa.DataType, second: pa.DataType) -> bool:
    """Whether fields in the same place have the same name in two types, at any depth."""
    if pa.types.is_struct(first) and pa.types.is_struct(second):
        return all(a.name == b.name and _in_place(a.type, b.type) for a, b in zip(first, second, strict=False))
    if pa.types.is_list(first) and pa.types.is_list(second):
        return _in_place(first.value_type, second.value_type)
    if pa.types.is_map(first) and pa.types.is_map(second):
        return _in_place(first.key_type, second.key_type) and _in_place(first.item_type, second.item_type)
    return True


def check_members(array: pa.Array, info: mi.Type) -> None:
    """Raise `ValueError` for a None in a record, list or map whose type does not allow it."""
    for part in parts(array, info):
        if part.has_forbidden_null:
            raise ValueError(
                f"{part.name} may not be None any more, and is None {part.values.null_count} times; {FILL_IN}"
            )
        check_members(part.values, part.type)
