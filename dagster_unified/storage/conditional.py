"""Conditional writes: a file is created only where there is none, and replaced only if it is as it was read.

A bucket compares by itself (`If-None-Match`, `If-Match`), so that of two writers one fails, however long the other was
paused before it wrote. On a disk, files are created exclusively, and compared right before they are replaced.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import time
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple
from uuid import uuid4

from dagster_unified.errors import ConfigurationError
from dagster_unified.storage.paths import is_local, put, read_whole

if TYPE_CHECKING:
    from upath import UPath

ATTEMPTS = 6
"""Attempts to write a file while the store says that another write is under way."""

_NO_VERSION = '"00000000000000000000000000000000"'
_CONFLICT, _NOT_IMPLEMENTED, _CHANGED = 409, 501, (404, 412)


class Content(NamedTuple):
    """A file's data, and the version that differs from other writes; never newer than the data."""

    data: bytes
    version: str


def read(path: UPath) -> Content | None:
    """Read a file as it is now; None where there is none."""
    try:
        if _is_in_s3(path):
            version = str(path.fs.info(path.path)["ETag"])
            return Content(read_whole(path), version)
        data = read_whole(path)
    except FileNotFoundError:
        return None
    return Content(data, _digest(data))


def write(path: UPath, data: bytes, version: str | None) -> str:
    """Write a file whose version is still `version`, or a new one if that is None; returns its new version.

    Raises `FileExistsError` where another writer was first. Two writers must write different data: where the store's
    answer was lost, and the request sent again, the data says whose it is.
    """
    if is_local(path):
        return _write_on_disk(path, data, version)
    if not _is_in_s3(path):
        path.fs.pipe_file(path.path, data, mode="create" if version is None else "overwrite")
        return _digest(data)
    try:
        return _write_in_s3(path, data, version)
    except FileExistsError:
        current = read(path)
        if current is None or current.data != data:
            raise
        return current.version


def check_store(path: UPath, what: str) -> None:
    """Raise `ConfigurationError` where the store of an existing file ignores the conditions of writes."""
    if is_local(path):
        return
    for version in (None, _NO_VERSION):
        with contextlib.suppress(FileExistsError):
            write(path, b"{}", version)
            raise ConfigurationError(f"{what}: {_refusal(path)}")


def _refusal(path: UPath) -> str:
    return (
        f"the store of {path.parent} writes a file although another process has written it meanwhile, so that two jobs"
        " could write at once; use a store with conditional writes (If-None-Match and If-Match), such as Amazon's S3,"
        " or a folder that all machines share"
    )


def _is_in_s3(path: UPath) -> bool:
    return path.protocol in ("s3", "s3a")


def _write_on_disk(path: UPath, data: bytes, version: str | None) -> str:
    if version is None:
        path.parent.mkdir(parents=True, exist_ok=True)
        staged = f"{path.path}.{uuid4().hex[:8]}.new"
        Path(staged).write_bytes(data)
        try:
            os.link(staged, path.path)  # there whole, or not at all
        finally:
            os.unlink(staged)
    else:
        current = read(path)
        if current is None or current.version != version:
            raise FileExistsError(f"{path} was written meanwhile")
        put(path, data)
    return _digest(data)


def _write_in_s3(path: UPath, data: bytes, version: str | None) -> str:
    how = {"mode": "create"} if version is None else {"IfMatch": version}
    attempt = 0
    while True:
        try:
            return str(path.fs.pipe_file(path.path, data, **how)["ETag"])
        except OSError as error:
            attempt += 1
            status = _status(error)
            if status in _CHANGED and not (status == 404 and version is None):
                raise FileExistsError(f"{path} was written meanwhile") from error
            if status == _NOT_IMPLEMENTED:
                raise ConfigurationError(f"{path}: {_refusal(path)}") from error
            if status != _CONFLICT or attempt == ATTEMPTS:
                raise
            time.sleep(0.05 * 2**attempt)


def _status(error: OSError) -> int | None:
    """The status of the store's answer, which s3fs keeps in the cause of its own error."""
    answer = getattr(error.__cause__, "response", None)
    return None if answer is None else answer["ResponseMetadata"]["HTTPStatusCode"]


def _digest(data: bytes) -> str:
    return hashlib.md5(data, usedforsecurity=False).hexdigest()
