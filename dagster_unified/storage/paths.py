"""Paths from configuration: checked, made absolute, and written as Spark and `universal_pathlib` each want them."""

from __future__ import annotations

import contextlib
import os
import posixpath
import re
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING, TypeAlias, cast
from urllib.parse import quote
from uuid import uuid4

from dagster_unified.errors import ConfigurationError, SinkError, SourceError
from dagster_unified.graph.connectors import Place
from dagster_unified.storage.object_store import is_connect

if TYPE_CHECKING:
    from collections.abc import Sequence

    from pyspark.sql import DataFrame, DataFrameReader
    from pyspark.sql.streaming.readwriter import DataStreamReader
    from upath import UPath

    Reader: TypeAlias = DataFrameReader | DataStreamReader

_FIELD = re.compile(r"\{[^}]*\}")
_SCHEME = re.compile(r"^[a-z][a-z0-9+.-]*://")
_SAME = {"s3a": "s3", "gcs": "gs", "abfss": "abfs"}
"""Other names of a protocol."""


def storage_path(path: str, what: str) -> UPath:
    """A local path or a URL as a `UPath`; raises `ConfigurationError` naming `what` where it is neither.

    Listings of a bucket are not cached: another process may have written there since.
    """
    from upath import UPath

    if not path or "\x00" in path:
        raise ConfigurationError(f"{what}: {path!r} is not a path")
    if _SCHEME.match(path) and re.search("^[^/]*:[^/]*@", path.partition("://")[2]):
        raise ConfigurationError(
            f"{what}: the path has a password, which logs and Dagster's UI would show; leave it out, and give it where"
            " the store looks for credentials (its environment variables, or storage_options)"
        )
    try:
        parsed = UPath(path, use_listings_cache=False) if _SCHEME.match(path) else UPath(path)
    except (ValueError, ImportError) as error:
        raise ConfigurationError(f"{what}: {path!r} cannot be used: {error}") from error
    if parsed.protocol == "file":
        return UPath(parsed.path)  # a file system's own path, which can be renamed and linked
    return parsed if _SCHEME.match(path) else parsed.expanduser().absolute()


def name_of(path: str, default: str) -> str:
    """A name for a path: its last meaningful piece, without suffix, patterns and a template's fields."""
    pieces = _FIELD.sub("*", path.partition("://")[2] or path).split("/")
    pieces[-1] = PurePosixPath(pieces[-1]).stem
    words = (re.sub(r"\*+", "_", piece).strip("_.-= ") for piece in reversed(pieces))
    return next((word for word in words if word and re.search(r"\w", word)), default)


def worker_path(path: str, what: str) -> UPath:
    """As `storage_path`, in a worker process: it needs universal-pathlib for a bucket only, and may lack it."""
    return cast("UPath", Path(path)) if path.startswith("/") else storage_path(path, what)


def for_spark(path: UPath) -> str:
    """The path for Spark.

    A local one starts with file://, whatever Spark's default file system is; one of S3 has Hadoop's scheme.
    """
    text = str(path)
    if path.protocol == "s3":
        return text.replace("s3://", "s3a://", 1)
    return text if _SCHEME.match(text) else f"file://{text}"


STRICT = {"ignoreMissingFiles": "false", "ignoreCorruptFiles": "false"}
"""Options of Spark's readers: a file that is gone or damaged is an error, whatever the session's settings say."""


_LITERAL = {"__globPaths__": "false"}
"""Options of Spark's readers that make a path literal. Connect loses them on the way to its server."""


def load(reader: DataFrameReader, paths: Sequence[UPath]) -> DataFrame:
    """Read files or folders; each path is literal, whatever characters it has.

    Raises `SourceError` for a path that Hadoop cannot read among several.
    """
    if len(paths) == 1:  # with several, Spark 4.3 reads all of them again for each that would be a pattern
        return load_one(reader.options(**STRICT), for_spark(paths[0]))
    return reader.options(**STRICT).load(list(map(as_pattern, paths)))


def load_one(reader: Reader, path: str) -> DataFrame:
    """Read one file or folder by its literal path for Spark; raises as `load` does."""
    if is_connect(reader):
        return reader.load(_literally(path))
    return reader.options(**_LITERAL).load(path)


def as_pattern(path: UPath) -> str:
    """The path for Spark's readers, which take patterns: it matches only itself, whatever characters it has."""
    return _literally(for_spark(path))


def _literally(text: str) -> str:
    local = text.removeprefix("file:") if text.startswith("file:") else ""
    if escaped(text) != text and ":" in local:
        raise SourceError(
            f"{text.removeprefix('file://')} has a colon and one of []{{}}?*\\ in it, and Hadoop finds such a path"
            " neither beside others nor through Spark Connect; rename its folder or the file"
        )
    return escaped(text)


