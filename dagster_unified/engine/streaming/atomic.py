"""Small files that are replaced atomically, for the metadata of the checkpoint directory."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

import msgspec
from upath import UPath

from dagster_unified.connectors.paths import is_local

T = TypeVar("T")


def write_atomically(path: UPath, data: bytes) -> None:
    """Write a file atomically: by rename on a file system; an object store's put is atomic already."""
    if not is_local(path):
        path.write_bytes(data)
        return
    path.parent.mkdir(parents=True, exist_ok=True)
    staged = path.parent / f".{path.name}.new"
    staged.write_bytes(data)
    staged.replace(path)


def write_alternately(folder: UPath, number: int, data: bytes) -> None:
    """Write one of two files in turn, so that if one is torn the other is whole."""
    write_atomically(folder / f"{number % 2}.json", data)


def read_whole(path: UPath) -> bytes:
    """A file that another process may replace meanwhile, as it was before or as it is then.

    An object store is asked once: one that is opened first is lost where it was replaced before it is read.
    """
    data: bytes = path.read_bytes() if is_local(path) else path.fs.cat_file(path.path)
    return data


def read_latest(folder: UPath, kind: type[T], number: Callable[[T], int]) -> T | None:
    """Of the two files, the readable one with the greater number."""
    found = []
    for slot in (0, 1):
        try:
            found.append(msgspec.json.decode(read_whole(folder / f"{slot}.json"), type=kind))
        except (FileNotFoundError, msgspec.DecodeError):
            continue
    return max(found, key=number, default=None)
