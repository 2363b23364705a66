"""The format of a savepoint: a folder with a table for each operator, and a manifest with schemas, written last."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import PurePosixPath
from typing import TYPE_CHECKING, Any
from uuid import uuid4
from zlib import crc32

import msgspec
import pyarrow as pa
from msgspec.structs import replace

from dagster_unified.connectors.protocol.positions import Position
from dagster_unified.errors import StateError
from dagster_unified.operators.drivers.key_groups import ControlEvent
from dagster_unified.operators.state.table import ROLE, STATE
from dagster_unified.storage.paths import put, remove_tree, storage_path

if TYPE_CHECKING:
    from upath import UPath

FORMAT = 1
NAME = "manifest.json"

COPY = "savepoint.json"
"""Marks a folder with a copy of a STREAMING job's checkpoint."""


class DataFile(msgspec.Struct, frozen=True):
    """A Parquet file, relative to the savepoint, and its size in bytes.

    Parquet has checksums of its pages, and none of the footer, which says where they are and how many rows they hold.
    """

    path: str
    bytes: int
    footer_bytes: int
    """Bytes from the start of the footer to the end of the file."""

    footer_crc: int
    """The CRC-32 of these bytes."""


class Column(msgspec.Struct, frozen=True):
    """A column of an operator's table.

    `role` is `key`, `state`, `broadcast`, `list` or `union` (operator state), `record` (of records on their way), or
    empty for the library's own; `state` the name of the state that it holds.
    """

    name: str
    type: str
    role: str = ""
    state: str = ""


class OperatorState(msgspec.Struct, frozen=True):
    """The state of one operator. `schema` is that of its table, as Spark writes schemas."""

    uid: str
    name: str
    folder: str
    columns: list[Column]
    schema: str
    rows: int
    bytes: int
    files: list[DataFile]
    subtasks: int = 0
    """How many subtasks the operator state has; 0 for keyed state, and where that is unknown."""


class Feedback(msgspec.Struct, frozen=True):
    """Records that wait in an iteration for the operator with the table's uid."""

    table: OperatorState
    broadcast: bool = False
    """Whether the operator gets them by broadcast."""

    replayed: bool = False
    """Whether the operator gets them in every epoch."""


class IterationState(msgspec.Struct, frozen=True):
    """Where an iteration was: the number of its last epoch, and the records that wait for the next one.

    Those of an unbounded one were fed back in its last epoch. A bounded one iterates when its input ends: before that
    it has had no round (-1), and all its input waits.
    """

    uid: str
    name: str
    round: int
    feedback: list[Feedback] = []
    bounded: bool = False

    @property
    def kind(self) -> str:
        """`bounded` or `unbounded`."""
        return "bounded" if self.bounded else "unbounded"


class Manifest(msgspec.Struct, frozen=True, kw_only=True):
    """The content of a savepoint. Times are milliseconds since the epoch."""

    format: int = FORMAT
    library: str
    pipeline: str
    mode: str
    """The mode that wrote it."""

    taken: int
    run: str = ""
    """In BATCH: the execution that wrote it; `partition` is the partition that left this state."""

    partition: str = ""
    partition_end: int | None = None
    """The end of that partition, if it is in time."""

    reason: str = ""
    fingerprint: str = ""
    """The fingerprint of the code that wrote it."""

    max_parallelism: int
    event: ControlEvent
    """The time that all operators have reached: watermarks by uid, and each assigner's latest event time."""

    operators: list[OperatorState]
    iterations: list[IterationState] = []
    """The iterations to which something came; the state of the operators of unbounded ones is among `operators`."""

    handed_on: list[OperatorState] = []
    """The records that one query of a STREAMING job has sent to another after an iteration, and that it has not read.

    Each is a table of records, by the uid of the log between them.
    """

    positions: dict[str, Position] = {}
    """The position of each source, by its uid."""

    epochs: dict[str, int] = {}
    """The last epoch that each query of a STREAMING job had committed."""

    checksum: str = ""
    """The CRC-32 of the manifest without it, as msgspec writes it, in hexadecimal."""

    def operator(self, uid: str) -> OperatorState | None:
        return next((state for state in self.operators if state.uid == uid), None)

    def tables(self) -> list[OperatorState]:
        feedback = [records.table for iteration in self.iterations for records in iteration.feedback]
        return [*self.operators, *feedback, *self.handed_on]


