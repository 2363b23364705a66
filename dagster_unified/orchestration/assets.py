"""One step per stage: it runs the stage's region, and materializes the stage and the tables that it writes.

The assets are those of the plan as it is at load time. A run launched with another shuffle mode may join several
stages in one Spark job; then the last of them runs it, and the others say so.
"""

# No `from __future__ import annotations` here: Dagster reads the annotations of an asset's function as objects.
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Any

from dagster import (
    AssetCheckResult,
    AssetDep,
    AssetExecutionContext,
    AssetKey,
    AssetMaterialization,
    AssetsDefinition,
    AssetSelection,
    AutomationCondition,
    MaterializeResult,
    MetadataValue,
    TimeWindowPartitionsDefinition,
    multi_asset,
)

from dagster_unified.connectors.protocol.commits import SparkSink
from dagster_unified.engine import events, interrupts
from dagster_unified.engine.batch.intermediates import Address
from dagster_unified.engine.batch.run import Carrying, Run
from dagster_unified.engine.batch.savepoint import begun, later_savepoint, leave_savepoint
from dagster_unified.engine.batch.stage import check_mode, run_partitions
from dagster_unified.engine.dataframe.frames import spark_source
from dagster_unified.engine.events import (
    Event,
    ExecutorLost,
    IterationEpochCommitted,
    IterationResumed,
    MasterAway,
    MasterBack,
    RecordsWait,
    SinkHeld,
    StageFinished,
    StageStarted,
)
from dagster_unified.engine.failures import naming_store
from dagster_unified.engine.interrupts import Interrupts
from dagster_unified.engine.malformed import diverting, in_batch
from dagster_unified.errors import PipelineError, UnifiedError
from dagster_unified.graph.connectors import WHOLE, Slice
from dagster_unified.graph.nodes import Node, ReadingNode
from dagster_unified.graph.options import Configuration
from dagster_unified.graph.plan import Plan, Region
from dagster_unified.operators.time import to_millis
from dagster_unified.orchestration._dagster_compat import AllDepsCondition, has_allow_ignore
from dagster_unified.orchestration.asset_values import AssetValues, reading
from dagster_unified.orchestration.catalog import Catalog
from dagster_unified.orchestration.checks import carried_state_result, carried_state_spec
from dagster_unified.orchestration.external_assets import (
    malformed_materialization,
    savepoint_materialization,
    targets_metadata,
)
from dagster_unified.orchestration.metadata import ROWS, around, rows_per_partition, stage_metadata, table_metadata
from dagster_unified.orchestration.outcomes import as_failure, beating, interruptible, tried_again
from dagster_unified.orchestration.partitions import key_after, key_before, partition_before, slice_of
from dagster_unified.orchestration.producers import Chain, Producers, latest_metadata
from dagster_unified.orchestration.resources import OBJECT_STORE, connections, session_of, store_of
from dagster_unified.orchestration.tables import loaded_by
from dagster_unified.orchestration.translator import Malformed, Savepoints, Stage, Table

if TYPE_CHECKING:
    import pyarrow as pa
    from pyspark.sql import SparkSession

    from dagster_unified.engine.batch.intermediates import Manifest
    from dagster_unified.engine.state_tables.savepoints import StartingState
    from dagster_unified.orchestration.deployments import BatchDeployment


PREVIEW_ROWS = 10

_STARTS: "dict[tuple[str, str, str], StartingState]" = {}
"""The savepoint that the last run of this process started from, by pipeline, run and partition: its stages share it."""


