"""The globals of a module that its text sets once, so that their values are known."""

from __future__ import annotations

import ast
import operator
import os
import sys
import types
from collections.abc import Callable, Mapping
from datetime import date, datetime, timedelta, timezone
from decimal import Decimal
from typing import Any, NamedTuple
from zoneinfo import ZoneInfo

from dagster_unified.graph.lowering.source import Text, text_of, text_of_module

_PURE: tuple[Any, ...] = (datetime, date, timedelta, timezone, ZoneInfo, Decimal, frozenset)
"""Classes whose objects cannot change, and are the same for the same arguments."""

_ARITHMETIC: dict[type[ast.operator], Callable[[Any, Any], Any]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.FloorDiv: operator.floordiv,
    ast.Div: operator.truediv,
}
_NUMBERS = (int, float, timedelta)


class Globals(NamedTuple):
    """Those of one module."""

    text: Text
    names: Mapping[str, Any]

    def is_constant(self, name: str) -> bool:
        """Whether a global is set once, by a text that says its value."""
        stores = self.text.stored.get(name, [])
        if name in self.text.rebound or len(stores) != 1 or not self._is_whole():
            return False
        if isinstance(stores[0], ast.ImportFrom):
            return self._is_constant_elsewhere(stores[0], name)
        for statement in self.text.tree.body:
            if isinstance(statement, (ast.Assign, ast.AnnAssign)) and statement.value is not None:
                targets = statement.targets if isinstance(statement, ast.Assign) else [statement.target]
                if any(target is stores[0] for target in targets):
                    return self._says(statement.value, self.names[name])
        return False

    def binds_once(self, name: str) -> bool:
        """Whether a global is bound by one definition or import, at the top level."""
        stores = self.text.stored.get(name, [])
        kinds = (ast.FunctionDef, ast.ClassDef, ast.Import, ast.ImportFrom)
        is_one = len(stores) == 1 and isinstance(stores[0], kinds)
        return is_one and name not in self.text.rebound and self._is_whole()

    def _is_whole(self) -> bool:
        """Whether a file has all of what sets the globals: not so in a notebook."""
        file = self.names.get("__file__")
        is_same = isinstance(file, str) and os.path.realpath(file) == os.path.realpath(self.text.file)
        return is_same and not self.text.may_set_any

    def _is_constant_elsewhere(self, statement: ast.ImportFrom, name: str) -> bool:
        module = sys.modules.get(statement.module or "") if not statement.level else None
        text = text_of_module(module)
        given = next((alias.name for alias in statement.names if (alias.asname or alias.name) == name), "")
        if module is None or text is None or vars(module).get(given, self) is not self.names[name]:
            return False
        try:
            return Globals(text, vars(module)).is_constant(given)
        except (SyntaxError, RecursionError):
            return False

    def _says(self, node: ast.expr, value: object) -> bool:
        try:
            said = self._said(node)
            return type(said) is type(value) and repr(said) == repr(value)
        except (ValueError, TypeError, ArithmeticError):  # or an integer of too many digits to be written
            return False

    def _said(self, node: ast.expr) -> Any:
        """Return the value that a text says; raises `ValueError` where that is not known."""
        if isinstance(node, ast.Name) and self.is_constant(node.id):
            return self.names[node.id]
        owner = node.value if isinstance(node, ast.Attribute) and node.attr == "utc" else None
        if isinstance(owner, ast.Name) and self.names.get(owner.id) is timezone and self.binds_once(owner.id):
            return timezone.utc
        if isinstance(node, ast.BinOp) and type(node.op) in _ARITHMETIC:
            left, right = self._said(node.left), self._said(node.right)
            if type(left) in _NUMBERS and type(right) in _NUMBERS:
                return _ARITHMETIC[type(node.op)](left, right)
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
            called = self.names.get(node.func.id, getattr(self.names.get("__builtins__"), node.func.id, None))
            is_known = any(called is pure for pure in _PURE) and (called is frozenset or self.binds_once(node.func.id))
            if is_known and called is not None and all(keyword.arg for keyword in node.keywords):
                named = {str(keyword.arg): self._said(keyword.value) for keyword in node.keywords}
                return called(*map(self._said, node.args), **named)
        return ast.literal_eval(node)


def globals_of(function: types.FunctionType) -> Globals:
    """Return the globals of a function; raises `UnreadableError` where its text is not there."""
    return Globals(text_of(function), function.__globals__)
