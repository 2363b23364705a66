"""Commands about a streaming deployment, the malformed rows of its sources, and the Connect server of a machine."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Annotated, Literal

from cyclopts import Parameter

from dagster_unified import settings
from dagster_unified.cli.finding import intermediates_of, load_deployment
from dagster_unified.cli.terminal import Defines, Deployed, complain, out, say, table
from dagster_unified.errors import ConfigurationError, PipelineError, nearest

if TYPE_CHECKING:
    from dagster_unified.engine.streaming.checkpoint import CheckpointDirectory
    from dagster_unified.engine.streaming.savepoints.request import Then
    from dagster_unified.graph.plan import Plan
    from dagster_unified.orchestration.deployments import StreamingDeployment

TablesPath = Annotated[
    str | None,
    Parameter(
        help="Where the tables of the savepoint go, for other runs to start from; by default into its own folder."
    ),
]


def suspend(pipeline: Deployed, /, *, savepoint: bool = False, path: TablesPath = None, define: Defines = []) -> int:
    """Stop a pipeline's streaming job after its epoch, and keep it stopped: its sensor does not start it again.

    Parameters
    ----------
    savepoint
        Take a savepoint where the job stops, and wait for it: nothing is processed after it. A path does so too.
    """
    if savepoint or path is not None:
        return _take(pipeline, define, path, "suspended")
    return _ask(pipeline, define, "suspended")


def stop(
    pipeline: Deployed,
    /,
    *,
    savepoint: Annotated[list[str], Parameter(negative="", consume_multiple=(0, 1))] = [],
    drain: bool = False,
    define: Defines = [],
) -> int:
    """Stop a pipeline's streaming job with a savepoint of exactly where it stops, and keep it stopped (Flink: `stop`).

    The exit code is 0 only where the savepoint is whole.

    Parameters
    ----------
    savepoint
        Where its tables go, for other runs to start from; by default into the savepoint's own folder.
    drain
        End the input first: what has arrived is processed, all timers fire, and the savepoint is what is left. For a
        job that is to end for good: a window that has fired begins anew where another job starts from the savepoint.
    """
    return _take(pipeline, define, savepoint[0] if savepoint else None, "drained" if drain else "suspended")


def resume(pipeline: Deployed, /, *, define: Defines = []) -> int:
    """Let a pipeline's streaming job go on where it was suspended; its sensor starts it."""
    return _ask(pipeline, define, "running")


def drain(pipeline: Deployed, /, *, define: Defines = []) -> int:
    """End a pipeline's input here: what has arrived is processed, all timers fire, and its streaming job finishes.

    It does not go on after that.
    """
    return _ask(pipeline, define, "drained")


def savepoint(pipeline: Deployed, /, *, path: TablesPath = None, define: Defines = []) -> int:
    """Take a savepoint of a pipeline's streaming job, whether it runs or is suspended: its state, as tables.

    `restore` goes back to it; a run of either mode starts from it with -D execution.state-recovery.path=…. The exit
    code is 1 where it was taken, and its tables could not be written.
    """
    return _take(pipeline, define, path)


def savepoints(pipeline: Deployed, /, *, define: Defines = []) -> int:
    """List the savepoints of a pipeline's streaming job, the oldest first."""
    from dagster_unified.engine.streaming.savepoints.copy import savepoints as known

    say(*(savepoint.describe() for savepoint in known(_started(pipeline, define))))
    return 0


def restore(pipeline: Deployed, /, *, savepoint: str | None = None, define: Defines = []) -> int:
    """Go back to a savepoint of a pipeline's streaming job, which has to be suspended. Resume it then.

    Parameters
    ----------
    savepoint
        Its name; by default the latest.
    """
    from dagster_unified.engine.streaming.savepoints.copy import restore_stopped

    chosen = restore_stopped(_started(pipeline, define), this_process(), savepoint)
    say(f"went back to {chosen.describe()}")
    return 0


