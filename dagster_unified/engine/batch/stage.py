"""Runs stages: each region as one Spark job, which is retried, and recomputed where an intermediate is lost.

A stage with a single sink writes it directly. A stage that several streams leave materializes them once, and its sinks
are written from that, so that nothing is computed twice and a retry of a sink computes nothing again.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from contextlib import closing, nullcontext
from dataclasses import replace
from itertools import groupby
from typing import TYPE_CHECKING, cast
from urllib.parse import unquote

import msgspec
import pyarrow as pa

from dagster_unified.connectors.protocol.commits import WriteIdentity
from dagster_unified.connectors.protocol.source import read_here
from dagster_unified.engine.batch import intermediates
from dagster_unified.engine.batch.intermediates import Manifest, now
from dagster_unified.engine.batch.region import (
    LeavingStream,
    Materialized,
    RegionFrames,
    count_malformed,
    leaving_streams,
    manifests_of,
    materialize,
    materialize_together,
)
from dagster_unified.engine.batch.run import (
    Lookup,
    Run,
    only_saved,
    partition_starts,
    seen_before,
    state_before,
    waiting,
)
from dagster_unified.engine.cluster import watching
from dagster_unified.engine.commit import SinkCommits, WriteContext, WriteResult, spark_sink, write, write_partitions
from dagster_unified.engine.dataframe.partitions import PartitionAxis
from dagster_unified.engine.dataframe.passes import may_be_large, small_rows
from dagster_unified.engine.events import SinkHeld, StageFinished, StageStarted
from dagster_unified.engine.failures import damaged_file, translated
from dagster_unified.engine.positions import batch_positions, batch_reads, stops_of, with_fixed_ranges
from dagster_unified.engine.shipping import by_value_afresh
from dagster_unified.errors import IntermediateLostError, LoweringError, UnifiedError, UnsupportedError
from dagster_unified.graph.connectors import WHOLE
from dagster_unified.graph.nodes import IterationNode, Port, SinkNode
from dagster_unified.graph.plan import Plan, Region
from dagster_unified.graph.regions import regions_to_recompute
from dagster_unified.operators.layout import EMITTED
from dagster_unified.operators.metrics import merge
from dagster_unified.records import NOT_READ
from dagster_unified.storage.paths import remove_tree

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

    from dagster_unified.engine.batch.iterate import Iterations

_log = logging.getLogger(__name__)


class RegionSinks:
    """The sinks of a region, for one partition or several."""

    def __init__(self, runs: Sequence[Run], region: Region, nodes: Sequence[SinkNode]) -> None:
        self.runs, self.region, self.nodes = runs, region, nodes

    @property
    def need_order(self) -> bool:
        """Whether a sink needs rows in the order in which they were emitted."""
        return any(node.sink.upserts for node in self.nodes)

    def write(self, run: Run, node: SinkNode, frame: DataFrame) -> WriteResult:
        """Write the rows of one partition to a sink."""
        with closing(SinkCommits(spark_sink(run.plan.name, node))) as commits:
            return write(node, commits, frame, self._context(run, node))

    def write_materialized(self, run: Run, node: SinkNode, manifest: Manifest) -> WriteResult:
        """Write what one partition materialized to a sink."""
        return self.write(run, node, self._materialized(node, [manifest]))

    def write_together(self, manifests: Sequence[Manifest]) -> tuple[list[dict[str, WriteResult]], list[SinkNode]]:
        """Write what several partitions materialized to the sinks that can take several at once.

        Returns the results by partition, and the sinks that are left.
        """
        results: list[dict[str, WriteResult]] = [{} for _ in manifests]
        remaining = list(self.nodes)
        if len(manifests) == 1:
            return results, remaining
        for node in self.nodes:
            contexts = [self._context(run, node) for run in self.runs]
            frame = self._materialized(node, manifests, [EMITTED] if node.sink.upserts else [])
            written = write_partitions(node, frame, contexts)
            if written is not None:
                remaining.remove(node)
                for of_partition, result in zip(results, written, strict=True):
                    of_partition[node.name] = result
        return results, remaining

    def _materialized(self, node: SinkNode, manifests: Sequence[Manifest], further: Sequence[str] = ()) -> DataFrame:
        run = self.runs[0]
        stream = LeavingStream.to_sink(run.plan, self.region, node)
        frame = intermediates.read(run.spark, run.store, manifests, stream.uid, stream.tag, stream.layout, further)
        return frame.select(*stream.layout.records.names, *further, *PartitionAxis(len(manifests)).columns)

    def _context(self, run: Run, node: SinkNode) -> WriteContext:
        replaces = node.sink.capabilities.takes_again(partitioned=run.partition != WHOLE)
        number = run.number if replaces else 0
        identity = WriteIdentity(run.plan.name, node.uid, run.execution, run.partition, run=number)
        staging = str(run.store.root / ".staging")
        return WriteContext(identity, self.region.name, ship=by_value_afresh, staging=staging)


def run_stage(run: Run, region: Region, find: Lookup) -> Manifest:
    """Run a stage; first recompute the intermediates that it needs and that are lost."""
    return run_partitions([run], region.name, [find])[0]


def run_partitions(runs: Sequence[Run], stage: str, finds: Sequence[Lookup]) -> list[Manifest]:
    """Run a stage for several partitions in one Spark job; return their manifests, as if each had run by itself.

    With carried state the partitions are consecutive. After a failure that a retry cannot fix they run one by one, so
    that those before it finish and the error names one partition.
    """
    region, begun = runs[0].plan.region(stage), now()
    try:
        return _run_together(runs, region.id, _inputs(runs, region, finds))
    except UnifiedError as error:
        if error.retryable or len(runs) == 1:
            raise
    return [_alone(run, region, find, begun) for run, find in zip(runs, finds, strict=True)]


def _alone(run: Run, region: Region, find: Lookup, begun: float) -> Manifest:
    """Run a stage for one of several partitions whose common job failed; an error names the partition."""
    committed = _committed_since(begun, run, region)
    if committed is not None:
        return committed
    try:
        return run_stage(run, region, find)
    except UnifiedError as error:
        raise type(error)(f"{error} (in partition {unquote(run.partition)})") from error.__cause__


def _committed_since(begun: float, run: Run, region: Region) -> Manifest | None:
    """Return what a job committed of a partition before it failed, so that its sinks are not written again."""
    committed = run.store.find(run.address(region))
    return committed if committed is not None and committed.created >= begun else None


def check_mode(plan: Plan) -> None:
    """Raise `UnsupportedError` for a plan that does not run in BATCH."""
    if plan.execution.mode != "BATCH":
        raise UnsupportedError(
            f"{plan.name}: this job runs BATCH stages, and the pipeline resolves to {plan.execution.mode}; leave"
            " execution.runtime-mode out and read bounded sources, or run a StreamingDeployment of the pipeline"
        )


def _inputs(runs: Sequence[Run], region: Region, finds: Sequence[Lookup]) -> list[dict[int, Manifest]]:
    """Return each partition's intermediates that stand, and recompute those that the stage needs and that are lost."""
    plan = runs[0].plan
    check_mode(plan)
    by_partition = [_standing(run.plan, region, find) for run, find in zip(runs, finds, strict=True)]
    lost = [regions_to_recompute(region.id, plan.inputs, list(each)) for each in by_partition]
    reason = f"its intermediate is gone or damaged, and '{region.name}' needs it"
    for ancestor in plan.regions:
        for is_lost, indexes in groupby(range(len(runs)), key=lambda index: ancestor.id in lost[index]):
            if is_lost:
                some = list(indexes)
                recomputed = _run_together(
                    [runs[i] for i in some], ancestor.id, [by_partition[i] for i in some], reason
                )
                for index, manifest in zip(some, recomputed, strict=True):
                    by_partition[index][ancestor.id] = manifest
    return by_partition


