"""What the code of a user's function shows, without running it: names, fields, the state it declares, what it keeps."""

from __future__ import annotations

import ast
import dis
import functools
import inspect
import sys
import textwrap
import types
import weakref
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable, Iterable, Iterator, Set
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

from dagster_unified.graph.fingerprint import is_installed, nested_code
from dagster_unified.graph.source import CHANGING, own_names, root_of
from dagster_unified.operators.state.descriptors import StateDescriptor


def names_used(value: Any) -> set[str]:
    """Return the attribute and global names that a function, or the methods of an object's class, refer to.

    That includes what they refer to through the author's helpers.
    """
    return {name for function in _reached(value) for name in _names(function)}


def reads_watermark(value: Any) -> bool:
    """Return whether a function, or a method of an object's class, asks for the watermark."""
    return not names_used(value).isdisjoint(("current_watermark", "get_current_watermark"))


def _names(function: types.FunctionType) -> frozenset[str]:
    return _names_in(function.__code__)


@lru_cache(maxsize=4096)
def _names_in(code: types.CodeType) -> frozenset[str]:
    return frozenset(name for part in nested_code(code) for name in part.co_names)


def authors(value: Any) -> Iterator[Any]:
    """Yield the functions of the author's in one of the library's; one of the author's own is itself."""
    wrapped = getattr(value, "wrapped_functions", ())
    for part in wrapped:
        yield from authors(part)
    if not wrapped:
        yield value


def refers_to(value: Any, wanted: Callable[[Any], bool]) -> bool:
    """Return whether a function, or the methods of an object's class, refer to such a value."""
    return any(map(wanted, values_used(value)))


def values_used(value: Any) -> list[Any]:
    """Return the values that a function, or the methods of an object's class, refer to.

    They do so by a global, in a closure, or as an attribute of the object.
    """
    values = [
        attribute for part in (value, *authors(value)) if hasattr(part, "__dict__") for attribute in vars(part).values()
    ]
    for function in _functions(value):
        names = _names(function)
        values += [function.__globals__[n] for n in sorted(names & set(function.__globals__))]
        values += _closed_over(function)
    return values


def classes_used(value: Any) -> list[type]:
    """Return a class itself, or the classes that a function refers to."""
    if isinstance(value, type):
        return [value]
    values: list[Any] = []
    for function in _functions(value):
        values += [function.__globals__[n] for n in sorted(_names(function) & set(function.__globals__))]
        values += _closed_over(function)
    return [value for value in values if isinstance(value, type)]


_CLOCKS = {"time", "time_ns", "monotonic", "monotonic_ns", "perf_counter", "now", "utcnow", "today"}
_CLOCK_MODULES = ("time", "datetime", "pendulum")
_CHANCE_MODULES = ("random", "secrets", "uuid", "numpy.random")


def reads_from_outside(value: Any) -> str | None:
    """Return what a function reads that no record holds, the clock or chance; None where it reads neither.

    The names tell it that the function, and the author's helpers that it calls, use of the modules that give them.
    """
    for function in _reached(value):
        names = _names(function)
        for module, used in [*_used_globals(function, names), *((imported, names) for imported in _imported(function))]:
            if module in _CLOCK_MODULES and used & _CLOCKS:
                return "the clock"
            if module in _CHANCE_MODULES:
                return "chance"
    return None


def _used_globals(function: types.FunctionType, names: Set[str]) -> Iterator[tuple[str, Set[str]]]:
    """Return the module that each used global is, or is from, and the names that may be used of it."""
    for name in sorted(names & set(function.__globals__)):
        used = function.__globals__[name]
        if isinstance(used, types.ModuleType):
            yield used.__name__, names
        else:
            module = getattr(used, "__module__", None) or type(getattr(used, "__self__", None)).__module__
            yield module, names if isinstance(used, type) or not callable(used) else {getattr(used, "__name__", "")}


def _imported(function: types.FunctionType) -> list[str]:
    """Yield the modules that a function imports while it runs."""
    return [
        op.argval
        for code in nested_code(function.__code__)
        for op in dis.get_instructions(code)
        if op.opname == "IMPORT_NAME"
    ]


