"""One asset per stage: its step runs the stage's region, and says what it wrote.

The assets are those of the plan as it is at load time. A run launched with another shuffle mode may join several of
them in one Spark job; then the last of them runs it, and the others say so.
"""

# No `from __future__ import annotations` here: Dagster reads the annotations of an asset's function as objects.
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Any

from dagster import (
    AssetDep,
    AssetExecutionContext,
    AssetKey,
    AssetsDefinition,
    AssetSelection,
    AutomationCondition,
    MaterializeResult,
    MetadataValue,
    TimeWindowPartitionsDefinition,
    asset,
)

from dagster_unified.connectors.protocol.sink import SparkSink
from dagster_unified.engine import events, interrupts
from dagster_unified.engine.batch.intermediates.store import Address
from dagster_unified.engine.batch.run import Carrying, Run
from dagster_unified.engine.batch.savepoint import begun, later_savepoint, leave_savepoint
from dagster_unified.engine.batch.stage import check_mode, run_partitions
from dagster_unified.engine.events import (
    Event,
    ExecutorLost,
    IterationResumed,
    MasterAway,
    MasterBack,
    RecordsWait,
    RoundCommitted,
    SinkHeld,
    StageFinished,
    StageStarted,
)
from dagster_unified.engine.failures import naming_store
from dagster_unified.engine.interrupts import Interrupts
from dagster_unified.engine.malformed import diverting, in_batch
from dagster_unified.errors import PipelineError
from dagster_unified.graph.nodes import Node, ReadingNode
from dagster_unified.graph.options import Configuration
from dagster_unified.graph.plan import Plan, Region
from dagster_unified.graph.slices import Slice
from dagster_unified.operators.time import to_millis
from dagster_unified.orchestration._dagster_compat import AllDepsCondition, CoercibleToAssetDep, has_allow_ignore
from dagster_unified.orchestration.checks import carried_state_result, carried_state_spec
from dagster_unified.orchestration.external_assets import (
    materialized,
    materialized_sinks,
    name_of,
    upstream_dep,
    upstream_deps,
)
from dagster_unified.orchestration.heartbeat import beating
from dagster_unified.orchestration.metadata import stage_metadata
from dagster_unified.orchestration.outcomes import as_failure, interruptible, tried_again
from dagster_unified.orchestration.partitions import key_after, key_before, partition_before, slice_of
from dagster_unified.orchestration.plot import ROWS, around, rows_per_partition
from dagster_unified.orchestration.producers import Chain, Producers, latest_metadata
from dagster_unified.orchestration.resources import session_of, store_of
from dagster_unified.orchestration.savepoints import left
from dagster_unified.orchestration.targets import targets_metadata

if TYPE_CHECKING:
    import pyarrow as pa
    from pyspark.sql import SparkSession

    from dagster_unified.engine.batch.intermediates.store import Manifest
    from dagster_unified.engine.state_tables.savepoints import StartingState
    from dagster_unified.orchestration.deployments import BatchDeployment
    from dagster_unified.orchestration.translator import StageTranslator


PREVIEW_ROWS = 10

_STARTS: "dict[tuple[str, str, str], StartingState]" = {}
"""The savepoint that the last run of this process started from, by pipeline, run and partition: its stages share it."""


