"""How the values of a type lie in msgpack, and whether those of one type can be read as those of another.

msgpack has the fields of a `NamedTuple` by their places, so that a type whose fields have changed places would read one
for another without a word, and a number or a text is read as any type that its value fits. A checkpoint therefore says
how its state lies; a savepoint has names and needs none of this.
"""

from __future__ import annotations

from functools import cache
from typing import Any, get_origin

import msgspec
from msgspec import inspect as mi

from dagster_unified.operators.state.ttl import Renewed
from dagster_unified.values import described

Layout = str | list[Any]
"""A scalar's name, or what holds others: its kind and its members, of a record each with its name."""

_BY_PLACE = "by place"
_BY_NAME = "by name"
_TIMED = "timed"


@cache
def layout_of(python: Any) -> str:
    """The layout of a type, as JSON."""
    return msgspec.json.encode(_layout(mi.type_info(python), ())).decode()


def can_read(declared: str, stored: str) -> bool:
    """Whether each value of the stored layout is the same one in the declared layout, or an error where it is read."""
    return declared == stored or _reads(msgspec.json.decode(declared), msgspec.json.decode(stored))


def shown(layout: str) -> str:
    """A layout as a sentence has it: `{shop: str, amount: int}`."""
    return _shown(msgspec.json.decode(layout))


def _shown(layout: Layout) -> str:
    if isinstance(layout, str):
        return layout
    kind, parts = layout[0], layout[1:]
    if kind in (_BY_PLACE, _BY_NAME):
        return "{" + ", ".join(f"{name}: {_shown(part)}" for name, part in parts) + "}"
    if kind == "union":
        return " | ".join(map(_shown, parts))
    if kind == _TIMED:
        return f"{_shown(parts[0])} with a time to live"
    return parts[0] if kind == "again" else f"{kind}[{', '.join(map(_shown, parts))}]"


def _layout(info: mi.Type, above: tuple[type, ...]) -> Layout:
    if isinstance(info, mi.Metadata):
        return _layout(info.type, above)
    if isinstance(info, mi.UnionType):
        kinds = [_layout(kind, above) for kind in info.types if not isinstance(kind, mi.NoneType)]
        return kinds[0] if len(kinds) == 1 else ["union", *sorted(kinds, key=repr)]
    if isinstance(info, (mi.NamedTupleType, mi.DataclassType, mi.StructType)):
        if get_origin(info.cls) is Renewed:
            return [_TIMED, _layout(info.fields[0].type, above)]
        if info.cls in above:
            return ["again", info.cls.__name__]
        within = (*above, info.cls)
        by_place = isinstance(info, mi.NamedTupleType) or (isinstance(info, mi.StructType) and info.array_like)
        members = [[field.encode_name, _layout(field.type, within)] for field in info.fields]
        return [_BY_PLACE if by_place else _BY_NAME, *members]
    if isinstance(info, mi.TupleType):
        return ["tuple", *(_layout(item, above) for item in info.item_types)]
    if isinstance(info, (mi.ListType, mi.VarTupleType, mi.SetType, mi.FrozenSetType)):
        return ["list", _layout(info.item_type, above)]
    if isinstance(info, mi.DictType):
        return ["dict", _layout(info.key_type, above), _layout(info.value_type, above)]
    if isinstance(info, mi.EnumType):
        return "str" if isinstance(next(iter(info.cls)).value, str) else "int"
    return described(info)


def _reads(declared: Layout, stored: Layout) -> bool:
    if isinstance(declared, str) or isinstance(stored, str) or declared[0] != stored[0]:
        return declared == stored
    kind, parts, others = declared[0], declared[1:], stored[1:]
    if kind == _BY_NAME:
        known = dict(others)
        return all(_reads(layout, known[name]) for name, layout in parts if name in known)
    if kind == _BY_PLACE:  # more fields may follow, with defaults
        pairs = list(zip(parts, others, strict=False))
        return len(parts) >= len(others) and all(a[0] == b[0] and _reads(a[1], b[1]) for a, b in pairs)
    if kind in ("union", "again"):
        return declared == stored
    return len(parts) == len(others) and all(map(_reads, parts, others))
