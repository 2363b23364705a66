"""The command line: `dagster-unified run`, `explain`, `config show`, `version`.

The only module that talks to a terminal. A mistake of the user's is one sentence and exit code 2; a run that failed is exit code 1.
"""

from __future__ import annotations

import importlib
import importlib.util
import os
import sys
import traceback
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from cyclopts import App, CycloptsError, Parameter
from rich.console import Console
from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn
from rich.table import Table

from dagster_unified import settings
from dagster_unified.api.pipeline import Pipeline
from dagster_unified.engine.events import EpochCommitted, Event, StageFinished
from dagster_unified.engine.session import check_java
from dagster_unified.errors import PipelineError, UnifiedError, nearest
from dagster_unified.graph.explain import as_mermaid, as_text, dumps
from dagster_unified.graph.options import option as option_of
from dagster_unified.graph.options import written
from dagster_unified.graph.plan import Plan, library_version, plan

if TYPE_CHECKING:
    from dagster_unified.engine.streaming.checkpoint import CheckpointDirectory

app = App(name="dagster-unified", help="Write a data pipeline once, run it in batch or streaming on Spark under Dagster.", version_flags=[])
config_app = App(name="config", help="Look at the settings.")
app.command(config_app)

out = Console()
err = Console(stderr=True)

Definitions = Annotated[list[str], Parameter(name=["-D", "--define"], help="Set an option: key=value. May be repeated.", negative="")]


