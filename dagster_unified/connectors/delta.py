"""The Delta Lake sink: transactional tables, with no JVM jar.

Spark, DuckDB, Polars and pandas read them.

Spark's workers write the data files; one small transaction, made with the `deltalake` package, commits them. The
transaction carries the execution's identity as an application transaction, so that a repeated or retried run never
doubles or mixes rows.
"""

from __future__ import annotations

import copy
import json
from dataclasses import dataclass, field
from datetime import datetime, timezone
from typing import TYPE_CHECKING, Any, Literal, Self
from urllib.parse import unquote
from uuid import uuid4

import pyarrow as pa

from dagster_unified.connectors.base import SparkSink, WriteContext, WriteResult, spark_schema
from dagster_unified.connectors.paths import for_spark, place_of, remove_tree, storage_path
from dagster_unified.errors import PipelineError, SinkError, nearest
from dagster_unified.graph.connectors import Guarantee, Target
from dagster_unified.graph.fingerprint import digest
from dagster_unified.graph.slices import WHOLE
from dagster_unified.operators.layout import EMITTED, PARTITION_INDEX
from dagster_unified.records import RecordType

if TYPE_CHECKING:
    from collections.abc import Sequence

    import pyarrow.dataset as ds
    from deltalake import DeltaTable
    from deltalake.transaction import AddAction, RemoveAction
    from pyspark.sql import DataFrame, SparkSession
    from upath import UPath

_PARTITION = "part-of-"
"""How the folders of files begin that belong to a partition of the pipeline."""

_COMMITS = 20
_NO_PARTITION = "__HIVE_DEFAULT_PARTITION__"


