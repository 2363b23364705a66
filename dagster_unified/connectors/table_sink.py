"""What all sinks into tables of databases have in common: modes, the key, and the column of a partition. No client."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import pyarrow as pa

from dagster_unified.connectors.base import SparkSink
from dagster_unified.connectors.commits import C
from dagster_unified.errors import PipelineError, nearest
from dagster_unified.graph.connectors import Capabilities
from dagster_unified.operators.functions.type_variables import In
from dagster_unified.records import RecordType

Mode = Literal["append", "upsert", "overwrite"]
_MODES = ("append", "upsert", "overwrite")


class TableSink(SparkSink[In, C]):
    """A sink into a table whose transactions hold the rows and the mark of who wrote them."""

    def __init__(self, name: str, mode: Mode, key: str | Sequence[str], partition_column: str | None) -> None:
        self.name, self.mode, self.partition_column = name, mode, partition_column
        self.key = (key,) if isinstance(key, str) else tuple(key)
        if mode not in _MODES:
            raise PipelineError(f"sink '{name}': mode {mode!r} is not one of {', '.join(_MODES)}")
        if (mode == "upsert") != bool(self.key):
            raise PipelineError(
                f"sink '{name}': mode 'upsert' needs the fields that identify a row, as key=..., and no other mode"
                " has them"
            )
        if partition_column is not None and mode == "upsert":
            raise PipelineError(
                f"sink '{name}': upserts replace rows by their key; leave partition_column out, or use mode 'append'"
            )
        self.upserts = mode == "upsert"
        self.capabilities = Capabilities(
            transactional=True,
            upsert=self.upserts,
            replaces_partition=partition_column is not None,
            refuses_repeats=partition_column is None and not self.upserts,
        )

    def check(self, records: RecordType) -> None:
        for name in self.key:
            if name not in records.names:
                raise PipelineError(
                    f"sink '{self.name}': the records have no field '{name}', which is in its key"
                    f"{nearest(name, records.names)}"
                )
            if records.schema.field(name).nullable:
                raise PipelineError(
                    f"sink '{self.name}': field '{name}' is in its key and may be None, which a primary key cannot"
                    " hold; declare it without None"
                )
            if self.is_json(records.schema.field(name)):
                raise PipelineError(f"sink '{self.name}': field '{name}' is nested, and cannot be in a key")
        if self.partition_column in records.names:
            raise PipelineError(
                f"sink '{self.name}': the records have the field '{self.partition_column}', which the sink fills"
                " itself; give partition_column another name"
            )

    def is_json(self, field: pa.Field) -> bool:
        """Whether a field's values are stored as JSON."""
        return bool(pa.types.is_nested(field.type))
