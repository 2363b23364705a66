"""Sources that cannot be asked for a record twice: a Python generator, a socket.

What they give is appended to a log in the checkpoint directory before anything processes it (write-ahead log, section
3.3 of the Flink paper). The log can be read again, so results are exactly-once from there on.

The log is a folder of files, of which a job that starts begins a new one. A file has frames, each an Arrow record
batch; its index has an entry for each frame that is whole and on disk. Knows the protocol of splits; not who reads.
"""

from __future__ import annotations

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
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO, Generic
from uuid import uuid4

import pyarrow as pa

from dagster_unified.connectors.paths import is_local
from dagster_unified.connectors.splits import Malformed, Offsets, SplitSource
from dagster_unified.errors import PipelineError, StageError, UnsupportedError
from dagster_unified.graph.connectors import Boundedness
from dagster_unified.operators.functions.type_variables import Out
from dagster_unified.records import record_type

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession
    from typing_extensions import TypeForm
    from upath import UPath

_ENTRY = struct.Struct("<QQ")
"""An entry of an index: the records and the bytes of the file up to the end of a frame."""

_MOST = 50_000
"""Records in a frame at most."""

_FILE_BYTES = 64 << 20
"""Bytes after which a new file begins."""

_WAITING = 200_000
"""Records that may wait to be written; then whoever gives them waits."""

Split = tuple[str, int, int]
"""A file, the first of its records to read, and the one behind the last."""


class WrittenAheadSource(SplitSource[Out]):
    """A source whose records come once. Only STREAMING reads it; it does not end.

    A connector implements `receive`, which a thread of the driver calls when a job starts. Its records are on disk, and
    part of every savepoint, at most about `flush_every` later; only what comes in between is lost with the driver. An
    error of `receive` fails the job, and the restart strategy starts it again.

    The log lies in the checkpoint directory, which has to be on a disk that the driver and all workers see. It is not
    deleted by itself.
    """

    boundedness = Boundedness.UNBOUNDED
    flush_every: timedelta = timedelta(milliseconds=100)
    _log: str | None = None

    @abstractmethod
    def receive(self) -> Iterable[Out]:
        """The records, as they come."""

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
            held = _receivers.get(log)
            if held is None or not held.receives(self):
                _receivers[log] = _Receiver(self, log)
                _receivers[log].start()
        return _Log(self, str(log)).from_log(spark, folder)

    def from_log(self, spark: SparkSession, folder: UPath) -> DataFrame:
        """The stream of what the log has."""
        return super().read_stream(spark, folder)

    def newest(self) -> Offsets:
        log = self._folder()
        failed = log / "failed"
        if failed.exists():
            raise StageError(f"source '{self.name}': {self.describe()} has failed: {failed.read_text()}")
        return {file.stem: _last(file)[0] for file in sorted(log.glob("*.index"))}

    def oldest(self) -> Offsets:
        return {file.stem: 0 for file in sorted(self._folder().glob("*.index"))}

    def splits(self, start: Offsets, end: Offsets) -> Sequence[Split]:
        return [(file, start[file], last) for file, last in sorted(end.items()) if last > start[file]]

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

    def _folder(self) -> Path:
        if self._log is None:
            raise UnsupportedError(f"source '{self.name}': {self.describe()} is read by STREAMING only")
        return Path(self._log)


class _Log(WrittenAheadSource[Out]):
    """What travels to Spark's processes: what can be said of a source, and its log, but not what receives."""

    def __init__(self, source: WrittenAheadSource[Out], log: str) -> None:
        self.name, self.kind, self.records, self.behind = source.name, source.kind, source.records, source.behind
        self.max_records_per_trigger = source.max_records_per_trigger
        self.partition_columns = source.partition_columns
        self._description, self._log = source.describe(), log

    def describe(self) -> str:
        return self._description

    def receive(self) -> Iterable[Out]:
        raise NotImplementedError