class _Written(msgspec.Struct, frozen=True):
    """The part of a manifest that every format has."""

    format: int
    library: str


def folder_of(uid: str) -> str:
    """The folder of an operator: its uid, where a path can have it."""
    plain = re.sub(r"[^A-Za-z0-9_.-]", "_", uid)
    return plain if plain == uid and not uid.startswith(".") else f"{plain.lstrip('.')}-{crc32(uid.encode()):08x}"


def find(folder: UPath) -> Manifest | None:
    """Read the manifest of the savepoint in a folder; None where there is none."""
    return read(folder)[1] if (folder / NAME).exists() else None


def check_free(path: str, what: str, replaces: Callable[[Manifest], bool] = lambda _: False) -> UPath:
    """The folder of a savepoint to be written.

    Raises `StateError` where there is a savepoint already that this one does not replace.
    """
    folder = storage_path(path, what)
    existing = find(folder)
    if existing is not None and not replaces(existing):
        raise StateError(f"{what}: there is a savepoint in {folder} already; give another path, or remove it")
    return folder


def new_attempt() -> str:
    """A new folder for the tables of one attempt, relative to the savepoint: no two attempts share one."""
    return f"operators-{uuid4().hex[:12]}"


def commit(folder: UPath, manifest: Manifest, replaces: Callable[[Manifest], bool] = lambda _: False) -> None:
    """Write the manifest, which completes the savepoint, and remove the tables of other attempts.

    Raises `StateError` where another writer has made one meanwhile that this one does not replace.
    """
    check_free(str(folder), "savepoint", replaces)
    _put(folder, manifest)
    current = {PurePosixPath(table.folder).parts[0] for table in manifest.tables()}
    for other in folder.iterdir():
        if other.name.startswith("operators-") and other.name not in current:
            remove_tree(other)


def _put(folder: UPath, manifest: Manifest) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    text = msgspec.json.format(msgspec.json.encode(replace(manifest, checksum=_checksum(manifest))), indent=1)
    put(folder / NAME, text)


def read(path: str | UPath) -> tuple[UPath, Manifest]:
    """Read a savepoint's folder and manifest; raises `StateError` naming the file where it is not whole."""
    folder = storage_path(str(path), "savepoint")
    try:
        data = (folder / NAME).read_bytes()
    except (FileNotFoundError, NotADirectoryError, IsADirectoryError):
        if (folder / COPY).exists():
            raise StateError(
                f"the savepoint in {folder} is a copy of a checkpoint, without tables: they went to a path of their"
                " own, or its pipeline has native aggregates, or a source that cannot tell what was read of"
                " it; only `dagster-unified restore` takes it"
            ) from None
        raise StateError(
            f"there is no savepoint in {folder}: it has no {NAME}, which is written last; was it written to its end?"
        ) from None
    try:
        written = msgspec.json.decode(data, type=_Written)
        if written.format != FORMAT:
            raise StateError(
                f"{folder / NAME} is of a savepoint in format {written.format}, and this version reads {FORMAT}; use"
                f" the version that wrote it, {written.library}"
            )
        manifest = msgspec.json.decode(data, type=Manifest)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise StateError(f"{folder / NAME} is damaged: {error}; take the savepoint again") from error
    if manifest.checksum != _checksum(manifest):
        raise StateError(
            f"{folder / NAME} is damaged: its checksum is another; copy it again, or take the savepoint again"
        )
    for table in manifest.tables():
        for file in table.files:
            _check(folder / file.path, file.bytes)
    return folder, manifest


def _checksum(manifest: Manifest) -> str:
    return f"{crc32(msgspec.json.encode(replace(manifest, checksum=''))):08x}"


def _check(path: UPath, size: int) -> None:
    try:
        actual = path.stat().st_size
    except FileNotFoundError:
        raise StateError(f"{path} is missing, which the savepoint's manifest names; copy the whole folder") from None
    if actual != size:
        raise StateError(f"{path} has {actual} bytes, and the savepoint's manifest says {size}; copy the folder again")


