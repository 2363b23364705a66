"""Commands that run nothing: `init`, `explain`, `connectors`, `config show`, `version`.

They load neither Spark nor Dagster.
"""

from __future__ import annotations

import keyword
import re
import shlex
import sys
from importlib.metadata import packages_distributions
from pathlib import Path
from typing import Any, Literal

from dagster_unified import settings
from dagster_unified.cli.finding import load
from dagster_unified.cli.terminal import AnyPipeline, Defines, Json, out, say, table, write
from dagster_unified.errors import ConfigurationError
from dagster_unified.graph.options import option as option_of
from dagster_unified.graph.options import written
from dagster_unified.templates import project_files
from dagster_unified.version import library_version


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
    form = next((name for name, given in {"mermaid": mermaid, "json": json, "physical": physical}.items() if given), "")
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
