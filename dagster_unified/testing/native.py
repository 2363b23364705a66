"""Runs native operations (columns left to Catalyst) without a JVM: sqlframe turns the recorded expressions into SQL,
and DuckDB runs it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pyarrow as pa

from dagster_unified.errors import MissingRequirementError, RecordTypeError, UnsupportedError
from dagster_unified.graph import nodes as g
from dagster_unified.graph.expressions import Column, replay
from dagster_unified.graph.nodes import BOUNDS
from dagster_unified.operators.layout import TIMESTAMP, StreamLayout
from dagster_unified.operators.time import MIN_TIMESTAMP
from dagster_unified.operators.windows.assigners import MergingWindowAssigner

_TABLE = "dagster_unified_input"
_LOOKED_UP = "dagster_unified_looked_up"
START, END = "__start", "__end"
Timed = tuple[Any, "int | None"]


def run_native(
    pipeline: str,
    node: g.Node,
    layout: StreamLayout,
    arriving: list[Timed],
    looked_up: Sequence[Any] = (),
    marks: Sequence[int] | None = None,
) -> list[Timed]:
    """What a native operation makes of these records; a lookup, with the records of its table; windows, by the
    watermarks at which each came.
    """
    assert node.records is not None
    if not arriving:
        return []
    duckdb, sql = _libraries()
    batch = layout.records.to_batch([r for r, _ in arriving])
    table = pa.Table.from_batches([batch.append_column(TIMESTAMP, pa.array([t for _, t in arriving], pa.int64()))])
    if isinstance(node, g.WindowAggregateNode):
        table = _in_windows(pipeline, node, table, arriving, marks or [MIN_TIMESTAMP] * len(arriving))
    columns = [sql(c, pipeline, node) for c in getattr(node, "columns", ())]
    with duckdb.connect() as connection:
        connection.register(_TABLE, table)
        if isinstance(node, g.LookupNode):
            connection.register(_LOOKED_UP, pa.Table.from_batches([node.source.records.to_batch(list(looked_up))]))
        result = connection.sql(_statement(pipeline, node, layout, columns)).to_arrow_table()
    if isinstance(node, g.SelectNode):
        result = result.rename_columns([*node.records.names, TIMESTAMP])
    wanted = pa.Table.from_arrays(
        [result.column(f.name).cast(f.type) for f in node.records.schema], names=list(node.records.names)
    ).combine_chunks()
    times = result.column(TIMESTAMP).to_pylist() if node.timestamped else [None] * result.num_rows
    records = [r for b in wanted.to_batches() for r in node.records.from_batch(b)]
    return list(zip(records, times, strict=True))


def _statement(pipeline: str, node: g.Node, layout: StreamLayout, columns: list[str]) -> str:
    kept = [f'"{name}"' for name in layout.records.names]
    if isinstance(node, g.WhereNode):
        return f'SELECT {", ".join(kept)}, "{TIMESTAMP}" FROM {_TABLE} WHERE {columns[0]}'
    if isinstance(node, g.SelectNode):
        return f'SELECT {", ".join(columns)}, "{TIMESTAMP}" FROM {_TABLE}'
    if isinstance(node, g.WithColumnsNode):
        added = [f'{column} AS "{name}"' for name, column in zip(node.names, columns, strict=True)]
        others = [name for name in kept if name.strip('"') not in node.names]
        return f'SELECT {", ".join([*others, *added])}, "{TIMESTAMP}" FROM {_TABLE}'
    if isinstance(node, g.LookupNode):
        given = {name: f't."{column}"' for name, column in node.found}
        fields = [
            f'{given.get(name) or "r." + chr(34) + name + chr(34)} AS "{name}"'
            for name in (node.records.names if node.records else ())
        ]
        condition = " AND ".join(f'r."{name}" = t."{column}"' for name, column in node.on)
        return (
            f'SELECT {", ".join(fields)}, r."{TIMESTAMP}" FROM {_TABLE} r {"INNER" if node.inner else "LEFT"} JOIN'
            f" {_LOOKED_UP} t ON {condition}"
        )
    if isinstance(node, g.AggregateNode):
        keys = ", ".join(f'"{k}"' for k in node.key.fields)
        return f'SELECT {keys}, {", ".join(columns)}, max("{TIMESTAMP}") AS "{TIMESTAMP}" FROM {_TABLE} GROUP BY {keys}'
    if isinstance(node, g.WindowAggregateNode):
        assert node.records is not None
        keys = ", ".join(f'"{k}"' for k in node.key.fields)
        told = [f'any_value("__{b}") AS "{b}"' for b in BOUNDS if b in node.records.names]
        return (
            f'SELECT {", ".join([keys, *told, *columns])}, "{END}" - 1 AS "{TIMESTAMP}" FROM {_TABLE} GROUP BY {keys},'
            f' "{START}", "{END}"'
        )
    raise UnsupportedError(f"{pipeline}: the harness cannot run '{node.name}'; run the pipeline on Spark instead")


def _in_windows(
    pipeline: str, node: g.WindowAggregateNode, table: pa.Table, arriving: list[Timed], marks: Sequence[int]
) -> pa.Table:
    """Each row once for every window that it is in and that was not over when it came, with the window's bounds."""
    assert node.records is not None
    keys = list(map(repr, zip(*[table.column(k).to_pylist() for k in node.key.fields], strict=True)))
    found: dict[str, list[tuple[Any, int, int]]] = {}
    for row, ((record, timestamp), mark) in enumerate(zip(arriving, marks, strict=True)):
        if timestamp is None:
            raise RecordTypeError(
                f"{pipeline}: operator '{node.name}': a record has no event time; assign timestamps before the window"
            )
        assigned = node.assigner.assign_windows(record, timestamp, timestamp)
        found.setdefault(keys[row], []).extend(
            (window, row, mark) for window in assigned if window.max_timestamp() > mark
        )
    merges = node.assigner if isinstance(node.assigner, MergingWindowAssigner) else None
    pairs = [
        pair
        for elements in found.values()
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
    """A key's windows as they grow together with each element, unless the watermark had passed them when it came."""
    growing: dict[Any, list[int]] = {}
    over: list[tuple[Any, int]] = []
    for window, row, mark in elements:
        for passed in [w for w in growing if w.max_timestamp() <= mark]:
            over += [(passed, earlier) for earlier in growing.pop(passed)]
        for cover, parts in assigner.merge_windows([*growing, window]):
            rows = [earlier for part in parts for earlier in growing.pop(part, [])]
            growing[cover] = [*rows, row] if window in parts else rows
    return over + [(window, row) for window, rows in growing.items() for row in rows]


def _libraries() -> tuple[Any, Callable[[Any, str, g.Node], str]]:
    """DuckDB, and what turns an expression into its SQL."""
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
