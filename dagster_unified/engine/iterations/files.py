"""The files of an iteration: records and state that workers write once, and the folder that they are in."""

from __future__ import annotations

import atexit
import contextlib
import functools
import os
import shutil
import tempfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Self, TypeVar
from uuid import uuid4

import msgspec
import pyarrow as pa

from dagster_unified.errors import IntermediateLostError, LeaseLostError
from dagster_unified.graph.fingerprint import digest
from dagster_unified.operators.drivers.group import MemoryStore
from dagster_unified.operators.iteration import InputBuffer, Message
from dagster_unified.operators.operator import PageStore
from dagster_unified.state.tables import open_input, open_output
from dagster_unified.storage import conditional
from dagster_unified.storage.paths import is_local, path_text, put, read_whole, storage_path

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
        """Return where a file that an epoch reads is mapped from; it is copied here first where it is not local.

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
        """Make a file that was written here reachable for all workers."""
        if not self.is_shared:
            with open(os.path.join(self.here, name), "rb") as copy, open_output(f"{self.folder}/{name}") as target:
                shutil.copyfileobj(copy, target, 1 << 20)

    def sizes(self) -> dict[str, int]:
        """Return the files that there are, with their bytes."""
        if self.is_shared:
            with os.scandir(self.here) as entries:
                return {entry.name: entry.stat().st_size for entry in entries if entry.is_file()}
        try:
            entries = self.root.fs.ls(self.root.path, detail=True)
        except FileNotFoundError:
            return {}
        return {entry["name"].rpartition("/")[2]: entry["size"] or 0 for entry in entries}

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
    """Return a folder as it goes to workers."""
    return path_text(folder) if is_local(folder) else str(folder)


def forget_copies(folder: str) -> None:
    """Remove this process's copies of an iteration that has ended."""
    place = IterationFolder(folder)
    if not place.is_shared:
        shutil.rmtree(place.here, ignore_errors=True)


@functools.cache
def _scratch() -> str:
    """Return a folder for copies: Spark's own in its workers, else one that is removed with the process."""
    of_spark = os.environ.get("SPARK_LOCAL_DIRS", "").split(",")[0]
    if of_spark:
        return of_spark
    folder = tempfile.mkdtemp(prefix="iterations")
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    return folder


_ALIGNED = 64
"""Bytes at whose multiples Arrow wants its buffers."""

_ROWS = 65_536
"""Rows that are put together into one block, as far as there are so many."""

_MOST_FILES = 64
"""Files that a subtask's state may be spread over, before it is written anew into one."""


class Block(msgspec.Struct, frozen=True, array_like=True):
    """The place of some bytes."""

    file: str
    offset: int
    size: int


class StoredMessage(msgspec.Struct, frozen=True, array_like=True):
    """A message in a file: the buffer, of it the key group or subtask, where the records are, and how many."""

    buffer: int
    target: int
    block: Block
    rows: int


class EpochFile:
    """The file that a task writes in one level of an epoch."""

    def __init__(self, folder: str, name: str, epoch: int = 0) -> None:
        self.name = f"{name}-{uuid4().hex[:12]}"
        self._folder, self._epoch = IterationFolder(folder), epoch
        self.size = 0
        """The bytes that were written."""

        self._path = os.path.join(self._folder.here, self.name)
        try:
            self._file = open(self._path, "wb")  # noqa: SIM115  # closed in __exit__
        except FileNotFoundError as error:
            raise _lost(folder, self.name) from error

    def __enter__(self) -> Self:
        return self

    def __exit__(self, failed: type[BaseException] | None, *_: object) -> None:
        self._file.close()
        if failed is not None or not self.size:
            os.unlink(self._path)
        else:
            self._folder.publish(self.name)
            self._folder.used(self.name, self._epoch)

    def put(self, data: bytes | pa.Buffer) -> Block:
        """Write a block."""
        size = len(data)
        block = Block(self.name, self.size, size)
        self._file.write(data)
        padding = -size % _ALIGNED
        self._file.write(b"\0" * padding)
        self.size += size + padding
        return block

    def send(self, sent: Iterable[Message]) -> list[StoredMessage]:
        """Write records, those for one place together."""
        waiting: dict[tuple[int, int], list[pa.RecordBatch]] = {}
        for buffer, target, batch in sent:
            if batch.num_rows:
                waiting.setdefault((buffer, target), []).append(batch)
        return [
            StoredMessage(buffer, target, self.put(batch.serialize()), batch.num_rows)
            for (buffer, target), batches in waiting.items()
            for batch in pa.Table.from_batches(batches).combine_chunks().to_batches(max_chunksize=_ROWS)
        ]


INPUT = "input-"
"""The prefix of files that are read in each epoch."""


