"""A fingerprint of a user's function: it changes when what the function does changes, and is the same in every process.

It covers bytecode, constants, defaults, closures, and the functions, classes and values of the author's own modules
that the function refers to; not the bodies of installed libraries, whose versions the environment fixes. Of a value it
covers what the value means: a logger's name, a pattern's text, a builtin's name; never an address, and nothing that a
process changes as it works. A value that the code changes while it runs, such as a cache, counts with the statements
that create it; so does one whose meaning is not known, such as an open file, which is also named
(`Fingerprint.left_out`).
"""

from __future__ import annotations

import contextvars
import copyreg
import dis
import enum
import functools
import hashlib
import inspect
import os
import random
import sys
import sysconfig
import types
import typing
from collections import OrderedDict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from dagster_unified.graph.source import SELF, ModuleText, absolute, file_digest, text_of

_PLAIN = (type(None), bool, int, float, complex, str, bytes, type(...), type(NotImplemented), range, slice)
_NAMED = (
    types.BuiltinFunctionType,
    types.MethodDescriptorType,
    types.WrapperDescriptorType,
    types.ClassMethodDescriptorType,
    types.GetSetDescriptorType,
    types.MemberDescriptorType,
    types.MethodWrapperType,
)
_WITHOUT_VALUE = frozenset({"_thread", "threading", "dataclasses"})
"""The modules whose objects, such as locks, mean no more than their type says."""

_OF_THE_PROCESS = frozenset({"weakref", "_weakref", "_weakrefset", "random", "numpy.random", "_io", "_contextvars"})
"""The modules whose objects hold what a process has come to."""

_IMPORT = dis.opmap["IMPORT_NAME"]


@dataclass(frozen=True)
class Fingerprint:
    """The hash of a value, that of each place that it is made of, and what was left out, with the reason."""

    value: str
    parts: Mapping[str, str]
    left_out: Mapping[str, str]


def digest(*parts: object) -> str:
    """Return a short, stable hash of some parts."""
    text = "\x1f".join(map(str, parts))
    return hashlib.sha256(text.encode(errors="surrogatepass")).hexdigest()[:16]


def fingerprint(value: Any) -> str:
    """Return a hash that changes when what `value` does changes, and is the same in every process."""
    return fingerprint_of(value).value


def fingerprint_of(*values: Any) -> Fingerprint:
    """Return the fingerprint of some values together, part by part."""
    walk = _Walk({})
    for value in values:
        walk.value(value, _name_of(value))
    places: dict[str, list[str]] = {}
    for place, token in walk.tokens:
        places.setdefault(place, []).append(token)
    parts = {place: digest(*tokens) for place, tokens in places.items()}
    return Fingerprint(digest(*(f"{place}={part}" for place, part in sorted(parts.items()))), parts, walk.left_out)


def _name_of(value: Any) -> str:
    """Return where a value was written, as a person would look for it."""
    named: Any = value if isinstance(value, (types.FunctionType, type)) else type(value)
    if isinstance(value, types.MethodType):
        named = value.__func__
    return (
        f"{getattr(named, '__module__', '')}.{getattr(named, '__qualname__', type(value).__qualname__)}".removeprefix(
            "builtins."
        )
    )


