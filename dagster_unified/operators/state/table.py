"""The keyed state of one operator as a table: a row for each key, with a column for each state.

What a savepoint holds. Beside the states a row has the key's timers and the elements that are held back for it, as
lists, and in `ENCODED` what Arrow has no type for, by the name of its column. A row without a key holds the operator's
broadcast state. Knows pages and descriptors; no engine.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import msgspec
import pyarrow as pa

from dagster_unified.errors import StateError
from dagster_unified.operators.state.chunks import Chunked, LargeList
from dagster_unified.operators.state.columns import Encoded, TypedColumn
from dagster_unified.operators.state.descriptors import StateDescriptor
from dagster_unified.operators.state.pages import Content

EVENT_TIMERS, PROCESSING_TIMERS, HELD, ENCODED = "__event_timers", "__processing_timers", "__held_back", "__encoded"

_TIMERS = pa.list_(pa.struct([("timestamp", pa.int64()), ("generation", pa.int64())]))
_ENCODED = pa.map_(pa.string(), pa.binary())

ROLE = b"role"
"""In a field's metadata: `key`, `state` or `broadcast`; none for the library's own columns."""


class KeyShape(NamedTuple):
    """The columns of an operator's key, and its type: for several columns that of a tuple of them."""

    names: tuple[str, ...]
    python: Any


