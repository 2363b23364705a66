"""Pickles what goes to Spark's workers by value, so that a worker need not be able to import its author's modules.

cloudpickle keeps which modules go by value in one registry for the whole process, so values are pickled one at a time.
Knows neither engine nor connectors, which both ship code.
"""

from __future__ import annotations

import dataclasses
import inspect
import io
import pickle
import socket
import sys
import threading
import typing
import weakref
from enum import Enum
from typing import Any, Generic, TypeVar

import msgspec

from dagster_unified.errors import MissingRequirementError, PipelineError

if typing.TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

    from dagster_unified.operators.program.step import Program

T = TypeVar("T")

_registry = threading.RLock()
"""Held while author's modules are in cloudpickle's registry."""


def by_value_bytes(value: Any) -> bytes:
    """Pickle a value, with every author's module that it refers to by value.

    Workers need not be able to import these modules.
    """
    return _pickled(value, None)


def from_bytes(data: bytes) -> Any:
    """Return what was pickled, in a worker or in this process.

    Raises `MissingRequirementError` where a module cannot be imported here, and `PipelineError` where the value cannot
    be made anew: no other attempt would fare better. What a service says that is asked meanwhile comes as it is.
    """
    from pyspark import cloudpickle

    try:
        return cloudpickle.loads(data)
    except (ImportError, SyntaxError) as error:
        raise MissingRequirementError(
            f"host {socket.gethostname()} {_lacking(error)}: {install_for_workers(sys.executable)}"
        ) from error
    except (*_OF_A_VALUE, pickle.PickleError) as error:
        raise PipelineError(
            f"host {socket.gethostname()} cannot load what it was sent: {type(error).__name__}: {str(error)[:300]};"
            " create connections, locks and open files in open(), not before, and let workers have the versions that"
            " the driver has"
        ) from error


_OF_A_VALUE = (AttributeError, TypeError, ValueError, LookupError, NameError, AssertionError)


def _lacking(error: ImportError | SyntaxError) -> str:
    """Return what a process lacks that cannot import a module."""
    if not isinstance(error, ModuleNotFoundError) or error.name is None:
        return f"cannot import a module: {type(error).__name__}: {error}"
    return without_module(error.name)


def without_module(name: str) -> str:
    """Return what an interpreter lacks that has no module of this name."""
    depth = 2 if name.startswith("google.protobuf") else 1  # google itself is no package that one installs
    package = ".".join(name.split(".")[:depth])
    return f"has no {package}" if name == package else f"has a {package} without the module {name}"


def install_for_workers(interpreter: str) -> str:
    """Return what to do where workers lack what the driver has."""
    return (
        f"install what the driver has for the workers' interpreter, {interpreter}, name another one in PYSPARK_PYTHON,"
        " or give SparkResource an environment to ship"
    )


def sent(programs: Iterable[Program], pickle: Callable[[], T], where: str) -> T:
    """Return the result of `pickle`; raise `PipelineError` that names the operator that cannot be pickled."""
    try:
        return pickle()
    except Exception as error:
        culprit = next((name for name in _unpicklable(programs)), where)
        raise PipelineError(
            f"{culprit} cannot be sent to Spark's workers: {error}; create connections, locks and open files in open(),"
            " not before"
        ) from error


def _unpicklable(programs: Iterable[Program]) -> Iterator[str]:
    for program in programs:
        for step in program.steps:
            try:
                by_value_bytes(step.function)
            except Exception:
                yield program.where(step)


class InThisProcess(Generic[T]):
    """A value as a worker would get it, for the process that ships it; each `load` makes a new one.

    Its functions, their classes and the globals that they use are new as well, as in a worker. Classes of values, such
    as records, stay the same: values go from one side to the other, and stay equal.
    """

    def __init__(self, value: T) -> None:
        self._classes: dict[int, type] = {}
        self._data = _pickled(value, self._classes)

    def load(self) -> T:
        _here.update(self._classes)
        loaded: T = pickle.loads(self._data)
        return loaded


_here: weakref.WeakValueDictionary[int, type] = weakref.WeakValueDictionary()
"""This process's classes that shipped values refer to, by their identity."""


def _class_here(identity: int) -> type:
    return _here[identity]


def _pickled(value: Any, classes: dict[int, type] | None) -> bytes:
    """Pickle a value; with `classes`, for this process, and collect there the classes that stay the same."""
    from pyspark import cloudpickle as untyped

    cloudpickle: Any = untyped

    class Pickler(cloudpickle.Pickler):  # type: ignore[misc]
        def reducer_override(self, obj: Any) -> Any:
            if isinstance(obj, type):
                if "__msgspec_cache__" in vars(obj):
                    delattr(obj, "__msgspec_cache__")  # msgspec's note to itself, which it makes again
                if not cloudpickle.cloudpickle._should_pickle_by_reference(obj):
                    if classes is not None and _is_of_values(obj):
                        classes[id(obj)] = obj
                        return _class_here, (id(obj),)
                    _resolve_annotations(obj)
                    if isinstance(obj, msgspec.StructMeta):
                        return _reduced_struct(typing.cast("type[msgspec.Struct]", obj))
                    if classes is not None:
                        return _as_another_class(super().reducer_override(obj))
            if obj is dataclasses.MISSING:  # else another one arrives, and dataclasses take it for a default
                return getattr, (dataclasses, "MISSING")
            if isinstance(obj, msgspec.Meta):
                return _meta, (dict(obj.__rich_repr__()),)
            return super().reducer_override(obj)

    buffer = io.BytesIO()
    # Not at the top: a Python process of Spark's that only reads what was shipped does without.
    from dagster_unified.graph.fingerprint import authors_modules

    with _registry:
        registered = cloudpickle.list_registry_pickle_by_value()
        modules = [module for module in authors_modules() if module.__name__ not in registered]
        for module in modules:
            cloudpickle.register_pickle_by_value(module)
        try:
            Pickler(buffer).dump(value)
        finally:
            for module in modules:
                cloudpickle.unregister_pickle_by_value(module)
    return buffer.getvalue()


