"""Column aggregates that go on from partition to partition.

They are split into partials that can be merged, such as a sum and a count.

Knows expressions and Spark's DataFrame API. The partials of a key are stored in a row of state as JSON, by name, so
that people can read them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from dagster_unified.engine.dataframe.columns import spark_column
from dagster_unified.engine.dataframe.partitions import PartitionAxis
from dagster_unified.graph.aggregates import Purpose, take_apart
from dagster_unified.graph.expressions import Column as Recorded
from dagster_unified.operators.layout import CARRIED_LAYOUT, PARTITION_INDEX

if TYPE_CHECKING:
    from pyspark.sql import Column, DataFrame

MERGED_BY = {
    "count": "sum", "sum": "sum", "min": "min", "max": "max", "bool_and": "bool_and", "every": "bool_and", "bool_or":
    "bool_or",
    "some": "bool_or", "bit_and": "bit_and", "bit_or": "bit_or", "bit_xor": "bit_xor", "count_if": "sum",
}  # fmt: skip
"""How the results of an aggregate over subsets merge into the result over all."""

_CARRYING = Purpose("carry_state", "cannot hand on {} from partition to partition", MERGED_BY)
_FORMAT = {"timestampFormat": "yyyy-MM-dd'T'HH:mm:ss.SSSSSSXXX", "timestampNTZFormat": "yyyy-MM-dd'T'HH:mm:ss.SSSSSS"}

_EMIT = "__emit"
"""Of a key's merged partials as of some partition: whether a partition emits their aggregates."""

_EMIT_IN = "__emit_in"
"""The index of the partition that emits them."""

_STATE_UNTIL = "__state_until"
"""The first partition that does not begin with them as its state."""


@dataclass(frozen=True)
class Closing:
    """When keys are complete, as windows are by event time. Milliseconds since the epoch."""

    last: Column
    """The last moment that belongs to a key."""

    begin: int
    """The watermark at the end of the partition before the first."""

    ends: Sequence[int]
    """The watermark at the end of each partition."""


@dataclass(frozen=True)
class CarriedAggregate:
    """The merged partials of every key, and the aggregates in terms of them."""

    frame: DataFrame
    keys: Sequence[str]
    partials: Sequence[str]
    results: Sequence[Recorded]
    axis: PartitionAxis

    def finished(self) -> DataFrame:
        """The aggregates that partitions emit: of the keys in them or, with `Closing`, of those that they complete."""
        from pyspark.sql import functions as F

        emitted = self.frame.where(_EMIT)
        return emitted.select(
            *self.keys, *map(spark_column, self.results), *(F.col(_EMIT_IN).alias(name) for name in self.axis.columns)
        )

    def state(self) -> DataFrame:
        """The state after each partition, in the columns of `CARRIED_LAYOUT`."""
        from pyspark.sql import functions as F

        first = F.greatest(F.col(PARTITION_INDEX), F.lit(0))
        frame = self.frame.where(F.col(_STATE_UNTIL) > first).withColumn(
            PARTITION_INDEX, F.explode(F.sequence(first, F.col(_STATE_UNTIL) - 1))
        )
        whole = F.to_json(F.struct(*self.keys, *self.partials), _FORMAT).cast("binary")
        columns = (F.lit(0).cast("bigint"), F.lit(0).cast("bigint"), whole)
        named = [c.alias(name) for c, name in zip(columns, CARRIED_LAYOUT.schema.names, strict=True)]
        return frame.select(*named, *self.axis.columns)


def carried_aggregate(
    where: str,
    frame: DataFrame,
    keys: Sequence[str],
    columns: Sequence[object],
    before: DataFrame | None,
    axis: PartitionAxis,
    closing: Closing | None = None,
) -> CarriedAggregate:
    """Aggregate the rows of each partition, and merge the state `before` the first.

    With `closing`, a key is emitted and forgotten once it is complete, and its later rows are dropped. Without it, each
    partition emits the keys that it has rows of, and all keys are kept. Raises `UnsupportedError` for an aggregate
    without partials, naming it.
    """
    from pyspark.sql import Window
    from pyspark.sql import functions as F

    parts = take_apart(where, columns, _CARRYING)
    partials = parts.partials
    sums = [spark_column(partial).alias(name) for name, (partial, _) in partials.items()]
    own = frame.groupBy(*keys, *axis.columns).agg(*sums)
    if not axis.enabled:
        own = own.withColumn(PARTITION_INDEX, F.lit(0))
    complete = F.lit(axis.count)
    if closing is not None:
        for index, end in reversed(list(enumerate(closing.ends))):
            complete = F.when(closing.last <= end, index).otherwise(complete)
        own = own.where((closing.last > closing.begin) & (F.col(PARTITION_INDEX) <= complete))
    merged = own
    if before is not None:
        held = before.select(
            F.from_json(F.col("state").cast("string"), own.drop(PARTITION_INDEX).schema, _FORMAT).alias("s")
        ).select("s.*")
        merged = own.unionByName(held.withColumn(PARTITION_INDEX, F.lit(-1)))
    in_order = Window.partitionBy(*keys).orderBy(PARTITION_INDEX)
    so_far = in_order.rowsBetween(Window.unboundedPreceding, Window.currentRow)
    values = [
        getattr(F, by)(name).over(so_far).cast(own.schema[name].dataType).alias(name)
        for name, (_, by) in partials.items()
    ]
    following = F.lead(PARTITION_INDEX).over(in_order)
    if closing is None:
        emit, emit_in = F.col(PARTITION_INDEX) >= 0, F.col(PARTITION_INDEX)
    else:
        emit, emit_in = following.isNull() & (complete < axis.count), complete
    until = F.least(F.coalesce(following, F.lit(axis.count)), complete)
    rows = merged.select(
        *keys, PARTITION_INDEX, *values, emit.alias(_EMIT), emit_in.alias(_EMIT_IN), until.alias(_STATE_UNTIL)
    )
    return CarriedAggregate(rows, keys, list(partials), parts.results, axis)