def stage_assets(batch: "BatchDeployment", loaded: Plan, region: Region, catalog: Catalog) -> AssetsDefinition:
    """Build the assets that one step makes: a stage, and the tables that it writes."""
    part, condition = Stage(loaded, region), batch.automation_condition
    key = catalog.key(part)
    inputs = [AssetDep(catalog.key(Stage(loaded, loaded.regions[r]))) for r in region.inputs]
    before = [partition_before(key)] if batch.carry_state else []
    readers = [node for node in loaded.graph.readers if node.id in region.nodes]
    carries = batch.carry_state and bool(region.carried)
    taken = AssetValues.read_by(loaded, readers)
    taken.check({node.reads: [dep.asset_key for dep in catalog.reads(loaded, node)] for node in readers})
    stage = catalog.spec(part).replace_attributes(
        deps=[*inputs, *catalog.read_by(loaded, readers), *before],
        code_version=region.fingerprint,
        automation_condition=None
        if condition is None
        else condition_of(condition, catalog.unknown(loaded, readers), key),
    )
    tables = [
        spec.replace_attributes(
            # of a run that leaves out the stage, Dagster would not know that its step takes these values
            deps=[*spec.deps, *catalog.read_by(loaded, taken.nodes)],
            code_version=region.fingerprint,
            freshness_policy=batch.freshness_policy,
            automation_condition=condition,
        ).merge_attributes(metadata=targets_metadata(loaded, [number]))
        for number, spec in catalog.made_by(loaded, region.sinks).items()
    ]

    @multi_asset(
        name=step_name(loaded, region),
        specs=[loaded_by(spec, loaded, catalog) for spec in (stage, *tables)],
        ins=taken.inputs(),
        partitions_def=batch.partitions,
        # Of assets that are made together or not at all, and one of which depends on itself, Dagster's automation
        # requests the partition before as well (AutomationConditionEvaluator._handle_execution_set).
        can_subset=True,
        backfill_policy=batch.backfill_policy,
        retry_policy=batch.retry_policy,
        pool=batch.pool,
        check_specs=[carried_state_spec(key)] if carries else [],
        required_resource_keys={"spark", "execution", "intermediates", OBJECT_STORE, *loaded.graph.resource_keys},
    )
    def step(context: AssetExecutionContext, **given: object) -> Iterator[MaterializeResult]:  # type: ignore[type-arg]  # Dagster knows it by this name only
        run_id = context.run.run_id
        with interruptible(context.instance, run_id) as asked, asked.cancelling(), as_failure(context):
            store = store_of(context.resources.intermediates)
            options = batch.configuration(context.resources.execution.launched())
            with (
                tried_again(context, options),
                naming_store(loaded.name, store.root, "another attempt goes on from the stages that are finished"),
                beating(store, loaded.name, context.run.run_id),
            ):
                results = materialize(context, options, given)
        yield from results

    def materialize(
        context: AssetExecutionContext, options: Configuration, given: Mapping[str, object]
    ) -> list[MaterializeResult[Any]]:
        chain = Chain(context.run, context.instance)
        if batch.partitions is None:
            values = taken.by_partition(context, given, [])[WHOLE]
            step = _Step(context, batch, loaded, region, options, catalog, chain, values)
            return results(context, {None: step.reused() or run_steps([step])[0]})
        if not context.has_partition_key and not context.has_partition_key_range:
            raise PipelineError(
                f"{loaded.name}: the deployment is partitioned, and the run is of no partition; choose one where you"
                ' launch it, such as `dagster asset materialize --partition …`, or tags {"dagster/partition": …}'
            )
        slices = [slice_of(batch.partitions, partition) for partition in context.partition_keys]
        of_partition = taken.by_partition(context, given, [slice_.key for slice_ in slices])
        steps = [
            _Step(context, batch, loaded, region, options, catalog, chain, of_partition[slice_.key], slice_)
            for slice_ in slices
        ]
        finished = [step.finished() for step in steps]
        anew = all(finished) and context.retry_number == 0  # somebody wants it again; a retry only what is missing
        shown: dict[str, Shown] = {}
        due: list[_Step] = []
        for step, manifest in zip(steps, finished, strict=True):
            if manifest is not None and not anew:
                shown[step.key] = step.shown(manifest)
                continue
            anew = anew or batch.carry_state  # what comes after it goes on from another state
            reused = step.reused() if not (due and batch.carry_state) else None
            if reused is not None:
                shown[step.key] = reused
            else:
                due.append(step)
        # What fails twice may do so because it is many: an analysis too deep, a worker out of memory.
        size = options["execution.batch.partitions-per-job"] if context.retry_number < 2 else 1
        for first in range(0, len(due), size):
            together = due[first : first + size]
            shown |= zip([step.key for step in together], run_steps(together, together[-1] is due[-1]), strict=True)
        return results(context, {step.key: shown[step.key] for step in steps})

    def results(context: AssetExecutionContext, shown: Mapping[str | None, Shown]) -> list[MaterializeResult[Any]]:
        """Return what the run asks for, and report what else the step has made."""
        made: dict[AssetKey, dict[str | None, dict[str, Any]]] = {key: {}}
        for partition, of in shown.items():
            for asset, metadata in ((key, of.stage), *of.tables.items()):
                made.setdefault(asset, {})[partition] = metadata
        check = with_history(context, made) if batch.partitions is not None else None
        for asset, metadata_of in made.items():
            for partition, metadata in metadata_of.items():
                if asset in context.selected_asset_keys:
                    context.add_asset_metadata(metadata, asset_key=asset, partition_key=partition)
                else:
                    context.log_event(AssetMaterialization(asset, partition=partition, metadata=metadata))
        return [
            MaterializeResult(asset_key=asset, check_results=[check] if check is not None and asset == key else [])
            for asset in made
            if asset in context.selected_asset_keys
        ]

    def with_history(
        context: AssetExecutionContext, made: Mapping[AssetKey, dict[str | None, dict[str, Any]]]
    ) -> AssetCheckResult | None:
        """Add pictures of the rows per partition, and check the state that partitions went on from."""
        assert batch.partitions is not None
        partitions = batch.partitions.get_partition_keys(dynamic_partitions_store=context.instance)
        checked = carries and key in context.selected_asset_keys
        of_stages = latest_metadata(context.instance, key) if checked else None
        for asset, shown in made.items():
            now = {partition: metadata for partition, metadata in shown.items() if partition}
            counted = [partition for partition, metadata in now.items() if ROWS in metadata]
            if not counted:
                continue
            try:
                known = of_stages if asset == key else None
                if known is None:
                    known = latest_metadata(context.instance, asset, around(partitions, counted))
                now[counted[-1]]["rows per partition"] = rows_per_partition(partitions, {**known, **now}, counted)
            except Exception as error:  # no picture is worth a stage
                context.log.warning(f"rows per partition could not be drawn: {type(error).__name__}: {error}")
        if of_stages is None:
            return None
        now = {partition: metadata for partition, metadata in made[key].items() if partition}
        check = carried_state_result(key, partitions, {**of_stages, **now})
        if not check.passed:
            context.log.warning(f"stage '{region.name}': {check.description}")
        return check

    return step


