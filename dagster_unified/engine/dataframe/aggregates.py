"""Column aggregates that go on from partition to partition: taken apart into parts that can be merged, such as a sum
and a count.

Knows expressions and Spark's DataFrame API. The parts of a key lie in a row of state as JSON, by name, so that they can
be read.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from dagster_unified.errors import UnsupportedError
from dagster_unified.graph.expressions import Column as Recorded
from dagster_unified.operators.layout import CARRIED_LAYOUT, PART

if TYPE_CHECKING:
    from pyspark.sql import Column, DataFrame

MERGED_BY = {
    "count": "sum", "sum": "sum", "min": "min", "max": "max", "bool_and": "bool_and", "every": "bool_and", "bool_or":
    "bool_or",
    "some": "bool_or", "bit_and": "bit_and", "bit_or": "bit_or", "bit_xor": "bit_xor", "count_if": "sum",
}  # fmt: skip
"""Aggregates whose results over parts give the one over all, and by what."""

_MEANS = ("avg", "mean")
_FORMAT = {"timestampFormat": "yyyy-MM-dd'T'HH:mm:ss.SSSSSSXXX", "timestampNTZFormat": "yyyy-MM-dd'T'HH:mm:ss.SSSSSS"}
_TOLD, _TOLD_IN, _UNTIL = "__told", "__told_in", "__until"
"""Of the merged parts of a key after some partition: whether its aggregates are told, in which partition, and the first
partition that they are not the state before.
"""


@dataclass(frozen=True)
class Closing:
    """When keys are complete, as windows are by event time. Milliseconds since the epoch."""

    last: Column
    """A key's last moment."""

    begin: int
    """The watermark that the partition before ended with."""

    ends: Sequence[int]
    """The watermarks that the partitions end with."""


@dataclass(frozen=True)
class CarriedAggregate:
    """The merged parts of every key, and what the aggregates are in terms of them."""

    frame: DataFrame
    keys: Sequence[str]
    parts: Sequence[str]
    results: Sequence[Recorded]
    beside: Sequence[str] = ()

    def finished(self, column: Callable[[object], Column]) -> DataFrame:
        """The aggregates of the keys that a partition has; or, where keys are completed, of those that it completes."""
        from pyspark.sql import functions as F

        told = self.frame.where(_TOLD)
        return told.select(
            *self.keys, *map(column, self.results), *(F.col(_TOLD_IN).alias(name) for name in self.beside)
        )

    def state(self) -> DataFrame:
        """What goes on to the next partition, in the columns of `CARRIED_LAYOUT`; of several partitions, what goes on
        from each.
        """
        from pyspark.sql import functions as F

        first = F.greatest(F.col(PART), F.lit(0))
        frame = self.frame.where(F.col(_UNTIL) > first).withColumn(
            PART, F.explode(F.sequence(first, F.col(_UNTIL) - 1))
        )
        whole = F.to_json(F.struct(*self.keys, *self.parts), _FORMAT).cast("binary")
        columns = (F.lit(0).cast("bigint"), F.lit(0).cast("bigint"), whole)
        return frame.select(
            *[c.alias(name) for c, name in zip(columns, CARRIED_LAYOUT.schema.names, strict=True)], *self.beside
        )


def carried_aggregate(
    where: str,
    frame: DataFrame,
    keys: Sequence[str],
    columns: Sequence[object],
    column: Callable[[object], Column],
    before: DataFrame | None,
    several: int,
    closing: Closing | None = None,
) -> CarriedAggregate:
    """Aggregates a partition, or `several`, and merges what the partition before left.

    With `closing`, keys are told and forgotten when they are complete, and rows that come later are dropped; else every
    partition tells the keys that it has, and all are kept. Raises `UnsupportedError` naming an aggregate that has no
    such parts.
    """
    from pyspark.sql import Window
    from pyspark.sql import functions as F

    beside = [PART] if several > 1 else []
    parts: dict[str, tuple[Recorded, str]] = {}
    results = [_apart(c, parts, where) for c in columns]
    own = frame.groupBy(*keys, *beside).agg(*[column(part).alias(name) for name, (part, _) in parts.items()])
    if not beside:
        own = own.withColumn(PART, F.lit(0))
    complete = F.lit(several)
    if closing is not None:
        for place, end in reversed(list(enumerate(closing.ends))):
            complete = F.when(closing.last <= end, place).otherwise(complete)
        own = own.where((closing.last > closing.begin) & (F.col(PART) <= complete))
    merged = own
    if before is not None:
        held = before.select(
            F.from_json(F.col("state").cast("string"), own.drop(PART).schema, _FORMAT).alias("s")
        ).select("s.*")
        merged = own.unionByName(held.withColumn(PART, F.lit(-1)))
    in_order = Window.partitionBy(*keys).orderBy(PART)
    so_far = in_order.rowsBetween(Window.unboundedPreceding, Window.currentRow)
    values = [
        getattr(F, by)(name).over(so_far).cast(own.schema[name].dataType).alias(name) for name, (_, by) in parts.items()
    ]
    following = F.lead(PART).over(in_order)
    told = F.col(PART) >= 0 if closing is None else following.isNull() & (complete < several)
    told_in = F.col(PART) if closing is None else complete
    until = F.least(F.coalesce(following, F.lit(several)), complete)
    rows = merged.select(*keys, PART, *values, told.alias(_TOLD), told_in.alias(_TOLD_IN), until.alias(_UNTIL))
    return CarriedAggregate(rows, keys, list(parts), results, beside)


def _apart(expression: object, parts: dict[str, tuple[Recorded, str]], where: str) -> Recorded:
    """The expression over merged parts, which are collected in `parts` with what merges them."""
    if not isinstance(expression, Recorded):
        raise UnsupportedError(
            f"{where}: carry_state cannot take apart {expression!r}; write it with dagster_unified.api.functions"
        )
    if expression.target is None and expression.name in MERGED_BY:
        return _part(expression, MERGED_BY[expression.name], parts)
    if expression.target is None and expression.name in _MEANS:
        total, count = (Recorded(None, name, expression.arguments) for name in ("sum", "count"))
        return Recorded(_part(total, "sum", parts), "__truediv__", (_part(count, "sum", parts),))
    if expression.target is None and expression.name in ("lit", "expr", "col", "column"):
        if expression.name == "lit":
            return expression
        raise UnsupportedError(
            f"{where}: carry_state cannot take apart {expression!r}, which stands outside of an aggregate"
        )
    if expression.target is None and not any(isinstance(a, Recorded) and _aggregates(a) for a in expression.arguments):
        known = ", ".join(sorted({*MERGED_BY, *_MEANS}))
        raise UnsupportedError(
            f"{where}: carry_state cannot hand on {expression!r} from partition to partition; it can {known}, or use"
            " reduce or process"
        )
    target = None if expression.target is None else _apart(expression.target, parts, where)
    arguments = tuple(_apart(a, parts, where) if isinstance(a, Recorded) else a for a in expression.arguments)
    return Recorded(target, expression.name, arguments, expression.options)


def _aggregates(expression: Recorded) -> bool:
    """Whether there is an aggregate in it that has parts."""
    if expression.target is None and expression.name in (*MERGED_BY, *_MEANS):
        return True
    return any(_aggregates(e) for e in (expression.target, *expression.arguments) if isinstance(e, Recorded))


def _part(expression: Recorded, by: str, parts: dict[str, tuple[Recorded, str]]) -> Recorded:
    name = repr(expression)
    parts.setdefault(name, (expression, by))
    return Recorded(None, "col", (f"`{name.replace('`', '``')}`",))
