"""What a STREAMING job has listed of a monitored folder, in chunks that Spark's file source reads one by one.

Spark's own source lists the whole folder in every micro-batch, keeps each name in its log for ever, and takes no
position from outside. So the library lists, and shows Spark only what is new:

    <folder>/chunks/_spark_metadata/<n>.compact    the chunks that are there, as the log of a file sink
    <folder>/chunks/<number>/                      a chunk: a folder to Spark, with its files as the log of a sink
    <folder>/names/<number>                        the names of the files in many chunks, up to that one

Where `<folder>` is in a bucket, `_spark_metadata` is in a folder of the driver's machine: Spark looks there a hundred
times a second, and a job that starts writes it anew.

A chunk is the "file" that Spark's source finds and logs; reading it, Spark takes its files from the log in it, and does
not list them again. One chunk is one micro-batch's: of two at once Spark would list the folders and find nothing. A
chunk never changes, so that an epoch that is run again, or gone back to, reads what it read. Each number is given once:
a process that was paused, and lists when the job has gone on elsewhere, is refused, and shows Spark no file twice.
"""

from __future__ import annotations

import re
import time
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from tempfile import TemporaryDirectory
from threading import RLock, Thread
from typing import TYPE_CHECKING

import msgspec

from dagster_unified.connectors.files.folder import File, Folder
from dagster_unified.errors import ConfigurationError, StageError
from dagster_unified.spark_internals import spark_log
from dagster_unified.storage import conditional
from dagster_unified.storage.object_store import is_connect
from dagster_unified.storage.paths import children, escaped, for_spark, is_local, path_text, put, remove_tree, url

if TYPE_CHECKING:
    from pyspark.sql import SparkSession
    from pyspark.sql.streaming.query import StreamingQuery
    from upath import UPath

PAUSE = 0.1
"""Seconds between two listings, at least; one that takes long has ten times as long after it."""

PAUSE_IN_BUCKET = 1.0
"""Seconds between two listings of a bucket, at least: each is paid for."""

_BRIEF = 0.05
"""Seconds of a listing for which the next epoch may wait."""

_LOG = "_spark_metadata"
_BLOCK = 256
"""Chunks whose names are put into one file when there are so many."""

_GUARD = "not-a-chunk-of-its-own.gz"
"""A file that cannot be read, which Spark would meet if it ever listed a chunk."""

_CHUNK = re.compile(r"/chunks/(\d{10})$")

_EARLIER = "earlier"
"""The file with the names that were read before there were chunks."""

_UTF8 = ("utf-8", "surrogateescape")


