"""`<pipeline>_control`: what an operator asks of a streaming deployment, as one job with an action to choose."""

# No `from __future__ import annotations` here: Dagster reads the annotations of an op's function as objects.
from enum import Enum

from dagster import AssetKey, Config, JobDefinition, MetadataValue, OpExecutionContext, in_process_executor, job, op
from pydantic import Field

from dagster_unified.engine.streaming.checkpoint import check_not_drained
from dagster_unified.engine.streaming.desired import ask
from dagster_unified.engine.streaming.savepoints.copy import restore_stopped
from dagster_unified.engine.streaming.savepoints.export import without_tables
from dagster_unified.engine.streaming.savepoints.request import Then, take
from dagster_unified.errors import ConfigurationError, StateError
from dagster_unified.graph.plan import plan
from dagster_unified.orchestration.deployments import (
    StreamingDeployment,
    configuration_of,
    directory_of,
    swap,
)
from dagster_unified.orchestration.external_assets import savepoint_materialization
from dagster_unified.orchestration.outcomes import as_failure
from dagster_unified.orchestration.resources import OBJECT_STORE, session_of


class Action(Enum):
    """An action on a streaming deployment."""

    suspend = "suspend"
    stop = "stop"
    resume = "resume"
    drain = "drain"
    savepoint = "savepoint"
    restore = "restore"
    swap = "swap"


_STATES = {Action.suspend: "suspended", Action.resume: "running", Action.drain: "drained"}
"""The state that an action asks for; the sensor and the streaming job follow."""


class ControlConfig(Config):
    """The action to take."""

    action: Action = Field(
        description=(
            "suspend: stop the job after its epoch, and keep it stopped. stop: the same, with a savepoint of where it"
            " stops. resume: let it go on. drain: end its input; all timers fire, and the job finishes. savepoint: keep"
            " its state, as tables, while it runs or is suspended. restore: go back to a savepoint; suspend the job"
            " before. swap: let the new code that runs beside the job take its place, if their tables are equal."
        )
    )
    savepoint: str | None = Field(
        default=None, description="For restore: the name of the savepoint; by default the latest."
    )
    with_savepoint: bool = Field(
        default=False,
        description="For suspend: take a savepoint where the job stops, so that nothing is processed after it.",
    )
    drain: bool = Field(
        default=False,
        description=(
            "For stop: end the input first, so that all timers fire; the savepoint is the state that is left, and the"
            " job has finished."
        ),
    )
    accept_differences: bool = Field(
        default=False, description="For swap: also where the tables differ, or have not been compared."
    )
    path: str | None = Field(
        default=None,
        description=(
            "For savepoint and stop, and for suspend with a savepoint: where its tables go, for other runs to start"
            " from; by default into the savepoint's own folder."
        ),
    )


def control_job(deployment: StreamingDeployment, savepoint: AssetKey | None) -> JobDefinition:
    """Build `<pipeline>_control`. `savepoint` is the asset of the pipeline's savepoints, if it has one."""
    name = deployment.pipeline.name

    @op(
        name=f"{name}_action",
        required_resource_keys={"execution", "spark", OBJECT_STORE},
        description=f"Suspends, resumes or drains {name}, takes or restores a savepoint, or swaps in new code.",
    )
    def act(context: OpExecutionContext, config: ControlConfig) -> None:
        with as_failure(context):
            _check(name, config)
            _act(context, deployment, config, savepoint)

    @job(
        name=f"{name}_control",
        executor_def=in_process_executor,
        description=(
            f"Suspends, resumes or drains {name}, takes or restores a savepoint, or swaps in new code. Choose the"
            " action in the run configuration."
        ),
    )
    def control() -> None:
        act()

    return control


def _check(name: str, config: ControlConfig) -> None:
    """Raise `ConfigurationError` where something is given that the action has no use for."""
    action = config.action.value
    if config.savepoint is not None and config.action is not Action.restore:
        raise ConfigurationError(
            f"{name}: the action '{action}' takes no savepoint; remove savepoint={config.savepoint!r}, or choose"
            " restore"
        )
    if config.with_savepoint and config.action is not Action.suspend:
        raise ConfigurationError(
            f"{name}: the action '{action}' is not taken with a savepoint; remove with_savepoint, or choose suspend"
        )
    if config.accept_differences and config.action is not Action.swap:
        raise ConfigurationError(
            f"{name}: the action '{action}' compares no tables; remove accept_differences, or choose swap"
        )
    if config.drain and config.action is not Action.stop:
        raise ConfigurationError(
            f"{name}: the action '{action}' does not drain the job; remove drain, or choose stop or drain"
        )
    if config.path is not None and not _takes(config):
        hint = ", or add with_savepoint: true" if config.action is Action.suspend else ""
        raise ConfigurationError(f"{name}: the action '{action}' writes no tables; remove path={config.path!r}{hint}")


def _takes(config: ControlConfig) -> bool:
    return config.action in (Action.savepoint, Action.stop) or config.with_savepoint


def _then(config: ControlConfig) -> Then:
    """Return what becomes of the job whose savepoint is taken."""
    if config.action is Action.savepoint:
        return "running"
    return "drained" if config.drain else "suspended"


def _act(
    context: OpExecutionContext, deployment: StreamingDeployment, config: ControlConfig, savepoint: AssetKey | None
) -> None:
    name, launched = deployment.pipeline.name, context.resources.execution.launched()
    directory = directory_of(deployment, launched)
    if _takes(config):
        planned = plan(deployment.pipeline.graph(), configuration_of(deployment, launched))
        spark = context.resources.spark
        taken = take(
            planned,
            directory,
            context.run_id,
            f"run {context.run_id}",
            lambda: session_of(spark),
            config.path or "",
            _then(config),
        )
        context.log.info(taken.savepoint.describe())
        if savepoint is not None:
            why = taken.error or without_tables(planned)
            context.log_event(savepoint_materialization(savepoint, taken.tables or taken.location, context.log, why))
        if taken.error:
            raise StateError(
                f"{name}: savepoint {taken.savepoint.name} was taken, and can be restored, but its tables could not be"
                f" written: {taken.error}"
            )
        context.add_output_metadata(
            {
                "savepoint": taken.savepoint.name,
                "epochs": taken.savepoint.epochs,
                "location": MetadataValue.path(taken.location),
                **({"tables": MetadataValue.path(taken.tables)} if taken.tables else {}),
            }
        )
    elif config.action is Action.restore:
        restored = restore_stopped(directory, context.run_id, config.savepoint)
        context.log.info(
            f"went back to {restored.describe()}; launch {name}_control with the action resume to go on from there"
        )
    elif config.action is Action.swap:
        compared = swap(deployment, launched, config.accept_differences)
        context.log.info(f"{name} is to run the new code. {compared.describe() if compared is not None else ''}")
    else:
        state = _STATES[config.action]
        if config.action is not Action.drain:
            check_not_drained(directory, plan(deployment.pipeline.graph(), configuration_of(deployment, launched)))
        ask(directory, state=state, reason=f"run {context.run_id}")
        context.log.info(f"{name} is to be {state}")
