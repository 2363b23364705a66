"""Pickles what goes to Spark's workers by value, so that a worker need not be able to import its author's modules.

cloudpickle keeps which modules go by value in one registry for the whole process, so values are pickled one at a time.
Knows neither engine nor connectors, which both ship code.
"""

from __future__ import annotations

import dataclasses
import inspect
import io
import sys
import threading
import typing
from types import ModuleType
from typing import Any

import msgspec

from dagster_unified.graph.code import is_installed

_registry = threading.RLock()
"""Held while author's modules are in cloudpickle's registry."""


def by_value_bytes(value: Any) -> bytes:
    """Pickles a value, and by value every author's module that it refers to.

    Workers need not be able to import them.
    """
    from pyspark import cloudpickle as untyped

    cloudpickle: Any = untyped

    class Pickler(cloudpickle.Pickler):  # type: ignore[misc]
        def reducer_override(self, obj: Any) -> Any:
            if isinstance(obj, type) and "__msgspec_cache__" in vars(obj):
                delattr(
                    obj, "__msgspec_cache__"
                )  # msgspec's note to itself on a class, which it makes again when it needs it
            if isinstance(obj, type):
                _resolve_annotations(obj)
            if isinstance(obj, msgspec.StructMeta) and not cloudpickle.cloudpickle._should_pickle_by_reference(obj):
                return _reduced_struct(typing.cast("type[msgspec.Struct]", obj))
            if obj is dataclasses.MISSING:  # else another one arrives, and dataclasses take it for a default
                return getattr, (dataclasses, "MISSING")
            if isinstance(obj, msgspec.Meta):
                return _meta, (dict(obj.__rich_repr__()),)
            return super().reducer_override(obj)

    buffer = io.BytesIO()
    with _registry:
        held = cloudpickle.list_registry_pickle_by_value()
        known = list(sys.modules.items())  # some under two names, of which cloudpickle knows a module's own
        modules = [m for name, m in known if name not in held and _belongs_to_the_author(name, m)]
        for module in modules:
            cloudpickle.register_pickle_by_value(module)
        try:
            Pickler(buffer).dump(value)
        finally:
            for module in modules:
                cloudpickle.unregister_pickle_by_value(module)
    return buffer.getvalue()


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


def _belongs_to_the_author(name: str, module: ModuleType | None) -> bool:
    return (
        name != "__main__"
        and getattr(module, "__file__", None) is not None
        and getattr(module, "__spec__", None) is not None
        and getattr(module, "__name__", None) == name
        and not is_installed(name)
    )
