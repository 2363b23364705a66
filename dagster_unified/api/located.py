"""Says in an error that a program's author meets while it is built which line of the program it is of."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from functools import wraps
from types import FunctionType
from typing import Any, TypeVar

from dagster_unified.errors import PipelineError, RecordTypeError
from dagster_unified.graph.nodes import Location

_LIBRARY = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))

C = TypeVar("C", bound=type)


def located(kind: C) -> C:
    """A class whose methods an author calls; their errors say from where."""
    for name, method in list(vars(kind).items()):
        if isinstance(method, FunctionType) and not name.startswith("_"):
            setattr(kind, name, _located(method))
    return kind


def _located(method: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(method)
    def call(*args: Any, **kwargs: Any) -> Any:
        try:
            return method(*args, **kwargs)
        except (PipelineError, RecordTypeError) as error:
            place = f" ({caller()})"
            if type(error) in (PipelineError, RecordTypeError) and place not in str(error):
                error.args = (f"{error}{place}",)
            raise

    return call


def caller() -> Location | None:
    """The line of the author's program that is being executed: the nearest frame outside the library."""
    frame = sys._getframe(1)
    while frame is not None:
        if not frame.f_code.co_filename.startswith(_LIBRARY):
            return Location(_short(frame.f_code.co_filename), frame.f_lineno)
        frame = frame.f_back  # type: ignore[assignment]
    return None


def _short(file: str) -> str:
    """Relative to the working directory where the file lies below it."""
    relative = os.path.relpath(file) if os.path.isabs(file) else file
    return file if relative.startswith("..") else relative
