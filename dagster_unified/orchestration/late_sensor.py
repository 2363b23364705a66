"""`<pipeline>_late_sensor`: records that came after their day was materialized have BATCH run that day again.

The decision is taken from what the stream has noted and from the runs that Dagster shows. A count of late records is
settled once a run succeeded that began after the last of them was committed.
"""

# No `from __future__ import annotations` here: Dagster reads the annotations of a sensor's function as objects.

from collections.abc import Iterator, Mapping, Sequence

from dagster import (
    AssetKey,
    AssetRecordsFilter,
    DagsterInstance,
    DagsterRun,
    DagsterRunStatus,
    DefaultSensorStatus,
    RunRequest,
    RunsFilter,
    SensorDefinition,
    SensorEvaluationContext,
    SkipReason,
    TimeWindowPartitionsDefinition,
    sensor,
)

from dagster_unified.engine.failures import naming_store
from dagster_unified.engine.streaming.reports import Late, read_notes, settle_late
from dagster_unified.errors import ConfigurationError, UnifiedError
from dagster_unified.orchestration._dagster_compat import (
    ASSET_PARTITION_RANGE_END_TAG,
    ASSET_PARTITION_RANGE_START_TAG,
    PARTITION_NAME_TAG,
    UnresolvedAssetJobDefinition,
)
from dagster_unified.orchestration.deployments import BatchDeployment, StreamingDeployment, directory_of
from dagster_unified.orchestration.resources import OBJECT_STORE
from dagster_unified.orchestration.stream_materializations import REPORT
from dagster_unified.orchestration.streaming_sensor import of_location

_IN_PROGRESS = [
    DagsterRunStatus.QUEUED,
    DagsterRunStatus.NOT_STARTED,
    DagsterRunStatus.STARTING,
    DagsterRunStatus.STARTED,
    DagsterRunStatus.CANCELING,
]

_RANGE = (ASSET_PARTITION_RANGE_START_TAG, ASSET_PARTITION_RANGE_END_TAG)

_LOOK_BACK = 20
"""How many materializations of a partition are looked through for one by a run in BATCH."""


def check_reruns(
    streaming: StreamingDeployment, batch: BatchDeployment | None, partitions: TimeWindowPartitionsDefinition | None
) -> None:
    """Raise `ConfigurationError` where BATCH cannot run a partition again whose rows a stream has written."""
    name = streaming.pipeline.name
    if batch is None or partitions is None or batch.partitions != partitions:
        raise ConfigurationError(
            f"{name}: rerun_late runs the partitions of late records again in BATCH, and"
            f" {'there is no BatchDeployment' if batch is None else 'its BatchDeployment has other partitions'}; give"
            f" it a BatchDeployment with partitions in time, and records with event time, or leave rerun_late out"
        )
    if batch.carry_state:
        raise ConfigurationError(
            f"{name}: rerun_late runs single partitions again, and with carry_state a partition starts from the state"
            " that a run of the one before it has left, which a stream does not leave; leave one of the two out"
        )
    for node in streaming.pipeline.graph().sinks:
        capabilities = node.sink.capabilities
        if not (capabilities.upsert or capabilities.replaces_stream):
            raise ConfigurationError(
                f"{name}: with rerun_late a run in BATCH replaces what the stream wrote of a partition, and sink"
                f" '{node.name}' ({node.sink.describe()}) cannot: its rows would be there twice, or those of other"
                " partitions would go; write with mode='upsert' and a key, or to a Delta table with mode='overwrite'"
                " and partition_by, a field that tells the partitions apart; or leave rerun_late out"
            )


def late_sensor(
    deployment: StreamingDeployment,
    partitions: TimeWindowPartitionsDefinition,
    job: UnresolvedAssetJobDefinition,
    sinks: Sequence[AssetKey],
) -> SensorDefinition:
    """Build the sensor; `job` is that of BATCH, and `sinks` are the assets of its tables."""
    name = deployment.pipeline.name

    @sensor(
        name=f"{name}_late_sensor",
        job=job,
        minimum_interval_seconds=int(deployment.tick_every.total_seconds()),
        default_status=DefaultSensorStatus.STOPPED,
        required_resource_keys={OBJECT_STORE},
        description=f"Runs the partitions of {name} again in BATCH for which the stream has got late records.",
    )
    def rerun(context: SensorEvaluationContext) -> list[RunRequest] | SkipReason:
        directory = directory_of(deployment)
        try:
            with naming_store(name, directory.path, "the sensor looks again"):
                notes = read_notes(directory)
                late = notes.late()
                settled = {key: of.at for key, of in late.items() if _is_settled(context.instance, sinks, key, of)}
                settle_late(directory, settled)
        except UnifiedError as error:
            return SkipReason(str(error))
        waiting = {key: counted for key, counted in late.items() if key not in settled}
        if not waiting:
            return SkipReason("there are no late records")
        runs = context.instance.get_runs(RunsFilter(statuses=_IN_PROGRESS, tags=of_location(context)))
        busy = {key for run in runs if _is_of(run, job, sinks) for key in _covered(run, partitions, waiting)}
        for key in sorted(busy):
            context.log.info(f"partition {key} has late records, and waits for its run in progress")
        requests = [
            RunRequest(
                run_key=f"{name}/{notes.deployment}/{key}/{counted.at}/{counted.records}",
                partition_key=key,
                tags={"dagster-unified/reason": f"{counted.records} late records of the stream"},
            )
            for key, counted in sorted(waiting.items())
            if key not in busy
        ]
        return requests or SkipReason(f"partitions with late records are being run: {', '.join(sorted(busy))}")

    return rerun


def _is_settled(instance: DagsterInstance, sinks: Sequence[AssetKey], key: str, late: Late) -> bool:
    """Return whether a run that began after the last late record has written all tables of a partition again."""
    return all(any(_succeeded_after(instance, run_id, late.at) for run_id in _makers(instance, s, key)) for s in sinks)


def _makers(instance: DagsterInstance, sink: AssetKey, key: str) -> Iterator[str]:
    """Yield the runs in BATCH that have materialized a partition, the latest first."""
    of_partition = AssetRecordsFilter(asset_key=sink, asset_partitions=[key])
    for record in instance.fetch_materializations(of_partition, limit=_LOOK_BACK).records:
        made = record.asset_materialization
        if record.run_id and made is not None and REPORT not in made.metadata:
            yield record.run_id


def _succeeded_after(instance: DagsterInstance, run_id: str, moment: int) -> bool:
    record = instance.get_run_record_by_id(run_id)
    if record is None or record.dagster_run.status is not DagsterRunStatus.SUCCESS:
        return False
    return record.start_time is not None and record.start_time * 1000 > moment


def _is_of(run: DagsterRun, job: UnresolvedAssetJobDefinition, sinks: Sequence[AssetKey]) -> bool:
    """Return whether a run writes a pipeline's tables: of its job, or of these assets, as people and backfills ask."""
    return run.job_name == job.name or any(sink in sinks for sink in run.asset_selection or ())


def _covered(run: DagsterRun, partitions: TimeWindowPartitionsDefinition, late: Mapping[str, Late]) -> Iterator[str]:
    """Yield the partitions, of these, that a run is for: one, or a range."""
    first, last = (run.tags.get(tag, run.tags.get(PARTITION_NAME_TAG)) for tag in _RANGE)
    if first is None or last is None:
        return
    start, end = (partitions.start_time_for_partition_key(key) for key in (first, last))
    yield from (key for key in late if start <= partitions.start_time_for_partition_key(key) <= end)
