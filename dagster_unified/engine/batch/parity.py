"""Compares what a streaming sink holds with what BATCH computes from the same slice of the input, row by row."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import pyarrow as pa

from dagster_unified.connectors.protocol.commits import SparkSink
from dagster_unified.engine.batch.intermediates import IntermediateStore
from dagster_unified.engine.batch.run import Run
from dagster_unified.engine.batch.savepoint import run_all
from dagster_unified.errors import UnsupportedError
from dagster_unified.graph.connectors import Slice
from dagster_unified.graph.nodes import Graph
from dagster_unified.graph.options import Configuration
from dagster_unified.graph.plan import plan

if TYPE_CHECKING:
    from pyspark.sql import SparkSession


@dataclass(frozen=True)
class Difference:
    """A row that only one of the tables has, or that differs, by its key.

    `batch` is the row as BATCH has it, `table` as the sink's table has it; None where there is none.
    """

    key: str
    batch: str | None
    table: str | None


@dataclass(frozen=True)
class Comparison:
    """How two tables compare: rows of each, differing rows in all, and the first of those."""

    batch_rows: int
    table_rows: int
    different: int
    first: tuple[Difference, ...]


def batch_tables(
    graph: Graph, partition: Slice | None, options: Mapping[str, Any], spark: SparkSession, folder: str
) -> dict[str, pa.Table]:
    """Run the pipeline in BATCH over a slice of its input, into tables of its own below `folder`, by sink."""
    sinks = {}
    nodes = list(graph.nodes)
    for node in graph.sinks:
        moved = node.sink.elsewhere(f"{folder}/{node.uid}") if isinstance(node.sink, SparkSink) else None
        if moved is None:
            raise UnsupportedError(
                f"{graph.name}: sink '{node.name}' ({node.sink.describe()}) cannot be read back and compared; leave"
                " parity out, or write to a table"
            )
        nodes[node.id], sinks[node.name] = replace(node, sink=moved), (moved, graph.written_to(node.id))
    moved_graph = replace(graph, nodes=tuple(nodes))
    planned = plan(
        moved_graph if partition is None else moved_graph.bounded_to(partition),
        Configuration.of({**options, "execution.runtime-mode": "BATCH"}),
    )
    run_all(Run(planned, spark, IntermediateStore(f"{folder}/intermediates"), "parity", "parity"))
    return {name: sink.dataset(records).to_table() for name, (sink, records) in sinks.items()}


def compare(batch: pa.Table, table: pa.Table, key: Sequence[str] = (), limit: int = 10) -> Comparison:
    """Compare row by row: by `key` where there is one, else as bags of rows."""
    names = sorted(batch.column_names)
    ours, theirs = _rows(batch, names, key), _rows(table.select(names), names, key)
    different = [
        Difference(k, ours.get(k), theirs.get(k)) for k in sorted({*ours, *theirs}) if ours.get(k) != theirs.get(k)
    ]
    return Comparison(batch.num_rows, table.num_rows, len(different), tuple(different[:limit]))


def _rows(table: pa.Table, names: list[str], key: Sequence[str]) -> dict[str, str]:
    """Return rows as text by their key; without a key by themselves, and by their number among equal ones."""
    named = sorted((repr({n: row[n] for n in names}), repr({k: row[k] for k in key})) for row in table.to_pylist())
    rows: dict[str, str] = {}
    seen: Counter[str] = Counter()
    for text, name in named:
        name = name if key else text
        seen[name] += 1
        rows[name if seen[name] == 1 else f"{name} #{seen[name]}"] = text
    return rows
