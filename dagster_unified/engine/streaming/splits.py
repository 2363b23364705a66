"""Into how many tasks Spark splits what an epoch reads: recorded, so that an epoch which runs again is split as before.

Where a job was killed, sinks may have an epoch that Spark runs again for its state only. Operator state, and whatever
depends on the order of records, is then what the sinks have only if each record reaches the same subtask in the same
order; and by default Spark splits files by how many cores there are. Knows Spark's settings and the checkpoint.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

from dagster_unified.connectors.sessions import is_connect
from dagster_unified.engine.session import cores
from dagster_unified.engine.streaming.atomic import write_atomically
from dagster_unified.engine.streaming.checkpoint import last_number

if TYPE_CHECKING:
    from pyspark.sql import SparkSession
    from upath import UPath

CORES = "spark.sql.leafNodeDefaultParallelism"

SETTINGS = (
    CORES,
    "spark.sql.files.maxPartitionBytes",
    "spark.sql.files.openCostInBytes",
    "spark.sql.files.minPartitionNum",
    "spark.sql.files.maxPartitionNum",
)
"""What decides how many tasks read some files."""

KEPT = 3
"""Epochs in the record: the one that Spark has logged, and those that it may not have."""


class Splitting(msgspec.Struct, frozen=True):
    """The settings from an epoch on; a setting that is not there has Spark's default."""

    epoch: int
    settings: dict[str, str]


class Splits:
    """The settings of one query, and their record."""

    def __init__(self, spark: SparkSession, folder: UPath, query: str) -> None:
        self._spark, self._file = spark, folder / "splits" / f"{query}.json"
        self._log = folder / "spark" / query
        self._given: dict[str, str] | None = None
        """The session's own settings, while others may be in their place."""

        self._record: list[Splitting] = []
        self._found: int | None = None
        """How many tasks ran at once when the query started, through Spark Connect, which does not tell it later."""

    def begin(self) -> None:
        """Set what the epoch that runs first is split by: what it was split by, if it was begun before."""
        self._given = {name: value for name in SETTINGS if (value := self._spark.conf.get(name, None)) is not None}
        if is_connect(self._spark):
            self._found = cores(self._spark)
        committed, begun = last_number(self._log / "commits"), last_number(self._log / "offsets")
        first = 0 if committed is None else committed + 1
        if begun is not None and begun >= first:
            self._record = [one for one in self._read() if one.epoch <= first]
        if self._record:
            self._set(self._record[-1].settings)
        else:
            self.look(first)

    def look(self, epoch: int) -> None:
        """Let `epoch`, which is about to run, and those after it be split by what there is now."""
        if self._given is None:
            return
        now = {CORES: str(self._cores()), **self._given}
        if self._record and self._record[-1].settings == now:
            return
        self._record = [*[one for one in self._record if one.epoch < epoch], Splitting(epoch, now)][-KEPT:]
        write_atomically(self._file, msgspec.json.encode(self._record))
        self._set(now)

    def end(self) -> None:
        """Give the session its own settings back."""
        if self._given is not None:
            self._set(self._given)
            self._given = None

    def _cores(self) -> int:
        """How many tasks run at once."""
        return self._spark.sparkContext.defaultParallelism if self._found is None else self._found

    def _set(self, settings: dict[str, str]) -> None:
        for name in SETTINGS:
            if name in settings:
                self._spark.conf.set(name, settings[name])
            else:
                self._spark.conf.unset(name)

    def _read(self) -> list[Splitting]:
        try:
            return msgspec.json.decode(self._file.read_bytes(), type=list[Splitting])
        except FileNotFoundError:
            return []
