"""The text that a function was compiled from, or why it is not known.

A function's text counts only if its file compiles, now, to the very code object that the function runs. An edited file,
two lambdas on a line, a decorator and `exec` are decided by that.
"""

from __future__ import annotations

import ast
import inspect
import linecache
import types
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache

_SETTING = frozenset(["globals", "exec", "eval", "__globals__", "f_globals"])
"""Functions and attributes by which names may be set without saying so."""

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
        """The names that a function, or an expression that may run later, sets in another scope than its own."""
        found = set[str]()
        for node in ast.walk(self.tree):
            if isinstance(node, (ast.Global, ast.Nonlocal)):
                found.update(node.names)
            if isinstance(node, ast.NamedExpr):
                found.add(node.target.id)
        return frozenset(found)

    @cached_property
    def may_set_any(self) -> bool:
        """Whether it uses something by which any name may be set."""
        return any(
            (isinstance(node, ast.Name) and node.id in _SETTING)
            or (isinstance(node, ast.Attribute) and node.attr in _SETTING)
            for node in ast.walk(self.tree)
        )

    @cached_property
    def generators(self) -> Sequence[tuple[int, int]]:
        """The lines of functions that yield, or wait: they go on later, and may set what functions in them hold."""
        found = []
        for node in ast.walk(self.tree):
            if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda)):
                inner = ast.walk(node)
                if any(isinstance(each, (ast.Yield, ast.YieldFrom, ast.Await)) for each in inner):
                    found.append((node.lineno, node.end_lineno or node.lineno))
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
            if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda)):
                pending += [*node.args.defaults, *(each for each in node.args.kw_defaults if each is not None)]
                pending += getattr(node, "decorator_list", [])
            else:
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
    return cached_text(function.__code__.co_filename, "".join(lines))


def text_of_module(module: types.ModuleType | None) -> Text | None:
    """Return the text of a module's file, if it has one."""
    file = getattr(module, "__file__", None)
    return None if file is None else cached_text(file, "".join(linecache.getlines(file)))


cached_text = lru_cache(maxsize=256)(Text)  # one for each text of a file, with what is found out about it


def definition_of(function: object, may_yield: bool = False) -> Definition:
    """Return the definition that compiles to a function's code; raises `UnreadableError` where there is none."""
    if not isinstance(function, types.FunctionType):
        raise UnreadableError(f"a {type(function).__name__} is no plain function")
    code = function.__code__
    refused = inspect.CO_COROUTINE | inspect.CO_ASYNC_GENERATOR | (0 if may_yield else inspect.CO_GENERATOR)
    if code.co_flags & refused:
        raise UnreadableError("it is a generator or a coroutine")
    if hasattr(function, "__wrapped__"):
        raise UnreadableError("it is decorated")
    if vars(function):
        raise UnreadableError(f"it has attributes, such as {next(iter(vars(function)))}")
    text = text_of(function)
    try:
        is_same = code in text.codes
    except (SyntaxError, ValueError):
        raise UnreadableError("its source is not Python") from None
    if not is_same:
        raise UnreadableError("its source is not what runs: it was changed, decorated or generated")
    fitting = [node for node in text.definitions.get(code.co_firstlineno, ()) if _may_be(node, code)]
    if len(fitting) != 1:
        raise UnreadableError("its source is not found" if not fitting else "its source may be one of several")
    return fitting[0]


_LOOKED_UP = ("__getattribute__", "__reduce__", "__reduce_ex__")
"""Methods by which an object could have other methods than its class."""


def method_of(function: object, name: str) -> types.FunctionType:
    """Return the method of its class that an object calls by a name; raises `UnreadableError` if that may differ."""
    python = type(function)
    found = inspect.getattr_static(python, name, None)
    is_plain = all(getattr(python, looked_up) is getattr(object, looked_up) for looked_up in _LOOKED_UP)
    if not is_plain or not isinstance(found, types.FunctionType) or name in getattr(function, "__dict__", {}):
        raise UnreadableError(f"it is not known what its {name} is")
    return found


def _may_be(node: Definition, code: types.CodeType) -> bool:
    """Whether a definition has the arguments of a code object, and spans all places that it names."""
    arguments = [argument.arg for argument in (*node.args.posonlyargs, *node.args.args)]
    if arguments != list(code.co_varnames[: code.co_argcount]):
        return False
    first, last = (node.lineno, node.col_offset), (node.end_lineno or 0, node.end_col_offset or 0)
    places = [(line, column) for line, _, column, _ in code.co_positions() if line]
    known = [(line, column) for line, column in places if column is not None]  # how a generator begins has none
    if not known:  # PYTHONNODEBUGRANGES is set
        raise UnreadableError("the interpreter keeps no columns of its code")
    return all(first <= place <= last for place in known if place != (code.co_firstlineno, 0))


def may_change_outside(function: types.FunctionType, name: str) -> bool:
    """Whether what a function finds under this name in the one that it is in may be set again, later."""
    text, line = text_of(function), function.__code__.co_firstlineno
    return name in text.rebound or any(first < line <= last for first, last in text.generators)