def step_name(loaded: Plan, region: Region) -> str:
    """Return the name of the step that makes a stage."""
    return f"{loaded.name}__{region.name}"


@dataclass(frozen=True)
class Shown:
    """What a step shows of a partition, or of all input: the metadata of the stage, and of tables by their assets."""

    stage: dict[str, Any]
    tables: dict[AssetKey, dict[str, Any]] = field(default_factory=dict)

    def adding(self, further: Mapping[str, Any]) -> "Shown":
        """Return the same with more of the stage."""
        return Shown({**self.stage, **further}, self.tables)


def _launched_regions(loaded: Plan, launched: Plan, region: Region) -> list[Region]:
    uids = {node.uid for node in loaded.nodes_of(region)}
    return [r for r in launched.regions if any(node.uid in uids for node in launched.nodes_of(r))]


def _launched_region(loaded: Plan, launched: Plan, region: Region) -> Region | None:
    """Return the region that this step has to run; None where a later stage's step runs it."""
    wanted = _launched_regions(loaded, launched, region)[-1]
    members = {node.uid for node in launched.nodes_of(wanted)}
    last = max(r.id for r in loaded.regions if any(node.uid in members for node in loaded.nodes_of(r)))
    return wanted if last == region.id else None


@dataclass
class _Step:
    """A stage's step for one partition, or for all input."""

    context: AssetExecutionContext
    batch: "BatchDeployment"
    loaded: Plan
    region: Region
    options: Configuration
    catalog: Catalog
    chain: Chain
    values: Mapping[str, Sequence[object]]
    """What other assets returned, by the source that reads it."""

    slice: Slice | None = None
    recomputed: dict[str, str] = field(default_factory=dict)
    """Stages that had to be recomputed for this one, and why."""

    @property
    def key(self) -> str:
        assert self.slice is not None
        return self.slice.key

    def __post_init__(self) -> None:
        self.producers = Producers(
            store_of(self.context.resources.intermediates),
            self.loaded.name,
            self.slice,
            self.chain,
        )

    @cached_property
    def launched(self) -> Plan:
        """The plan for this partition, with the options that were set at launch."""
        plan = self._stopping(self.batch.plan(self.options, self.slice))
        check_mode(plan)  # before a stage without work of its own counts as materialized
        return reading(plan.connected(connections(plan.graph, self.context.resources)), self.values)

    def _stopping(self, plan: Plan) -> Plan:
        """Return the plan that reads what the run has read so far, and what the runs have that it re-executes."""
        context, sources = self.context, {node.id for node in plan.graph.sources}
        reads = [region for region in plan.regions if not sources.isdisjoint(region.nodes)]
        again = context.run.parent_run_id is not None or context.retry_number > 0
        if not again and all(self._is_same(region) for region in reads):
            return plan
        stops = self.producers.stops(region.name for region in reads)
        otherwise = "this run reads what is there now, and not what was read before"
        for node in plan.graph.sources:
            if node.uid in stops and (lost := spark_source(plan.name, node).lost(stops[node.uid])):
                del stops[node.uid]
                what = f"{', '.join(lost[:10])}{'' if len(lost) <= 10 else f' and {len(lost) - 10} more'}"
                context.log.warning(f"source '{node.source.name}': {what}, which was read before, is gone; {otherwise}")
        if not stops:
            return plan
        names = ", ".join(node.source.name for node in plan.graph.sources if node.uid in stops)
        try:
            plan = self.batch.plan(self.options, self.slice, stops)
        except UnifiedError as error:
            context.log.warning(f"{error}; {otherwise}")
        else:
            context.log.info(f"reads of {names} what was read before; a new run reads what has come since")
        return plan

    def _is_same(self, read: Region) -> bool:
        """Return whether a stage of this run, if it has run, had the input that is there now."""
        address = Address(self.loaded.name, read.name, self.context.run.run_id, self.producers.partition)
        manifest = self.producers.store.manifest(address) if self.region.inputs else None
        return manifest is None or manifest.fingerprint == read.fingerprint

    @cached_property
    def launched_region(self) -> Region | None:
        """The region of that plan that this step runs; None where a later stage's step runs it."""
        return _launched_region(self.loaded, self.launched, self.region)

    def finished(self) -> "Manifest | None":
        """Return what an earlier attempt of this run, or a run that it re-executes, materialized of this partition."""
        region = self.launched_region
        if region is None:
            return None
        manifest = self.producers.of_chain(region.name)
        return manifest if manifest is not None and manifest.fingerprint == region.fingerprint else None

    def shown(self, manifest: "Manifest") -> Shown:
        """Return what stands already.

        A run that keeps it materializes it as well: its materialization is the partition's latest.
        """
        self._link(manifest)
        self.context.log.info(
            f"stage '{manifest.stage}' of partition {manifest.partition} was finished by run {manifest.run[:8]} before"
        )
        return self._metadata(self.launched, manifest)

    def _link(self, manifest: "Manifest") -> None:
        run_id = self.context.run.run_id
        address = Address(self.launched.name, manifest.stage, run_id, self.producers.partition)
        self.producers.store.link(address, manifest)

    def _metadata(self, plan: Plan, manifest: "Manifest", previews: "Mapping[str, pa.Table] | None" = None) -> Shown:
        region, data = plan.region(manifest.stage), self.producers.store.data(manifest)
        stage = stage_metadata(self.launched, region, manifest, data, self.asset_of)
        tables = {
            self.catalog.key(Table(self.launched, node)): table_metadata(
                self.launched,
                region,
                manifest,
                node,
                self.catalog.key(Stage(self.loaded, self.region)),
                self.asset_of,
                (previews or {}).get(node.name),
            )
            for node in self.launched.graph.sinks
            if node.name in manifest.sinks
        }
        return Shown(stage, tables)

    def asset_of(self, node: Node) -> AssetKey | None:
        """Return the asset of what an operator of the launched plan produces; None where it is this stage's own."""
        known = next(planned for planned in self.loaded.graph.nodes if planned.uid == node.uid)
        if isinstance(known, ReadingNode) and known.id in self.region.nodes:
            return self.catalog.reads(self.loaded, known)[0].asset_key
        holder = self.loaded.region_of(known.id)
        return None if holder.id == self.region.id else self.catalog.key(Stage(self.loaded, holder))

    def find(self, wanted: Region) -> "Manifest | None":
        manifest = self.producers.find(wanted.name, self.catalog.key(Stage(self.launched, wanted)))
        if manifest is not None and manifest.fingerprint != wanted.fingerprint:
            self.context.log.warning(
                f"the intermediate of stage '{wanted.name}' comes from other code or other input, and is not used"
            )
            return None
        return manifest

    def stands(self, wanted: Region) -> "Manifest | None":
        """Return what this run wrote of a stage or, if that ran in a run of its own, what the latest run wrote.

        None where that was made by other code, or before what it read was made anew.
        """
        written = self.producers.of_chain(wanted.name)
        if written is not None:
            return written
        store, partition = self.producers.store, self.producers.partition
        newest = store.newest(self.loaded.name, wanted.name, partition, wanted.fingerprint)
        if newest is None:
            return None
        inputs = [self.stands(self.launched.regions[number]) for number in wanted.inputs]
        return newest if all(read is not None and read.created <= newest.created for read in inputs) else None

    def reused(self) -> Shown | None:
        """Return what is shown of a stage that need not run, where an earlier run's output becomes this run's."""
        region = self.launched_region
        if region is None:
            return Shown({"pipelined": "runs in one Spark job with a later stage"})
        reused = self._reusable(region)
        if reused is None:
            return None
        self.context.log.info(
            f"stage '{region.name}' need not run: run {reused.run[:8]} materialized it from the same code,"
            " configuration and input"
        )
        self._link(reused)
        return self._metadata(self.launched, reused).adding({"reused from run": MetadataValue.dagster_run(reused.run)})

    def as_run(self, spark: "SparkSession", asked: Interrupts) -> Run:
        """Return how the engine runs the step, until `asked` stops it."""
        assert self.launched_region is not None
        run = Run(
            plan=self.launched,
            spark=spark,
            store=self.producers.store,
            run_id=self.context.run.run_id,
            execution=self.producers.execution(self.launched_region.name),
            number=self.producers.chain.number,
            partition=self.producers.partition,
            partition_end=None if self.slice is None else _end_of(self.slice),
            observe=_observer(self.context, self.slice, self.recomputed),
            carry=self._carrying(),
            check=asked.check,
        )
        identity = (self.loaded.name, run.run_id, run.partition)
        run = begun(run, _STARTS.get(identity))
        if run.carry is not None and run.carry.start is not None:
            _STARTS.clear()
            _STARTS[identity] = run.carry.start
        return run

    def materialized(self, run: Run, manifest: "Manifest", previews: "Mapping[str, pa.Table]") -> Shown:
        """Return what is shown of the engine's output; reports malformed rows."""
        partition = None if self.slice is None else self.slice.key
        for node in diverting(self.launched):
            if node.uid in manifest.diverted:
                diverted = in_batch(run.store, run.plan.name, node)
                key = self.catalog.key(Malformed(self.launched, node))
                rows = manifest.diverted[node.uid]
                self.context.log_event(malformed_materialization(key, diverted, rows, partition))
        recomputed = {f"recomputed {stage}": reason for stage, reason in self.recomputed.items()}
        return self._metadata(run.plan, manifest, previews).adding(recomputed)

    def report_savepoint(self) -> None:
        """Report the savepoint that the run has left."""
        path = self.launched.execution.savepoint.path
        assert path is not None
        self.context.log_event(
            savepoint_materialization(self.catalog.key(Savepoints(self.launched)), path, self.context.log)
        )

    def _reusable(self, region: Region) -> "Manifest | None":
        """Return the manifest of the stage's latest materialization, if code, options, input and state are the same.

        In a re-execution the user says what runs, so there it is None.
        """
        if (
            self.batch.reuse == "never"
            or self.launched.execution.has_savepoint
            or self.context.run.parent_run_id is not None
            or not self.launched.identifies_input(region)
        ):
            return None
        manifest = self.producers.materialized(region.name, self.catalog.key(Stage(self.launched, region)))
        if manifest is None or manifest.fingerprint != region.fingerprint:
            return None
        sinks = [node.sink for node in self.launched.graph.sinks if node.id in region.sinks]
        if not all(sink.exists() for sink in sinks if isinstance(sink, SparkSink)):
            return None
        carry = self._carrying()
        before = carry.manifest(self.launched, region) if carry is not None else None
        return manifest if before is None or before.run == manifest.carried_from else None

    def _carrying(self) -> Carrying | None:
        """Return the state of the partition before: what this run left, or else its latest."""
        partitions = self.batch.partitions
        if (
            not self.batch.carry_state
            or self.slice is None
            or not isinstance(partitions, TimeWindowPartitionsDefinition)
        ):
            return None
        key = key_before(partitions, self.slice.key)
        last = key_after(partitions, self.slice.key) is None
        if key is None:
            return Carrying(None, "", last)
        producers = self.producers.of(slice_of(partitions, key))

        def before(region: Region) -> "Manifest | None":
            asset_key = self.catalog.key(Stage(self.launched, region))
            state = {(self.launched.graph.node(port.node).uid, port.tag) for port in region.carried}
            latest = producers.latest(region.name, asset_key)
            return producers.holding(asset_key, state) if latest is None and state else latest

        return Carrying(before, key, last)


