"""Commands that run nothing: `explain`, `config show`, `version`. They load neither Spark nor Dagster."""

from __future__ import annotations

import sys
from typing import Any, Literal

from dagster_unified import settings
from dagster_unified.cli.arguments import Defines
from dagster_unified.cli.finding import load
from dagster_unified.cli.terminal import out
from dagster_unified.errors import ConfigurationError
from dagster_unified.graph.options import option as option_of
from dagster_unified.graph.options import written
from dagster_unified.version import library_version


def explain(pipeline: str, /, *, define: Defines = [], mermaid: bool = False, json: bool = False) -> int:  # noqa: B006
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
    from dagster_unified.graph.explain import as_mermaid, as_text, dumps
    from dagster_unified.graph.plan import plan

    planned = plan(load(pipeline).graph(), settings.configuration(define))
    if mermaid and json:
        raise ConfigurationError("explain: --mermaid and --json are two forms of one plan; give one of them")
    sys.stdout.write((as_mermaid(planned) if mermaid else dumps(planned) if json else as_text(planned)) + "\n")
    return 0


def show(key: str | None = None, /, *, define: Defines = [], format: Literal["table", "plain"] = "table") -> int:  # noqa: A002, B006
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
        out().print(
            f"{key} = {_shown(configuration[key])} ({configuration.origin(key)})\n{option.description}\nIt is"
            f" {option.expected()}. Looked for in: {settings.places(key)}.",
            highlight=False,
            soft_wrap=True,
        )
        return 0
    if format == "plain":
        for name, setting in configuration.items():
            sys.stdout.write(f"{name} = {_shown(setting.value)} ({setting.origin})\n")
        return 0
    from rich.table import Table

    table = Table("option", "value", "origin")
    for name, setting in configuration.items():
        table.add_row(name, _shown(setting.value), setting.origin)
    out().print(table)
    return 0


def version() -> int:
    """Show the installed version."""
    sys.stdout.write(f"{library_version()}\n")
    return 0


def _shown(value: Any) -> str:
    return "follows from the mode" if value is None else written(value)