def _reached(value: Any) -> Iterator[types.FunctionType]:
    """Yield the functions of `_functions`, and the author's helpers that they refer to, each once."""
    pending, seen = list(_functions(value)), set()
    while pending:
        function = pending.pop()
        if id(function) in seen:
            continue
        seen.add(id(function))
        yield function
        globals_used = (function.__globals__[name] for name in _names(function) & set(function.__globals__))
        values = [*globals_used, *_closed_over(function)]
        pending += [f for f in values if isinstance(f, types.FunctionType) and not is_installed(f.__module__ or "")]


def field_of(function: Any) -> tuple[str | int, ...] | None:
    """The fields that `lambda r: r.a`, `lambda r: r[0]` or `lambda r: (r.a, r.b)` reads, or None where it does more.

    Such a function needs no Python call per record: the fields are there as columns.
    """
    if not isinstance(function, types.FunctionType) or function.__code__.co_argcount != 1 or function.__closure__:
        return None
    fields: list[str | int] = []
    constant: Any = None
    tupled = loads = 0
    for op in dis.get_instructions(function):
        if op.opname == "LOAD_ATTR":
            fields.append(op.argval)
        elif op.opname in ("LOAD_CONST", "LOAD_SMALL_INT"):
            constant = op.argval
        elif op.opname in ("BINARY_SUBSCR", "BINARY_OP") and isinstance(constant, int) and "[" in (op.argrepr or "["):
            fields.append(constant)
        elif op.opname == "BUILD_TUPLE":
            tupled = op.argval
        elif op.opname.startswith("LOAD_FAST"):
            loads += 1
        elif op.opname not in ("RESUME", "RETURN_VALUE", "CACHE"):
            return None
    if loads != len(fields):
        return None  # a field of a field is not a column
    return tuple(fields) if fields and ((len(fields) == 1 and not tupled) or tupled == len(fields) > 1) else None


def _functions(value: Any) -> Iterator[types.FunctionType]:
    """Return a function itself, or the methods of an object's class.

    Of the library's own objects, those of the functions that they were given.
    """
    for part in getattr(value, "wrapped_functions", ()):
        yield from _functions(part)
    if isinstance(value, types.MethodType):
        value = value.__func__
    if isinstance(value, types.FunctionType):
        yield value
        return
    for cls in type(value).__mro__:
        if not is_installed(cls.__module__):
            yield from (member for member in vars(cls).values() if isinstance(member, types.FunctionType))


def _closed_over(function: types.FunctionType) -> Iterator[Any]:
    for cell in function.__closure__ or ():
        try:
            yield cell.cell_contents
        except ValueError:  # a cell that is not filled yet
            continue


def declared_states(function: Any) -> list[dict[str, str]]:
    """Return the name and kind of each state, in the order of the code."""
    kinds: dict[str, str] = {}
    for _, tree, names in _classes(function):
        for name, kind in _made_in(tree, names):
            kinds.setdefault(name, kind)
    for value in values_used(function):
        if isinstance(value, StateDescriptor):
            kinds.setdefault(value.name, value.kind)
    return [{"name": name, "kind": kind} for name, kind in kinds.items()]


_LISTS = {"get_list_state": "operator list", "get_union_list_state": "union list"}
"""The methods that give a function operator state, and its kind."""


def declared_lists(function: Any) -> list[dict[str, str]]:
    """Return the name and kind of each operator state, in the order of the code."""
    kinds: dict[str, str] = {}
    for part, tree, names in _classes(function):
        for name, kind in _lists_in(tree, {**names, "self": part}):
            kinds.setdefault(name, kind)
    return [{"name": name, "kind": kind} for name, kind in kinds.items()]


def _lists_in(tree: ast.AST, names: dict[str, Any]) -> Iterator[tuple[str, str]]:
    for call in ast.walk(tree):
        if not (isinstance(call, ast.Call) and isinstance(call.func, ast.Attribute) and call.args):
            continue
        kind, argument = _LISTS.get(call.func.attr), call.args[0]
        if kind is None:
            continue
        if isinstance(argument, ast.Call) and argument.args and isinstance(argument.args[0], ast.Constant):
            yield str(argument.args[0].value), kind
        descriptor = _value(argument, names)
        if isinstance(descriptor, StateDescriptor):
            yield descriptor.name, kind


