"""What Spark's file source keeps in a query's checkpoint: a log of what it has read, and its offset in each epoch.

Spark 4.3 (`CompactibleFileStreamLog`, `FileStreamSourceLog`): `sources/<n>/<id>` has a line of JSON for each file that
the source has found for one micro-batch, after a first line with a version; now and then `<id>.compact` has those of
all before it as well, and files that it stands for may be gone. The offset of an epoch is the id that it read up to.
"""

from __future__ import annotations

import contextlib
import re
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple
from urllib.parse import unquote

import msgspec

from dagster_unified.errors import StateError
from dagster_unified.storage.paths import children, put, read_whole

if TYPE_CHECKING:
    from upath import UPath

_LOG = re.compile(r"(\d+)(\.compact)?")


class FoundFile(msgspec.Struct, frozen=True, rename={"batch": "batchId"}):
    """A path that the source has found, as a URL, and the id that it was found for."""

    path: str
    batch: int = -1


class Offset(msgspec.Struct, frozen=True, rename={"id": "logOffset"}):
    """The offset of a file source."""

    id: int


class Reader(NamedTuple):
    """A file source of a query: its log, and up to which id Spark has logged an epoch, -1 before the first."""

    log: UPath
    logged: int


def offset_of(text: str | None) -> int:
    """Return the id in an offset, -1 where there is none; raises `StateError` where it is not of a file source."""
    if text is None or text.strip() == "-":
        return -1
    try:
        return msgspec.json.decode(text, type=Offset).id
    except msgspec.DecodeError:
        raise StateError(f"{text[:200]} is not an offset of Spark's file source; restore the checkpoint") from None


def files_found(log: UPath, until: int | None) -> list[FoundFile]:
    """Return what a file source found up to and with an id, or everything."""
    files = _files(log)
    last = max(files, default=-1) if until is None else until
    compact = [number for number, name in files.items() if name.endswith(".compact")]
    begin = max((number for number in compact if number <= last), default=0)
    wanted = [*range(begin, last + 1)]
    if any(number not in files for number in wanted):  # one that was written later stands for them
        wanted = [number for number in compact if number > last][:1]
        if not wanted:
            raise StateError(f"Spark's log of a file source in {log} is not whole; restore the checkpoint from a copy")
    everything = [entry for number in wanted for entry in entries(log / files[number])]
    return [entry for entry in everything if entry.batch <= last]


def newest(log: UPath) -> list[FoundFile]:
    """Return what a file source found last, and perhaps what it found before."""
    files = _files(log)
    for number in sorted(files, reverse=True):  # one that was taken back leaves a file without entries
        those = entries(log / files[number])
        if those:
            return those
    return []


def query_id(checkpoint: UPath) -> str | None:
    """Return the id of the query that a checkpoint is of."""
    try:
        return str(msgspec.json.decode(read_whole(checkpoint / "metadata"))["id"])
    except FileNotFoundError:
        return None


def offsets_of_sources(entry: Path | UPath) -> list[str]:
    """Return the offset of each source in an epoch's entry in a query's log of offsets, in the order of the sources."""
    text = entry.read_text() if isinstance(entry, Path) else read_whole(entry).decode()
    return text.splitlines()[2:]  # after the log's version and the epoch's own settings


def readers(checkpoint: UPath) -> list[Reader]:
    """Return the file sources of a query, and what Spark has logged of them."""
    folder, offsets = checkpoint / "sources", checkpoint / "offsets"
    names = [name for name in children(folder) if name.isdigit()]
    if not names:
        return []
    epochs = _files(offsets)
    lines = offsets_of_sources(offsets / epochs[max(epochs)]) if epochs else []
    readers = []
    for number in sorted(map(int, names)):
        log = folder / str(number)
        if not _files(log):
            continue
        with contextlib.suppress(StateError):  # it is not of a file source
            newest(log)
            readers.append(Reader(log, offset_of(lines[number] if number < len(lines) else None)))
    return readers


def forget_unlogged(reader: Reader) -> None:
    """Forget what the source has found for a micro-batch that Spark did not come to log.

    Spark would read it together with what the source finds next.
    """
    files = _files(reader.log)
    number = max(files, default=-1)
    if number != reader.logged + 1:
        return
    file = reader.log / files[number]
    lines = [msgspec.json.encode(entry).decode() for entry in entries(file) if entry.batch != number]
    put(file, "\n".join(["v1", *lines]).encode())
    (reader.log / f".{file.name}.crc").unlink(missing_ok=True)


def path_of(url: str) -> str:
    """Return the path of a file, without its scheme, as Spark's log has it."""
    return unquote(re.sub(r"^[a-z][a-z0-9+.-]*:/+", "/" if url.startswith("file:") else "", url))


def _files(folder: UPath) -> dict[int, str]:
    names = children(folder).items()
    matches = [match for name, is_folder in names if not is_folder and (match := _LOG.fullmatch(name))]
    # one that stands for all before it is written in the place of a plain one
    return {int(match[1]): match[0] for match in sorted(matches, key=lambda match: match[2] or "")}


def entries(file: UPath) -> list[FoundFile]:
    """Return the entries of one file of a log, of a file source or of a file sink."""
    lines = read_whole(file).splitlines()
    try:
        entries = [msgspec.json.decode(line, type=FoundFile) for line in lines[1:]]
    except msgspec.DecodeError:
        entries = None
    if entries is None or lines[:1] != [b"v1"]:
        raise StateError(f"{file} is not a log of Spark's file source in a version that is known, v1")
    return entries
