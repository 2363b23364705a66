"""The columns of a DataFrame as a record's fields: read where no value changes by it; and rows that do not fit."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

import pyarrow as pa

from dagster_unified.errors import PipelineError

if TYPE_CHECKING:
    from pyspark.sql import Column, DataFrame
    from pyspark.sql.types import DataType, StructField, StructType

OnMalformed = Literal["fail", "drop", "divert"]
"""How rows that do not fit the records are treated."""

PART = "__part"
"""A column of a stream with the part of the source that a row belongs to, such as a partition of a topic.

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
    """The same value, marked so that Catalyst assumes that each evaluation may differ.

    So the checks of rows stay where they are: else Catalyst would evaluate the conditions of later filters first, or in
    the reader, and drop rows before they are checked; and from a check it would infer facts about columns that are
    renamed later, which takes twice the time and memory for each of them.
    """
    from pyspark.sql import functions as F

    return F.when(F.spark_partition_id() >= 0, value)


def spark_schema(schema: pa.Schema) -> StructType:
    """An Arrow schema as Spark's, nullable at every depth: Spark's readers promise no more."""
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
    """An entry of a source that does not fit its record type.

    `place` says where it is, such as `sales[0]@17`; `content` is its text.
    """

    place: str
    content: str
    reason: str


_WHOLE = ("tinyint", "smallint", "int", "bigint")

_TAKEN_FROM = {
    "bigint": _WHOLE,
    "double": (*_WHOLE, "float"),
    "string": (*_WHOLE, "date", "binary"),
    "binary": ("string",),
    "timestamp": ("timestamp_ntz", "date"),
}
"""By the type wanted, the simple types that convert to it without loss, besides decimals."""


def as_fields(frame: DataFrame, schema: pa.Schema, where: str) -> DataFrame:
    """The columns of a record's fields, in its types; raises `PipelineError` where a value could change.

    A whole number that a float, or 64 bits, cannot hold is an error when it is read; a decimal becomes the nearest
    float.
    """
    wanted = spark_schema(schema)
    for field in wanted:
        actual = frame.schema[field.name].dataType
        if not _fits(actual, field.dataType):
            raise PipelineError(
                f"{where}: column '{field.name}' is {actual.simpleString()}, and a value of it could change on its way"
                f" to field '{field.name}', which is {schema.field(field.name).type}; declare a type that holds it as"
                " it is, and convert it in a map"
            )
    return frame.select(*[_as_field(frame, field, where).alias(field.name) for field in wanted])


def widened(actual: StructType, schema: pa.Schema) -> StructType:
    """The columns of a record's fields, with small numbers widened to the fields' types."""
    from pyspark.sql.types import StructType

    return StructType([_wide(actual[field.name], field) for field in spark_schema(schema)])


def _wide(actual: StructField, wanted: StructField) -> StructField:
    small = (actual.dataType.simpleString(), wanted.dataType.simpleString())
    widens = (small[1] == "bigint" and small[0] in _WHOLE) or small == ("float", "double")
    return wanted if widens else actual


def _as_field(frame: DataFrame, field: StructField, where: str) -> Column:
    from pyspark.sql import functions as F

    column, kind = F.col(field.name), field.dataType
    converted = column.try_cast(kind)
    actual, wanted = frame.schema[field.name].dataType, kind.simpleString()
    if (actual.simpleString(), wanted) == ("bigint", "double"):
        # a float of 2**63 comes back as the largest bigint
        exact = (converted < 2.0**63) & F.coalesce(converted.try_cast("bigint") == column, F.lit(False))
        lacking, instead = "a float", "an int"
    elif actual.typeName() == "decimal" and wanted == "bigint":
        exact = converted.isNotNull()
        lacking, instead = "64 bits", "a Decimal"
    else:
        return column.cast(kind)
    problem = F.concat(
        F.lit(f"dagster_unified.errors.MalformedInputError: {where}: column '{field.name}' has "),
        column.cast("string"),
        F.lit(f", which {lacking} cannot hold; declare field '{field.name}' as {instead}"),
    )
    return F.when(column.isNull() | exact, converted).otherwise(F.raise_error(problem).cast(kind))


def _fits(actual: DataType, wanted: DataType) -> bool:
    from pyspark.sql.types import ArrayType, DecimalType, MapType, StructType

    if isinstance(wanted, StructType):
        return (
            isinstance(actual, StructType)
            and actual.names == wanted.names
            and all(_fits(a.dataType, b.dataType) for a, b in zip(actual, wanted, strict=True))
        )
    if isinstance(wanted, ArrayType):
        return isinstance(actual, ArrayType) and _fits(actual.elementType, wanted.elementType)
    if isinstance(wanted, MapType):
        return (
            isinstance(actual, MapType)
            and _fits(actual.keyType, wanted.keyType)
            and _fits(actual.valueType, wanted.valueType)
        )
    name = wanted.simpleString()
    if isinstance(actual, DecimalType):
        if isinstance(wanted, DecimalType):
            return actual.scale <= wanted.scale and actual.precision - actual.scale <= wanted.precision - wanted.scale
        # what is too large is an error of the cast's
        return name == "double" or (name == "bigint" and actual.scale == 0)
    name_of_actual = actual.simpleString()
    if isinstance(wanted, DecimalType):
        return name_of_actual in _WHOLE
    return name_of_actual == name or name_of_actual in _TAKEN_FROM.get(name, ())
