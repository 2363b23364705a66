"""Finds values of some types in plain ones, such as msgspec decodes without a type. Knows no format."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

from msgspec import inspect as mi

NO_FLOAT = "{} is a whole number that a float cannot hold; declare the field as an int"
"""Why a number does not fit a field that is a float."""

Find = Callable[[Any], Iterator[Any]]
"""Gives what a plain value has of what is looked for."""


def finder(info: mi.Type, declared: tuple[type[mi.Type], ...], plain: type) -> Find | None:
    """What finds the values that are of the class `plain` where one of the `declared` types is asked for.

    None where a type has no such place.
    """
    if isinstance(info, mi.Metadata):
        return finder(info.type, declared, plain)
    if isinstance(info, declared):
        return _itself(plain)
    if isinstance(info, mi.UnionType):
        return next((found for kind in info.types if (found := finder(kind, declared, plain)) is not None), None)
    if isinstance(info, (mi.StructType, mi.DataclassType, mi.NamedTupleType, mi.TypedDictType)):
        members = {field.encode_name: finder(field.type, declared, plain) for field in info.fields}
        return _in_members({name: found for name, found in members.items() if found is not None})
    if isinstance(info, mi.TupleType):
        return _in_places([finder(item, declared, plain) for item in info.item_types])
    if isinstance(info, (mi.ListType, mi.VarTupleType)):
        item = finder(info.item_type, declared, plain)
        return item and _in_items(item)
    if isinstance(info, mi.DictType):
        return _in_entries(finder(info.key_type, declared, plain), finder(info.value_type, declared, plain))
    return None


def _itself(plain: type) -> Find:
    def found(value: Any) -> Iterator[Any]:
        if type(value) is plain:
            yield value

    return found


def _in_members(members: dict[str, Find]) -> Find | None:
    def found(value: Any) -> Iterator[Any]:
        if isinstance(value, dict):
            for name, find in members.items():
                yield from find(value.get(name))

    return found if members else None


def _in_places(places: Sequence[Find | None]) -> Find | None:
    def found(value: Any) -> Iterator[Any]:
        for one, find in zip(value or (), places, strict=False):
            if find is not None:
                yield from find(one)

    return found if any(places) else None


def _in_items(item: Find) -> Find:
    def found(value: Any) -> Iterator[Any]:
        for one in value or ():
            yield from item(one)

    return found


def _in_entries(key: Find | None, item: Find | None) -> Find | None:
    def found(value: Any) -> Iterator[Any]:
        for name, one in (value or {}).items():
            if key is not None:
                yield from key(name)
            if item is not None:
                yield from item(one)

    return None if key is None and item is None else found
