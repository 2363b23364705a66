"""Finds nulls of an Arrow column that a type does not allow, in the values themselves and in what they consist of.

Arrow's own type does not say it of a map's values, so that the declared one is asked. Knows neither records nor state.
"""

from collections.abc import Iterator
from typing import NamedTuple

import msgspec.inspect as mi
import pyarrow as pa


class Part(NamedTuple):
    """What nested values have in one place, of all that are there."""

    path: str
    """Behind the name of the whole: `.city` of a record, `[]` of a list."""

    name: str
    """As a sentence calls it: `a list's element`."""

    values: pa.Array
    type: mi.Type

    @property
    def has_forbidden_null(self) -> bool:
        """Whether a value is null, and the type does not allow None."""
        return bool(self.values.null_count) and not takes_none(self.type)


def takes_none(info: mi.Type) -> bool:
    """Whether a value of a type may be None."""
    if isinstance(info, mi.Metadata):
        return takes_none(info.type)
    return isinstance(info, mi.UnionType) and any(isinstance(t, mi.NoneType) for t in info.types)


def parts(column: pa.Array, info: mi.Type) -> Iterator[Part]:
    """What the values of a column consist of; nothing where they are not nested."""
    info = _without_none(info)
    if not pa.types.is_nested(column.type):
        return
    held = column.drop_null() if column.null_count else column
    if isinstance(info, (mi.NamedTupleType, mi.DataclassType, mi.StructType)):
        for number, field in enumerate(info.fields):
            yield Part(f".{field.name}", f"field '{field.name}'", held.field(number), field.type)
    elif isinstance(info, mi.TupleType):
        for number, item in enumerate(info.item_types):
            yield Part(f".f{number}", f"item {number} of a tuple", held.field(number), item)
    elif isinstance(info, mi.DictType):
        first, last = held.offsets[0].as_py(), held.offsets[-1].as_py()  # of a slice, `keys` and `items` have all
        yield Part(".keys()", "a map's key", held.keys[first:last], info.key_type)
        yield Part("[]", "a map's value", held.items[first:last], info.value_type)
    elif isinstance(info, (mi.ListType, mi.VarTupleType)):
        yield Part("[]", "a list's element", held.flatten(), info.item_type)


def forbidden_null(column: pa.Array, info: mi.Type) -> str | None:
    """The path to a null that the type does not allow: empty for a value itself, None if there is no such null."""
    if Part("", "", column, info).has_forbidden_null:
        return ""
    found = ((part.path, forbidden_null(part.values, part.type)) for part in parts(column, info))
    return next((path + rest for path, rest in found if rest is not None), None)


def with_nulls_declared(kind: pa.DataType, info: mi.Type) -> pa.DataType:
    """An Arrow type that says of the values of maps too whether they may be null, as the declared type does."""
    info = _without_none(info)
    if isinstance(info, (mi.NamedTupleType, mi.DataclassType, mi.StructType, mi.TupleType)):
        items = info.item_types if isinstance(info, mi.TupleType) else [field.type for field in info.fields]
        fields = zip(kind, items, strict=True)
        return pa.struct([field.with_type(with_nulls_declared(field.type, item)) for field, item in fields])
    if isinstance(info, mi.DictType):
        item = with_nulls_declared(kind.item_type, info.value_type)
        return pa.map_(kind.key_type, kind.item_field.with_type(item).with_nullable(takes_none(info.value_type)))
    if isinstance(info, (mi.ListType, mi.VarTupleType)):
        return pa.list_(kind.value_field.with_type(with_nulls_declared(kind.value_type, info.item_type)))
    return kind


def _without_none(info: mi.Type) -> mi.Type:
    if isinstance(info, mi.Metadata):
        return _without_none(info.type)
    if isinstance(info, mi.UnionType):
        return _without_none(next(t for t in info.types if not isinstance(t, mi.NoneType)))
    return info
