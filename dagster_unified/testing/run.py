"""Runs a whole pipeline in memory, in BATCH or in STREAMING semantics."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import pyarrow as pa

from dagster_unified.connectors.collection import CollectionSource
from dagster_unified.errors import PipelineError, UnsupportedError
from dagster_unified.graph import nodes as g
from dagster_unified.graph.execution_graph import ExecutionGraph
from dagster_unified.graph.nodes import Port
from dagster_unified.graph.options import Configuration
from dagster_unified.graph.plan import Plan, plan_in_one
from dagster_unified.operators.failures import placed
from dagster_unified.operators.metrics import Metrics
from dagster_unified.operators.time import wall_clock
from dagster_unified.testing.streaming import Pace, run_streaming
from dagster_unified.testing.vertices import Order, Vertices


@dataclass
class Result:
    """What reached the sinks, in order, by sink name; and the metrics. There is an example at `run_pipeline`."""

    sinks: dict[str, list[Any]] = field(default_factory=dict)
    metrics: Metrics = field(default_factory=Metrics)

    def only(self) -> list[Any]:
        """The records of the one sink."""
        if len(self.sinks) != 1:
            raise PipelineError(
                f"the pipeline has {len(self.sinks)} sinks: {', '.join(self.sinks)}; read one by its name"
            )
        return next(iter(self.sinks.values()))


def planned(graph: g.Graph, mode: str, options: Mapping[str, Any] | None) -> Plan:
    """Return the plan that a harness runs; raise `UnsupportedError` where it starts from a savepoint or leaves one."""
    decided = plan_in_one(graph, Configuration.of({**(options or {}), "execution.runtime-mode": mode}))
    if decided.execution.has_savepoint:
        key = "execution.savepoint.path" if decided.execution.goes_on else "execution.state-recovery.path"
        raise UnsupportedError(
            f"{decided.name}: {key} is set, and the harness has neither source positions nor savepoints; leave the"
            " option out, or run the pipeline on Spark with Pipeline.execute()"
        )
    return decided


def run_pipeline(
    pipeline: Any,
    mode: str,
    inputs: Mapping[str, Sequence[Any]] | None = None,
    options: Mapping[str, Any] | None = None,
    clock: Callable[[], int] = wall_clock,
    watermark_interval: int | None = 1,
    micro_batch: int | None = 1,
    seed: int | None = 0,
) -> Result:
    """Runs `pipeline` in `mode` ("BATCH" or "STREAMING"), with copies of its functions, as Spark's workers get them.

    `inputs` gives records by source name; a source that reads a collection may be left out. In STREAMING a micro-batch
    takes `micro_batch` records of a source, one source after another, or all there are where it is None. Between
    micro-batches the watermark moves and processing-time timers that are due fire: after every `watermark_interval`
    records, or only at the end of input where it is None. A micro-batch is an epoch, of which a `CheckpointListener`
    hears before the next one. Records that Spark brings in no defined order are shuffled by `seed`: in BATCH what comes
    over an exchange or from several streams, in STREAMING those of one micro-batch. None keeps them as they are.

    Examples:
        >>> sink = sales.key_by("shop").sum("amount").print("totals")
        >>> [sale.amount for sale in run_pipeline(pipeline, "STREAMING", {"sales": [Sale("east", 7, at(9, 0))]}).only()]
        [7]
    """
    decided = planned(pipeline.graph(), mode, options)
    for name, number in (("watermark_interval", watermark_interval), ("micro_batch", micro_batch)):
        if number is not None and number < 1:
            raise PipelineError(f"{decided.name}: {name} is a number of records of at least 1, or None, not {number}")
    batches = _inputs(decided, inputs or {})
    order = Order(seed)
    if decided.execution.mode == "BATCH":
        return _run_batch(decided, batches, clock, order)
    inputs_of = {decided.graph.node(n).uid: batch for n, batch in batches.items()}
    pace = Pace(clock, order, watermark_interval, micro_batch)
    return _result(decided, *run_streaming(decided, inputs_of, pace))


def _run_batch(decided: Plan, batches: Mapping[int, pa.RecordBatch], clock: Callable[[], int], order: Order) -> Result:
    graph = ExecutionGraph(decided, decided.name, tuple(node.id for node in decided.graph.nodes))
    sources = {node.id for node in decided.graph.sources}
    tables = {n.id: batches[n.id] for n in decided.graph.readers if n.id not in sources}
    vertices = Vertices(graph, order, clock, tables)
    arrived = vertices.run({Port(n): {0: [vertices.inputs.keyed(Port(n), batches[n])]} for n in sources})
    for loop in vertices.loops.values():
        vertices.metrics.add(loop.metrics)
    written: dict[str, list[pa.RecordBatch]] = {}
    for node in decided.graph.sinks:
        written.setdefault(node.name, []).extend(arrived[node.id])
    return _result(decided, written, vertices.metrics)


def _result(decided: Plan, written: Mapping[str, list[pa.RecordBatch]], metrics: Metrics) -> Result:
    """What reached the sinks, as records."""
    result = Result(metrics=metrics)
    for node in decided.graph.sinks:
        if node.name not in result.sinks and written[node.name]:
            records = decided.input_layout(node.id).records
            whole = pa.concat_batches(written[node.name]).select(list(records.names))
            result.sinks[node.name] = list(records.from_batch(whole))
        result.sinks.setdefault(node.name, [])
    return result


def _inputs(decided: Plan, inputs: Mapping[str, Sequence[Any]]) -> dict[int, pa.RecordBatch]:
    batches: dict[int, pa.RecordBatch] = {}
    reading = decided.graph.readers
    names = [n.reads for n in reading]
    for name in inputs:
        if name not in names:
            raise PipelineError(f"{decided.name} has no source '{name}'; its sources are {', '.join(names)}")
    for node in reading:
        name = node.reads
        if name in inputs:
            records = inputs[name]
        elif isinstance(node.source, CollectionSource):
            records = node.source.data
        else:
            raise PipelineError(
                f"{decided.name}: source '{name}' reads {node.source.describe()}, which the harness does not; give its"
                f" records as inputs={{'{name}': [...]}}"
            )
        declared = node.source.records
        with placed(f"{decided.name}: source '{name}'"):
            batches[node.id] = declared.to_batch(list(records))
    return batches