_FUNCTIONS = "dagster_unified.operators."
"""The package with the classes of functions that authors inherit from."""


def _is_of_values(cls: type) -> bool:
    """Whether a class is one of values, such as records, and not one of functions."""
    if any("__call__" in vars(base) for base in cls.__mro__):
        return False
    if issubclass(cls, tuple | Enum | msgspec.Struct | BaseException):
        return True
    return dataclasses.is_dataclass(cls) and not any(base.__module__.startswith(_FUNCTIONS) for base in cls.__mro__)


def _as_another_class(reduced: Any) -> Any:
    """cloudpickle's way to make a class, without the number by which it would find the original."""
    make, arguments, *rest = reduced
    if len(arguments) < _SKELETON:  # a type that Python has, such as that of None
        return reduced
    *leading, _, extra = arguments
    return make, (*leading, None, extra), *rest


_SKELETON = 6
"""How many arguments cloudpickle passes to make an empty class; the class's number is the last but one."""


def _resolve_annotations(cls: type) -> None:
    """Replace annotations that are text by their types; a worker cannot look them up."""
    annotations = vars(cls).get("__annotations__")
    if isinstance(annotations, dict) and any(map(_has_text, annotations.values())):
        try:
            hints = typing.get_type_hints(cls, include_extras=True)
        except (NameError, TypeError):
            return  # names known to a type checker only: nothing that a record's fields could be made of
        annotations.update({name: hints[name] for name in annotations})


def _has_text(annotation: Any) -> bool:
    """Whether a type, or one within it as in `list["Place"]`, is only a name."""
    return isinstance(annotation, (str, typing.ForwardRef)) or any(map(_has_text, _arguments(annotation)))


def _arguments(annotation: Any) -> tuple[Any, ...]:
    """The types within a type, without the values of a Literal and the notes of Annotated."""
    origin, arguments = typing.get_origin(annotation), typing.get_args(annotation)
    if origin is typing.Literal:
        return ()
    return arguments[:1] if origin is typing.Annotated else arguments


def _reduced_struct(cls: type[msgspec.Struct]) -> tuple[Any, ...]:
    """The way to make a `msgspec.Struct` anew.

    cloudpickle first makes an empty class and then fills it, but a Struct takes its fields when it is made.
    """
    annotations = dict(vars(cls).get("__annotations__", {}))
    kinds = inspect.signature(cls).parameters
    own_fields = [field for field in msgspec.structs.fields(cls) if field.name in annotations]
    defaults = {}
    for field in own_fields:
        settings_of_field: dict[str, Any] = {"default": field.default, "default_factory": field.default_factory}
        settings_of_field = {name: value for name, value in settings_of_field.items() if value is not msgspec.NODEFAULT}
        if field.encode_name != field.name:
            settings_of_field["name"] = field.encode_name
        if settings_of_field:
            defaults[field.name] = settings_of_field
    config = cls.__struct_config__
    settings = {name: getattr(config, name) for name in _STRUCT_SETTINGS}
    settings["kw_only"] = any(kinds[field.name].kind is inspect.Parameter.KEYWORD_ONLY for field in own_fields)
    if "__weakref__" in dir(cls.__mro__[1]):
        settings.pop("weakref")
    has_post_init = "__post_init__" in vars(cls)
    arguments = (
        cls.__name__, cls.__bases__, cls.__module__, cls.__qualname__, annotations, defaults, settings, has_post_init
    )  # fmt: skip
    state = {
        name: value
        for name, value in vars(cls).items()
        if name not in cls.__struct_fields__ and not name.startswith("__struct_") and name not in _MADE_WITH_THE_STRUCT
    }
    return _struct, arguments, state, None, None, _fill


def _meta(settings: dict[str, Any]) -> msgspec.Meta:
    return msgspec.Meta(**settings)


def _struct(
    name: str,
    bases: tuple[type, ...],
    module: str,
    qualname: str,
    annotations: dict[str, Any],
    defaults: dict[str, dict[str, Any]],
    settings: dict[str, Any],
    has_post_init: bool,
) -> type:
    fields = {field: msgspec.field(**settings_of_field) for field, settings_of_field in defaults.items()}
    namespace = {"__module__": module, "__qualname__": qualname, "__annotations__": annotations, **fields}
    if has_post_init:  # msgspec asks for it when the class is made, and `_fill` sets the author's later
        namespace["__post_init__"] = _call_post_init
    struct: type = msgspec.StructMeta(name, bases, namespace, **settings)
    return struct


def _call_post_init(record: Any) -> None:
    type(record).__post_init__(record)


def _fill(cls: type, state: dict[str, Any]) -> None:
    for name, value in state.items():
        setattr(cls, name, value)


_STRUCT_SETTINGS = (
    "frozen", "eq", "order", "array_like", "gc", "repr_omit_defaults", "omit_defaults", "forbid_unknown_fields",
    "weakref", "dict", "cache_hash", "tag", "tag_field",
)  # fmt: skip

_MADE_WITH_THE_STRUCT = {
    "__module__", "__qualname__", "__annotations__", "__slots__", "__weakref__", "__dict__", "__match_args__",
    "__msgspec_cache__", "__reduce__", "__firstlineno__", "__static_attributes__",
}  # fmt: skip
