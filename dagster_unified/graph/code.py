"""What the code of a user's function shows, without running it: the names it uses, and the fields it reads."""

from __future__ import annotations

import dis
import types
from collections.abc import Callable, Iterator, Set
from functools import lru_cache
from typing import Any

from dagster_unified.graph.fingerprint import is_installed, nested_code


def names_used(value: Any) -> set[str]:
    """The attribute and global names that a function, or the methods of an object's class, refer to.

    That includes what they refer to through the author's helpers.
    """
    return {name for function in _reached(value) for name in _names(function)}


def reads_watermark(value: Any) -> bool:
    """Whether a function, or a method of an object's class, asks for the watermark."""
    return not names_used(value).isdisjoint(("current_watermark", "get_current_watermark"))


def _names(function: types.FunctionType) -> frozenset[str]:
    return _names_in(function.__code__)


@lru_cache(maxsize=4096)
def _names_in(code: types.CodeType) -> frozenset[str]:
    return frozenset(name for part in nested_code(code) for name in part.co_names)


def authors(value: Any) -> Iterator[Any]:
    """The functions of the author's in one of the library's; one of the author's own is itself."""
    wrapped = getattr(value, "wrapped_functions", ())
    for part in wrapped:
        yield from authors(part)
    if not wrapped:
        yield value


def refers_to(value: Any, wanted: Callable[[Any], bool]) -> bool:
    """Whether a function, or the methods of an object's class, refer to something of a kind."""
    return any(wanted(found) for found in held_by(value))


def held_by(value: Any) -> list[Any]:
    """What a function, or the methods of an object's class, refer to.

    They do so by a global, in a closure, or as an attribute of the object.
    """
    held = [
        attribute for part in (value, *authors(value)) if hasattr(part, "__dict__") for attribute in vars(part).values()
    ]
    for function in _functions(value):
        names = _names(function)
        held += [function.__globals__[n] for n in sorted(names & set(function.__globals__))]
        held += _closed_over(function)
    return held


def classes_used(value: Any) -> list[type]:
    """A class itself, or the classes that a function refers to."""
    if isinstance(value, type):
        return [value]
    found: list[Any] = []
    for function in _functions(value):
        found += [function.__globals__[n] for n in sorted(_names(function) & set(function.__globals__))]
        found += _closed_over(function)
    return [one for one in found if isinstance(one, type)]


_CLOCKS = {"time", "time_ns", "monotonic", "monotonic_ns", "perf_counter", "now", "utcnow", "today"}
_CLOCK_MODULES = ("time", "datetime", "pendulum")
_CHANCE_MODULES = ("random", "secrets", "uuid", "numpy.random")


def reads_from_outside(value: Any) -> str | None:
    """What a function takes that no record holds, the clock or chance, or None.

    It is found by the names that it, and the author's helpers that it calls, use of the modules that give them.
    """
    for function in _reached(value):
        names = _names(function)
        for module, own in [*_used_globals(function, names), *((imported, names) for imported in _imported(function))]:
            if module in _CLOCK_MODULES and own & _CLOCKS:
                return "the clock"
            if module in _CHANCE_MODULES:
                return "chance"
    return None


def _used_globals(function: types.FunctionType, names: Set[str]) -> Iterator[tuple[str, Set[str]]]:
    """The module that each used global is, or is from, and the names that may be used of it."""
    for name in sorted(names & set(function.__globals__)):
        used = function.__globals__[name]
        if isinstance(used, types.ModuleType):
            yield used.__name__, names
        else:
            module = getattr(used, "__module__", None) or type(getattr(used, "__self__", None)).__module__
            yield module, names if isinstance(used, type) or not callable(used) else {getattr(used, "__name__", "")}


def _imported(function: types.FunctionType) -> list[str]:
    """The modules that a function imports while it runs."""
    return [
        op.argval
        for code in nested_code(function.__code__)
        for op in dis.get_instructions(code)
        if op.opname == "IMPORT_NAME"
    ]


def _reached(value: Any) -> Iterator[types.FunctionType]:
    """The functions of `_functions`, and the author's helpers that they refer to, each once."""
    pending, seen = list(_functions(value)), set()
    while pending:
        function = pending.pop()
        if id(function) in seen:
            continue
        seen.add(id(function))
        yield function
        globals_used = (function.__globals__[name] for name in _names(function) & set(function.__globals__))
        held = [*globals_used, *_closed_over(function)]
        pending += [f for f in held if isinstance(f, types.FunctionType) and not is_installed(f.__module__ or "")]


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
    """A function itself, or the methods of an object's class.

    For the library's own objects, those of the functions that they were given.
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
