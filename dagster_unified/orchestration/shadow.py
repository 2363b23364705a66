"""`<pipeline>_shadow`: a stream's new code, beside the job of the old one, until it is swapped in."""

# No `from __future__ import annotations` here: Dagster reads the annotations of an op's function as objects.
import time
from typing import Any

from dagster import AssetObservation, JobDefinition, MetadataValue, OpExecutionContext, job, op

from dagster_unified.engine import events
from dagster_unified.engine.streaming.shadow import Round, Shadow
from dagster_unified.orchestration.deployments import StreamingDeployment, configuration_of
from dagster_unified.orchestration.outcomes import as_failure, interruptible
from dagster_unified.orchestration.resources import OBJECT_STORE, connections, session_of
from dagster_unified.orchestration.stream_materializations import JobAssets

POLL = 0.5
"""Seconds after which it is looked again whether the new code has been accepted."""


def shadow_job(deployment: StreamingDeployment, assets: JobAssets) -> JobDefinition:
    """Build `<pipeline>_shadow`, which the deployment's sensor launches when it sees new code."""
    name = deployment.pipeline.name
    graph = deployment.pipeline.graph()

    @op(
        name=f"{name}_new_code",
        required_resource_keys={"spark", "execution", OBJECT_STORE, *graph.resource_keys},
        description=f"Runs the new code of {name} beside its job, and compares their tables, until it is accepted.",
    )
    def run_beside(context: OpExecutionContext) -> None:
        with interruptible(context.instance, context.run_id) as asked, as_failure(context):
            options = configuration_of(deployment, context.resources.execution.launched())
            connected = graph.connected(connections(graph, context.resources))
            spark = asked.started(session_of(context.resources.spark))
            shadow = Shadow(connected, options, lambda: spark, context.run_id, events.report)

            def is_over() -> bool:
                return asked.received or shadow.is_over()

            while not is_over():
                compared = shadow.round(is_over)
                if compared is not None:
                    _report(context, assets, compared)
                next_round = time.monotonic() + deployment.observe_every.total_seconds()
                while time.monotonic() < next_round and not is_over():
                    time.sleep(POLL)
            asked.check()
            context.log.info(f"{name}: the new code takes the place of the old; what it wrote beside it is removed")
            shadow.remove()

    @job(
        name=f"{name}_shadow",
        executor_def=deployment.executor,
        tags={"dagster/max_retries": "0"},
        description=(
            f"The new code of {name}, beside the job of the old one, into tables of its own. Its sensor launches it;"
            " it ends once the new code is swapped in."
        ),
    )
    def shadow_of() -> None:
        run_beside()

    return shadow_of


def _report(context: OpExecutionContext, assets: JobAssets, compared: Round) -> None:
    """Write a round to the run's log, and observe the tables."""
    log = context.log.info if compared.is_equal else context.log.warning
    log(compared.describe())
    for sink, of_sink in compared.sinks.items():
        is_equal = of_sink.is_equal and not of_sink.not_compared
        shown: dict[str, Any] = {"new code": of_sink.describe(), "new code is equal": is_equal}
        if of_sink.first:
            rows = [{"key": row.key, "new": row.new, "old": row.old} for row in of_sink.first]
            shown["new code differs in"] = MetadataValue.json(rows)
        context.log_event(AssetObservation(asset_key=assets.sinks[sink], metadata=shown))
