"""A sink that prints: for trying a pipeline out."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING

import pyarrow as pa

from dagster_unified.connectors.protocol.commits import Committable, NoCommitter, WriteAttempt
from dagster_unified.connectors.protocol.sink import SparkSink
from dagster_unified.connectors.protocol.writers import Ship
from dagster_unified.graph.connectors import Capabilities
from dagster_unified.records import RecordType

if TYPE_CHECKING:
    from pyspark.sql import DataFrame


class PrintSink(SparkSink[object, Committable]):
    """Prints every record as a line to standard output, in both modes, at least once.

    All rows pass through the driver, one partition at a time.

    Examples:
        >>> sink = numbers.sink_to(PrintSink("numbers"))
        >>> run_pipeline(pipeline, "BATCH").sinks["numbers"]
        [1, 2, 3]
    """

    capabilities = Capabilities()
    commits_in_writers = True
    upserts = True  # a line per update is what one wants to see of a rolling operation

    def __init__(self, name: str | None = None) -> None:
        self.name, self.named = name or "print", name is not None

    def describe(self) -> str:
        return "standard output"

    def check(self, records: RecordType) -> None:
        """Every record can be printed."""

    def committer(self, schema: pa.Schema) -> NoCommitter[Committable]:
        return NoCommitter()

    def takes_together(self) -> bool:
        return False

    def stage(self, frame: DataFrame, attempts: Sequence[WriteAttempt], ship: Ship) -> list[list[Committable]]:
        kept = frame.persist()
        try:
            # the whole of it in one job: of the jobs that fetch one partition each, Spark observes nothing
            kept.count()
            for row in kept.toLocalIterator():
                values = tuple(row)
                if len(values) == 1:
                    shown = values[0]
                else:
                    fields = ", ".join(f"{name}={value!r}" for name, value in row.asDict().items())
                    shown = f"{getattr(self.records.python, '__name__', '')}({fields})"
                sys.stdout.write(f"{self.name}> {shown}\n")
            sys.stdout.flush()
        finally:
            kept.unpersist()
        return [[]]