class Listing:
    """The chunks of one source of a job."""

    def __init__(
        self,
        spark: SparkSession,
        files: Folder,
        folder: UPath,
        read: Iterable[str],
        skip: Callable[[str], bool],
        at_most: int | None,
        watched: bool = True,
        index: UPath | None = None,
        check: Callable[[Sequence[str]], None] | None = None,
    ) -> None:
        """`index` is the folder in which Spark finds the chunks, if that is not where they are.

        Unless it is `watched`, all chunks are written at once, since nobody looks again. `check` gets the names of new
        files, and raises an error for one that cannot be read.
        """
        self.files, self.folder, self.watched = files, folder, watched
        self._spark = spark
        self._skip, self._at_most, self._whole, self._check = skip, at_most, not watched, check
        self._waiting: list[File] = []
        """Listed files that are in no chunk yet: a job that starts with another limit cuts them by that."""

        self._chunks = Chunks(folder, files.root, index)
        self._pause = PAUSE if files.local else PAUSE_IN_BUCKET
        self._known = set(read)
        self._known.update(self._chunks.names())
        self._shown = self._chunks.numbers()
        self._lock = RLock()
        self._due = self._took = 0.0
        self._looking: Thread | None = None
        self._ended = False
        self._failed: BaseException | None = None
        self._ids: dict[UPath, str | None] = {}
        self._logs: dict[UPath, list[UPath]] = {}
        """By the checkpoint of a query: its id, and the logs of its sources that read the chunks."""

        self.readers = 1
        """How many queries were given this listing's folder to read, at most."""

    def look(self) -> None:
        """List the folder, and show Spark the new files; of more than one chunk the first, and then one by one."""
        with self._lock:
            if self._waiting:
                self._add()
                return
            begun = time.monotonic()
            try:
                self._look()
            except BaseException:
                self.files.forget()
                raise
            finally:
                ended = time.monotonic()
                self._took = ended - begun
                self._due = ended + max(self._pause, 10 * self._took)

    def end(self) -> None:
        """List the folder for the last time."""
        with self._lock:
            if not self._ended:
                self._whole = True
                if self._waiting:
                    self.look()
                self.look()
                self._ended = True

    def look_between_epochs(self) -> None:
        """List the folder as an epoch ends, before Spark asks what the next one reads, unless that takes long.

        So the next epoch reads what came during this one. The next `look_beside` raises what goes wrong.
        """
        if not self._is_brief and not self._waiting:
            return
        try:
            self._look_if_taken()
        except BaseException as error:
            self._failed = error

    def look_beside(self, early: bool) -> None:
        """List the folder in a thread, if it is time to and Spark has taken all it was shown.

        So all files that come while Spark is busy are one chunk. `early` says that Spark will not ask for a while: then
        only a slow listing is started. Raises what went wrong the last time.
        """
        if self._failed is not None:
            failed, self._failed = self._failed, None
            raise failed
        if self._looking is not None:
            if self._looking.is_alive():
                return
            self._looking = None
        if not self._ended and time.monotonic() >= self._due and not (early and self._is_brief):
            self._looking = Thread(target=self._look_in_thread, daemon=True, name=f"list {self.files.root}")
            self._looking.start()

    def close(self) -> None:
        """Wait for a running listing."""
        if self._looking is not None:
            self._looking.join()

    def _look_in_thread(self) -> None:
        try:
            # a chunk that is listed early in an epoch leaves what comes later in it to the epoch after the next
            if self._is_brief and any(map(is_busy, self._running().values())):
                self._due = time.monotonic() + PAUSE
            elif not self._look_if_taken():  # which Spark's log says, wherever the input is
                self._due = time.monotonic() + (PAUSE if is_local(self.folder) else PAUSE_IN_BUCKET)
        except BaseException as error:
            self._failed = error

    def _look_if_taken(self) -> bool:
        with self._lock:
            if self._ended or not self._are_found():
                return False
            self._shown = []
            self.look()
            return True

    def all_taken(self) -> bool:
        """Whether the queries that read the chunks have found all of them; waits for a running listing."""
        with self._lock:
            return not self._waiting and self._are_found()

    def _are_found(self) -> bool:
        """Whether the queries have found all chunks that they were shown."""
        if not self._shown:
            return True
        last_found = self._last_found()
        return len(last_found) >= self.readers and min(last_found) >= self._shown[-1]

    def _last_found(self) -> list[int]:
        """The number of the last chunk found by each source of the queries that has found any."""
        running = self._running()
        if running.keys() - self._logs.keys() or sum(len(self._logs[path]) for path in running) < self.readers:
            self._logs = {path: list(_logs(path, self.folder)) for path in running}
        return [last_chunk_found(log, self.folder) for path in running for log in self._logs[path]]

    def _running(self) -> dict[UPath, StreamingQuery]:
        """The running queries of the job, by their checkpoints; the ids are looked up only once."""
        active = self._spark.streams.active
        running = _among(active, self._ids)
        if len(running) < self.readers and len(running) < len(active):
            self._ids = _query_ids(self.folder)
            running = _among(active, self._ids)
        return running

    @property
    def _is_brief(self) -> bool:
        return self._took <= _BRIEF

    def _look(self) -> None:
        new = self._unlisted()
        if self._check is not None:
            self._check([file.name for file in new])
        self._waiting = new
        self._known.update(file.name for file in self._waiting)
        self._add()

    def _add(self) -> None:
        """Write the next chunk of the waiting files, and show it to Spark."""
        files, size = self._waiting, self._at_most or max(len(self._waiting), 1)
        added = 0
        while added < len(files) and (self._whole or not added):
            self._shown.append(self._chunks.add(files[added : added + size], self.files.url_of))
            added += size
            self._waiting = files[added:]
        if added or not self._chunks.are_shown():
            self._chunks.show(self._shown)

    def _unlisted(self) -> list[File]:
        """The files that were not listed before, oldest first."""
        names = self.files.new(self._known)
        return sorted((f for f in names if not self._skip(f.name)), key=lambda file: (file.changed, file.name))