_NAMES: dict[str, pa.DataType] = {
    "string": pa.string(),
    "long": pa.int64(),
    "integer": pa.int32(),
    "short": pa.int16(),
    "byte": pa.int8(),
    "double": pa.float64(),
    "float": pa.float32(),
    "boolean": pa.bool_(),
    "binary": pa.binary(),
    "date": pa.date32(),
    "timestamp": pa.timestamp("us", "UTC"),
    "timestamp_ntz": pa.timestamp("us"),
    "interval day to second": pa.duration("us"),
    "void": pa.null(),
}
_TYPES = {arrow: name for name, arrow in _NAMES.items()}
_DECIMAL = re.compile(r"decimal\((\d+),\s*(-?\d+)\)")


def from_spark(text: str) -> pa.Schema:
    """A schema that Spark wrote; raises `StateError` for a type that no state has."""
    return pa.schema([pa.field(f["name"], _arrow(f["type"], f["name"])) for f in json.loads(text)["fields"]])


def to_spark(schema: pa.Schema) -> str:
    """The same schema in Spark's JSON."""
    return json.dumps(_struct(schema))


SUBTASK_ROLES = ("list", "union")
"""The roles of operator state, whose key is a subtask."""

ROLES = ("key", "state", "broadcast", *SUBTASK_ROLES)


def table_schema(state: OperatorState, roles: Sequence[str] = ROLES) -> pa.Schema:
    """The columns of an operator's table; those with one of these roles have it in the metadata of their field."""
    columns = {column.name: column for column in state.columns if column.role in roles}
    return pa.schema([_with_role(field, columns) for field in from_spark(state.schema)])


def columns_of(schema: pa.Schema) -> list[Column]:
    """The manifest's entries for a table's columns."""
    columns = []
    for field in schema:
        metadata = field.metadata or {}
        role, state = metadata.get(ROLE, b"").decode(), metadata.get(STATE, b"").decode()
        columns.append(Column(field.name, str(field.type), role, state))
    return columns


def _with_role(field: pa.Field, columns: Mapping[str, Column]) -> pa.Field:
    column = columns.get(field.name)
    return field if column is None else field.with_metadata({ROLE: column.role, STATE: column.state})


def _arrow(kind: Any, where: str) -> pa.DataType:
    if isinstance(kind, str):
        decimal = _DECIMAL.fullmatch(kind)
        if decimal is not None:
            return pa.decimal128(int(decimal[1]), int(decimal[2]))
        if kind in _NAMES:
            return _NAMES[kind]
    elif kind["type"] == "array":
        return pa.list_(pa.field("element", _arrow(kind["elementType"], where)))
    elif kind["type"] == "map":
        return pa.map_(_arrow(kind["keyType"], where), _arrow(kind["valueType"], where))
    elif kind["type"] == "struct":
        return pa.struct([pa.field(f["name"], _arrow(f["type"], f"{where}.{f['name']}")) for f in kind["fields"]])
    raise StateError(f"column '{where}' has the type {kind}, which no state has; convert it first")


def _spark(kind: pa.DataType, where: str) -> Any:
    if pa.types.is_decimal128(kind):
        return f"decimal({kind.precision},{kind.scale})"
    if pa.types.is_list(kind):
        return {"type": "array", "elementType": _spark(kind.value_type, where), "containsNull": True}
    if pa.types.is_map(kind):
        key, value = _spark(kind.key_type, where), _spark(kind.item_type, where)
        return {"type": "map", "keyType": key, "valueType": value, "valueContainsNull": True}
    if pa.types.is_struct(kind):
        return _struct(list(kind))
    if kind in _TYPES:
        return _TYPES[kind]
    raise StateError(f"column '{where}' has the type {kind}, which no state has; convert it first")


def _struct(fields: Sequence[pa.Field] | pa.Schema) -> dict[str, Any]:
    columns = [{"name": f.name, "type": _spark(f.type, f.name), "nullable": True, "metadata": {}} for f in fields]
    return {"type": "struct", "fields": columns}
