"""Computes in BATCH, from a slice of a stream's input, the tables that its sinks should hold."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
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
