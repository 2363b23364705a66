"""The columns of a DataFrame that a source reads: the records', the part of a row, and what does not fit."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

import pyarrow as pa

if TYPE_CHECKING:
    from pyspark.sql import Column
    from pyspark.sql.types import StructType


OnMalformed = Literal["fail", "drop", "divert"]
"""What becomes of rows that do not fit the records."""

PART = "__part"
"""A column of a stream with the part of the source that a row is of, such as a partition of a topic.

All rows that one task reads are of one part. Each part then has a watermark of its own.
"""

MALFORMED = "__malformed"
"""A struct column (file, row, reason), null in every row that fits."""


def fitting(source: str) -> Column:
    """A condition on a frame with `MALFORMED` that is true for a row that fits.

    A row that does not fit raises an error that says where it is. `non_deterministic` keeps a later condition from
    hiding it.
    """
    from pyspark.sql import functions as F

    # the row is last, since Spark cuts what is long
    parts = [F.col(f"{MALFORMED}.{part}") for part in ("file", "reason", "row")]
    message = F.concat(
        F.lit("dagster_unified.errors.MalformedInputError: "),
        F.to_json(F.struct(F.lit(source).alias("source"), *parts)),
    )
    return F.when(F.col(MALFORMED).isNull(), F.lit(True)).otherwise(
        F.raise_error(non_deterministic(message)).cast("boolean")
    )


def non_deterministic(value: Column) -> Column:
    """The same value, of which Catalyst assumes that it may be another one when it is asked again.

    So the checks of rows stay where they are: Catalyst would evaluate the conditions of later filters first, or in the
    reader, and leave rows out before they are checked; and from a check it would infer what holds of columns that are
    renamed later, which takes twice the time and memory for each of them.
    """
    from pyspark.sql import functions as F

    return F.when(F.spark_partition_id() >= 0, value)


def spark_schema(schema: pa.Schema) -> StructType:
    """An Arrow schema as Spark's, everything nullable at every depth: Spark's readers do not promise more."""
    from pyspark.sql.pandas.types import from_arrow_schema
    from pyspark.sql.types import StructType

    converted = from_arrow_schema(pa.schema([pa.field(f.name, _nullable(f.type)) for f in schema]))
    return StructType(list(converted.fields))


def _nullable(kind: pa.DataType) -> pa.DataType:
    if pa.types.is_struct(kind):
        return pa.struct([pa.field(f.name, _nullable(f.type)) for f in kind])
    if pa.types.is_list(kind):
        return pa.list_(pa.field("element", _nullable(kind.value_type)))
    if pa.types.is_map(kind):
        return pa.map_(_nullable(kind.key_type), _nullable(kind.item_type))
    return kind


@dataclass(frozen=True)
class Malformed:
    """Something that a source holds and that does not fit its record type.

    `place` says where it is, such as `sales[0]@17`; `content` is what stands there.
    """

    place: str
    content: str
    reason: str
