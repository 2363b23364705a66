"""What the source text of a module says of its globals and attributes.

That is how they are created, and whether the code changes them. A value that the code itself changes, such as a cache,
says nothing of what the code does: it differs with what a process has done so far. The text that creates it does. Knows
text only; runs nothing.
"""

from __future__ import annotations

import ast
import hashlib
import importlib.machinery
import inspect
import types
import weakref
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

SELF = ""
"""Stands for a global itself, where others are its attributes."""

CHANGING = frozenset(
    [
        "add",
        "append",
        "appendleft",
        "clear",
        "discard",
        "extend",
        "extendleft",
        "insert",
        "intersection_update",
        "difference_update",
        "move_to_end",
        "pop",
        "popitem",
        "popleft",
        "put",
        "put_nowait",
        "remove",
        "reverse",
        "rotate",
        "setdefault",
        "sort",
        "subtract",
        "symmetric_difference_update",
        "update",
    ]
)

_FunctionDef = (ast.FunctionDef, ast.AsyncFunctionDef)


@dataclass
class ClassText:
    """How a class's methods change the attributes of its objects."""

    changed: dict[str, set[str]] = field(default_factory=dict)
    """By method, the attributes that it sets or changes."""

    from_arguments: dict[str, set[str]] = field(default_factory=dict)
    """By method, those of them that it only sets to an argument of its own, as a setter does."""


@dataclass
class ModuleText:
    """The facts that a module's text states."""

    statements: dict[str, list[str]] = field(default_factory=dict)
    """By global, the statements outside of functions that make or change it."""

    changed: dict[str, set[str]] = field(default_factory=dict)
    """By global, what functions change: `SELF`, or attributes of it."""

    imported: dict[str, tuple[str, str]] = field(default_factory=dict)
    """By global, the module and the name there that it was imported from."""

    dotted: list[str] = field(default_factory=list)
    """Submodules that are imported by their full names."""

    classes: dict[str, ClassText] = field(default_factory=dict)
    """By qualified name."""

    enclosed: dict[str, dict[str, set[str]]] = field(default_factory=dict)
    """By function that holds others, what these change of what it holds, as `changed` says it of globals."""


_read: weakref.WeakKeyDictionary[types.ModuleType, ModuleText] = weakref.WeakKeyDictionary()


def text_of(module: types.ModuleType) -> ModuleText:
    """Return the facts of a module's text, read once: the file may change while the module stays what it was.

    Empty where there is no text.
    """
    text = _read.get(module)
    if text is None:
        try:
            tree = ast.parse(inspect.getsource(module))
        except (OSError, TypeError, SyntaxError, ValueError):
            tree = ast.Module([], [])
        text = _read[module] = _analysed(tree, module.__package__ if hasattr(module, "__package__") else None)
    return text


def file_digest(name: str) -> tuple[str, str | None] | None:
    """Return the file of a module that may not be imported yet, and a digest of its code.

    The digest leaves out layout and remarks. None where there is no such module.
    """
    path: list[str] | None = None
    spec = None
    parts = name.split(".")
    for depth in range(len(parts)):
        spec = importlib.machinery.PathFinder.find_spec(".".join(parts[: depth + 1]), path)
        if spec is None:
            return None
        path = list(spec.submodule_search_locations or [])
    if spec is None or spec.origin is None or not spec.origin.endswith(".py"):
        return None
    try:
        text = ast.dump(ast.parse(Path(spec.origin).read_text()))
    except (OSError, SyntaxError, ValueError):
        return None
    return spec.origin, hashlib.sha256(text.encode()).hexdigest()[:16]


def absolute(name: str, level: int, package: str | None) -> str:
    """Return the full name of a module that an import statement names."""
    if not level:
        return name
    base = (package or "").rsplit(".", level - 1)[0] if level > 1 else package or ""
    return f"{base}.{name}" if name and base else name or base


def _analysed(tree: ast.Module, package: str | None) -> ModuleText:
    text = ModuleText()
    for statement in _at_import(tree.body):
        if isinstance(statement, ast.Import):
            text.dotted += [a.name for a in statement.names if "." in a.name and a.asname is None]
        elif isinstance(statement, ast.ImportFrom):
            module = absolute(statement.module or "", statement.level, package)
            text.imported.update({a.asname or a.name: (module, a.name) for a in statement.names})
        elif not isinstance(statement, (ast.ClassDef, *_FunctionDef)):
            for name in sorted({root for root, _ in _changes(statement)}):
                text.statements.setdefault(name, []).append(ast.dump(statement))
    for node in ast.walk(tree):
        if isinstance(node, _FunctionDef):
            local = own_names(node)
            for root, attribute in _changes(node):
                if root not in local:
                    text.changed.setdefault(root, set()).add(attribute)
    _classes(tree.body, "", text)
    return text


