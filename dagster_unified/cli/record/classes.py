"""An Arrow schema as the source text of a record class: what `records.py` makes of a class, the other way round.

Knows no file, table or registry. Entries of a field's metadata count: `comment`, what the column is for, and `class`,
the name of the class of a nested record. A type that Arrow does not know is null, and `type` says what it is.
"""

from __future__ import annotations

import itertools
import json
import keyword
import re
import shlex
from collections.abc import Callable, Iterable, Iterator
from typing import NamedTuple

import pyarrow as pa

from dagster_unified.errors import RecordTypeError
from dagster_unified.records import RESERVED

_BUILTINS = ("bool", "int", "float", "str", "bytes", "list", "dict")
_TIMES = ("date", "datetime", "timedelta")
_OF_MSGSPEC = ("Struct", "field")
_MODULES = {"builtins": _BUILTINS, "datetime": _TIMES, "decimal": ("Decimal",), "msgspec": _OF_MSGSPEC}
"""What a class's body names, by the module it is of."""

_DIGITS, _BEHIND = 20, 18
"""The digits before and behind the point that a record's Decimal has."""

_OF_TUPLES = ("count", "index")
"""Methods of tuples, in whose place a NamedTuple has the field; a type checker has to be told."""


class Names(NamedTuple):
    """How a source finds a field's column."""

    renames: bool
    """Whether a field may have another name than its column, by `msgspec.field(name=...)`."""

    advice: str
    """What to do about a column whose name no field can have, or whose type none holds; `{column}` stands for it."""

    def advice_for(self, path: str) -> str:
        """The advice for a column, or for one within it."""
        return self.advice.replace("{column}", shlex.quote(path.partition(".")[0].removesuffix("[]")))


def record_class(schema: pa.Schema, name: str, doc: str, where: str, names: Names) -> str:
    """The source text of a class for records of a schema, and of the classes within it, with their imports.

    Raises `RecordTypeError`, which begins with `where` and names the column, for one that no field can hold.
    """
    writer = _Writer(schema, name, where, names)
    writer.add(name, list(schema), doc, "")
    return writer.text()


def class_name(text: str) -> str:
    """A class's name made of a file's, a table's or a field's: `OrderLines` of `order_lines`; `Record` of no letter."""
    words = re.findall(r"[^\W_]+", text)
    made = "".join(word[0].upper() + word[1:] for word in words)
    return f"{made}_" if keyword.iskeyword(made) else made if made.isidentifier() else "Record"


def unread(name: str, kind: str) -> pa.Field:
    """A column of a type that no field of a record holds."""
    return pa.field(name, pa.null(), metadata={"type": kind})


def can_be_field(name: str) -> bool:
    """Whether a field of a record can have this name."""
    return name.isidentifier() and not keyword.iskeyword(name) and not name.startswith(RESERVED)


