"""What a running job tells its sources: how far to read, in how many tasks, and which tables to read anew."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from itertools import count
from threading import Lock
from typing import TYPE_CHECKING

import msgspec

from dagster_unified.connectors.protocol.positions import Watermarks, tell
from dagster_unified.engine.job_time import JobTime
from dagster_unified.engine.session import cores
from dagster_unified.engine.streaming.atomic import write_atomically
from dagster_unified.engine.streaming.checkpoint import last_number
from dagster_unified.graph.event_time import Aligned, aligned
from dagster_unified.graph.fingerprint import digest
from dagster_unified.graph.plan import Plan
from dagster_unified.storage.object_store import is_connect

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession
    from upath import UPath


class Alignment:
    """The aligned sources of one query. Safe for several threads."""

    def __init__(self, plan: Plan, sources: Collection[int], folder: UPath) -> None:
        """`folder` has a folder for each source, by its uid."""
        self._members = [member for member in aligned(plan.graph) if member.source in sources]
        uids = {member.source: plan.graph.node(member.source).uid for member in self._members}
        self._files = {source: folder / uid / "watermarks.json" for source, uid in uids.items()}
        self._written: dict[int, Watermarks] = {}
        self._ended: dict[int, Collection[str]] = {}
        self._over = False
        self._lock = Lock()

    def __bool__(self) -> bool:
        return bool(self._members)

    def file(self, source: int) -> UPath | None:
        """Return the file that a source goes by; None where it is not aligned."""
        return self._files.get(source)

    def ended(self, parts: Mapping[int, Collection[str]]) -> None:
        """Note the parts of the sources that the query has read to their end: nobody waits for these."""
        with self._lock:
            self._ended |= parts

    def tell(self, time: JobTime, now: int) -> None:
        """Tell the sources how far their groups are."""
        with self._lock:
            if self._over:
                return
            watermarks = {
                member.source: Watermarks(member.drift, *time.parts(member.assigner, now)) for member in self._members
            }
            for member in self._members:
                others = [o.source for o in self._members if o.group == member.group and o is not member]
                marks = [watermarks[source].slowest(self._ended.get(source, ())) for source in others]
                slowest = min((mark for mark in marks if mark is not None), default=None)
                self._write(member, msgspec.structs.replace(watermarks[member.source], others=slowest))

    def end(self) -> None:
        """Let nobody wait any more: all of the input is read."""
        with self._lock:
            self._over = True
            for member in self._members:
                self._write(member, Watermarks(member.drift))

    def _write(self, member: Aligned, watermarks: Watermarks) -> None:
        if self._written.get(member.source) != watermarks:
            tell(self._files[member.source], watermarks)
            self._written[member.source] = watermarks


CORES = "spark.sql.leafNodeDefaultParallelism"

SETTINGS = (
    CORES,
    "spark.sql.files.maxPartitionBytes",
    "spark.sql.files.openCostInBytes",
    "spark.sql.files.minPartitionNum",
    "spark.sql.files.maxPartitionNum",
)
"""The settings that decide how many tasks read some files."""

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
        self._own_settings: dict[str, str] | None = None
        """The session's own settings, while others may be in their place."""

        self._record: list[Splitting] = []
        self._cores_at_start: int | None = None
        """How many tasks ran at once when the query started, through Spark Connect, which does not tell it later."""

    def begin(self) -> None:
        """Set the settings of the epoch that runs first: those that it had, if it was begun before."""
        self._own_settings = {
            name: value for name in SETTINGS if (value := self._spark.conf.get(name, None)) is not None
        }
        if is_connect(self._spark):
            self._cores_at_start = cores(self._spark)
        committed, begun = last_number(self._log / "commits"), last_number(self._log / "offsets")
        first = 0 if committed is None else committed + 1
        if begun is not None and begun >= first:
            self._record = [splitting for splitting in self._read() if splitting.epoch <= first]
        if self._record:
            self._set(self._record[-1].settings)
        else:
            self.look(first)

    def look(self, epoch: int) -> None:
        """Let `epoch`, which is about to run, and those after it be split by the present settings."""
        if self._own_settings is None:
            return
        now = {CORES: str(self._cores()), **self._own_settings}
        if self._record and self._record[-1].settings == now:
            return
        self._record = [*[splitting for splitting in self._record if splitting.epoch < epoch], Splitting(epoch, now)][
            -KEPT:
        ]
        write_atomically(self._file, msgspec.json.encode(self._record))
        self._set(now)

    def end(self) -> None:
        """Give the session its own settings back."""
        if self._own_settings is not None:
            self._set(self._own_settings)
            self._own_settings = None

    def _cores(self) -> int:
        return self._spark.sparkContext.defaultParallelism if self._cores_at_start is None else self._cores_at_start

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


class LookupTables:
    """The lookup tables of the query `name` of a job, whose checkpoint directory is `folder`.

    `started` is the token of the job that started the query. Spark lists the files of a table once for a query. A
    temporary view has that list in common with the query, and by the view's name Spark lists the files again, in a
    classic session and through Connect.
    """

    def __init__(self, spark: SparkSession, folder: UPath, name: str, started: int) -> None:
        self._spark, self._folder, self._name, self._started = spark, folder, name, started
        self._views: list[str] = []
        self._goes_on = False

    def go_on_with(self, started: int) -> None:
        """Take the views of the job with that token, which started the query."""
        self._started, self._goes_on = started, True

    def __call__(self, table: DataFrame) -> DataFrame:
        """A table whose files can be listed again."""
        from pyspark.sql import functions as F

        view = _view(self._folder, self._name, self._started, len(self._views))
        self._views.append(view)
        if self._goes_on:
            return table
        # Listing the files again also drops what is cached of the same plan: this column makes the plan another one.
        table.withColumn("__view", F.lit(view)).createOrReplaceTempView(view)
        return self._spark.table(view)

    def refresh(self) -> None:
        """List the files of the tables again, so that the next micro-batch reads new ones."""
        for view in self._views:
            self._spark.catalog.refreshTable(view)

    def drop(self) -> None:
        """Forget the tables: their query has ended."""
        if self._views:
            forget(self._spark, self._folder, self._name, self._started)
            self._views.clear()


def forget(spark: SparkSession, folder: UPath, name: str, started: int) -> None:
    """Drop what an ended query has left of its tables."""
    for number in count():
        if not spark.catalog.dropTempView(_view(folder, name, started, number)):
            return


def _view(folder: UPath, name: str, started: int, number: int) -> str:
    return f"lookup_{digest(folder, name)}_{started}_{number}"
