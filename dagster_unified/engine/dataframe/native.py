"""What Catalyst runs by itself: projections, filters, lookups, aggregates and windows, on columns.

Knows nodes and Spark's DataFrame API; not how a node's input comes to be, nor regions. Lazy: nothing runs here.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import pyarrow as pa

from dagster_unified.connectors.base import SparkSource, spark_schema
from dagster_unified.engine.dataframe.aggregates import CarriedAggregate, Closing, carried_aggregate
from dagster_unified.engine.dataframe.columns import all_set, spark_column
from dagster_unified.engine.dataframe.partitions import PartitionAxis
from dagster_unified.errors import PipelineError
from dagster_unified.graph import nodes as g
from dagster_unified.graph.nodes import BOUNDS
from dagster_unified.operators.layout import TIMESTAMP
from dagster_unified.operators.windows.assigners import AlignedEventTimeWindows, EventTimeSessionWindows, WindowAssigner

if TYPE_CHECKING:
    from pyspark.sql import Column, DataFrame, SparkSession

MOMENT = "__moment"
"""A row's event time as Spark's timestamp, where Catalyst puts it into windows."""

WINDOW = "__window"


@dataclass
class Natives:
    """The native operations of one stage of a pipeline, which are named in errors."""

    pipeline: str
    stage: str
    spark: SparkSession
    tables: list[DataFrame] = field(default_factory=list)
    """What lookups read."""

    def aggregate(self, node: g.AggregateNode, frame: DataFrame, pass_through: Sequence[str] = ()) -> DataFrame:
        """Column aggregates per key, and per value of the pass-through columns."""
        checked = self._keyed(node, frame)
        found = checked.groupBy(*node.key.fields, *pass_through).agg(*map(spark_column, node.columns))
        return self._typed(node, found, pass_through)

    def carried_aggregate(
        self, node: g.AggregateNode, frame: DataFrame, before: DataFrame | None, axis: PartitionAxis
    ) -> CarriedAggregate:
        """Column aggregates per key that start from the state `before` the first partition."""
        where = f"{self.pipeline}: operator '{node.name}'"
        return carried_aggregate(where, self._keyed(node, frame), node.key.fields, node.columns, before, axis)

    def finished(self, node: g.AggregateNode, held: CarriedAggregate) -> DataFrame:
        """The aggregates of the keys that a partition has."""
        return self._typed(node, held.finished(), held.axis.columns)

    def windows(self, node: g.WindowAggregateNode, moments: DataFrame, pass_through: Sequence[str] = ()) -> DataFrame:
        """Column aggregates per key and window, of rows with their `moments`.

        There is one result for each value of the pass-through columns as well.

        A result has the window's last moment as its event time.
        """
        window = _window(node.assigner).alias(WINDOW)
        found = moments.groupBy(*node.key.fields, *pass_through, window).agg(*map(spark_column, node.columns))
        return self._with_bounds(node, found, pass_through)

    def carried_windows(
        self,
        node: g.WindowAggregateNode,
        frame: DataFrame,
        before: DataFrame | None,
        begin: int,
        ends: Sequence[int],
        axis: PartitionAxis,
    ) -> CarriedAggregate:
        """Column aggregates per key and window, of windows that may stay open from partition to partition.

        `begin` and `ends` are the partitions' watermarks.
        """
        from pyspark.sql import functions as F

        rows = self.moments(node, frame).withColumn(WINDOW, _window(node.assigner))
        where, keys = f"{self.pipeline}: operator '{node.name}'", [*node.key.fields, WINDOW]
        closing = Closing(F.unix_millis(f"{WINDOW}.end") - 1, begin, ends)
        return carried_aggregate(where, rows, keys, node.columns, before, axis, closing)

    def closed(self, node: g.WindowAggregateNode, held: CarriedAggregate) -> DataFrame:
        """The windows that a partition closes."""
        return self._with_bounds(node, held.finished(), held.axis.columns)

    def moments(self, node: g.WindowAggregateNode, frame: DataFrame) -> DataFrame:
        """Rows with `MOMENT`, by which Catalyst puts them into windows."""
        from pyspark.sql import functions as F

        checked = self._keyed(node, frame)
        # Not as a condition: Spark drops rows without a moment itself, before conditions that come after its own.
        missing = self.raised(node, "a record has no event time; assign timestamps before the window")
        return checked.withColumn(MOMENT, F.coalesce(F.timestamp_millis(TIMESTAMP), missing.cast("timestamp")))

    def _with_bounds(self, node: g.WindowAggregateNode, found: DataFrame, pass_through: Sequence[str]) -> DataFrame:
        """Results with the bounds of their windows, as far as the records have them."""
        from pyspark.sql import functions as F

        assert node.records is not None
        for name in BOUNDS:
            if name in node.records.names:
                bound = F.col(f"{WINDOW}.{name.removeprefix('window_')}")
                found = found.withColumn(
                    name, F.unix_millis(bound) if pa.types.is_integer(node.records.schema.field(name).type) else bound
                )
        timed = found.withColumn(TIMESTAMP, F.unix_millis(f"{WINDOW}.end") - 1)
        return self._typed(node, timed, [TIMESTAMP, *pass_through])

    def operation(
        self, node: g.NativeNode, frame: DataFrame, pass_through: Sequence[str] = (), others: Column | None = None
    ) -> DataFrame:
        """A native operator on columns.

        The event time and the pass-through columns stay; rows for which `others` holds are not its rows, and stay.
        """
        from pyspark.sql import functions as F

        assert node.records is not None
        timestamp = [TIMESTAMP] if node.timestamped and TIMESTAMP in frame.columns else []
        kept = [*timestamp, *pass_through]
        if isinstance(node, g.WhereNode):
            condition = spark_column(node.columns[0])
            return frame.where(condition if others is None else others | condition)
        if isinstance(node, g.SelectNode):
            selected = frame.select(*map(spark_column, node.columns), *map(F.col, kept))
            return self._typed(node, selected.toDF(*node.records.names, *kept), kept)
        if isinstance(node, g.WithColumnsNode):
            added = {name: spark_column(c) for name, c in zip(node.names, node.columns, strict=True)}
            return self._typed(node, frame.withColumns(added), kept)
        if isinstance(node, g.LookupNode):
            return self._typed(node, self._looked_up(node, frame, others), kept)
        raise PipelineError(f"{self.pipeline}: '{node.name}' is not an operation on columns")

    def _looked_up(self, node: g.LookupNode, frame: DataFrame, others: Column | None) -> DataFrame:
        """A broadcast join with the table of a lookup."""
        from pyspark.sql import functions as F

        if not isinstance(node.source, SparkSource):
            raise PipelineError(
                f"{self.pipeline}: operator '{node.name}': '{node.source.name}' is a {type(node.source).__name__},"
                " which Spark cannot read"
            )
        keys = [F.col(column).alias(f"__key{i}") for i, (_, column) in enumerate(node.on)]
        values = [F.col(column).alias(f"__value{i}") for i, (_, column) in enumerate(node.found)]
        read = node.source.read(self.spark)
        self.tables.append(read)
        table = read.select(*keys, *values, F.lit(True).alias("__found"))
        condition = F.lit(True)
        for i, (name, _) in enumerate(node.on):
            condition = condition & (F.col(name) == F.col(f"__key{i}"))
        joined = frame.join(F.broadcast(table), condition, "left")
        if node.inner:
            matched = F.col("__found").isNotNull()
            joined = joined.where(matched if others is None else others | matched)
        return joined.withColumns({name: F.col(f"__value{i}") for i, (name, _) in enumerate(node.found)})

    def _keyed(self, node: g.KeyedNode, frame: DataFrame) -> DataFrame:
        """The rows; evaluating one whose key is None raises."""
        from pyspark.sql import functions as F

        missing = self.raised(node, "a key is None; filter such records out before key_by").cast("boolean")
        return frame.where(F.when(all_set(node.key.fields), F.lit(True)).otherwise(missing))

    def raised(self, node: g.Node, what: str) -> Column:
        """An expression whose evaluation is a `RecordTypeError`."""
        from pyspark.sql import functions as F

        return F.raise_error(
            F.lit(
                f"dagster_unified.errors.RecordTypeError: {self.pipeline}: stage '{self.stage}', operator"
                f" '{node.name}': {what}"
            )
        )

    def _typed(self, node: g.Node, frame: DataFrame, kept: Sequence[str]) -> DataFrame:
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
            given = frame.schema[declared.name].dataType
            if given != declared.dataType and not _widens(given.simpleString(), declared.dataType.simpleString()):
                raise PipelineError(
                    f"{self.pipeline}: operator '{node.name}': column '{declared.name}' is a {given.simpleString()},"
                    f" but output_type says {declared.dataType.simpleString()}; cast it in the expression"
                )
            columns.append(F.col(declared.name).cast(declared.dataType))
        return frame.select(*columns, *kept)


def with_event_time(node: g.AssignTimestampsNode, frame: DataFrame) -> DataFrame:
    """Rows with the value of a field as their event time."""
    from pyspark.sql import functions as F
    from pyspark.sql.types import LongType

    column = F.col(node.assigner)
    if not isinstance(frame.schema[node.assigner].dataType, LongType):
        column = F.unix_millis(column.cast("timestamp"))
    return frame.withColumn(TIMESTAMP, column)


def _window(assigner: WindowAssigner[Any, Any]) -> Column:
    """The windows of an assigner, as Catalyst has them."""
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


def _widens(given: str, wanted: str) -> bool:
    return (
        given in _WIDER.get(wanted, ())
        or given == "void"
        or (wanted.startswith("decimal") and given.startswith("decimal"))
        or _shape(given) == _shape(wanted)
    )


def _shape(simple: str) -> str:
    return simple.replace("int>", "bigint>").replace("bigbigint", "bigint")
