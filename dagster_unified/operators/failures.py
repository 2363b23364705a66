"""Turns an exception from a user's function into one sentence that says where it happened.

It names the pipeline, the stage, the operator, the user's line and the record. Knows no driver; called only when
something has already failed.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from traceback import walk_tb
from types import TracebackType
from typing import Any

from dagster_unified.errors import RecordTypeError, UnifiedError, UserFunctionError
from dagster_unified.records import UNITED, RecordType, shorten
from dagster_unified.values import FOLD

_LIBRARY = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
RAISED = (Exception, SystemExit)
"""Failures of an author's function: `sys.exit()` ends neither a worker nor a test."""

_OF_COLUMNS = (
    "it calls a function of pyspark.sql.functions, which makes an expression on columns, and it is a function of a"
    " record; compute with the record's fields in Python"
)

_ASYNCIO = os.path.join(os.path.dirname(os.__file__), "asyncio")


@contextmanager
def placed(where: str) -> Iterator[None]:
    """Add the place to a `RecordTypeError` of a value that was read, where the error does not name it."""
    try:
        yield
    except RecordTypeError as error:
        if str(error).startswith(where):
            raise
        raise RecordTypeError(f"{where}: {error}") from error


def user_failure(error: BaseException, where: str, function: Any, record: Any) -> UnifiedError:
    """The error to raise instead of `error`.

    An error of the library's keeps its class and gets its place, where it does not name it.
    """
    if isinstance(error, UserFunctionError):
        return error
    if isinstance(error, UnifiedError) and str(error).startswith(where):
        return error
    line = _user_line(error.__traceback__, function)
    if isinstance(error, UnifiedError) and not line and _is_in_fold(error.__traceback__):
        return type(error)(f"{where}: {error} (computed from {_shown(record)})")
    if isinstance(error, UnifiedError):
        return type(error)(f"{where}: {error}" + (f" (at {line})" if line else ""))
    at = f", at {line}" if line else ""
    said = _OF_COLUMNS if _is_for_columns(error) else f"{type(error).__name__}: {error}"
    shown = _shown(record)
    return UserFunctionError(f"{where}: {said}{at}, on {shown}", operator=where, record=shown, location=line)


def _is_for_columns(error: BaseException) -> bool:
    """Whether one of PySpark's functions on columns raised it for lack of a session, which no worker has."""
    trace = error.__traceback__
    while trace is not None and type(error).__name__ in ("AssertionError", "PySparkRuntimeError"):
        if str(trace.tb_frame.f_globals.get("__name__")).startswith("pyspark.sql.functions"):
            return True
        trace = trace.tb_next
    return False


def computed_from(
    error: RecordTypeError, record_type: RecordType, run: Callable[[Any], list[Any]], records: Iterable[Any]
) -> RecordTypeError:
    """The error for a value that is not of its declared type, with the record that it was computed from.

    Functions run once more to find it, record by record.
    """
    for record in records:
        try:
            record_type.check(run(record))
        except RecordTypeError as misfit:
            if str(error).endswith(str(misfit)):
                return RecordTypeError(f"{error} (computed from {_shown(record)})")
            return error
        except RAISED:
            return error
    return error


def _shown(record: Any) -> str:
    return shorten(_of_its_stream(record))


def _is_in_fold(trace: TracebackType | None) -> bool:
    """Whether it was raised where a function's result is checked, in the loop that combines values."""
    return any(frame.f_code.co_filename == FOLD for frame, _ in walk_tb(trace))


def _of_its_stream(record: Any) -> Any:
    """The author's record in one of two united streams (`either_type` of `connected.py`)."""
    if not hasattr(type(record), UNITED):
        return record
    return record.first if record.side == 1 else record.second


def _user_line(trace: TracebackType | None, function: Any) -> str:
    """The deepest line within the file of the user's function, or else the first outside of the library."""
    code = getattr(getattr(function, "__func__", function), "__code__", None)
    in_author_file, first_outside = "", ""
    while trace is not None:
        frame = trace.tb_frame.f_code
        if not frame.co_filename.startswith((_LIBRARY, _ASYNCIO, "<fused", FOLD)):
            line = f"{frame.co_filename}:{trace.tb_lineno} in {frame.co_name}"
            first_outside = first_outside or line
            if code is not None and frame.co_filename == code.co_filename:
                in_author_file = line
        trace = trace.tb_next
    return in_author_file or first_outside
