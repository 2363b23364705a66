"""The first lines of text files, which the driver looks at before Spark reads the files."""

from __future__ import annotations

import re
import zlib
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import TYPE_CHECKING

from dagster_unified.connectors.paths import for_spark, load_one

if TYPE_CHECKING:
    from pyspark.sql import SparkSession
    from upath import UPath

_BYTES = (1 << 14, 1 << 20)
"""Of a file, in which its first line is looked for: at first, and where it does not end there."""

_THREADS = 32
_FEW = 4
_DEFLATED = {".gz": 31, ".deflate": 15}
"""Compressed files of which a beginning is enough, and zlib's word for them."""

_COMPRESSED = (".bz2", ".lz4", ".snappy", ".zst", ".zstd", ".xz")
"""Compressed files that Spark, or a codec of Hadoop's, reads."""


def first_lines(spark: SparkSession, files: Sequence[UPath]) -> Iterator[str | None]:
    """The first line of each file that has more than blanks; None where there is none, or the file is gone."""
    first = partial(_first_line, spark)
    if len(files) < _FEW:
        yield from map(first, files)
        return
    with ThreadPoolExecutor(_THREADS) as pool:
        yield from pool.map(first, files)


def _first_line(spark: SparkSession, file: UPath) -> str | None:
    if file.suffix in _COMPRESSED:
        rows = load_one(spark.read.format("text"), for_spark(file))
        lines = rows.where(rows.value.rlike(r"[^\x00-\x20]")).limit(1).collect()
        return lines[0].value if lines else None
    for size in _BYTES:
        try:
            start: bytes = file.fs.cat_file(file.path, 0, size)
        except FileNotFoundError:
            return None
        if (window := _DEFLATED.get(file.suffix)) is not None:
            start = zlib.decompressobj(window).decompress(start)
        text = re.sub(r"\A[\x00-\x20]+", "", start.decode("utf-8-sig", "replace"))
        line, ended, _ = re.sub("\r\n?", "\n", text).partition("\n")
        if ended or len(start) < size:
            break
    return line or None