@app.command
def run(
    pipeline: str,
    /,
    *,
    define: Definitions = [],  # noqa: B006 - the command line parser's way
    master: str = "local[*]",
    remote: str | None = None,
    storage: str = ".dagster_unified/intermediates",
    rows: int = 5,
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
        The address of a Spark Connect server, such as sc://localhost:15002.
    storage
        Where intermediates are kept.
    rows
        How many rows of each result table to show.
    """
    found = load(pipeline)
    configuration = settings.configuration(define)
    planned = plan(found.graph(), configuration)
    for finding in planned.findings:
        if finding.severity == "warning":
            err.print(f"[yellow]warning:[/] {finding.message}", highlight=False, soft_wrap=True)
    if not remote:
        check_java()
    return _run(
        found,
        planned,
        {k: s.value if isinstance(s.value, (bool, int)) else written(s.value) for k, s in configuration.items() if s.origin != "default"},
        master,
        remote,
        storage,
        rows,
    )


@app.command
def suspend(pipeline: str, /, *, define: Definitions = []) -> int:  # noqa: B006
    """Stop a pipeline's streaming job after its epoch, and keep it stopped: its sensor does not start it again.

    Parameters
    ----------
    pipeline
        A module or file that holds a Pipeline.
    define
        Set an option, such as execution.checkpointing.dir.
    """
    return _ask(pipeline, define, "suspended")


@app.command
def resume(pipeline: str, /, *, define: Definitions = []) -> int:  # noqa: B006
    """Let a pipeline's streaming job go on where it was suspended; its sensor starts it.

    Parameters
    ----------
    pipeline
        A module or file that holds a Pipeline.
    define
        Set an option, such as execution.checkpointing.dir.
    """
    return _ask(pipeline, define, "running")


@app.command
def drain(pipeline: str, /, *, define: Definitions = []) -> int:  # noqa: B006
    """End a pipeline's input here: what has arrived is processed, all timers fire, and its streaming job finishes.

    Parameters
    ----------
    pipeline
        A module or file that holds a Pipeline.
    define
        Set an option, such as execution.checkpointing.dir.
    """
    return _ask(pipeline, define, "drained")


@app.command
def savepoint(pipeline: str, /, *, define: Definitions = []) -> int:  # noqa: B006
    """Keep a copy of the state of a pipeline's streaming job, which has to be suspended.

    Parameters
    ----------
    pipeline
        A module or file that holds a Pipeline.
    define
        Set an option, such as execution.checkpointing.dir.
    """
    from dagster_unified.engine.streaming.savepoint import save_stopped

    made = save_stopped(_directory(pipeline, define), f"command line, process {os.getpid()}", "command line")
    out.print(made.describe(), highlight=False, soft_wrap=True)
    return 0


@app.command
def savepoints(pipeline: str, /, *, define: Definitions = []) -> int:  # noqa: B006
    """List the savepoints of a pipeline's streaming job, the oldest first.

    Parameters
    ----------
    pipeline
        A module or file that holds a Pipeline.
    define
        Set an option, such as execution.checkpointing.dir.
    """
    from dagster_unified.engine.streaming.savepoint import savepoints as known

    for one in known(_directory(pipeline, define)):
        out.print(one.describe(), highlight=False, soft_wrap=True)
    return 0


@app.command
def restore(pipeline: str, /, *, savepoint: str | None = None, define: Definitions = []) -> int:  # noqa: B006
    """Go back to a savepoint of a pipeline's streaming job, which has to be suspended. Resume it then.

    Parameters
    ----------
    pipeline
        A module or file that holds a Pipeline.
    savepoint
        Its name; by default the latest.
    define
        Set an option, such as execution.checkpointing.dir.
    """
    from dagster_unified.engine.streaming.savepoint import restore_stopped

    chosen = restore_stopped(_directory(pipeline, define), f"command line, process {os.getpid()}", savepoint)
    out.print(f"went back to {chosen.describe()}", highlight=False, soft_wrap=True)
    return 0


@app.command
def stop_connect_server(port: int, /) -> int:
    """End the Spark Connect server that `SparkResource(connect=port)` started on this machine.

    Parameters
    ----------
    port
        Where it listens.
    """
    from dagster_unified.engine.connect_server import stop

    ended = stop(port)
    out.print(f"the server at port {port} has ended" if ended else f"no server was started at port {port}", highlight=False)
    return 0


def _directory(pipeline: str, define: list[str]) -> CheckpointDirectory:
    from dagster_unified.engine.streaming.checkpoint import CheckpointDirectory

    return CheckpointDirectory(settings.configuration(define)["execution.checkpointing.dir"], load(pipeline).name)


def _ask(pipeline: str, define: list[str], state: str) -> int:
    from dagster_unified.engine.streaming.desired import ask

    directory = _directory(pipeline, define)
    ask(directory, state=state, reason="command line")
    deployed = directory.deployed()
    where = f"deployment {deployed.id}, generation {deployed.generation}" if deployed is not None else "nothing has been deployed there yet"
    out.print(f"{directory.path.name} is to be {state} ({directory.path}: {where})", highlight=False, soft_wrap=True)
    return 0


@app.command
def explain(pipeline: str, /, *, define: Definitions = [], mermaid: bool = False, json: bool = False) -> int:  # noqa: B006
    """Show a pipeline's tasks, exchanges and stages before anything runs.

    Parameters
    ----------
    pipeline
        A module or file that holds a Pipeline.
    define
        Set an option: key=value. May be repeated.
    mermaid
        As a Mermaid diagram.
    json
        As JSON, for tools.
    """
    planned = plan(load(pipeline).graph(), settings.configuration(define))
    sys.stdout.write((as_mermaid(planned) if mermaid else dumps(planned) if json else as_text(planned)) + "\n")
    return 0


@config_app.command
def show(key: str | None = None, /, *, define: Definitions = [], format: Literal["table", "plain"] = "table") -> int:  # noqa: A002, B006
    """Show every option, its value, and where the value comes from.

    Parameters
    ----------
    key
        Only this option, with what it does and where it is looked for.
    define
        Set an option: key=value. May be repeated.
    format
        A table, or plain lines.
    """
    configuration = settings.configuration(define)
    if key is not None:
        option = option_of(key)
        out.print(
            f"{key} = {_shown(configuration[key])} ({configuration.origin(key)})\n{option.description}\nIt is {option.expected()}. Looked for in: {settings.places(key)}.",
            highlight=False,
            soft_wrap=True,
        )
        return 0
    if format == "plain":
        for name, setting in configuration.items():
            sys.stdout.write(f"{name} = {_shown(setting.value)} ({setting.origin})\n")
        return 0
    table = Table("option", "value", "origin")
    for name, setting in configuration.items():
        table.add_row(name, _shown(setting.value), setting.origin)
    out.print(table)
    return 0


@app.command
def version() -> int:
    """Show the installed version."""
    sys.stdout.write(f"{library_version()}\n")
    return 0


@app.command(name="check-java", show=False)
def check_java_command() -> int:
    """Say what is missing to run Spark."""
    check_java()
    return 0


def load(name: str) -> Pipeline:
    """The pipeline in a module or file; raises `PipelineError` where there is none, or several."""
    place, _, attribute = name.partition(":")
    module = _import_file(Path(place)) if place.endswith(".py") else _import_module(place)
    found = {n: v for n, v in vars(module).items() if isinstance(v, Pipeline)}
    if attribute:
        if attribute not in found:
            raise PipelineError(f"{place} has no pipeline '{attribute}'{nearest(attribute, found) or '; it has ' + (', '.join(found) or 'none')}")
        return found[attribute]
    if len({id(v) for v in found.values()}) != 1:
        raise PipelineError(f"{place} has no Pipeline at its top level" if not found else f"{place} has several pipelines; name one: {', '.join(f'{place}:{n}' for n in found)}")
    return next(iter(found.values()))


def _import_module(name: str) -> Any:
    sys.path.insert(0, os.getcwd())
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name and (name == error.name or name.startswith(error.name + ".")):
            raise PipelineError(f"there is no module '{name}'{_similar(name)}; give a module or a file, from the folder that holds it") from error
        raise PipelineError(_cannot_import(name, error)) from error
    except (ValueError, TypeError) as error:
        raise PipelineError(f"'{name}' is not a module's name; give it in full, such as jobs.flight_delays") from error
    except UnifiedError:
        raise
    except Exception as error:
        raise PipelineError(_cannot_import(name, error)) from error


def _similar(name: str) -> str:
    folder = Path(*name.split(".")[:-1])
    known = [".".join([*folder.parts, f.stem]) for f in folder.glob("*.py")] if folder.is_dir() else []
    return nearest(name, known)


def _import_file(path: Path) -> Any:
    if not path.exists():
        raise PipelineError(f"there is no file {path}")
    sys.path.insert(0, str(path.parent.absolute()))
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[path.stem] = module
    try:
        spec.loader.exec_module(module)
    except UnifiedError:
        raise
    except Exception as error:
        raise PipelineError(_cannot_import(str(path), error)) from error
    return module


def _cannot_import(name: str, error: Exception) -> str:
    trace = traceback.extract_tb(error.__traceback__)
    at = f", at {trace[-1].filename}:{trace[-1].lineno}" if trace else ""
    return f"{name} cannot be imported: {type(error).__name__}: {str(error).splitlines()[0] if str(error) else 'no message'}{at}"


def _shown(value: Any) -> str:
    return "follows from the mode" if value is None else written(value)


def _run(pipeline: Pipeline, planned: Plan, options: dict[str, Any], master: str, remote: str | None, storage: str, rows: int) -> int:
    from dagster_unified.orchestration.launch import launch

    finished: list[StageFinished] = []
    with _Progress(planned) as shown:

        def observe(event: Event) -> None:
            shown.tell(event)
            if isinstance(event, StageFinished):
                finished.append(event)

        outcome = launch(pipeline, options, master, remote, storage, observe)
    if finished:
        out.print(_stages(finished))
    if outcome.error is not None:
        err.print(outcome.error, style="red", highlight=False, markup=False, soft_wrap=True)
        return 1
    for name, table in outcome.tables(planned, rows).items():
        shown_table = Table(*table.schema.names, title=name, title_justify="left")
        for row in table.to_pylist():
            shown_table.add_row(*[str(v) for v in row.values()])
        out.print(shown_table)
    return 0


def _stages(finished: Sequence[StageFinished]) -> Table:
    table = Table("stage", "rows", "bytes", "seconds", "notes")
    for column in table.columns[1:4]:
        column.justify = "right"
    for event in finished:
        m = event.manifest
        notes = [f"{n:,} {name}" for name, n in m.counters.items()] + (["recomputed"] if event.reason else [])
        table.add_row(event.stage, f"{m.rows:,}", f"{m.bytes:,}", f"{m.seconds:.1f}", ", ".join(notes))
    return table


class _Progress:
    """What is running, while it runs: a live line on a terminal, plain lines otherwise."""

    def __init__(self, planned: Plan) -> None:
        self._planned = planned
        self._live = Progress(SpinnerColumn(), TextColumn("{task.description}"), TimeElapsedColumn(), console=err, transient=True) if err.is_terminal else None
        self._task: Any = None

    def __enter__(self) -> _Progress:
        streaming = self._planned.execution.mode == "STREAMING"
        work = "until its input ends, or Ctrl-C" if streaming else f"{len(self._planned.regions)} stages"
        start = f"{self._planned.name}: {self._planned.execution.mode}, {work}; starting Spark"
        if self._live is None:
            err.print(start, highlight=False)
        else:
            self._live.start()
            self._task = self._live.add_task(start)
        return self

    def __exit__(self, *_: object) -> None:
        if self._live is not None:
            self._live.stop()

    def tell(self, event: Event) -> None:
        """Shows an event."""
        if isinstance(event, EpochCommitted):
            text = f"epoch {event.epoch} of {event.query}: {event.rows_in:,} rows read, committed in {event.seconds:.1f} s"
        elif isinstance(event, StageFinished):
            place = f"stage {event.number} of {event.of}: {event.stage}"
            text = f"{place}: {event.manifest.rows:,} rows in {event.manifest.seconds:.1f} s"
        else:
            place = f"stage {event.number} of {event.of}: {event.stage}"
            text = place + (f" (recomputing: {event.reason})" if event.reason else "")
        if self._live is None:
            err.print(text, highlight=False)
        elif isinstance(event, StageFinished):
            self._live.console.print(f"[green]✓[/] {text}", highlight=False)
        else:
            self._live.update(self._task, description=text)


def main(arguments: Sequence[str] | None = None) -> None:
    """The entry point."""
    try:
        code = app(list(arguments) if arguments is not None else None, exit_on_error=False, print_error=False, result_action="return_value")
    except (CycloptsError, UnifiedError) as error:
        err.print(f"dagster-unified: {error}", highlight=False, markup=False, soft_wrap=True)
        code = 2
    sys.exit(code if isinstance(code, int) else 0)


if __name__ == "__main__":
    main()
