"""How an author's code gets to Spark's workers: by value, so that a worker need not be able to import its modules.

cloudpickle keeps which modules go by value in one registry for the whole process. So payloads are pickled one at a
time, and once for a job: a query's epochs use what was pickled for the first.
"""

from __future__ import annotations

import functools
import io
import sys
import threading
import types
import typing
from collections.abc import Callable, Hashable, Iterable
from types import ModuleType
from typing import Any

from dagster_unified.graph.code import is_installed

T = typing.TypeVar("T")

_registry = threading.RLock()
"""Held while author's modules are in cloudpickle's registry."""


class Payload:
    """Something that was shipped.

    `load` gives one object per worker, or with `fresh` another one each time: functions that are opened and closed.
    """

    def __init__(self, data: bytes, fresh: bool) -> None:
        self.data, self.fresh = data, fresh

    @classmethod
    def of(cls, value: Any, functions: Iterable[Any]) -> Payload:
        """`functions` are the author's in `value`. A plain function is never opened, and has no state of its own."""
        return cls(
            by_value_bytes(value), any(f is not None and not isinstance(f, types.FunctionType) for f in functions)
        )

    def load(self) -> Any:
        """What was shipped."""
        return _unpickled(self.data) if self.fresh else _once_per_worker(self.data)


class Shipments:
    """What a job ships, pickled once for each of its places."""

    def __init__(self) -> None:
        self._made: dict[Hashable, Any] = {}

    def once(self, place: Hashable, make: Callable[[], T]) -> T:
        """What `make` gave for this place the first time."""
        if place not in self._made:
            self._made[place] = make()
        found: T = self._made[place]
        return found


def by_value(function: Callable[..., Any]) -> Callable[..., Any]:
    """A function that carries its user code along. Called again in the same worker, it is the same object."""
    return functools.partial(_call, Payload(by_value_bytes(function), fresh=False))


def by_value_afresh(function: Callable[..., Any]) -> Callable[..., Any]:
    """A function that carries its user code along, and is another object at each call: for what a task calls once."""
    return functools.partial(_call, Payload(by_value_bytes(function), fresh=True))


def _call(payload: Payload, *arguments: Any) -> Any:
    return payload.load()(*arguments)


@functools.lru_cache(maxsize=8)
def _once_per_worker(data: bytes) -> Any:
    return _unpickled(data)


def _unpickled(data: bytes) -> Any:
    from pyspark import cloudpickle

    return cloudpickle.loads(data)


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
            return super().reducer_override(obj)

    buffer = io.BytesIO()
    with _registry:
        held = cloudpickle.list_registry_pickle_by_value()
        modules = [m for name, m in list(sys.modules.items()) if name not in held and _belongs_to_the_author(name, m)]
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
    if isinstance(own, dict) and any(isinstance(a, (str, typing.ForwardRef)) for a in own.values()):
        try:
            hints = typing.get_type_hints(cls, include_extras=True)
        except (NameError, TypeError):
            return  # names known to a type checker only: nothing that a record's fields could be made of
        own.update({name: hints[name] for name in own})


def _belongs_to_the_author(name: str, module: ModuleType | None) -> bool:
    return (
        name != "__main__"
        and getattr(module, "__file__", None) is not None
        and getattr(module, "__spec__", None) is not None
        and not is_installed(name)
    )
