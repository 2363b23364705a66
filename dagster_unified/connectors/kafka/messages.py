"""Kafka messages made from records, in Spark's workers: key, value, headers, partition, timestamp.

Messages of a transaction are staged on their way to the driver.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from itertools import repeat
from typing import Any, TypeAlias

import msgspec
import pyarrow as pa

from dagster_unified.arrow_types import has
from dagster_unified.connectors.kafka.formats import JsonFormat, ValueFormat
from dagster_unified.connectors.kafka.formats.base import check_keys, encode, object_of, spelled_type
from dagster_unified.connectors.kafka.formats.values import columns, plain
from dagster_unified.connectors.plain_values import not_finite
from dagster_unified.connectors.protocol.commits import StagedContent, StagingWriter, WriteAttempt
from dagster_unified.errors import PipelineError, SinkError, nearest
from dagster_unified.operators.failures import RAISED, user_failure
from dagster_unified.operators.time import to_millis
from dagster_unified.records import RecordType, shorten

Bytes: TypeAlias = bytes | str | None
Header: TypeAlias = tuple[str, bytes | None]
FieldOr: TypeAlias = str | Callable[[Any], Any]
"""The name of a field, or a function of a record."""

_JSON = JsonFormat()


class Messages(msgspec.Struct, frozen=True):
    """Messages by column, in the order of publishing. A column that is not needed is None."""

    keys: Sequence[bytes | None] | None
    values: Sequence[bytes | None]
    headers: Sequence[list[Header]] | None = None
    places: Sequence[int] | None = None
    """A number whose remainder by the topic's partitions is a message's partition."""

    timestamps: Sequence[int] | None = None
    """Milliseconds since the epoch."""

    def __len__(self) -> int:
        return len(self.values)

    def size(self) -> int:
        """About how many bytes they are."""
        parts: list[Iterable[bytes | None]] = [self.values] if self.keys is None else [self.keys, self.values]
        return sum(len(text) for part in parts for text in part if text is not None) + 16 * len(self)

    def last_of_each_key(self) -> Messages:
        """The last message of each key, in order: it would replace the others at once."""
        if self.keys is None:
            return self
        last = {key: place for place, key in enumerate(self.keys)}
        if len(last) == len(self):
            return self
        last_places = sorted(last.values())
        columns = (self.keys, self.values, self.headers, self.places, self.timestamps)
        return Messages(*(None if column is None else [column[place] for place in last_places] for column in columns))  # type: ignore[arg-type]


@dataclass(frozen=True)
class MessageFormat:
    """Which part of a record becomes which part of its message."""

    key: tuple[str, ...] | Callable[[Any], Bytes] | None = None
    value: FieldOr | None = None
    """A field of type str or bytes, or a function; else the record is written in `value_format`."""

    headers: Mapping[str, str] | Callable[[Any], Mapping[str, Bytes]] | None = None
    partition: FieldOr | None = None
    timestamp: str | None = None
    tombstone: FieldOr | None = None
    """Whether the message has no value, which deletes its key from a compacted topic."""

    value_format: ValueFormat = _JSON
    prefix: bytes = b""
    """The first bytes of each value in the format."""

    replaces: bool = False
    """Whether a message replaces those of its key, so that it needs a key."""

    def check(self, records: RecordType, where: str) -> None:
        """Raise `PipelineError` where a field is missing, or its type does not fit its part."""
        if self.value is None:
            self.value_format.check(records.names if records.shape == "class" else (), where)
            self.value_format.check_writing(self.value_format.value_type(records, records.names, where), where)
        headers = tuple(self.headers.values()) if isinstance(self.headers, Mapping) else ()
        self._check_key(records, where)
        for part, fields, fits in (
            ("value", (self.value,), _is_text),
            ("headers", headers, _is_text),
            ("partition", (self.partition,), pa.types.is_integer),
            ("timestamp", (self.timestamp,), lambda kind: pa.types.is_timestamp(kind) or pa.types.is_integer(kind)),
            ("tombstone", (self.tombstone,), pa.types.is_boolean),
        ):
            for field in fields:
                if isinstance(field, str) and not fits(_type(records, field, where)):
                    raise PipelineError(
                        f"{where}: {part}: the field '{field}' is {_type(records, field, where)}, and {_WANTED[part]}"
                        " is needed"
                    )
        if isinstance(self.partition, str) and records.schema.field(self.partition).nullable:
            raise PipelineError(
                f"{where}: partition: the field '{self.partition}' may be None, and None is no partition; declare it"
                " without None, or give a function that says where such a record goes"
            )

    def _check_key(self, records: RecordType, where: str) -> None:
        names = self.key if isinstance(self.key, tuple) else ()
        for name in names:
            _type(records, name, where)
        for column in columns(spelled_type(records, names, where)) if names else ():
            try:
                check_keys(column.type, f"key: the field '{column.name}'")
            except ValueError as error:
                raise PipelineError(f"{where}: {error}") from None

    def fields(self, records: RecordType) -> tuple[str, ...]:
        """The fields that parts are made of, in the record's order; only these are converted, as that costs time."""
        if self.value is None:
            return records.names
        parts = [self.value, self.partition, self.timestamp, self.tombstone]
        parts += self.key if isinstance(self.key, tuple) else ()
        parts += self.headers.values() if isinstance(self.headers, Mapping) else ()
        return tuple(name for name in records.names if name in parts)


