"""The Delta Lake sink: transactional tables, with no JVM jar.

Spark, DuckDB, Polars and pandas read them. Spark's workers write the data files; `committer.py` commits them.
"""

from __future__ import annotations

import copy
from typing import TYPE_CHECKING, Literal, Self
from urllib.parse import unquote

import pyarrow as pa

from dagster_unified.arrow_types import has
from dagster_unified.connectors.delta import log
from dagster_unified.connectors.delta.committer import (
    NO_PARTITION,
    DeltaCommitter,
    DeltaFile,
    active_files,
    data_folder,
    files_of_partitions,
    partition_values,
    staged_files,
    upsert_folder,
)
from dagster_unified.connectors.delta.store import ask_store, table_folder
from dagster_unified.connectors.protocol.commits import (
    Epochs,
    PartitionsUnknownError,
    Rewritten,
    Ship,
    SparkSink,
    WriteAttempt,
    WriteIdentity,
)
from dagster_unified.errors import PipelineError, SinkError, nearest
from dagster_unified.graph.connectors import AssetName, Capabilities, Target, asset_path
from dagster_unified.operators.layout import EMITTED, PARTITION_INDEX
from dagster_unified.records import RecordType
from dagster_unified.spark_internals import in_place
from dagster_unified.storage.paths import (
    check_folder,
    folder_place,
    for_spark,
    is_local,
    remove_tree,
)

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping, Sequence

    import pyarrow.dataset as ds
    from deltalake import DeltaTable
    from pyspark.sql import DataFrame, SparkSession
    from upath import UPath


_WITHOUT_MARK = {"mapreduce.fileoutputcommitter.marksuccessfuljobs": False}
"""Spark writes no `_SUCCESS` into the folders of a table: its log says what counts."""


