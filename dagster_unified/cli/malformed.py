"""`malformed`: the rows that sources with `on_malformed="divert"` have set aside."""

from __future__ import annotations

from dagster_unified import settings
from dagster_unified.cli.arguments import Defines
from dagster_unified.cli.finding import intermediates_of, load_deployment
from dagster_unified.cli.terminal import out
from dagster_unified.errors import PipelineError, nearest


def malformed(
    pipeline: str,
    /,
    *,
    source: str | None = None,
    rows: int = 20,
    define: Defines = [],  # noqa: B006
    storage: str | None = None,
) -> int:
    """Show the malformed rows that a pipeline's sources have diverted.

    Each with its file and line, its content, and what is wrong with it.

    Parameters
    ----------
    pipeline
        A module or file that holds a Pipeline, its StreamingDeployment, or its Definitions, whose options and
        intermediates it uses.
    source
        Only this source's.
    rows
        How many rows of each to show, the latest first.
    define
        Set an option, such as execution.checkpointing.dir.
    storage
        Where intermediates are kept; by default where the Definitions say, else in .dagster_unified/intermediates.
    """
    from rich.markup import escape
    from rich.table import Table

    from dagster_unified.engine.batch.intermediates.store import IntermediateStore
    from dagster_unified.engine.malformed import diverting, in_batch, in_streaming
    from dagster_unified.graph.plan import plan
    from dagster_unified.orchestration.deployments import configuration_of, directory_of

    deployment, launched = load_deployment(pipeline), settings.command_line(define)
    planned = plan(deployment.pipeline.graph(), configuration_of(deployment, launched))
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
    directory = directory_of(deployment, launched)
    for node in nodes:
        if source not in (None, node.source.name):
            continue
        for diverted in (in_batch(store, planned.name, node), in_streaming(directory, node)):
            count = diverted.rows()
            out().print(
                f"{diverted.source}, {diverted.mode}: {count:,} malformed rows at {diverted.folder}",
                highlight=False,
                soft_wrap=True,
                markup=False,
            )
            found = diverted.table(rows) if rows else None
            if found is not None and len(found):
                table = Table()
                for name in found.schema.names:
                    table.add_column(name, overflow="fold")
                for row in found.to_pylist():
                    table.add_row(*[escape(str(v)) if v not in (None, "") else "unknown" for v in row.values()])
                out().print(table)
    return 0
