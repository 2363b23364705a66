"""Savepoints of BATCH: a run starts from one, and leaves the state of its keyed stages in one instead of dropping it.

The end of the data is then not the end of the input: windows that are open, timers that are pending and elements that
are held back are in it, and the watermark is what the strategies derive from the data so far. Knows the run, its
intermediates and the savepoint's tables.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

from dagster_unified.engine.batch import intermediates
from dagster_unified.engine.batch.intermediates import Manifest as StageManifest
from dagster_unified.engine.batch.run import Carrying, Run, exports_rows, time_after
from dagster_unified.engine.batch.stage import run_stage
from dagster_unified.engine.failures import naming_store
from dagster_unified.engine.positions import after
from dagster_unified.engine.state_tables.savepoints import (
    StartingState,
    operator_tables,
    starting_state,
    stateful,
    write_table,
)
from dagster_unified.graph import nodes as g
from dagster_unified.graph.connectors import WHOLE
from dagster_unified.graph.plan import Plan, Region
from dagster_unified.graph.upgrade import deployed_code, deployment_fingerprint
from dagster_unified.operators.layout import CARRIED, CARRIED_LAYOUT
from dagster_unified.operators.metrics import Metrics, merge
from dagster_unified.operators.time import wall_clock
from dagster_unified.state import manifest as manifests
from dagster_unified.state.manifest import IterationState, Manifest, OperatorState
from dagster_unified.storage.paths import storage_path
from dagster_unified.version import library_version

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

PATH = "execution.savepoint.path"

Finished = Callable[[Region], StageManifest | None]
"""Gives what has been materialized of a region, if it belongs to what this run has materialized."""


def run_all(run: Run, again: bool = False) -> list[StageManifest]:
    """Run every stage in order, in one process, as a notebook or a benchmark does.

    `again` goes on with a stopped run: what is done stays done, as where Dagster re-executes from failure.
    """
    with naming_store(run.plan.name, run.store.root, "another run starts from the beginning"):
        run = begun(run)
        done: dict[int, StageManifest] = {}
        for region in run.plan.regions:
            finished = run.store.find(run.address(region)) if again else None
            done[region.id] = finished or run_stage(run, region, lambda r: done.get(r.id))
            leave_savepoint(run, [region], lambda r: done.get(r.id))
        return list(done.values())


def begun(run: Run, known: StartingState | None = None) -> Run:
    """Return the run with the state that its options let it start from, and with state that goes on where they say so.

    `known` is what another stage of the run has started from: workers are then not asked again for the state's columns.
    Raises `StateError` where the savepoint does not fit, and where the one that it is to leave is there already.
    """
    execution = run.plan.execution
    if not execution.has_savepoint:
        return run
    alone = run.carry is None and execution.starts_from is None
    carry = run.carry or Carrying(None, "", last=True, only_saved=alone)
    if execution.goes_on:
        assert execution.savepoint.path is not None
        manifests.check_free(
            execution.savepoint.path, PATH, lambda stored: _replaces(run, stored) or _is_after_later(run, stored)
        )
        carry = replace(carry, last=False)
    if execution.starts_from is None or carry.before is not None:
        return replace(run, carry=carry)
    ignore = execution.savepoint.ignore_unclaimed
    start = known
    if start is None or start.spark is not run.spark:
        start = starting_state(run.plan, run.spark, execution.starts_from, ignore)
    plan = run.plan if run.partition != WHOLE else after(run.plan, start.manifest.positions, ignore)
    return replace(run, plan=plan, carry=replace(carry, start=start))


def leave_savepoint(run: Run, regions: Sequence[Region], finished: Finished) -> Manifest | None:
    """Write the savepoint, if the run leaves one and these regions were the last that it waited for.

    Raises `StateError` where a later partition has left one, which stays: see `later_savepoint`.

    Stages may run in processes of their own: two that finish together both write it, and the same.
    """
    execution, needed = run.plan.execution, _needed(run.plan)
    if not execution.goes_on or not {region.id for region in needed} & {region.id for region in regions}:
        return None
    manifests = [finished(region) for region in needed]
    stages = [stage for stage in manifests if stage is not None]
    assert execution.savepoint.path is not None
    return _write(run, stages, execution.savepoint.path) if len(stages) == len(needed) else None


def later_savepoint(run: Run) -> Manifest | None:
    """Return the savepoint after a later partition that stays where this run would leave its own."""
    path = run.plan.execution.savepoint.path
    if path is None or not run.plan.execution.goes_on or run.partition_end is None:
        return None
    stored = manifests.find(storage_path(path, PATH))
    return stored if stored is not None and _is_after_later(run, stored) else None


def _needed(plan: Plan) -> list[Region]:
    sources = {node.id for node in plan.graph.sources}
    return [region for region in plan.regions if region.carried or sources & set(region.nodes)]


def _replaces(run: Run, stored: Manifest) -> bool:
    """Return whether a run replaces a savepoint: an earlier attempt's, or one after a partition that is not later."""
    if stored.pipeline != run.plan.name or stored.mode != "BATCH":
        return False
    of_partitions = run.partition != WHOLE and stored.partition not in ("", WHOLE)
    return stored.run == run.run_id or (of_partitions and not _is_after_later(run, stored))


def _is_after_later(run: Run, stored: Manifest) -> bool:
    """Return whether a savepoint of the pipeline comes after a later partition than the run's."""
    if stored.pipeline != run.plan.name or run.partition_end is None or stored.partition_end is None:
        return False
    return stored.partition_end > run.partition_end


def _write(run: Run, stages: Sequence[StageManifest], path: str) -> Manifest:
    plan, by_name, attempt = run.plan, {stage.stage: stage for stage in stages}, manifests.new_attempt()
    folder = manifests.check_free(path, PATH, lambda stored: _replaces(run, stored))
    states, loops = list[OperatorState](), list[IterationState]()

    def left_by(node: g.Node) -> tuple[StageManifest, DataFrame]:
        stage = by_name[plan.region_of(node.id).name]
        run.check()
        return stage, intermediates.read(run.spark, run.store, [stage], node.uid, CARRIED, CARRIED_LAYOUT)

    for table in operator_tables(plan, run.spark, stateful(plan), {}):
        stage, state = left_by(table.operator.node)
        files = table.files_left if exports_rows(table.operator.node) and not stage.groups else table.files
        states.append(write_table(table, partial(files, state), folder, attempt))
    for node in plan.graph.nodes:
        if isinstance(node, g.IterationNode) and node.carries_state:
            from dagster_unified.engine.iterations.savepoints import write_left  # only a plan with iterations needs it

            stage, state = left_by(node)
            states += write_left(plan, node, run.spark, state, stage.subtasks[node.uid], folder, attempt)
            loops.append(IterationState(node.uid, node.name, stage.summary_of(node.uid, node.name).epochs[-1]))
    seen = merge(Metrics(last_event_times=stage.last_event_times) for stage in stages)
    manifest = Manifest(
        library=library_version(),
        pipeline=plan.name,
        mode="BATCH",
        taken=wall_clock(),
        run=run.run_id,
        partition=run.partition,
        partition_end=run.partition_end,
        fingerprint=deployment_fingerprint(deployed_code(plan)),
        max_parallelism=plan.execution.streaming.max_parallelism,
        event=time_after(plan, seen),
        operators=states,
        iterations=loops,
        positions={uid: position for stage in stages for uid, position in stage.positions.items()},
    )
    run.check()
    manifests.commit(folder, manifest, lambda stored: _replaces(run, stored))
    return manifest
