"""Runs native operations (columns left to Catalyst) without a JVM: sqlframe replays the recorded expressions on DuckDB."""

from __future__ import annotations

from typing import Any

import pyarrow as pa

from dagster_unified.errors import MissingRequirementError, UnsupportedError
from dagster_unified.graph import nodes as g
from dagster_unified.graph.expressions import Column, replay
from dagster_unified.operators.layout import TIMESTAMP, StreamLayout

Timed = tuple[Any, "int | None"]


def run_native(pipeline: str, node: g.Node, layout: StreamLayout, arriving: list[Timed]) -> list[Timed]:
    """What a native operation makes of these records."""
    assert node.records is not None
    if not arriving:
        return []
    functions, session = _sqlframe()
    batch = layout.records.to_batch([r for r, _ in arriving])
    table = pa.Table.from_batches([batch.append_column(TIMESTAMP, pa.array([t for _, t in arriving], pa.int64()))])
    session._conn.register("dagster_unified_input", table)
    frame = session.table("dagster_unified_input").select(*layout.records.names, TIMESTAMP)
    columns = [_column(c, functions, pipeline, node) for c in getattr(node, "columns", ())]
    if isinstance(node, g.WhereNode):
        frame = frame.where(columns[0])
    elif isinstance(node, g.SelectNode):
        frame = frame.select(*columns, TIMESTAMP)
    elif isinstance(node, g.WithColumnsNode):
        frame = frame.withColumns(dict(zip(node.names, columns, strict=True)))
    elif isinstance(node, g.AggregateNode):
        frame = frame.groupBy(*node.key.fields).agg(*columns, functions.max(TIMESTAMP).alias(TIMESTAMP))
    else:
        raise UnsupportedError(f"{pipeline}: the harness cannot run '{node.name}'; run the pipeline on Spark instead")
    result = frame.toArrow()
    result = result if isinstance(result, pa.Table) else pa.Table.from_batches(list(result))
    wanted = pa.Table.from_arrays([result.column(f.name).cast(f.type) for f in node.records.schema], names=list(node.records.names)).combine_chunks()
    times = result.column(TIMESTAMP).to_pylist() if node.timestamped else [None] * result.num_rows
    records = [r for b in wanted.to_batches() for r in node.records.from_batch(b)]
    return list(zip(records, times, strict=True))


def _sqlframe() -> tuple[Any, Any]:
    try:
        from sqlframe.duckdb import DuckDBSession
        from sqlframe.duckdb import functions as duckdb_functions
    except ImportError:
        raise MissingRequirementError("running native operations (select, where, agg) without Spark needs sqlframe: pip install 'dagster-unified[testing]'") from None
    return duckdb_functions, DuckDBSession.builder.getOrCreate()


def _column(expression: Any, functions: Any, pipeline: str, node: g.Node) -> Any:
    if isinstance(expression, str):
        return functions.expr(expression)
    if isinstance(expression, Column):
        return replay(expression, functions)
    raise UnsupportedError(f"{pipeline}: operator '{node.name}' has a Spark Column, which needs a JVM; write it with dagster_unified.api.functions")
