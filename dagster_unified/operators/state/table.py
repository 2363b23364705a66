"""The keyed state of one operator as a table: a row for each key, with a column for each state.

A savepoint holds this table. Besides the states a row has the key's timers and its held-back elements, as lists, and in
`ENCODED` the values that Arrow has no type for, by the name of their column. A row without a key holds the operator's
broadcast state. Operator state has a row for each subtask, whose number is the key. Knows pages and descriptors; no
engine.
"""

from __future__ import annotations

from collections.abc import Collection, Hashable, Iterable, Iterator, Mapping, Sequence
from itertools import accumulate, repeat
from typing import Any, NamedTuple

import msgspec
import pyarrow as pa

from dagster_unified.errors import StateError, nearest
from dagster_unified.operators.state.chunks import SpilledCollection, SpilledList
from dagster_unified.operators.state.columns import Encoded, TypedColumn, same_type
from dagster_unified.operators.state.descriptors import StateDescriptor
from dagster_unified.operators.state.pages import Block, Columns, Content
from dagster_unified.records import shorten, type_name

EVENT_TIMERS, PROCESSING_TIMERS, HELD, ENCODED = "__event_timers", "__processing_timers", "__held_back", "__encoded"

TIMERS = pa.list_(pa.struct([("timestamp", pa.int64()), ("generation", pa.int64())]))
_ENCODED = pa.map_(pa.string(), pa.binary())

LARGEST = (1 << 31) - (1 << 20)
"""Bytes that the state of one key may have: Arrow counts those of a column, and Spark those of a row, with 31 bits."""

ROLE = b"role"
"""In a field's metadata: `key`, `state`, `broadcast`, `list` or `union`; none for the library's own columns."""

SUBTASK_KEY = "subtask"
"""The column of the key of operator state: the number of the subtask."""

STATE = b"name"
"""In a field's metadata: the name of the key's column, or of the state, that it holds."""


class KeyShape(NamedTuple):
    """The columns of an operator's key, and its type: for several columns the type of a tuple of them."""

    names: tuple[str, ...]
    python: Any


