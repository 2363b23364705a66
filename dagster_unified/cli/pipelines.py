"""Commands about a pipeline: `run`, and those that run nothing, such as `init` and `explain`."""

from __future__ import annotations

import keyword
import re
import shlex
import sys
from importlib.metadata import packages_distributions
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from cyclopts import Parameter, validators

from dagster_unified import settings
from dagster_unified.cli.finding import declared_stream_of, load, resources_of
from dagster_unified.cli.terminal import AnyPipeline, Defines, Json, complain, err, out, say, table, write
from dagster_unified.errors import ConfigurationError
from dagster_unified.graph.options import option as option_of
from dagster_unified.graph.options import written
from dagster_unified.templates import project_files
from dagster_unified.version import library_version

if TYPE_CHECKING:
    from dagster_unified.engine.events import Event
    from dagster_unified.graph.plan import Plan


def init(name: str, /) -> int:
    """Write a new project into the folder NAME.

    It has a pipeline, its data, its test, and the definitions that `dagster dev` loads.

    Parameters
    ----------
    name
        The folder to make, such as corner-shops. The package in it is corner_shops.
    """
    folder = Path(name)
    package = re.sub(r"\W", "_", folder.name).lower()
    if not re.fullmatch("[a-z][a-z0-9_]*", package) or keyword.iskeyword(package):
        raise ConfigurationError(
            f"init: {folder.name!r} is not the name of a project; use letters from a to z, digits and hyphens, such as"
            " corner-shops, and no word of Python's own"
        )
    if package in sys.stdlib_module_names or package in packages_distributions():
        raise ConfigurationError(
            f"init: Python has a module {package} already, which would be imported instead of the project's; give it"
            " another name, such as corner-shops"
        )
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise ConfigurationError(f"init: {folder} is there and not empty; give the name of a new folder")
    for place, text in project_files(package, folder.name).items():
        (folder / place).parent.mkdir(parents=True, exist_ok=True)
        (folder / place).write_text(text)
    say(f"{folder} is there. Next: cd {shlex.quote(str(folder))} && dagster-unified run {package}.pipeline")
    return 0


def explain(
    pipeline: AnyPipeline,
    /,
    *,
    define: Defines = [],
    mermaid: bool = False,
    json: Json = False,
    physical: bool = False,
) -> int:
    """Show a pipeline's tasks, exchanges and stages before anything runs.

    Parameters
    ----------
    mermaid
        As a Mermaid diagram.
    physical
        The execution graph: the operators that run in one pass, and how records travel between them.
    """
    if mermaid + json + physical > 1:
        raise ConfigurationError("explain: --mermaid, --json and --physical are forms of one plan; give one of them")
    form = next((name for name, asked in {"mermaid": mermaid, "json": json, "physical": physical}.items() if asked), "")
    write(load(pipeline).explain(settings.configuration(define), form or "text"))
    return 0


def show(key: str | None = None, /, *, define: Defines = [], format: Literal["table", "plain"] = "table") -> int:  # noqa: A002
    """Show every option, its value, and where the value comes from.

    Parameters
    ----------
    key
        Only this option, with what it does and where it is looked for.
    format
        A table, or plain lines.
    """
    configuration = settings.configuration(define)
    if key is not None:
        option = option_of(key)
        say(
            f"{key} = {_shown(configuration[key])} ({configuration.origin(key)})\n{option.description}\nIt is"
            f" {option.expected()}. Looked for in: {settings.places(key)}.",
        )
        return 0
    if format == "plain":
        for name, setting in configuration.items():
            write(f"{name} = {_shown(setting.value)} ({setting.origin})")
        return 0
    rows = ([name, _shown(setting.value), setting.origin] for name, setting in configuration.items())
    out().print(table(("option", "value", "origin"), rows))
    return 0


def version() -> int:
    """Show the installed version."""
    write(library_version())
    return 0


def _shown(value: Any) -> str:
    return "follows from the mode" if value is None else written(value)


def connectors() -> int:
    """List the sources and sinks of the library and of every installed package."""
    from dagster_unified.connectors.finding import SINKS, SOURCES, installed

    rows = []
    for group, kind in ((SOURCES, "source"), (SINKS, "sink")):
        for entry in installed(group):
            package = f"{entry.dist.name} {entry.dist.version}" if entry.dist is not None else ""
            rows.append((entry.name, kind, entry.value.replace(":", "."), package))
    out().print(table(("name", "is a", "class", "package"), rows))
    return 0


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
    from dagster_unified.engine import interrupts
    from dagster_unified.engine.events import StageFinished
    from dagster_unified.engine.session import check_java, checked_master, checked_remote, reach_master, reach_remote
    from dagster_unified.graph.plan import plan

    if remote is not None:
        checked_remote(remote)
    checked_master(master)
    loaded = load(pipeline)
    configuration = settings.configuration(define)
    connections = resources_of(pipeline)
    planned = plan(loaded.graph().connected(connections), configuration)
    for finding in planned.findings:
        if finding.severity == "warning":
            _warn(finding.message)
    if planned.execution.mode == "STREAMING":
        _warn_of_deployment(pipeline, planned)
    if remote is not None:
        reach_remote(remote)
    else:
        reach_master(master)
        check_java()
    options = {
        key: setting.value if isinstance(setting.value, (bool, int)) else written(setting.value)
        for key, setting in configuration.items()
        if setting.origin == "command line"
    }
    from dagster_unified.execution import ShownProgress, stages  # what was checked needs none of it

    finished: list[StageFinished] = []
    with interrupts.listening(at_once=True) as asked, ShownProgress(planned, err()) as progress:
        from dagster_unified.orchestration.launch import launch

        def observe(event: Event) -> None:
            progress.show(event)
            if isinstance(event, StageFinished):
                finished.append(event)

        outcome = launch(loaded, options, master, remote, storage, observe, connections)
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


def _warn(message: str) -> None:
    err().print(f"[yellow]warning:[/] {message}", highlight=False, soft_wrap=True)


def _warn_of_deployment(pipeline: str, planned: Plan) -> None:
    """Warn where the deployment of a pipeline has its state in another place than this run has."""
    from dagster_unified.engine.streaming.checkpoint import CheckpointDirectory
    from dagster_unified.orchestration.deployments import directory_of

    deployment = declared_stream_of(pipeline, planned.name)
    if deployment is None:
        return
    own = CheckpointDirectory(planned.execution.streaming.directory, planned.name).path
    other = directory_of(deployment).path
    if other != own:
        _warn(
            f"{planned.name}: this run takes no options of its StreamingDeployment, and keeps its state in {own};"
            f" to go on from the deployment's, give -D execution.checkpointing.dir={other.parent}"
        )


def check_java_command() -> int:
    """Say what is missing to run Spark."""
    from dagster_unified.engine.session import check_java

    check_java()
    return 0
