"""Several partitions of a pipeline in one job, distinguished by a pass-through column."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import pyarrow as pa

from dagster_unified.operators.layout import PARTITION_INDEX, PARTITION_INDEX_FIELD
from dagster_unified.operators.program.step import Program

if TYPE_CHECKING:
    from pyspark.sql import Column, DataFrame, Row


@dataclass(frozen=True)
class PartitionAxis:
    """The partitions that one job processes; with more than one, every row has the index of its own."""

    count: int = 1

    @property
    def enabled(self) -> bool:
        """Whether rows have a partition index."""
        return self.count > 1

    @property
    def columns(self) -> list[str]:
        """The pass-through columns: the partition index, if rows have one."""
        return [PARTITION_INDEX] if self.enabled else []

    @property
    def index(self) -> Column:
        """The partition index of a row."""
        from pyspark.sql import functions as F

        return F.col(PARTITION_INDEX) if self.enabled else F.lit(0)

    def index_of(self, row: Row) -> int:
        """Return the partition index of a collected row."""
        return int(row[PARTITION_INDEX]) if self.enabled else 0

    def schema(self, schema: pa.Schema) -> pa.Schema:
        """Return a schema with the pass-through columns."""
        return schema.append(PARTITION_INDEX_FIELD) if self.enabled else schema

    def in_order(self, frame: DataFrame) -> DataFrame:
        """Rows that need no other order, sorted so that a program sees one partition after another."""
        return frame.sortWithinPartitions(*self.columns) if self.enabled else frame

    def timed(self, program: Program, last_event_times: Mapping[int, int] | None = None) -> Program:
        """Return a program that knows the last event time of each partition, as far as there is one."""
        known = last_event_times or {}
        times: Sequence[int | None] = [known.get(index) for index in range(self.count)]
        if self.enabled:
            return replace(program, last_event_times=tuple(times))
        return replace(program, options=replace(program.options, last_event_time=times[0]))

    def rows_of(self, frame: DataFrame, index: int) -> DataFrame:
        """Return the rows of one partition, without the pass-through columns."""
        if not self.enabled:
            return frame
        return frame.where(f"{PARTITION_INDEX} = {index}").drop(PARTITION_INDEX)
