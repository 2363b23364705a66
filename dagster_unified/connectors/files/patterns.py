"""Paths as authors of file sources write them: `*` stands for any part of a name, and `[*]` for a star.

Every other character stands for itself. Each reader of paths has a language of patterns of its own, into which such a
path is translated here.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import TYPE_CHECKING

from dagster_unified.connectors.paths import STRICT, escaped, for_spark

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, DataFrameReader
    from upath import UPath

_STARS = re.compile(r"(\[\*\]|\*+)")


def has_star(path: str) -> bool:
    """Whether a path stands for others."""
    return "*" in path.replace("[*]", "")


def plain(path: str) -> str:
    """What a path without a star that stands for others stands for."""
    return path.replace("[*]", "*")


def as_regex(path: str) -> str:
    """The regular expression of the paths that it stands for."""
    return _translated(path, "[^/]*", re.escape)


def as_fnmatch(name: str) -> str:
    """The pattern as Python's fnmatch takes it, and the globs of fsspec."""
    return _translated(name, "*", lambda text: re.sub(r"([*?[])", r"[\1]", text))


def load(reader: DataFrameReader, path: UPath) -> DataFrame:
    """Read the files and folders that a path stands for."""
    return reader.options(**STRICT).load(_translated(for_spark(path), "*", escaped))


def _translated(path: str, any_part: str, literally: Callable[[str], str]) -> str:
    def translated(piece: str) -> str:
        return any_part if piece.startswith("*") else literally(plain(piece))

    return "".join(map(translated, _STARS.split(path)))
