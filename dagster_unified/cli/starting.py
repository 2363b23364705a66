"""`start`: has a stream's sensor keep it running, as turning the sensor on in Dagster's UI does."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from dagster_unified.cli.finding import default_module, load_deployment
from dagster_unified.cli.terminal import Started, complain, say
from dagster_unified.errors import ConfigurationError

if TYPE_CHECKING:
    from dagster import DagsterInstance

    from dagster_unified.orchestration._dagster_compat import SerializableErrorInfo

_DAEMON = "SENSOR"
"""Dagster's name of the daemon that evaluates sensors."""


def start(pipeline: Started = None, /) -> int:
    """Start a pipeline's streaming job under Dagster: ask for it to run, and turn its sensor on, which starts it.

    It needs DAGSTER_HOME, that of the daemon, and the workspace of this folder; without one, the module is the code
    location, as `dagster dev -m` has it.
    """
    from dagster_unified.engine.streaming.checkpoint import PATIENCE, check_not_drained
    from dagster_unified.engine.streaming.desired import ask, read_desired
    from dagster_unified.graph.plan import plan
    from dagster_unified.orchestration.deployments import configuration_of, directory_of

    given = pipeline or default_module()
    deployment = load_deployment(given)
    name, directory = deployment.pipeline.name, directory_of(deployment)
    if not os.environ.get("DAGSTER_HOME"):
        raise ConfigurationError(
            f"{name}: DAGSTER_HOME is not set, and no daemon would see that it is to run; set it to the folder that the"
            " daemon has, or run the job in this process (dagster-unified run)"
        )
    check_not_drained(directory, plan(deployment.pipeline.graph(), configuration_of(deployment)))
    from dagster import DagsterInstance

    os.makedirs(os.environ["DAGSTER_HOME"], exist_ok=True)
    with DagsterInstance.get() as instance:
        location = _turn_on(instance, f"{name}_streaming_sensor", given.partition(":")[0])
        lease, desired = directory.holder(), read_desired(directory)
        runs = lease is not None and lease.is_alive(PATIENCE)
        if not runs or (desired.state or deployment.state) != "running":
            ask(directory, state="running", reason="command line")
        say(f"{name} is to be running ({directory.path}); its sensor in code location {location} is on")
        if runs and lease is not None:
            say(f"its job runs: run {lease.owner}")
        elif not instance.get_daemon_statuses([_DAEMON])[_DAEMON].healthy:
            complain(
                f"dagster-unified: no daemon of {os.environ['DAGSTER_HOME']} evaluates sensors; the job starts once one"
                " does (dagster dev, or dagster-daemon run)"
            )
    return 0


def _turn_on(instance: DagsterInstance, sensor: str, module: str) -> str:
    """Turn a sensor on, and return the name of its code location."""
    from dagster_unified.orchestration._dagster_compat import workspace

    with workspace(instance, module) as loaded:
        found = [
            (location.name, repository.get_sensor(sensor))
            for location in loaded.code_locations
            for repository in location.get_repositories().values()
            if repository.has_sensor(sensor)
        ]
        if len(found) != 1:
            errors = {name: entry.load_error for name, entry in loaded.get_code_location_entries().items()}
            broken = {name: _cause(error) for name, error in errors.items() if error is not None}
            raise ConfigurationError(_not_one(sensor, [name for name, _ in found], sorted(errors), broken))
        location, remote = found[0]
        instance.start_sensor(remote)
        return location


def _cause(error: SerializableErrorInfo) -> str:
    """The first line of what an error came of."""
    while error.cause is not None:
        error = error.cause
    return error.message.strip().splitlines()[0]


def _not_one(sensor: str, found: Sequence[str], locations: Sequence[str], broken: Mapping[str, str]) -> str:
    """Say that no code location of a workspace, or several, have a sensor; `broken` are those that do not load."""
    if found:
        return (
            f"the code locations {', '.join(found)} all have a sensor {sensor}; turn on that of the one you mean"
            f" (dagster sensor start {sensor} -l …)"
        )
    errors = "".join(f"; {name} cannot be loaded: {error}" for name, error in broken.items())
    return (
        f"no code location of the workspace has a sensor {sensor}; its locations are {', '.join(locations)}{errors};"
        " give the module with the Definitions that Dagster loads, from the folder of its workspace"
    )