class DeltaSink(SparkSink[object, DeltaFile]):
    """Writes a Delta table at `path`, which is created when it is not there.

    `mode` is `append`; `overwrite`, which replaces the table, or with `partition_by` only the partitions that are
    written; or `upsert`, where the last record of each `key` replaces the one in the table. In BATCH a run commits one
    transaction, in STREAMING each epoch does; there `overwrite` replaces what was in the table before the deployment.
    Exactly-once: a run or an epoch that is repeated changes nothing.

    A BATCH run for a partition of the pipeline replaces what an earlier run had written of that partition, which it
    knows by its files' names, so compact only partitions that are not run again; `overwrite` also what runs without
    partitions had written. `upsert` merges: a row of a key that a partition no longer gives stays.

    Raises `PipelineError` for a `key` or `partition_by` that is no field of the record, for `upsert` without a key, and
    for a field that is or has a `timedelta`, which Delta cannot hold. A table with other columns or partitions, or one
    that asks more of its writers than to add files, such as a constraint, a computed column or mapped column names, is
    a `SinkError` before anything is written; so is an empty text in a column of `partition_by`, which means none there.

    Examples:
        >>> totals = sales.key_by("shop").sum("amount")
        >>> sink = totals.sink_to(DeltaSink("tables/totals", mode="upsert", key="shop", name="totals"))
        >>> assert_same_in_both_modes(pipeline)
        >>> sorted(sale.amount for sale in run_pipeline(pipeline, "BATCH").sinks["totals"])
        [4, 8]
    """

    kind = "deltalake"
    committable = DeltaFile

    def __init__(
        self,
        path: str,
        name: str | None = None,
        mode: Literal["append", "overwrite", "upsert"] = "overwrite",
        key: tuple[str, ...] | str = (),
        partition_by: tuple[str, ...] | str = (),
        storage_options: dict[str, str] | None = None,
        asset: AssetName | None = None,
    ) -> None:
        self.path = table_folder(path, "Delta sink")
        self.name = name or self.path.name or "table"
        self.asset = asset_path(asset, f"sink '{self.name}'")
        self.mode = mode
        self.key = (key,) if isinstance(key, str) else tuple(key)
        self.partition_by = (partition_by,) if isinstance(partition_by, str) else tuple(partition_by)
        self.storage_options = storage_options
        self.upserts = mode == "upsert"
        # a merge leaves nothing that a file identifies, so that no partition and no epoch can be taken back
        identifiable = not self.upserts
        self.capabilities = Capabilities(
            transactional=True,
            upsert=self.upserts,
            replaces_partition=identifiable,
            replaces_all=mode == "overwrite",
            replaces_stream=mode == "overwrite" and bool(self.partition_by),
            undoes=identifiable,
        )
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
        return Target(folder_place(self.path), shared=self.mode == "append")

    def check(self, records: RecordType) -> None:
        for column in (*self.key, *self.partition_by):
            if column not in records.names:
                raise PipelineError(f"no field '{column}' in {records.describe()}{nearest(column, records.names)}")
        for column in records.schema:
            if has(column.type, pa.types.is_duration):
                what = "is" if pa.types.is_duration(column.type) else "has"
                raise PipelineError(
                    f"field '{column.name}' {what} a timedelta, which Delta cannot hold; map it to seconds or"
                    " milliseconds"
                )
            unsaid = pa.types.is_binary(column.type) or pa.types.is_nested(column.type)
            if unsaid and column.name in self.partition_by:
                raise PipelineError(
                    f"partition_by='{column.name}': the name of a folder cannot say a {column.type}; choose a field"
                    " that is a text, a number, a bool or a time"
                )

    def committer(self, schema: pa.Schema) -> DeltaCommitter:
        if is_local(self.path):
            check_folder(self.path, self.name)
        return DeltaCommitter.of_table(
            self.name, self.path, schema, self.mode, self.key, self.partition_by, self.storage_options
        )

    def takes_together(self) -> bool:
        return self.mode == "upsert" or self.path.protocol in ("", "file")  # the others need a rename

    def location(self, identity: WriteIdentity) -> str:
        return str(self.path)

    def stage(self, frame: DataFrame, attempts: Sequence[WriteAttempt], ship: Ship) -> list[list[DeltaFile]]:
        frame = self._with_checked_partitions(frame)
        if self.mode == "upsert":
            staged = self.path / upsert_folder(attempts[0])
            return [self._written(self._last_per_key(frame), staged), *([] for _ in attempts[1:])]
        if len(attempts) > 1:
            return self._stage_together(frame, attempts)
        return [self._written(frame, self.path / data_folder(attempts[0]), self.partition_by)]

    def _written(self, frame: DataFrame, folder: UPath, partition_by: Sequence[str] = ()) -> list[DeltaFile]:
        """Write the rows of an attempt into a folder of its own."""
        writer = frame.write.partitionBy(*partition_by) if partition_by else frame.write
        options = in_place.options(frame.sparkSession, folder)
        writer.mode("overwrite").options(**_WITHOUT_MARK, **options).parquet(for_spark(folder))
        return staged_files(self.path, folder)

    def _stage_together(self, frame: DataFrame, attempts: Sequence[WriteAttempt]) -> list[list[DeltaFile]]:
        """Write in one Spark job; each attempt gets a folder, which is then renamed."""
        staged = self.path / f"_together-{attempts[0].id}"
        files: list[list[DeltaFile]] = []
        try:
            writer = frame.write.partitionBy(PARTITION_INDEX, *self.partition_by).mode("overwrite")
            writer.options(**_WITHOUT_MARK).parquet(for_spark(staged))
            for index, attempt in enumerate(attempts):
                staged_folder, folder = staged / f"{PARTITION_INDEX}={index}", self.path / data_folder(attempt)
                if staged_folder.exists():
                    staged_folder.rename(folder)
                files.append(staged_files(self.path, folder))
        finally:
            remove_tree(staged)
        return files

    def _with_checked_partitions(self, frame: DataFrame) -> DataFrame:
        """The same rows; a text that would mean no value in the table's partitions fails."""
        from pyspark.sql import functions as F

        for name in self.partition_by:
            if frame.schema[name].dataType.typeName() == "string":
                message = (
                    f"dagster_unified.errors.SinkError: sink '{self.name}': field '{name}' is an empty text, or"
                    f" {NO_PARTITION}, and either is none in a table that is partitioned by it; write None, or another"
                    " text"
                )
                problem = F.raise_error(F.lit(message)).cast("string")
                value = F.when(F.col(name).isin("", NO_PARTITION), problem).otherwise(F.col(name))
                frame = frame.withColumn(name, value)
        return frame

    def _last_per_key(self, frame: DataFrame) -> DataFrame:
        """One row per key: of several partitions the last partition's, within one the last that was emitted."""
        from pyspark.sql import functions as F

        names = [name for name in frame.columns if name not in (PARTITION_INDEX, EMITTED)]
        order = [name for name in (PARTITION_INDEX, EMITTED) if name in frame.columns]
        if EMITTED not in order:
            frame = frame.selectExpr("*", f"monotonically_increasing_id() AS {EMITTED}")
            order.append(EMITTED)
        row = F.expr(f"max_by(struct({_quoted_names(names)}), struct({_quoted_names(order)})) AS __row")
        return frame.groupBy(*self.key).agg(row).select("__row.*")

    def elsewhere(self, path: str) -> Self:
        changed = copy.copy(self)
        changed.path = table_folder(path, "Delta sink")
        return changed

    def exists(self) -> bool:
        from deltalake import DeltaTable

        options = self.storage_options
        return bool(ask_store(self.path, lambda: DeltaTable.is_deltatable(self._uri(), storage_options=options)))

    def dataset(self, records: RecordType | None = None) -> ds.Dataset:
        """The table, read through a file system of Arrow's own.

        deltalake's calls back into Python from threads that outlive a scan, which now and then aborts a process that
        ends soon after.
        """
        return self._dataset_of(self._open())

    def _dataset_of(self, table: DeltaTable) -> ds.Dataset:
        from pyarrow import fs

        inner = (
            fs.LocalFileSystem()
            if self.path.protocol in ("", "file")
            else fs.PyFileSystem(fs.FSSpecHandler(self.path.fs))
        )
        return table.to_pyarrow_dataset(filesystem=fs.SubTreeFileSystem(self.path.path, inner))

    def rewritten(self, epochs: Epochs, records: RecordType) -> Rewritten:
        import pyarrow.dataset as ds

        newest = log.newest_version(self.path)
        first, last = (0, None) if newest is None else self._versions_of(epochs, newest)
        if last is None:
            return Rewritten(records.schema.empty_table(), records.schema.empty_table())
        at_end = self._dataset_of(self._open(last))
        after = {fragment.path: fragment for fragment in at_end.get_fragments()}
        before = {f.path: f for f in self._dataset_of(self._open(first - 1)).get_fragments()} if first else {}

        def rows(some: Mapping[str, ds.Fragment], others: Collection[str]) -> pa.Table:
            fragments = [fragment for path, fragment in some.items() if path not in others]
            return ds.FileSystemDataset(fragments, at_end.schema, at_end.format, at_end.filesystem).to_table()

        return Rewritten(rows(after, before), rows(before, after))

    def _versions_of(self, epochs: Epochs, newest: int) -> tuple[int, int | None]:
        """The first and the last version that some epochs made; the last is None where they made none."""
        first, last, writers = 0, None, epochs.of_writers()
        for number in range(newest, -1, -1):
            entry = log.version(self.path, number)
            if entry is None:
                raise SinkError(
                    f"sink '{self.name}': the log of {self.path} no longer has version {number}, so that nobody can"
                    " tell what the stream has written since"
                )
            for writer, (after, until) in writers.items():
                epoch = entry.transactions.get(writer)
                if epoch is not None and epoch <= after:
                    return first, last
                if epoch is not None and epoch <= until:
                    first, last = number, number if last is None else last
        return first, last

    def partitions(
        self, writes: Sequence[WriteIdentity], records: RecordType | None = None
    ) -> Mapping[WriteIdentity, ds.Dataset]:
        import pyarrow.dataset as ds

        if self.upserts:
            return super().partitions(writes, records)
        table = self.dataset()
        fragments = {fragment.path.lstrip("/"): fragment for fragment in table.get_fragments()}
        files = files_of_partitions(fragments, writes)
        if files is None:
            raise PartitionsUnknownError(
                f"sink '{self.name}': the table at {self.path} has files that no run of a partition wrote, such as"
                " those of a compaction, of a stream, or of a run without partitions"
            )
        return {
            write: ds.FileSystemDataset(
                [fragments[path] for path in paths], table.schema, table.format, table.filesystem
            )
            for write, paths in files.items()
        }

    def preview(self, spark: SparkSession, rows: int) -> pa.Table | None:
        """Read row by row.

        A scan that is abandoned leaves threads behind, which may hang a process that ends soon after.
        """
        import pyarrow.parquet as pq

        table = self._open()
        schema = pa.schema(table.schema().to_arrow())
        preview = schema.empty_table()
        for row in active_files(table):
            if preview.num_rows >= rows:
                break
            with (self.path / unquote(row["path"])).open("rb") as file:
                batch = next(
                    pq.ParquetFile(file, pre_buffer=False).iter_batches(batch_size=rows, use_threads=False), None
                )
            if batch is not None:
                values = partition_values(row)
                columns = [
                    (
                        batch.column(f.name)
                        if f.name in batch.schema.names
                        else pa.array([values.get(f.name)] * batch.num_rows, pa.string())
                    )
                    for f in schema
                ]
                preview = pa.concat_tables(
                    [preview, pa.table([c.cast(f.type) for c, f in zip(columns, schema, strict=True)], schema=schema)]
                )
        return preview.slice(0, rows)

    def _uri(self) -> str:
        return str(self.path)

    def _open(self, version: int | None = None) -> DeltaTable:
        from deltalake import DeltaTable

        return ask_store(self.path, lambda: DeltaTable(self._uri(), version, storage_options=self.storage_options))


def _quoted_names(names: Sequence[str]) -> str:
    return ", ".join(f"`{name.replace('`', '``')}`" for name in names)