class _Writer:
    def __init__(self, schema: pa.Schema, name: str, where: str, names: Names) -> None:
        self._where, self._names = where, names
        members = {member.name for field in schema for member in _within(field)} | set(schema.names)
        self._spelled = {type_: type_ for type_ in (*itertools.chain(*_MODULES.values()), "NamedTuple", "dataclass")}
        self._modules: dict[str, str] = {}
        """By module, the name that it is imported as, where a field has the name of one of its types."""

        for module, types in _MODULES.items():
            if members & set(types):
                self._modules[module] = _free({"datetime": "dt"}.get(module, module), members)
                shadowed = types if module == "datetime" else members & set(types)
                self._spelled |= {type_: f"{self._modules[module]}.{type_}" for type_ in shadowed}
        self._taken = {*self._spelled, *self._modules.values(), *members, name}
        self._used: set[str] = set()
        self._classes: list[str] = []

    def text(self) -> str:
        return "\n\n\n".join(["\n".join(self._imports()), *self._classes]) + "\n"

    def add(self, name: str, fields: list[pa.Field], doc: str, path: str) -> None:
        """Write a class, behind those that its fields have."""
        if not fields:
            raise RecordTypeError(f"{self._where}: {path or 'it'} has no columns, and a record has fields")
        self._check_names(fields, path)
        lines = [f'    """{_quoted(doc)}"""', ""]
        is_struct = any(not can_be_field(field.name) for field in fields)
        is_tuple = not is_struct and not any(field.name.startswith("_") for field in fields)
        taken = {field.name for field in fields}
        for field in fields:
            lines += self._field(field, f"{path}.{field.name}".lstrip("."), taken, is_tuple)
        if is_struct:
            head = [f"class {name}({self._use('Struct')}, frozen=True):"]
        elif is_tuple:
            head = [f"class {name}({self._use('NamedTuple')}):"]
        else:  # a NamedTuple has no field whose name begins with an underscore
            head = [f"@{self._use('dataclass')}(frozen=True)", f"class {name}:"]
        self._classes.append("\n".join([*head, *lines]).rstrip())

    def _check_names(self, fields: list[pa.Field], path: str) -> None:
        seen: dict[str, str] = {}
        for field in fields:
            shown = f"{path}.{field.name}".lstrip(".")
            if not can_be_field(field.name) and not (self._names.renames and not field.name.startswith(RESERVED)):
                raise RecordTypeError(
                    f"{self._where}: no field of a record can have the name of column '{shown}';"
                    f" {self._names.advice_for(shown)}"
                )
            other = seen.setdefault(field.name.lower(), field.name)
            if other != field.name or sum(field.name == each.name for each in fields) > 1:
                raise RecordTypeError(
                    f"{self._where}: columns '{other}' and '{shown}' are one column to Spark, which ignores case;"
                    f" {self._names.advice_for(path)}"
                )

    def _field(self, field: pa.Field, path: str, taken: set[str], is_tuple: bool) -> Iterator[str]:
        name, default = field.name, ""
        if not can_be_field(name):
            name = _free(re.sub(r"\W", "_", name).strip("_") or "field", taken, keyword.kwlist)
            name = name if name.isidentifier() else _free(f"field_{name}", taken)
            taken.add(name)
            default = f" = {self._use('field')}(name={json.dumps(field.name, ensure_ascii=False)})"
        annotation = self._optional(self._type(field, path), field)
        ignored = "  # type: ignore[assignment]" if is_tuple and name in _OF_TUPLES else ""
        yield f"    {name}: {annotation}{default}{ignored}"
        comment = _metadata(field, "comment")
        if comment:
            yield f'    """{_quoted(comment)}"""'
            yield ""

    def _optional(self, written: str, field: pa.Field) -> str:
        return f"{written} | None" if field.nullable else written

    def _type(self, field: pa.Field, path: str) -> str:
        """A type's annotation, without None."""
        kind = field.type
        while isinstance(kind, pa.DictionaryType):
            kind = kind.value_type
        scalar = next((name for is_such, name in _SCALARS if is_such(kind)), None)
        if scalar is not None:
            return self._use(scalar)
        if any(is_such(kind) for is_such in _LISTS):
            item = kind.value_field
            return f"{self._use('list')}[{self._optional(self._type(_named(item, field), f'{path}[]'), item)}]"
        if pa.types.is_map(kind):
            return self._dict(kind, field, path)
        if pa.types.is_struct(kind):
            name = self._class_of(field)
            self.add(name, list(kind), _metadata(field, "comment") or f"A value of {path}.", path)
            return name
        raise RecordTypeError(
            f"{self._where}: column '{path}' is {_metadata(field, 'type') or kind}, which no field of a record holds;"
            f" {self._names.advice_for(path)}"
        )

    def _dict(self, kind: pa.MapType, field: pa.Field, path: str) -> str:
        if pa.types.is_nested(kind.key_type):
            raise RecordTypeError(
                f"{self._where}: column '{path}' is a map whose keys are {kind.key_type}, and those of a dict are plain"
                f" values; {self._names.advice_for(path)}"
            )
        key = self._type(kind.key_field, f"{path}.keys()")
        item = self._type(_named(kind.item_field, field), f"{path}[]")
        return f"{self._use('dict')}[{key}, {self._optional(item, kind.item_field)}]"

    def _class_of(self, field: pa.Field) -> str:
        name = _free(class_name(_metadata(field, "class") or field.name), self._taken)
        self._taken.add(name)
        return name

    def _use(self, name: str) -> str:
        self._used.add(name)
        return self._spelled[name]

    def _imports(self) -> list[str]:
        """The imports, those of other packages behind Python's own."""
        own: list[str] = []
        others: list[str] = []
        for module, alias in sorted(self._modules.items()):
            if any(self._spelled[name].startswith(f"{alias}.") for name in self._used):
                imported = f"import {module}" if alias == module else f"import {module} as {alias}"
                (others if module == "msgspec" else own).append(imported)
        named = {**_MODULES, "dataclasses": ("dataclass",), "typing": ("NamedTuple",)}
        for module in ("dataclasses", "datetime", "decimal", "typing", "msgspec"):
            used = sorted(name for name in named[module] if name in self._used and self._spelled[name] == name)
            if used:
                (others if module == "msgspec" else own).append(f"from {module} import {', '.join(used)}")
        return [*own, *([""] if own and others else []), *others]


