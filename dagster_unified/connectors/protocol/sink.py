"""What an engine asks of a sink that Spark writes (`commits.py` has how it is committed)."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from typing import TYPE_CHECKING, Generic, Self

import pyarrow as pa

from dagster_unified.connectors.protocol.commits import C, Committer, WriteAttempt, WriteIdentity, Writer, WriterTask
from dagster_unified.connectors.protocol.writers import Ship, stage_by_writers
from dagster_unified.graph.connectors import Sink
from dagster_unified.operators.functions.type_variables import In

if TYPE_CHECKING:
    import pyarrow.dataset as ds
    from pyspark.sql import DataFrame, SparkSession

    from dagster_unified.records import RecordType


class SparkSink(Sink[In], Generic[In, C]):
    """A sink that Spark writes: `writer` in Spark's tasks, `committer` on the driver, `engine/commit.py` between them.

    A sink whose rows Spark can write by itself, such as Parquet, overrides `stage` instead of `writer`.
    """

    committable: type[C]
    """What its writers prepare."""

    commits_in_writers: bool = False
    """Whether writers make rows visible themselves, under the identity of their attempt."""

    @abstractmethod
    def committer(self, schema: pa.Schema) -> Committer[C]:
        """The committer of a job, for rows of this schema.

        It may create a table that is not there. Raises `SinkError` where the rows do not fit what is there, and
        `UnavailableError` where the target is away.
        """

    def writer(self, task: WriterTask) -> Writer[C]:
        """A writer for the rows of one of Spark's tasks, which has them in the order of emission.

        The rows of a key that an operator before the sink emitted are in one task.
        """
        raise NotImplementedError

    def stage(self, frame: DataFrame, attempts: Sequence[WriteAttempt], ship: Ship) -> list[list[C]]:
        """Writes all rows where readers do not see them yet; returns the committables of each attempt.

        With several attempts (`takes_together`), the column `PARTITION_INDEX` has the index of a row's attempt, and
        for a sink that `upserts` the column `EMITTED` the order of a key's rows within a partition. The engine counts
        the rows while they are written, so run one job over them.

        In later epochs `ship` gives what it was given in the first: pass attempts as arguments, not inside.
        """
        return stage_by_writers(self, self.committable, frame, attempts, ship)

    def takes_together(self) -> bool:
        """Whether several partitions can be written at once; otherwise they are written one by one."""
        return not self.upserts

    def location(self, identity: WriteIdentity) -> str:
        """Where a write goes to, for people."""
        return self.describe()

    def elsewhere(self, path: str) -> Self | None:
        """The same sink, writing to another place; None where it writes to none that can be read back."""
        return None

    def exists(self) -> bool:
        """Whether what it wrote is still there, as far as it knows."""
        return True

    def dataset(self, records: RecordType | None = None) -> ds.Dataset:
        """All that is there. `records` are those that are written, for files that do not say their columns' types."""
        raise NotImplementedError

    def schema_of(self, records: RecordType) -> pa.Schema:
        """The columns that `dataset` has where the table is as declared."""
        return records.schema

    def preview(self, spark: SparkSession, rows: int) -> pa.Table | None:
        """The first rows of what is there, or None where it cannot be read back."""
        return None