class _Walk:
    """Goes through all that a value refers to, and keeps what it means as (place, token)."""

    def __init__(self, seen: dict[int, Any]) -> None:
        self.tokens: list[tuple[str, str]] = []
        self.left_out: dict[str, str] = {}
        self._seen = seen  # by id; the objects are held, so that their ids are not given to others meanwhile

    def value(self, value: Any, place: str, without: Iterable[str] = ()) -> None:
        """Take any value. `without` names the attributes of it that the code around it changes."""
        kind = type(value)
        if kind in _PLAIN:
            self._put(place, repr(value))
            return
        try:
            self._any(value, kind, place, frozenset(without))
        except Exception as error:  # an object's own methods may raise anything
            self._leave_out(place, f"a {_type_name(kind)}, which cannot be looked at: {type(error).__name__}")

    def _any(self, value: Any, kind: type, place: str, without: frozenset[str]) -> None:
        if kind.__module__ in _OF_THE_PROCESS or isinstance(value, (contextvars.ContextVar, random.Random)):
            name = f" {value.name}" if kind is contextvars.ContextVar else ""
            self._put(place, _type_name(kind) + name)
            if kind is not contextvars.ContextVar:
                self._leave_out(place, f"a {_type_name(kind)}")
        elif kind.__module__ in _WITHOUT_VALUE:
            self._put(place, _type_name(kind))
        elif isinstance(value, types.ModuleType):
            self._put(place, f"module {value.__name__}")
        elif isinstance(value, types.MethodType):
            self.value(value.__func__, place)
            self.value(value.__self__, place)
        elif isinstance(value, _NAMED):
            self._named(value, place)
        elif isinstance(value, types.CodeType):
            self._code(value, place)
        elif isinstance(value, type) and typing.get_origin(value) is None and is_installed(value.__module__):
            self._put(place, f"class {_name_of(value)}")  # also where it is met again: what comes before does not count
        elif self._again(value, place):
            return
        elif isinstance(value, types.FunctionType):
            self._function(value, place, without)
        elif typing.get_origin(value) is not None:
            self._alias(value, place)
        elif isinstance(value, type):
            self._class(value, place)
        elif kind in (list, tuple):
            self._put(place, f"{kind.__name__} {len(value)}")
            for item in value:
                self.value(item, place)
        elif kind in (set, frozenset):
            self._put(place, f"{kind.__name__} {sorted(self._alone(item, place) for item in value)}")
        elif kind in (dict, types.MappingProxyType):
            self._mapping(value, place)
        else:
            self._object(value, kind, place, without)

    def _again(self, value: Any, place: str) -> bool:
        """Return whether a value with an identity of its own was met before: then its name says it."""
        if isinstance(value, (tuple, frozenset)) or typing.get_origin(value) is not None:
            return False  # of equal constants it depends on the process which are one object
        if id(value) in self._seen:
            self._put(place, f"again {_name_of(value)}")
            return True
        self._seen[id(value)] = value
        return False

    def _put(self, place: str, token: str) -> None:
        self.tokens.append((place, token))

    def _leave_out(self, place: str, reason: str) -> None:
        self.left_out.setdefault(place, reason)
        self._put(place, "left out")

    def _alone(self, value: Any, place: str) -> str:
        """Return the digest of a value by itself, for what has no order."""
        walk = _Walk(dict(self._seen))
        walk.value(value, place)
        self.left_out.update(walk.left_out)
        return digest(*walk.tokens)

    def _mapping(self, value: Mapping[Any, Any], place: str) -> None:
        self._put(place, f"dict {len(value)}")
        for key, item in sorted(((self._alone(k, place), v) for k, v in value.items()), key=lambda pair: pair[0]):
            self._put(place, key)
            self.value(item, place)

    # Code

    def _function(self, function: types.FunctionType, place: str, without: frozenset[str]) -> None:
        text = _text_of(function.__globals__)
        enclosed = text.enclosed.get(function.__code__.co_qualname.partition(".<locals>")[0], {})
        written_by_others = is_installed_file(function.__code__.co_filename)
        if not is_installed(function.__module__ or ""):
            place = _name_of(function)
        self._put(place, f"function {_name_of(function)}")
        if not written_by_others:
            self.value(function.__code__, place)
        self.value(function.__defaults__, place)
        self.value(function.__kwdefaults__, place)
        changed = without | enclosed.get(function.__code__.co_name, set()) | {"__wrapped__"}
        attributes = {
            name: item for name, item in vars(function).items() if name not in changed and not name.startswith("__")
        }
        registry = attributes.get("registry")
        if written_by_others and isinstance(registry, types.MappingProxyType):  # functools.singledispatch
            self._mapping(registry, place)
            return
        self._mapping(attributes, place)
        for name, closed_over in _closed_over(function):
            if SELF in enclosed.get(name, ()):
                self._put(place, f"{name} changes")
            else:
                self.value(closed_over, place, enclosed.get(name, ()))
        if written_by_others:
            return
        used = {name for code in nested_code(function.__code__) for name in code.co_names}
        for name in sorted(used & set(function.__globals__)):
            self._put(place, name)
            self._global(function.__globals__, name, used, place)
        for dotted in sorted(text.dotted):
            submodule = sys.modules.get(dotted)
            if submodule is not None and dotted.partition(".")[0] in used and not is_installed(dotted):
                self._of_module(submodule, used, place)
        self._imports(function, place)

    def _global(self, scope: dict[str, Any], name: str, used: set[str], place: str) -> None:
        value = scope[name]
        scope, name = _origin(scope, name)
        text = _text_of(scope)
        changed = text.changed.get(name, set())
        global_name = f"{scope.get('__name__', '')}.{name}"
        if SELF in changed:
            self._statements(text, name, global_name)
        elif isinstance(value, types.ModuleType):
            self._put(place, f"module {value.__name__}")
            if not is_installed(value.__name__):
                self._of_module(value, used, place)
        elif isinstance(value, (type, types.FunctionType)) or id(value) in self._seen:
            self.value(value, place, changed)
        else:
            self._statements(text, name, global_name)
            self.value(value, global_name, changed)

    def _statements(self, text: ModuleText, name: str, place: str) -> None:
        for statement in text.statements.get(name, ()):
            self._put(place, statement)

    def _of_module(self, module: types.ModuleType, used: set[str], place: str) -> None:
        """Take what is used of an author's module.

        A submodule counts where it is imported by its name: another may be loaded later.
        """
        for name in sorted(used & set(vars(module))):
            if not isinstance(vars(module)[name], types.ModuleType):
                self._put(place, name)
                self._global(vars(module), name, used, place)

    def _imports(self, function: types.FunctionType, place: str) -> None:
        """Take the author's modules that a function imports while it runs, by their files.

        Which of them are loaded depends on the process.
        """
        package = function.__globals__.get("__package__")
        for code in nested_code(function.__code__):
            if _IMPORT not in code.co_code[::2]:
                continue
            level: Any = 0
            for op in dis.get_instructions(code):
                if op.opname == "LOAD_CONST" and isinstance(op.argval, int):
                    level = op.argval
                elif op.opname == "IMPORT_NAME":
                    name = absolute(op.argval, level, package)
                    file = None if is_installed(name) else file_digest(name)
                    if file is not None and not is_installed_file(file[0]):
                        self._put(place, f"imports {name} {file[1]}")

    def _code(self, code: types.CodeType, place: str) -> None:
        self._put(place, code.co_code.hex())
        self._put(
            place,
            repr((code.co_names, code.co_varnames[: code.co_argcount + code.co_kwonlyargcount], code.co_freevars)),
        )
        for constant in code.co_consts:
            self.value(constant, place)

    def _named(self, value: Any, place: str) -> None:
        self._put(place, f"builtin {getattr(value, '__module__', None)}.{value.__qualname__}")
        bound = getattr(value, "__self__", None)
        if bound is not None and not isinstance(bound, types.ModuleType):
            self.value(bound, place)

    # Types

    def _alias(self, value: Any, place: str) -> None:
        self._put(place, "alias")
        self.value(typing.get_origin(value), place)
        for argument in typing.get_args(value):
            self.value(argument, place)

    def _class(self, cls: type, place: str) -> None:
        place = _name_of(cls)
        self._put(place, "class")
        for name, hint in sorted(_hints(cls).items()):
            self._put(place, f"{name}:")
            self.value(hint, place)
        for base in cls.__bases__:
            self.value(base, place)
        if issubclass(cls, enum.Enum):
            for name, member in cls.__members__.items():
                self._put(place, name)
                self.value(member.value, place)
        if issubclass(cls, msgspec.Struct):
            for default in cls.__struct_defaults__:
                self.value(default, place)
        changed = _changed_attributes(cls)
        for name, member in sorted(vars(cls).items()):
            if name not in changed and _says_something(cls, name, member):
                self._put(place, name)
                self._member(member, place)

    def _member(self, member: Any, place: str) -> None:
        if isinstance(member, property):
            for accessor in (member.fget, member.fset, member.fdel):
                self.value(accessor, place)
        elif isinstance(member, (staticmethod, classmethod)):
            self.value(member.__func__, place)
        elif isinstance(member, functools.cached_property):
            self.value(member.func, place)
        else:
            self.value(member, place)

    # Objects

    def _arrow(self, value: Any, kind: type, place: str) -> bool:
        """Take an array, a table, a schema or a type of Arrow; False for what else Arrow has."""
        import pyarrow as pa  # not at the top: a process of Spark's that shows its state loads this module without it

        if isinstance(value, (pa.Array, pa.ChunkedArray, pa.RecordBatch, pa.Table)):
            columns = value.schema.to_string() if isinstance(value, (pa.RecordBatch, pa.Table)) else value.type
            self._put(place, f"{kind.__name__} {columns}")
            self.value(value.to_pylist(), place)
        elif isinstance(value, (pa.Schema, pa.Field, pa.DataType)):
            self._put(place, f"{kind.__name__} {value} {getattr(value, 'metadata', None)}")
        else:
            return False
        return True

    def _object(self, value: Any, kind: type, place: str, without: frozenset[str]) -> None:
        if isinstance(value, enum.Enum):
            self.value(kind, place)
            self._put(place, str(value._value_))
        elif isinstance(value, functools.partial):
            self._put(place, "partial")
            for part in (value.func, value.args, value.keywords, vars(value)):
                self.value(part, place)
        elif is_installed(kind.__module__) and "__wrapped__" in getattr(
            value, "__dict__", ()
        ):  # functools.cache, lru_cache
            self._put(place, f"{_type_name(kind)} around")
            self.value(value.__wrapped__, place)
        elif any(base.__module__ == "pyarrow.lib" for base in kind.__mro__) and self._arrow(value, kind, place):
            return
        elif isinstance(value, (typing.TypeVar, typing.ParamSpec)):
            self._put(place, f"type variable {value.__name__}")
        elif isinstance(value, typing.NewType):
            self._put(place, f"new type {value.__name__}")
            self.value(value.__supertype__, place)
        elif kind.__module__ == "typing" or isinstance(value, type(type[int])):
            self._put(place, repr(value))
        elif isinstance(value, Iterator):
            self._put(place, _type_name(kind))
            self._leave_out(place, f"a {_type_name(kind)}, which changes when it is read")
        elif _is_ours(kind):
            self._state(value, kind, place, without)
        elif is_installed(kind.__module__):
            self._installed(value, kind, place)
        else:
            self.value(kind, place)
            self._state(value, kind, place, without | _changed_attributes(kind))

    def _installed(self, value: Any, kind: type, place: str) -> None:
        """Take a library's object: by what it is rebuilt from, or by its attributes, where all of these have a hash."""
        self._put(place, _type_name(kind))
        if isinstance(getattr(value, "__qualname__", None), str):  # a function of a compiled library
            self._put(place, f"{getattr(value, '__module__', '')}.{value.__qualname__}")
            return
        walk = _Walk(dict(self._seen))
        reduced = _reduced(value, kind)
        if reduced is not None:
            walk.value(reduced, place)
        elif not walk._attributes(value, kind, place, _changed_attributes(kind)):
            if kind is not object:
                self._leave_out(place, f"a {_type_name(kind)}")
            return
        if walk.left_out:
            self._leave_out(place, f"a {_type_name(kind)}")
        else:
            self.tokens += walk.tokens
            self._seen.update(walk._seen)

    def _state(self, value: Any, kind: type, place: str, without: frozenset[str]) -> None:
        """Take an object by its state: what it says of its state itself, or its attributes.

        To these belongs what it holds as a container or a number.
        """
        own_state = _own_state(value, kind)
        if own_state is not None:
            self.value(own_state, place)
        else:
            self._attributes(value, kind, place, without)
        for base in (int, float, str, bytes, tuple, list, set, frozenset, dict):
            if isinstance(value, base):
                self.value(_items(value, base), place)

    def _attributes(self, value: Any, kind: type, place: str, without: frozenset[str]) -> bool:
        """Take an object's attributes, except those that change while it works; return whether it has any."""
        names = getattr(kind, "identified_by", None) if _is_ours(kind) else None
        state = _attributes_of(value, kind) if names is None else {name: getattr(value, name) for name in names}
        for name, item in sorted(state.items()):
            if name not in without and not isinstance(
                inspect.getattr_static(kind, name, None), functools.cached_property
            ):
                self._put(place, f".{name}")
                self.value(item, place if _is_ours(kind) else f"{place}.{name}" if place == _name_of(value) else place)
        return bool(state)


