"""What a format of values is, and what a value begins with whose schema is in a registry."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Any

from dagster_unified.connectors.kafka.formats.values import spelled, spelled_class
from dagster_unified.errors import PipelineError
from dagster_unified.records import RecordType, record_type

Decode = Callable[[Any], Any]
"""Makes of a value what it holds; raises where it does not fit."""

Encode = Callable[[Sequence[Sequence[Any]]], Sequence[bytes | None]]
"""Makes values of records, whose columns `values.plain` has made; raises `ValueError` that says what does not fit."""

_MAGIC = 0
"""The first byte of a value that names its schema in a registry; the next four are the schema's number."""


class ValueFormat(ABC):
    """How values are written."""

    name: str

    holds_nan = True
    """Whether values hold NaN and the infinities."""

    def describe(self) -> str:
        """The format, for plans."""
        return self.name

    def fingerprint(self) -> str:
        """Changes with what the format makes of a value."""
        return self.describe()

    def check(self, fields: Sequence[str], where: str) -> None:  # noqa: B027 - most formats take any fields
        """Raises `PipelineError` where no value can have these fields."""

    def value_type(self, records: RecordType, fields: Sequence[str], where: str) -> RecordType:
        """The type that a value is decoded to: the record's fields that come from it, as values spell them.

        Raises `PipelineError` where values have no such fields.
        """
        return spelled_type(records, fields, where)

    @abstractmethod
    def decoder(self, python: Any) -> Decode:
        """In a worker: what decodes a value to this type."""

    def check_writing(self, kind: RecordType, where: str) -> None:
        """Raises `PipelineError` where values cannot hold records of this type, as far as that is known by now."""
        try:
            self.encoder(kind)
        except ValueError as error:
            raise PipelineError(f"{where}: {error}") from None

    def registered(self, topic: str) -> tuple[ValueFormat, bytes]:
        """On the driver, before anything is written: the format for workers, and what each value begins with.

        A format whose schema is in a registry asks that here, once. Raises `ValueError` where the registry has no
        schema for the topic or does not take this one, and what a `SchemaRegistry` raises where it is away.
        """
        return self, b""

    @abstractmethod
    def encoder(self, kind: RecordType) -> Encode:
        """What encodes records of a type that `value_type` gave; raises `ValueError` where values cannot hold them."""


def spelled_type(records: RecordType, fields: Sequence[str], where: str) -> RecordType:
    """These fields of a record type as values spell them."""
    if records.shape != "class":
        return record_type(spelled(records.python), where)
    return record_type(spelled_class(records.python, tuple(fields)), where)


def framing(number: int) -> bytes:
    """What a value begins with whose schema has this number in a registry."""
    return bytes((_MAGIC,)) + number.to_bytes(4, "big")


def unframed(value: bytes) -> tuple[int, bytes]:
    """The number of a value's schema, and the value without it."""
    if len(value) < 5 or value[0] != _MAGIC:
        raise ValueError("it does not begin with the number of a schema in a registry")
    return int.from_bytes(value[1:5], "big"), value[5:]
