"""Folders that are tables: a log of theirs says which of the files in them count, and others lie there too.

Knows the names that table formats give to their logs, not what is in them.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import PurePosixPath
from typing import TYPE_CHECKING

from dagster_unified.connectors.paths import children

if TYPE_CHECKING:
    from upath import UPath

_LOGS = {"_delta_log": ("Delta", ".json"), "metadata": ("Iceberg", ".metadata.json"), ".hoodie": ("Hudi", "")}
"""The folder of each format's log, and how the name of some file in it ends."""

_DATA = "data"
"""Where an Iceberg table has its files."""


def table_format(files: Iterable[UPath]) -> tuple[UPath, str] | None:
    """The folder and the format of a table that one of these files lies in; None where none does.

    A bucket is asked three times for each folder of files; those such as day=2024-01-01 are part of the folder that
    they are in.
    """
    folders = {_without_partitions(file.parent.path): file for file in files}
    for path, file in folders.items():
        folder = file.with_segments(path)
        for place in [folder, *([folder.parent] if folder.name == _DATA else [])]:
            for log, (name, ending) in _LOGS.items():
                if any(child.endswith(ending) for child in children(place / log)):
                    return place, name
    return None


def _without_partitions(folder: str) -> str:
    place = PurePosixPath(folder)
    while "=" in place.name:
        place = place.parent
    return str(place)
