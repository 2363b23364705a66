"""What definitions of tests run with, and what their runs are launched with."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

from dagster import (
    DagsterInstance,
    JobDefinition,
    ReexecutionOptions,
    RunRequest,
    SensorDefinition,
    SensorEvaluationContext,
    SkipReason,
    execute_job,
    reconstructable,
)

from dagster_unified.orchestration import IntermediatesResource, SparkResource


def resources(folder: Path | str) -> dict[str, object]:
    """A session of this process, and intermediates in a folder."""
    return {
        "spark": SparkResource(master="local[2]"),
        "intermediates": IntermediatesResource(path=f"{folder}/store"),
    }


def ticked(sensor: SensorDefinition, context: SensorEvaluationContext) -> RunRequest | SkipReason:
    """What a sensor says that asks for one run at most."""
    said = sensor.evaluate_tick(context)
    return said.run_requests[0] if said.run_requests else SkipReason(said.skip_message)


def launched_with(options: dict[str, object]) -> dict[str, object]:
    """The configuration of a run that is launched with options of its own."""
    return {"resources": {"execution": {"config": options}}}


def whole_range(first: str, last: str) -> dict[str, str]:
    """The tags of a run for a range of partitions."""
    return {"dagster/asset_partition_range_start": first, "dagster/asset_partition_range_end": last}


def reexecuted(job: Callable[[], JobDefinition], instance: DagsterInstance, run_id: str, **options: Any) -> Any:
    """The result, to be closed, of a run that goes on from the failure of another one."""
    again = ReexecutionOptions.from_failure(run_id, instance)
    return execute_job(reconstructable(job), instance, reexecution_options=again, **options)
