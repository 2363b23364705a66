"""Columns of a savepoint for rows that state keeps as Arrow streams: lists of records, which any tool reads.

In a table rows have the columns of their type, so what a type may change into holds for them as for other state, and
rows of a `ListState` and of an `ArrowListState` are the same. Rows do not become Python objects on their way.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import chain
from typing import Any

import msgspec
import pyarrow as pa

from dagster_unified.arrow_types import has
from dagster_unified.errors import StateError
from dagster_unified.operators.layout import StreamLayout
from dagster_unified.operators.state import chunks
from dagster_unified.operators.state.arrow_rows import ArrowRows
from dagster_unified.operators.state.columns import Encoded, TypedColumn, is_empty
from dagster_unified.records import type_name

PIECE = 4
"""How many times `chunks.SMALL` bytes of rows of a table become one stream: subtasks are given whole ones."""

LARGEST = (1 << 31) - (1 << 20)
"""Bytes of streams that become one array: Arrow counts those of a column with 31 bits."""


class RowsColumn(TypedColumn):
    """Lists of streams, as lists of rows."""

    def __init__(self, what: str, layout: StreamLayout) -> None:
        super().__init__(what, list[bytes])
        self._rows = ArrowRows(what, layout)
        self._of = type_name(layout.records.python)
        kind = pa.list_(pa.field("element", pa.struct(list(layout.schema))))
        self.arrow = None if has(kind, is_empty) else kind

    def encode(self, values: Sequence[Any]) -> tuple[pa.Array | None, Encoded]:
        return super().encode(values) if self.arrow is None else (self.lists(values), {})

    def decode(self, array: pa.Array | None, encoded: Encoded) -> list[Any]:
        rows = [] if array is None else self.tables(array)
        total = sum(own.num_rows for own in rows if own is not None)
        step = PIECE * chunks.SMALL * total // max(1, 0 if array is None else array.nbytes)
        found: list[Any] = [None if own is None else self._rows.streams(own, max(1, step)) for own in rows]
        for place, data in encoded.items():
            found[place] = self.decoded(data)
        return found

    def check(self, stored: pa.DataType) -> None:
        if not (pa.types.is_list(stored) and pa.types.is_struct(stored.value_type)):
            raise StateError(
                f"{self.what} is declared with rows of {self._of}, and the savepoint has {stored}; keep the type as it"
                " was"
            )
        self._rows.check(pa.schema(list(stored.value_type)))

    def lists(self, values: Sequence[Sequence[bytes] | None]) -> pa.ListArray:
        """The rows of some lists of streams."""
        if sum(map(len, chain.from_iterable(streams or () for streams in values))) > LARGEST:
            raise pa.ArrowCapacityError(f"{self.what} has more than {LARGEST} bytes")
        pieces = [[self._rows.read(data) for data in streams or ()] for streams in values]
        rows = pa.concat_tables([self._rows.schema.empty_table(), *chain.from_iterable(pieces)])
        columns = [column.combine_chunks() for column in rows.columns]
        structs = pa.StructArray.from_arrays(columns, fields=list(rows.schema))
        sizes = (sum(piece.num_rows for piece in own) for own in pieces)
        return pa.ListArray.from_arrays(offsets(values, sizes), structs, type=self.arrow)

    def tables(self, lists: pa.ListArray) -> list[pa.Table | None]:
        """Lists of rows, also of another type, each as a table of this one."""
        self.check(lists.type)
        flat = lists.flatten()
        if flat.null_count:
            raise StateError(f"{self.what}: a row may not be None, and is None {flat.null_count} times; leave it out")
        rows = self._rows.migrated(pa.Table.from_batches([pa.RecordBatch.from_struct_array(flat)]))
        found: list[pa.Table | None] = []
        start = 0
        for size in lists.value_lengths().to_pylist():
            found.append(None if size is None else rows.slice(start, size))
            start += size or 0
        return found


class RowsByKeyColumn(TypedColumn):
    """Maps to streams, or to lists of streams, as maps to lists of rows."""

    def __init__(self, what: str, key: Any, rows: RowsColumn, several: bool) -> None:
        value: Any = list[bytes] if several else bytes
        super().__init__(what, dict[key, value])
        self._key, self._rows, self._several = TypedColumn(what, key), rows, several
        none = self._key.arrow is None or rows.arrow is None
        self.arrow = None if none else pa.map_(self._key.arrow, rows.arrow)

    def encode(self, values: Sequence[Any]) -> tuple[pa.Array | None, Encoded]:
        if self.arrow is None:
            return super().encode(values)
        keys, encoded = self._key.encode([key for held in values for key in held or ()])
        if encoded:
            return None, {i: msgspec.msgpack.encode(held) for i, held in enumerate(values) if held is not None}
        items = [item for held in values for item in (held or {}).values()]
        lists = self._rows.lists(items if self._several else [[data] for data in items])
        places = offsets(values, (len(held or ()) for held in values))
        return pa.MapArray.from_arrays(places, keys, lists, type=self.arrow), {}

    def decode(self, array: pa.Array | None, encoded: Encoded) -> list[Any]:
        found: list[Any] = []
        if array is not None:
            self.check(array.type)
            places = array.offsets.to_pylist()
            first, last = places[0], places[-1]
            keys = self._key.decode(array.keys.slice(first, last - first), {})
            items = self._items(array.items.slice(first, last - first))
            entries = list(zip(keys, items, strict=True))
            spans = zip(array.is_valid().to_pylist(), places[:-1], places[1:], strict=True)
            found = [dict(entries[start - first : end - first]) if valid else None for valid, start, end in spans]
        for place, data in encoded.items():
            found[place] = self.decoded(data)
        return found

    def check(self, stored: pa.DataType) -> None:
        if not pa.types.is_map(stored):
            super().check(stored)
        self._key.check(stored.key_type)
        self._rows.check(stored.item_type)

    def _items(self, lists: pa.ListArray) -> list[Any]:
        if self._several:
            return self._rows.decode(lists, {})
        return [None if rows is None else ArrowRows.encode(rows) for rows in self._rows.tables(lists)]


def offsets(values: Sequence[object], sizes: Iterable[int]) -> pa.Array:
    """Where lists begin and end that have these sizes; None stands for none."""
    found: list[int | None] = []
    end = 0
    for value, size in zip(values, sizes, strict=True):
        found.append(None if value is None else end)
        end += size
    return pa.array([*found, end], pa.int32())