_WANTED = {
    "value": "str or bytes",
    "headers": "str or bytes",
    "partition": "int",
    "timestamp": "a datetime, or an int of milliseconds since the epoch,",
    "tombstone": "bool",
}


class MessageEncoder:
    """Makes messages from the records of one stream, in a worker."""

    def __init__(self, message_format: MessageFormat, records: RecordType, where: str) -> None:
        self._format, self._records, self._where = message_format, records, where
        known = {column.name: column for column in columns(spelled_type(records, records.names, where))}
        self._plain = {name: plain(known[name].type) for name in message_format.fields(records)}
        of_key = message_format.key if isinstance(message_format.key, tuple) else ()
        self._key_object = object_of([known[name] for name in of_key]) if len(of_key) > 1 else None
        self._encode_values = (
            message_format.value_format.encoder(message_format.value_format.value_type(records, records.names, where))
            if message_format.value is None
            else None
        )
        functions = (
            message_format.key,
            message_format.value,
            message_format.headers,
            message_format.partition,
            message_format.tombstone,
        )
        self._takes_records = any(callable(function) for function in functions)
        without_nan = {*of_key}
        if message_format.value is None and not message_format.value_format.holds_nan:
            without_nan.update(records.names)
        self._in_json = {name for name in without_nan if has(records.schema.field(name).type, pa.types.is_floating)}

    def encode(self, batch: pa.RecordBatch) -> Messages:
        """The messages of a batch of records. Raises `UserFunctionError`, naming the record, where a function does."""
        message_format = self._format
        columns = {name: self._column(batch, name) for name in self._plain}
        records = self._records.from_batch(batch) if self._takes_records else []
        keys = self._keys(columns, records)
        return Messages(
            keys,
            self._values(columns, records),
            self._headers(columns, records),
            None if message_format.partition is None else self._places(message_format.partition, columns, records),
            None if message_format.timestamp is None else self._times(message_format.timestamp, columns),
        )

    def _column(self, batch: pa.RecordBatch, name: str) -> list[Any]:
        """The values of a field, as formats take them."""
        if name in self._in_json:
            self._check_finite(batch.column(name), name)
        values: list[Any] = batch.column(name).to_pylist()
        convert = self._plain[name]
        return values if convert is None else list(map(convert, values))

    def _check_finite(self, column: pa.Array, name: str) -> None:
        """Raise `SinkError` for NaN and the infinities: JSON has no numbers for them, and they would become null."""
        bad = not_finite(column, name)
        if bad is not None:
            path, number = bad
            raise SinkError(
                f"{self._where}: field '{path}' is {number}, and JSON has no such number; write None in its place,"
                " leave the record out, choose another value_format, or make the value yourself, with value="
            )

    def _part(self, part: FieldOr, columns: Mapping[str, list[Any]], records: Sequence[Any]) -> list[Any]:
        if isinstance(part, str):
            return columns[part]
        results: list[Any] = []
        try:
            results.extend(map(part, records))
        except RAISED as error:
            raise user_failure(error, self._where, part, records[len(results)]) from error
        return results

    def _keys(self, columns: Mapping[str, list[Any]], records: Sequence[Any]) -> list[bytes | None] | None:
        key = self._format.key
        if key is None:
            return None
        if not isinstance(key, tuple):
            keys = [self._bytes(value, "key") for value in self._part(key, columns, records)]
            if self._format.replaces and None in keys:
                raise SinkError(
                    f"{self._where}: the key function gave None for {shorten(records[keys.index(None)])}, and a message"
                    " without a key replaces none; give a key for it, leave the record out before, or append"
                )
            return keys
        if self._key_object is not None:
            return list(map(encode, map(self._key_object, *(columns[name] for name in key))))
        values = columns[key[0]]
        if pa.types.is_string(kind := self._records.schema.field(key[0]).type) or pa.types.is_binary(kind):
            return [self._bytes(value, "key") for value in values]
        return [None if value is None else encode(value) for value in values]

    def _values(self, columns: Mapping[str, list[Any]], records: Sequence[Any]) -> list[bytes | None]:
        value, tombstone = self._format.value, self._format.tombstone
        values: list[bytes | None]
        if value is not None:
            values = [self._bytes(content, "value") for content in self._part(value, columns, records)]
        else:
            values = self._formatted(list(columns.values()))
        if tombstone is None:
            return values
        gone = self._part(tombstone, columns, records)
        return [None if is_gone else content for content, is_gone in zip(values, gone, strict=True)]

    def _formatted(self, columns: Sequence[list[Any]]) -> list[bytes | None]:
        """The values in their format. Raises `SinkError` for a record that does not fit it."""
        assert self._encode_values is not None
        try:
            values = self._encode_values(columns)
        except ValueError as error:
            raise SinkError(f"{self._where}: {error}") from error
        prefix = self._format.prefix
        return [None if value is None else prefix + value for value in values] if prefix else list(values)

    def _headers(self, columns: Mapping[str, list[Any]], records: Sequence[Any]) -> list[list[Header]] | None:
        headers = self._format.headers
        if headers is None:
            return None
        if isinstance(headers, Mapping):
            named = [zip(repeat(name), map(self._header, columns[field])) for name, field in headers.items()]
            return [list(of_message) for of_message in zip(*named, strict=True)]
        return [
            [(name, self._header(value)) for name, value in of_message.items()]
            for of_message in self._part(headers, columns, records)
        ]

    def _places(self, part: FieldOr, columns: Mapping[str, list[Any]], records: Sequence[Any]) -> list[int]:
        places = self._part(part, columns, records)
        for place, value in enumerate(places):
            if not isinstance(value, int):
                raise SinkError(
                    f"{self._where}: the partitioner gave {shorten(value)} ({type(value).__name__}) for"
                    f" {shorten(records[place])}, and a partition is an int"
                )
        return places

    def _times(self, field: str, columns: Mapping[str, list[Any]]) -> list[int]:
        """Times for Kafka, whose client takes 0 for the time of sending."""
        times = list(map(_milliseconds, columns[field]))
        for value, time in zip(columns[field], times, strict=True):
            if time <= 0 and value is not None:
                raise SinkError(
                    f"{self._where}: field '{field}' is {shorten(value)}, and the time of a message is after 1970"
                    " began; correct it, or write None for the time at which the message is sent"
                )
        return times

    def _header(self, value: Any) -> bytes | None:
        return self._bytes(value, "header")

    def _bytes(self, value: Any, part: str) -> bytes | None:
        if value is None or isinstance(value, bytes):
            return value
        if isinstance(value, str):
            return value.encode()
        raise SinkError(
            f"{self._where}: a message's {part} is bytes, str or None, and the function gave {shorten(value)}"
            f" ({type(value).__name__})"
        )