class DeltaSink(SparkSink[object]):
    """Writes a Delta table at `path`, which is created when it is not there.

    `mode` is `append`; `overwrite`, which replaces the table, or with `partition_by` only the partitions that are
    written; or `upsert`, where the last record of each `key` replaces the one in the table. In BATCH a run commits one
    transaction, in STREAMING each epoch does; there `overwrite` replaces what was in the table before the deployment.
    Exactly-once: a run or an epoch that is repeated changes nothing.

    A BATCH run for a partition of the pipeline replaces what an earlier run had written of that partition, which it
    knows by its files' names, so compact only partitions that are not run again; `overwrite` also what runs without
    partitions had written. `upsert` merges: a row of a key that a partition no longer gives stays.

    Raises `PipelineError` for a `key` or `partition_by` that is no field of the record, for `upsert` without a key, and
    for a field of type `timedelta`, which Delta cannot hold.

    Examples:
        >>> totals = sales.key_by("shop").sum("amount")
        >>> sink = totals.sink_to(DeltaSink("tables/totals", mode="upsert", key="shop", name="totals"))
        >>> assert_same_in_both_modes(pipeline)
        >>> sorted(sale.amount for sale in run_pipeline(pipeline, "BATCH").sinks["totals"])
        [4, 8]
    """

    kind = "deltalake"

    def __init__(
        self,
        path: str,
        name: str | None = None,
        mode: Literal["append", "overwrite", "upsert"] = "overwrite",
        key: tuple[str, ...] | str = (),
        partition_by: tuple[str, ...] | str = (),
        storage_options: dict[str, str] | None = None,
    ) -> None:
        self.path = storage_path(path, "Delta sink")
        self.name = name or self.path.name or "table"
        self.mode = mode
        self.key = (key,) if isinstance(key, str) else tuple(key)
        self.partition_by = (partition_by,) if isinstance(partition_by, str) else tuple(partition_by)
        self.storage_options = storage_options
        self.guarantee = Guarantee.UPSERT if mode == "upsert" else Guarantee.EXACTLY_ONCE
        self.upserts = mode == "upsert"
        if mode not in ("append", "overwrite", "upsert"):
            raise PipelineError(f"sink '{self.name}': mode is 'append', 'overwrite' or 'upsert', not {mode!r}")
        if (mode == "upsert") != bool(self.key):
            raise PipelineError(
                f"sink '{self.name}': upsert needs key=, the columns that identify a row"
                if mode == "upsert"
                else f"sink '{self.name}': key= goes with mode='upsert'"
            )

    def describe(self) -> str:
        key = f" by {', '.join(self.key)}" if self.key else ""
        parts = f", partitioned by {', '.join(self.partition_by)}" if self.partition_by else ""
        return f"Delta table at {self.path}, {self.mode}{key}{parts}"

    def target(self) -> Target:
        return Target(place_of(self.path), shared=self.mode == "append")

    def check(self, records: RecordType) -> None:
        for column in (*self.key, *self.partition_by):
            if column not in records.names:
                raise PipelineError(f"no field '{column}' in {records.describe()}{nearest(column, records.names)}")
        for column in records.schema:
            if pa.types.is_duration(column.type):
                raise PipelineError(
                    f"field '{column.name}' is a timedelta, which Delta cannot hold; map it to seconds or milliseconds"
                )

    def write(self, frame: DataFrame, context: WriteContext) -> WriteResult:
        frame = self._last_per_key(frame) if self.mode == "upsert" else frame
        table = self._table(frame)
        writing = _Writing.of(context)
        done = table.transaction_version(writing.app)
        if done is not None and done >= writing.version:
            return WriteResult(str(self.path), repeated=True)
        staged = self.path / (f"_data-{uuid4().hex}" if self.mode == "upsert" else writing.folder())
        try:
            writer = frame.write.mode("overwrite")
            if self.partition_by and self.mode != "upsert":
                writer = writer.partitionBy(*self.partition_by)
            writer.parquet(for_spark(staged))
            writing.add(staged)
            merged = writing.filled if self.mode == "upsert" else []
            context.before_commit()
            undone = self._undone(table, writing) if context.timeline and done is None else []
            begins = self.mode == "overwrite" and context.epoch == 0
            wanted = context.epoch is None or begins or undone or writing.filled
            if wanted and not self._commit([writing], undone, merged):
                remove_tree(staged)
                return WriteResult(str(self.path), repeated=True)
        except BaseException:
            remove_tree(staged)
            raise
        if self.mode == "upsert":
            remove_tree(staged)
        return WriteResult(str(self.path), writing.bytes)

    def write_partitions(self, frame: DataFrame, contexts: Sequence[WriteContext]) -> list[WriteResult] | None:
        """Writes in one Spark job and one transaction, which has the identity of every partition.

        Of an upsert's rows with one key, the later partition's is the last.

        One by one where there is no rename.
        """
        from pyspark.sql import functions as F

        if self.mode != "upsert" and self.path.protocol not in ("", "file"):
            return None
        table = self._table(frame.drop(PARTITION_INDEX, EMITTED))
        writings = [_Writing.of(context) for context in contexts]
        due = {
            place: writing for place, writing in enumerate(writings) if table.transaction_version(writing.app) is None
        }
        staged = self.path / f"_data-{uuid4().hex}"
        folders = (
            {} if self.mode == "upsert" else {place: self.path / writing.folder() for place, writing in due.items()}
        )
        committed: list[_Writing] = []
        try:
            if due:
                rows = frame.where(F.col(PARTITION_INDEX).isin(*due))
                writer = (
                    self._last_per_key(rows).write
                    if self.mode == "upsert"
                    else rows.write.partitionBy(PARTITION_INDEX, *self.partition_by)
                )
                writer.mode("overwrite").parquet(for_spark(staged))
                for place, folder in folders.items():
                    if (staged / f"{PARTITION_INDEX}={place}").exists():
                        (staged / f"{PARTITION_INDEX}={place}").rename(folder)
                        due[place].add(folder)
                for place in due:
                    contexts[place].before_commit()
                committed = self._commit(list(due.values()), [], _filled(staged) if self.mode == "upsert" else [])
        finally:
            remove_tree(staged)
            for place, folder in folders.items():
                if due[place] not in committed:
                    remove_tree(folder)
        return [WriteResult(str(self.path), writing.bytes, repeated=writing not in committed) for writing in writings]

    def elsewhere(self, path: str) -> Self:
        changed = copy.copy(self)
        changed.path = storage_path(path, "Delta sink")
        return changed

    def exists(self) -> bool:
        from deltalake import DeltaTable

        return bool(DeltaTable.is_deltatable(self._uri(), storage_options=self.storage_options))

    def dataset(self) -> ds.Dataset:
        """The table, read through a file system of Arrow's own.

        deltalake's calls back into Python from threads that outlive a scan, which now and then aborts a process that
        ends soon after.
        """
        from pyarrow import fs

        inner = (
            fs.LocalFileSystem()
            if self.path.protocol in ("", "file")
            else fs.PyFileSystem(fs.FSSpecHandler(self.path.fs))
        )
        return self._open().to_pyarrow_dataset(filesystem=fs.SubTreeFileSystem(self.path.path, inner))

    def preview(self, spark: SparkSession, rows: int) -> pa.Table | None:
        """Reads row by row.

        A scan that is given up leaves threads behind, which may hang a process that ends soon after.
        """
        import pyarrow.parquet as pq

        table = self._open()
        schema = pa.schema(table.schema().to_arrow())
        found = schema.empty_table()
        for row in self._rows_of(table):
            if found.num_rows >= rows:
                break
            with (self.path / unquote(row["path"])).open("rb") as file:
                batch = next(
                    pq.ParquetFile(file, pre_buffer=False).iter_batches(batch_size=rows, use_threads=False), None
                )
            if batch is not None:
                values = _partition(row)
                columns = [
                    (
                        batch.column(f.name)
                        if f.name in batch.schema.names
                        else pa.array([values.get(f.name)] * batch.num_rows, pa.string())
                    )
                    for f in schema
                ]
                found = pa.concat_tables(
                    [found, pa.table([c.cast(f.type) for c, f in zip(columns, schema, strict=True)], schema=schema)]
                )
        return found.slice(0, rows)

    def _uri(self) -> str:
        return str(self.path)

    def _open(self) -> DeltaTable:
        """The table as it is now."""
        from deltalake import DeltaTable

        return DeltaTable(self._uri(), storage_options=self.storage_options)

    def _table(self, frame: DataFrame) -> DeltaTable:
        """The table, created if need be; raises `SinkError` where its columns are not the stream's."""
        from deltalake import DeltaTable
        from pyspark.sql.pandas.types import to_arrow_schema

        wanted = to_arrow_schema(frame.schema, timezone="UTC", prefers_large_types=False)
        if not DeltaTable.is_deltatable(self._uri(), storage_options=self.storage_options):
            if self.path.fs.exists(self.path.path) is False:
                self.path.mkdir(parents=True, exist_ok=True)
            DeltaTable.create(
                self._uri(),
                wanted,
                mode="ignore",
                partition_by=list(self.partition_by) or None,
                storage_options=self.storage_options,
            )
        table = self._open()
        held = spark_schema(pa.schema(table.schema().to_arrow()))
        given = spark_schema(wanted)
        for column in given:
            if column.name not in held.names:
                raise SinkError(
                    f"sink '{self.name}': the table at {self.path} has no column '{column.name}'; write to another"
                    " table, or add the column to it"
                )
            if held[column.name].dataType != column.dataType:
                raise SinkError(
                    f"sink '{self.name}': column '{column.name}' is {column.dataType.simpleString()}, and"
                    f" {held[column.name].dataType.simpleString()} in the table at {self.path}; write to another table,"
                    " or make them the same"
                )
        return table

    def _last_per_key(self, frame: DataFrame) -> DataFrame:
        """One row per key: of several partitions the last partition's, within one the last that was emitted."""
        from pyspark.sql import functions as F

        columns = [c for c in frame.columns if c not in (PARTITION_INDEX, EMITTED)]
        order = [F.col(PARTITION_INDEX)] if PARTITION_INDEX in frame.columns else []
        numbered = frame if EMITTED in frame.columns else frame.withColumn(EMITTED, F.monotonically_increasing_id())
        last = numbered.groupBy(*self.key).agg(
            F.max_by(F.struct(*columns), F.struct(*order, F.col(EMITTED))).alias("__row")
        )
        return last.select(*[f"__row.{c}" for c in columns])

    def _commit(self, writings: Sequence[_Writing], undone: list[RemoveAction], merged: list[UPath]) -> list[_Writing]:
        """Commits what was staged; where another writer was first, once more over what that one left.

        Gives what was not this execution's already.
        """
        from deltalake.exceptions import CommitFailedError

        for attempt in range(_COMMITS):
            try:
                return self._try_commit(self._open(), writings, undone, merged)
            except CommitFailedError:
                if attempt == _COMMITS - 1:
                    raise
        return []

    def _try_commit(
        self, table: DeltaTable, writings: Sequence[_Writing], undone: list[RemoveAction], merged: list[UPath]
    ) -> list[_Writing]:
        from deltalake.transaction import CommitProperties, Transaction

        held = {writing.app: table.transaction_version(writing.app) for writing in writings}
        due = [w for w in writings if (done := held[w.app]) is None or done < w.version]
        if not due:
            return []
        transactions = [Transaction(writing.app, writing.version) for writing in due]
        # Of two runs of a partition at once, the second to commit must see what the first has added, and remove it.
        transactions += [
            Transaction(w.owner, (table.transaction_version(w.owner) or 0) + 1) for w in due if w.owner is not None
        ]
        properties = CommitProperties(app_transactions=transactions)
        if merged:
            self._merge(table, merged, properties)
            return due
        adds = [self._add(f) for writing in due for f in writing.filled]
        actions: list[Any] = [*adds, *undone, *self._replaced(table, adds, due)]
        table.create_write_transaction(
            actions,
            "append",
            table.schema(),
            partition_by=list(self.partition_by) or None,
            commit_properties=properties,
        )
        return due

    def _merge(self, table: DeltaTable, files: list[UPath], properties: Any) -> None:
        import pyarrow.dataset as ds  # loads pandas where it is installed, so only where it is needed

        source = (
            ds.dataset([str(f) for f in files], format="parquet")
            if not files or not files[0].protocol
            else ds.dataset([f.path for f in files], filesystem=files[0].fs, format="parquet")
        )
        same = " AND ".join(f'(target."{k}" IS NOT DISTINCT FROM source."{k}")' for k in self.key)
        merger = table.merge(
            source.scanner().to_reader(),
            predicate=same,
            source_alias="source",
            target_alias="target",
            commit_properties=properties,
        )
        merger.when_matched_update_all().when_not_matched_insert_all().execute()

    def _add(self, file: UPath) -> AddAction:
        from deltalake.transaction import AddAction

        relative = file.relative_to(self.path)
        values: dict[str, str | None] = {}
        for part in relative.parts[:-1]:
            name, found, value = part.partition("=")
            if found:
                values[name] = None if value == _NO_PARTITION else unquote(value)
        modified = int(datetime.now(timezone.utc).timestamp() * 1000)
        return AddAction(
            relative.as_posix(),
            int(file.stat().st_size),
            values,
            modified,
            True,
            json.dumps({"numRecords": _rows(file)}),
        )

    def _undone(self, table: DeltaTable, writing: _Writing) -> list[RemoveAction]:
        """Removals of what a STREAMING job had added from an epoch on, to which it has gone back.

        A merge leaves nothing that its file identifies.
        """
        if self.mode == "upsert":
            return []
        first = f"{writing.mine}{writing.version:010d}-"
        return [
            self._remove(row)
            for row in self._rows_of(table)
            if row["path"].startswith(writing.mine) and row["path"].split("/")[0] >= first
        ]

    def _rows_of(self, table: DeltaTable) -> list[dict[str, Any]]:
        found: list[dict[str, Any]] = pa.table(table.get_add_actions(flatten=False)).to_pylist()
        return found

    def _remove(self, row: dict[str, Any]) -> RemoveAction:
        from deltalake.transaction import RemoveAction

        return RemoveAction(
            row["path"], True, int(datetime.now(timezone.utc).timestamp() * 1000), row["size_bytes"], _partition(row)
        )

    def _replaced(self, table: DeltaTable, adds: list[AddAction], writings: Sequence[_Writing]) -> list[RemoveAction]:
        """Removals of the files that are replaced.

        Those that earlier runs of the same partitions of the pipeline had written; with `overwrite` also those of no
        such partition.

        With `partition_by` the latter is only what lies in the table's partitions that are written. A STREAMING job
        keeps what it wrote in earlier epochs.
        """
        if self.mode != "overwrite" and all(writing.owner is None for writing in writings):
            return []
        written = [dict(a.partition_values) for a in adds]
        own = tuple(writing.owned for writing in writings if writing.owner is not None)
        kept = tuple(writing.mine for writing in writings if writing.owner is None)

        def goes(row: dict[str, Any]) -> bool:
            path: str = row["path"]
            if own and path.startswith(_PARTITION):
                return path.startswith(own)
            return (
                self.mode == "overwrite"
                and not path.startswith(kept)
                and (not self.partition_by or _partition(row) in written)
            )

        return [self._remove(row) for row in self._rows_of(table) if goes(row)]


