"""The control stream: a tiny source of a query whose offsets *are* the control events.

The driver writes the latest event into its checkpoint directory; Spark's planner asks this source for its latest
offset, which is that event, and logs it. So a replayed micro-batch gets the very events that it got before, and no
files pile up.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from tempfile import TemporaryDirectory
from threading import Lock
from typing import TYPE_CHECKING, Any

import msgspec
import pyarrow as pa
from pyspark.sql.datasource import DataSource, DataSourceStreamReader, InputPartition

from dagster_unified.connectors.paths import is_local, storage_path
from dagster_unified.connectors.spark_log import offsets_of_sources
from dagster_unified.engine.streaming.atomic import AlternatingFiles
from dagster_unified.errors import LeaseLostError
from dagster_unified.operators.drivers.key_groups import ControlEvent

if TYPE_CHECKING:
    from pyspark.sql import SparkSession
    from upath import UPath

NAME = "dagster_unified_control"


class ControlFile:
    """Where the latest event is kept. Safe for several threads of the driver, whose events may overtake each other."""

    def __init__(self, folder: str) -> None:
        self.folder = storage_path(folder, "checkpoint directory")
        self._files = AlternatingFiles(self.folder, ControlEvent, _number)
        self._lock = Lock()
        self._written = 0
        self._copy: tuple[TemporaryDirectory[str], AlternatingFiles[ControlEvent]] | None = None

    def read(self) -> ControlEvent | None:
        """The latest event, or None before the first."""
        return self._files.read()

    def claim(self, token: int) -> None:
        """Refuse from now on what jobs with smaller tokens write late."""
        with _fenced(self.folder):
            self._files.claim(token)

    def write(self, event: ControlEvent) -> None:
        """Makes `event` the latest, unless a later one is; the one before it stays readable meanwhile."""
        with self._lock:
            if event.number > self._written:
                with _fenced(self.folder):
                    self._files.write(event)
                if self._copy is not None:
                    self._copy[1].write(event)
                self._written = event.number

    def near(self, spark: SparkSession) -> str:
        """A folder near Spark's driver with the latest event, for a source that looks a hundred times a second.

        Of a folder in a bucket it is a copy, which has what this object writes, unless the driver is a server's.
        """
        from dagster_unified.engine.session import is_connect  # not needed where the source is

        if is_local(self.folder) or is_connect(spark):
            return str(self.folder)
        with self._lock:
            if self._copy is None:
                folder = TemporaryDirectory(prefix="dagster-unified-")
                self._copy = folder, AlternatingFiles(storage_path(folder.name, "control"), ControlEvent, _number)
                event = self.read()
                if event is not None:
                    self._copy[1].write(event)
            return self._copy[0].name


def _number(event: ControlEvent) -> int:
    return event.number


@contextlib.contextmanager
def _fenced(folder: UPath) -> Iterator[None]:
    try:
        yield
    except FileExistsError as error:
        raise LeaseLostError(
            f"{folder}: another job has taken over, and writes the control events; this one stops and writes nothing"
            " more"
        ) from error


def event_of(entry: UPath) -> ControlEvent:
    """The latest control event that an epoch had, by its entry in Spark's log of offsets."""
    for line in offsets_of_sources(entry):
        with contextlib.suppress(msgspec.DecodeError):  # another source's
            return msgspec.json.decode(msgspec.json.decode(line, type=_Sent).event, type=ControlEvent)
    return ControlEvent()


def brings_end(entry: UPath) -> bool:
    """Whether an epoch's entry in Spark's log of offsets has the end of the input."""
    return event_of(entry).end


class _Sent(msgspec.Struct):
    """An offset of the control stream, after the first event."""

    number: int
    event: str


class ControlSource(DataSource):
    """The Spark data source; its option `path` is the control file's folder."""

    @classmethod
    def name(cls) -> str:
        return NAME

    def schema(self) -> str:
        return "event string"

    def streamReader(self, schema: Any) -> DataSourceStreamReader:  # noqa: N802 - Spark's name
        return _Reader(str(self.options["path"]))


class _Events(InputPartition):
    def __init__(self, event: str) -> None:
        self.event = event


class _Reader(DataSourceStreamReader):
    def __init__(self, path: str) -> None:
        self._path = path

    def initialOffset(self) -> dict[str, Any]:  # noqa: N802 - Spark's name
        return {"number": 0}

    def latestOffset(self) -> dict[str, Any]:  # type: ignore[override]  # noqa: N802 - Spark's name
        event = ControlFile(self._path).read()
        if event is None:
            return self.initialOffset()
        sent = msgspec.structs.replace(event, parts={})  # of which there may be many, and no key group needs them
        return {"number": event.number, "event": msgspec.json.encode(sent).decode()}

    def partitions(self, start: dict[str, Any], end: dict[str, Any]) -> list[InputPartition]:
        return [_Events(end["event"])] if end["number"] > start["number"] else []

    def read(self, partition: Any) -> Iterator[pa.RecordBatch]:
        yield pa.RecordBatch.from_pydict({"event": [partition.event]})

    def commit(self, end: dict[str, Any]) -> None:
        """Nothing is kept for what is behind."""