def _standing(plan: Plan, region: Region, find: Lookup) -> dict[int, Manifest]:
    """Return the intermediates that a stage reads and, in place of a lost one, those that it is computed from.

    It asks no further up than needed: each question is one to Dagster's storage.
    """
    standing: dict[int, Manifest] = {}
    pending, asked = list(region.inputs), set[int]()
    while pending:
        number = pending.pop()
        if number not in asked:
            asked.add(number)
            manifest = find(plan.regions[number])
            if manifest is None:
                pending += plan.regions[number].inputs
            else:
                standing[number] = manifest
    return standing


def _run_together(
    runs: Sequence[Run], region_id: int, inputs: Sequence[Mapping[int, Manifest]], reason: str = ""
) -> list[Manifest]:
    """Run a region in one Spark job, or in one per partition where an operator sees all partitions of a job."""
    plan = runs[0].plan
    if any(plan.graph.node(n).sees_all_partitions for n in plan.regions[region_id].nodes):
        return [
            _run_region([run], region_id, [own_inputs], reason)[0] for run, own_inputs in zip(runs, inputs, strict=True)
        ]
    return _run_region(runs, region_id, inputs, reason)


def _run_region(
    runs: Sequence[Run], region_id: int, inputs: Sequence[Mapping[int, Manifest]], reason: str
) -> list[Manifest]:
    """Run a region in one Spark job, for one partition or several.

    Where it meets on columns what only functions can say, or should show a record of which it has a part, it runs once
    more and calls the functions. If that succeeds, the next runs of this code begin with it.
    """
    plan, store = runs[0].plan, runs[0].store
    if not plan.execution.lowers:
        return _run_once(runs, region_id, inputs, reason)
    region = plan.regions[region_id]
    calling = [run.calling_functions() for run in runs]
    noted = store.calls(plan.name, region.name)
    if noted is not None and noted == plan.code_of(region):
        return _run_once(calling, region_id, inputs, reason)
    try:
        return _run_once(runs, region_id, inputs, reason)
    except UnifiedError as error:
        if not isinstance(error, LoweringError) and repr(NOT_READ) not in str(error):
            raise
        runs[0].check()
        _log.info("%s; the stage runs again, and calls its functions for each record", error)
        manifests = _run_once(calling, region_id, inputs, reason)
        store.note_calls(plan.name, region.name, plan.code_of(region))
        return manifests


