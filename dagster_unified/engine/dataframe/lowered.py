"""Runs operators in Catalyst whose functions are known, in place of Python workers. Knows no function."""

from __future__ import annotations

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


def run_in_sql(said: InSql, frame: DataFrame, records: RecordType, pass_through: Sequence[str]) -> DataFrame:
    """Return what an operator emits, in records of a type, with the event time and the pass-through columns."""
    if isinstance(said, ReducedInSql):
        return _reduced(said, frame, records, pass_through)
    return _mapped(said, frame, records, pass_through)


def _mapped(said: MappedInSql, frame: DataFrame, records: RecordType, pass_through: Sequence[str]) -> DataFrame:
    from pyspark.sql import functions as F

    if said.condition is not None:
        frame = frame.where(F.expr(said.condition))
    if said.columns is None:
        return frame
    return frame.select(*_typed(said.columns, records), *_timed(frame), *pass_through)


def _reduced(said: ReducedInSql, frame: DataFrame, records: RecordType, pass_through: Sequence[str]) -> DataFrame:
    """The event time is that of the last row of a key, or the last moment of a window."""
    from pyspark.sql import functions as F

    if said.condition is not None:
        frame = frame.where(F.expr(said.condition))
    if said.needs_order:
        frame = frame.withColumn(ORDER, F.monotonically_increasing_id())
    keys, times = [*said.key, *pass_through], [F.max(name).alias(name) for name in _timed(frame)]
    if said.windows is not None:
        frame = frame.withColumn(_START, F.expr(said.windows.start))
        keys, times = [*keys, _START], [(F.col(_START) + (said.windows.size - 1)).alias(TIMESTAMP)]
    names = [f"__field{number}" for number in range(len(said.fields))]
    columns = [F.expr(text).alias(name) for name, text in zip(names, said.fields, strict=True)]
    grouped = frame.groupBy(*keys).agg(*columns, *times)
    found = grouped.select(*_typed(names, said.held or records), *_timed(grouped), *pass_through)
    return found if said.result is None else _mapped(said.result, found, records, pass_through)


def _timed(frame: DataFrame) -> list[str]:
    return [TIMESTAMP] if TIMESTAMP in frame.columns else []


def _typed(texts: Sequence[str], records: RecordType) -> list[Column]:
    from pyspark.sql import functions as F

    fields = zip(texts, spark_schema(records.schema), strict=True)
    return [F.expr(text).cast(field.dataType).alias(field.name) for text, field in fields]
