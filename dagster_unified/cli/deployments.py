"""Commands about a streaming deployment.

`suspend`, `stop`, `resume`, `drain`, `savepoint`, `savepoints`, `restore` and `stop-connect-server`.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Annotated, Literal

from cyclopts import Parameter

from dagster_unified import settings
from dagster_unified.cli.arguments import Defines
from dagster_unified.cli.finding import load_deployment
from dagster_unified.cli.terminal import err, out
from dagster_unified.errors import ConfigurationError

if TYPE_CHECKING:
    from dagster_unified.engine.streaming.checkpoint import CheckpointDirectory
    from dagster_unified.engine.streaming.savepoints.request import Then
    from dagster_unified.graph.plan import Plan
    from dagster_unified.orchestration.deployments import StreamingDeployment

Path = Annotated[list[str], Parameter(negative="", consume_multiple=(0, 1))]
"""An option that may have a path."""


def suspend(
    pipeline: str,
    /,
    *,
    savepoint: bool = False,
    path: str | None = None,
    define: Defines = [],  # noqa: B006
) -> int:
    """Stop a pipeline's streaming job after its epoch, and keep it stopped: its sensor does not start it again.

    Parameters
    ----------
    pipeline
        A module or file that holds Definitions, a StreamingDeployment or a Pipeline, such as definitions or
        definitions:live_flights.
    savepoint
        Take a savepoint where the job stops, and wait for it: nothing is processed after it.
    path
        Where the tables of the savepoint go, for other runs to start from; takes one also without --savepoint.
    define
        Set an option, such as execution.checkpointing.dir.
    """
    if savepoint or path is not None:
        return _take(pipeline, define, path, "suspended")
    return _ask(pipeline, define, "suspended")


def stop(
    pipeline: str,
    /,
    *,
    savepoint: Path = [],  # noqa: B006
    drain: bool = False,
    define: Defines = [],  # noqa: B006
) -> int:
    """Stop a pipeline's streaming job with a savepoint of exactly where it stops, and keep it stopped (Flink: `stop`).

    The exit code is 0 only where the savepoint is whole.

    Parameters
    ----------
    pipeline
        A module or file that holds Definitions, a StreamingDeployment or a Pipeline, such as definitions or
        definitions:live_flights.
    savepoint
        Where its tables go, for other runs to start from; by default into the savepoint's own folder.
    drain
        End the input first: what has arrived is processed, all timers fire, and the savepoint is what is left. For a
        job that is to end for good: a window that has fired begins anew where another job starts from the savepoint.
    define
        Set an option, such as execution.checkpointing.dir.
    """
    return _take(pipeline, define, savepoint[0] if savepoint else None, "drained" if drain else "suspended")


def resume(pipeline: str, /, *, define: Defines = []) -> int:  # noqa: B006
    """Let a pipeline's streaming job go on where it was suspended; its sensor starts it.

    Parameters
    ----------
    pipeline
        A module or file that holds Definitions, a StreamingDeployment or a Pipeline, such as definitions or
        definitions:live_flights.
    define
        Set an option, such as execution.checkpointing.dir.
    """
    return _ask(pipeline, define, "running")


def drain(pipeline: str, /, *, define: Defines = []) -> int:  # noqa: B006
    """End a pipeline's input here: what has arrived is processed, all timers fire, and its streaming job finishes.

    It does not go on after that.

    Parameters
    ----------
    pipeline
        A module or file that holds Definitions, a StreamingDeployment or a Pipeline, such as definitions or
        definitions:live_flights.
    define
        Set an option, such as execution.checkpointing.dir.
    """
    return _ask(pipeline, define, "drained")


def savepoint(pipeline: str, /, *, path: str | None = None, define: Defines = []) -> int:  # noqa: B006
    """Take a savepoint of a pipeline's streaming job, whether it runs or is suspended: its state, as tables.

    `restore` goes back to it; a run of either mode starts from it with -D execution.state-recovery.path=…. The exit
    code is 1 where it was taken, and its tables could not be written.

    Parameters
    ----------
    pipeline
        A module or file that holds Definitions, a StreamingDeployment or a Pipeline, such as definitions or
        definitions:live_flights.
    path
        Where its tables go, for other runs to start from; by default into the savepoint's own folder.
    define
        Set an option, such as execution.checkpointing.dir.
    """
    return _take(pipeline, define, path)


def savepoints(pipeline: str, /, *, define: Defines = []) -> int:  # noqa: B006
    """List the savepoints of a pipeline's streaming job, the oldest first.

    Parameters
    ----------
    pipeline
        A module or file that holds Definitions, a StreamingDeployment or a Pipeline, such as definitions or
        definitions:live_flights.
    define
        Set an option, such as execution.checkpointing.dir.
    """
    from dagster_unified.engine.streaming.savepoints.copy import savepoints as known

    for one in known(started(pipeline, define)):
        out().print(one.describe(), highlight=False, soft_wrap=True)
    return 0


def restore(pipeline: str, /, *, savepoint: str | None = None, define: Defines = []) -> int:  # noqa: B006
    """Go back to a savepoint of a pipeline's streaming job, which has to be suspended. Resume it then.

    Parameters
    ----------
    pipeline
        A module or file that holds Definitions, a StreamingDeployment or a Pipeline, such as definitions or
        definitions:live_flights.
    savepoint
        Its name; by default the latest.
    define
        Set an option, such as execution.checkpointing.dir.
    """
    from dagster_unified.engine.streaming.savepoints.copy import restore_stopped

    chosen = restore_stopped(started(pipeline, define), f"command line, process {os.getpid()}", savepoint)
    out().print(f"went back to {chosen.describe()}", highlight=False, soft_wrap=True)
    return 0


def stop_connect_server(port: int, /) -> int:
    """End the Spark Connect server that `SparkResource(connect=port)` started on this machine.

    Parameters
    ----------
    port
        Where it listens.
    """
    from dagster_unified.engine.connect_server import stop

    ended = stop(port)
    out().print(
        f"the server at port {port} has ended" if ended else f"no server was started at port {port}", highlight=False
    )
    return 0


def _take(name: str, define: list[str], path: str | None, then: Then = "running") -> int:
    from dagster_unified.engine import session
    from dagster_unified.engine.streaming.savepoints.request import take

    deployment = load_deployment(name)
    directory = started(name, define)
    planned = plan_of(deployment, define)
    owner = f"command line, process {os.getpid()}"
    taken = take(planned, directory, owner, "command line", session.start, path or "", then)
    out().print(taken.savepoint.describe(), highlight=False, soft_wrap=True)
    if then != "running":
        out().print(f"{directory.path.name} is {then}", highlight=False, soft_wrap=True)
    if taken.error:
        message = f"dagster-unified: its tables could not be written: {taken.error}"
        err().print(message, highlight=False, markup=False, soft_wrap=True)
        return 1
    return 0


def _ask(name: str, define: list[str], state: Literal["running", "suspended", "drained"]) -> int:
    from dagster_unified.engine.streaming.checkpoint import check_not_drained
    from dagster_unified.engine.streaming.desired import ask

    deployment = load_deployment(name)
    directory = directory_of(deployment, define)
    if state != "drained":
        check_not_drained(directory, plan_of(deployment, define))
    if not (
        state == "running" and deployment.state == "suspended"
    ):  # one that is declared suspended is resumed before it ever ran
        check_started(directory, name)
    ask(directory, state=state, reason="command line")
    deployed = directory.deployed()
    where = f"deployment {deployed.id}, generation {deployed.generation}" if deployed is not None else "not started yet"
    out().print(f"{directory.path.name} is to be {state} ({directory.path}: {where})", highlight=False, soft_wrap=True)
    return 0


def started(name: str, define: list[str]) -> CheckpointDirectory:
    """The checkpoint directory of a deployment; raises `ConfigurationError` where nothing was started there.

    Writes nothing.
    """
    directory = directory_of(load_deployment(name), define)
    check_started(directory, name)
    return directory


def plan_of(deployment: StreamingDeployment, define: list[str]) -> Plan:
    """The plan of a deployment's job."""
    from dagster_unified.graph.plan import plan
    from dagster_unified.orchestration.deployments import configuration_of

    return plan(deployment.pipeline.graph(), configuration_of(deployment, settings.command_line(define)))


def directory_of(deployment: StreamingDeployment, define: list[str]) -> CheckpointDirectory:
    """Where a deployment keeps its state."""
    from dagster_unified.orchestration import deployments

    return deployments.directory_of(deployment, settings.command_line(define))


def check_started(directory: CheckpointDirectory, name: str) -> None:
    """Raises `ConfigurationError` where nothing was started in a directory."""
    if directory.deployed() is None and directory.holder() is None:
        raise ConfigurationError(
            f"{directory.path.name}: nothing has been started in {directory.path}, where {name} says that its state is;"
            " give the module that holds its Definitions or its StreamingDeployment, run this in the folder where it"
            " runs, or set -D execution.checkpointing.dir=…"
        )
