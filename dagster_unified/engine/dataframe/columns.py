"""Column expressions as an author records them, and as Spark takes them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from dagster_unified.graph.expressions import Column as Recorded

if TYPE_CHECKING:
    from pyspark.sql import Column
    from pyspark.sql.types import DataType


def spark_column(expression: object) -> Column:
    """An expression as Spark's Column: a recorded one, SQL text, or a Column already."""
    from pyspark.sql import functions as F

    if isinstance(expression, Recorded):
        column: Column = expression.replay(F)
        return column
    return F.expr(expression) if isinstance(expression, str) else expression  # type: ignore[return-value]


def all_set(names: Sequence[str]) -> Column:
    """True for a row in which none of these columns is null."""
    from pyspark.sql import functions as F

    condition = F.col(names[0]).isNotNull()
    for name in names[1:]:
        condition = condition & F.col(name).isNotNull()
    return condition


def has_nan(column: Column, kind: DataType) -> Column | None:
    """True for a value of a key that is NaN or has it in it, never null; None where its type has no such value."""
    from pyspark.sql import functions as F
    from pyspark.sql.types import DoubleType, StructType

    if isinstance(kind, DoubleType):
        return F.isnan(column)
    found = None
    for field in kind if isinstance(kind, StructType) else ():
        inner = has_nan(column[field.name], field.dataType)
        if inner is not None:
            found = inner if found is None else found | inner
    return found
