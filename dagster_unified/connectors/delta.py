"""A table sink that is a Delta Lake table: transactional, readable by Spark, DuckDB, Polars and pandas, with no JVM jar.

Spark's workers write the data files; one small transaction, made with the `deltalake` package, commits them. The transaction
carries the execution's identity as an application transaction, so that a repeated or retried run never doubles or mixes rows.
"""

from __future__ import annotations

import copy
import json
from datetime import datetime, timezone
from typing import TYPE_CHECKING, Any, Literal, Self
from urllib.parse import unquote
from uuid import uuid4

import pyarrow as pa

from dagster_unified.connectors.base import SparkSink, WriteContext, WriteResult, spark_schema
from dagster_unified.connectors.paths import for_spark, remove_tree, storage_path
from dagster_unified.errors import PipelineError, SinkError, nearest
from dagster_unified.graph.code import digest
from dagster_unified.graph.connectors import Guarantee
from dagster_unified.graph.slices import WHOLE
from dagster_unified.operators.layout import TIMESTAMP
from dagster_unified.records import RecordType

if TYPE_CHECKING:
    import pyarrow.dataset as ds
    from deltalake import DeltaTable
    from deltalake.transaction import AddAction, RemoveAction, Transaction
    from pyspark.sql import DataFrame, SparkSession
    from upath import UPath

_PARTITION = "part-of-"
"""How the folders of files begin that belong to a partition of the pipeline."""

_COMMITS = 20
_NO_PARTITION = "__HIVE_DEFAULT_PARTITION__"