class StateTable:
    """The columns of one operator's state; turns pages into rows and rows into pages.

    `where` names the operator in errors. `record` is the type of the elements that it holds back.
    """

    def __init__(
        self,
        where: str,
        key: KeyShape,
        record: Any,
        states: Mapping[str, StateDescriptor[Any]],
        broadcast: Mapping[str, StateDescriptor[Any]],
        lists: Mapping[str, str] | None = None,
    ) -> None:
        self.where = where
        self._roles = lists or {}
        """The roles of states that are operator state, `list` or `union` by name."""

        self._several = len(key.names) > 1
        kinds = key.python.__args__ if self._several else (key.python,)
        self._keys = {
            name: TypedColumn(f"{where}: key '{name}'", kind) for name, kind in zip(key.names, kinds, strict=True)
        }
        self._states = {name: d.column(f"{where}: state '{name}'") for name, d in states.items()}
        self._broadcast = {name: d.column(f"{where}: broadcast state '{name}'") for name, d in broadcast.items()}
        self._held_back = TypedColumn(f"{where}: held-back element", record)
        self._large = {name for name, d in states.items() if d.spilled is not None}
        self._state_columns = {name: self._free(name, "state") for name in states}
        self._broadcast_columns = {name: self._free(name, "broadcast state") for name in broadcast}
        self.schema = self._schema()

    def _free(self, name: str, kind: str) -> str:
        """A state's column name, which differs from the state's name where the key has a column of that name."""
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
                    state_role = self._roles.get(name, role) if role == "state" else role
                    metadata = {ROLE: state_role.encode(), STATE: name.encode()}
                    fields.append(pa.field(names[name], column.arrow, metadata=metadata))
        fields += [pa.field(EVENT_TIMERS, TIMERS), pa.field(PROCESSING_TIMERS, TIMERS)]
        if self._held_back.arrow is not None:
            held_struct = pa.struct([("timestamp", pa.int64()), ("record", self._held_back.arrow)])
            fields.append(pa.field(HELD, pa.list_(held_struct)))
        fields.append(pa.field(ENCODED, _ENCODED))
        return pa.schema(fields)

    # Pages to rows

    def batches(self, content: Block) -> Iterator[pa.RecordBatch]:
        """A row for each key that has state, timers or held-back elements, in as many batches as needed.

        Raises `StateError` for a key that has more than `LARGEST` bytes.
        """
        try:
            yield self.rows(content)
        except _TooLargeError as error:
            keys = list(_all_keys(content.content()))
            if len(keys) < 2:
                raise StateError(
                    f"{error.what} of key {shorten(keys[0])} is too large for a savepoint, which holds up to"
                    f" {LARGEST:,} bytes of a key; keep less of it, for example with a time to live, or spread what it"
                    " holds over several keys"
                ) from error
        else:
            return
        later = set(keys[len(keys) // 2 :])
        for half in content.content().split(later.__contains__, 2):
            yield from self.batches(half)

    def rows(self, content: Block) -> pa.RecordBatch:
        """A row for each key that has state, timers or held-back elements."""
        apart = Apart()
        if isinstance(content, Columns):
            with_state, columns = content.keys, dict(zip(content.names, content.values, strict=True))
        else:
            with_state, columns = self._columns_of(content.content(), apart)
        held_back = _by_key((key, (timestamp, record)) for timestamp, key, record in content.held_back)
        without = _keys_without_state(content, with_state, held_back)
        order = [*with_state, *without] if without else with_state
        arrays = self._key_arrays(order, apart)
        for name, values in columns.items():
            if without:
                values = [*values, *repeat(None, len(without))]
            self._put(arrays, self._state_columns[name], self._states[name], values, apart)
        arrays[EVENT_TIMERS] = timer_lists(order, content.event_timers)
        arrays[PROCESSING_TIMERS] = timer_lists(order, content.processing_timers)
        self._put_held_back(arrays, [held_back.get(key, ()) for key in order], apart)
        arrays[ENCODED] = apart.array(len(order))
        return self._batch(arrays, len(order))

    def _columns_of(self, content: Content, apart: Apart) -> tuple[list[Hashable], dict[str, list[Any]]]:
        """The keys that have state, and a column of values for each declared state."""
        states = content.keys
        if not all(states.values()):
            states = {key: state for key, state in states.items() if state}
        cells = list(states.values())
        names = set().union(*cells)
        columns: dict[str, list[Any]] = {}
        for name in names & self._states.keys():
            columns[name] = [cell.get(name) for cell in cells]
            if name in self._large:
                columns[name] = [_whole(value) for value in columns[name]]
        for name in names - self._states.keys():  # what the operator has not declared yet is as it was stored
            for place, cell in enumerate(cells):
                if name in cell:
                    apart.add(place, name, _as_stored(cell[name]))
        return list(states), columns

    def broadcast_row(self, maps: Mapping[str, Any]) -> pa.RecordBatch:
        """The row of the operator's broadcast state; raises `StateError` where it has more than `LARGEST` bytes."""
        try:
            return self._broadcast_row(maps)
        except _TooLargeError as error:
            raise StateError(
                f"{error.what} is too large for a savepoint, which holds up to {LARGEST:,} bytes of broadcast state;"
                " keep less of it"
            ) from error

    def _broadcast_row(self, maps: Mapping[str, Any]) -> pa.RecordBatch:
        apart = Apart()
        arrays: dict[str, pa.Array] = {}
        for name, column in self._broadcast.items():
            self._put(arrays, self._broadcast_columns[name], column, [maps.get(name)], apart)
        arrays[ENCODED] = apart.array(1)
        return self._batch(arrays, 1)

    def _batch(self, arrays: Mapping[str, pa.Array], size: int) -> pa.RecordBatch:
        columns = [arrays[f.name] if f.name in arrays else _null_array(size, f.type) for f in self.schema]
        if sum(column.nbytes for column in columns) > LARGEST:
            raise _TooLargeError(self._name_in_errors(max(arrays, key=lambda name: arrays[name].nbytes)))
        return pa.RecordBatch.from_arrays(columns, schema=self.schema)

    def _name_in_errors(self, name: str) -> str:
        what = {column: kind.what for column, kind, _ in self._columns()}
        what |= {HELD: f"{self.where}: what is held back", ENCODED: f"{self.where}: state"}
        return what.get(name, f"{self.where}: timers")

    def _key_arrays(self, keys: Sequence[Hashable], apart: Apart) -> dict[str, pa.Array]:
        arrays: dict[str, pa.Array] = {}
        columns: Iterable[Sequence[Any]] = [keys]
        if self._several:
            columns = zip(*keys, strict=True) if keys else [()] * len(self._keys)
        for (name, column), values in zip(self._keys.items(), columns, strict=True):
            self._put(arrays, name, column, values, apart)
        return arrays

    @staticmethod
    def _put(arrays: dict[str, pa.Array], name: str, column: TypedColumn, values: Sequence[Any], apart: Apart) -> None:
        try:
            array, encoded = column.encode(values)
        except pa.ArrowCapacityError as error:
            raise _TooLargeError(column.what) from error
        except OverflowError as error:
            beyond = next((value for value in values if not _fits(column, value)), None)
            raise StateError(f"{column.what} cannot be stored: {error}; it was given {shorten(beyond)}") from error
        if isinstance(array, pa.ChunkedArray):  # so Arrow makes an array that is too large for one
            raise _TooLargeError(column.what)
        if array is not None:
            arrays[name] = array
        for place, data in encoded.items():
            apart.add(place, name, data)

    def _put_held_back(
        self, arrays: dict[str, pa.Array], held_back: Sequence[Sequence[tuple[int, Any]]], apart: Apart
    ) -> None:
        flat = [element for elements in held_back for element in elements]
        if not flat:
            return
        array, encoded = self._held_back.encode([record for _, record in flat])
        if array is None or encoded:
            for place, elements in enumerate(held_back):
                if elements:
                    apart.add(place, HELD, msgspec.msgpack.encode(elements))
            return
        structs = pa.StructArray.from_arrays(
            [pa.array([timestamp for timestamp, _ in flat], pa.int64()), array], names=["timestamp", "record"]
        )
        arrays[HELD] = _lists(list(map(len, held_back)), structs)

    # Rows to pages

    def check(self, stored: pa.Schema) -> None:
        """Raise `StateError` where a savepoint's columns do not fit the operator's declarations."""
        for name, column, _ in self._columns():
            if name in stored.names and column.arrow is not None and stored.field(name).type != column.arrow:
                column.check(stored.field(name).type)
        known = {name for name, _, _ in self._columns()} | {EVENT_TIMERS, PROCESSING_TIMERS, HELD, ENCODED}
        for name in self._keys:
            if name not in stored.names and self._keys[name].arrow is not None:
                raise StateError(
                    f"{self.where} is keyed by {', '.join(self._keys)}, and the savepoint's columns are"
                    f" {', '.join(stored.names)}; key it as it was, or give it another uid"
                )
            if name in stored.names and not _is_key(stored.field(name).type, self._keys[name].arrow):
                raise StateError(
                    f"{self.where} is keyed by '{name}' of type {type_name(self._keys[name].python)}, and the savepoint"
                    f" by {stored.field(name).type}; key it as it was, or give it another uid"
                )
        roles = {f.name: (f.metadata or {}).get(ROLE) for f in stored if f.name not in known}
        lost = [name for name, role in roles.items() if role == b"key"]
        if lost:
            raise StateError(
                f"{self.where} is keyed by {', '.join(self._keys)}, and the savepoint's key also has"
                f" {', '.join(lost)}; key it as it was, or give it another uid"
            )
        unclaimed = [name for name, role in roles.items() if role is not None]
        if unclaimed:
            declared = [*self._state_columns.values(), *self._broadcast_columns.values()]
            close = nearest(unclaimed[0], declared)
            advice = f"{close} Or" if close else ";"
            raise StateError(
                f"{self.where} declares no state '{unclaimed[0]}', which the savepoint has{advice}"
                " declare it in open(), or drop it with execution.savepoint.ignore-unclaimed-state=true"
            )

    def _columns(self) -> list[tuple[str, TypedColumn, str]]:
        """Each column, with its name in the table and the name of its state."""
        return [
            *((name, column, name) for name, column in self._keys.items()),
            *((self._state_columns[name], column, name) for name, column in self._states.items()),
            *((self._broadcast_columns[name], column, name) for name, column in self._broadcast.items()),
        ]

    def keys_of(self, batch: pa.RecordBatch, apart: Apart | None = None) -> list[Hashable]:
        """The key of each row; None for the row of the broadcast state."""
        apart = apart or Apart.of(batch)
        columns = [self._decoded(batch, name, column, apart) for name, column in self._keys.items()]
        return list(zip(*columns, strict=True)) if self._several else columns[0]

    def content(self, batch: pa.RecordBatch) -> Content:
        """The content of a page with these rows, without rows of broadcast state."""
        apart = Apart.of(batch)
        keys = self.keys_of(batch, apart)
        cells: list[dict[str, Any]] = [{} for _ in keys]
        for name, column in self._states.items():
            values = self._decoded(batch, self._state_columns[name], column, apart)
            for cell, value in zip(cells, values, strict=True):
                if value is not None:
                    cell[name] = value
        content = Content(dict(zip(keys, cells, strict=True)))
        for place, name, data in apart.others({name for name, _, _ in self._columns()}):
            if name == HELD:
                decoder = msgspec.msgpack.Decoder(list[tuple[int, self._held_back.python]])  # type: ignore[name-defined]
                content.held_back += [(timestamp, keys[place], record) for timestamp, record in decoder.decode(data)]
            else:
                cells[place][name] = msgspec.Raw(data)
        if not all(cells):
            content.keys = {key: cell for key, cell in content.keys.items() if cell}
        content.event_timers = _timers_of(batch, EVENT_TIMERS, keys)
        content.processing_timers = _timers_of(batch, PROCESSING_TIMERS, keys)
        content.held_back += self._held_back_of(batch, keys)
        return content

    def columns(self, batch: pa.RecordBatch) -> Columns | None:
        """The content of a page with these rows, by column; None where keys do not all have the same states.

        Also None for held-back elements, for a value that Arrow cannot hold, and where a state is a collection.
        """
        if self._large or any(
            name in batch.schema.names and batch.column(name).null_count < batch.num_rows for name in (HELD, ENCODED)
        ):
            return None
        values: dict[str, list[Any]] = {}
        for name, column in sorted(self._states.items()):
            stored = self._state_columns[name]
            nulls = batch.column(stored).null_count if stored in batch.schema.names else batch.num_rows
            if 0 < nulls < batch.num_rows:
                return None
            if not nulls:
                values[name] = column.decode(batch.column(stored), {})
        if not values:
            return None
        keys = self.keys_of(batch)
        events, moments = _timers_of(batch, EVENT_TIMERS, keys), _timers_of(batch, PROCESSING_TIMERS, keys)
        return Columns(tuple(values), keys, list(values.values()), event_timers=events, processing_timers=moments)

    def broadcast_of(self, batch: pa.RecordBatch) -> dict[str, Any] | None:
        """The operator's broadcast state, if its row is in the batch."""
        if not self._broadcast:
            return None
        places = self.without_key(self.keys_of(batch))
        if not places:
            return None
        row = batch.slice(places[0], 1)
        apart = Apart.of(row)
        maps = {n: self._decoded(row, self._broadcast_columns[n], c, apart)[0] for n, c in self._broadcast.items()}
        return {name: value for name, value in maps.items() if value is not None}

    def without_key(self, keys: Sequence[Hashable]) -> list[int]:
        """The places of rows without a key: they hold broadcast state."""
        nothing = (None,) * len(self._keys) if self._several else None
        return [place for place, key in enumerate(keys) if key == nothing] if nothing in keys else []

    def _decoded(self, batch: pa.RecordBatch, name: str, column: TypedColumn, apart: Apart) -> list[Any]:
        encoded = apart.of_column(name)
        if name not in batch.schema.names:
            return [column.decoded(encoded[i]) if i in encoded else None for i in range(batch.num_rows)]
        return column.decode(batch.column(name), encoded)

    def _held_back_of(self, batch: pa.RecordBatch, keys: Sequence[Hashable]) -> list[tuple[int, Hashable, Any]]:
        if HELD not in batch.schema.names or batch.column(HELD).null_count == batch.num_rows:
            return []
        lists = batch.column(HELD)
        flat = lists.flatten()
        records = self._held_back.decode(flat.field("record"), {})
        return list(zip(flat.field("timestamp").to_pylist(), _owners(lists, keys), records, strict=True))


class Apart:
    """Values that a batch's typed columns cannot hold, as msgpack, by column name and row."""

    def __init__(self) -> None:
        self._columns: dict[str, Encoded] = {}

    @classmethod
    def of(cls, batch: pa.RecordBatch) -> Apart:
        """The encoded values in a batch."""
        apart = cls()
        if ENCODED in batch.schema.names and batch.column(ENCODED).null_count < batch.num_rows:
            for place, entries in enumerate(batch.column(ENCODED).to_pylist()):
                for name, data in entries or ():
                    apart.add(place, name, data)
        return apart

    def add(self, place: int, name: str, data: bytes) -> None:
        self._columns.setdefault(name, {})[place] = data

    def of_column(self, name: str) -> Encoded:
        return self._columns.get(name, {})

    def others(self, known: Collection[str]) -> Iterator[tuple[int, str, bytes]]:
        """The values of all columns but these."""
        for name, encoded in self._columns.items():
            if name not in known:
                for place, data in encoded.items():
                    yield place, name, data

    def array(self, size: int) -> pa.Array:
        """The column `ENCODED` with this many rows."""
        if not self._columns:
            return pa.nulls(size, _ENCODED)
        rows: list[list[tuple[str, bytes]] | None] = [None] * size
        for name, encoded in self._columns.items():
            for place, data in encoded.items():
                entries = rows[place]
                if entries is None:
                    entries = rows[place] = []
                entries.append((name, data))
        return pa.array(rows, _ENCODED)


class _TooLargeError(Exception):
    """Rows that Arrow cannot hold in one batch; `what` is the largest of their columns."""

    def __init__(self, what: str) -> None:
        super().__init__(what)
        self.what = what


def _whole(value: Any) -> Any:
    """A large list or map in one piece; anything else as it is."""
    if not isinstance(value, SpilledCollection):
        return value
    return list(value) if isinstance(value, SpilledList) else dict(value.items())  # type: ignore[attr-defined]


def _null_array(size: int, kind: pa.DataType) -> pa.Array:
    """This many nulls. The structs of `pa.nulls` are null in their fields too, which Parquet may refuse."""
    return pa.array([None] * size, kind) if pa.types.is_struct(kind) else pa.nulls(size, kind)


def _as_stored(value: Any) -> bytes:
    """A value of an undeclared state, as it was stored."""
    if isinstance(value, SpilledCollection) and isinstance(value.inline, msgspec.Raw):
        value.inline = msgspec.msgpack.decode(value.inline, type=value.undeclared)
    return msgspec.msgpack.encode(_whole(value))


def _by_key(pairs: Iterable[tuple[Hashable, tuple[int, Any]]]) -> dict[Hashable, list[tuple[int, Any]]]:
    by_key: dict[Hashable, list[tuple[int, Any]]] = {}
    for key, element in pairs:
        by_key.setdefault(key, []).append(element)
    return by_key


def _all_keys(content: Content) -> dict[Hashable, None]:
    """The keys that have state, timers or held-back elements, in order."""
    others = (content.event_timers, content.processing_timers, content.held_back)
    keys = dict.fromkeys(content.keys)
    return keys | {key: None for entries in others for _, key, _ in entries}


def _keys_without_state(
    content: Block, with_state: Sequence[Hashable], held_back: Mapping[Hashable, object]
) -> set[Hashable]:
    owners = [[key for _, key, _ in timers] for timers in (content.event_timers, content.processing_timers)]
    others = [some for some in (*owners, list(held_back)) if some and some != with_state]
    return set().union(*others).difference(with_state) if others else set()


def timer_lists(keys: Sequence[Hashable], timers: Sequence[tuple[int, Hashable, int]]) -> pa.Array:
    """The timers of each key as lists; the timers of one key keep their order."""
    if not timers:
        return pa.nulls(len(keys), TIMERS)
    owners = [key for _, key, _ in timers]
    moments = pa.array([timestamp for timestamp, _, _ in timers], pa.int64())
    numbers = pa.array([generation for _, _, generation in timers], pa.int64())
    if owners == keys:
        each = pa.array(range(len(keys) + 1), pa.int32())
        return pa.ListArray.from_arrays(each, _timer_structs(moments, numbers))
    place = {key: i for i, key in enumerate(keys)}
    places = [place[owner] for owner in owners]
    sizes = [0] * len(keys)
    for i in places:
        sizes[i] += 1
    order = pa.array(sorted(range(len(places)), key=places.__getitem__), pa.int64())
    return _lists(sizes, _timer_structs(moments.take(order), numbers.take(order)))


def _timer_structs(timestamps: pa.Array, generations: pa.Array) -> pa.StructArray:
    return pa.StructArray.from_arrays([timestamps, generations], names=["timestamp", "generation"])


def _fits(column: TypedColumn, value: Any) -> bool:
    try:
        column.encode([value])
    except OverflowError:
        return False
    return True


def _lists(sizes: Sequence[int], flat: pa.Array) -> pa.ListArray:
    """Lists with these sizes, cut from the flat elements; null for a size of 0."""
    offsets = pa.array([0, *accumulate(sizes)], pa.int32())
    if all(sizes):
        return pa.ListArray.from_arrays(offsets, flat)
    return pa.ListArray.from_arrays(offsets, flat, mask=pa.array([not size for size in sizes], pa.bool_()))


def _owners(lists: pa.ListArray, keys: Sequence[Hashable]) -> Sequence[Hashable]:
    sizes = [size or 0 for size in lists.value_lengths().to_pylist()]
    if sizes.count(1) == len(sizes):
        return keys
    return [key for key, size in zip(keys, sizes, strict=True) for _ in range(size)]


def _timers_of(batch: pa.RecordBatch, name: str, keys: Sequence[Hashable]) -> list[tuple[int, Hashable, int]]:
    lists = batch.column(name) if name in batch.schema.names else None
    if lists is None or lists.null_count == batch.num_rows:
        return []
    flat = lists.flatten()
    timestamps, generations = flat.field("timestamp").to_pylist(), flat.field("generation").to_pylist()
    return list(zip(timestamps, _owners(lists, keys), generations, strict=True))


def _is_key(stored: pa.DataType, declared: pa.DataType | None) -> bool:
    """Whether stored keys have the records' type: with another type, equal keys may not be found."""
    return declared is None or same_type(stored, declared)
