"""Connectors by name: those of the library and of every installed package, through entry points."""

from __future__ import annotations

from collections.abc import Sequence
from importlib.metadata import EntryPoint, entry_points
from typing import Any

from dagster_unified.errors import ConfigurationError, nearest
from dagster_unified.graph.connectors import Sink, Source

SOURCES, SINKS = "dagster_unified.sources", "dagster_unified.sinks"
"""The groups of entry points. An entry point's name is the connector's, its value the class."""


def find_source(name: str) -> type[Source[Any]]:
    """The class of the source that a package has registered under this name.

    Raises `ConfigurationError` where there is none, or where the entry point is something else.

    Examples:
        >>> find_source("csv").__name__
        'CsvSource'
    """
    return _find(SOURCES, name, Source)


def find_sink(name: str) -> type[Sink[Any]]:
    """The class of the sink that a package has registered under this name.

    Raises `ConfigurationError` where there is none, or where the entry point is something else.

    Examples:
        >>> find_sink("delta").__name__
        'DeltaSink'
    """
    return _find(SINKS, name, Sink)


def installed(group: str) -> Sequence[EntryPoint]:
    """The connectors of a group, by name."""
    return sorted(entry_points(group=group), key=lambda entry: (entry.name, entry.value))


def _find(group: str, name: str, kind: type) -> type:
    what = group.rpartition(".")[2].removesuffix("s")
    known = installed(group)
    entries = [entry for entry in known if entry.name == name]
    if not entries:
        names = [entry.name for entry in known]
        raise ConfigurationError(
            f"there is no {what} called '{name}'{nearest(name, names)}; installed are {', '.join(names) or 'none'}"
        )
    if len(entries) > 1:
        raise ConfigurationError(
            f"several packages have a {what} called '{name}': {', '.join(entry.value for entry in entries)}; import the"
            " class that you mean"
        )
    (entry,) = entries
    try:
        connector = entry.load()
    except (ImportError, AttributeError) as error:
        raise ConfigurationError(f"the {what} '{name}' ({entry.value}) cannot be loaded: {error}") from error
    if not (isinstance(connector, type) and issubclass(connector, kind)):
        raise ConfigurationError(f"the entry point '{name}' ({entry.value}) is not a {what}")
    return connector