class Chunks:
    """The chunks in the folder of a source of a job, with files below a root."""

    def __init__(self, folder: UPath, root: str, index: UPath | None = None) -> None:
        self.folder, self.path = folder, folder / "chunks"
        self._log = (self.path if index is None else index) / _LOG
        self._below = f"{root}/"
        folders = self.path.iterdir() if self.path.exists() else ()
        self._numbers = sorted(int(path.name) for path in folders if path.name.isdigit() and _log_of(path).exists())

    def numbers(self) -> list[int]:
        """The numbers of the chunks."""
        return list(self._numbers)

    def add(self, files: Sequence[File], url_of: Callable[[str], str]) -> int:
        """Write a chunk, and return its number; raises `StageError` where another process took the number meanwhile."""
        number = self._last() + 1
        chunk = self._chunk(number)
        put(chunk / _GUARD, b"Spark reads one chunk at a time.")
        log = _log(_sink_log_entry(url_of(file.name), file.size, file.changed) for file in files)
        try:
            conditional.write(_log_of(chunk), log, None)
        except FileExistsError:
            raise StageError(
                f"{self.folder.parent.parent.name}: another process of this job has listed {self._below} meanwhile, so"
                " this one was paused, or that one is; it stops here, and the job goes on after its last epoch"
            ) from None
        self._numbers.append(number)
        if number % _BLOCK == _BLOCK - 1:
            names = self._names(number - _BLOCK + 1, number)
            put(self._block(number), zlib.compress("\0".join(names).encode(*_UTF8)))
        return number

    def names(self, until: int | None = None) -> Iterator[str]:
        """The names of the files in all chunks up to a number."""
        earlier = self.folder / "names" / _EARLIER
        if earlier.exists():
            yield from _unpacked(earlier)
        yield from self._names(0, self._last() if until is None else until)

    def are_shown(self) -> bool:
        """Whether Spark finds the chunks."""
        return bool(self._log.exists())

    def show(self, numbers: Iterable[int]) -> None:
        """Show Spark these chunks, and no others."""
        log = self._log
        files = log.iterdir() if log.exists() else ()
        versions = sorted(int(path.stem) for path in files if path.suffix == ".compact")
        entries = [_sink_log_entry(url(for_spark(self._chunk(number))), 0, number) for number in numbers]
        # a number that ends in 9 is Spark's for a file that stands for all before it
        put(log / f"{(versions[-1] if versions else -1) + 10}.compact", _log(entries))
        for version in versions[:-2]:
            (log / f"{version}.compact").unlink(missing_ok=True)

    def _names(self, first: int, last: int) -> Iterator[str]:
        number = first
        while number <= last:
            end = number + _BLOCK - 1
            if number % _BLOCK == 0 and end <= last and self._block(end).exists():
                yield from _unpacked(self._block(end))
                number = end + 1
            else:
                for entry in spark_log.entries(_log_of(self._chunk(number))):
                    yield spark_log.path_of(entry.path).removeprefix(self._below)
                number += 1

    def _last(self) -> int:
        return self._numbers[-1] if self._numbers else -1

    def _chunk(self, number: int) -> UPath:
        return self.path / f"{number:010d}"

    def _block(self, number: int) -> UPath:
        return self.folder / "names" / f"{number:010d}"


def _log_of(chunk: UPath) -> UPath:
    """The log of a chunk; with it the folder is a chunk."""
    return chunk / _LOG / "0"