def _run_once(
    runs: Sequence[Run], region_id: int, inputs: Sequence[Mapping[int, Manifest]], reason: str
) -> list[Manifest]:
    region = runs[0].plan.regions[region_id]
    runs = [replace(run, plan=with_fixed_ranges(run.plan, region)) for run in runs]
    first = runs[0]
    number, count = region.id + 1, len(first.plan.regions)
    for run in runs:
        run.observe(StageStarted(region.name, number, count, reason))
    first.check()
    for run in runs:
        if stops := stops_of(run.plan, region):
            run.store.note_stops(run.address(region), stops)
    begun = now()
    before = first.carry.manifest(first.plan, region) if first.carry is not None else None
    starts = partition_starts(runs, region, inputs, seen_before(first, before))

    def stream(port: Port) -> DataFrame:
        return _read(runs, port, inputs)

    def state(port: Port) -> DataFrame | None:
        return state_before(first, before, port)

    iterations = None
    if any(isinstance(node, IterationNode) for node in first.plan.nodes_of(region)):
        from dagster_unified.engine.batch.iterate import Iterations  # only a plan with iterations needs it

        iterations = Iterations(first, region, inputs[0], before, state)
    carried = None if first.carry is None else state
    saved = only_saved(runs)
    frames = RegionFrames(first.plan, region, first.spark, stream, starts, carried, iterations, saved)
    large = (first.carry is not None and not saved) or may_be_large(_columns(first.plan, region))
    try:
        small = nullcontext() if large else small_rows(first.spark)
        with small, watching(first.spark, first.observe), read_here():
            manifests = _execute(runs, region, frames, begun, before, iterations, recovering=bool(reason))
        if iterations is not None:
            iterations.forget()
    except Exception as error:
        read = [m for standing in inputs for m in standing.values()] + ([before] if before else [])
        _set_aside(error, runs, region, read)
        raise translated(error, first.plan, region.name, first.spark) from error
    finally:
        frames.release()
    for run, manifest in zip(runs, manifests, strict=True):
        run.observe(StageFinished(region.name, number, count, manifest, reason))
        for wait in waiting(run.plan, region, manifest):
            run.observe(wait)
    return manifests


def _set_aside(error: Exception, runs: Sequence[Run], region: Region, read: Sequence[Manifest]) -> None:
    """Move a damaged file away and raise `IntermediateLostError`, so that the next attempt computes it again."""
    damaged = damaged_file(error)
    if damaged is None:
        return
    file, wrong = damaged
    run = runs[0]
    for manifest in [*read, *(_prepared(runs, region) or ())]:
        if f"/{manifest.data}/" in file:
            run.store.set_aside(manifest, file)
            raise IntermediateLostError(
                f"{run.plan.name}: stage '{region.name}': the intermediate of stage '{manifest.stage}' is damaged"
                f" ({wrong}); the file is set aside, and the next attempt computes it again"
            ) from error


def _columns(plan: Plan, region: Region) -> list[pa.Schema]:
    read = [edge for edge in plan.graph.edges if edge.target in region.nodes]
    record_types = [plan.graph.records_of(edge) for edge in read]
    return [records.schema for records in record_types if records is not None]


def _read(runs: Sequence[Run], port: Port, inputs: Sequence[Mapping[int, Manifest]]) -> DataFrame:
    """Return the stream of an intermediate, in the columns of its layout."""
    plan = runs[0].plan
    region = plan.region_of(port.node)
    if any(region.id not in manifests for manifests in inputs):
        raise IntermediateLostError(
            f"{plan.name}: the intermediate of stage '{region.name}' is gone; run that stage again"
        )
    return intermediates.read(
        runs[0].spark,
        runs[0].store,
        [manifests[region.id] for manifests in inputs],
        plan.graph.node(port.node).uid,
        port.tag,
        plan.layout(port),
    )


