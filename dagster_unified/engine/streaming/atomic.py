"""Small files that are replaced atomically, for the metadata of the checkpoint directory."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

import msgspec
from upath import UPath

T = TypeVar("T")


def write_atomically(path: UPath, data: bytes) -> None:
    """Write a file atomically: by rename on a file system; an object store's put is atomic already."""
    path.parent.mkdir(parents=True, exist_ok=True)
    if path.protocol not in ("", "file"):
        path.write_bytes(data)
        return
    staged = path.parent / f".{path.name}.new"
    staged.write_bytes(data)
    staged.replace(path)


def write_alternately(folder: UPath, number: int, data: bytes) -> None:
    """Write one of two files in turn, so that if one is torn the other is whole."""
    write_atomically(folder / f"{number % 2}.json", data)


def read_latest(folder: UPath, kind: type[T], number: Callable[[T], int]) -> T | None:
    """Of the two files, the readable one with the greater number."""
    found = []
    for slot in (0, 1):
        try:
            found.append(msgspec.json.decode((folder / f"{slot}.json").read_bytes(), type=kind))
        except (FileNotFoundError, msgspec.DecodeError):
            continue
    return max(found, key=number, default=None)
