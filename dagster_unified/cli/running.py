"""`run`: a pipeline through Dagster in this process, with its progress and its first results on the terminal."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

from cyclopts import Parameter, validators

from dagster_unified import settings
from dagster_unified.cli.arguments import Defines
from dagster_unified.cli.finding import load
from dagster_unified.cli.terminal import err, out
from dagster_unified.graph.options import written

if TYPE_CHECKING:
    from dagster_unified.api.pipeline import Pipeline
    from dagster_unified.engine.events import Event
    from dagster_unified.graph.plan import Plan


def run(
    pipeline: str,
    /,
    *,
    define: Defines = [],  # noqa: B006 - the command line parser's way
    master: str = "local[*]",
    remote: str | None = None,
    storage: str = ".dagster_unified/intermediates",
    rows: Annotated[int, Parameter(validator=validators.Number(gte=0))] = 5,
) -> int:
    """Run a pipeline through Dagster, in this process.

    Parameters
    ----------
    pipeline
        A module or file that holds a Pipeline, such as jobs.flight_delays, jobs/flight_delays.py or jobs.many:second.
    define
        Set an option: key=value. May be repeated.
    master
        The Spark master of a classic session.
    remote
        The address of a Spark Connect server, such as sc://localhost:15002. Without it and a master, that in the
        environment's SPARK_REMOTE.
    storage
        Where intermediates are kept.
    rows
        How many rows of each result table to show.
    """
    from dagster_unified.engine.addresses import checked_master, checked_remote, reach_master, reach_remote
    from dagster_unified.engine.session import check_java
    from dagster_unified.graph.plan import plan

    if remote is not None:
        checked_remote(remote)
    checked_master(master)
    found = load(pipeline)
    configuration = settings.configuration(define)
    planned = plan(found.graph(), configuration)
    for finding in planned.findings:
        if finding.severity == "warning":
            err().print(f"[yellow]warning:[/] {finding.message}", highlight=False, soft_wrap=True)
    if remote is not None:
        reach_remote(remote)
    else:
        reach_master(master)
        check_java()
    return _run(
        found,
        planned,
        {
            k: s.value if isinstance(s.value, (bool, int)) else written(s.value)
            for k, s in configuration.items()
            if s.origin == "command line"
        },
        master,
        remote,
        storage,
        rows,
    )


def check_java_command() -> int:
    """Say what is missing to run Spark."""
    from dagster_unified.engine.session import check_java

    check_java()
    return 0


def _run(
    pipeline: Pipeline, planned: Plan, options: dict[str, Any], master: str, remote: str | None, storage: str, rows: int
) -> int:
    from rich.table import Table

    from dagster_unified.engine import interrupts
    from dagster_unified.engine.events import StageFinished
    from dagster_unified.execution.progress import ShownProgress, stages

    finished: list[StageFinished] = []
    with interrupts.listening(at_once=True) as asked, ShownProgress(planned, err()) as shown:
        from dagster_unified.orchestration.launch import launch

        def observe(event: Event) -> None:
            shown.show(event)
            if isinstance(event, StageFinished):
                finished.append(event)

        outcome = launch(pipeline, options, master, remote, storage, observe)
    if finished:
        out().print(stages(finished))
    if outcome.interrupted:
        err().print(
            f"{planned.name} is cancelled: what it had not committed when the signal came is not committed",
            highlight=False,
            soft_wrap=True,
        )
        return asked.exit_code
    if outcome.error is not None:
        err().print(outcome.error, style="red", highlight=False, markup=False, soft_wrap=True)
        return 1
    for name, table in outcome.tables(planned, rows).items():
        shown_table = Table(*table.schema.names, title=name, title_justify="left")
        for row in table.to_pylist():
            shown_table.add_row(*[str(v) for v in row.values()])
        out().print(shown_table)
    return 0