def _at_import(body: list[ast.stmt]) -> Iterator[ast.stmt]:
    """Return the statements that run when the module is imported; a loop is one statement."""
    for statement in body:
        if isinstance(statement, (ast.If, ast.Try, ast.With)):
            yield from _at_import(statement.body)
            yield from _at_import(getattr(statement, "orelse", []))
            yield from _at_import(getattr(statement, "finalbody", []))
            for handler in getattr(statement, "handlers", []):
                yield from _at_import(handler.body)
            if isinstance(statement, ast.With):
                yield from (
                    ast.Expr(item.context_expr)
                    if item.optional_vars is None
                    else ast.Assign([item.optional_vars], item.context_expr)
                    for item in statement.items
                )
        else:
            yield statement


def own_names(function: ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda) -> set[str]:
    """Return the names that are a function's own."""
    arguments = function.args
    local = {
        a.arg
        for a in [*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs, arguments.vararg, arguments.kwarg]
        if a is not None
    }
    shared: set[str] = set()
    for node in ast.walk(function):
        if isinstance(node, ast.Name) and isinstance(node.ctx, (ast.Store, ast.Del)):
            local.add(node.id)
        elif isinstance(node, ast.Global):
            shared |= set(node.names)
        elif isinstance(node, (ast.Import, ast.ImportFrom)):
            local |= {a.asname or a.name.partition(".")[0] for a in node.names}
    return local - shared


def _changes(tree: ast.AST) -> Iterator[tuple[str, str]]:
    """Yield what statements set or change: the name at its root, and the attribute of it, or `SELF`."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Name) and isinstance(node.ctx, (ast.Store, ast.Del)):
            yield node.id, SELF
        elif isinstance(node, (ast.Subscript, ast.Attribute)) and isinstance(node.ctx, (ast.Store, ast.Del)):
            yield from root_of(node if isinstance(node, ast.Attribute) else node.value)
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in CHANGING:
            yield from root_of(node.func.value)
        elif isinstance(node, (ast.Import, ast.ImportFrom)):
            yield from ((a.asname or a.name.partition(".")[0], SELF) for a in node.names)


def root_of(node: ast.expr) -> Iterator[tuple[str, str]]:
    """The name at the root of an expression, and the attribute of it that it goes by, or `SELF`; nothing for others."""
    attribute = SELF
    while isinstance(node, (ast.Attribute, ast.Subscript)):
        attribute = node.attr if isinstance(node, ast.Attribute) else SELF
        node = node.value
    if isinstance(node, ast.Name):
        yield node.id, attribute


def _classes(body: list[ast.stmt], prefix: str, text: ModuleText) -> None:
    for statement in body:
        if isinstance(statement, ast.ClassDef):
            class_text = text.classes[f"{prefix}{statement.name}"] = ClassText()
            for method in statement.body:
                if isinstance(method, _FunctionDef):
                    changed, from_arguments = _attributes(method, statement.name)
                    class_text.changed[method.name], class_text.from_arguments[method.name] = changed, from_arguments
            _classes(statement.body, f"{prefix}{statement.name}.", text)
        elif isinstance(statement, _FunctionDef):
            text.enclosed[f"{prefix}{statement.name}"] = _by_nested(statement)
            _classes(statement.body, f"{prefix}{statement.name}.<locals>.", text)
        elif isinstance(statement, (ast.If, ast.Try, ast.With)):
            _classes([s for s in ast.iter_child_nodes(statement) if isinstance(s, ast.stmt)], prefix, text)


def _by_nested(function: ast.FunctionDef | ast.AsyncFunctionDef) -> dict[str, set[str]]:
    by_root: dict[str, set[str]] = {}
    for node in ast.walk(function):
        if node is not function and isinstance(node, (*_FunctionDef, ast.Lambda)):
            shared = {name for n in ast.walk(node) if isinstance(n, ast.Nonlocal) for name in n.names}
            local = own_names(node) - shared
            for root, attribute in _changes(node):
                if root not in local:
                    by_root.setdefault(root, set()).add(attribute)
    return by_root


def _attributes(method: ast.FunctionDef | ast.AsyncFunctionDef, owner: str) -> tuple[set[str], set[str]]:
    """Return the attributes of its object or class that a method changes.

    Also returns those of them that it only sets to its arguments.
    """
    names = [a.arg for a in (*method.args.posonlyargs, *method.args.args)]
    roots = {*names[:1], owner}
    changed = {attribute for root, attribute in _changes(method) if root in roots and attribute != SELF}
    from_arguments: set[str] = set()
    taken: set[str] = set()
    for node in ast.walk(method):
        if isinstance(node, (ast.Assign, ast.AnnAssign)):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            for target in targets:
                if (
                    isinstance(target, ast.Attribute)
                    and isinstance(target.value, ast.Name)
                    and target.value.id in roots
                ):
                    is_argument = isinstance(node.value, ast.Name) and node.value.id in names[1:]
                    (from_arguments if is_argument else taken).add(target.attr)
        elif isinstance(node, ast.AugAssign) and isinstance(node.target, ast.Attribute):
            taken.add(node.target.attr)
    return changed, from_arguments - taken