def _end_of(part: Slice) -> int | None:
    time = part.time()
    return None if time is None else to_millis(time.end)


def run_steps(steps: "Sequence[_Step]", last_of_run: bool = True) -> list[Shown]:
    """Materialize a stage for one partition, or for several in one Spark job, and return what is shown of each.

    After the last partition of a run it leaves the savepoint that the run is to leave.
    """
    last = steps[-1]
    assert last.launched_region is not None
    with interrupts.listening() as asked:
        spark = asked.started(session_of(last.context.resources.spark))
        runs = [step.as_run(spark, asked) for step in steps]
        manifests = run_partitions(runs, last.launched_region.name, [step.find for step in steps])
        stays = later_savepoint(runs[-1]) if last_of_run else None
        if stays is not None:
            last.context.log.warning(
                f"{last.launched.execution.savepoint.path} keeps the savepoint after partition {stays.partition}, which"
                f" is later than {runs[-1].partition}. Where its state is to change, run all partitions up to that one"
            )
        elif last_of_run:
            ran = _launched_regions(last.loaded, last.launched, last.region)  # the last of them, and what led to it
            if leave_savepoint(runs[-1], ran, last.stands) is not None:
                last.report_savepoint()
    previews = _previews(runs[-1], last.launched_region)  # of the table as it is now
    return [
        step.materialized(run, manifest, previews if step is last else {})
        for step, run, manifest in zip(steps, runs, manifests, strict=True)
    ]