def escaped(text: str) -> str:
    """A path or a part of it as a Hadoop pattern that matches only itself."""
    return re.sub(r"([\\{}\[\]*?])", r"\\\1", text)


def path_text(path: UPath) -> str:
    """The path without its scheme and without a slash at its end."""
    return str(path.path).rstrip("/") or "/"


def is_in_object_store(path: UPath) -> bool:
    """Whether a path is in a store of objects, which can be written and deleted, and not renamed."""
    return _SAME.get(path.protocol, path.protocol) in ("s3", "gs", "abfs", "az", "adl", "oss", "oci")


def is_local(path: UPath) -> bool:
    """Whether a path is on this machine's disks."""
    return getattr(path, "protocol", "") in ("", "file", "local")


def check_folder(path: UPath, sink: str) -> None:
    """Raise `SinkError` where a file has the name of the folder that a sink writes to."""
    if path.is_file():
        raise SinkError(
            f"sink '{sink}': {path} is a file, and the sink writes a folder; give it the path of a folder, or move the"
            " file away"
        )


def children(folder: UPath) -> dict[str, bool]:
    """The names in a folder, each with whether it is a folder; empty where there is no folder.

    An object store is asked once.
    """
    try:
        if is_local(folder):
            with os.scandir(getattr(folder, "path", folder)) as entries:
                return {entry.name: entry.is_dir() for entry in entries}
        listing = folder.fs.ls(folder.path, detail=True)
    except (FileNotFoundError, NotADirectoryError):
        return {}
    folder_path = path_text(folder)  # a bucket lists a folder in itself
    paths = {entry["name"].rstrip("/"): entry["type"] == "directory" for entry in listing}
    return {path.rpartition("/")[2]: is_folder for path, is_folder in paths.items() if path != folder_path}


def put(path: UPath, content: bytes, durable: bool = False) -> None:
    """Write a file so that it is there whole or not at all; with `durable` also after the machine has failed."""
    if not is_local(path):
        path.write_bytes(content)
        return
    path.parent.mkdir(parents=True, exist_ok=True)
    staged = path.parent / f".{path.name}.{uuid4().hex[:8]}"
    with open(staged.path, "wb") as file:
        file.write(content)
        if durable:
            file.flush()
            os.fsync(file.fileno())
    os.replace(staged.path, path.path)


def read_whole(path: UPath) -> bytes:
    """A file that another process may replace meanwhile, in its old or its new version.

    An object store is asked once: a file that is opened first would be lost where it is replaced before it is read.
    """
    if is_local(path):
        return path.read_bytes()
    data: bytes
    try:  # by one request: a newer s3fs asks for the size first where it may take a file in several
        data = path.fs.cat_file(path.path, max_concurrency=1)
    except TypeError:
        data = path.fs.cat_file(path.path)
    return data


def url(path: str) -> str:
    """A path or URL as in Spark's logs, with special characters percent-encoded."""
    return quote(path, safe="/:=+@,&$-_.!~*'()")


def place_of(path: UPath) -> str:
    """The one form of all paths that lead to a place: absolute, without `..`, links, a trailing slash or `file:`."""
    protocol = _SAME.get(path.protocol, path.protocol)
    if protocol in ("", "file", "local"):
        return os.path.realpath(path.path)
    return f"{protocol}://{posixpath.normpath(path.path).strip('/')}"


def folder_place(path: UPath) -> Place:
    """Return the identity of a folder."""
    place = place_of(path)
    return Place(place, place)


def size_of(path: UPath) -> int:
    """Bytes of all files below a path."""
    if path.is_file():
        return int(path.stat().st_size)
    return sum(sizes(path).values())


def is_data(path: str) -> bool:
    """Whether a path of Spark's Parquet output is that of a file with rows."""
    name = path.rpartition("/")[2]
    return name.endswith(".parquet") and not name.startswith((".", "_"))


def sizes(folder: UPath) -> dict[str, int]:
    """The bytes of each file below a folder, by relative path; empty where there is no folder.

    A store is asked for all at once. On a disk a file that goes meanwhile raises `FileNotFoundError`.
    """
    if is_local(folder):
        root = Path(folder.path)
        return {file.relative_to(root).as_posix(): file.stat().st_size for file in root.rglob("*") if not file.is_dir()}
    below = f"{folder.path.rstrip('/')}/"
    try:
        files = folder.fs.find(folder.path, detail=True)
    except FileNotFoundError:
        return {}
    return {path.partition(below)[2]: int(info["size"] or 0) for path, info in files.items() if below in path}


def remove_tree(path: UPath) -> None:
    """Remove a file or a folder with everything in it; does nothing where it is missing."""
    with contextlib.suppress(FileNotFoundError):  # another process may remove it as well
        path.fs.rm(path.path, recursive=True)
