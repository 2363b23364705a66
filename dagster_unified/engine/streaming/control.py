"""The control stream: a tiny source of a query whose offsets *are* the control events.

The driver writes the latest event into its checkpoint directory; Spark's planner asks this source for its latest
offset, which is that event, and logs it. So a replayed micro-batch gets the very events that it got before, and no
files pile up.

The source is `ControlStream.java` where the JVM is the driver's own: it is told each event, and needs no process. On a
Connect server it is `ControlSource`, for which Spark starts a Python process that reads the file. Offsets are the same
either way, so that a job may go on with one what it began with the other.
"""

from __future__ import annotations

import contextlib
import json
import logging
from collections.abc import Callable, Iterator
from threading import Lock
from typing import TYPE_CHECKING, Any

import msgspec
import pyarrow as pa
from pyspark.sql.datasource import DataSource, DataSourceStreamReader, InputPartition

from dagster_unified.engine.streaming.atomic import AlternatingFiles
from dagster_unified.errors import LeaseLostError
from dagster_unified.operators.drivers.key_groups import ControlEvent
from dagster_unified.spark_internals.java_class import FOLDER, JavaClass
from dagster_unified.spark_internals.spark_log import offsets_of_sources
from dagster_unified.storage.object_store import is_connect
from dagster_unified.storage.paths import storage_path

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession
    from upath import UPath

_NAME = "dagster_unified_control"
_CLASS = JavaClass("dagster_unified.ControlStream", FOLDER / "ControlStream.java")

_log = logging.getLogger(__name__)


class ControlFile:
    """The file of the latest event. Safe for several threads of the driver, whose events may overtake."""

    def __init__(self, folder: str) -> None:
        self.folder = storage_path(folder, "checkpoint directory")
        self._files = AlternatingFiles(self.folder, ControlEvent, _number)
        self._lock = Lock()
        self._written = 0
        self._publish: Callable[[str, str], None] | None = None

    def read(self) -> ControlEvent | None:
        """Return the latest event, or None before the first."""
        return self._files.read()

    def claim(self, token: int) -> None:
        """Refuse late writes of jobs with smaller tokens from now on."""
        with _fenced(self.folder):
            self._files.claim(token)

    def write(self, event: ControlEvent) -> None:
        """Make `event` the latest, unless a later one is; the one before it stays readable meanwhile."""
        with self._lock:
            if event.number > self._written:
                with _fenced(self.folder):
                    self._files.write(event)
                self._written = event.number
                self._tell(event)

    def stream(self, spark: SparkSession) -> DataFrame:
        """Return the control stream: a row with the latest event, in each micro-batch with a new one."""
        if not is_connect(spark) and self._begins_to_tell(spark):
            return spark.readStream.format(_CLASS.name).option("path", str(self.folder)).load()
        spark.dataSource.register(ControlSource)
        return spark.readStream.format(_NAME).option("path", str(self.folder)).load()

    def _begins_to_tell(self, spark: SparkSession) -> bool:
        """Send the JVM the latest event and, from now on, each one; False where it cannot have the class."""
        from py4j.protocol import Py4JError

        try:
            _CLASS.install(spark)
            with self._lock:
                self._publish = getattr(spark._jvm, _CLASS.name).publish
                self._tell(self.read())
        except Py4JError as error:
            _log.warning(
                "%s: a Python process looks for control events there, a hundred times a second, because the class that"
                " is told of them cannot be made in this Spark: %s",
                self.folder,
                " ".join(str(error).splitlines()[:2]),
            )
            return False
        return True

    def _tell(self, event: ControlEvent | None) -> None:
        if self._publish is None:
            return
        from py4j.protocol import Py4JNetworkError

        with contextlib.suppress(Py4JNetworkError):  # the JVM is gone, as the query says
            self._publish(str(self.folder), json.dumps(_offset(event)))


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
    """Return an epoch's latest control event, by its entry in Spark's log of offsets."""
    for line in offsets_of_sources(entry):
        with contextlib.suppress(msgspec.DecodeError):  # another source's
            return msgspec.json.decode(msgspec.json.decode(line, type=_Sent).event, type=ControlEvent)
    return ControlEvent()


def brings_end(entry: UPath) -> bool:
    """Return whether an epoch's entry in Spark's log of offsets has the end of the input."""
    return event_of(entry).end


def _offset(event: ControlEvent | None) -> dict[str, Any]:
    """Return the control stream's offset at an event, or the one before the first."""
    if event is None:
        return {"number": 0}
    sent = msgspec.structs.replace(event, parts={})  # of which there may be many, and no key group needs them
    return {"number": event.number, "event": msgspec.json.encode(sent).decode()}


class _Sent(msgspec.Struct):
    """An offset of the control stream, after the first event."""

    number: int
    event: str


class ControlSource(DataSource):
    """The Spark data source; its option `path` is the control file's folder."""

    @classmethod
    def name(cls) -> str:
        return _NAME

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
        return _offset(None)

    def latestOffset(self) -> dict[str, Any]:  # type: ignore[override]  # noqa: N802 - Spark's name
        return _offset(ControlFile(self._path).read())

    def partitions(self, start: dict[str, Any], end: dict[str, Any]) -> list[InputPartition]:
        return [_Events(end["event"])] if end["number"] > start["number"] else []

    def read(self, partition: Any) -> Iterator[pa.RecordBatch]:
        yield pa.RecordBatch.from_pydict({"event": [partition.event]})

    def commit(self, end: dict[str, Any]) -> None:
        """Do nothing: what lies behind the offset is not kept."""