def _classes(function: Any) -> Iterator[tuple[Any, ast.AST, dict[str, Any]]]:
    """Yield the author's parts of a function, with the code of each class and what names stand for in it."""
    for part in authors(function):
        for cls in reversed(type(part).__mro__):
            if is_installed(cls.__module__):
                continue
            try:
                tree = ast.parse(textwrap.dedent(inspect.getsource(cls)))
            except (OSError, TypeError, SyntaxError):
                continue
            yield part, tree, _bound_names(cls, tree)


def _made_in(tree: ast.AST, names: dict[str, Any]) -> Iterator[tuple[str, str]]:
    for call in ast.walk(tree):
        if isinstance(call, ast.Call) and call.args and isinstance(call.args[0], ast.Constant):
            descriptor = _value(call.func, names)
            if isinstance(descriptor, type) and issubclass(descriptor, StateDescriptor):
                yield str(call.args[0].value), descriptor.kind


def _bound_names(cls: type, tree: ast.AST) -> dict[str, Any]:
    """Return the values of the names in a class's methods: globals, closures and imports."""
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
    """The functions of a module's text, by the line and the name of their code."""

    file: str
    nodes: dict[tuple[int, str], list[_Node]] = field(default_factory=dict)


_Node = ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda
_read: weakref.WeakKeyDictionary[types.ModuleType, _Functions] = weakref.WeakKeyDictionary()


def changed_by(value: Any) -> list[str]:
    """Return what a function changes as records come and that is not state: `self.n`, or a name outside of it.

    What cannot be told from the text, such as a change of what a local name stands for, is left out.
    """
    names: dict[str, None] = {}
    for part in authors(value):
        names |= dict.fromkeys(_changed_by(part))
    return sorted(names)


def _changed_by(value: Any) -> Iterator[str]:
    while isinstance(value, functools.partial):
        value = value.func
    if isinstance(value, types.FunctionType):
        yield from _outside([value])
    elif isinstance(value, types.MethodType):
        yield from _by_object(value.__self__, {value.__func__.__name__})
    elif not is_installed(type(value).__module__) and not isinstance(value, type):
        yield from _by_object(value, None)


def changed_by_objects_of(cls: type) -> list[str]:
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
    containers |= {name for name, value in attributes.items() if isinstance(value, _CONTAINERS)}
    containers |= {n for base in cls.__mro__ for n, value in vars(base).items() if isinstance(value, _CONTAINERS)}
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
    """Return the methods that run as records come: those that the library calls, and those that they call."""
    if entries is None:
        known = {name for base in cls.__mro__ if is_installed(base.__module__) for name in vars(base)} - set(
            dir(object)
        )
        entries = {name for name in methods if name in known or name == "__call__"} or set(methods)
    pending = [name for name in entries if name not in _NOT_FOR_RECORDS]
    called: dict[str, types.FunctionType] = {}
    while pending:
        name = pending.pop()
        if name not in called and name in methods:
            called[name] = methods[name]
            pending += sorted(_names(methods[name]) & set(methods))
    return list(called.values())


def _outside(functions: Iterable[types.FunctionType]) -> Iterator[str]:
    """Yield what functions, and the author's helpers that they call, change in closures and globals."""
    pending, seen = list(functions), set()
    while pending:
        function = pending.pop()
        if function in seen:
            continue
        seen.add(function)
        reached = _named_values(function)
        for change in _changes(function):
            value = reached.get(change.root)
            if change.root not in reached or isinstance(value, types.ModuleType):
                continue
            changed = getattr(value, change.attribute, None) if change.attribute else value
            if not change.is_call or isinstance(changed, _CONTAINERS):
                yield f"{change.root}.{change.attribute}" if change.attribute else change.root
        pending += [
            value
            for value in reached.values()
            if isinstance(value, types.FunctionType) and not is_installed(value.__module__ or "")
        ]


def _named_values(function: types.FunctionType) -> dict[str, Any]:
    values = {name: function.__globals__[name] for name in _names(function) & set(function.__globals__)}
    for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
        try:
            values[name] = cell.cell_contents
        except ValueError:  # a cell that is not filled yet
            values[name] = None
    return values


@dataclass(frozen=True)
class _Change:
    root: str
    attribute: str
    is_call: bool
    """Whether it is a call of a method, which changes a container; of other objects nobody knows what it does."""


