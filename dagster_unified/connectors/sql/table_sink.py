"""The common part of sinks into tables, and their commit: rows and marks of who wrote them in one transaction."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Generic, Literal

import pyarrow as pa

from dagster_unified.connectors.protocol.commits import (
    C,
    Commit,
    CommitConflictError,
    PartitionsUnknownError,
    SparkSink,
    WriteIdentity,
)
from dagster_unified.connectors.sql.table_source import TableSource
from dagster_unified.errors import PipelineError, SinkError, nearest
from dagster_unified.graph.connectors import AssetName, Capabilities, Place, Target, asset_path
from dagster_unified.operators.functions.type_variables import In
from dagster_unified.records import RecordType

if TYPE_CHECKING:
    import pyarrow.dataset as ds
    from pyspark.sql import SparkSession

Mode = Literal["append", "upsert", "overwrite"]
_MODES = ("append", "upsert", "overwrite")


class TableSink(SparkSink[In, C]):
    """A sink into a table whose transactions hold the rows and the mark of who wrote them."""

    def __init__(
        self,
        name: str,
        mode: Mode,
        key: str | Sequence[str],
        partition_column: str | None,
        asset: AssetName | None,
    ) -> None:
        self.name, self.mode, self.partition_column = name, mode, partition_column
        self.key = (key,) if isinstance(key, str) else tuple(key)
        self.asset = asset_path(asset, f"sink '{name}'")
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

    @property
    def where(self) -> str:
        """The beginning of its messages."""
        return f"sink '{self.name}'"

    @abstractmethod
    def place(self) -> tuple[str, str]:
        """Its table, and where the database is: for people, without secrets."""

    @abstractmethod
    def written(self) -> TableSource[In]:
        """The columns of its table that it writes."""

    def describe(self) -> str:
        table, database = self.place()
        by = f" by {', '.join(self.key)}" if self.key else ""
        return f"table {table} at {database} ({self.mode}{by})"

    @abstractmethod
    def identity(self) -> Place:
        """The identity of its table."""

    def target(self) -> Target | None:
        return Target(self.identity(), shared=self.mode == "append" and self.partition_column is None)

    def dataset(self, records: RecordType | None = None) -> ds.Dataset:
        import pyarrow.dataset as ds  # loads pandas where it is installed, so only where it is needed

        return ds.dataset(self.written().rows())

    def partitions(
        self, writes: Sequence[WriteIdentity], records: RecordType | None = None
    ) -> Mapping[WriteIdentity, ds.Dataset]:
        import pyarrow.dataset as ds

        column = self.partition_column
        if column is None:
            return super().partitions(writes, records)
        table = self.written()
        if any(table.read_here(1, (column, None))):
            raise PartitionsUnknownError(
                f"{self.where}: its table has rows without a partition in the column '{column}', such as those of a"
                " stream, or of a run without partitions"
            )
        rows = {write: table.rows((column, write.partition_key)) for write in writes}
        return {write: ds.dataset(of_partition) for write, of_partition in rows.items() if len(of_partition)}

    def preview(self, spark: SparkSession, rows: int) -> pa.Table | None:
        return self.written().first_rows(rows) if self.exists() else None

    def check(self, records: RecordType) -> None:
        for name in self.key:
            if name not in records.names:
                raise PipelineError(
                    f"{self.where}: the records have no field '{name}', which is in its key"
                    f"{nearest(name, records.names)}"
                )
            if records.schema.field(name).nullable:
                raise PipelineError(
                    f"{self.where}: field '{name}' is in its key and may be None, which a primary key cannot"
                    " hold; declare it without None"
                )
            if self.is_json(records.schema.field(name)):
                raise PipelineError(f"{self.where}: field '{name}' is nested, and cannot be in a key")
        filled = (self.partition_column or "").casefold()  # most databases tell no two names apart by case
        taken = next((name for name in records.names if name.casefold() == filled), None)
        if taken is not None:
            raise PipelineError(
                f"{self.where}: the records have the field '{taken}', and the sink fills the column"
                f" '{self.partition_column}' itself; give partition_column another name"
            )

    def check_partitioned(self) -> None:
        if self.mode == "overwrite" and self.partition_column is None:
            raise PipelineError(
                f"{self.where}: mode 'overwrite' replaces the whole table, and runs are for partitions; name a"
                " column that says what partition wrote a row, with partition_column=..., or use mode 'append'"
            )

    def is_json(self, field: pa.Field) -> bool:
        """Whether a field's values are stored as JSON."""
        return bool(pa.types.is_nested(field.type))


class MarkedWrite(ABC, Generic[C]):
    """One transaction of a sink into a table. `where` begins the messages of its errors."""

    def __init__(self, mode: Mode, partition_column: str | None, where: str) -> None:
        self.mode, self.partition_column, self.where = mode, partition_column, where

    def write(self, commits: Sequence[Commit[C]]) -> None:
        """Write all rows of some commits, and their marks; raises `CommitConflictError` where a later mark is there."""
        first = self._mark(commits)
        for number, commit in enumerate(commits):
            self.load(number, commit.committables, self._clear(commit, first[number]))

    def _mark(self, commits: Sequence[Commit[C]]) -> list[bool]:
        """Raise the marks, always in the same order; returns which commits are the first of their deployment."""
        first = [False] * len(commits)
        for name, number in sorted((name, number) for number, commit in enumerate(commits) for name in commit.marks):
            commit = commits[number]
            is_new = self.raise_mark(name, commit.marks[name], again=name != commit.identity.writer)
            if is_new is None:
                raise CommitConflictError(f"{self.where}: {name} has been committed by another job")
            first[number] = first[number] or (is_new and name == commit.identity.deployment)
        return first

    def _clear(self, commit: Commit[C], first: bool) -> str | None:
        """Delete the rows that a commit replaces; returns the partition that its rows are marked with."""
        identity = commit.identity
        if self.mode == "upsert":
            return None
        if identity.replaces is None:
            if self.mode == "overwrite" and (identity.epoch is None or first):
                self.delete_all()
            return None
        again = self.count_run(identity.replaces)
        if self.partition_column is not None:
            self.delete_partition(self.partition_column, identity.partition_key)
            return identity.partition_key
        if again:
            raise SinkError(
                f"{self.where}: partition '{identity.partition_key}' was written before, and its rows cannot be told"
                " from others, so they would be there twice; name a column that says what partition wrote a row, with"
                " partition_column=..., or use mode='upsert'"
            )
        return None

    @abstractmethod
    def raise_mark(self, name: str, version: int, again: bool) -> bool | None:
        """Raise a mark that nobody else changes until this transaction ends; returns whether it is new.

        None where a later version is there, or the same one unless it may come `again`.
        """

    @abstractmethod
    def count_run(self, name: str) -> bool:
        """Wait for other runs of a partition, and count this one; returns whether one has committed before."""

    @abstractmethod
    def delete_all(self) -> None:
        """Delete all rows of the table."""

    @abstractmethod
    def delete_partition(self, column: str, key: str) -> None:
        """Delete the rows of a partition."""

    @abstractmethod
    def load(self, number: int, committables: Sequence[C], partition: str | None) -> None:
        """Add the staged rows of the commit with this number, or replace those with their keys."""
