"""Sources that cannot be asked for a record twice: a Python generator, a socket.

Their records are appended to a log in the checkpoint directory before anything processes them (write-ahead log, section
3.3 of the Flink paper). The log can be read again, so results are exactly-once from there on.

The log is a folder of files; a job that starts begins a new file. A file has frames, each an Arrow record batch; its
index has an entry for each frame that is whole and on disk. A file is deleted when every position from which the
deployment could go on is after it; the last entry of its index stays, so that a position from elsewhere that needs the
file is an error and not a gap. Knows the protocol of splits and where a job keeps Spark's logs; not who reads.
"""

from __future__ import annotations

import contextlib
import copy
import logging
import os
import queue
import socket
import struct
import threading
import time
from abc import abstractmethod
from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator, Sequence
from datetime import timedelta
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO, Generic, Self
from uuid import uuid4

import msgspec
import pyarrow as pa

from dagster_unified.connectors.protocol.frame import Malformed
from dagster_unified.connectors.protocol.positions import Offsets, Position
from dagster_unified.connectors.protocol.splits import SplitSource
from dagster_unified.errors import PipelineError, StageError, StateError, UnsupportedError
from dagster_unified.graph.connectors import Boundedness
from dagster_unified.operators.functions.type_variables import Out
from dagster_unified.operators.time import checked_span
from dagster_unified.records import record_type
from dagster_unified.spark_internals import spark_log
from dagster_unified.storage.paths import is_local

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession
    from typing_extensions import TypeForm
    from upath import UPath

_logger = logging.getLogger(__name__)

_ENTRY = struct.Struct("<QQ")
"""An entry of an index: the records and the bytes of the file up to the end of a frame."""

_MOST = 50_000
"""Records after which a frame ends."""

_FILE_BYTES = 64 << 20
"""Bytes after which a new file begins."""

_WAITING = 200_000
"""Groups of records that may wait to be written; then `receive` waits."""

_WAIT = 0.1
"""Seconds after which a waiting thread checks whether to end."""

_LOOK = 10.0
"""Seconds between two searches for unneeded files."""

_END_SECONDS = 20.0
"""Seconds that a stopping job waits for received records to be on disk."""

Split = tuple[str, int, int]
"""A file, its first record to read, and the record after the last."""