def _type(records: RecordType, field: str, where: str) -> pa.DataType:
    if field not in records.names:
        raise PipelineError(f"{where}: no field '{field}' in {records.describe()}{nearest(field, records.names)}")
    return records.schema.field(field).type


def _is_text(kind: pa.DataType) -> bool:
    return bool(pa.types.is_string(kind) or pa.types.is_binary(kind))


def _milliseconds(value: Any) -> int:
    """A time for Kafka; 0 is the time of sending."""
    if value is None:
        return 0
    return to_millis(value) if isinstance(value, datetime) else int(value)


class StagedMessages(StagedContent, frozen=True, kw_only=True):
    """Messages of one task, in their order."""


class MessagesWriter(StagingWriter[Messages, StagedMessages]):
    """Encodes the records of one task, and stages the messages."""

    committable = StagedMessages
    suffix = "messages"
    chunk_bytes = 8 << 20  # the driver holds as many when it reads them

    def __init__(self, encoder: MessageEncoder, attempt: WriteAttempt, upserts: bool) -> None:
        super().__init__(attempt)
        self._encoder, self._upserts = encoder, upserts

    def part(self, batch: pa.RecordBatch) -> tuple[Messages, int]:
        messages = self._encoder.encode(batch)
        if self._upserts:
            messages = messages.last_of_each_key()
        return messages, messages.size()

    def encode(self, parts: Sequence[Messages]) -> tuple[bytes, int]:
        messages = [joined(parts).last_of_each_key()] if self._upserts else parts
        return msgspec.msgpack.encode(messages), sum(map(len, messages))


def staged_messages(committables: Sequence[StagedMessages]) -> Iterator[Messages]:
    """The staged messages, in the order of each task; raises `UnavailableError` where another job has removed them."""
    decoder = msgspec.msgpack.Decoder(list[Messages])
    for committable in committables:
        yield from decoder.decode(committable.read("staged messages"))


def joined(parts: Sequence[Messages]) -> Messages:
    """Messages one after another; each part has the same columns."""
    if len(parts) == 1:
        return parts[0]

    def column(name: str) -> list[object] | None:
        columns = [getattr(part, name) for part in parts]
        return None if columns[0] is None else [item for of_part in columns for item in of_part]

    return Messages(*(column(name) for name in Messages.__struct_fields__))  # type: ignore[arg-type]
