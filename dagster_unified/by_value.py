"""Pickles what goes to Spark's workers by value, so that a worker need not be able to import its author's modules.

cloudpickle keeps which modules go by value in one registry for the whole process, so values are pickled one at a time.
Knows neither engine nor connectors, which both ship code.
"""

from __future__ import annotations

import dataclasses
import inspect
import io
import pickle
import threading
import typing
import weakref
from enum import Enum
from typing import Any, Generic, TypeVar

import msgspec

from dagster_unified.errors import PipelineError

if typing.TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

    from dagster_unified.operators.program.step import Program

T = TypeVar("T")

_registry = threading.RLock()
"""Held while author's modules are in cloudpickle's registry."""


def by_value_bytes(value: Any) -> bytes:
    """Pickles a value, and by value every author's module that it refers to.

    Workers need not be able to import them.
    """
    return _pickled(value, None)


def sent(programs: Iterable[Program], pickle: Callable[[], T], where: str) -> T:
    """Return what `pickle` makes of programs; raise `PipelineError` that names the operator that cannot be sent."""
    try:
        return pickle()
    except Exception as error:
        culprit = next((name for name in _unpicklable(programs)), where)
        raise PipelineError(
            f"{culprit} cannot be sent to Spark's workers: {error}; create connections, locks and open files in open(),"
            " not before"
        ) from error


def _unpicklable(programs: Iterable[Program]) -> Iterator[str]:
    """The operators that do not pickle."""
    for program in programs:
        for step in program.steps:
            try:
                by_value_bytes(step.function)
            except Exception:
                yield program.where(step)


class InThisProcess(Generic[T]):
    """A value as a worker would get it, for the process that ships it: another one each time that it is loaded.

    Its functions, their classes and the globals that they use are other ones as well, as they are in a worker. Classes
    of values, such as records, are the same: a value goes from one to the other, and is equal to what it was.
    """

    def __init__(self, value: T) -> None:
        self._classes: dict[int, type] = {}
        self._data = _pickled(value, self._classes)

    def load(self) -> T:
        """Return the value as another object."""
        _here.update(self._classes)
        loaded: T = pickle.loads(self._data)
        return loaded


_here: weakref.WeakValueDictionary[int, type] = weakref.WeakValueDictionary()
"""The classes of this process that what is shipped within it refers to, by their identity."""


def _class_here(identity: int) -> type:
    return _here[identity]


def _pickled(value: Any, classes: dict[int, type] | None) -> bytes:
    """Pickle a value; with `classes`, for this process: it takes the classes that stay the same."""
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
        held = cloudpickle.list_registry_pickle_by_value()
        modules = [module for module in authors_modules() if module.__name__ not in held]
        for module in modules:
            cloudpickle.register_pickle_by_value(module)
        try:
            Pickler(buffer).dump(value)
        finally:
            for module in modules:
                cloudpickle.unregister_pickle_by_value(module)
    return buffer.getvalue()


_FUNCTIONS = "dagster_unified.operators."
"""Where the classes of functions are that authors inherit from."""


def _is_of_values(cls: type) -> bool:
    """Whether a class is one of values, such as records, and not one of functions."""
    if any("__call__" in vars(base) for base in cls.__mro__):
        return False
    if issubclass(cls, tuple | Enum | msgspec.Struct | BaseException):
        return True
    return dataclasses.is_dataclass(cls) and not any(base.__module__.startswith(_FUNCTIONS) for base in cls.__mro__)


def _as_another_class(reduced: Any) -> Any:
    """How cloudpickle makes a class anew, without the number by which it finds the one that it was made of."""
    make, arguments, *rest = reduced
    if len(arguments) < _SKELETON:  # a type that Python has, such as that of None
        return reduced
    *given, _, extra = arguments
    return make, (*given, None, extra), *rest


_SKELETON = 6
"""How many arguments cloudpickle makes an empty class of; its number is the last but one."""


def _resolve_annotations(cls: type) -> None:
    """Replaces annotations that are text by their types; a worker cannot look them up."""
    own = vars(cls).get("__annotations__")
    if isinstance(own, dict) and any(map(_has_text, own.values())):
        try:
            hints = typing.get_type_hints(cls, include_extras=True)
        except (NameError, TypeError):
            return  # names known to a type checker only: nothing that a record's fields could be made of
        own.update({name: hints[name] for name in own})


def _has_text(annotation: Any) -> bool:
    """Whether a type, or one within it as in `list["Place"]`, is only named."""
    return isinstance(annotation, (str, typing.ForwardRef)) or any(map(_has_text, _arguments(annotation)))


def _arguments(annotation: Any) -> tuple[Any, ...]:
    """The types within a type; the values of a Literal, and what is noted in Annotated, are none."""
    origin, given = typing.get_origin(annotation), typing.get_args(annotation)
    if origin is typing.Literal:
        return ()
    return given[:1] if origin is typing.Annotated else given


def _reduced_struct(cls: type[msgspec.Struct]) -> tuple[Any, ...]:
    """How a `msgspec.Struct` is made anew.

    cloudpickle makes an empty class first and fills it then, but a Struct takes its fields when it is made.
    """
    annotations = dict(vars(cls).get("__annotations__", {}))
    kinds = inspect.signature(cls).parameters
    own = [field for field in msgspec.structs.fields(cls) if field.name in annotations]
    defaults = {}
    for field in own:
        given: dict[str, Any] = {"default": field.default, "default_factory": field.default_factory}
        given = {name: value for name, value in given.items() if value is not msgspec.NODEFAULT}
        if field.encode_name != field.name:
            given["name"] = field.encode_name
        if given:
            defaults[field.name] = given
    config = cls.__struct_config__
    settings = {name: getattr(config, name) for name in _STRUCT_SETTINGS}
    settings["kw_only"] = any(kinds[field.name].kind is inspect.Parameter.KEYWORD_ONLY for field in own)
    if "__weakref__" in dir(cls.__mro__[1]):
        settings.pop("weakref")
    has_post_init = "__post_init__" in vars(cls)
    made = (
        cls.__name__, cls.__bases__, cls.__module__, cls.__qualname__, annotations, defaults, settings, has_post_init
    )  # fmt: skip
    state = {
        name: value
        for name, value in vars(cls).items()
        if name not in cls.__struct_fields__ and not name.startswith("__struct_") and name not in _MADE_WITH_THE_STRUCT
    }
    return _struct, made, state, None, None, _fill


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
    fields = {field: msgspec.field(**given) for field, given in defaults.items()}
    namespace = {"__module__": module, "__qualname__": qualname, "__annotations__": annotations, **fields}
    if has_post_init:  # msgspec asks for it when the class is made, and `_fill` sets the author's later
        namespace["__post_init__"] = _call_post_init
    made: type = msgspec.StructMeta(name, bases, namespace, **settings)
    return made


def _call_post_init(made: Any) -> None:
    type(made).__post_init__(made)


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