def _closed_over(function: types.FunctionType) -> Iterator[tuple[str, Any]]:
    for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
        try:
            yield name, cell.cell_contents
        except ValueError:  # a cell that is not filled yet
            continue


def _text_of(scope: dict[str, Any]) -> ModuleText:
    module = sys.modules.get(scope.get("__name__", ""))
    known = module is not None and vars(module) is scope and not is_installed(module.__name__)
    return text_of(module) if known and module is not None else ModuleText()


def _origin(scope: dict[str, Any], name: str) -> tuple[dict[str, Any], str]:
    """Return the globals of the author's module that a global was imported from, and its name there."""
    for _ in range(8):
        imported = _text_of(scope).imported.get(name)
        module = sys.modules.get(imported[0]) if imported is not None else None
        if imported is None or module is None or is_installed(imported[0]) or imported[1] not in vars(module):
            break
        scope, name = vars(module), imported[1]
    return scope, name


def _hints(cls: type) -> dict[str, Any]:
    try:
        hints = typing.get_type_hints(cls, include_extras=True)
    except Exception:  # names that only a type checker knows
        hints = dict(vars(cls).get("__annotations__", {}))
    return {name: hints[name] for name in vars(cls).get("__annotations__", {}) if name in hints}


_GENERATED = frozenset(
    {
        "__module__",
        "__qualname__",
        "__doc__",
        "__dict__",
        "__weakref__",
        "__annotations__",
        "__orig_bases__",
        "__parameters__",
        "__slots__",
    }
)