@dataclass(eq=False)
class _Writing:
    """What one execution commits: who it is to the table, and the files that it has staged."""

    app: str
    """Its application transaction, with the version."""
    version: int
    owner: str | None
    """The application transaction of the pipeline's partition that it writes, if it is for one."""
    owned: str
    """How the folders of all that is written of that partition begin."""
    mine: str
    """How its own folders begin."""
    filled: list[UPath] = field(default_factory=list)
    bytes: int = 0

    @classmethod
    def of(cls, context: WriteContext) -> Self:
        """That of a write."""
        app = f"dagster-unified/{context.pipeline}/{context.sink}/{context.execution}/{context.partition}"
        of_partition = context.epoch is None and context.partition != WHOLE
        owner = (
            f"dagster-unified/{context.pipeline}/{context.sink}/partition/{context.partition}" if of_partition else None
        )
        owned = "" if owner is None else f"{_PARTITION}{digest(owner)}-"
        mine = f"data-{digest(app)}-" if owner is None else f"{owned}{digest(app)}-"
        return cls(
            f"{app}/timeline {context.timeline}" if context.timeline else app, context.epoch or 0, owner, owned, mine
        )

    def folder(self) -> str:
        """A name for a folder of its files, which nobody else has."""
        return f"{self.mine}{self.version:010d}-{uuid4().hex}"

    def add(self, folder: UPath) -> None:
        """Takes the files of a folder."""
        self.filled += _filled(folder)
        self.bytes += sum(int(f.stat().st_size) for f in self.filled)


def _partition(row: dict[str, Any]) -> dict[str, str | None]:
    return {
        k: None if v is None else str(v) for k, v in (row.get("partition") or row.get("partition_values") or {}).items()
    }


def _filled(folder: UPath) -> list[UPath]:
    """The files below a folder that have rows."""
    return sorted(f for f in folder.rglob("*.parquet") if not f.name.startswith(("_", ".")) and _rows(f))


def _rows(file: UPath) -> int:
    import pyarrow.parquet as pq

    with file.open("rb") as opened:
        return int(pq.read_metadata(opened).num_rows)
