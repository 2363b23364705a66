"""How much of a DataFrame goes to a Python worker at a time.

After each row Spark measures whether the batch has its bytes (`spark.sql.execution.arrow.maxBytesPerBatch`). That takes
longer than writing the row (0.6 µs of CPU for six columns), and, where a list or map is None in row after row,
a time that grows with the square of the rows. Rows that are small need no such limit, since there is one of rows.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

import pyarrow as pa

from dagster_unified.arrow_types import has

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

MAX_BYTES = "spark.sql.execution.arrow.maxBytesPerBatch"
MAX_ROWS = "spark.sql.execution.arrow.maxRecordsPerBatch"
UNLIMITED = str((1 << 31) - 1)
"""What Spark takes for no limit of bytes."""


@contextmanager
def small_rows(spark: SparkSession) -> Iterator[None]:
    """Spark does not measure batches. Nothing changes where the session's configuration sets the limit of bytes."""
    if spark.conf.get(MAX_BYTES, None) is not None:
        yield
        return
    spark.conf.set(MAX_BYTES, UNLIMITED)
    try:
        yield
    finally:
        spark.conf.unset(MAX_BYTES)


def may_be_large(schemas: Iterable[pa.Schema]) -> bool:
    """Whether a row of one of these columns may be large: it has bytes in it."""
    return any(has(field.type, _is_bytes) for schema in schemas for field in schema)


def _is_bytes(kind: pa.DataType) -> bool:
    return bool(pa.types.is_binary(kind) or pa.types.is_large_binary(kind))