def _says_something(cls: type, name: str, member: Any) -> bool:
    """Return whether a member of a class is the author's: neither generated by Python, nor filled by a process."""
    if name in _GENERATED or name.startswith(("_abc", "__dataclass", "__msgspec", "__struct", "__match")):
        return False
    if isinstance(member, (types.FunctionType, staticmethod, classmethod, property, functools.cached_property)):
        return True
    if name.startswith("__"):
        return False
    if issubclass(cls, enum.Enum) and (name in cls.__members__ or (name.startswith("_") and name.endswith("_"))):
        return False
    return not (
        hasattr(type(member), "__get__")
        and is_installed(type(member).__module__)
        and not hasattr(member, "__wrapped__")
    )


def _changed_attributes(cls: type) -> frozenset[str]:
    """Return the attributes that a class's methods change as they work.

    What a setter is given is changed by who calls it, and not by work.
    """
    attributes: set[str] = set()
    overridden = {name for base in cls.__mro__ if is_installed(base.__module__) for name in vars(base)}
    for base in cls.__mro__:
        module = sys.modules.get(base.__module__)
        text = (
            text_of(module).classes.get(base.__qualname__)
            if module is not None and not _is_ours(base) and base.__module__ != "builtins"
            else None
        )
        if text is None:
            continue
        for method, changed in text.changed.items():
            if method not in (
                "__init__",
                "__new__",
                "__post_init__",
                "__setstate__",
                "__set_name__",
                "__init_subclass__",
            ):
                works = method in overridden or method == "__call__"
                attributes |= changed if works else changed - text.from_arguments[method]
    return frozenset(attributes)


