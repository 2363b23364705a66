"""The folder of an iteration's files and manifests: one that all workers share, or one in a bucket.

A manifest is a small file that is there whole or not at all, beside the files that it names. Files of a bucket are
mapped from copies on this machine, in a folder that Spark removes with the executor. A task keeps what it writes, so
that only a task that runs on another machine than before reads the bucket. Knows no Spark.
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import os
import shutil
import tempfile
from typing import TYPE_CHECKING, TypeVar
from uuid import uuid4

import msgspec

from dagster_unified.connectors import conditional
from dagster_unified.connectors.paths import is_local, path_text, put, read_whole, storage_path
from dagster_unified.errors import LeaseLostError
from dagster_unified.graph.fingerprint import digest
from dagster_unified.state.files import open_input, open_output

if TYPE_CHECKING:
    from upath import UPath

_KEPT = 2
"""Epochs for which a copy stays that none of them has read."""


M = TypeVar("M")


class IterationFolder:
    """The files of one iteration, as this process reaches them."""

    def __init__(self, folder: str) -> None:
        self.folder = folder
        self.root = storage_path(folder, "the rounds of an iteration")
        self.is_shared = is_local(self.root)
        """Whether the files are mapped from where they are."""

        self.here = path_text(self.root) if self.is_shared else os.path.join(_scratch(), f"rounds-{digest(folder)}")
        """The folder in which files are written and mapped."""

        if not self.is_shared:
            os.makedirs(self.here, exist_ok=True)

    def path(self, name: str, epoch: int) -> str:
        """Where a file is mapped that an epoch reads; it is copied here where it is not.

        Raises `FileNotFoundError` where there is none.
        """
        path = os.path.join(self.here, name)
        if not self.is_shared:
            self.used(name, epoch)  # before it is mapped: another task does not drop it then
            if not os.path.exists(path):
                copied = f"{path}.{uuid4().hex[:8]}"
                with open_input(f"{self.folder}/{name}") as source, open(copied, "wb") as copy:
                    shutil.copyfileobj(source, copy, 1 << 20)
                os.utime(copied, (epoch, epoch))
                os.replace(copied, path)
        return path

    def publish(self, name: str) -> None:
        """Make a file that was written here one that all workers reach."""
        if not self.is_shared:
            with open(os.path.join(self.here, name), "rb") as copy, open_output(f"{self.folder}/{name}") as target:
                shutil.copyfileobj(copy, target, 1 << 20)

    def sizes(self) -> dict[str, int]:
        """The files that there are, with their bytes."""
        if self.is_shared:
            with os.scandir(self.here) as entries:
                return {entry.name: entry.stat().st_size for entry in entries if entry.is_file()}
        try:
            found = self.root.fs.ls(self.root.path, detail=True)
        except FileNotFoundError:
            return {}
        return {entry["name"].rpartition("/")[2]: entry["size"] or 0 for entry in found}

    def remove(self, name: str) -> None:
        """Delete a file, if it is there."""
        with contextlib.suppress(FileNotFoundError):
            if self.is_shared:
                os.unlink(os.path.join(self.here, name))
            else:
                self.root.fs.rm_file(f"{self.root.path.rstrip('/')}/{name}")

    def used(self, name: str, epoch: int) -> None:
        """Note that an epoch needs a copy."""
        if not self.is_shared:
            with contextlib.suppress(FileNotFoundError):
                os.utime(os.path.join(self.here, name), (epoch, epoch))

    def drop_copies(self, epoch: int) -> None:
        """Remove the copies that no epoch has read of late."""
        if self.is_shared:
            return
        with os.scandir(self.here) as entries:
            for entry in entries:
                with contextlib.suppress(FileNotFoundError):
                    if entry.stat().st_mtime < epoch - _KEPT:
                        os.unlink(entry.path)

    def read(self, name: str, kind: type[M]) -> M | None:
        """Read a manifest; None where there is none, or none that can be read."""
        try:
            return msgspec.json.decode(read_whole(self.root / name), type=kind)
        except (FileNotFoundError, msgspec.DecodeError):
            return None

    def write(self, name: str, manifest: msgspec.Struct) -> None:
        """Write a manifest, also where there is one."""
        put(self.root / name, msgspec.json.encode(manifest), durable=True)

    def create(self, name: str, manifest: msgspec.Struct, number: int) -> None:
        """Write an epoch's manifest; raises `LeaseLostError` where another process has, in a bucket."""
        if self.is_shared:
            self.write(name, manifest)
            return
        try:
            conditional.write(self.root / name, msgspec.json.encode(manifest), None)
        except FileExistsError as error:
            raise LeaseLostError(
                f"epoch {number} of the iteration in {self.folder} was committed by another process meanwhile; this one"
                " stops and writes nothing more"
            ) from error


def text_of(folder: UPath) -> str:
    """A folder as it goes to workers."""
    return path_text(folder) if is_local(folder) else str(folder)


def forget_copies(folder: str) -> None:
    """Removes the copies that this process has of an iteration that has ended."""
    place = IterationFolder(folder)
    if not place.is_shared:
        shutil.rmtree(place.here, ignore_errors=True)


@functools.cache
def _scratch() -> str:
    """A folder for copies: Spark's own in its workers, else one that goes with the process."""
    of_spark = os.environ.get("SPARK_LOCAL_DIRS", "").split(",")[0]
    if of_spark:
        return of_spark
    own = tempfile.mkdtemp(prefix="iterations")
    atexit.register(shutil.rmtree, own, ignore_errors=True)
    return own
