"""The records of a collection that an author gives, and their type; refuses what would be taken for something else.

A data frame gives its columns when it is iterated, a dict its keys and a text its letters. Knows no connector.
"""

from __future__ import annotations

import keyword
from collections.abc import Iterable, Mapping
from datetime import datetime, timedelta
from typing import Any

from dagster_unified.errors import PipelineError
from dagster_unified.records import shorten, type_name

_FRAMES = {
    ("pandas", "DataFrame"): "[{row}(*values) for values in frame.itertuples(index=False)]",
    ("polars", "DataFrame"): "[{row}(*values) for values in frame.iter_rows()]",
    ("polars", "LazyFrame"): "[{row}(*values) for values in frame.collect().iter_rows()]",
    ("pyarrow", "Table"): "[{row}(**values) for values in table.to_pylist()]",
    ("pyarrow", "RecordBatch"): "[{row}(**values) for values in batch.to_pylist()]",
    ("pyarrow", "Array"): "array.to_pylist()",
    ("pyarrow", "ChunkedArray"): "array.to_pylist()",
    ("pyspark", "DataFrame"): "[{row}(**values.asDict()) for values in frame.collect()]",
}
"""How the rows of a table become records, by its class and that class's package."""


def records_of(collection: object, type_info: object) -> list[Any]:
    """Return the records that a collection consists of; raise `PipelineError` where its items are something else."""
    slip = _slip(collection, type_info)
    if slip is not None:
        raise PipelineError(slip)
    if not isinstance(collection, Iterable):
        remedy = "call it, or give what it returns" if callable(collection) else "give a list of records"
        raise PipelineError(f"{shorten(collection)} ({type_name(type(collection))}) is no collection; {remedy}")
    return list(collection)


def type_of(record: Any) -> Any:
    """Return the type that says what columns a record has; raise `PipelineError` where its own does not."""
    kind = type(record)
    if kind is tuple:
        return tuple[tuple(map(type_of, record))]  # type: ignore[misc]
    if kind.__module__ == "numpy" and hasattr(record, "item") and getattr(record, "shape", None) == ():
        return type(record.item())
    if kind.__module__.startswith("pandas.") and _frame(kind) is None:  # its Timestamp and Timedelta
        return next((base for base in (datetime, timedelta) if isinstance(record, base)), kind)
    if record is None:
        raise PipelineError("its first record is None, which stands for no record; leave it out")
    if isinstance(record, dict):
        raise PipelineError(_of_dict(record))
    if isinstance(record, (list, set, frozenset)) or _frame(kind) is not None or kind.__module__ == "numpy":
        raise PipelineError(
            f"its first record is a {type_name(kind)}, which says nothing about its columns; make it a tuple, or an"
            " instance of an annotated class such as a NamedTuple"
            + (", or give type_info=, such as list[int]" if isinstance(record, list) else "")
        )
    return kind


def _slip(collection: object, type_info: object) -> str | None:
    """What a collection gives instead of its records, and what to give; None where it gives its records."""
    kind = type_name(type(collection))
    if isinstance(collection, (str, bytes, bytearray)):
        items = "letters" if isinstance(collection, str) else "bytes"
        return f"{shorten(collection)} is one value, whose {items} would be the records; give [value], or list(value)"
    if isinstance(collection, tuple) and hasattr(collection, "_fields"):
        return f"{shorten(collection)} is one record, whose fields would be the records; give [record]"
    if isinstance(collection, Mapping):
        return f"a {kind} gives only its keys; give list(given.items()), list(given.values()) or list(given)"
    if isinstance(collection, (set, frozenset)):
        return (
            f"a {kind} has no order, and another one in each process, so that a job could not go on where it stopped;"
            " give sorted(given)"
        )
    remedy = _frame(type(collection))
    if remedy is None:
        return None
    if "{row}" not in remedy:
        return f"a {kind} gives Arrow's values, not Python's; give {remedy}"
    row = type_name(type_info) if isinstance(type_info, type) else "Row"
    annotated = "" if isinstance(type_info, type) else ", with Row a NamedTuple of its columns"
    return (
        f"a {kind} gives its columns, not its rows; give {remedy.format(row=row)}{annotated}, or read the file that it"
        " comes from with a source, such as ParquetSource or CsvSource"
    )


def _frame(kind: type) -> str | None:
    """How the rows of a table of this class become records; None of any other class."""
    classes = ((base.__module__.partition(".")[0], base.__name__) for base in kind.__mro__)
    return next((_FRAMES[name] for name in classes if name in _FRAMES), None)


def _of_dict(record: Mapping[Any, Any]) -> str:
    """What to make of a record that is a dict."""
    message = "its first record is a dict, which has no element type at run time"
    if not record or not all(isinstance(key, str) and key.isidentifier() for key in record):
        return f"{message}; give type_info=, such as dict[str, int]"
    if any(keyword.iskeyword(key) or key.startswith("_") for key in record):
        return f"{message}; make an annotated class of its keys, or give type_info=, such as dict[str, int]"
    fields = "; ".join(f"{key}: {type_name(type(value))}" for key, value in record.items())
    return (
        f"{message}; make it Row(**record), with class Row(NamedTuple): {fields}; or give type_info=, such as"
        " dict[str, int]"
    )
