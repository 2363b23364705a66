"""Values that are kept as they are."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

from dagster_unified.connectors.kafka.formats.base import Decode, Encode, ValueFormat
from dagster_unified.connectors.kafka.formats.values import itself, without_none
from dagster_unified.errors import PipelineError
from dagster_unified.records import RecordType, record_type, type_name


@dataclasses.dataclass(frozen=True)
class RawFormat(ValueFormat):
    """Values are kept as they are: `bytes`, or `str` in UTF-8.

    The record is such a value, or a class with one field for it beside those that come from the message's metadata.
    Where its type allows None, a tombstone is None.

    There is an example at `KafkaMessage`.
    """

    name = "raw"

    def check(self, fields: Sequence[str], where: str) -> None:
        if len(fields) > 1:
            raise PipelineError(
                f"{where}: a raw value is one field, and there are {', '.join(fields)}; say which of them come from the"
                " message, with metadata=, or choose another value_format"
            )

    def value_type(self, records: RecordType, fields: Sequence[str], where: str) -> RecordType:
        python = records.python if records.shape != "class" else records.type_of(fields[0])
        if without_none(python) not in (bytes, str):
            raise PipelineError(
                f"{where}: a raw value is bytes or str, and not {type_name(python)}; declare one of them, or choose"
                " another value_format"
            )
        return record_type(python, where)

    def decoder(self, python: Any) -> Decode:
        if without_none(python) is bytes:
            return itself
        return lambda value: None if value is None else value.decode()

    def encoder(self, kind: RecordType) -> Encode:
        if without_none(kind.python) is bytes:
            return lambda found: found[0]
        return lambda found: [None if value is None else value.encode() for value in found[0]]
