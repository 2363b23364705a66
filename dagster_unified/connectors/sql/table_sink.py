"""What all sinks into tables of databases have in common: modes, the key, the column of a partition. No client."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from typing import TYPE_CHECKING, Literal, Protocol

import pyarrow as pa

from dagster_unified.connectors.protocol.commits import C
from dagster_unified.connectors.protocol.sink import SparkSink
from dagster_unified.errors import PipelineError, nearest
from dagster_unified.graph.connectors import Capabilities, Target
from dagster_unified.operators.functions.type_variables import In
from dagster_unified.records import RecordType

if TYPE_CHECKING:
    import pyarrow.dataset as ds
    from pyspark.sql import SparkSession

Mode = Literal["append", "upsert", "overwrite"]
_MODES = ("append", "upsert", "overwrite")


class ReadsRows(Protocol):
    """A source of the rows that a sink has written."""

    def rows(self, most: int | None = None) -> pa.Table:
        """The rows that fit, or the first of them, read here and at once."""


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
            replaces_all=mode == "overwrite",
            refuses_repeats=partition_column is None and not self.upserts,
        )

    @abstractmethod
    def place(self) -> tuple[str, str]:
        """Its table, and where the database is: for people, without secrets."""

    @abstractmethod
    def written(self) -> ReadsRows:
        """The columns of its table that it writes."""

    def describe(self) -> str:
        table, database = self.place()
        by = f" by {', '.join(self.key)}" if self.key else ""
        return f"table {table} at {database} ({self.mode}{by})"

    def target_place(self) -> str:
        """The one name of the table, however it is written."""
        table, database = self.place()
        return f"{database}/{table}"

    def target(self) -> Target | None:
        return Target(self.target_place(), shared=self.mode == "append" and self.partition_column is None)

    def dataset(self, records: RecordType | None = None) -> ds.Dataset:
        import pyarrow.dataset as ds  # loads pandas where it is installed, so only where it is needed

        return ds.dataset(self.written().rows())

    def preview(self, spark: SparkSession, rows: int) -> pa.Table | None:
        return self.written().rows(rows) if self.exists() else None

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
        filled = (self.partition_column or "").casefold()  # most databases tell no two names apart by case
        taken = next((name for name in records.names if name.casefold() == filled), None)
        if taken is not None:
            raise PipelineError(
                f"sink '{self.name}': the records have the field '{taken}', and the sink fills the column"
                f" '{self.partition_column}' itself; give partition_column another name"
            )

    def check_partitioned(self) -> None:
        if self.mode == "overwrite" and self.partition_column is None:
            raise PipelineError(
                f"sink '{self.name}': mode 'overwrite' replaces the whole table, and runs are for partitions; name a"
                " column that says what partition wrote a row, with partition_column=..., or use mode 'append'"
            )

    def is_json(self, field: pa.Field) -> bool:
        """Whether a field's values are stored as JSON."""
        return bool(pa.types.is_nested(field.type))
