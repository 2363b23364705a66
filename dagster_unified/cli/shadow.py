"""`shadow` and `swap`: a stream's new code beside the old, and in its place."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Annotated

from cyclopts import Parameter, validators

from dagster_unified import settings
from dagster_unified.cli.finding import load_deployment, resources_of
from dagster_unified.cli.terminal import Defines, Deployed, complain, out, say, table

if TYPE_CHECKING:
    from dagster_unified.engine.streaming.shadow import Round


def shadow(
    pipeline: Deployed,
    /,
    *,
    rounds: Annotated[int, Parameter(validator=validators.Number(gte=1))] = 1,
    every: Annotated[float, Parameter(validator=validators.Number(gte=0))] = 60.0,
    master: str = "local[*]",
    remote: str | None = None,
    define: Defines = [],
) -> int:
    """Run a stream's new code beside its job, from a savepoint and into tables of its own, and compare their tables.

    The job goes on, and knows nothing of it. The first round begins at a savepoint, so that only rows that the job
    writes from then on are compared: call it again, or let it do several rounds. The exit code is 0 where the tables
    are equal after the last round, or the job has this code already; 1 where they differ; 3 where no row was compared.

    Parameters
    ----------
    rounds
        How often the new code reads as far as the job has, and is compared.
    every
        Seconds between two rounds.
    master
        The Spark master of a classic session.
    remote
        The address of a Spark Connect server, such as sc://localhost:15002.
    """
    from dagster_unified.cli.deployments import this_process
    from dagster_unified.engine import interrupts, session
    from dagster_unified.engine.events import Event, PhaseBegun, SavepointTaken
    from dagster_unified.engine.session import check_java, checked_master, checked_remote
    from dagster_unified.engine.streaming.shadow import Shadow
    from dagster_unified.orchestration.deployments import configuration_of

    deployment = load_deployment(pipeline)
    if remote is not None:
        checked_remote(remote)
    else:
        check_java()
    checked_master(master)

    def tell(event: Event) -> None:
        if isinstance(event, PhaseBegun | SavepointTaken):
            complain(event.describe())

    graph = deployment.pipeline.graph().connected(resources_of(pipeline))
    options = configuration_of(deployment, settings.command_line(define))
    found: Round | None = None
    with interrupts.listening() as asked:
        beside = Shadow(graph, options, lambda: session.start(master, remote), this_process(), tell)
        if beside.is_deployed():
            say(f"{beside.plan.name}: its job has this code, and there is nothing to compare")
            return 0
        for number in range(rounds):
            if number:
                _wait(every, lambda: asked.received)
            compared = None if asked.received else beside.round(lambda: asked.received)
            if asked.received:
                complain(f"{beside.plan.name}: interrupted; the next call goes on where the last round ended")
                return asked.exit_code
            if compared is None:
                say(f"{beside.plan.name}: its job has not read all of its sources yet")
            else:
                found = compared
                _show(found)
    return _result(beside.plan.name, found)


def swap(pipeline: Deployed, /, *, accept_differences: bool = False, define: Defines = []) -> int:
    """Let the new code that runs beside a stream's job take its place: from the job's state, with a savepoint before.

    For a deployment with upgrade_mode='shadow'; its sensor does it.

    Parameters
    ----------
    accept_differences
        Also where the tables differ, or have not been compared.
    """
    from dagster_unified.orchestration import deployments

    deployment = load_deployment(pipeline)
    compared = deployments.swap(deployment, settings.command_line(define), accept_differences)
    if compared is not None:
        say(compared.describe())
    say(
        f"{deployment.pipeline.name} is to run the new code: its sensor upgrades it at its next tick; a job without a"
        " sensor takes it when it is started again"
    )
    return 0


def _result(name: str, compared: Round | None) -> int:
    """Say how the last round that compared the tables has ended; return the exit code."""
    if compared is None or compared.is_empty:
        say(
            f"{name}: nothing was compared: the job has written no row since the new code began beside it. Call it"
            " again once it has, or let it do several rounds (--rounds)"
        )
        return 3
    say(f"{name}: the tables {'are equal' if compared.is_equal else 'differ'}")
    return 0 if compared.is_equal else 1


def _wait(seconds: float, stopped: Callable[[], bool]) -> None:
    until = time.monotonic() + seconds
    while time.monotonic() < until and not stopped():
        time.sleep(0.2)


def _show(compared: Round) -> None:
    rows = [
        [name, str(of.rows), str(of.different), str(of.undecided), of.not_compared or ", ".join(of.columns)]
        for name, of in compared.sinks.items()
    ]
    shown = table(("table", "rows", "different", "undecided", "compared"), rows)
    shown.title, shown.title_justify = f"round {compared.number}", "left"
    out().print(shown)
    for name, of in compared.sinks.items():
        for row in of.first:
            say(f"{name}: new {row.new or 'none'}, old {row.old or 'none'}")