def stage_asset(
    batch: "BatchDeployment",
    loaded: Plan,
    region: Region,
    upstream: Mapping[str, CoercibleToAssetDep],
    translator: "StageTranslator",
) -> AssetsDefinition:
    """Build the asset of one stage.

    `upstream` are the user's own assets that some sources read, by the names of the sources.
    """
    inputs = [AssetDep(translator.get_asset_key(loaded, loaded.regions[r])) for r in region.inputs]
    own, condition = translator.get_asset_key(loaded, region), batch.automation_condition
    before = [partition_before(own)] if batch.carry_state else []
    read = [n for n in loaded.graph.readers if n.id in region.nodes]
    carries = batch.carry_state and bool(region.carried)
    # Of an asset that depends on itself and has a check, Dagster's automation requests the partition before as well
    # (AutomationConditionEvaluator._handle_execution_set).
    checked = carries and condition is None
    placeholders = [translator.get_source_key(loaded, n) for n in read if name_of(n) not in upstream]

    @asset(
        key=own,
        deps=[*inputs, *upstream_deps(loaded, read, upstream, translator), *before],
        partitions_def=batch.partitions,
        backfill_policy=batch.backfill_policy,
        group_name=translator.get_group_name(loaded, region),
        tags=translator.get_tags(loaded, region),
        kinds=translator.get_kinds(loaded, region),
        description=translator.get_description(loaded, region),
        metadata={**targets_metadata(loaded, region.sinks), **translator.get_metadata(loaded, region)},
        code_version=region.fingerprint,
        retry_policy=batch.retry_policy,
        freshness_policy=batch.freshness_policy,
        automation_condition=None if condition is None else condition_of(condition, placeholders, own),
        pool=batch.pool,
        check_specs=[carried_state_spec(own)] if checked else [],
        required_resource_keys={"spark", "execution", "intermediates"},
    )
    def stage(context: AssetExecutionContext) -> MaterializeResult:  # type: ignore[type-arg]  # Dagster knows it by this name only
        run_id = context.run.run_id
        with interruptible(context.instance, run_id) as asked, asked.cancelling(), as_failure(context):
            store = store_of(context.resources.intermediates)
            options = batch.configuration(context.resources.execution.launched())
            with (
                tried_again(context, options),
                naming_store(loaded.name, store.root, "another attempt goes on from the stages that are finished"),
                beating(store, loaded.name, context.run.run_id),
            ):
                return materialize(context, options)

    def materialize(context: AssetExecutionContext, options: Configuration) -> MaterializeResult[Any]:
        chain = Chain(context.run, context.instance)
        if batch.partitions is None:
            step = _Step(context, batch, loaded, region, options, translator, upstream, chain)
            return MaterializeResult(metadata=step.reused() or run_steps([step])[0])
        if not context.has_partition_key and not context.has_partition_key_range:
            raise PipelineError(
                f"{loaded.name}: the deployment is partitioned, and the run is of no partition; choose one where you"
                ' launch it, such as `dagster asset materialize --partition …`, or tags {"dagster/partition": …}'
            )
        steps = [
            _Step(context, batch, loaded, region, options, translator, upstream, chain, slice_of(batch.partitions, key))
            for key in context.partition_keys
        ]
        before = [step.finished() for step in steps]
        anew = all(before) and context.retry_number == 0  # somebody wants it again; a retry only what was not finished
        shown: dict[str, dict[str, Any]] = {}
        due: list[_Step] = []
        for step, found in zip(steps, before, strict=True):
            if found is not None and not anew:
                shown[step.key] = step.shown(found)
                continue
            anew = anew or batch.carry_state  # what comes after it goes on from another state
            reused = step.reused() if not (due and batch.carry_state) else None
            if reused is not None:
                shown[step.key] = reused
            else:
                due.append(step)
        # What fails twice may do so because it is many: an analysis too deep, a worker out of memory.
        size = options["execution.batch.partitions-per-job"] if context.retry_number < 2 else 1
        for together in batched(due, size):
            shown |= zip([step.key for step in together], run_steps(together, together[-1] is due[-1]), strict=True)
        return result(context, {step.key: shown[step.key] for step in steps})

    def result(context: AssetExecutionContext, shown: dict[str, dict[str, Any]]) -> MaterializeResult[Any]:
        assert batch.partitions is not None
        keys = batch.partitions.get_partition_keys(dynamic_partitions_store=context.instance)
        known: dict[str, Mapping[str, Any]] = {**latest_metadata(context.instance, own), **shown} if carries else {}
        found = carried_state_result(own, keys, known) if carries else None
        counted = [of for of, metadata in shown.items() if ROWS in metadata]
        if counted:
            try:
                known = known or {**latest_metadata(context.instance, own, around(keys, shown)), **shown}
                shown[counted[-1]]["rows per partition"] = rows_per_partition(keys, known, counted)
            except Exception as error:  # no picture is worth a stage
                context.log.warning(f"rows per partition could not be drawn: {type(error).__name__}: {error}")
        for of, metadata in shown.items():
            context.add_asset_metadata(metadata, partition_key=of)
        if found is not None and not found.passed:
            context.log.warning(f"stage '{region.name}': {found.description}")
        return MaterializeResult(check_results=[found] if found is not None and checked else [])

    return stage


def _launched_regions(loaded: Plan, launched: Plan, region: Region) -> list[Region]:
    """The regions of the launched plan that have operators of a region of the loaded one."""
    uids = {loaded.graph.node(n).uid for n in region.nodes}
    return [r for r in launched.regions if any(launched.graph.node(n).uid in uids for n in r.nodes)]


def _launched_region(loaded: Plan, launched: Plan, region: Region) -> Region | None:
    """The region that this step has to run; None where a later stage's step runs it."""
    wanted = _launched_regions(loaded, launched, region)[-1]
    members = {launched.graph.node(n).uid for n in wanted.nodes}
    last = max(r.id for r in loaded.regions if any(loaded.graph.node(n).uid in members for n in r.nodes))
    return wanted if last == region.id else None