def malformed(
    pipeline: Deployed,
    /,
    *,
    source: str | None = None,
    rows: int = 20,
    define: Defines = [],
    storage: str | None = None,
) -> int:
    """Show the malformed rows that a pipeline's sources have diverted.

    Each with its file and line, its content, and what is wrong with it.

    Parameters
    ----------
    source
        Only this source's.
    rows
        How many rows of each to show, the latest first.
    storage
        Where intermediates are kept; by default where the Definitions say, else in .dagster_unified/intermediates.
    """
    from dagster_unified.engine.batch.intermediates import IntermediateStore
    from dagster_unified.engine.malformed import diverting, in_batch, in_streaming

    deployment = load_deployment(pipeline)
    planned = _plan_of(deployment, define)
    nodes = diverting(planned)
    if not nodes:
        raise PipelineError(
            f"no source of {planned.name} sets malformed rows aside; read it with on_malformed='divert'"
        )
    names = [node.source.name for node in nodes]
    if source is not None and source not in names:
        known = nearest(source, names) or f"; there are {', '.join(names)}"
        raise PipelineError(f"{planned.name} has no source '{source}' that sets malformed rows aside{known}")
    store = IntermediateStore(storage or intermediates_of(pipeline))
    directory = _directory_of(deployment, define)
    for node in nodes:
        if source not in (None, node.source.name):
            continue
        for diverted in (in_batch(store, planned.name, node), in_streaming(directory, node)):
            say(f"{diverted.source}, {diverted.mode}: {diverted.rows():,} malformed rows at {diverted.folder}")
            latest = diverted.table(rows) if rows else None
            if latest is not None and len(latest):
                cells = (
                    [str(v) if v not in (None, "") else "unknown" for v in row.values()] for row in latest.to_pylist()
                )
                out().print(table(latest.schema.names, cells))
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
    say(f"the server at port {port} has ended" if ended else f"no server was started at port {port}")
    return 0


def _take(name: str, define: list[str], path: str | None, then: Then = "running") -> int:
    from dagster_unified.engine import session
    from dagster_unified.engine.streaming.savepoints.request import take

    directory = _started(name, define)
    planned = _plan_of(load_deployment(name), define)
    taken = take(planned, directory, this_process(), "command line", session.start, path or "", then)
    say(taken.savepoint.describe())
    if then != "running":
        say(f"{directory.path.name} is {then}")
    if taken.error:
        complain(f"dagster-unified: its tables could not be written: {taken.error}")
        return 1
    return 0


def _ask(name: str, define: list[str], state: Literal["running", "suspended", "drained"]) -> int:
    from dagster_unified.engine.streaming.checkpoint import check_not_drained
    from dagster_unified.engine.streaming.desired import ask

    deployment = load_deployment(name)
    directory = _directory_of(deployment, define)
    if state != "drained":
        check_not_drained(directory, _plan_of(deployment, define))
    if not (state == "running" and deployment.state == "suspended"):  # that one is resumed before it ever ran
        _check_started(directory, name)
    ask(directory, state=state, reason="command line")
    deployed = directory.deployed()
    where = f"deployment {deployed.id}, generation {deployed.generation}" if deployed is not None else "not started yet"
    say(f"{directory.path.name} is to be {state} ({directory.path}: {where})")
    return 0


def this_process() -> str:
    """Say who asks."""
    return f"command line, process {os.getpid()}"


def _started(name: str, define: list[str]) -> CheckpointDirectory:
    directory = _directory_of(load_deployment(name), define)
    _check_started(directory, name)
    return directory


def _plan_of(deployment: StreamingDeployment, define: list[str]) -> Plan:
    from dagster_unified.graph.plan import plan
    from dagster_unified.orchestration.deployments import configuration_of

    return plan(deployment.pipeline.graph(), configuration_of(deployment, settings.command_line(define)))


def _directory_of(deployment: StreamingDeployment, define: list[str]) -> CheckpointDirectory:
    from dagster_unified.orchestration.deployments import directory_of

    return directory_of(deployment, settings.command_line(define))


def _check_started(directory: CheckpointDirectory, name: str) -> None:
    if directory.deployed() is None and directory.holder() is None:
        raise ConfigurationError(
            f"{directory.path.name}: nothing has been started in {directory.path}, where {name} says that its state is;"
            " give the module that holds its Definitions or its StreamingDeployment, run this in the folder where it"
            " runs, or set -D execution.checkpointing.dir=…"
        )