class DeltaSink(SparkSink):
    """Writes a Delta table at `path`, created when it is not there; in STREAMING one transaction per epoch.

    `mode` is `append`; `overwrite`, which replaces the table, or with `partition_by` only the partitions that are written; or
    `upsert`, where the last record of each `key` replaces the one in the table. Exactly-once in every mode.

    A BATCH run for a partition of the pipeline replaces what an earlier run had written of that partition, which it knows by its
    files' names, so compact only partitions that are not run again; `overwrite` also what runs without partitions had written.
    `upsert` merges: a row of a key that a partition no longer gives stays.
    """

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
        self.name = name or self.path.name
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
                f"sink '{self.name}': upsert needs key=, the columns that identify a row" if mode == "upsert" else f"sink '{self.name}': key= goes with mode='upsert'"
            )

    def describe(self) -> str:
        key = f" by {', '.join(self.key)}" if self.key else ""
        parts = f", partitioned by {', '.join(self.partition_by)}" if self.partition_by else ""
        return f"Delta table at {self.path}, {self.mode}{key}{parts}"

    def check(self, records: RecordType) -> None:
        for column in (*self.key, *self.partition_by):
            if column not in records.names:
                raise PipelineError(f"no field '{column}' in {records.describe()}{nearest(column, records.names)}")
        for field in records.schema:
            if pa.types.is_duration(field.type):
                raise PipelineError(f"field '{field.name}' is a timedelta, which Delta cannot hold; map it to seconds or milliseconds")

    def write(self, frame: DataFrame, context: WriteContext) -> WriteResult:
        from deltalake.transaction import Transaction

        frame = self._last_per_key(frame) if self.mode == "upsert" else frame.drop(TIMESTAMP)
        table = self._table(frame)
        app = f"dagster-unified/{context.pipeline}/{self.name}/{context.execution}/{context.partition}"
        of_partition = context.epoch is None and context.partition != WHOLE
        owner = None if not of_partition else f"dagster-unified/{context.pipeline}/{self.name}/partition/{context.partition}"
        mine = f"data-{digest(app)}-" if owner is None else f"{_PARTITION}{digest(owner)}-{digest(app)}-"
        if context.timeline:
            app += f"/timeline {context.timeline}"
        version = context.epoch or 0
        done = table.transaction_version(app)
        if done is not None and done >= version:
            return WriteResult(str(self.path), repeated=True)
        staged = self.path / f"_data-{uuid4().hex}" if self.mode == "upsert" else self.path / f"{mine}{version:010d}-{uuid4().hex}"
        try:
            writer = frame.write.mode("overwrite")
            if self.partition_by and self.mode != "upsert":
                writer = writer.partitionBy(*self.partition_by)
            writer.parquet(for_spark(staged))
            files = sorted(f for f in staged.rglob("*.parquet") if not f.name.startswith(("_", ".")))
            size = sum(int(f.stat().st_size) for f in files)
            context.before_commit()
            undone = self._undone(table, f"{mine}{version:010d}-") if context.timeline and done is None else []
            begins = self.mode == "overwrite" and context.epoch == 0
            wanted = context.epoch is None or begins or undone or any(map(_rows, files))
            if wanted and not self._commit(files, Transaction(app, version), mine, undone, owner):
                remove_tree(staged)
                return WriteResult(str(self.path), repeated=True)
        except BaseException:
            remove_tree(staged)
            raise
        if self.mode == "upsert":
            remove_tree(staged)
        return WriteResult(str(self.path), size)

    def elsewhere(self, path: str) -> Self:
        changed = copy.copy(self)
        changed.path = storage_path(path, "Delta sink")
        return changed

    def exists(self) -> bool:
        from deltalake import DeltaTable

        return bool(DeltaTable.is_deltatable(self._uri(), storage_options=self.storage_options))

    def dataset(self) -> ds.Dataset:
        """Through a file system of Arrow's own: deltalake's calls back into Python from threads that outlive a scan, which aborts, now and then, a process that ends soon after."""
        from pyarrow import fs

        inner = fs.LocalFileSystem() if self.path.protocol in ("", "file") else fs.PyFileSystem(fs.FSSpecHandler(self.path.fs))
        return self._open().to_pyarrow_dataset(filesystem=fs.SubTreeFileSystem(self.path.path, inner))

    def preview(self, spark: SparkSession, rows: int) -> pa.Table | None:
        """Read by hand: a scan that is given up leaves threads behind, which may hang a process that ends soon after."""
        import pyarrow.parquet as pq

        table = self._open()
        schema = pa.schema(table.schema().to_arrow())
        found = schema.empty_table()
        for row in self._rows_of(table):
            if found.num_rows >= rows:
                break
            with (self.path / unquote(row["path"])).open("rb") as file:
                batch = next(pq.ParquetFile(file, pre_buffer=False).iter_batches(batch_size=rows, use_threads=False), None)
            if batch is not None:
                told = _partition(row)
                columns = [batch.column(f.name) if f.name in batch.schema.names else pa.array([told.get(f.name)] * batch.num_rows, pa.string()) for f in schema]
                found = pa.concat_tables([found, pa.table([c.cast(f.type) for c, f in zip(columns, schema, strict=True)], schema=schema)])
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
            DeltaTable.create(self._uri(), wanted, mode="ignore", partition_by=list(self.partition_by) or None, storage_options=self.storage_options)
        table = self._open()
        held = spark_schema(pa.schema(table.schema().to_arrow()))
        given = spark_schema(wanted)
        for field in given:
            if field.name not in held.names:
                raise SinkError(f"sink '{self.name}': the table at {self.path} has no column '{field.name}'; write to another table, or add the column to it")
            if held[field.name].dataType != field.dataType:
                raise SinkError(
                    f"sink '{self.name}': column '{field.name}' is {field.dataType.simpleString()}, and {held[field.name].dataType.simpleString()} in the table at {self.path}; write to another table, or make them the same"
                )
        return table

    def _last_per_key(self, frame: DataFrame) -> DataFrame:
        """One row per key: the last by event time, and of equal ones the last that was emitted."""
        from pyspark.sql import functions as F

        columns = [c for c in frame.columns if c != TIMESTAMP]
        order = [F.col(TIMESTAMP)] if TIMESTAMP in frame.columns else []
        numbered = frame.withColumn("__n", F.monotonically_increasing_id())
        last = numbered.groupBy(*self.key).agg(F.max_by(F.struct(*columns), F.struct(*order, F.col("__n"))).alias("__row"))
        return last.select(*[f"__row.{c}" for c in columns])

    def _commit(self, files: list[UPath], transaction: Transaction, mine: str, undone: list[RemoveAction], owner: str | None) -> bool:
        """Commits what was staged; where another writer was first, once more over what that one left. False where that one was this execution."""
        from deltalake.exceptions import CommitFailedError

        for attempt in range(_COMMITS):
            try:
                return self._try_commit(self._open(), files, transaction, mine, undone, owner)
            except CommitFailedError:
                if attempt == _COMMITS - 1:
                    raise
        return False

    def _try_commit(self, table: DeltaTable, files: list[UPath], transaction: Transaction, mine: str, undone: list[RemoveAction], owner: str | None) -> bool:
        from deltalake.transaction import CommitProperties, Transaction

        held = table.transaction_version(transaction.app_id)
        if held is not None and held >= transaction.version:
            return False
        transactions = [transaction]
        if owner is not None:
            # Of two runs of a partition at once, the second to commit must see what the first has added, and remove it.
            transactions.append(Transaction(owner, (table.transaction_version(owner) or 0) + 1))
        properties = CommitProperties(app_transactions=transactions)
        filled = [f for f in files if _rows(f)]
        if self.mode == "upsert" and filled:
            self._merge(table, filled, properties)
            return True
        adds = [self._add(f) for f in filled]
        actions: list[Any] = [*adds, *undone]
        if owner is not None:
            actions += self._replaced(table, adds, owner)
        elif self.mode == "overwrite":
            actions += self._removed(table, adds, mine)
        table.create_write_transaction(actions, "append", table.schema(), partition_by=list(self.partition_by) or None, commit_properties=properties)
        return True

    def _merge(self, table: DeltaTable, files: list[UPath], properties: Any) -> None:
        import pyarrow.dataset as ds  # loads pandas where it is installed, so only where it is needed

        source = (
            ds.dataset([str(f) for f in files], format="parquet")
            if not files or not files[0].protocol
            else ds.dataset([f.path for f in files], filesystem=files[0].fs, format="parquet")
        )
        same = " AND ".join(f'(target."{k}" IS NOT DISTINCT FROM source."{k}")' for k in self.key)
        merger = table.merge(source.scanner().to_reader(), predicate=same, source_alias="source", target_alias="target", commit_properties=properties)
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
        return AddAction(relative.as_posix(), int(file.stat().st_size), values, modified, True, json.dumps({"numRecords": _rows(file)}))

    def _undone(self, table: DeltaTable, first: str) -> list[RemoveAction]:
        """Removals of what a STREAMING job had added from an epoch on, to which it has gone back. A merge leaves nothing that could be told by its file."""
        if self.mode == "upsert":
            return []
        prefix = first[: -len("0000000000-")]
        return [self._remove(row) for row in self._rows_of(table) if row["path"].startswith(prefix) and row["path"].split("/")[0] >= first]

    def _rows_of(self, table: DeltaTable) -> list[dict[str, Any]]:
        found: list[dict[str, Any]] = pa.table(table.get_add_actions(flatten=False)).to_pylist()
        return found

    def _remove(self, row: dict[str, Any]) -> RemoveAction:
        from deltalake.transaction import RemoveAction

        return RemoveAction(row["path"], True, int(datetime.now(timezone.utc).timestamp() * 1000), row["size_bytes"], _partition(row))

    def _replaced(self, table: DeltaTable, adds: list[AddAction], owner: str) -> list[Any]:
        """Removals of what earlier runs of a partition had written; with `overwrite` also of what no partition has."""
        written = [dict(a.partition_values) for a in adds]
        own = f"{_PARTITION}{digest(owner)}-"

        def goes(row: dict[str, Any]) -> bool:
            if row["path"].startswith(_PARTITION):
                return bool(row["path"].startswith(own))
            return self.mode == "overwrite" and (not self.partition_by or _partition(row) in written)

        return [self._remove(row) for row in self._rows_of(table) if goes(row)]

    def _removed(self, table: DeltaTable, adds: list[AddAction], mine: str) -> list[Any]:
        """Removals of what others had put into the table, or into the partitions that are written: a STREAMING job keeps what it wrote in earlier epochs."""
        written = [dict(a.partition_values) for a in adds]
        others = [row for row in self._rows_of(table) if not row["path"].startswith(mine)]
        return [self._remove(row) for row in others if _partition(row) in written or not self.partition_by]


def _partition(row: dict[str, Any]) -> dict[str, str | None]:
    return {k: None if v is None else str(v) for k, v in (row.get("partition") or row.get("partition_values") or {}).items()}


def _rows(file: UPath) -> int:
    import pyarrow.parquet as pq

    with file.open("rb") as opened:
        return int(pq.read_metadata(opened).num_rows)