class StateTable:
    """The columns of one operator's state, and what turns pages into rows and rows into pages.

    `where` names the operator in errors. `record` is the type of the elements that it holds back.
    """

    def __init__(
        self,
        where: str,
        key: KeyShape,
        record: Any,
        states: Mapping[str, StateDescriptor[Any]],
        broadcast: Mapping[str, StateDescriptor[Any]],
    ) -> None:
        self.where = where
        self._several = len(key.names) > 1
        kinds = key.python.__args__ if self._several else (key.python,)
        self._keys = {
            name: TypedColumn(f"{where}: key '{name}'", kind) for name, kind in zip(key.names, kinds, strict=True)
        }
        self._states = {name: TypedColumn(f"{where}: state '{name}'", d.stored_type) for name, d in states.items()}
        self._broadcast = {
            name: TypedColumn(f"{where}: broadcast state '{name}'", d.stored_type) for name, d in broadcast.items()
        }
        self._held = TypedColumn(f"{where}: held-back element", record)
        self._state_columns = {name: self._free(name, "state") for name in states}
        self._broadcast_columns = {name: self._free(name, "broadcast state") for name in broadcast}
        self.schema = self._schema()

    def _free(self, name: str, kind: str) -> str:
        """A column's name: that of the state, unless the key has a column of that name."""
        taken = name in self._keys or (kind == "broadcast state" and name in self._state_columns)
        return f"{name} ({kind})" if taken or name.startswith("__") else name

    def _schema(self) -> pa.Schema:
        fields: list[pa.Field] = []
        for role, columns, names in (
            ("key", self._keys, {name: name for name in self._keys}),
            ("state", self._states, self._state_columns),
            ("broadcast", self._broadcast, self._broadcast_columns),
        ):
            for name, column in columns.items():
                if column.arrow is not None:
                    metadata = {ROLE: role.encode(), b"name": name.encode()}
                    fields.append(pa.field(names[name], column.arrow, metadata=metadata))
        fields += [pa.field(EVENT_TIMERS, _TIMERS), pa.field(PROCESSING_TIMERS, _TIMERS)]
        if self._held.arrow is not None:
            held = pa.struct([("timestamp", pa.int64()), ("record", self._held.arrow)])
            fields.append(pa.field(HELD, pa.list_(held)))
        fields.append(pa.field(ENCODED, _ENCODED))
        return pa.schema(fields)

    # Pages to rows

    def rows(self, content: Content) -> pa.RecordBatch:
        """A row for each key that has anything."""
        event_timers, processing_timers = _by_key(content.event_timers), _by_key(content.processing_timers)
        held: dict[Hashable, list[tuple[int, Any]]] = {}
        for timestamp, key, record in content.held:
            held.setdefault(key, []).append((timestamp, record))
        keys = dict.fromkeys(key for key, state in content.keys.items() if state)
        keys.update(dict.fromkeys((*event_timers, *processing_timers, *held)))
        order = list(keys)
        cells = [content.keys.get(key, _NOTHING) for key in order]
        encoded: list[list[tuple[str, bytes]]] = [[] for _ in order]
        arrays = self._key_arrays(order, encoded)
        for name, column in self._states.items():
            values = [cell.get(name) for cell in cells]
            if any(isinstance(v, (Chunked, msgspec.Raw)) for v in values):
                values = [_whole(v) for v in values]
            self._put(arrays, self._state_columns[name], column, values, encoded)
        self._keep_undeclared(cells, encoded)
        arrays[EVENT_TIMERS] = _timers(order, event_timers)
        arrays[PROCESSING_TIMERS] = _timers(order, processing_timers)
        self._put_held(arrays, [held.get(key, ()) for key in order], encoded)
        arrays[ENCODED] = pa.array([e or None for e in encoded], _ENCODED)
        return self._batch(arrays, len(order))

    def broadcast_row(self, maps: Mapping[str, Any]) -> pa.RecordBatch:
        """The row of the operator's broadcast state."""
        encoded: list[list[tuple[str, bytes]]] = [[]]
        arrays: dict[str, pa.Array] = {}
        for name, column in self._broadcast.items():
            self._put(arrays, self._broadcast_columns[name], column, [maps.get(name)], encoded)
        arrays[ENCODED] = pa.array([e or None for e in encoded], _ENCODED)
        return self._batch(arrays, 1)

    def _batch(self, arrays: Mapping[str, pa.Array], size: int) -> pa.RecordBatch:
        columns = [arrays.get(f.name, pa.nulls(size, f.type)) for f in self.schema]
        return pa.RecordBatch.from_arrays(columns, schema=self.schema)

    def _key_arrays(self, keys: Sequence[Hashable], encoded: list[list[tuple[str, bytes]]]) -> dict[str, pa.Array]:
        arrays: dict[str, pa.Array] = {}
        columns: Iterable[Sequence[Any]] = [keys]
        if self._several:
            columns = zip(*keys, strict=True) if keys else [()] * len(self._keys)
        for (name, column), values in zip(self._keys.items(), columns, strict=True):
            self._put(arrays, name, column, values, encoded)
        return arrays

    @staticmethod
    def _put(
        arrays: dict[str, pa.Array],
        name: str,
        column: TypedColumn,
        values: Sequence[Any],
        encoded: list[list[tuple[str, bytes]]],
    ) -> None:
        array, apart = column.encode(values)
        if array is not None:
            arrays[name] = array
        for place, data in apart.items():
            encoded[place].append((name, data))

    def _keep_undeclared(self, cells: Sequence[Mapping[str, Any]], encoded: list[list[tuple[str, bytes]]]) -> None:
        """States that the operator has not declared yet: they are as they were stored."""
        for place, cell in enumerate(cells):
            if len(cell) > len(self._states) or not self._states.keys() >= cell.keys():
                for name, value in cell.items():
                    if name not in self._states:
                        encoded[place].append((name, msgspec.msgpack.encode(_whole(value))))

    def _put_held(
        self,
        arrays: dict[str, pa.Array],
        held: Sequence[Sequence[tuple[int, Any]]],
        encoded: list[list[tuple[str, bytes]]],
    ) -> None:
        flat = [element for elements in held for element in elements]
        if not flat:
            return
        array, apart = self._held.encode([record for _, record in flat])
        if array is None or apart:
            for place, elements in enumerate(held):
                if elements:
                    encoded[place].append((HELD, msgspec.msgpack.encode(elements)))
            return
        structs = pa.StructArray.from_arrays(
            [pa.array([timestamp for timestamp, _ in flat], pa.int64()), array], names=["timestamp", "record"]
        )
        arrays[HELD] = _lists(held, structs)

    # Rows to pages

    def check(self, stored: pa.Schema) -> None:
        """Raises `StateError` where a savepoint's columns do not fit what the operator declares."""
        for name, column, _ in self._columns():
            if name in stored.names and column.arrow is not None and stored.field(name).type != column.arrow:
                column.migration(stored.field(name).type)
        known = {name for name, _, _ in self._columns()} | {EVENT_TIMERS, PROCESSING_TIMERS, HELD, ENCODED}
        for name in self._keys:
            if name not in stored.names and self._keys[name].arrow is not None:
                raise StateError(
                    f"{self.where} is keyed by {', '.join(self._keys)}, and the savepoint's columns are"
                    f" {', '.join(stored.names)}; key it as it was, or give it another uid"
                )
        lost = [f.name for f in stored if f.name not in known and (f.metadata or {}).get(ROLE) == b"key"]
        if lost:
            raise StateError(
                f"{self.where} is keyed by {', '.join(self._keys)}, and the savepoint's key also has"
                f" {', '.join(lost)}; key it as it was, or give it another uid"
            )

    def _columns(self) -> list[tuple[str, TypedColumn, str]]:
        """Each column with its name here and that of its state."""
        return [
            *((name, column, name) for name, column in self._keys.items()),
            *((self._state_columns[name], column, name) for name, column in self._states.items()),
            *((self._broadcast_columns[name], column, name) for name, column in self._broadcast.items()),
        ]

    def keys_of(self, batch: pa.RecordBatch) -> list[Hashable]:
        """The key of each row, None for the row of the broadcast state."""
        encoded = _encoded_of(batch)
        columns = [self._decoded(batch, name, column, encoded) for name, column in self._keys.items()]
        return list(zip(*columns, strict=True)) if self._several else columns[0]

    def content(self, batch: pa.RecordBatch) -> Content:
        """What a page holds that has these rows; rows of broadcast state are not in it."""
        encoded = _encoded_of(batch)
        keys = self.keys_of(batch)
        cells: list[dict[str, Any]] = [{} for _ in keys]
        for name, column in self._states.items():
            for cell, value in zip(
                cells, self._decoded(batch, self._state_columns[name], column, encoded), strict=True
            ):
                if value is not None:
                    cell[name] = value
        found = Content({key: cell for key, cell in zip(keys, cells, strict=True) if cell})
        for place, entries in enumerate(encoded):
            for name, data in entries:
                self._put_undeclared(found, keys[place], cells[place], name, data)
        found.event_timers = _timers_of(batch, EVENT_TIMERS, keys)
        found.processing_timers = _timers_of(batch, PROCESSING_TIMERS, keys)
        found.held += self._held_of(batch, keys)
        return found

    def broadcast_of(self, batch: pa.RecordBatch) -> dict[str, Any] | None:
        """The operator's broadcast state, if its row is among these."""
        if not self._broadcast:
            return None
        places = [place for place, key in enumerate(self.keys_of(batch)) if self.is_none(key)]
        if not places:
            return None
        row = batch.slice(places[0], 1)
        encoded = _encoded_of(row)
        found = {n: self._decoded(row, self._broadcast_columns[n], c, encoded)[0] for n, c in self._broadcast.items()}
        return {name: value for name, value in found.items() if value is not None}

    def is_none(self, key: Hashable) -> bool:
        """Whether this is no key: the row holds broadcast state."""
        return key is None or (self._several and all(part is None for part in key))  # type: ignore[attr-defined]

    def _decoded(
        self, batch: pa.RecordBatch, name: str, column: TypedColumn, encoded: Sequence[Sequence[tuple[str, bytes]]]
    ) -> list[Any]:
        apart: Encoded = {place: data for place, entries in enumerate(encoded) for n, data in entries if n == name}
        if name not in batch.schema.names:
            return [column.decoded(apart[i]) if i in apart else None for i in range(batch.num_rows)]
        return column.decode(batch.column(name), apart)

    def _put_undeclared(self, content: Content, key: Hashable, cell: dict[str, Any], name: str, data: bytes) -> None:
        if name == HELD:
            decoder = msgspec.msgpack.Decoder(list[tuple[int, self._held.python]])  # type: ignore[name-defined]
            content.held += [(timestamp, key, record) for timestamp, record in decoder.decode(data)]
        elif not any(name == known for known, _, _ in self._columns()):
            cell[name] = msgspec.Raw(data)
            content.keys[key] = cell

    def _held_of(self, batch: pa.RecordBatch, keys: Sequence[Hashable]) -> list[tuple[int, Hashable, Any]]:
        if HELD not in batch.schema.names or batch.column(HELD).null_count == batch.num_rows:
            return []
        lists = batch.column(HELD)
        flat = lists.flatten()
        records = self._held.decode(flat.field("record"), {})
        return list(zip(flat.field("timestamp").to_pylist(), _owners(lists, keys), records, strict=True))


