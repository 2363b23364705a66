"""Intermediates as DataFrames: written for one partition or for several at once, and read back in the columns of a
stream.

Knows the store and Spark; not what a stage computes.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from dagster_unified.connectors.paths import for_spark, remove_tree
from dagster_unified.engine.batch.intermediates.store import IntermediateStore, Manifest
from dagster_unified.operators.layout import OUTPUT, PART, StreamLayout, output_column

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession
    from upath import UPath

CODEC = "lz4_raw"
"""Written once and read once, soon: measured against zstd and snappy, this costs the least time for a stage and its
reader.
"""


def write(frame: DataFrame, attempt: UPath) -> None:
    """Writes one partition into the folder of an attempt."""
    frame.write.mode("overwrite").option("compression", CODEC).parquet(for_spark(attempt))


def write_parts(frame: DataFrame, attempts: Sequence[UPath]) -> dict[int, UPath]:
    """Writes several partitions, whose places the column `PART` tells, into the folders of their attempts, in one job;
    gives those that have rows.
    """
    together = attempts[0].with_name(f"{attempts[0].name}-and-others")
    try:
        frame.hint("rebalance", PART).write.mode("overwrite").option("compression", CODEC).partitionBy(PART).parquet(
            for_spark(together)
        )
        filled = {place: attempt for place, attempt in enumerate(attempts) if (together / f"{PART}={place}").exists()}
        for place, attempt in filled.items():
            for file in (
                together / f"{PART}={place}"
            ).iterdir():  # file by file: not every file system can move a folder
                file.rename(attempt / file.name)
        return filled
    finally:
        remove_tree(together)


def read(
    spark: SparkSession,
    store: IntermediateStore,
    manifests: Sequence[Manifest],
    uid: str,
    tag: str | None,
    layout: StreamLayout,
    further: Sequence[str] = (),
) -> DataFrame:
    """A stream of an intermediate in the columns of its layout, and `further` ones; of several partitions' together
    with the place of a row's own, in the column `PART`.
    """
    from pyspark.sql import functions as F

    beside = [*further, *([PART] if len(manifests) > 1 else [])]
    alike: dict[tuple[str, int, bool], dict[int, UPath]] = {}
    for place, manifest in enumerate(manifests):
        number = next(i for i, s in enumerate(manifest.streams) if (s.uid, s.tag) == (uid, tag))
        folders = alike.setdefault((manifest.schema, number, len(manifest.streams) == 1), {})
        if manifest.files:
            folders[place] = store.data(manifest)
    frames = []
    for (schema, number, alone), folders in alike.items():
        rows = placed(spark, schema, folders) if len(manifests) > 1 else _parquet(spark, schema, list(folders.values()))
        names = layout.schema.names
        column = output_column(number)
        frames.append(
            rows.select(*names, *beside)
            if alone
            else rows.where(F.col(OUTPUT) == number).select(*[f"{column}.{name}" for name in names], *beside)
        )
    return functools.reduce(lambda some, more: some.unionByName(more), frames)


def placed(spark: SparkSession, schema: str, folders: Mapping[int, UPath]) -> DataFrame:
    """The rows of several partitions' folders as they were written, each with the place of its folder: no two attempts'
    have one name.
    """
    from pyspark.sql import functions as F

    rows = _parquet(spark, schema, list(folders.values()))
    if not folders:
        return rows.withColumn(PART, F.lit(0))
    places = F.create_map(*[F.lit(v) for place, folder in folders.items() for v in (folder.name, place)])
    own = F.try_element_at(places, F.regexp_extract("_metadata.file_path", r"/(data-[0-9a-f]+)/[^/]*$", 1))
    return rows.withColumn(
        PART,
        F.coalesce(own, F.raise_error(F.concat(F.lit("a file of no partition: "), "_metadata.file_path")).cast("int")),
    )


def counted(rows: DataFrame, parts: int, streams: int) -> list[list[int]]:
    """How many rows each stream has in each partition."""
    by = [PART] if streams == 1 else [PART, OUTPUT]
    found = {
        (row[PART], 0 if streams == 1 else row[OUTPUT]): row["count"] for row in rows.groupBy(*by).count().collect()
    }
    return [[found.get((part, stream), 0) for stream in range(streams)] for part in range(parts)]


def _parquet(spark: SparkSession, schema: str, folders: Sequence[UPath]) -> DataFrame:
    """Files in one scan, which may put those of several partitions into one task."""
    from pyspark.sql.types import StructType

    held = StructType.fromJson(json.loads(schema))
    return spark.read.schema(held).parquet(*map(for_spark, folders)) if folders else spark.createDataFrame([], held)
