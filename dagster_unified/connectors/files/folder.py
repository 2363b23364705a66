"""The files below a folder, or those that a pattern matches: which are there, and which may be new.

In a pattern `*` stands for any part of a name, and `[*]` for a star; every other character stands for itself. A folder
that is a table of Delta or Iceberg is refused.
"""

from __future__ import annotations

import glob
import os
import re
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Set
from datetime import datetime
from fnmatch import fnmatchcase
from pathlib import PurePosixPath
from typing import TYPE_CHECKING, Any, NamedTuple

from dagster_unified.operators.time import to_millis
from dagster_unified.storage.paths import STRICT, children, escaped, for_spark, is_local, load, path_text, url

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, DataFrameReader
    from upath import UPath

_STARS = re.compile(r"(\[\*\]|\*+)")


def has_star(path: str) -> bool:
    """Whether a path is a pattern."""
    return "*" in path.replace("[*]", "")


def plain(path: str) -> str:
    """A path that is no pattern, with its stars as they are."""
    return path.replace("[*]", "*")


def as_regex(path: str) -> str:
    """The regular expression of the paths that a pattern matches."""
    return _translated(path, "[^/]*", re.escape)


def as_fnmatch(name: str) -> str:
    """The pattern for Python's fnmatch, and for the globs of fsspec."""
    return _translated(name, "*", lambda text: re.sub(r"([*?[])", r"[\1]", text))


def load_pattern(reader: DataFrameReader, path: UPath) -> DataFrame:
    """Read the files and folders that a pattern matches."""
    return reader.options(**STRICT).load(_translated(for_spark(path), "*", escaped))


def _translated(path: str, any_part: str, literally: Callable[[str], str]) -> str:
    def translated(piece: str) -> str:
        return any_part if piece.startswith("*") else literally(plain(piece))

    return "".join(map(translated, _STARS.split(path)))


_SETTLED = 2.0
"""Seconds after which a folder's time of change tells every change: some disks count in whole seconds."""


class File(NamedTuple):
    """A file: its name below the root, its bytes, and when it was changed, in milliseconds since the epoch."""

    name: str
    size: int
    changed: int