def _is_ours(kind: type) -> bool:
    return kind.__module__.partition(".")[0] == "dagster_unified"


def _type_name(kind: type) -> str:
    return f"{kind.__module__}.{kind.__qualname__}".removeprefix("builtins.")


def _attributes_of(value: Any, kind: type) -> dict[str, Any]:
    state: dict[str, Any] = {}
    for base in kind.__mro__:
        for name, member in vars(base).items():
            if isinstance(member, types.MemberDescriptorType) and not name.startswith("__") and hasattr(value, name):
                state[name] = getattr(value, name)
    return {**state, **(getattr(value, "__dict__", None) or {})}


def _items(value: Any, base: type) -> Any:
    if base is dict:
        return list(value.items()) if isinstance(value, OrderedDict) else dict(value.items())
    if base in (tuple, list):
        return list(value)
    return base(value)


def _own_state(value: Any, kind: type) -> Any:
    for name in ("__reduce_ex__", "__reduce__", "__getstate__"):
        method = inspect.getattr_static(kind, name, None)
        if isinstance(method, types.FunctionType) and not is_installed_file(method.__code__.co_filename):
            return value.__reduce_ex__(2) if name == "__reduce_ex__" else getattr(value, name)()
    return None


def _reduced(value: Any, kind: type) -> Any:
    """Return what a library's object is rebuilt from, where its class says so."""
    registered = copyreg.dispatch_table.get(kind)
    reducers = {name for base in kind.__mro__[:-1] for name in ("__reduce__", "__reduce_ex__") if name in vars(base)}
    if registered is None and not reducers:
        return None
    reduced = registered(value) if registered is not None else value.__reduce_ex__(2)
    if isinstance(reduced, tuple) and len(reduced) > 3:  # its items come as iterators
        rebuild, arguments, state, items, pairs = (*reduced, None)[:5]
        return (
            rebuild,
            arguments,
            state,
            list(items or ()),
            OrderedDict(pairs or ()) if kind is OrderedDict else dict(pairs or ()),
        )
    return reduced