class MappedFiles:
    """The files of an iteration as one subtask reads them in an epoch, mapped into memory until it is over."""

    def __init__(self, folder: str, epoch: int = 0) -> None:
        self.folder = IterationFolder(folder)
        self._epoch = epoch
        self._mapped: dict[str, pa.Buffer] = {}

    def bytes_of(self, block: Block) -> pa.Buffer:
        """Return a block; raises `IntermediateLostError` where it is not there."""
        whole = self._mapped.get(block.file) or self._mapped.setdefault(block.file, self._map(block.file))
        if whole.size < block.offset + block.size:
            raise _lost(self.folder.folder, block.file)
        return whole.slice(block.offset, block.size)

    def _map(self, file: str) -> pa.Buffer:
        try:
            path = self.folder.path(file, self._epoch)
            return _kept_mapped(path) if file.startswith(INPUT) else _mapped(path)
        except FileNotFoundError as error:
            raise _lost(self.folder.folder, file) from error

    def batch_of(self, message: StoredMessage, schema: pa.Schema) -> pa.RecordBatch:
        """Return the records of a message."""
        return pa.ipc.read_record_batch(self.bytes_of(message.block), schema)

    def by_buffer(
        self, messages: Iterable[StoredMessage], buffers: Sequence[InputBuffer]
    ) -> dict[int, list[tuple[int, pa.RecordBatch]]]:
        """Return the records of messages, by buffer."""
        batches: dict[int, list[tuple[int, pa.RecordBatch]]] = {}
        for message in messages:
            batches.setdefault(message.buffer, []).append(
                (message.target, self.batch_of(message, buffers[message.buffer].schema))
            )
        return batches


def _mapped(path: str) -> pa.Buffer:
    with pa.memory_map(path) as file:
        return file.read_buffer()


@functools.lru_cache(maxsize=16)
def _kept_mapped(path: str) -> pa.Buffer:
    """As `_mapped`, for files that a process reads in every epoch; no two files have the same name."""
    return _mapped(path)


def _lost(folder: str, file: str) -> IntermediateLostError:
    shared = "" if "://" in folder else ", and make sure that all workers share the folder, or use a bucket"
    return IntermediateLostError(
        f"the file '{file}' of an iteration is gone from {folder}, or is not whole; run the stage again{shared}"
    )


Pages = dict[tuple[int, int, int], Block]
"""Where the pages of a subtask's state are: by pass, key group and page."""

StoredPages = list[tuple[int, int, int, Block]]


class PagedStates:
    """The state of a subtask in one level: what was committed, and what an epoch writes."""

    def __init__(self, files: MappedFiles, committed: Block | None) -> None:
        self._files = files
        self._pages: Pages = {}
        self._new: dict[tuple[int, int, int], bytes] = {}
        self.changed = False
        if committed is not None:
            stored = msgspec.msgpack.decode(files.bytes_of(committed).to_pybytes(), type=StoredPages)
            self._pages = {(pass_number, group, page): block for pass_number, group, page, block in stored}

    def group(self, pass_number: int, group: int) -> PageStore:
        return _Group(self, pass_number, group)

    def groups(self, pass_number: int) -> Sequence[int]:
        return sorted({group for number, group, _ in (*self._pages, *self._new) if number == pass_number})

    def stores(self, pass_number: int) -> Iterator[tuple[int, MemoryStore]]:
        """Yield all pages of each group of a pass, one group after another."""
        by_group: dict[int, list[int]] = {}
        for number, group, page in (*self._pages, *self._new):
            if number == pass_number:
                by_group.setdefault(group, []).append(page)
        for group in sorted(by_group):
            pages = {page: self.read((pass_number, group, page)) for page in by_group[group]}
            yield group, MemoryStore({page: data for page, data in pages.items() if data is not None})

    def read(self, place: tuple[int, int, int]) -> bytes | None:
        """Return a page."""
        new = self._new.get(place)
        if new is not None:
            return new
        block = self._pages.get(place)
        return None if block is None else self._files.bytes_of(block).to_pybytes()

    def write(self, place: tuple[int, int, int], data: bytes) -> None:
        """Replace a page when the epoch is committed."""
        self._new[place] = data
        self.changed = True

    def remove(self, place: tuple[int, int, int]) -> None:
        """Remove a page when the epoch is committed."""
        self._new.pop(place, None)
        self.changed = self._pages.pop(place, None) is not None or self.changed

    def save(self, file: EpochFile) -> tuple[Block, list[str]]:
        """Write new pages, and an index of all: return its block, and the files that hold pages."""
        for place in list(self._pages) if self._is_scattered() else ():
            if place not in self._new:
                self._pages[place] = file.put(self._files.bytes_of(self._pages[place]))
        for place, data in self._new.items():
            self._pages[place] = file.put(data)
        stored = [(*place, block) for place, block in self._pages.items()]
        files = sorted({block.file for block in self._pages.values()})
        return file.put(msgspec.msgpack.encode(stored)), files

    def _is_scattered(self) -> bool:
        """Return whether most bytes of its files are out of date, or the files are many."""
        files = {block.file for block in self._pages.values()}
        if len(files) > _MOST_FILES:
            return True
        needed = sum(block.size for block in self._pages.values())
        return len(files) > 1 and sum(_size(self._files.folder.here, file) for file in files) > 4 * needed + (1 << 20)


def stands(sizes: Mapping[str, int], blocks: Iterable[Block]) -> bool:
    """Return whether files of these sizes hold all of some blocks."""
    return all(sizes.get(block.file, 0) >= block.offset + block.size for block in blocks)


def _size(folder: str, file: str) -> int:
    try:
        return os.stat(os.path.join(folder, file)).st_size
    except FileNotFoundError:
        return 0


class _Group:
    def __init__(self, states: PagedStates, pass_number: int, group: int) -> None:
        self._states, self._pass_number, self._group = states, pass_number, group

    def read_page(self, number: int) -> bytes | None:
        return self._states.read((self._pass_number, self._group, number))

    def write_page(self, number: int, data: bytes) -> None:
        self._states.write((self._pass_number, self._group, number), data)

    def remove_page(self, number: int) -> None:
        self._states.remove((self._pass_number, self._group, number))