def _is_decimal(kind: pa.DataType) -> bool:
    fits = pa.types.is_decimal(kind) and kind.scale <= _BEHIND and kind.precision - kind.scale <= _DIGITS
    return bool(fits or kind == pa.uint64())


def _is_whole(kind: pa.DataType) -> bool:
    """Whether it is whole numbers, also as a decimal that has more digits than a Decimal: most are of 64 bits."""
    wide = pa.types.is_decimal(kind) and kind.scale == 0
    return bool(pa.types.is_integer(kind) or wide)


def _is_float(kind: pa.DataType) -> bool:
    return bool(pa.types.is_floating(kind) and not pa.types.is_float16(kind))


def _is_time(kind: pa.DataType) -> bool:
    return bool(pa.types.is_timestamp(kind) and kind.unit != "ns")


def _is_text(kind: pa.DataType) -> bool:
    return bool(pa.types.is_string(kind) or pa.types.is_large_string(kind) or pa.types.is_string_view(kind))


def _is_binary(kind: pa.DataType) -> bool:
    return bool(pa.types.is_binary(kind) or pa.types.is_large_binary(kind) or pa.types.is_binary_view(kind))


_SCALARS: list[tuple[Callable[[pa.DataType], bool], str]] = [
    (pa.types.is_boolean, "bool"),
    (_is_decimal, "Decimal"),
    (_is_whole, "int"),
    (_is_float, "float"),
    (_is_text, "str"),
    (_is_binary, "bytes"),
    (pa.types.is_date, "date"),
    (_is_time, "datetime"),
    (lambda kind: kind in (pa.duration("us"), pa.duration("ms"), pa.duration("s")), "timedelta"),
]
"""Types without others within them, and the field that holds all their values; the first that is such counts."""

_LISTS = (pa.types.is_list, pa.types.is_large_list, pa.types.is_fixed_size_list)


def _within(field: pa.Field) -> Iterator[pa.Field]:
    """The fields within a field's type, at any depth."""
    for place in range(field.type.num_fields):
        inner = field.type.field(place)
        yield inner
        yield from _within(inner)


def _named(item: pa.Field, field: pa.Field) -> pa.Field:
    """The elements of a list, or the values of a map, with the field's name and comment, unless they name a class."""
    return (
        item
        if _metadata(item, "class") or _metadata(item, "type")
        else item.with_name(field.name).with_metadata(field.metadata)
    )


def _metadata(field: pa.Field, name: str) -> str:
    value: bytes = (field.metadata or {}).get(name.encode(), b"")
    return value.decode(errors="replace")


def _free(name: str, taken: Iterable[str], also: Iterable[str] = ()) -> str:
    """A name that is not taken."""
    known = {*taken, *also}
    while name in known:
        name += "_"
    return name


def _quoted(text: str) -> str:
    """A text as it stands in a docstring of one line."""
    escaped = " ".join(text.split()).replace("\\", "\\\\").replace('"', '\\"')
    return "".join(c if c.isprintable() else c.encode("unicode_escape", "backslashreplace").decode() for c in escaped)