class Folder:
    """The files of a path: a file, a folder or a pattern with `*`; their names are relative to `root`."""

    def __init__(self, path: UPath) -> None:
        text = path_text(path)
        pieces = text.split("/")
        stars = next((place for place, piece in enumerate(pieces) if has_star(piece)), None)
        self.path = path
        self.place = path.with_segments(plain(text)) if stars is None else None
        """The file or folder that it reads, if it is no pattern."""

        begin = len(pieces) - 1 if self.place is not None and self.place.is_file() else stars
        self.root = plain(text if begin is None else "/".join(pieces[:begin]) or "/")
        self.local = is_local(path)
        self._prefix = for_spark(path).removesuffix(text)
        self._pattern = () if begin is None else tuple(map(as_fnmatch, pieces[begin:]))
        self.hidden: set[str] = set()
        """Names of files that were met and are hidden."""

        self._unchanged: dict[str, tuple[int, list[str]]] = {}
        """By local folder, its time of change when it was listed, and the folders in it."""

    def files(self) -> list[File]:
        """All files."""
        self.forget()
        return self.new(frozenset())

    def new(self, known: Set[str]) -> list[File]:
        """The files whose names are not known.

        Files of local folders that have not changed since the last listing count as known.
        """
        self.hidden.clear()
        if not self.local:
            return [self._remote_file(name, info) for name, info in self._remote() if name not in known]
        names = [name for name in self._walk("", self._pattern) if name not in known]
        return [file for file in map(self._local_file, names) if file is not None]

    def location(self, name: str) -> str:
        """The path of a file for Spark."""
        return f"{self._prefix}{self.root}/{name}"

    def url_of(self, name: str) -> str:
        """The URL of a file."""
        return url(self.location(name))

    def paths(self) -> list[str]:
        """The paths of all files, without a scheme."""
        self.forget()
        names = self._walk("", self._pattern) if self.local else (name for name, _ in self._remote())
        return [f"{self.root}/{name}" for name in names]

    def any(self) -> str | None:
        """The name of some file, or None where there is none."""
        self._unchanged.clear()
        if not self.local:
            return next((name for name, _ in self._remote()), None)
        return next(self._walk("", self._pattern), None)

    def forget(self) -> None:
        """List all folders again the next time."""
        self._unchanged.clear()

    def load(self, reader: DataFrameReader, files: Sequence[UPath]) -> DataFrame:
        """Read all its files; `files` are these."""
        if self.place is not None:
            return load(reader, [self.place])
        if self.local and any(":" in file.path for file in files):  # which Hadoop does not find by a pattern
            return load(reader, files)
        return load_pattern(reader, self.path)

    def _remote_file(self, name: str, info: Mapping[str, Any]) -> File:
        return File(name, int(info.get("size") or 0), _change_time(info))

    def _local_file(self, name: str) -> File | None:
        try:
            stat = os.stat(f"{self.root}/{name}")
        except FileNotFoundError:
            return None
        return File(name, stat.st_size, stat.st_mtime_ns // 1_000_000)

    def _walk(self, below: str, pattern: tuple[str, ...]) -> Iterator[str]:
        """The names in a local folder that a pattern matches, or all of them."""
        folder = f"{self.root}/{below}"
        begun = time.time()
        try:
            changed = os.stat(folder).st_mtime_ns
            known = self._unchanged.get(folder)
            if known is None or known[0] != changed:
                with os.scandir(folder) as entries:
                    listed = [(entry.name, entry.is_dir()) for entry in entries]
                folders = [name for name, is_folder in listed if is_folder]
                names = [name for name, is_folder in listed if not is_folder]
                self.hidden.update(f"{below}{name}" for name in names if _is_hidden(name))
                yield from (f"{below}{name}" for name in names if _is_of(name, pattern, True))
                if begun - changed / 1e9 > _SETTLED:
                    self._unchanged[folder] = changed, folders
            else:
                folders = known[1]
        except (FileNotFoundError, NotADirectoryError):
            return
        for name in folders:
            if _is_of(name, pattern, False):
                yield from self._walk(f"{below}{name}/", pattern[1:])

    def _remote(self) -> Iterator[tuple[str, Mapping[str, Any]]]:
        files = self.path.fs
        matches = (
            files.glob("/".join([glob.escape(self.root), *self._pattern]), detail=True)
            if self._pattern
            else {self.root: {"type": "directory"}}
        )
        for match, info in matches.items():
            files_of_match = _files_below(files, match) if info["type"] == "directory" else {match: info}
            for path, details in files_of_match.items():
                name = path.removeprefix(f"{self.root}/")
                *folders, last = path.removeprefix(match).strip("/").split("/") if path != match else [name]
                if not all(_is_of(folder, (), False) for folder in folders):
                    continue
                if _is_hidden(last.rpartition("/")[2]):
                    self.hidden.add(name)
                else:
                    yield name, details


def _is_of(name: str, pattern: tuple[str, ...], is_file: bool) -> bool:
    """Whether an entry of a folder matches a pattern of names; an empty pattern matches all that is not hidden."""
    if not pattern:
        return not _is_hidden(name) and (is_file or "=" in name)
    if is_file and (len(pattern) > 1 or _is_hidden(name)):
        return False
    return fnmatchcase(name, pattern[0]) and not name.startswith(".")


def _files_below(files: Any, folder: str) -> Mapping[str, Mapping[str, Any]]:
    try:
        listing: Mapping[str, Mapping[str, Any]] = files.find(folder, detail=True)
    except FileNotFoundError:
        return {}
    return listing


def _is_hidden(name: str) -> bool:
    return (name.startswith("_") and "=" not in name) or name.startswith(".") or name.endswith("._COPYING_")


def _change_time(info: Mapping[str, Any]) -> int:
    """The time of the last change of a file in a bucket; each kind of store names it differently."""
    words = ("LastModified", "mtime", "last_modified", "updated", "created")
    changed = next((info[word] for word in words if word in info), 0)
    if isinstance(changed, str):
        changed = datetime.fromisoformat(changed)
    return to_millis(changed) if isinstance(changed, datetime) else int(changed * 1000)


_LOGS = {"_delta_log": ("Delta", ".json"), "metadata": ("Iceberg", ".metadata.json"), ".hoodie": ("Hudi", "")}
"""The folder of each format's log, the format, and how the name of some file in the folder ends."""

_DATA = "data"
"""The folder of an Iceberg table's files."""


def table_format(files: Iterable[UPath]) -> tuple[UPath, str] | None:
    """The folder and the format of a table that one of these files lies in; None where there is none.

    A bucket is asked three times for each folder of files; folders such as day=2024-01-01 count as part of the folder
    that they are in.
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