_NOTHING: Mapping[str, Any] = {}


def _whole(value: Any) -> Any:
    """A large list or map in one piece, anything else as it is."""
    if not isinstance(value, Chunked):
        return value
    return list(value) if isinstance(value, LargeList) else dict(value.items())  # type: ignore[attr-defined]


def _by_key(timers: Iterable[tuple[int, Hashable, int]]) -> dict[Hashable, list[tuple[int, int]]]:
    found: dict[Hashable, list[tuple[int, int]]] = {}
    for timestamp, key, generation in timers:
        held = found.get(key)
        if held is None:
            found[key] = [(timestamp, generation)]
        else:
            held.append((timestamp, generation))
    return found


def _timers(keys: Sequence[Hashable], timers: Mapping[Hashable, list[tuple[int, int]]]) -> pa.Array:
    if not timers:
        return pa.nulls(len(keys), _TIMERS)
    own = [timers.get(key, ()) for key in keys]
    flat = [timer for each in own for timer in each]
    structs = pa.StructArray.from_arrays(
        [pa.array([t for t, _ in flat], pa.int64()), pa.array([n for _, n in flat], pa.int64())],
        names=["timestamp", "generation"],
    )
    return _lists(own, structs)


def _lists(elements: Sequence[Sequence[Any]], flat: pa.Array) -> pa.ListArray:
    """Lists of the flat elements; null where there is none."""
    offsets = [0]
    for each in elements:
        offsets.append(offsets[-1] + len(each))
    missing = pa.array([not each for each in elements], pa.bool_())
    return pa.ListArray.from_arrays(pa.array(offsets, pa.int32()), flat, mask=missing)


def _owners(lists: pa.ListArray, keys: Sequence[Hashable]) -> list[Hashable]:
    """The key of each element of all lists."""
    sizes = lists.value_lengths().to_pylist()
    return [key for key, size in zip(keys, sizes, strict=True) for _ in range(size or 0)]


def _timers_of(batch: pa.RecordBatch, name: str, keys: Sequence[Hashable]) -> list[tuple[int, Hashable, int]]:
    lists = batch.column(name) if name in batch.schema.names else None
    if lists is None or lists.null_count == batch.num_rows:
        return []
    flat = lists.flatten()
    timestamps, generations = flat.field("timestamp").to_pylist(), flat.field("generation").to_pylist()
    return list(zip(timestamps, _owners(lists, keys), generations, strict=True))


def _encoded_of(batch: pa.RecordBatch) -> list[list[tuple[str, bytes]]]:
    if ENCODED not in batch.schema.names or batch.column(ENCODED).null_count == batch.num_rows:
        return [[] for _ in range(batch.num_rows)]
    return [entries or [] for entries in batch.column(ENCODED).to_pylist()]