class WrittenAheadSource(SplitSource[Out]):
    """A source whose records come once. Only STREAMING reads it; it does not end.

    A connector implements `receive`, which a thread of the driver calls when a job starts. Its records are on disk, and
    part of every savepoint, at most about `flush_every` later; only what comes in between is lost with the driver. An
    error of `receive` fails the job, and the restart strategy starts it again.

    The log lies in the checkpoint directory, which has to be on a disk that the driver and all workers see. Its files,
    of 64 MB, are deleted when neither the job's checkpoint nor any of its savepoints needs them.
    """

    boundedness = Boundedness.UNBOUNDED
    flush_every: timedelta = timedelta(milliseconds=100)
    _log: str | None = None

    def has_present(self) -> bool:
        return False

    def until(self, position: Position) -> Self:
        raise UnsupportedError(
            f"source '{self.name}' ({self.describe()}) cannot stop where another job has stopped: its records came to"
            " that job alone"
        )

    @abstractmethod
    def receive(self) -> Iterable[Out]:
        """Yield the records, as they come."""

    def receive_groups(self) -> Iterable[Sequence[Out]]:
        """The records in groups; the log has all records of a group or none. By default each record is a group."""
        return ((record,) for record in self.receive())

    def on_logged(self, records: int) -> None:
        """The first `records` records are on disk: acknowledge them to a system that needs it.

        Called in another thread than `receive`, on the same object, which is a copy of the author's. An error fails the
        job.
        """

    def stop_receiving(self) -> None:
        """The job stops, or cannot write its log: end `receive`, which may be waiting.

        By default `receive` ends when its next record comes. Called as `on_logged` is.
        """

    @property
    def origin(self) -> str:
        return f"the log of {self.describe()}"

    def read_stream(self, spark: SparkSession, folder: UPath) -> DataFrame:
        if not is_local(folder):
            raise UnsupportedError(
                f"source '{self.name}': {self.describe()} cannot be read twice, so its records are written to a log in"
                f" the checkpoint directory, which an object store such as {folder} cannot append to; set"
                " execution.checkpointing.dir to a folder on a disk, or send the records through Kafka"
            )
        log = Path(str(folder / "log"))
        with _starting:
            receiver = _receivers.get(log)
            if receiver is None or not receiver.receives(self):
                if receiver is not None:
                    receiver.end()
                _receivers[log] = _Receiver(self, log)
                _receivers[log].start()
        return _Log(self, str(log)).from_log(spark, folder)

    def from_log(self, spark: SparkSession, folder: UPath) -> DataFrame:
        """The stream of the log's records."""
        return super().read_stream(spark, folder)

    def newest(self) -> Offsets:
        log = self._folder()
        failed = log / "failed"
        if failed.exists():
            raise StageError(f"source '{self.name}': {self.describe()} has failed: {failed.read_text()}")
        return {file.stem: _last_entry(file)[0] for file in sorted(log.glob("*.index"))}

    def oldest(self) -> Offsets:
        indices = sorted(self._folder().glob("*.index"))
        return {file.stem: 0 if file.with_suffix(".log").exists() else _last_entry(file)[0] for file in indices}

    def available(self, since: Offsets) -> dict[str, int]:
        available = super().available(since)
        for name in sorted(available.keys() - since.keys()):  # they have come after the position
            if available[name]:
                raise self._gone(name, 0)
        return available

    def splits(self, start: Offsets, end: Offsets) -> Sequence[Split]:
        splits = [(file, start[file], last) for file, last in sorted(end.items()) if last > start[file]]
        for name, first, _ in splits:
            if not (self._folder() / f"{name}.log").exists():
                raise self._gone(name, first)
        return splits

    def read_split(self, split: Split) -> Iterator[pa.RecordBatch | Malformed]:
        name, start, end = split
        log = self._folder()
        entries = list(_ENTRY.iter_unpack((log / f"{name}.index").read_bytes()[: _whole(log / f"{name}.index")]))
        first = bisect_right(entries, start, key=lambda entry: entry[0])
        records, position = entries[first - 1] if first else (0, 0)
        with (log / f"{name}.log").open("rb") as file:
            file.seek(position)
            for ends_records, ends_bytes in entries[first:]:
                if records >= end:
                    return
                frame = file.read(ends_bytes - position)
                batch = pa.ipc.read_record_batch(pa.py_buffer(frame), self.records.schema)
                yield batch.slice(max(0, start - records), min(end, ends_records) - max(start, records))
                records, position = ends_records, ends_bytes

    def _gone(self, name: str, first: int) -> StateError:
        return StateError(
            f"source '{self.name}': {self.origin} has no longer what came after record {first} of file {name},"
            " since no checkpoint or savepoint in its checkpoint directory needed it; go on from a later"
            " savepoint, or start without state"
        )

    def _folder(self) -> Path:
        if self._log is None:
            raise UnsupportedError(f"source '{self.name}': {self.describe()} is read by STREAMING only")
        return Path(self._log)


class _Log(WrittenAheadSource[Out]):
    """The part of a source that travels to Spark's processes: its description and log, but nothing that receives."""

    def __init__(self, source: WrittenAheadSource[Out], log: str) -> None:
        self.name, self.kind, self.records, self.resume_position = (
            source.name,
            source.kind,
            source.records,
            source.resume_position,
        )
        self.max_records_per_trigger = source.max_records_per_trigger
        self.partition_columns, self._watermarks = source.partition_columns, source._watermarks
        self._description, self._log = source.describe(), log

    def describe(self) -> str:
        return self._description

    def receive(self) -> Iterable[Out]:
        raise NotImplementedError


class GeneratorSource(WrittenAheadSource[Out]):
    """The records that a function yields, called once on the driver when a STREAMING job starts. Unbounded.

    For a source without a connector that cannot be asked again, such as a client's subscription. A restarted job calls
    the function again.

    Raises `PipelineError` for something that is no function.

    Examples:
        >>> ticks = pipeline.from_source(GeneratorSource(lambda: iter(range(3)), int, name="ticks"))
        >>> collect(ticks, "STREAMING", {"ticks": [1, 2]})
        [1, 2]
    """

    kind = "generator"

    def __init__(
        self,
        function: Callable[[], Iterable[Out]],
        record: TypeForm[Out],
        name: str | None = None,
        flush_every: timedelta = timedelta(milliseconds=100),
    ) -> None:
        self.name = name or getattr(function, "__name__", "generator").strip("<>")
        if not callable(function):
            raise PipelineError(f"source '{self.name}': expected a function that yields records, got {function!r}")
        checked_span(f"source '{self.name}': flush_every", flush_every, 0)
        self.function, self.flush_every = function, flush_every
        self.records = record_type(record, f"source '{self.name}'")

    def describe(self) -> str:
        return f"what {self.name} yields"

    def receive(self) -> Iterable[Out]:
        return self.function()