@dataclass
class _Step:
    """A stage's step for one partition, or for all input."""

    context: AssetExecutionContext
    batch: "BatchDeployment"
    loaded: Plan
    region: Region
    options: Configuration
    translator: "StageTranslator"
    upstream: Mapping[str, CoercibleToAssetDep]
    chain: Chain
    slice: Slice | None = None
    recomputed: dict[str, str] = field(default_factory=dict)
    """Stages that had to be recomputed for this one, and why."""

    @property
    def key(self) -> str:
        """Its partition's key."""
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
        plan = self.batch.plan(self.options, self.slice)
        check_mode(plan)  # before a stage without work of its own counts as materialized
        return plan

    @cached_property
    def launched_region(self) -> Region | None:
        """What this step has to run of that plan; None where a later stage's step runs it."""
        return _launched_region(self.loaded, self.launched, self.region)

    def finished(self) -> "Manifest | None":
        """What an earlier attempt of this run, or a run that it re-executes, has materialized of this partition."""
        region = self.launched_region
        if region is None:
            return None
        found = self.producers.own(region.name)
        return found if found is not None and found.fingerprint == region.fingerprint else None

    def shown(self, found: "Manifest") -> dict[str, Any]:
        """The metadata of what stands already.

        A run that keeps it materializes it as well: its materialization is the partition's latest.
        """
        self.producers.store.link(
            Address(self.launched.name, found.stage, self.context.run.run_id, self.producers.partition), found
        )
        self.context.log.info(
            f"stage '{found.stage}' of partition {found.partition} was finished by run {found.run[:8]} before"
        )
        return stage_metadata(
            self.launched,
            self.launched.region(found.stage),
            found,
            self.producers.store.data(found),
            self.asset_of,
            {},
        )

    def asset_of(self, node: Node) -> AssetKey | None:
        """The asset that holds what an operator of the launched plan produces; None where it is this stage's own."""
        known = next(own for own in self.loaded.graph.nodes if own.uid == node.uid)
        if isinstance(known, ReadingNode) and known.id in self.region.nodes:
            return upstream_dep(self.loaded, known, self.upstream, self.translator).asset_key
        holder = self.loaded.region_of(known.id)
        return None if holder.id == self.region.id else self.translator.get_asset_key(self.loaded, holder)

    def find(self, wanted: Region) -> "Manifest | None":
        """The intermediate of a stage that this one may read."""
        found = self.producers.find(wanted.name, self.translator.get_asset_key(self.launched, wanted))
        if found is not None and found.fingerprint != wanted.fingerprint:
            self.context.log.warning(
                f"the intermediate of stage '{wanted.name}' comes from other code or other input, and is not used"
            )
            return None
        return found

    def stands(self, wanted: Region) -> "Manifest | None":
        """What this run wrote of a stage or, if that ran in a run of its own, what the latest run wrote.

        None where that was made of other code, or before what it read was made anew.
        """
        own = self.producers.own(wanted.name)
        if own is not None:
            return own
        found = self.producers.store.newest(self.loaded.name, wanted.name, self.producers.partition, wanted.fingerprint)
        if found is None:
            return None
        read = [self.stands(self.launched.regions[number]) for number in wanted.inputs]
        return found if all(one is not None and one.created <= found.created for one in read) else None

    def reused(self) -> dict[str, Any] | None:
        """The metadata of a stage that need not run, where an earlier run's output becomes this run's."""
        region = self.launched_region
        if region is None:
            return {"pipelined": "runs in one Spark job with a later stage"}
        reused = self._reusable(region)
        if reused is None:
            return None
        self.context.log.info(
            f"stage '{region.name}' need not run: run {reused.run[:8]} materialized it from the same code,"
            " configuration and input"
        )
        self.producers.store.link(
            Address(self.launched.name, region.name, self.context.run.run_id, self.producers.partition), reused
        )
        shown = stage_metadata(self.launched, region, reused, self.producers.store.data(reused), self.asset_of, {})
        return {**shown, "reused from run": MetadataValue.dagster_run(reused.run)}

    def as_run(self, spark: "SparkSession", asked: Interrupts) -> Run:
        """How the engine is to run it, and until when."""
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
        found = begun(run, _STARTS.get(identity))
        if found.carry is not None and found.carry.start is not None:
            _STARTS.clear()
            _STARTS[identity] = found.carry.start
        return found

    def materialized(self, run: Run, manifest: "Manifest", previews: "Mapping[str, pa.Table]") -> dict[str, Any]:
        """The metadata of what the engine has materialized; logs the malformed rows."""
        shown = stage_metadata(
            self.launched,
            run.plan.region(manifest.stage),
            manifest,
            run.store.data(manifest),
            self.asset_of,
            previews,
        )
        for node in diverting(self.launched):
            if node.uid in manifest.diverted:
                found = in_batch(run.store, run.plan.name, node)
                key = self.translator.get_malformed_key(self.launched, node)
                self.context.log_event(
                    materialized(
                        key, found, manifest.diverted[node.uid], None if self.slice is None else self.slice.key
                    )
                )
        partition = None if self.slice is None else self.slice.key
        for one in materialized_sinks(self.loaded, manifest, partition, self.translator):
            self.context.log_event(one)
        return {**shown, **{f"recomputed {stage}": reason for stage, reason in self.recomputed.items()}}

    def report_savepoint(self) -> None:
        """Report the savepoint that the run has left."""
        path = self.launched.execution.savepoint.path
        assert path is not None
        self.context.log_event(left(self.translator.get_savepoint_key(self.launched), path, self.context.log))

    def _reusable(self, region: Region) -> "Manifest | None":
        """The manifest of the stage's latest materialization, where code, configuration, input and state are the same.

        In a re-execution the user says what runs, so there it is None.
        """
        if (
            self.batch.reuse == "never"
            or self.launched.execution.has_savepoint
            or self.context.run.parent_run_id is not None
            or not self.launched.identifies_input(region)
        ):
            return None
        found = self.producers.materialized(region.name, self.translator.get_asset_key(self.launched, region))
        if found is None or found.fingerprint != region.fingerprint:
            return None
        sinks = [n.sink for n in self.launched.graph.sinks if n.id in region.sinks]
        if not all(s.exists() for s in sinks if isinstance(s, SparkSink)):
            return None
        carry = self._carrying()
        before = carry.manifest(self.launched, region) if carry is not None else None
        return found if before is None or before.run == found.carried_from else None

    def _carrying(self) -> Carrying | None:
        """The state of the partition before: what this run left, or else its latest."""
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
            asset_key = self.translator.get_asset_key(self.launched, region)
            state = {(self.launched.graph.node(port.node).uid, port.tag) for port in region.carried}
            found = producers.latest(region.name, asset_key)
            return producers.holding(asset_key, state) if found is None and state else found

        return Carrying(before, key, last)


