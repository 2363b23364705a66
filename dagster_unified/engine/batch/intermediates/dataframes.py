"""Intermediates as DataFrames, for one partition or several at once.

Knows the store and Spark; not what a stage computes.
"""

from __future__ import annotations

import functools
import json
import re
from collections.abc import Mapping, Sequence
from pathlib import PurePosixPath
from typing import TYPE_CHECKING

from dagster_unified.connectors.paths import for_spark, is_in_object_store, load, remove_tree, sizes
from dagster_unified.engine.batch.intermediates.store import IntermediateStore, Manifest
from dagster_unified.engine.dataframe.partitions import PartitionAxis
from dagster_unified.engine.spark_internals import in_place
from dagster_unified.operators.layout import OUTPUT, PARTITION_INDEX, StreamLayout, output_column

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession
    from upath import UPath

CODEC = "lz4_raw"
"""The codec of intermediates, which are written once and read once, soon.

Measured against zstd and snappy, it costs a stage and its reader the least time.
"""


_COMMITTED_BY_TASKS = {
    "mapreduce.fileoutputcommitter.algorithm.version": 2,
    "mapreduce.fileoutputcommitter.marksuccessfuljobs": False,
}
"""Lets each task move its file to its place, where otherwise the driver moves all files once more.

To move a file in a bucket is to copy it. A worker that was given up, and wakes up after the manifest was written, may
move another file over that of its successor; then the manifest says another size, and the intermediate is damaged.
"""


def write(frame: DataFrame, attempt: UPath) -> None:
    """Writes one partition into the folder of an attempt."""
    options = _COMMITTED_BY_TASKS if is_in_object_store(attempt) else {}
    frame.write.mode("overwrite").options(compression=CODEC, **options).parquet(for_spark(attempt))


def write_partitions(frame: DataFrame, attempts: Sequence[UPath]) -> dict[int, UPath]:
    """Write the rows of several partitions, by their partition index, into the folders of their attempts, in one job.

    Returns the folders that got rows.
    """
    together = attempts[0].with_name(f"{attempts[0].name}-and-others")
    try:
        options = in_place.options(frame.sparkSession, together)
        writer = frame.hint("rebalance", PARTITION_INDEX).write.mode("overwrite").option("compression", CODEC)
        writer.partitionBy(PARTITION_INDEX).options(**options).parquet(for_spark(together))
        written = in_place.take(together) if options else sizes(together)
        of_partitions = {path: int(found[1]) for path in written if (found := _PARTITION.search(path)) is not None}
        _move({together / path: attempts[index] / PurePosixPath(path).name for path, index in of_partitions.items()})
        return {index: attempts[index] for index in sorted(set(of_partitions.values()))}
    finally:
        remove_tree(together)


_PARTITION = re.compile(rf"(?:^|/){PARTITION_INDEX}=(\d+)/")
"""In the path of a file, the index of its partition."""

_AT_ONCE = 8
"""Files that a store copies at once."""


def _move(files: Mapping[UPath, UPath]) -> None:
    """Moves files, each by itself: not every file system can move a folder.

    A store of objects copies them, several at once; what is copied goes with its folder.
    """
    some = next(iter(files), None)
    if some is not None and is_in_object_store(some):
        origins, targets = ([path.path for path in paths] for paths in (files, files.values()))
        some.fs.copy(origins, targets, batch_size=_AT_ONCE)
        return
    for origin, target in files.items():
        origin.rename(target)


def read(
    spark: SparkSession,
    store: IntermediateStore,
    manifests: Sequence[Manifest],
    uid: str,
    tag: str | None,
    layout: StreamLayout,
    further: Sequence[str] = (),
) -> DataFrame:
    """A stream of an intermediate in the columns of its layout, and `further` ones.

    Of several partitions' intermediates, each row has its partition index.
    """
    axis = PartitionAxis(len(manifests))
    pass_through = [*further, *axis.columns]
    alike: dict[tuple[str, int, bool], dict[int, UPath]] = {}
    for index, manifest in enumerate(manifests):
        number = next(i for i, s in enumerate(manifest.streams) if (s.uid, s.tag) == (uid, tag))
        folders = alike.setdefault((manifest.schema, number, len(manifest.streams) == 1), {})
        if manifest.files:
            folders[index] = store.data(manifest)
    frames = []
    for (schema, number, alone), folders in alike.items():
        rows = indexed(spark, schema, folders) if axis.enabled else _parquet(spark, schema, list(folders.values()))
        names = layout.schema.names
        if not alone:
            rows = rows.where(f"{OUTPUT} = {number}")
            names = [f"{output_column(number)}.{name}" for name in names]
        frames.append(rows.select(*names, *pass_through))
    return functools.reduce(lambda some, more: some.unionByName(more), frames)


def indexed(spark: SparkSession, schema: str, folders: Mapping[int, UPath]) -> DataFrame:
    """The rows of several partitions' folders as they were written, with their partition index.

    The name of a row's folder says which it is: no two attempts share one.
    """
    from pyspark.sql import functions as F

    rows = _parquet(spark, schema, list(folders.values()))
    if not folders:
        return rows.withColumn(PARTITION_INDEX, F.lit(0))
    indexes = F.create_map(*[F.lit(v) for index, folder in folders.items() for v in (folder.name, index)])
    own = F.try_element_at(indexes, F.regexp_extract("_metadata.file_path", r"/(data-[0-9a-f]+)/[^/]*$", 1))
    unknown = F.raise_error(F.concat(F.lit("a file of no partition: "), "_metadata.file_path")).cast("int")
    return rows.withColumn(PARTITION_INDEX, F.coalesce(own, unknown))


def counted(rows: DataFrame, partitions: int, streams: int) -> list[list[int]]:
    """How many rows each stream has in each partition."""
    alone = streams == 1
    by = [PARTITION_INDEX] if alone else [PARTITION_INDEX, OUTPUT]
    found = {
        (row[PARTITION_INDEX], 0 if alone else row[OUTPUT]): row["count"] for row in rows.groupBy(*by).count().collect()
    }
    return [[found.get((index, stream), 0) for stream in range(streams)] for index in range(partitions)]


def _parquet(spark: SparkSession, schema: str, folders: Sequence[UPath]) -> DataFrame:
    """Files in one scan, which may put those of several partitions into one task."""
    from pyspark.sql.types import StructType

    held = StructType.fromJson(json.loads(schema))
    if not folders:
        return spark.createDataFrame([], held)
    return load(spark.read.format("parquet").schema(held), folders)
