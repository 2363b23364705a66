"""The files of a savepoint, as Spark's workers and the driver open them.

Local ones and those of S3 go through pyarrow, which workers have; other stores need universal_pathlib and the store's
own package there too. Knows paths only.
"""

from __future__ import annotations

import os
from functools import cache
from typing import TYPE_CHECKING, Any, BinaryIO, cast
from urllib.parse import urlsplit

from dagster_unified.connectors.paths import storage_path

if TYPE_CHECKING:
    from pyarrow.fs import FileSystem

_S3 = ("s3://", "s3a://")


def open_input(path: str) -> BinaryIO:
    """A file that is there, to be read at any place; raises `FileNotFoundError` where it is not."""
    found = _in_arrow(path)
    if found is None:
        return storage_path(path, "savepoint").open("rb")
    system, name = found
    return cast("BinaryIO", system.open_input_file(name))


def open_output(path: str) -> BinaryIO:
    """A new file, in a folder that is there."""
    found = _in_arrow(path)
    if found is None:
        return storage_path(path, "savepoint").open("wb")
    system, name = found
    return cast("BinaryIO", system.open_output_stream(name))


def _in_arrow(path: str) -> tuple[FileSystem, str] | None:
    """pyarrow's file system for a path, and the path in it; None where another package opens it."""
    from pyarrow.fs import LocalFileSystem

    if "://" not in path or path.startswith("file://"):
        return LocalFileSystem(), path.removeprefix("file://")
    if path.startswith(_S3) and not any(name == "FSSPEC_S3" or name.startswith("FSSPEC_S3_") for name in os.environ):
        url = os.environ.get("AWS_ENDPOINT_URL_S3") or os.environ.get("AWS_ENDPOINT_URL")
        region = os.environ.get("AWS_REGION") or os.environ.get("AWS_DEFAULT_REGION")
        return _s3(url, region), path.partition("://")[2]
    return None


@cache
def _s3(url: str | None, region: str | None) -> FileSystem:
    """S3 with the credentials of the environment, the profile or the machine, as s3fs finds them."""
    from pyarrow.fs import S3FileSystem

    options: dict[str, Any] = {} if region is None else {"region": region}
    if url is not None:
        at = urlsplit(url)
        options |= {"scheme": at.scheme, "endpoint_override": f"{at.netloc}{at.path.rstrip('/')}"}
    return S3FileSystem(**options)
