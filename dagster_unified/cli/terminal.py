"""What commands print, and the arguments that several of them take.

Rich is loaded by the first thing that is printed through it: explaining a pipeline needs none of it.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable
from functools import cache
from typing import TYPE_CHECKING, Annotated

from cyclopts import Parameter

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

Defines = Annotated[
    list[str], Parameter(name=["-D", "--define"], help="Set an option: key=value. May be repeated.", negative="")
]

AnyPipeline = Annotated[
    str,
    Parameter(
        help="A module or file that holds a Pipeline, such as jobs.flight_delays, jobs/flight_delays.py or"
        " jobs.many:second."
    ),
]

Deployed = Annotated[
    str,
    Parameter(
        help="A module or file that holds Definitions, a StreamingDeployment or a Pipeline, such as definitions or"
        " definitions:live_flights."
    ),
]

Started = Annotated[
    str | None,
    Parameter(
        help="A module or file that holds Definitions or a StreamingDeployment, such as definitions:live_flights; by"
        " default that of [tool.dagster] in pyproject.toml, else definitions."
    ),
]

Location = Annotated[
    str | None,
    Parameter(
        help="A module or file that holds Definitions, deployments or pipelines; by default that of [tool.dagster] in"
        " pyproject.toml, else definitions."
    ),
]

Json = Annotated[bool, Parameter(help="As JSON, for tools.")]


@cache
def out() -> Console:
    """Results."""
    from rich.console import Console

    return Console()


@cache
def err() -> Console:
    """Progress, warnings and errors."""
    from rich.console import Console

    return Console(stderr=True)


def say(*lines: str) -> None:
    """Print results as they are: a `[` in them is no markup."""
    for line in lines:
        out().print(line, highlight=False, markup=False, soft_wrap=True)


def complain(message: str, style: str | None = None) -> None:
    """Print an error or a warning as it is."""
    err().print(message, style=style, highlight=False, markup=False, soft_wrap=True)


def write(text: str) -> None:
    """Print plain text for people and tools, without Rich."""
    sys.stdout.write(f"{text}\n")


def table(columns: Iterable[str], rows: Iterable[Iterable[str]] = ()) -> Table:
    """A table of texts as they are, whose columns fold where the terminal is narrow."""
    from rich.table import Table
    from rich.text import Text

    shown = Table()
    for column in columns:
        shown.add_column(column, overflow="fold")
    for row in rows:
        shown.add_row(*map(Text, row))
    return shown
