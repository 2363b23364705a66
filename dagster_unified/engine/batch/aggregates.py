"""Column aggregates that go on from partition to partition: taken apart into parts that can be merged, such as a sum and a count.

Knows expressions and Spark's DataFrame API. The parts of a key lie in a row of state as JSON, by name, so that they can be read.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from dagster_unified.errors import UnsupportedError
from dagster_unified.graph.expressions import Column as Recorded
from dagster_unified.operators.carried import CARRIED_LAYOUT
from dagster_unified.operators.layout import PART

if TYPE_CHECKING:
    from pyspark.sql import Column, DataFrame

MERGED_BY = {
    "count": "sum", "sum": "sum", "min": "min", "max": "max", "bool_and": "bool_and", "every": "bool_and", "bool_or": "bool_or",
    "some": "bool_or", "bit_and": "bit_and", "bit_or": "bit_or", "bit_xor": "bit_xor", "count_if": "sum",
}  # fmt: skip
"""Aggregates whose results over parts give the one over all, and by what."""

_MEANS = ("avg", "mean")
_FORMAT = {"timestampFormat": "yyyy-MM-dd'T'HH:mm:ss.SSSSSSXXX", "timestampNTZFormat": "yyyy-MM-dd'T'HH:mm:ss.SSSSSS"}
_TOUCHED = "__touched"
_UNTIL = "__until"
"""Of several partitions, the one that the next merged parts of a key are for."""


@dataclass(frozen=True)
class CarriedAggregate:
    """The merged parts of every key, and what the aggregates are in terms of them."""

    frame: DataFrame
    keys: Sequence[str]
    parts: Sequence[str]
    results: Sequence[Recorded]
    beside: Sequence[str] = ()

    def finished(self, column: Callable[[object], Column]) -> DataFrame:
        """The aggregates of the keys that a partition has."""
        return self.frame.where(_TOUCHED).select(*self.keys, *map(column, self.results), *self.beside)

    def state(self) -> DataFrame:
        """What goes on to the next partition, in the columns of `CARRIED_LAYOUT`; of several partitions, what goes on from each."""
        from pyspark.sql import functions as F

        frame = self.frame
        if self.beside:
            each = F.sequence(F.greatest(F.col(PART), F.lit(0)), F.col(_UNTIL) - 1)
            frame = frame.where(F.col(_UNTIL) > 0).withColumn(PART, F.explode(each))
        whole = F.to_json(F.struct(*self.keys, *self.parts), _FORMAT).cast("binary")
        columns = (F.lit(0).cast("bigint"), F.lit(0).cast("bigint"), whole)
        return frame.select(*[c.alias(name) for c, name in zip(columns, CARRIED_LAYOUT.schema.names, strict=True)], *self.beside)


def carried_aggregate(
    where: str, frame: DataFrame, keys: Sequence[str], columns: Sequence[object], column: Callable[[object], Column], before: DataFrame | None, several: int
) -> CarriedAggregate:
    """Aggregates a partition, or `several`, and merges what the partition before left; raises `UnsupportedError` naming an aggregate that has no such parts."""
    from pyspark.sql import Window
    from pyspark.sql import functions as F

    beside = [PART] if several > 1 else []
    parts: dict[str, tuple[Recorded, str]] = {}
    results = [_apart(c, parts, where) for c in columns]
    own = frame.groupBy(*keys, *beside).agg(*[column(part).alias(name) for name, (part, _) in parts.items()])
    merged = own.withColumn(_TOUCHED, F.lit(True))
    if before is not None:
        shape = own.drop(*beside).schema
        held = before.select(F.from_json(F.col("state").cast("string"), shape, _FORMAT).alias("s")).select("s.*").withColumn(_TOUCHED, F.lit(False))
        merged = merged.unionByName(held.withColumns({name: F.lit(-1) for name in beside}))
    merging = {name: getattr(F, by)(name) for name, (_, by) in parts.items()}
    if beside:
        in_order = Window.partitionBy(*keys).orderBy(*beside)
        until = F.coalesce(F.lead(PART).over(in_order), F.lit(several))
        so_far = {name: merge.over(in_order.rowsBetween(Window.unboundedPreceding, Window.currentRow)).cast(own.schema[name].dataType) for name, merge in merging.items()}
        merged = merged.select(*keys, *[value.alias(name) for name, value in so_far.items()], _TOUCHED, *beside, until.alias(_UNTIL))
    elif before is not None:
        own_types = [merge.cast(own.schema[name].dataType).alias(name) for name, merge in merging.items()]
        merged = merged.groupBy(*keys).agg(*own_types, F.bool_or(_TOUCHED).alias(_TOUCHED))
    return CarriedAggregate(merged, keys, list(parts), results, beside)


def _apart(expression: object, parts: dict[str, tuple[Recorded, str]], where: str) -> Recorded:
    """The expression over merged parts, which are collected in `parts` with what merges them."""
    if not isinstance(expression, Recorded):
        raise UnsupportedError(f"{where}: carry_state cannot take apart {expression!r}; write it with dagster_unified.api.functions")
    if expression.target is None and expression.name in MERGED_BY:
        return _part(expression, MERGED_BY[expression.name], parts)
    if expression.target is None and expression.name in _MEANS:
        total, count = (Recorded(None, name, expression.arguments) for name in ("sum", "count"))
        return Recorded(_part(total, "sum", parts), "__truediv__", (_part(count, "sum", parts),))
    if expression.target is None and expression.name in ("lit", "expr", "col", "column"):
        if expression.name == "lit":
            return expression
        raise UnsupportedError(f"{where}: carry_state cannot take apart {expression!r}, which stands outside of an aggregate")
    if expression.target is None and not any(isinstance(a, Recorded) and _aggregates(a) for a in expression.arguments):
        known = ", ".join(sorted({*MERGED_BY, *_MEANS}))
        raise UnsupportedError(f"{where}: carry_state cannot hand on {expression!r} from partition to partition; it can {known}, or use reduce or process")
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
