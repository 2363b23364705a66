"""Runs operators in Catalyst whose functions are known, in place of Python workers. Knows no function."""

from __future__ import annotations

import functools
import operator
from collections.abc import Sequence
from typing import TYPE_CHECKING

from dagster_unified.connectors.protocol.frame import spark_schema
from dagster_unified.graph.lowering.aggregating import ORDER, ReducedInSql
from dagster_unified.graph.lowering.catalyst import InSql
from dagster_unified.graph.lowering.mapping import MappedInSql
from dagster_unified.operators.layout import TIMESTAMP
from dagster_unified.records import RecordType

if TYPE_CHECKING:
    from pyspark.sql import Column, DataFrame


_START = "__start"
"""When the window of a row begins."""


def run_in_sql(
    said: InSql, frame: DataFrame, records: RecordType, pass_through: Sequence[str], parallelism: int | None = None
) -> DataFrame:
    """Return what an operator emits, in records of a type, with the event time and the pass-through columns.

    `parallelism` is of a reduce: how many tasks it is to have, at most.
    """
    if isinstance(said, ReducedInSql):
        return _reduced(said, frame, records, pass_through, parallelism)
    return _mapped(said, frame, records, pass_through)


def _mapped(said: MappedInSql, frame: DataFrame, records: RecordType, pass_through: Sequence[str]) -> DataFrame:
    from pyspark.sql import functions as F

    if said.condition is not None:
        frame = asked(frame, F.expr(said.condition))
    if said.columns is None:
        return frame
    return frame.select(*_typed(said.columns, records), *_timed(frame), *pass_through)


def _reduced(
    said: ReducedInSql, frame: DataFrame, records: RecordType, pass_through: Sequence[str], parallelism: int | None
) -> DataFrame:
    """The event time is that of the last row of a key, or the last moment of a window.

    Rows are in the order in which a worker emits them, which a sink that keeps the last one of a key depends on.
    """
    from pyspark.sql import functions as F

    if said.condition is not None:
        frame = asked(frame, F.expr(said.condition))
    if said.needs_order:
        frame = frame.withColumn(ORDER, F.monotonically_increasing_id())
    keys, times = [*pass_through, *said.key], [F.max(name).alias(name) for name in _timed(frame)]
    if said.windows is not None:
        frame = frame.withColumn(_START, F.expr(said.windows.start))
        keys, times = [*keys, _START], [(F.col(_START) + (said.windows.size - 1)).alias(TIMESTAMP)]
    names = [f"__field{number}" for number in range(len(said.fields))]
    columns = [F.expr(text).alias(name) for name, text in zip(names, said.fields, strict=True)]
    checks = {f"__check{number}": F.expr(text) for number, text in enumerate(said.checks)}
    grouped = frame.groupBy(*keys).agg(*columns, *times, *[check.alias(name) for name, check in checks.items()])
    if checks:
        hold = functools.reduce(operator.and_, map(F.col, checks))
        grouped = asked(grouped, F.when(hold, F.lit(True)).otherwise(F.expr(said.unknown).cast("boolean")))
    if parallelism:
        grouped = grouped.coalesce(parallelism)
    in_order = grouped.sortWithinPartitions(*keys)
    found = in_order.select(*_typed(names, said.held or records), *_timed(grouped), *pass_through)
    return found if said.result is None else _mapped(said.result, found, records, pass_through)


def asked(frame: DataFrame, condition: Column) -> DataFrame:
    """Return the rows for which a condition is true, which may raise.

    Spark asks it of each row that reaches it, and of none before: as it depends on the number of a row, it is neither
    moved nor merged with others, and no file is skipped for it.
    """
    from pyspark.sql import functions as F

    return frame.where(F.when(F.monotonically_increasing_id() >= 0, condition))


def _timed(frame: DataFrame) -> list[str]:
    return [TIMESTAMP] if TIMESTAMP in frame.columns else []


def _typed(texts: Sequence[str], records: RecordType) -> list[Column]:
    from pyspark.sql import functions as F

    fields = zip(texts, spark_schema(records.schema), strict=True)
    return [F.expr(text).cast(field.dataType).alias(field.name) for text, field in fields]
