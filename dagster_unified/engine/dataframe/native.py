"""What Catalyst runs by itself: projections, filters, lookups, aggregates and windows, on columns.

Also aggregates that go on from partition to partition.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import singledispatchmethod
from typing import TYPE_CHECKING, Any

import pyarrow as pa

from dagster_unified.connectors.protocol.frame import spark_schema
from dagster_unified.connectors.protocol.source import SparkSource
from dagster_unified.engine.dataframe.partitions import PartitionAxis
from dagster_unified.errors import PipelineError
from dagster_unified.graph import nodes as g
from dagster_unified.graph.aggregates import Purpose, take_apart
from dagster_unified.graph.expressions import Column as Recorded
from dagster_unified.graph.nodes import BOUNDS
from dagster_unified.operators.layout import CARRIED_LAYOUT, PARTITION_INDEX, TIMESTAMP
from dagster_unified.operators.windows.assigners import AlignedEventTimeWindows, EventTimeSessionWindows, WindowAssigner

if TYPE_CHECKING:
    from pyspark.sql import Column, DataFrame, SparkSession
    from pyspark.sql.types import DataType


def spark_column(expression: object) -> Column:
    """Return an expression as Spark's Column: a recorded one, SQL text, or a Column already."""
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
    """Spark's functions, with the exact `sum` of `aggregate_column`."""

    def __init__(self, frame: DataFrame) -> None:
        self._frame = frame

    def __getattr__(self, name: str) -> Callable[..., Column]:
        from pyspark.sql import functions as F

        function: Callable[..., Column] = getattr(F, name)
        return function

    def sum(self, col: Column | str) -> Column:
        """Sum the upper and the lower halves of whole numbers apart; each half has room for 2^31 records."""
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
    """Return true for a row in which none of these columns is null."""
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
    condition = None
    for field in kind if isinstance(kind, StructType) else ():
        inner = has_nan(column[field.name], field.dataType)
        if inner is not None:
            condition = inner if condition is None else condition | inner
    return condition


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
        """Return the state after each partition, in the columns of `CARRIED_LAYOUT`."""
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
    aggregated = frame.groupBy(*keys, *axis.columns).agg(*sums)
    if not axis.enabled:
        aggregated = aggregated.withColumn(PARTITION_INDEX, F.lit(0))
    complete = F.lit(axis.count)
    if closing is not None:
        for index, end in reversed(list(enumerate(closing.ends))):
            complete = F.when(closing.last <= end, index).otherwise(complete)
        aggregated = aggregated.where((closing.last > closing.begin) & (F.col(PARTITION_INDEX) <= complete))
    merged = aggregated
    if before is not None:
        carried = before.select(
            F.from_json(F.col("state").cast("string"), aggregated.drop(PARTITION_INDEX).schema, _FORMAT).alias("s")
        ).select("s.*")
        merged = aggregated.unionByName(carried.withColumn(PARTITION_INDEX, F.lit(-1)))
    in_order = Window.partitionBy(*keys).orderBy(PARTITION_INDEX)
    so_far = in_order.rowsBetween(Window.unboundedPreceding, Window.currentRow)
    values = [
        getattr(F, by)(name).over(so_far).cast(aggregated.schema[name].dataType).alias(name)
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


MOMENT = "__moment"
"""A row's event time as Spark's timestamp, where Catalyst puts it into windows."""

WINDOW = "__window"


@dataclass(frozen=True)
class Span:
    """The watermark with which a partition with carried state begins, and those with which each of them ends."""

    begin: int
    ends: Sequence[int]


@dataclass
class Natives:
    """The native operations of one stage of a pipeline, which are named in errors."""

    pipeline: str
    stage: str
    spark: SparkSession
    table: Callable[[DataFrame], DataFrame] | None = None
    """Wraps a lookup's table, as in a view whose files can be listed again."""

    before_windows: Callable[[g.Node, DataFrame], DataFrame] | None = None
    """Prepares rows with their moments before they go into windows."""

    def run(
        self, node: g.Node, frame: DataFrame, pass_through: Sequence[str] = (), others: Column | None = None
    ) -> DataFrame:
        """Return what an operator on columns emits.

        The event time and the pass-through columns stay. Rows for which `others` holds are not its own, and stay too.
        """
        return self._run(node, frame, pass_through, others)

    @singledispatchmethod
    def _run(self, node: g.Node, frame: DataFrame, pass_through: Sequence[str], others: Column | None) -> DataFrame:
        raise PipelineError(f"{self.pipeline}: '{node.name}' is not an operation on columns")

    @_run.register(g.AssignTimestampsNode)
    def _(
        self, node: g.AssignTimestampsNode, frame: DataFrame, pass_through: Sequence[str], others: Column | None
    ) -> DataFrame:
        return with_event_time(node, frame)

    @_run.register(g.WhereNode)
    def _(self, node: g.WhereNode, frame: DataFrame, pass_through: Sequence[str], others: Column | None) -> DataFrame:
        condition = spark_column(node.columns[0])
        return frame.where(condition if others is None else others | condition)

    @_run.register(g.SelectNode)
    def _(self, node: g.SelectNode, frame: DataFrame, pass_through: Sequence[str], others: Column | None) -> DataFrame:
        from pyspark.sql import functions as F

        assert node.records is not None
        kept_columns = _other_columns(node, frame, pass_through)
        selected = frame.select(*map(spark_column, node.columns), *map(F.col, kept_columns))
        return self._typed(node, selected.toDF(*node.records.names, *kept_columns), kept_columns)

    @_run.register(g.WithColumnsNode)
    def _(
        self, node: g.WithColumnsNode, frame: DataFrame, pass_through: Sequence[str], others: Column | None
    ) -> DataFrame:
        added = {name: spark_column(c) for name, c in zip(node.names, node.columns, strict=True)}
        return self._typed(node, frame.withColumns(added), _other_columns(node, frame, pass_through))

    @_run.register(g.LookupNode)
    def _(self, node: g.LookupNode, frame: DataFrame, pass_through: Sequence[str], others: Column | None) -> DataFrame:
        return self._typed(node, self._looked_up(node, frame, others), _other_columns(node, frame, pass_through))

    @_run.register(g.AggregateNode)
    def _(
        self, node: g.AggregateNode, frame: DataFrame, pass_through: Sequence[str], others: Column | None
    ) -> DataFrame:
        checked = self._keyed(node, frame)
        results = [aggregate_column(column, checked) for column in node.columns]
        return self._typed(node, checked.groupBy(*node.key.fields, *pass_through).agg(*results), pass_through)

    @_run.register(g.WindowAggregateNode)
    def _(
        self, node: g.WindowAggregateNode, frame: DataFrame, pass_through: Sequence[str], others: Column | None
    ) -> DataFrame:
        """A result has the window's last moment as its event time."""
        moments = self._moments(node, frame)
        if self.before_windows is not None:
            moments = self.before_windows(node, moments)
        window = _window(node.assigner).alias(WINDOW)
        results = [aggregate_column(column, moments) for column in node.columns]
        aggregated = moments.groupBy(*node.key.fields, *pass_through, window).agg(*results)
        return self._with_bounds(node, aggregated, pass_through)

    @singledispatchmethod
    def carried(
        self, node: g.Node, frame: DataFrame, before: DataFrame | None, time: Span, axis: PartitionAxis
    ) -> CarriedAggregate:
        """Return the aggregates of a node that start from the state `before` the first partition."""
        raise PipelineError(f"{self.pipeline}: '{node.name}' has no aggregates")

    @carried.register(g.AggregateNode)
    def _(
        self, node: g.AggregateNode, frame: DataFrame, before: DataFrame | None, time: Span, axis: PartitionAxis
    ) -> CarriedAggregate:
        where = f"{self.pipeline}: operator '{node.name}'"
        return carried_aggregate(where, self._keyed(node, frame), node.key.fields, node.columns, before, axis)

    @carried.register(g.WindowAggregateNode)
    def _(
        self, node: g.WindowAggregateNode, frame: DataFrame, before: DataFrame | None, time: Span, axis: PartitionAxis
    ) -> CarriedAggregate:
        from pyspark.sql import functions as F

        rows = self._moments(node, frame).withColumn(WINDOW, _window(node.assigner))
        where, keys = f"{self.pipeline}: operator '{node.name}'", [*node.key.fields, WINDOW]
        closing = Closing(F.unix_millis(f"{WINDOW}.end") - 1, time.begin, time.ends)
        return carried_aggregate(where, rows, keys, node.columns, before, axis, closing)

    @singledispatchmethod
    def finished(self, node: g.Node, aggregate: CarriedAggregate) -> DataFrame:
        """Return the aggregates of the keys that a partition has, or of the windows that it closes."""
        return self._typed(node, aggregate.finished(), aggregate.axis.columns)

    @finished.register(g.WindowAggregateNode)
    def _(self, node: g.WindowAggregateNode, aggregate: CarriedAggregate) -> DataFrame:
        return self._with_bounds(node, aggregate.finished(), aggregate.axis.columns)

    def _moments(self, node: g.WindowAggregateNode, frame: DataFrame) -> DataFrame:
        """Rows with `MOMENT`, by which Catalyst puts them into windows."""
        from pyspark.sql import functions as F

        checked = self._keyed(node, frame)
        # Not as a condition: Spark drops rows without a moment itself, before conditions that come after its own.
        missing = self.raised(node, "a record has no event time; assign timestamps before the window")
        return checked.withColumn(MOMENT, F.coalesce(F.timestamp_millis(TIMESTAMP), missing.cast("timestamp")))

    def _with_bounds(
        self, node: g.WindowAggregateNode, aggregated: DataFrame, pass_through: Sequence[str]
    ) -> DataFrame:
        """Results with the bounds of their windows, as far as the records have them."""
        from pyspark.sql import functions as F

        assert node.records is not None
        for name in BOUNDS:
            if name in node.records.names:
                bound = F.col(f"{WINDOW}.{name.removeprefix('window_')}")
                aggregated = aggregated.withColumn(
                    name, F.unix_millis(bound) if pa.types.is_integer(node.records.schema.field(name).type) else bound
                )
        timed = aggregated.withColumn(TIMESTAMP, F.unix_millis(f"{WINDOW}.end") - 1)
        return self._typed(node, timed, [TIMESTAMP, *pass_through])

    def _looked_up(self, node: g.LookupNode, frame: DataFrame, others: Column | None) -> DataFrame:
        """Return a broadcast join with the table of a lookup."""
        from pyspark.sql import functions as F

        if not isinstance(node.source, SparkSource):
            raise PipelineError(
                f"{self.pipeline}: operator '{node.name}': '{node.source.name}' is a {type(node.source).__name__},"
                " which Spark cannot read"
            )
        fits = F.when(F.lit(False) if others is None else others, F.lit(True))
        names = [name for name, _ in node.on]
        frame = frame.where(self._not_nan(node, frame, names, "lookup_join", fits))
        keys = [F.col(column).alias(f"__key{i}") for i, (_, column) in enumerate(node.on)]
        values = [F.col(column).alias(f"__value{i}") for i, (_, column) in enumerate(node.added)]
        read = node.source.read(self.spark)
        table = (read if self.table is None else self.table(read)).select(*keys, *values, F.lit(True).alias("__found"))
        condition = F.lit(True)
        for i, (name, _) in enumerate(node.on):
            condition = condition & (F.col(name) == F.col(f"__key{i}"))
        joined = frame.join(F.broadcast(table), condition, "left")
        if node.inner:
            matched = F.col("__found").isNotNull()
            joined = joined.where(matched if others is None else others | matched)
        return joined.withColumns({name: F.col(f"__value{i}") for i, (name, _) in enumerate(node.added)})

    def _keyed(self, node: g.KeyedNode, frame: DataFrame) -> DataFrame:
        """Return the rows; evaluating one whose key is None or NaN raises."""
        from pyspark.sql import functions as F

        missing = self.raised(node, "a key is None; filter such records out before key_by").cast("boolean")
        checked = F.when(~all_set(node.key.fields), missing)
        return frame.where(self._not_nan(node, frame, node.key.fields, "key_by", checked))

    def _not_nan(self, node: g.Node, frame: DataFrame, names: Iterable[str], method: str, checked: Column) -> Column:
        """Return `checked`, true elsewhere; evaluating a row with NaN in these columns raises."""
        from pyspark.sql import functions as F
        from pyspark.sql.types import StructType

        for name in names:
            unequal = has_nan(F.col(name), frame.schema[name].dataType)
            if unequal is not None:
                is_or_has = "has" if isinstance(frame.schema[name].dataType, StructType) else "is"
                what = (
                    f"the key '{name}' {is_or_has} nan, which equals nothing; filter such records out before {method}"
                )
                checked = checked.when(unequal, self.raised(node, what).cast("boolean"))
        return checked.otherwise(F.lit(True))

    def raised(self, node: g.Node, what: str) -> Column:
        """An expression whose evaluation is a `RecordTypeError`."""
        from pyspark.sql import functions as F

        return F.raise_error(
            F.lit(
                f"dagster_unified.errors.RecordTypeError: {self.pipeline}: stage '{self.stage}', operator"
                f" '{node.name}': {what}"
            )
        )

    def _typed(self, node: g.Node, frame: DataFrame, others: Sequence[str]) -> DataFrame:
        """Check a native result against the declared record: columns by name, cast only where nothing can be lost."""
        from pyspark.sql import functions as F

        assert node.records is not None
        wanted = spark_schema(node.records.schema)
        columns = []
        for declared in wanted:
            if declared.name not in frame.columns:
                raise PipelineError(
                    f"{self.pipeline}: operator '{node.name}': no column '{declared.name}'; it gives"
                    f" {', '.join(frame.columns)}, and output_type is {node.records.describe()}"
                )
            actual = frame.schema[declared.name].dataType
            if actual != declared.dataType and not _widens(actual.simpleString(), declared.dataType.simpleString()):
                raise PipelineError(
                    f"{self.pipeline}: operator '{node.name}': column '{declared.name}' is a {actual.simpleString()},"
                    f" but output_type says {declared.dataType.simpleString()}; cast it in the expression"
                )
            columns.append(F.col(declared.name).cast(declared.dataType))
        return frame.select(*columns, *others)


def _other_columns(node: g.Node, frame: DataFrame, pass_through: Sequence[str]) -> list[str]:
    return [*([TIMESTAMP] if node.timestamped and TIMESTAMP in frame.columns else []), *pass_through]


def with_event_time(node: g.AssignTimestampsNode, frame: DataFrame) -> DataFrame:
    """Rows with the value of a field as their event time."""
    from pyspark.sql import functions as F
    from pyspark.sql.types import LongType

    column = F.col(node.assigner)
    if not isinstance(frame.schema[node.assigner].dataType, LongType):
        column = F.unix_millis(column.cast("timestamp"))
    return frame.withColumn(TIMESTAMP, column)


def _window(assigner: WindowAssigner[Any, Any]) -> Column:
    from pyspark.sql import functions as F

    def span(millis: int) -> str:
        return f"{millis} milliseconds"

    if isinstance(assigner, AlignedEventTimeWindows):
        return F.window(MOMENT, span(assigner.size), span(assigner.slide), span(assigner.offset))
    assert isinstance(assigner, EventTimeSessionWindows)
    assert isinstance(assigner.gap, int)
    return F.session_window(MOMENT, span(assigner.gap))


_WIDER = {
    "bigint": ("tinyint", "smallint", "int"),
    "double": ("tinyint", "smallint", "int", "bigint", "float"),
    "timestamp": ("date", "timestamp_ntz"),
}


def _widens(actual: str, declared: str) -> bool:
    return (
        actual in _WIDER.get(declared, ())
        or actual == "void"
        or (declared.startswith("decimal") and actual.startswith("decimal"))
        or _shape(actual) == _shape(declared)
    )


def _shape(simple: str) -> str:
    return simple.replace("int>", "bigint>").replace("bigbigint", "bigint")
