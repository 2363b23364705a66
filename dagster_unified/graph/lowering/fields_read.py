"""Which fields of its record a function reads, also where it is not known what it computes with them."""

from __future__ import annotations

import ast
import sys
from functools import lru_cache
from typing import Any

from dagster_unified.graph.fingerprint import is_installed
from dagster_unified.graph.lowering.record_classes import check_class
from dagster_unified.graph.lowering.source import (
    Definition,
    Text,
    UnreadableError,
    definition_of,
    method_of,
    text_of_module,
)
from dagster_unified.records import RecordType

_SEES_ALL = frozenset(
    [
        "locals",
        "vars",
        "eval",
        "exec",
        "dir",
        "globals",
        "f_locals",
        "currentframe",
        "_getframe",
        "stack",
        "trace",
        "capture_locals",
        "tb_frame",
    ]
)
"""Functions and attributes by which a record is seen without its name."""

_SETS_ANY = frozenset(["setattr", "delattr", "exec", "eval", "globals", "vars"])
"""Functions that may set an attribute without naming it."""


def fields_read(function: Any, method: str, records: RecordType) -> tuple[int, ...]:
    """Return the fields that a method of an object reads of its record, which it uses for nothing else.

    Raises `UnreadableError` where that is not known.
    """
    if records.shape == "value":
        raise UnreadableError("its record is a value")
    if records.shape == "class":
        check_class(records.python)
    definition = definition_of(method_of(function, method), may_yield=True)
    for python in type(function).__mro__:
        if not is_installed(python.__module__):
            _check_sets(python, method)
    taken = [*definition.args.posonlyargs, *definition.args.args]
    if len(taken) < 2 or definition.args.vararg is not None:
        raise UnreadableError("it takes other arguments")
    return _of_argument(definition, taken[1].arg, records)


def _of_argument(definition: Definition, name: str, records: RecordType) -> tuple[int, ...]:
    read, known = set[int](), set[int]()
    for node in ast.walk(definition):
        if _named(node) in _SEES_ALL:
            raise UnreadableError(f"it uses {_named(node)}")
        number = _field(node, name, records)
        if number is not None and isinstance(node, (ast.Attribute, ast.Subscript)):
            read.add(number)
            known.add(id(node.value))
    if any(node.id == name and id(node) not in known for node in ast.walk(definition) if isinstance(node, ast.Name)):
        raise UnreadableError("it uses a whole record")
    return tuple(sorted(read))


def _field(node: ast.AST, name: str, records: RecordType) -> int | None:
    """Return the field that a part of the text reads of the record of this name, if it does that."""
    if not isinstance(node, (ast.Attribute, ast.Subscript)) or not isinstance(node.ctx, ast.Load):
        return None
    if not isinstance(node.value, ast.Name) or node.value.id != name:
        return None
    if isinstance(node, ast.Attribute):
        is_field = records.shape == "class" and node.attr in records.names
        return records.names.index(node.attr) if is_field else None
    index = node.slice.value if isinstance(node.slice, ast.Constant) else None
    is_tuple = records.shape == "tuple" or (records.shape == "class" and issubclass(records.python, tuple))
    return index if is_tuple and type(index) is int and 0 <= index < len(records.names) else None


def _check_sets(python: type, method: str) -> None:
    """Raise `UnreadableError` where the file of a class may replace a method of its objects."""
    text = text_of_module(sys.modules.get(python.__module__))
    if text is None:
        raise UnreadableError(f"the source of {python.__name__} is not there")
    try:
        if _sets(text, method):
            raise UnreadableError(f"{method} may be set again")
    except SyntaxError:
        raise UnreadableError(f"the source of {python.__name__} is not Python") from None


@lru_cache(maxsize=256)
def _sets(text: Text, method: str) -> bool:
    """Whether a file may set an attribute of this name; it is walked once for all functions in it."""
    return any(_may_set(node, method) for node in ast.walk(text.tree))


def _may_set(node: ast.AST, method: str) -> bool:
    if isinstance(node, ast.Name):
        return node.id in _SETS_ANY
    if not isinstance(node, ast.Attribute):
        return False
    is_set = node.attr in (method, "__class__") and not isinstance(node.ctx, ast.Load)
    return is_set or node.attr in ("__dict__", "__setattr__")


def _named(node: ast.AST) -> str | None:
    """Return the name that a part of the text uses."""
    if isinstance(node, ast.Name):
        return node.id
    if isinstance(node, ast.keyword):
        return node.arg
    return node.attr if isinstance(node, ast.Attribute) else None
