"""The command that lists the connectors of all installed packages. It imports none of them."""

from __future__ import annotations

from dagster_unified.cli.terminal import out


def connectors() -> int:
    """List the sources and sinks of the library and of every installed package."""
    from rich.table import Table

    from dagster_unified.connectors.finding import SINKS, SOURCES, installed

    table = Table("name", "is a", "class", "package")
    for group, what in ((SOURCES, "source"), (SINKS, "sink")):
        for entry in installed(group):
            package = f"{entry.dist.name} {entry.dist.version}" if entry.dist is not None else ""
            table.add_row(entry.name, what, entry.value.replace(":", "."), package)
    out().print(table)
    return 0