class GeneratorSource(WrittenAheadSource[Out]):
    """The records that a function yields, called once on the driver when a STREAMING job starts. Unbounded.

    For what has no connector and cannot be asked again, such as a client's subscription. A job that is started again
    calls the function again.

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

    def __init__(self, host: str, port: int, name: str = "socket") -> None:
        self.host, self.port, self.name = host, port, name
        self.records = record_type(str, f"source '{name}'")

    def describe(self) -> str:
        return f"lines from {self.host}:{self.port}"

    def receive(self) -> Iterator[str]:
        with socket.create_connection((self.host, self.port), timeout=10) as connection:
            connection.settimeout(None)
            with connection.makefile("r", encoding="utf-8", errors="replace", newline="\n") as lines:
                for line in lines:
                    yield line.rstrip("\r\n")
        raise ConnectionError("the server has closed the connection")


_starting = threading.Lock()
_receivers: dict[Path, _Receiver[Any]] = {}
"""Those of this process, by their log: several queries of a job read one source."""


class _Receiver(threading.Thread, Generic[Out]):
    """Takes a source's records and appends them to its log, until another receiver takes over."""

    def __init__(self, source: WrittenAheadSource[Out], log: Path) -> None:
        super().__init__(daemon=True, name=f"receive {source.name}")
        self._source, self._log = source, log
        self._id = uuid4().hex
        self._records: queue.Queue[Out] = queue.Queue(_WAITING)
        self._error: Exception | None = None
        self._ended = threading.Event()
        self._over = threading.Event()
        log.mkdir(parents=True, exist_ok=True)
        (log / "failed").unlink(missing_ok=True)
        (log / "owner").write_text(self._id)

    def receives(self, source: WrittenAheadSource[Any]) -> bool:
        """Whether it is at work for this source."""
        return self._source is source and self.is_alive() and self._is_owner()

    def run(self) -> None:
        """Write what another thread receives: a record that does not come must not hold up those that came."""
        threading.Thread(target=self._receive, daemon=True, name=f"{self.name}, waiting").start()
        number = 0
        try:
            while not self._ended.is_set() or not self._records.empty():
                name = f"{time.time_ns():020d}-{number}"
                with (self._log / f"{name}.log").open("xb") as data, (self._log / f"{name}.index").open("xb") as index:
                    if not self._fill(data, index):
                        return
                number += 1
            if self._error is not None:
                raise self._error
        except Exception as error:
            if self._is_owner():
                (self._log / "failed").write_text(f"{type(error).__name__}: {error}")
        finally:
            self._over.set()

    def _receive(self) -> None:
        try:
            for record in self._source.receive():
                if not self._waits_for(record):
                    return
        except Exception as error:
            self._error = error
        finally:
            self._ended.set()

    def _waits_for(self, record: Any) -> bool:
        """Hands a record over; returns False where nobody writes any more."""
        while not self._over.is_set():
            try:
                self._records.put(record, timeout=0.1)
            except queue.Full:
                continue
            return True
        return False

    def _fill(self, data: BinaryIO, index: BinaryIO) -> bool:
        """Fill a file; returns whether another is to follow."""
        records = size = 0
        while size < _FILE_BYTES:
            batch = self._some()
            if not self._is_owner():
                return False
            if not batch:
                if self._ended.is_set() and self._records.empty():
                    return True
                continue
            frame = self._source.records.to_batch(batch).serialize()
            data.write(frame)
            _flush(data)
            records, size = records + len(batch), size + frame.size
            index.write(_ENTRY.pack(records, size))
            _flush(index)
        return True

    def _some(self) -> list[Out]:
        """The records of a frame: those that come until it is time to write."""
        found: list[Out] = []
        deadline = time.monotonic() + self._source.flush_every.total_seconds()
        while len(found) < _MOST:
            try:
                found.append(self._records.get(timeout=max(0.0, deadline - time.monotonic())))
            except queue.Empty:
                break
        return found

    def _is_owner(self) -> bool:
        try:
            return (self._log / "owner").read_text() == self._id
        except OSError:  # the checkpoint directory is gone
            return False


def _flush(file: BinaryIO) -> None:
    file.flush()
    os.fsync(file.fileno())


def _whole(index: Path) -> int:
    """The bytes of an index that are whole entries."""
    size = index.stat().st_size
    return size - size % _ENTRY.size


def _last(index: Path) -> tuple[int, int]:
    """The last entry of an index."""
    end = _whole(index)
    if not end:
        return 0, 0
    with index.open("rb") as file:
        file.seek(end - _ENTRY.size)
        records, size = _ENTRY.unpack(file.read(_ENTRY.size))
        return int(records), int(size)
