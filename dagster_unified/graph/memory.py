"""What an author's function keeps elsewhere than in state, and so loses: read from its source text, where it is there.

A function object lives for a task or a micro-batch. What its methods set while records come is gone with it. Knows text
and code only; runs nothing.
"""

from __future__ import annotations

import ast
import functools
import inspect
import sys
import types
import weakref
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

from dagster_unified.graph.code import authors
from dagster_unified.graph.fingerprint import is_installed, nested_code
from dagster_unified.graph.source import CHANGING, own_names, root_of

_CONTAINERS = (list, dict, set, bytearray, deque)
_MADE_EMPTY = frozenset(kind.__name__ for kind in (*_CONTAINERS, Counter, OrderedDict, defaultdict))

_NOT_FOR_RECORDS = frozenset(
    [
        "__init__", "__new__", "__post_init__", "__getstate__", "__setstate__", "__reduce__", "open", "close",
        "initialize_state", "snapshot_state", "notify_checkpoint_complete",
    ]
)  # fmt: skip
"""Methods that are called before and after all records of a task."""

_BEFORE_RECORDS = ("__init__", "__post_init__", "open", "initialize_state")


@dataclass
class _Functions:
    """The functions of a module's text, by the line and the name that their code has."""

    file: str
    nodes: dict[tuple[int, str], list[_Node]] = field(default_factory=dict)


_Node = ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda
_read: weakref.WeakKeyDictionary[types.ModuleType, _Functions] = weakref.WeakKeyDictionary()


def kept_by(value: Any) -> list[str]:
    """Return what a function changes as records come and that is not state: `self.n`, or a name outside of it.

    What cannot be told from the text, such as a change of what a local name stands for, is left out.
    """
    found: dict[str, None] = {}
    for part in authors(value):
        found |= dict.fromkeys(_kept_by(part))
    return sorted(found)


def _kept_by(value: Any) -> Iterator[str]:
    while isinstance(value, functools.partial):
        value = value.func
    if isinstance(value, types.FunctionType):
        yield from _outside([value])
    elif isinstance(value, types.MethodType):
        yield from _by_object(value.__self__, {value.__func__.__name__})
    elif not is_installed(type(value).__module__) and not isinstance(value, type):
        yield from _by_object(value, None)


def kept_by_objects_of(cls: type) -> list[str]:
    """Return what the objects of an author's class keep from one record to the next."""
    return sorted(dict.fromkeys(_by_methods(cls, {}, None)))


def _by_object(value: Any, entries: set[str] | None) -> Iterator[str]:
    cls = value if isinstance(value, type) else type(value)
    yield from _by_methods(cls, getattr(value, "__dict__", {}), entries)


def _by_methods(cls: type, attributes: Any, entries: set[str] | None) -> Iterator[str]:
    methods = {
        name: member
        for base in reversed(cls.__mro__)
        if not is_installed(base.__module__)
        for name, member in vars(base).items()
        if isinstance(member, types.FunctionType)
    }
    called = _called(cls, methods, entries)
    before = [methods[name] for name in _BEFORE_RECORDS if name in methods]
    handles, containers = _made_before(before)
    containers |= {name for name, held in attributes.items() if isinstance(held, _CONTAINERS)}
    containers |= {n for base in cls.__mro__ for n, held in vars(base).items() if isinstance(held, _CONTAINERS)}
    snapshot = methods.get("snapshot_state")
    lasting = handles | (set() if snapshot is None else _names(snapshot))
    for method in called:
        for change in _changes(method):
            if change.root == _self(method) and change.attribute and change.attribute not in lasting:
                if change.is_call and change.attribute not in containers:
                    continue
                yield f"self.{change.attribute}"
    yield from _outside(called)


def _called(cls: type, methods: dict[str, types.FunctionType], entries: set[str] | None) -> list[types.FunctionType]:
    """The methods that run as records come: those that the library calls, and those that they call."""
    if entries is None:
        known = {name for base in cls.__mro__ if is_installed(base.__module__) for name in vars(base)} - set(
            dir(object)
        )
        entries = {name for name in methods if name in known or name == "__call__"} or set(methods)
    pending = [name for name in entries if name not in _NOT_FOR_RECORDS]
    found: dict[str, types.FunctionType] = {}
    while pending:
        name = pending.pop()
        if name not in found and name in methods:
            found[name] = methods[name]
            pending += sorted(_names(methods[name]) & set(methods))
    return list(found.values())


def _outside(functions: Iterable[types.FunctionType]) -> Iterator[str]:
    """What functions, and the author's helpers that they call, change of what they close over and of globals."""
    pending, seen = list(functions), set()
    while pending:
        function = pending.pop()
        if function in seen:
            continue
        seen.add(function)
        reached = _reached(function)
        for change in _changes(function):
            held = reached.get(change.root)
            if change.root not in reached or isinstance(held, types.ModuleType):
                continue
            changed = getattr(held, change.attribute, None) if change.attribute else held
            if not change.is_call or isinstance(changed, _CONTAINERS):
                yield f"{change.root}.{change.attribute}" if change.attribute else change.root
        pending += [
            held
            for held in reached.values()
            if isinstance(held, types.FunctionType) and not is_installed(held.__module__ or "")
        ]


def _reached(function: types.FunctionType) -> dict[str, Any]:
    """The globals that a function uses, and what it closes over, by their names."""
    found = {name: function.__globals__[name] for name in _names(function) & set(function.__globals__)}
    for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
        try:
            found[name] = cell.cell_contents
        except ValueError:  # a cell that is not filled yet
            found[name] = None
    return found


