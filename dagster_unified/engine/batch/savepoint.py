"""A savepoint at the end of a BATCH run: the state that its keyed stages have left, instead of dropping it.

The end of the data is then not the end of the input: windows that are open, timers that are pending and elements that
are held back are in it, and the watermark is what the strategies derive from the data so far. Knows the run, its
intermediates and the savepoint's tables.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace

from dagster_unified.connectors.positions import Position
from dagster_unified.engine.batch.carried import time_after
from dagster_unified.engine.batch.intermediates import dataframes
from dagster_unified.engine.batch.intermediates.store import Manifest as StageManifest
from dagster_unified.engine.batch.run import Carrying, Run
from dagster_unified.engine.batch.stage import run_all
from dagster_unified.engine.positions import after, batch_positions
from dagster_unified.engine.state_tables.frames import operator_tables
from dagster_unified.engine.state_tables.savepoints import starting_state, stateful, write_table
from dagster_unified.graph.plan import Port, library_version
from dagster_unified.graph.upgrade import deployed_code, deployment_fingerprint
from dagster_unified.operators.layout import CARRIED, CARRIED_LAYOUT
from dagster_unified.operators.metrics import Metrics, merge
from dagster_unified.operators.time import wall_clock
from dagster_unified.state import manifest as manifests
from dagster_unified.state.manifest import Manifest


def run_with_savepoints(run: Run) -> list[StageManifest]:
    """Run every stage in order, from the savepoint and to the savepoint that the run's options name."""
    execution = run.plan.execution
    if not execution.has_savepoint:
        return run_all(run)
    start = None
    if execution.starts_from is not None:
        ignore = execution.savepoint.ignore_unclaimed
        start = starting_state(run.plan, run.spark, execution.starts_from, ignore)
    if execution.savepoint.path is not None:
        manifests.begin(execution.savepoint.path, "execution.savepoint.path")
    plan = run.plan
    if start is not None:
        plan = after(plan, start.manifest.positions, execution.savepoint.ignore_unclaimed)
    carry = Carrying(None, "", last=not execution.goes_on, start=start)
    run = replace(run, plan=plan, carry=carry)
    positions = batch_positions(plan, run.spark) if execution.goes_on else {}
    stages = run_all(run)
    if execution.savepoint.path is not None:
        write_savepoint(run, stages, execution.savepoint.path, positions)
    return stages


def write_savepoint(
    run: Run, stages: Iterable[StageManifest], path: str, positions: Mapping[str, Position]
) -> Manifest:
    """Write the state that a run's stages have left; raises `StateError` where there is a savepoint already."""
    plan, by_name = run.plan, {stage.stage: stage for stage in stages}
    folder = manifests.begin(path, "execution.savepoint.path")
    states = []
    for table in operator_tables(plan, run.spark, stateful(plan), {}):
        port = Port(table.node.id, CARRIED)
        stage = by_name[plan.region_of(port.node).name]
        pages = dataframes.read(run.spark, run.store, [stage], table.node.uid, port.tag, CARRIED_LAYOUT)
        run.check()
        states.append(write_table(table, pages, folder))
    seen = merge(Metrics(last_event_times=stage.last_event_times) for stage in by_name.values())
    found = Manifest(
        library=library_version(),
        pipeline=plan.name,
        mode="BATCH",
        taken=wall_clock(),
        fingerprint=deployment_fingerprint(deployed_code(plan)),
        max_parallelism=plan.execution.streaming.max_parallelism,
        event=time_after(plan, seen),
        operators=states,
        positions=dict(positions),
    )
    run.check()
    manifests.commit(folder, found)
    return found