class SocketSource(WrittenAheadSource[str]):
    """Lines of UTF-8 text from a TCP server, as Flink's `socketTextStream`; for trying things out. Unbounded.

    Only STREAMING reads it. Where the server closes the connection, the job fails, and its restart strategy decides.

    Examples:
        >>> lines = pipeline.from_source(SocketSource("127.0.0.1", 9999, name="lines"))
        >>> collect(lines.map(str.upper, str), "STREAMING", {"lines": ["a"]})
        ['A']
    """

    kind = "socket"
    _connection: socket.socket | None = None

    def __init__(self, host: str, port: int, name: str = "socket") -> None:
        self.host, self.port, self.name = host, port, name
        self.records = record_type(str, f"source '{name}'")

    def describe(self) -> str:
        return f"lines from {self.host}:{self.port}"

    def receive(self) -> Iterator[str]:
        with socket.create_connection((self.host, self.port), timeout=10) as connection:
            connection.settimeout(None)
            self._connection = connection
            with connection.makefile("r", encoding="utf-8", errors="replace", newline="\n") as lines:
                for line in lines:
                    yield line.rstrip("\r\n")
        raise ConnectionError("the server has closed the connection")

    def stop_receiving(self) -> None:
        if self._connection is not None:
            with contextlib.suppress(OSError):  # it may be closed already
                self._connection.shutdown(socket.SHUT_RDWR)


_starting = threading.Lock()
_receivers: dict[Path, _Receiver[Any]] = {}
"""This process's receivers, by log: several queries of a job read one source."""


def end(job: UPath) -> None:
    """Let the sources of a job receive nothing more, and write what they have received."""
    with _starting:
        ended = _receivers_of(job)
        for log in ended:
            del _receivers[log]
    for receiver in ended.values():
        receiver.end()


def look(job: UPath) -> None:
    """Delete the files that neither a job's checkpoint nor its savepoints need, where it is time to."""
    for receiver in _receivers_of(job).values():
        receiver.look(Path(str(job)))


def _receivers_of(job: UPath) -> dict[Path, _Receiver[Any]]:
    """A job's receivers, by log."""
    known = dict(_receivers)
    return {log: receiver for log, receiver in known.items() if is_local(job) and log.is_relative_to(str(job))}


def delete_unneeded(log: Path, job: Path, writing: str) -> None:
    """Delete the files of a log that neither a job's checkpoint nor its savepoints need, except the file `writing`.

    A position that does not name a file is from before the file, and needs all of it. A query that has read none of the
    log's files reads another source.
    """
    indices = sorted(log.glob("*.index"))
    files = {index: index.with_suffix(".log") for index in indices if index.stem != writing}
    states = [*job.glob("spark/*"), *job.glob("savepoints/*/spark/*")]
    if not states or not any(file.exists() for file in files.values()):
        return
    known = {index.stem for index in indices}
    positions = chain.from_iterable(_oldest_positions(state) for state in states)
    read = [position for position in positions if not position or known & position.keys()]
    for index, file in files.items():
        if file.exists() and all(position.get(index.stem, -1) >= _last_entry(index)[0] for position in read):
            _delete(file, index)


def _delete(file: Path, index: Path) -> None:
    last = _ENTRY.pack(*_last_entry(index))
    file.unlink()
    staged = index.with_suffix(".last")
    staged.write_bytes(last)
    staged.replace(index)


def _oldest_positions(checkpoint: Path) -> list[dict[str, int]]:
    """The position of each source with offsets by part, at the oldest committed epoch in one of Spark's checkpoints.

    Before the first commit it is the beginning: an epoch that runs, or runs again, reads from its start.
    """
    nothing: list[dict[str, int]] = [{}]
    last = max(_numbers(checkpoint / "commits"), default=-1)
    committed = [epoch for epoch in _numbers(checkpoint / "offsets") if epoch <= last]
    if not committed:
        return nothing
    try:
        offsets = spark_log.offsets_of_sources(checkpoint / "offsets" / str(min(committed)))
    except FileNotFoundError:  # Spark deletes old entries meanwhile
        return nothing
    positions = []
    for offset in offsets:
        with contextlib.suppress(msgspec.DecodeError):  # another kind of source's
            positions.append(msgspec.json.decode(offset, type=dict[str, int]))
    return positions


def _numbers(log: Path) -> list[int]:
    """The epochs in one of Spark's logs."""
    return [int(file.name) for file in log.glob("*") if file.name.isdigit()]


