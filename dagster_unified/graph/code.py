"""What can be told of a user's function from its code, without running it: its fingerprint, and which names it uses.

A fingerprint covers bytecode, constants, defaults, closures, and the functions, classes and plain values of the author's own
modules that it refers to; not the bodies of installed libraries, whose versions the environment fixes.
"""

from __future__ import annotations

import dis
import functools
import hashlib
import sys
import sysconfig
import types
import typing
from collections.abc import Callable, Iterator
from typing import Any

_INSTALLED = tuple({sysconfig.get_paths()[name] for name in ("stdlib", "platstdlib", "purelib", "platlib")})


def digest(*parts: object) -> str:
    """A short, stable hash of some parts."""
    text = "\x1f".join(map(str, parts))
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def fingerprint(value: Any) -> str:
    """A hash that changes when what `value` does changes, and is the same in every process."""
    return digest(*_describe(value, {}))


def names_used(value: Any) -> set[str]:
    """The attribute and global names that a function, or the methods of an object's class, refer to."""
    found: set[str] = set()
    for function in _functions(value):
        for code in _nested(function.__code__):
            found |= set(code.co_names)
    return found


def authors(value: Any) -> Iterator[Any]:
    """The functions of the author's in one of the library's; one of the author's own is itself."""
    wrapped = getattr(value, "wrapped_functions", ())
    for part in wrapped:
        yield from authors(part)
    if not wrapped:
        yield value


def refers_to(value: Any, wanted: Callable[[Any], bool]) -> bool:
    """Whether a function, or the methods of an object's class, refer to something of a kind: as a global, in a closure, or as an attribute of the object."""
    held = [attribute for part in (value, *authors(value)) if hasattr(part, "__dict__") for attribute in vars(part).values()]
    for function in _functions(value):
        names = {n for code in _nested(function.__code__) for n in code.co_names}
        held += [function.__globals__[n] for n in names & set(function.__globals__)]
        held += _closed_over(function)
    return any(wanted(found) for found in held)


_CLOCKS = {"time", "time_ns", "monotonic", "monotonic_ns", "perf_counter", "now", "utcnow", "today"}


def reads_from_outside(value: Any) -> str | None:
    """What a function takes that no record holds, the clock or chance, or None: told by the names it uses of the modules that give them."""
    for function in _functions(value):
        names = {n for code in _nested(function.__code__) for n in code.co_names}
        for name in sorted(names & set(function.__globals__)):
            used = function.__globals__[name]
            module = used.__name__ if isinstance(used, types.ModuleType) else getattr(used, "__module__", None) or type(getattr(used, "__self__", None)).__module__
            own = {getattr(used, "__name__", "")} if callable(used) and not isinstance(used, type) else names
            if module in ("time", "datetime", "pendulum") and own & _CLOCKS:
                return "the clock"
            if module in ("random", "secrets", "uuid", "numpy.random"):
                return "chance"
    return None


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
    """A function itself, or the methods of an object's class; of the library's own objects, those of the functions that they were given."""
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


def _nested(code: types.CodeType) -> Iterator[types.CodeType]:
    yield code
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield from _nested(constant)


def is_installed(module: str) -> bool:
    """Whether a module belongs to this library, the standard library or an installed package: not to the author."""
    if module.split(".")[0] in ("dagster_unified", "builtins") or module in sys.builtin_module_names:
        return True
    file = getattr(sys.modules.get(module), "__file__", None)
    return bool(file) and str(file).startswith(_INSTALLED)


def _describe(value: Any, seen: dict[int, Any]) -> Iterator[object]:
    if value is None or isinstance(value, (str, int, float, bool, bytes, complex)):
        yield repr(value)
        return
    if id(value) in seen:
        yield "…"
        return
    seen[id(value)] = value  # held, so that its id is not given to another object meanwhile
    if isinstance(value, types.MethodType):
        yield from _describe(value.__func__, seen)
        yield from _describe(value.__self__, seen)
    elif isinstance(value, types.FunctionType):
        yield from _function(value, seen)
    elif isinstance(value, types.CodeType):
        yield from _code(value, seen)
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from _describe(item, seen)
    elif isinstance(value, (set, frozenset)):
        yield from sorted(digest(*_describe(item, seen)) for item in value)
    elif isinstance(value, dict):
        for key, item in value.items():
            yield from _describe(key, seen)
            yield from _describe(item, seen)
    elif isinstance(value, types.ModuleType):
        yield value.__name__
    elif isinstance(value, type):
        yield from _class(value, seen)
    else:
        yield from _object(value, seen)


def _function(function: types.FunctionType, seen: dict[int, Any]) -> Iterator[object]:
    if is_installed(function.__module__ or ""):
        yield f"{function.__module__}.{function.__qualname__}"
        return
    yield from _describe(function.__code__, seen)
    yield from _describe(function.__defaults__, seen)
    yield from _describe(function.__kwdefaults__, seen)
    for value in _closed_over(function):
        yield from _describe(value, seen)
    for name in sorted({n for code in _nested(function.__code__) for n in code.co_names}):
        if name in function.__globals__:
            value = function.__globals__[name]
            yield name
            yield from _describe(value, seen)
            if isinstance(value, types.ModuleType) and not is_installed(value.__name__):
                used = {n for code in _nested(function.__code__) for n in code.co_names}
                yield from _describe([vars(value)[n] for n in sorted(used & set(vars(value)))], seen)


def _closed_over(function: types.FunctionType) -> Iterator[Any]:
    for cell in function.__closure__ or ():
        try:
            yield cell.cell_contents
        except ValueError:  # a cell that is not filled yet
            continue


def _code(code: types.CodeType, seen: dict[int, Any]) -> Iterator[object]:
    yield code.co_code.hex()
    yield repr((code.co_names, code.co_varnames[: code.co_argcount]))
    for constant in code.co_consts:
        yield from _describe(constant, seen)


def _class(cls: type, seen: dict[int, Any]) -> Iterator[object]:
    yield f"{cls.__module__}.{cls.__qualname__}"
    if is_installed(cls.__module__):
        return
    try:
        hints = typing.get_type_hints(cls, include_extras=True)
    except (NameError, TypeError):
        hints = dict(getattr(cls, "__annotations__", {}))
    yield repr({name: str(hint) for name, hint in hints.items()})
    for base in cls.__bases__:
        yield from _describe(base, seen)
    for name, member in sorted(vars(cls).items()):
        if name.startswith("_abc") or (name.startswith("__") and name not in ("__init__", "__call__")) or isinstance(member, types.MemberDescriptorType):
            continue
        yield name
        if isinstance(member, property):
            yield from _describe([member.fget, member.fset], seen)
        else:
            yield from _describe(getattr(member, "__func__", member), seen)


def _object(value: Any, seen: dict[int, Any]) -> Iterator[object]:
    yield from _describe(type(value), seen)
    if isinstance(value, functools.partial):
        yield from _describe([value.func, value.args, value.keywords], seen)
        return
    state = getattr(value, "__dict__", None)
    if state:
        yield from _describe(dict(sorted(state.items())), seen)
    elif getattr(type(value), "__slots__", None):
        yield from _describe([getattr(value, slot, None) for slot in type(value).__slots__], seen)
    elif getattr(type(value), "__repr__", None) is not getattr(object, "__repr__", None):
        yield repr(value)