@dataclass(frozen=True)
class _Change:
    root: str
    attribute: str
    is_call: bool
    """Whether it is a call of a method, which changes a container; of other objects nobody knows what it does."""


def _changes(function: types.FunctionType) -> list[_Change]:
    """What a function sets or changes that is not its own."""
    nodes = _nodes(function)
    if nodes is None:
        code = function.__code__
        return [_Change(_self(function), name, False) for name in _stored(code)] if code.co_argcount else []
    found = []
    for node in nodes:
        shared = {n for one in ast.walk(node) if isinstance(one, ast.Global | ast.Nonlocal) for n in one.names}
        first = _self(function)
        aliases = _aliases(node, first)
        local = own_names(node) - shared - {first} - set(aliases)
        for change in _in_text(node, shared):
            if change.root in aliases:
                found.append(_Change(first, aliases[change.root], change.is_call))
            elif change.root not in local:
                found.append(change)
    return found


def _aliases(function: _Node, first: str) -> dict[str, str]:
    """The names that stand for an attribute of the object throughout a function: `cache = self.cache`."""
    nodes = list(ast.walk(function))
    arguments = {one.arg for one in nodes if isinstance(one, ast.arg)}
    stored = Counter(one.id for one in nodes if isinstance(one, ast.Name) and not isinstance(one.ctx, ast.Load))
    found = {}
    for node in nodes:
        if not (isinstance(node, ast.Assign) and isinstance(node.value, ast.Attribute)):
            continue
        held = node.value
        if not (isinstance(held.value, ast.Name) and held.value.id == first):
            continue
        for target in node.targets:
            if isinstance(target, ast.Name) and stored[target.id] == 1 and target.id not in arguments:
                found[target.id] = held.attr
    return found


def _in_text(tree: ast.AST, shared: set[str]) -> Iterator[_Change]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store | ast.Del) and node.id in shared:
            yield _Change(node.id, "", False)
        elif isinstance(node, ast.Subscript | ast.Attribute) and isinstance(node.ctx, ast.Store | ast.Del):
            place = node if isinstance(node, ast.Attribute) else node.value
            yield from (_Change(root, attribute, False) for root, attribute in root_of(place))
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in CHANGING:
            yield from (_Change(root, attribute, True) for root, attribute in root_of(node.func.value))


def _stored(code: types.CodeType) -> set[str]:
    """The attributes that code sets, where there is no text."""
    import dis

    return {op.argval for one in nested_code(code) for op in dis.get_instructions(one) if op.opname == "STORE_ATTR"}


def _made_before(methods: Iterable[types.FunctionType]) -> tuple[set[str], set[str]]:
    """The attributes that methods make of a context they are given, such as state, and those that are containers."""
    handles: set[str] = set()
    containers: set[str] = set()
    for method in methods:
        given = (
            set(method.__code__.co_varnames[1 : method.__code__.co_argcount]) if method.__name__ != "__init__" else ()
        )
        tainted = set(given)
        for node in (one for own in _nodes(method) or () for one in ast.walk(own)):
            if not isinstance(node, ast.Assign | ast.AnnAssign) or node.value is None:
                continue
            from_context = any(isinstance(one, ast.Name) and one.id in tainted for one in ast.walk(node.value))
            for target in node.targets if isinstance(node, ast.Assign) else [node.target]:
                if isinstance(target, ast.Name) and from_context:
                    tainted.add(target.id)
                for one in ast.walk(target):
                    if isinstance(one, ast.Attribute) and isinstance(one.ctx, ast.Store):
                        if from_context and not _is_read(node.value):
                            handles.add(one.attr)
                        elif _is_container(node.value):
                            containers.add(one.attr)
    return handles, containers


def _is_read(value: ast.expr) -> bool:
    """Whether an expression reads what a state holds, as in `list(self.state.get())`."""
    return isinstance(value, ast.Call) and isinstance(value.func, ast.Name) and value.func.id in _MADE_EMPTY


def _is_container(value: ast.expr) -> bool:
    if isinstance(value, ast.List | ast.Dict | ast.Set | ast.ListComp | ast.DictComp | ast.SetComp):
        return True
    called = value.func if isinstance(value, ast.Call) else None
    name = called.id if isinstance(called, ast.Name) else called.attr if isinstance(called, ast.Attribute) else ""
    return name in _MADE_EMPTY


def _nodes(function: types.FunctionType) -> list[_Node] | None:
    """A function in the text of its module; several where one line has several lambdas; None where there is no text."""
    module = sys.modules.get(function.__module__ or "")
    if module is None:
        return None
    text = _read.get(module)
    if text is None:
        text = _read[module] = _functions_of(module)
    code = function.__code__
    if code.co_filename != text.file:
        return None
    return text.nodes.get((code.co_firstlineno, code.co_name))


def _functions_of(module: types.ModuleType) -> _Functions:
    found = _Functions(getattr(module, "__file__", None) or "")
    try:
        tree = ast.parse(inspect.getsource(module))
    except (OSError, TypeError, SyntaxError, ValueError):
        return found
    for node in ast.walk(tree):
        if isinstance(node, ast.Lambda):
            found.nodes.setdefault((node.lineno, "<lambda>"), []).append(node)
        elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            line = min([node.lineno, *(decorator.lineno for decorator in node.decorator_list)])
            found.nodes.setdefault((line, node.name), []).append(node)
    return found


def _names(function: types.FunctionType) -> set[str]:
    return {name for code in nested_code(function.__code__) for name in code.co_names}


def _self(function: types.FunctionType) -> str:
    code = function.__code__
    return code.co_varnames[0] if code.co_argcount else ""
