"""Why a row of CSV or JSON cannot be read: the field, what stands there and what belongs there.

Spark says of such a row that it is malformed, and no more. What is looked at here are few rows, one by one. Knows the
types of fields, and no files.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any, Protocol

import pyarrow as pa

from dagster_unified.connectors.files.texts import expected
from dagster_unified.records import shorten

UNREADABLE = "cannot be read as"
"""How the reason begins of a row that is none, whatever its values are."""

_HALF = re.compile("[\ud800-\udfff]")


class Rows(Protocol):
    """What the rows of a source's files look like."""

    def explain(self, file: str, row: str) -> str | None:
        """Why a text of a file is no row: the field, what was found and what was expected; None if unknown."""


def explained(rows: Rows, file: str, row: str, reason: str) -> str:
    """The reason why a row is malformed, with what is wrong with one that is none."""
    problem = rows.explain(file, row) if reason.startswith(UNREADABLE) else None
    return reason if problem is None else f"{reason}: {problem}"


@dataclass(frozen=True)
class CsvRows(Rows):
    """What rows of CSV look like; its patterns are those of Python and of Java alike."""

    names: tuple[str, ...]
    delimiter: str
    escape: str

    def beside(self, file: str) -> CsvRows:
        """The rows of a file, without the fields that the names of its folders tell."""
        return replace(self, names=tuple(name for name in self.names if f"/{name}=" not in file))

    @property
    def _field(self) -> str:
        """A field in quotes, which close before the next delimiter; or one that begins with no quote."""
        apart, escape = re.escape(self.delimiter), re.escape(self.escape)
        inside = r'[^"]*+(?:""[^"]*+)*+' if self.escape == '"' else rf'(?:[^"{escape}]|{escape}(?s:.))*+'
        plain = rf"[^{apart}\n]*+" if len(self.delimiter) == 1 else rf"(?:(?!{apart})[^\n])*+"
        return rf'"{inside}"(?:(?!{apart})[\x00-\x09\x0b\x0c\x0e-\x20])*+|(?!"){plain}'

    @property
    def row(self) -> str:
        """The pattern of a row with a field for each name, whose quotes all close."""
        return rf"\A(?:{self._field})(?:{re.escape(self.delimiter)}(?:{self._field})){{{len(self.names) - 1}}}\z"

    @property
    def header(self) -> str:
        """The pattern of a line that names the columns, in order."""
        names = re.escape(self.delimiter).join(f'"?{re.escape(name)}"?' for name in self.names)
        return rf"(?i)\A{names}\z"

    def is_header(self, line: str) -> bool:
        """Whether a line names the columns, in order."""
        return re.fullmatch(self.header.removesuffix(r"\z"), line) is not None

    def explain(self, file: str, row: str) -> str | None:
        names = self.beside(file).names
        field, place, number = re.compile(self._field), 0, 0
        while (match := field.match(row, place)) is not None and row.startswith(self.delimiter, match.end()):
            place, number = match.end() + len(self.delimiter), number + 1
        if match is None or match.end() < len(row):
            whose = f"field '{names[number]}'" if number < len(names) else f"column {number + 1}"
            return f"{whose} is {shorten(row[place:])}, and the quotes of a text have to close at its end"
        if number + 1 == len(names):
            return None
        return f"it has {number + 1} columns, and {len(names)} are expected: {', '.join(names)}"


@dataclass(frozen=True)
class JsonRows(Rows):
    """What rows of JSON look like, by the Arrow schema of their fields."""

    schema: pa.Schema

    def explain(self, file: str, row: str) -> str | None:
        try:
            value = json.loads(row)
        except (ValueError, RecursionError) as error:
            return f"it is no JSON: {error}"
        if not isinstance(value, dict):
            return f"it is {_shown(value)}, and an object is expected"
        return next(self._misfits(value), None)

    def _misfits(self, row: dict[str, Any]) -> Iterator[str]:
        for field in self.schema:
            for path, found, wanted in _within(row.get(field.name), field.type, field.name):
                yield f"field '{path}' is {_shown(found)}, not {wanted}"
        for path, text in _halves(row):
            yield f"field '{path}' is {_shown(text)}, with half a character of two surrogates, not a text"


Misfit = tuple[str, Any, str]

_PLAIN: dict[Callable[[pa.DataType], bool], Callable[[Any], bool]] = {
    pa.types.is_boolean: lambda value: isinstance(value, bool),
    pa.types.is_integer: lambda v: isinstance(v, int) and not isinstance(v, bool) and -(1 << 63) <= v < 1 << 63,
    pa.types.is_floating: lambda v: isinstance(v, (int, float)) and not isinstance(v, bool),
}


def _within(value: Any, kind: pa.DataType, path: str) -> Iterator[Misfit]:
    """What does not fit a type in a plain value."""
    if value is None:
        return
    if pa.types.is_struct(kind) and isinstance(value, dict):
        for field in kind:
            yield from _within(value.get(field.name), field.type, f"{path}.{field.name}")
    elif pa.types.is_map(kind) and isinstance(value, dict):
        for name, item in value.items():
            yield from _within(item, kind.item_type, f"{path}[{name!r}]")
    elif pa.types.is_list(kind) and isinstance(value, list):
        for place, item in enumerate(value):
            yield from _within(item, kind.value_type, f"{path}[{place}]")
    elif pa.types.is_nested(kind):
        yield path, value, expected(kind)
    else:
        fits = next((test for is_kind, test in _PLAIN.items() if is_kind(kind)), None)
        if fits is not None and not fits(value):
            yield path, value, expected(kind)


def _halves(value: Any, path: str = "") -> Iterator[tuple[str, str]]:
    """The texts with half a surrogate pair in a plain value."""
    if isinstance(value, str) and _HALF.search(value):
        yield path, value
    elif isinstance(value, dict):
        for name, item in value.items():
            if _HALF.search(name):
                yield path, name
            yield from _halves(item, f"{path}.{name}" if path else name)
    elif isinstance(value, list):
        for place, item in enumerate(value):
            yield from _halves(item, f"{path}[{place}]")


def _shown(value: Any) -> str:
    return shorten(json.dumps(value))[1:-1]