def _logs(checkpoint: UPath, folder: UPath) -> Iterator[UPath]:
    """The logs of the file sources of a query that have read chunks of a folder."""
    for reader in spark_log.readers(checkpoint):
        if last_chunk_found(reader.log, folder) >= 0:
            yield reader.log


def last_chunk(folder: UPath) -> int:
    """The number of the last chunk in the folder of a source of a job; -1 where there is none."""
    return max((int(name) for name in children(folder / "chunks") if name.isdigit()), default=-1)


def last_chunk_found(log: UPath, folder: UPath) -> int:
    """The number of the last chunk of a folder that a file source has found; -1 where there is none."""
    below = f"{path_text(folder)}/chunks/"
    paths = [spark_log.path_of(entry.path) for entry in spark_log.newest(log)]
    chunks = [int(match[1]) for path in paths if path.startswith(below) and (match := _CHUNK.search(path))]
    return max(chunks, default=-1)


def names_until(reader: spark_log.Reader, root: str) -> set[str]:
    """The names of the files below a root that a file source has read, as far as Spark has logged it."""
    paths = {spark_log.path_of(entry.path) for entry in spark_log.files_found(reader.log, reader.logged)}
    chunks = {int(match[1]): path for path in paths if (match := _CHUNK.search(path))}
    names = {path.removeprefix(f"{root}/") for path in paths.difference(chunks.values())}
    if chunks:
        from upath import UPath  # slow to load, and a pipeline is built without it

        last = max(chunks)
        folder = UPath(chunks[last], protocol=reader.log.protocol, **reader.log.storage_options).parent.parent
        names.update(Chunks(folder, root).names(last))
    return names


def is_busy(query: StreamingQuery) -> bool:
    """Whether Spark is working on an epoch, and not only asking whether there is anything to read."""
    status = query.status
    return bool(status["isTriggerActive"] and status["isDataAvailable"])


def _query_ids(folder: UPath) -> dict[UPath, str | None]:
    """The queries of the job that a source's folder belongs to: their ids, by their checkpoints."""
    return {path: spark_log.query_id(path) for path in _checkpoints(folder)}


def _among(active: Iterable[StreamingQuery], ids: Mapping[UPath, str | None]) -> dict[UPath, StreamingQuery]:
    """Those of the active queries that have one of these ids, by their checkpoints."""
    by_id = {query.id: query for query in active}
    return {path: by_id[number] for path, number in ids.items() if number in by_id}


def _checkpoints(folder: UPath) -> list[UPath]:
    """The checkpoints of the queries of the job that a source's folder belongs to."""
    spark = folder.parent.parent / "spark"
    return [spark / name for name, is_folder in children(spark).items() if is_folder]


def _unpacked(file: UPath) -> list[str]:
    return zlib.decompress(file.read_bytes()).decode(*_UTF8).split("\0")


def _log(entries: Iterable[str]) -> bytes:
    return "\n".join(["v1", *entries]).encode()


def _sink_log_entry(url: str, size: int, changed: int) -> str:
    status = {
        "path": url,
        "size": size,
        "isDir": False,
        "modificationTime": changed,
        "blockReplication": 1,
        "blockSize": 1 << 25,
        "action": "add",
    }
    return msgspec.json.encode(status).decode()


_listings: dict[str, Listing] = {}
"""By the folder of a source of a job: the listings that queries read in this process."""

_indexes: dict[str, TemporaryDirectory[str]] = {}
"""By a source's folder in a bucket: the folder in which Spark finds the chunks."""

_starting = RLock()
"""Held while a query starts: no other query's epoch may use a listing that is about to be replaced."""


