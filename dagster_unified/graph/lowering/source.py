"""The text that a function was compiled from, or why it is not known.

A function's text counts only if its file compiles, now, to the very code object that the function runs. An edited file,
two lambdas on a line, a decorator and `exec` are decided by that.
"""

from __future__ import annotations

import ast
import inspect
import linecache
import types
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property, lru_cache

Definition = ast.Lambda | ast.FunctionDef


class UnreadableError(Exception):
    """Why a function, or a part of it, is not read."""


@dataclass(frozen=True)
class Text:
    """The text of one file, as it was when it was read."""

    file: str
    text: str

    @cached_property
    def tree(self) -> ast.Module:
        return ast.parse(self.text)

    @cached_property
    def codes(self) -> frozenset[types.CodeType]:
        """All code objects that it compiles to. Equal ones have the same instructions, constants, names and places."""
        found, pending = set(), [compile(self.text, self.file, "exec", dont_inherit=True)]
        while pending:
            code = pending.pop()
            found.add(code)
            pending += [constant for constant in code.co_consts if isinstance(constant, types.CodeType)]
        return frozenset(found)

    @cached_property
    def definitions(self) -> Mapping[int, list[Definition]]:
        """Its functions, by the line that they begin in."""
        found: dict[int, list[Definition]] = {}
        for node in ast.walk(self.tree):
            if isinstance(node, (ast.Lambda, ast.FunctionDef)):
                found.setdefault(node.lineno, []).append(node)
        return found

    @cached_property
    def rebound(self) -> frozenset[str]:
        """The globals that a function sets."""
        return frozenset(name for node in ast.walk(self.tree) if isinstance(node, ast.Global) for name in node.names)

    @cached_property
    def enclosed(self) -> Mapping[str, frozenset[str]]:
        """By qualified name of a function that is in no other, what functions in it set of what it holds."""
        found: dict[str, frozenset[str]] = {}
        pending: list[tuple[str, ast.AST]] = [("", self.tree)]
        while pending:
            prefix, node = pending.pop()
            if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
                inside = (each for each in ast.walk(node) if isinstance(each, ast.Nonlocal))
                names = frozenset(name for each in inside for name in each.names)
                found[prefix + node.name] = found.get(prefix + node.name, frozenset()) | names
                continue
            inner = f"{prefix}{node.name}." if isinstance(node, ast.ClassDef) else prefix
            pending += ((inner, child) for child in ast.iter_child_nodes(node))
        return found

    @cached_property
    def stored(self) -> Mapping[str, list[ast.AST]]:
        """By global, the statements of the module that bind it, wherever they stand outside of functions."""
        found: dict[str, list[ast.AST]] = {}
        pending: list[ast.AST] = list(self.tree.body)
        while pending:
            node = pending.pop()
            for name in _bound(node):
                found.setdefault(name, []).append(node)
            if not isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef, ast.Lambda)):
                pending += ast.iter_child_nodes(node)
        return found


def _bound(node: ast.AST) -> list[str]:
    if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
        return [node.name]
    if isinstance(node, (ast.Import, ast.ImportFrom)):
        return [(alias.asname or alias.name).partition(".")[0] for alias in node.names]
    if isinstance(node, ast.ExceptHandler) and node.name is not None:
        return [node.name]
    return [node.id] if isinstance(node, ast.Name) and not isinstance(node.ctx, ast.Load) else []


def text_of(function: types.FunctionType) -> Text:
    """Return the text of a function's file; raises `UnreadableError` where there is none."""
    lines = linecache.getlines(function.__code__.co_filename, function.__globals__)
    if not lines:
        raise UnreadableError("its source is not there")
    return _text(function.__code__.co_filename, "".join(lines))


_text = lru_cache(maxsize=256)(Text)  # one for each text of a file, with what is found out about it


def definition_of(function: object) -> Definition:
    """Return the definition that compiles to a function's code; raises `UnreadableError` where there is none."""
    if not isinstance(function, types.FunctionType):
        raise UnreadableError(f"a {type(function).__name__} is no plain function")
    code = function.__code__
    if code.co_flags & (inspect.CO_GENERATOR | inspect.CO_COROUTINE | inspect.CO_ASYNC_GENERATOR):
        raise UnreadableError("it is a generator or a coroutine")
    if hasattr(function, "__wrapped__"):
        raise UnreadableError("it is decorated")
    text = text_of(function)
    try:
        is_same = code in text.codes
    except (SyntaxError, ValueError):
        raise UnreadableError("its source is not Python") from None
    if not is_same:
        raise UnreadableError("its source is not what runs: it was changed, decorated or generated")
    fitting = [node for node in text.definitions.get(code.co_firstlineno, ()) if _may_be(node, code)]
    if not fitting:
        raise UnreadableError("its source is not found")
    return min(fitting, key=_extent)


def _may_be(node: Definition, code: types.CodeType) -> bool:
    """Whether a definition has the arguments of a code object, and spans all places that it names."""
    arguments = [argument.arg for argument in (*node.args.posonlyargs, *node.args.args)]
    if arguments != list(code.co_varnames[: code.co_argcount]):
        return False
    first, last = (node.lineno, node.col_offset), (node.end_lineno or 0, node.end_col_offset or 0)
    places = ((line, column) for line, _, column, _ in code.co_positions() if line and column is not None)
    return all(first <= place <= last for place in places if place != (code.co_firstlineno, 0))


def _extent(node: Definition) -> tuple[int, int]:
    return (node.end_lineno or 0) - node.lineno, (node.end_col_offset or 0) - node.col_offset


def is_enclosed_changing(function: types.FunctionType, name: str) -> bool:
    """Whether a function sets what another one holds, under this name, that both are in."""
    outermost = function.__qualname__.partition(".<locals>")[0]
    return name in text_of(function).enclosed.get(outermost, ())


def literal_of(function: types.FunctionType, name: str) -> bool:
    """Whether a global of a function's module is set once, by the text that says its value."""
    text = text_of(function)
    stores = text.stored.get(name, [])
    if name in text.rebound or len(stores) != 1:
        return False
    for statement in text.tree.body:
        if isinstance(statement, (ast.Assign, ast.AnnAssign)) and statement.value is not None:
            targets = statement.targets if isinstance(statement, ast.Assign) else [statement.target]
            if any(target is stores[0] for target in targets):
                try:
                    said = ast.literal_eval(statement.value)
                except ValueError:
                    return False
                value = function.__globals__[name]
                return type(said) is type(value) and repr(said) == repr(value)
    return False


def is_bound_once(function: types.FunctionType, name: str) -> bool:
    """Whether a global of a function's module is bound by one definition or import, at its top level."""
    text = text_of(function)
    stores = text.stored.get(name, [])
    kinds = (ast.FunctionDef, ast.ClassDef, ast.Import, ast.ImportFrom)
    return name not in text.rebound and len(stores) == 1 and isinstance(stores[0], kinds)
