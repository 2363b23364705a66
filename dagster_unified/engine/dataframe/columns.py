"""Column expressions as an author records them, and as Spark takes them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from dagster_unified.graph.expressions import Column as Recorded

if TYPE_CHECKING:
    from pyspark.sql import Column


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