class _Receiver(threading.Thread, Generic[Out]):
    """Takes a source's records and appends them to its log, until another receiver takes over."""

    def __init__(self, source: WrittenAheadSource[Out], log: Path) -> None:
        super().__init__(daemon=True, name=f"receive {source.name}")
        # what `receive` keeps is not the author's object's, which may be shipped or started again
        self._original, self._source, self._log = source, copy.copy(source), log
        self._id = uuid4().hex
        self._groups: queue.Queue[Sequence[Out]] = queue.Queue(_WAITING)
        self._logged = 0
        self._error: Exception | None = None
        self._looked = 0.0
        self._writing = ""
        self._ended = threading.Event()
        self._stopping = threading.Event()
        self._over = threading.Event()
        log.mkdir(parents=True, exist_ok=True)
        (log / "failed").unlink(missing_ok=True)
        (log / "owner").write_text(self._id)

    def receives(self, source: WrittenAheadSource[Any]) -> bool:
        """Whether it is running for this source."""
        return self._original is source and self.is_alive() and not self._stopping.is_set() and self._is_owner()

    def end(self) -> None:
        """Take no more records, and write those that came."""
        self._stopping.set()
        self._ended.set()
        self._stop_source()
        self.join(_END_SECONDS)

    def _stop_source(self) -> None:
        try:
            self._source.stop_receiving()
        except Exception:  # the author's; it stops no job, since what came is written all the same
            _logger.exception("source '%s': stop_receiving failed while the job stopped", self._source.name)

    def look(self, job: Path) -> None:
        """Delete unneeded files, where it is time to."""
        if time.monotonic() - self._looked >= _LOOK and self._writing and self._is_owner():
            self._looked = time.monotonic()
            delete_unneeded(self._log, job, self._writing)

    def run(self) -> None:
        """Write what another thread receives, so that a record that does not come holds nothing up."""
        threading.Thread(target=self._receive, daemon=True, name=f"{self.name}, waiting").start()
        try:
            while not self._ended.is_set() or not self._groups.empty():
                name = self._writing = _next_name(self._log)
                # the index first: a file without one says nothing of what it has
                with (self._log / f"{name}.index").open("xb") as index, (self._log / f"{name}.log").open("xb") as data:
                    if not self._fill(data, index):
                        return
            if self._error is not None and not self._stopping.is_set():
                raise self._error
        except Exception as error:
            if self._is_owner():
                (self._log / "failed").write_text(f"{type(error).__name__}: {error}")
        finally:
            self._over.set()
            if not self._ended.is_set():
                self._stop_source()

    def _receive(self) -> None:
        try:
            for group in self._source.receive_groups():
                if not self._waits_for(group):
                    return
        except Exception as error:
            self._error = error
        finally:
            self._ended.set()

    def _waits_for(self, group: Sequence[Out]) -> bool:
        """Hand a group over; returns False where no further group is taken."""
        while not self._over.is_set():
            try:
                self._groups.put(group, timeout=_WAIT)
            except queue.Full:
                continue
            return not self._stopping.is_set()
        return False

    def _fill(self, data: BinaryIO, index: BinaryIO) -> bool:
        """Fill a file; returns whether another file follows."""
        records = size = 0
        while size < _FILE_BYTES:
            batch = self._some()
            if not self._is_owner():
                return False
            if not batch:
                if self._ended.is_set() and self._groups.empty():
                    return True
                continue
            frame = self._source.records.to_batch(batch).serialize()
            data.write(frame)
            _flush(data)
            records, size = records + len(batch), size + frame.size
            index.write(_ENTRY.pack(records, size))
            _flush(index)
            self._logged += len(batch)
            self._source.on_logged(self._logged)
        return True

    def _some(self) -> list[Out]:
        """The records of a frame: those that come until it is time to write."""
        records: list[Out] = []
        deadline = time.monotonic() + self._source.flush_every.total_seconds()
        while len(records) < _MOST:
            seconds_left = deadline - time.monotonic()
            try:
                records.extend(self._groups.get(timeout=min(max(0.0, seconds_left), _WAIT)))
            except queue.Empty:
                if seconds_left <= _WAIT or self._ended.is_set():
                    break
        return records

    def _is_owner(self) -> bool:
        try:
            return (self._log / "owner").read_text() == self._id
        except OSError:  # the checkpoint directory is gone
            return False


def _next_name(log: Path) -> str:
    """A name after those of all files of a log, also where the clock has gone back."""
    newest = max((int(file.stem.partition("-")[0]) for file in log.glob("*.index")), default=0)
    return f"{max(time.time_ns(), newest + 1):020d}"


def _flush(file: BinaryIO) -> None:
    file.flush()
    os.fsync(file.fileno())


def _whole(index: Path) -> int:
    """The bytes of an index that are whole entries."""
    size = index.stat().st_size
    return size - size % _ENTRY.size


def _last_entry(index: Path) -> tuple[int, int]:
    end = _whole(index)
    if not end:
        return 0, 0
    with index.open("rb") as file:
        file.seek(end - _ENTRY.size)
        records, size = _ENTRY.unpack(file.read(_ENTRY.size))
        return int(records), int(size)
