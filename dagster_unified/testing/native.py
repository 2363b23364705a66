"""Runs native operations (columns left to Catalyst) without a JVM.

sqlframe turns the recorded expressions into SQL, and DuckDB runs it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from datetime import timedelta
from functools import singledispatch
from typing import Any

import pyarrow as pa
from msgspec import msgpack

from dagster_unified.errors import MissingRequirementError, PipelineError, RecordTypeError, UnsupportedError
from dagster_unified.graph import nodes as g
from dagster_unified.graph.aggregates import fields_of, too_large
from dagster_unified.graph.expressions import Column, replay
from dagster_unified.graph.nodes import BOUNDS
from dagster_unified.operators.keys import one_form
from dagster_unified.operators.layout import TIMESTAMP, StreamLayout, cast
from dagster_unified.operators.time import MIN_TIMESTAMP
from dagster_unified.operators.windows.assigners import ByEventTime, MergingWindowAssigner

_TABLE = "dagster_unified_input"
_LOOKED_UP = "dagster_unified_looked_up"
START, END = "__start", "__end"


def run_native(
    pipeline: str,
    node: g.Node,
    layout: StreamLayout,
    arriving: pa.RecordBatch,
    looked_up: pa.RecordBatch | None = None,
    marks: Sequence[int] | None = None,
) -> pa.RecordBatch:
    """Run a native operation on these records.

    A lookup also needs the records of its table; windows, the watermarks at which each record came.
    """
    assert node.records is not None
    where = f"{pipeline}: operator '{node.name}'"
    schema = StreamLayout(node.records, node.timestamped).schema
    if not arriving.num_rows:
        return pa.RecordBatch.from_pylist([], schema)
    duckdb, sql = _libraries()
    table = pa.Table.from_batches([arriving])
    if not layout.timestamped:
        table = table.append_column(TIMESTAMP, pa.nulls(table.num_rows, pa.int64()))
    columns = [sql(c, pipeline, node) for c in getattr(node, "columns", ())]
    with duckdb.connect() as connection:
        for name, rows in _tables(node, pipeline, layout, table, looked_up, marks).items():
            connection.register(name, rows)
        try:
            result = connection.sql(_statement(node, pipeline, layout, columns)).to_arrow_table()
        except duckdb.OutOfRangeException as error:
            raise too_large(where, fields_of(getattr(node, "columns", ()))) from error
        except duckdb.Error as error:
            said = str(error).partition("\n")[0]
            raise PipelineError(
                f"{where}: the harness, which computes columns with DuckDB, does not accept an expression of it:"
                f" {said}; correct the names and types that it uses"
            ) from error
    results = [_typed(where, field, result.column(field.name).combine_chunks()) for field in node.records.schema]
    try:
        records = cast(results, node.records.schema)
    except pa.ArrowInvalid as error:
        raise too_large(where, _beyond(results, node.records.schema)) from error
    node.records.check_nulls(records)
    times = [result.column(TIMESTAMP).combine_chunks()] if node.timestamped else []
    return pa.RecordBatch.from_arrays([*records.columns, *times], schema=schema)


def _beyond(columns: Sequence[pa.Array], schema: pa.Schema) -> list[str]:
    """Return the fields whose values their types do not hold."""
    names = []
    for field, column in zip(schema, columns, strict=True):
        try:
            cast([column], pa.schema([field]))
        except pa.ArrowInvalid:
            names.append(field.name)
    return names


_KINDS = (
    ("a text", lambda kind: pa.types.is_string(kind) or pa.types.is_large_string(kind)),
    ("a boolean", pa.types.is_boolean),
    ("bytes", lambda kind: pa.types.is_binary(kind) or pa.types.is_large_binary(kind)),
    ("a whole number", lambda kind: pa.types.is_integer(kind) or (pa.types.is_decimal(kind) and kind.scale == 0)),
    ("a float", pa.types.is_floating),
    ("a time", lambda kind: pa.types.is_date(kind) or pa.types.is_timestamp(kind)),
)
"""Kinds that both Spark and DuckDB distinguish; they differ on the width of numbers."""


def _typed(where: str, field: pa.Field, column: pa.Array) -> pa.Array:
    """Return a column as DuckDB computes it; raises `PipelineError` where its kind is not that of the output type."""
    if pa.types.is_duration(field.type) and pa.types.is_interval(column.type):
        spans = [
            None if span is None else timedelta(days=span.days, microseconds=span.nanoseconds // 1000)
            for span in column.to_pylist()
        ]
        return pa.array(spans, field.type)
    actual, declared = (next((k for k, test in _KINDS if test(kind)), None) for kind in (column.type, field.type))
    fits = not actual or not declared or actual == declared or pa.types.is_decimal(field.type)
    if (actual, declared) == ("a float", "a whole number"):  # which `floor` gives in Spark, and a division does not
        fits = all(value is None or float(value).is_integer() for value in column.to_pylist())
    if not fits and (actual, declared) != ("a whole number", "a float"):
        raise PipelineError(
            f"{where}: column '{field.name}' is {actual}, but output_type says {field.type}; cast it in the expression"
        )
    return column


@singledispatch
def _tables(
    node: g.Node,
    pipeline: str,
    layout: StreamLayout,
    table: pa.Table,
    looked_up: pa.RecordBatch | None,
    marks: Sequence[int] | None,
) -> dict[str, pa.Table]:
    return {_TABLE: table}


@_tables.register(g.LookupNode)
def _looked_up_tables(
    node: g.LookupNode,
    pipeline: str,
    layout: StreamLayout,
    table: pa.Table,
    looked_up: pa.RecordBatch | None,
    marks: Sequence[int] | None,
) -> dict[str, pa.Table]:
    import pyarrow.compute as pc  # slow to load, and a pipeline is built without it

    for name, _ in node.on:
        if pa.types.is_floating(table.schema.field(name).type) and pc.any(pc.is_nan(table.column(name))).as_py():
            raise RecordTypeError(
                f"{pipeline}: operator '{node.name}': the key '{name}' is nan, which equals nothing; filter such"
                " records out before lookup_join"
            )
    return {_TABLE: table, _LOOKED_UP: pa.Table.from_batches([looked_up])}


@_tables.register(g.WindowAggregateNode)
def _windowed_tables(
    node: g.WindowAggregateNode,
    pipeline: str,
    layout: StreamLayout,
    table: pa.Table,
    looked_up: pa.RecordBatch | None,
    marks: Sequence[int] | None,
) -> dict[str, pa.Table]:
    return {_TABLE: _in_windows(pipeline, node, layout, table, marks or [MIN_TIMESTAMP] * table.num_rows)}


@singledispatch
def _statement(node: g.Node, pipeline: str, layout: StreamLayout, columns: list[str]) -> str:
    """Return the SQL of a native operation; `columns` are its expressions."""
    raise UnsupportedError(f"{pipeline}: the harness cannot run '{node.name}'; run the pipeline on Spark instead")


@_statement.register(g.WhereNode)
def _where(node: g.WhereNode, pipeline: str, layout: StreamLayout, columns: list[str]) -> str:
    names = ", ".join(_quoted(layout.records.names))
    return f'SELECT {names}, "{TIMESTAMP}" FROM {_TABLE} WHERE {columns[0]}'


@_statement.register(g.SelectNode)
def _select(node: g.SelectNode, pipeline: str, layout: StreamLayout, columns: list[str]) -> str:
    names = ", ".join(_quoted([*_names(node), TIMESTAMP]))
    return f'SELECT * FROM (SELECT {", ".join(columns)}, "{TIMESTAMP}" FROM {_TABLE}) AS projected({names})'


@_statement.register(g.WithColumnsNode)
def _with_columns(node: g.WithColumnsNode, pipeline: str, layout: StreamLayout, columns: list[str]) -> str:
    added = [f'{column} AS "{name}"' for name, column in zip(node.names, columns, strict=True)]
    others = _quoted([name for name in layout.records.names if name not in node.names])
    return f'SELECT {", ".join([*others, *added])}, "{TIMESTAMP}" FROM {_TABLE}'


@_statement.register(g.LookupNode)
def _lookup(node: g.LookupNode, pipeline: str, layout: StreamLayout, columns: list[str]) -> str:
    looked_up = {name: f't."{column}"' for name, column in node.added}
    fields_before = {name: f'r."{name}"' for name in _names(node)}
    fields = [f'{column} AS "{name}"' for name, column in {**fields_before, **looked_up}.items()]
    condition = " AND ".join(f'r."{name}" = t."{column}"' for name, column in node.on)
    return (
        f'SELECT {", ".join(fields)}, r."{TIMESTAMP}" FROM {_TABLE} r {"INNER" if node.inner else "LEFT"} JOIN'
        f" {_LOOKED_UP} t ON {condition}"
    )


@_statement.register(g.AggregateNode)
def _aggregate(node: g.AggregateNode, pipeline: str, layout: StreamLayout, columns: list[str]) -> str:
    keys = ", ".join(_quoted(node.key.fields))
    return f'SELECT {keys}, {", ".join(columns)}, max("{TIMESTAMP}") AS "{TIMESTAMP}" FROM {_TABLE} GROUP BY {keys}'


@_statement.register(g.WindowAggregateNode)
def _window_aggregate(node: g.WindowAggregateNode, pipeline: str, layout: StreamLayout, columns: list[str]) -> str:
    keys = ", ".join(_quoted(node.key.fields))
    bounds = [f'any_value("__{b}") AS "{b}"' for b in BOUNDS if b in _names(node)]
    return (
        f'SELECT {", ".join([keys, *bounds, *columns])}, "{END}" - 1 AS "{TIMESTAMP}" FROM {_TABLE} GROUP BY'
        f' {keys}, "{START}", "{END}"'
    )


def _names(node: g.Node) -> tuple[str, ...]:
    assert node.records is not None
    return node.records.names


def _quoted(names: Sequence[str]) -> list[str]:
    return [f'"{name}"' for name in names]


def _in_windows(
    pipeline: str, node: g.WindowAggregateNode, layout: StreamLayout, table: pa.Table, marks: Sequence[int]
) -> pa.Table:
    """Return each row once for every window that it is in, with the bounds, unless the window was over when it came."""
    assert node.records is not None
    columns = [table.column(name).to_pylist() for name in node.key.fields]
    keys = [msgpack.encode(one_form(key)) for key in zip(*columns, strict=True)]
    by_key: dict[bytes, list[tuple[Any, int, int]]] = {}
    (batch,) = table.combine_chunks().to_batches()
    timed = zip(layout.records.from_batch(batch), table.column(TIMESTAMP).to_pylist(), marks, strict=True)
    for row, (record, timestamp, mark) in enumerate(timed):
        if timestamp is None:
            raise RecordTypeError(
                f"{pipeline}: operator '{node.name}': a record has no event time; assign timestamps before the window"
            )
        assigned = node.assigner.assign_windows(record, timestamp, ByEventTime())
        by_key.setdefault(keys[row], []).extend(
            (window, row, mark) for window in assigned if window.max_timestamp() > mark
        )
    merges = node.assigner if isinstance(node.assigner, MergingWindowAssigner) else None
    pairs = [
        pair
        for elements in by_key.values()
        for pair in (_merged(merges, elements) if merges is not None else [(w, row) for w, row, _ in elements])
    ]
    table = table.take(pa.array([row for _, row in pairs], pa.int64()))
    starts, ends = pa.array([w.start for w, _ in pairs], pa.int64()), pa.array([w.end for w, _ in pairs], pa.int64())
    table = table.append_column(START, starts).append_column(END, ends)
    for name, bounds in zip(BOUNDS, (starts, ends), strict=True):
        if name in node.records.names:
            declared = node.records.schema.field(name).type
            table = table.append_column(
                f"__{name}",
                (
                    bounds
                    if pa.types.is_integer(declared)
                    else bounds.cast(pa.timestamp("ms", declared.tz)).cast(declared)
                ),
            )
    return table


def _merged(assigner: MergingWindowAssigner[Any, Any], elements: list[tuple[Any, int, int]]) -> list[tuple[Any, int]]:
    """Return a key's windows as they grow together with each element, unless the watermark had passed them by then."""
    growing: dict[Any, list[int]] = {}
    over: list[tuple[Any, int]] = []
    for window, row, mark in elements:
        for passed in [w for w in growing if w.max_timestamp() <= mark]:
            over += [(passed, earlier) for earlier in growing.pop(passed)]
        for cover, merged in assigner.merge_windows([*growing, window]):
            rows = [earlier for old in merged for earlier in growing.pop(old, [])]
            growing[cover] = [*rows, row] if window in merged else rows
    return over + [(window, row) for window, rows in growing.items() for row in rows]


def _libraries() -> tuple[Any, Callable[[Any, str, g.Node], str]]:
    """Return DuckDB, and the function that turns an expression into its SQL."""
    try:
        import duckdb
        import sqlglot
        from sqlframe.duckdb import functions
    except ImportError:
        raise MissingRequirementError(
            "running native operations (select, where, agg) without Spark needs sqlframe and duckdb: pip install"
            " 'dagster-unified[testing]'"
        ) from None

    def sql(expression: Any, pipeline: str, node: g.Node) -> str:
        if isinstance(expression, str):
            return sqlglot.transpile(expression, read="spark", write="duckdb")[0]
        if isinstance(expression, Column):
            replayed = replay(expression, functions)
            return str(replayed.expression.sql(dialect="duckdb"))
        raise UnsupportedError(
            f"{pipeline}: operator '{node.name}' has a Spark Column, which needs a JVM; write it with"
            " dagster_unified.api.functions"
        )

    return duckdb, sql