_OWN = str(Path(__file__).parents[1])
_FOLDERS = {_OWN, *(sysconfig.get_paths()[name] for name in ("stdlib", "platstdlib", "purelib", "platlib"))}
_INSTALLED = tuple(_FOLDERS | {os.path.realpath(folder) for folder in _FOLDERS})
"""Where installed code is; the JVM resolves the links in the path of the pyspark that it gives its Python processes."""


def nested_code(code: types.CodeType) -> Iterator[types.CodeType]:
    """Yield a function's code, and that of the functions in it."""
    yield code
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield from nested_code(constant)


def is_installed(module: str) -> bool:
    """Return whether a module is this library's, the standard library's or an installed package's: not the author's."""
    if module.split(".")[0] in ("dagster_unified", "builtins") or module in sys.builtin_module_names:
        return True
    file = getattr(sys.modules.get(module), "__file__", None)
    return bool(file) and is_installed_file(str(file))


def is_installed_file(file: str) -> bool:
    """Return whether a file of code is this library's, the standard library's or an installed package's."""
    return file.startswith((*_INSTALLED, "<frozen"))


_authors: tuple[int, list[types.ModuleType]] = (0, [])
"""The author's modules, and which modules were loaded when they were found: to look at all takes a millisecond."""


def authors_modules() -> list[types.ModuleType]:
    """Return the loaded modules that are the author's."""
    global _authors
    loaded = list(sys.modules.items())  # some under two names, of which cloudpickle knows a module's own
    identity = hash(tuple(id(module) for _, module in loaded))
    if _authors[0] != identity:
        _authors = identity, [module for name, module in loaded if _belongs_to_the_author(name, module)]
    return _authors[1]


def _belongs_to_the_author(name: str, module: types.ModuleType | None) -> bool:
    return (
        name != "__main__"
        and getattr(module, "__file__", None) is not None
        and getattr(module, "__spec__", None) is not None
        and getattr(module, "__name__", None) == name
        and not is_installed(name)
    )