def _end_of(part: Slice) -> int | None:
    time = part.time()
    return None if time is None else to_millis(time.end)


def run_steps(steps: "Sequence[_Step]", last_of_run: bool = True) -> list[dict[str, Any]]:
    """Materialize a stage for one partition, or for several in one Spark job, and return the metadata of each.

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
    """Writes what happens to the run's log, and remembers which stages were recomputed, and why."""
    of = "" if slice_ is None else f" of partition {slice_.key}"

    def observe(event: Event) -> None:
        events.report(event)
        if isinstance(event, StageStarted) and event.reason:
            recomputed[event.stage] = event.reason
            context.log.warning(f"recomputing stage '{event.stage}'{of}: {event.reason}")
        elif isinstance(event, (IterationResumed, RoundCommitted)):
            context.log.info(f"{event.describe()}{of}")
        elif isinstance(event, (SinkHeld, RecordsWait)):
            context.log.warning(event.describe() if slice_ is None else f"partition {slice_.key}: {event.describe()}")
        elif isinstance(event, (ExecutorLost, MasterAway, MasterBack)):
            context.log.warning(event.describe())
        elif isinstance(event, StageFinished):
            m = event.manifest
            context.log.info(
                f"stage '{event.stage}'{of}: {m.rows} rows, {m.bytes} bytes in {m.seconds:.2f} s"
                + (f", recomputed: {event.reason}" if event.reason else "")
            )

    return observe


def batched(steps: "Sequence[_Step]", size: int) -> "Iterator[Sequence[_Step]]":
    """As many at a time as one Spark job is to run."""
    return (steps[i : i + size] for i in range(0, len(steps), size))


def _previews(run: Run, region: Region) -> "dict[str, pa.Table]":
    found = {}
    for node in run.plan.graph.sinks:
        if node.id in region.sinks and isinstance(node.sink, SparkSink):
            table = node.sink.preview(run.spark, PREVIEW_ROWS)
            if table is not None:
                found[node.name] = table
    return found


Condition = AutomationCondition[AssetKey]


def condition_of(given: Condition, sources: Collection[AssetKey], own: AssetKey) -> Condition:
    """The condition of a stage, from the one that its deployment gives.

    It leaves out the assets that stand for `sources`: nobody materializes them, so that a condition that waits for
    them, as `on_cron` and `eager` do, would wait for ever. And what has to be new since a tick is not the stage's own
    partition before, from which it goes on with `carry_state`.
    """
    if sources and has_allow_ignore(given):
        given = given.ignore(AssetSelection.assets(*sources))
    for waiting in dict.fromkeys(_for_all_deps(given)):
        given = given.replace(waiting, waiting.ignore(AssetSelection.assets(own)))
    return given


def _for_all_deps(condition: AutomationCondition[Any]) -> Iterator[AllDepsCondition[Any]]:
    if isinstance(condition, AllDepsCondition):
        yield condition
        return
    for child in condition.children:
        yield from _for_all_deps(child)