def _changes(function: types.FunctionType) -> list[_Change]:
    """Return what a function sets or changes that is not its own."""
    nodes = _nodes(function)
    if nodes is None:
        code = function.__code__
        return [_Change(_self(function), name, False) for name in _stored(code)] if code.co_argcount else []
    changes = []
    for node in nodes:
        shared = {n for part in ast.walk(node) if isinstance(part, ast.Global | ast.Nonlocal) for n in part.names}
        first = _self(function)
        aliases = _aliases(node, first)
        local = own_names(node) - shared - {first} - set(aliases)
        for change in _in_text(node, shared):
            if change.root in aliases:
                changes.append(_Change(first, aliases[change.root], change.is_call))
            elif change.root not in local:
                changes.append(change)
    return changes


def _aliases(function: _Node, first: str) -> dict[str, str]:
    """Return the names that stand for an attribute of the object throughout a function: `cache = self.cache`."""
    nodes = list(ast.walk(function))
    arguments = {inner.arg for inner in nodes if isinstance(inner, ast.arg)}
    stored = Counter(inner.id for inner in nodes if isinstance(inner, ast.Name) and not isinstance(inner.ctx, ast.Load))
    aliases = {}
    for node in nodes:
        if not (isinstance(node, ast.Assign) and isinstance(node.value, ast.Attribute)):
            continue
        value = node.value
        if not (isinstance(value.value, ast.Name) and value.value.id == first):
            continue
        for target in node.targets:
            if isinstance(target, ast.Name) and stored[target.id] == 1 and target.id not in arguments:
                aliases[target.id] = value.attr
    return aliases


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
    """Return the attributes that code sets, where there is no text."""
    import dis

    return {op.argval for part in nested_code(code) for op in dis.get_instructions(part) if op.opname == "STORE_ATTR"}


def _made_before(methods: Iterable[types.FunctionType]) -> tuple[set[str], set[str]]:
    """Return the attributes that methods make of a given context, such as state, and those that are containers."""
    handles: set[str] = set()
    containers: set[str] = set()
    for method in methods:
        from_parameters = (
            set(method.__code__.co_varnames[1 : method.__code__.co_argcount]) if method.__name__ != "__init__" else ()
        )
        tainted = set(from_parameters)
        for node in (inner for statement in _nodes(method) or () for inner in ast.walk(statement)):
            if not isinstance(node, ast.Assign | ast.AnnAssign) or node.value is None:
                continue
            from_context = any(isinstance(inner, ast.Name) and inner.id in tainted for inner in ast.walk(node.value))
            for target in node.targets if isinstance(node, ast.Assign) else [node.target]:
                if isinstance(target, ast.Name) and from_context:
                    tainted.add(target.id)
                for inner in ast.walk(target):
                    if isinstance(inner, ast.Attribute) and isinstance(inner.ctx, ast.Store):
                        if from_context and not _is_read(node.value):
                            handles.add(inner.attr)
                        elif _is_container(node.value):
                            containers.add(inner.attr)
    return handles, containers


def _is_read(value: ast.expr) -> bool:
    """Return whether an expression reads what a state holds, as in `list(self.state.get())`."""
    return isinstance(value, ast.Call) and isinstance(value.func, ast.Name) and value.func.id in _MADE_EMPTY


def _is_container(value: ast.expr) -> bool:
    if isinstance(value, ast.List | ast.Dict | ast.Set | ast.ListComp | ast.DictComp | ast.SetComp):
        return True
    called = value.func if isinstance(value, ast.Call) else None
    name = called.id if isinstance(called, ast.Name) else called.attr if isinstance(called, ast.Attribute) else ""
    return name in _MADE_EMPTY


def _nodes(function: types.FunctionType) -> list[_Node] | None:
    """Find a function in the text of its module; several where one line has several lambdas; None without a text."""
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
    functions = _Functions(getattr(module, "__file__", None) or "")
    try:
        tree = ast.parse(inspect.getsource(module))
    except (OSError, TypeError, SyntaxError, ValueError):
        return functions
    for node in ast.walk(tree):
        if isinstance(node, ast.Lambda):
            functions.nodes.setdefault((node.lineno, "<lambda>"), []).append(node)
        elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            line = min([node.lineno, *(decorator.lineno for decorator in node.decorator_list)])
            functions.nodes.setdefault((line, node.name), []).append(node)
    return functions


def _self(function: types.FunctionType) -> str:
    code = function.__code__
    return code.co_varnames[0] if code.co_argcount else ""
