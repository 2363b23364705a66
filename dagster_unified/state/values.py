"""Rows of a state table as plain Python values: for people, and for comparing."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import msgspec
import pyarrow as pa

from dagster_unified.arrow_types import python_values
from dagster_unified.operators.state.table import ENCODED, EVENT_TIMERS, HELD, PROCESSING_TIMERS

Plain = Callable[[Any], Any]

_decode = msgspec.msgpack.Decoder(strict=False).decode


def plain_rows(batch: pa.RecordBatch) -> Iterator[dict[str, Any]]:
    """The rows of a table; a column that is null is not in its row, and what is msgpack is decoded."""
    names = [name for name in batch.schema.names if name != ENCODED]
    columns = [plain_values(batch.column(name)) for name in names]
    encoded: list[Any] = [None] * batch.num_rows
    if ENCODED in batch.schema.names:
        encoded = batch.column(ENCODED).to_pylist()
    for row, entries in zip(zip(*columns, strict=True), encoded, strict=True):
        found = {name: value for name, value in zip(names, row, strict=True) if value is not None}
        for name, data in entries or ():
            found[name] = decoded(name, data)
        yield found


def decoded(name: str, data: bytes) -> Any:
    """What was kept as msgpack."""
    value = _decode(data)
    if name != HELD:
        return value
    return [{"timestamp": timestamp, "record": record} for timestamp, record in value]


def plain_values(column: pa.Array) -> list[Any]:
    """Values of a column: maps are dicts, and timers the times of them."""
    convert = _plain(column.type)
    values = python_values(column)
    return values if convert is None else [None if v is None else convert(v) for v in values]


def timer_times(row: dict[str, Any]) -> dict[str, list[int]]:
    """The times of a row's timers, by the name of their column."""
    found = {}
    for name in (EVENT_TIMERS, PROCESSING_TIMERS):
        if row.get(name):
            found[name] = sorted(timer["timestamp"] for timer in row[name])
    return found


def _plain(kind: pa.DataType) -> Plain | None:
    """What makes dicts of the maps in values of a type; None where there are none."""
    if pa.types.is_struct(kind):
        fields = [(f.name, _plain(f.type)) for f in kind]
        if all(convert is None for _, convert in fields):
            return None
        return lambda v: {n: v[n] if c is None or v[n] is None else c(v[n]) for n, c in fields}
    if pa.types.is_list(kind):
        element = _plain(kind.value_type)
        return None if element is None else lambda v: [None if x is None else element(x) for x in v]
    if pa.types.is_map(kind):
        item = _plain(kind.item_type)
        return lambda v: {hashable(k): x if item is None or x is None else item(x) for k, x in v}
    return None


def hashable(value: Any) -> Any:
    """A value as Arrow gives it, as a key: a record is the tuple of its fields."""
    if isinstance(value, dict):
        return tuple(map(hashable, value.values()))
    return tuple(map(hashable, value)) if isinstance(value, (list, tuple)) else value