def _prepared(runs: Sequence[Run], region: Region) -> list[Manifest] | None:
    """Return what an earlier attempt of this run computed but did not write to all sinks; None where that is gone."""
    prepared = [attempt for run in runs if (attempt := run.store.prepared(run.address(region))) is not None]
    if len(prepared) < len(runs):
        return None
    code = runs[0].plan.code_of(region)
    return [attempt.manifest for attempt in prepared] if all(attempt.code == code for attempt in prepared) else None


def _execute(
    runs: Sequence[Run],
    region: Region,
    frames: RegionFrames,
    begun: float,
    before: Manifest | None,
    iterations: Iterations | None,
    recovering: bool,
) -> list[Manifest]:
    """Materialize or write, and commit.

    A recomputed region does not write its sinks again. After a sink failed, the next attempt does not compute again:
    functions may give other rows each time, and some sinks may already have the first ones.
    """
    plan = runs[0].plan
    nodes = [] if recovering else [cast("SinkNode", plan.graph.node(sink)) for sink in region.sinks]
    sinks, streams = RegionSinks(runs, region, nodes), leaving_streams(plan, region, nodes)
    is_direct = len(runs) == len(nodes) == 1 and not region.outputs and not region.carried
    prepares = bool(nodes) and not is_direct
    prepared = _prepared(runs, region) if prepares else None
    if prepared is not None:
        return _commit(runs, region, sinks, prepared, begun)
    attempts = [run.store.new_attempt(run.address(region)) for run in runs]
    positions = [batch_positions(run.plan, run.spark, region) if plan.execution.goes_on else {} for run in runs]
    reads = [batch_reads(run.plan, run.spark, region) for run in runs]
    try:
        written: list[dict[str, WriteResult]] | None = None
        if len(runs) > 1:
            materialized = materialize_together(runs, frames, streams, attempts, sinks.need_order)
        elif is_direct:
            frame = frames.sink_input(nodes[0].id)
            result = sinks.write(runs[0], nodes[0], frame)
            written = [{nodes[0].name: result}]
            materialized = Materialized(streams, frame.schema.json(), [[result.rows]], [merge(frames.metrics())])
        else:
            materialized = materialize(frames, streams, attempts[0])
        carried_from = before.run if before is not None else ""
        seen = seen_before(runs[0], before)
        manifests = manifests_of(runs, region, frames, materialized, attempts, carried_from, seen, positions, reads)
        count_malformed(runs, frames, manifests)
        if iterations is not None:
            subtasks = manifests[0].subtasks | iterations.subtasks
            of_iterations = {"iterations": iterations.summaries, "subtasks": subtasks}
            manifests = [msgspec.structs.replace(manifest, **of_iterations) for manifest in manifests]
        runs[0].check()
        if prepares:
            code = plan.code_of(region)
            for run, manifest in zip(runs, manifests, strict=True):
                run.store.prepare(run.address(region), manifest, code)
    except BaseException:
        for attempt in attempts:
            remove_tree(attempt)
        raise
    return _commit(runs, region, sinks, manifests, begun, written)


def _commit(
    runs: Sequence[Run],
    region: Region,
    sinks: RegionSinks,
    manifests: Sequence[Manifest],
    begun: float,
    written: list[dict[str, WriteResult]] | None = None,
) -> list[Manifest]:
    """Write the sinks unless that is done, and commit each partition's manifest as soon as its sinks have it."""
    remaining: list[SinkNode] = []
    committed: list[Manifest] = []
    prepared = bool(sinks.nodes) and written is None
    try:
        if written is None:
            written, remaining = sinks.write_together(manifests)
        share = (now() - begun) / len(runs)
        for run, manifest, results in zip(runs, manifests, written, strict=True):
            began = now()
            results |= {node.name: sinks.write_materialized(run, node, manifest) for node in remaining}
            run.check()
            repeated = [name for name, result in results.items() if result.repeated]
            for name in repeated:
                run.observe(SinkHeld(region.name, name, run.execution))
            whole = msgspec.structs.replace(
                manifest,
                seconds=share + now() - began,
                bytes=manifest.bytes or sum(result.bytes for result in results.values()),
                sinks={name: result.location for name, result in results.items()},
                versions={name: result.version for name, result in results.items() if result.version is not None},
                counters=manifest.counters
                | ({"sinks that had this execution already": len(repeated)} if repeated else {}),
            )
            committed.append(run.store.commit(run.address(region), whole))
    except BaseException:
        if not prepared:
            for run, manifest in zip(runs[len(committed) :], manifests[len(committed) :], strict=True):
                remove_tree(run.store.data(manifest))
        raise
    return committed