def show(
    spark: SparkSession,
    folder: UPath,
    files: Folder,
    read: Iterable[str],
    skip: Callable[[str], bool],
    at_most: int | None,
    watch: bool,
    check: Callable[[Sequence[str]], None] | None = None,
) -> str:
    """List for a query that is about to start; returns the path that Spark reads.

    `read` and `skip` tell what was read before the job began; `check` raises where files cannot be read; with `watch`
    the folder is listed again whenever `look` is called for the job.
    """
    key = path_text(folder)
    with _starting:
        before = _listings.pop(key, None)
        if before is not None:
            before.close()
        running = _among(spark.streams.active, _query_ids(folder))
        for checkpoint in (path for path in _checkpoints(folder) if path not in running):
            for reader in spark_log.readers(checkpoint):
                paths = [spark_log.path_of(entry.path) for entry in spark_log.newest(reader.log)]
                if any(path.startswith((f"{key}/chunks/", f"{files.root}/")) for path in paths):
                    spark_log.forget_unlogged(reader)
        if not running:
            _begin(folder, files)
        index = _index(spark, key, folder, bool(running))
        listing = Listing(spark, files, folder, read, skip, at_most, watch, index, check)
        listing.readers += before.readers if before is not None and running else 0
        listing.look()
        _listings[key] = listing
        return for_spark(index)


def _index(spark: SparkSession, key: str, folder: UPath, is_read: bool) -> UPath:
    """The folder in which Spark finds the chunks.

    Of a folder in a bucket, and of one that would be a pattern to Spark, which then looks for no log, it is on the
    driver's machine, if that is this.
    """
    from upath import UPath  # slow to load, and a pipeline is built without it

    is_odd = escaped(key) != key
    if is_odd and is_connect(spark):
        raise ConfigurationError(
            f"the checkpoint directory {folder.parent.parent} has one of []{{}}?*\\ in its path, which Spark takes for"
            " a pattern through Connect; give it another path"
        )
    if is_connect(spark) or (is_local(folder) and not is_odd):
        return folder / "chunks"
    if not is_read and key in _indexes:
        _indexes.pop(key).cleanup()
    if key not in _indexes:
        _indexes[key] = TemporaryDirectory(prefix="dagster-unified-")
    return UPath(_indexes[key].name)


def _begin(folder: UPath, files: Folder) -> None:
    """Start without chunks, unless a query has read some.

    What a query has read of the folder itself, as earlier versions of the library did, counts as read.
    """
    if any(log for checkpoint in _checkpoints(folder) for log in _logs(checkpoint, folder)):
        return
    remove_tree(folder / "chunks")
    remove_tree(folder / "names")
    below = f"{files.root}/"
    logs = [reader for checkpoint in _checkpoints(folder) for reader in spark_log.readers(checkpoint)]
    paths = [
        spark_log.path_of(entry.path) for reader in logs for entry in spark_log.files_found(reader.log, reader.logged)
    ]
    names = [path.removeprefix(below) for path in paths if path.startswith(below)]
    if names:
        put(folder / "names" / _EARLIER, zlib.compress("\0".join(names).encode(*_UTF8)))


def look(job: UPath, now: bool = False, early: bool = False) -> None:
    """List the monitored folders of a job's sources, where it is time to; with `now` always, and before it returns.

    `early` says that Spark will not ask for a while.
    """
    for listing in _watched_by(job):
        if now:
            listing.look()
        else:
            listing.look_beside(early)


def end(job: UPath) -> None:
    """List the monitored folders of a job's sources for the last time: files that come later are not read."""
    for listing in _watched_by(job):
        listing.end()


def all_taken(job: UPath) -> bool:
    """Whether Spark has planned to read everything that was listed for a job."""
    return all(listing.all_taken() for listing in _of_job(job))


def look_between_epochs(job: UPath) -> None:
    """List the monitored folders of a job's sources, as an epoch of one of its queries ends."""
    with _starting:
        for listing in _watched_by(job):
            listing.look_between_epochs()


def _watched_by(job: UPath) -> list[Listing]:
    return [listing for listing in _of_job(job) if listing.watched]


def _of_job(job: UPath) -> list[Listing]:
    below = f"{path_text(job)}/"
    known = dict(_listings)  # other threads change it
    return [listing for key, listing in known.items() if key.startswith(below)]
