"""`run`: a pipeline through Dagster in this process, with its progress and its first results on the terminal."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

from cyclopts import Parameter, validators

from dagster_unified import settings
from dagster_unified.cli.finding import load
from dagster_unified.cli.terminal import AnyPipeline, Defines, complain, err, out, table
from dagster_unified.graph.options import written

if TYPE_CHECKING:
    from dagster_unified.api.pipeline import Pipeline
    from dagster_unified.engine.events import Event
    from dagster_unified.graph.plan import Plan


def run(
    pipeline: AnyPipeline,
    /,
    *,
    define: Defines = [],
    master: str = "local[*]",
    remote: str | None = None,
    storage: str = ".dagster_unified/intermediates",
    rows: Annotated[int, Parameter(validator=validators.Number(gte=0))] = 5,
) -> int:
    """Run a pipeline through Dagster, in this process.

    Parameters
    ----------
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
    loaded = load(pipeline)
    configuration = settings.configuration(define)
    planned = plan(loaded.graph(), configuration)
    for finding in planned.findings:
        if finding.severity == "warning":
            err().print(f"[yellow]warning:[/] {finding.message}", highlight=False, soft_wrap=True)
    if remote is not None:
        reach_remote(remote)
    else:
        reach_master(master)
        check_java()
    return _run(
        loaded,
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
    from dagster_unified.engine import interrupts
    from dagster_unified.engine.events import StageFinished
    from dagster_unified.execution.progress import ShownProgress, stages

    finished: list[StageFinished] = []
    with interrupts.listening(at_once=True) as asked, ShownProgress(planned, err()) as progress:
        from dagster_unified.orchestration.launch import launch

        def observe(event: Event) -> None:
            progress.show(event)
            if isinstance(event, StageFinished):
                finished.append(event)

        outcome = launch(pipeline, options, master, remote, storage, observe)
    if finished:
        out().print(stages(finished))
    if outcome.interrupted:
        complain(f"{planned.name} is cancelled: what it had not committed when the signal came is not committed")
        return asked.exit_code
    if outcome.error is not None:
        complain(outcome.error, style="red")
        return 1
    for name, result in outcome.tables(planned, rows).items():
        shown = table(result.schema.names, (map(str, row.values()) for row in result.to_pylist()))
        shown.title, shown.title_justify = name, "left"
        out().print(shown)
    return 0
