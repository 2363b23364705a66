"""The state that a function declares, as far as its code shows it.

A descriptor is found where it is created, in the methods of an author's class, and where they refer to one that exists.
Knows no kind of state: a name counts if it stands for a `StateDescriptor` where it is used. Runs nothing.
"""

from __future__ import annotations

import ast
import inspect
import sys
import textwrap
import types
from collections.abc import Iterator
from typing import Any

from dagster_unified.graph.code import authors, held_by
from dagster_unified.graph.fingerprint import is_installed
from dagster_unified.operators.state.descriptors import StateDescriptor


def declared_states(function: Any) -> list[dict[str, str]]:
    """The name and kind of each state, in the order of the code."""
    found: dict[str, str] = {}
    for _, tree, names in _classes(function):
        for name, kind in _made_in(tree, names):
            found.setdefault(name, kind)
    for held in held_by(function):
        if isinstance(held, StateDescriptor):
            found.setdefault(held.name, held.kind)
    return [{"name": name, "kind": kind} for name, kind in found.items()]


_LISTS = {"get_list_state": "operator list", "get_union_list_state": "union list"}
"""What gives a function operator state, and what kind of state it is."""


def declared_lists(function: Any) -> list[dict[str, str]]:
    """The name and kind of each operator state, in the order of the code."""
    found: dict[str, str] = {}
    for part, tree, names in _classes(function):
        for name, kind in _lists_in(tree, {**names, "self": part}):
            found.setdefault(name, kind)
    return [{"name": name, "kind": kind} for name, kind in found.items()]


def _lists_in(tree: ast.AST, names: dict[str, Any]) -> Iterator[tuple[str, str]]:
    for call in ast.walk(tree):
        if not (isinstance(call, ast.Call) and isinstance(call.func, ast.Attribute) and call.args):
            continue
        kind, given = _LISTS.get(call.func.attr), call.args[0]
        if kind is None:
            continue
        if isinstance(given, ast.Call) and given.args and isinstance(given.args[0], ast.Constant):
            yield str(given.args[0].value), kind
        held = _value(given, names)
        if isinstance(held, StateDescriptor):
            yield held.name, kind


def _classes(function: Any) -> Iterator[tuple[Any, ast.AST, dict[str, Any]]]:
    """The parts of a function that an author wrote, with the code of each class and what names stand for in it."""
    for part in authors(function):
        for cls in reversed(type(part).__mro__):
            if is_installed(cls.__module__):
                continue
            try:
                tree = ast.parse(textwrap.dedent(inspect.getsource(cls)))
            except (OSError, TypeError, SyntaxError):
                continue
            yield part, tree, _names(cls, tree)


def _made_in(tree: ast.AST, names: dict[str, Any]) -> Iterator[tuple[str, str]]:
    for call in ast.walk(tree):
        if isinstance(call, ast.Call) and call.args and isinstance(call.args[0], ast.Constant):
            made = _value(call.func, names)
            if isinstance(made, type) and issubclass(made, StateDescriptor):
                yield str(call.args[0].value), made.kind


def _names(cls: type, tree: ast.AST) -> dict[str, Any]:
    """What the names in a class's methods stand for: globals, what they are closed over, and what they import."""
    names: dict[str, Any] = {}
    for member in vars(cls).values():
        if isinstance(member, types.FunctionType):
            names |= member.__globals__
            names |= inspect.getclosurevars(member).nonlocals
    for statement in ast.walk(tree):
        if isinstance(statement, ast.ImportFrom):
            module = sys.modules.get(statement.module or "")
            names |= {a.asname or a.name: getattr(module, a.name, None) for a in statement.names}
    return names


def _value(expression: ast.expr, names: dict[str, Any]) -> Any:
    if isinstance(expression, ast.Name):
        return names.get(expression.id)
    if isinstance(expression, ast.Attribute):
        return getattr(_value(expression.value, names), expression.attr, None)
    return None