def _observer(
    context: AssetExecutionContext, slice_: Slice | None, recomputed: dict[str, str]
) -> Callable[[Event], None]:
    """Write events to the run's log, and remember why stages were recomputed."""
    of_partition = "" if slice_ is None else f" of partition {slice_.key}"

    def observe(event: Event) -> None:
        events.report(event)
        if isinstance(event, StageStarted) and event.reason:
            recomputed[event.stage] = event.reason
            context.log.warning(f"recomputing stage '{event.stage}'{of_partition}: {event.reason}")
        elif isinstance(event, (IterationResumed, IterationEpochCommitted)):
            context.log.info(f"{event.describe()}{of_partition}")
        elif isinstance(event, (SinkHeld, RecordsWait)):
            context.log.warning(event.describe() if slice_ is None else f"partition {slice_.key}: {event.describe()}")
        elif isinstance(event, (ExecutorLost, MasterAway, MasterBack)):
            context.log.warning(event.describe())
        elif isinstance(event, StageFinished):
            m = event.manifest
            context.log.info(
                f"stage '{event.stage}'{of_partition}: {m.rows} rows, {m.bytes} bytes in {m.seconds:.2f} s"
                + (f", recomputed: {event.reason}" if event.reason else "")
            )

    return observe


def _previews(run: Run, region: Region) -> "dict[str, pa.Table]":
    previews = {}
    for node in run.plan.graph.sinks:
        if node.id in region.sinks and isinstance(node.sink, SparkSink):
            table = node.sink.preview(run.spark, PREVIEW_ROWS)
            if table is not None:
                previews[node.name] = table
    return previews


Condition = AutomationCondition[AssetKey]


def condition_of(condition: Condition, sources: Collection[AssetKey], stage: AssetKey) -> Condition:
    """Return the condition of a stage, from the one that its deployment gives.

    It leaves out the assets that stand for `sources`: nobody materializes them, so that a condition that waits for
    them, as `on_cron` and `eager` do, would wait for ever. And what has to be new since a tick is not the stage's own
    partition before, from which it goes on with `carry_state`.
    """
    if sources and has_allow_ignore(condition):
        condition = condition.ignore(AssetSelection.assets(*sources))
    for waiting in dict.fromkeys(_for_all_deps(condition)):
        condition = condition.replace(waiting, waiting.ignore(AssetSelection.assets(stage)))
    return condition


def _for_all_deps(condition: AutomationCondition[Any]) -> Iterator[AllDepsCondition[Any]]:
    if isinstance(condition, AllDepsCondition):
        yield condition
        return
    for child in condition.children:
        yield from _for_all_deps(child)
