"""Small files that are replaced atomically, for the metadata of the checkpoint directory.

A record that only one may write is an `AlternatingFiles`: who was paused and wakes up late writes nothing.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import TYPE_CHECKING, Generic, TypeVar

import msgspec

from dagster_unified.storage import conditional
from dagster_unified.storage.paths import is_local, read_whole

if TYPE_CHECKING:
    from upath import UPath

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


class AlternatingFiles(Generic[T]):
    """A record in two files that are written in turn, so that if one is torn the other is whole.

    Each is replaced only as this object has read or written it.
    """

    def __init__(self, folder: UPath, kind: type[T], number: Callable[[T], int]) -> None:
        self._paths = (folder / "0.json", folder / "1.json")
        self._folder, self._kind, self._number = folder, kind, number
        self._versions: list[str | None] | None = None

    def read(self) -> T | None:
        """Return the present record, whoever wrote it."""
        return read_latest(self._folder, self._kind, self._number)

    def open(self) -> T | None:
        """Return the present record; from now on nobody else may write it."""
        self._versions = [stored and stored.version for stored in map(conditional.read, self._paths)]
        return self.read()

    def claim(self, token: int) -> None:
        """Change both files, so that late writes of earlier writers fail."""
        self._versions = []
        for path in self._paths:
            stored = conditional.read(path)
            data = f"claimed by {token}".encode()
            if stored is not None:
                with contextlib.suppress(msgspec.DecodeError):
                    data = msgspec.json.encode({**msgspec.json.decode(stored.data), "claimed": token})
            self._versions.append(conditional.write(path, data, stored and stored.version))

    def write(self, record: T) -> None:
        """Write the record; raises `FileExistsError` where somebody else has written it since `open` or `claim`."""
        if self._versions is None:
            self.open()
        assert self._versions is not None
        slot = self._number(record) % 2
        self._versions[slot] = conditional.write(self._paths[slot], msgspec.json.encode(record), self._versions[slot])


def read_latest(folder: UPath, kind: type[T], number: Callable[[T], int]) -> T | None:
    """Return the readable one of the two files with the greater number."""
    records = []
    for slot in (0, 1):
        try:
            records.append(msgspec.json.decode(read_whole(folder / f"{slot}.json"), type=kind))
        except (FileNotFoundError, msgspec.DecodeError):
            continue
    return max(records, key=number, default=None)
