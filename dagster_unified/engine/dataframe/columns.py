"""Column expressions as an author records them, and as Spark takes them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from dagster_unified.graph.expressions import Column as Recorded

if TYPE_CHECKING:
    from pyspark.sql import Column, DataFrame
    from pyspark.sql.types import DataType


def spark_column(expression: object) -> Column:
    """An expression as Spark's Column: a recorded one, SQL text, or a Column already."""
    from pyspark.sql import functions as F

    if isinstance(expression, Recorded):
        column: Column = expression.replay(F)
        return column
    return F.expr(expression) if isinstance(expression, str) else expression  # type: ignore[return-value]


def aggregate_column(expression: object, frame: DataFrame) -> Column:
    """An aggregate of a frame's columns, in which a sum of whole numbers may pass 64 bits on its way and come back.

    Tasks add up in no order, so that a sum whose result fits would be an error now and then. One in SQL text, and one
    of a Column of Spark's, are as Spark has them.
    """
    if not isinstance(expression, Recorded):
        return spark_column(expression)
    column: Column = expression.replay(_ExactSums(frame))
    return column


class _ExactSums:
    """Spark's functions, with `sum` as `aggregate_column` has it."""

    def __init__(self, frame: DataFrame) -> None:
        self._frame = frame

    def __getattr__(self, name: str) -> Callable[..., Column]:
        from pyspark.sql import functions as F

        function: Callable[..., Column] = getattr(F, name)
        return function

    def sum(self, col: Column | str) -> Column:
        """The sum of the upper halves of whole numbers, and of the lower ones; each has room for 2^31 records."""
        from pyspark.sql import functions as F
        from pyspark.sql.types import LongType

        number = F.col(col) if isinstance(col, str) else col
        if not isinstance(self._frame.select(number).schema[0].dataType, LongType):
            return F.sum(number)
        upper, lower = F.sum(F.shiftright(number, 32)), F.sum(number.bitwiseAND(F.lit(_LOWER)))
        return (upper + F.shiftright(lower, 32)) * F.lit(_LOWER + 1) + lower.bitwiseAND(F.lit(_LOWER))


_LOWER = (1 << 32) - 1
"""The lower half of 64 bits."""


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
